#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

// Processes 0 and 1 are on one machine, 2 and 3 on another.
class ClusterObjectsTest : public ClusterTest {
 protected:
  ObjectRef Put(int at, const std::string& bytes) {
    Objects& objects = *clusters_[at]->objects();
    ObjectRef ref;
    objects.Create(bytes.size(), kSoon, [&](absl::StatusOr<Objects::Draft> draft) {
      ASSERT_TRUE(draft.ok()) << draft.status();
      ASSERT_TRUE(draft->memory->Write(0, bytes.data(), bytes.size()).ok());
      ref = objects.Seal(*draft, bytes.size());
    });
    return ref;
  }
  absl::StatusOr<std::string> Get(int at, const ObjectRef& ref) {
    Answers answers;
    clusters_[at]->objects()->Get(
        ref, kSoon, [reply = answers.Taker()](absl::StatusOr<Objects::Bytes> bytes) mutable {
          reply(bytes.status(), bytes.ok() ? absl::string_view(bytes->memory->data(), bytes->size) : "");
        });
    return answers.Get();
  }
};

TEST_F(ClusterObjectsTest, ObjectsAreFetchedOnceAMachine) {
  Open(4);
  const std::string bytes(10 << 20, 'x');
  const ObjectRef ref = Put(0, bytes);
  for (const int at : {0, 1, 2, 3}) EXPECT_EQ(*Get(at, ref), bytes);
  EXPECT_EQ(clusters_[1]->objects()->usage().bytes, 0u);
  EXPECT_EQ(clusters_[2]->objects()->usage().copies, 1u);
  EXPECT_EQ(clusters_[3]->objects()->usage().bytes, 0u);
  clusters_[0]->objects()->Release(ref.id, absl::ZeroDuration());
  EXPECT_THAT(Get(1, ref).status().message(), HasSubstr("of rank 0 (node-0) is no more"));
}

TEST_F(ClusterObjectsTest, WithItsProcessAnObjectIsLost) {
  Open(4);
  const ObjectRef ref = Put(3, "some bytes");
  job_.Begin({0, 1, 2});
  clusters_.erase(3);
  const auto lost = Get(0, ref);
  EXPECT_EQ(lost.status().code(), absl::StatusCode::kUnavailable) << lost.status();
  EXPECT_THAT(lost.status().message(), HasSubstr("is lost with its process"));
}

}  // namespace
}  // namespace gtrain::actors

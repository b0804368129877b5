// What a transport makes of members that say things by hand, piece by piece. In a child, because UCX stays in
// the process that loads it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "comm/port/bootstrap.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/fabric_transport.h"
#include "comm/ucx/message.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr ContextId kId{.generation = 3, .context = 7};

bool UcxHere() {
  const char* build = getenv("GTRAIN_BUILD_DIR");
  return build == nullptr || std::filesystem::exists(absl::StrCat(build, "/lib/libgtrain_comm_ucx.so"));
}

// Of member 0 among three machines, for what a transport asks.
class ThreeMachines final : public Bootstrap {
 public:
  ThreeMachines() {
    for (const char* node : {"a", "b", "c"}) {
      members_.push_back(
          {.rank = static_cast<int>(members_.size()), .node = NodeId(node), .address = "127.0.0.1"});
    }
  }
  int rank() const override { return 0; }
  int world_size() const override { return static_cast<int>(members_.size()); }
  Generation generation() const override { return Generation{1}; }
  const std::vector<Member>& members() const override { return members_; }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view, absl::Duration) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<UniqueFd> Arena(uint64_t, uint64_t, absl::Duration) override {
    return absl::UnimplementedError("");
  }
  void FreeArena(uint64_t) override {}
  absl::Status Alive() const override {
    return revoked_ ? absl::UnavailableError("revoked") : absl::OkStatus();
  }
  void Revoke() { revoked_ = true; }

 private:
  std::vector<Member> members_;
  std::atomic<bool> revoked_ = false;
};

// Member `self` above 0 of a communicator whose member 0 is a transport.
class ByHand final : public Fabric::Context {
 public:
  ByHand(std::shared_ptr<Fabric> fabric, uint64_t self) : fabric_(std::move(fabric)), self_(self) {
    Fabric::Lock lock(fabric_.get());
    fabric_->Add(kId, this);
  }
  ~ByHand() override {
    Fabric::Lock lock(fabric_.get());
    fabric_->Remove(kId);
    if (zero_ != nullptr) fabric_->Drop(zero_);
  }

  const std::string& Address() const { return fabric_->address(); }
  bool Reach(const std::string& zero) {
    Fabric::Lock lock(fabric_.get());
    const auto reached = fabric_->Reach(zero);
    if (!reached.ok()) return false;
    fabric_->Want(zero_ = *reached);
    return true;
  }
  // To member 0, in one piece.
  bool Say(MessageKind kind, absl::string_view bytes) {
    Fabric::Lock lock(fabric_.get());
    MessageHeader header;
    header.kind = kind;
    header.generation = kId.generation;
    header.context = kId.context;
    header.sender = self_;
    header.total = bytes.size();
    fabric_->Post(zero_, header, bytes);
    fabric_->LetLeave();
    return Wait([&] { return Fabric::Up(zero_); });
  }
  // Whether member 0, which says nothing more afterwards, had sent a notice.
  bool WasNotified(absl::Duration patience) {
    Fabric::Lock lock(fabric_.get());
    return Wait([&] { return !notices_.empty(); }, patience);
  }

  void Hear(const MessageHeader& header, absl::string_view bytes) override {
    if (header.kind == MessageKind::kGaveUp) notices_.emplace_back(bytes.data(), bytes.size());
  }

 private:
  bool Wait(absl::FunctionRef<bool()> over,
            absl::Duration patience = kPatience) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const Instant end = RealClock().Now() + patience;
    return fabric_
        ->Until(over,
                [&] { return RealClock().Now() < end ? absl::OkStatus() : absl::DeadlineExceededError(""); })
        .ok();
  }

  const std::shared_ptr<Fabric> fabric_;
  const uint64_t self_;
  Fabric::Peer* zero_ = nullptr;
  std::vector<std::string> notices_;
};

// Member 1 says `words` of its end; then member 0 gives up. What member 0 heard, and whether member 2 was
// told by it.
struct Said {
  std::string words;
  bool told = false;
};
absl::StatusOr<Said> HearOf(const std::string& words) {
  ThreeMachines bootstrap;
  const Watch watch(&bootstrap, kPatience);
  std::shared_ptr<Fabric> fabrics[3];
  for (auto& fabric : fabrics) {
    auto opened = Fabric::Open("127.0.0.1", "");
    if (!opened.ok()) return opened.status();
    fabric = *std::move(opened);
  }
  ByHand one(fabrics[1], 1), two(fabrics[2], 2);
  auto transport = OpenFabricTransport(fabrics[0], kId, nullptr);
  const absl::Status connected = transport->Connect({fabrics[0]->address(), one.Address(), two.Address()}, 0);
  if (!connected.ok()) return connected;

  char bytes[2];
  const Transfer transfers[] = {{1, false, &bytes[0], 1}, {2, false, &bytes[1], 1}};
  absl::Status exchanged;
  std::thread exchange([&] {
    exchanged = transport->Exchange(
        transfers, [](size_t) {}, watch);
  });
  const bool greeted = one.Reach(fabrics[0]->address()) && two.Reach(fabrics[0]->address()) &&
                       one.Say(MessageKind::kData, "1") && two.Say(MessageKind::kData, "2");
  if (!greeted) bootstrap.Revoke();
  exchange.join();
  if (!exchanged.ok() || !greeted) return exchanged;
  if (bytes[0] != '1' || bytes[1] != '2') return absl::InternalError("other bytes");

  if (!words.empty() && !one.Say(MessageKind::kGaveUp, words))
    return absl::InternalError("it does not leave");
  Said said;
  const Instant give_up = RealClock().Now() + kPatience;
  while (!words.empty() && said.words.empty() && RealClock().Now() < give_up)
    said.words = std::string(transport->Heard().message());
  transport->Fail("rank 0 gave up: words");
  said.told = two.WasNotified(words.empty() ? kPatience : absl::Milliseconds(300));
  return said;
}

// Number of the first thing that is wrong.
int Child() {
  const auto itself = HearOf("");
  if (!itself.ok()) return std::fprintf(stderr, "%s\n", itself.status().ToString().c_str()), 2;
  if (!itself->told) return 3;
  // Who sent a notice has told the others: one more of each that heard it would be n times n messages.
  const auto longest = HearOf(std::string(kNoticeBytesMax, 'x'));
  if (!longest.ok()) return std::fprintf(stderr, "%s\n", longest.status().ToString().c_str()), 4;
  if (longest->words != std::string(kNoticeBytesMax, 'x')) return 5;
  if (longest->told) return 6;
  // Its length is the peer's word alone.
  const auto longer = HearOf(std::string(kNoticeBytesMax + 1, 'x'));
  if (!longer.ok()) return 7;
  if (longer->words != "member 1 gave up; why did not arrive") return 8;
  return 0;
}

TEST(UcxNotices, NeitherTooLongNorRepeated) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  const pid_t pid = fork();
  if (pid == 0) _exit(Child());
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace gtrain::comm

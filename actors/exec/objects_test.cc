#include "actors/exec/objects.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60), kShort = absl::Milliseconds(30);

template <typename T>
class Heard {
 public:
  Objects::Hears<T> Taker() {
    return [state = state_](absl::StatusOr<T> result) {
      MutexLock lock(&state->mutex);
      state->result.emplace(std::move(result));
    };
  }
  absl::StatusOr<T> Get() {
    MutexLock lock(&state_->mutex);
    state_->mutex.AwaitFor(kLong, [&] { return state_->result.has_value(); });
    return state_->result ? *std::exchange(state_->result, std::nullopt)
                          : absl::DeadlineExceededError("nothing was heard");
  }
  bool there() {
    MutexLock lock(&state_->mutex);
    return state_->result.has_value();
  }

 private:
  struct State {
    Mutex mutex;
    std::optional<absl::StatusOr<T>> result;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Processes of two machines, two on each: 0 and 1 on the first.
class ObjectsTest : public ::testing::Test {
 protected:
  ObjectsTest() { Open({.bytes_max = 64 << 20, .objects_max = 8}); }
  void Open(const ObjectOptions& options) {
    for (uint64_t i = 0; i < 4; ++i) {
      Objects::Functions functions;
      functions.ask = [this](const CallerId& process, Control method, const std::string& arguments,
                             absl::Duration timeout, Reply reply) {
        ++asked_;
        const auto at = process.low - 1;
        if (hold_ && method == Control::kPart) {
          held_.push_back([this, at, arguments, reply = std::move(reply)]() mutable {
            if (gone_ == static_cast<int>(at)) return reply(absl::UnavailableError("rank is gone"), {});
            all_[at]->OnPart(*ParsePart(arguments), std::move(reply));
          });
          return;
        }
        if (gone_ == static_cast<int>(at)) return reply(absl::UnavailableError("rank is gone"), {});
        if (method == Control::kCopy)
          return all_[at]->OnCopy(*ParseObject(arguments), timeout, std::move(reply));
        parts_ += 1;
        all_[at]->OnPart(*ParsePart(arguments), std::move(reply));
      };
      functions.is_near = [this, i](const CallerId& process) {
        return near_ && (process.low - 1) / 2 == i / 2;
      };
      functions.copies_at = [i] { return CallerId{9, i / 2 * 2 + 1}; };
      functions.name = [](const CallerId& process) { return absl::StrCat("rank ", process.low - 1); };
      all_[i] = std::make_shared<Objects>(CallerId{9, i + 1}, options, functions, clock_);
    }
  }
  ~ObjectsTest() override {
    for (const auto& one : all_) one->Close();
  }

  absl::StatusOr<Objects::Draft> Create(uint64_t at, uint64_t bytes, absl::Duration timeout = kLong) {
    Heard<Objects::Draft> heard;
    all_[at]->Create(bytes, timeout, heard.Taker());
    return heard.Get();
  }
  ObjectRef Put(uint64_t at, const std::string& bytes) {
    auto draft = Create(at, bytes.size());
    EXPECT_TRUE(draft.ok()) << draft.status();
    if (!draft.ok()) return {};
    EXPECT_TRUE(draft->memory->Write(0, bytes.data(), bytes.size()).ok());
    return all_[at]->Seal(*draft, bytes.size());
  }
  absl::StatusOr<Objects::Bytes> Get(uint64_t at, const ObjectRef& ref, absl::Duration timeout = kLong) {
    Heard<Objects::Bytes> heard;
    all_[at]->Get(ref, timeout, heard.Taker());
    return heard.Get();
  }
  static std::string Text(const absl::StatusOr<Objects::Bytes>& bytes) {
    if (!bytes.ok()) return std::string(bytes.status().message());
    return {bytes->memory->data(), bytes->size};
  }

  void LetGo() {
    hold_ = false;
    for (auto& one : std::exchange(held_, {})) one();
  }

  RealClock clock_;
  bool hold_ = false;  // what is asked for is not answered
  std::vector<absl::AnyInvocable<void()>> held_;
  std::atomic<int> asked_ = 0, parts_ = 0, gone_ = -1;
  bool near_ = true;
  std::shared_ptr<Objects> all_[4];
};

TEST_F(ObjectsTest, ReadersOfOneMachineMapWhatIsThere) {
  const ObjectRef ref = Put(1, "some bytes");
  EXPECT_EQ(Text(Get(1, ref)), "some bytes");
  const auto read = Get(0, ref);
  EXPECT_EQ(Text(read), "some bytes");
  EXPECT_EQ(asked_, 0);
  EXPECT_EQ(all_[0]->usage().bytes, 0u);
  all_[1]->Release(ref.id, absl::ZeroDuration());
  EXPECT_EQ(Text(read), "some bytes");  // whoever has it goes on reading
  EXPECT_THAT(Text(Get(0, ref)), HasSubstr("object 1 of rank 1 is no more"));
  EXPECT_EQ(Get(1, ref).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Get(2, ref).status().code(), absl::StatusCode::kNotFound);
}

// A MiB is fetched with a call.
TEST_F(ObjectsTest, AnotherMachineFetchesItOnce) {
  std::string bytes(9 << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 1000);
  const ObjectRef ref = Put(0, bytes);
  EXPECT_EQ(Text(Get(3, ref)), bytes);
  EXPECT_EQ(Text(Get(2, ref)), bytes);
  EXPECT_EQ(Text(Get(3, ref)), bytes);
  EXPECT_EQ(parts_, 9);
  EXPECT_EQ(all_[2]->usage().copies, 1u);
  EXPECT_EQ(all_[3]->usage().bytes, 0u);
}

TEST_F(ObjectsTest, WhatCannotBeMappedIsFetched) {
  ObjectRef ref = Put(0, "some bytes");
  ref.pid = 1 << 30;  // of another /proc
  EXPECT_EQ(Text(Get(1, ref)), "some bytes");
  EXPECT_EQ(parts_, 1);
}

TEST_F(ObjectsTest, AnEmptyOneIsAnObject) {
  const ObjectRef ref = Put(0, "");
  for (const uint64_t at : {0, 1, 2, 3}) EXPECT_EQ(Get(at, ref)->size, 0u);
}

TEST_F(ObjectsTest, WhoseOwnerIsGoneIsAnErrorThatNamesIt) {
  near_ = false;
  const ObjectRef ref = Put(1, "some bytes");
  gone_ = 1;
  const auto read = Get(2, ref);
  EXPECT_EQ(read.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(read), HasSubstr("object 1 of rank 1 is lost with its process"));
  EXPECT_EQ(all_[2]->usage().copies, 0u);
  EXPECT_EQ(all_[2]->usage().objects, 0u);
}

// Who has the copies of the machine is gone, and each fetches for itself.
TEST_F(ObjectsTest, WithoutWhoHasTheCopiesEachHasItsOwn) {
  const ObjectRef ref = Put(0, "some bytes");
  gone_ = 2;
  EXPECT_EQ(Text(Get(3, ref)), "some bytes");
  EXPECT_EQ(all_[3]->usage().copies, 1u);
}

TEST_F(ObjectsTest, WhoWantsMoreThanThereIsRoomForWaits) {
  const ObjectRef first = Put(0, std::string(40 << 20, 'x'));
  Heard<Objects::Draft> heard;
  all_[0]->Create(40 << 20, kLong, heard.Taker());
  EXPECT_FALSE(heard.there());
  EXPECT_EQ(all_[0]->usage().waiting, 1u);
  Heard<Objects::Draft> behind;  // there is room for it, but not before the one that came first
  all_[0]->Create(1, kLong, behind.Taker());
  EXPECT_FALSE(behind.there());
  all_[0]->Release(first.id, absl::ZeroDuration());
  EXPECT_TRUE(heard.Get().ok());
  EXPECT_TRUE(behind.Get().ok());
  const auto refused = Create(0, 40 << 20, kShort);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("no room for an object of 40MiB"));
  EXPECT_THAT(Create(0, 65 << 20).status().message(), HasSubstr("64MiB at most"));
}

// Also of processes that say nothing.
TEST_F(ObjectsTest, WhatIsReadAfterItsEndIsCountedUntilItIsNot) {
  const ObjectRef ref = Put(0, std::string(40 << 20, 'x'));
  absl::StatusOr<Objects::Bytes> near = Get(1, ref), own = Get(0, ref);
  ASSERT_TRUE(near.ok() && own.ok());
  all_[0]->Release(ref.id, absl::ZeroDuration());
  Heard<Objects::Draft> heard;
  all_[0]->Create(40 << 20, kLong, heard.Taker());
  own = absl::CancelledError();
  // Behind it another one waits in vain, and meanwhile readers are looked for.
  EXPECT_EQ(Create(0, 40 << 20, kShort).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(heard.there());
  EXPECT_EQ(near->memory->data()[12345], 'x');
  near = absl::CancelledError();
  EXPECT_TRUE(heard.Get().ok());
}

// The kernel releases what a process that was killed has read.
TEST_F(ObjectsTest, AReaderThatIsKilledKeepsNothing) {
  const ObjectRef ref = Put(0, std::string(40 << 20, 'x'));
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = ObjectMemory::Open(ref);
    const char told = opened.ok() && (*opened)->data()[5] == 'x' ? 'y' : 'n';
    (void)!write(ready[1], &told, 1);
    for (;;) pause();
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  EXPECT_EQ(told, 'y');
  all_[0]->Release(ref.id, absl::ZeroDuration());
  Heard<Objects::Draft> heard;
  all_[0]->Create(40 << 20, kLong, heard.Taker());
  EXPECT_FALSE(heard.there());
  kill(child, SIGKILL);
  EXPECT_TRUE(heard.Get().ok());
  waitpid(child, nullptr, 0);
}

TEST_F(ObjectsTest, MemoryIsUsedAgainAndNamesAreNot) {
  const ObjectRef before = Put(0, std::string(1 << 20, 'a'));
  all_[0]->Release(before.id, absl::ZeroDuration());
  const ObjectRef after = Put(0, std::string(1 << 20, 'b'));
  EXPECT_EQ(after.descriptor, before.descriptor);
  EXPECT_EQ(Get(1, before).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Text(Get(1, after)), std::string(1 << 20, 'b'));
}

TEST_F(ObjectsTest, CopiesMakeRoomForWhatIsWanted) {
  std::vector<ObjectRef> refs;
  for (int i = 0; i < 3; ++i) refs.push_back(Put(0, std::string(20 << 20, static_cast<char>('a' + i))));
  for (int round = 0; round < 2; ++round) {
    for (const ObjectRef& ref : refs) ASSERT_TRUE(Get(2, ref).ok());
  }
  EXPECT_EQ(parts_, 60);  // all three are there
  ASSERT_TRUE(Create(2, 30 << 20).ok());
  EXPECT_EQ(all_[2]->usage().copies, 1u);
  EXPECT_EQ(Text(Get(2, refs[2])), std::string(20 << 20, 'c'));
  EXPECT_EQ(parts_, 60);
}

TEST_F(ObjectsTest, OneThatWasLetGoWithGraceIsThereForThatLong) {
  const ObjectRef ref = Put(0, "some bytes");
  all_[0]->Release(ref.id, absl::Milliseconds(50));
  EXPECT_EQ(Text(Get(1, ref)), "some bytes");
  EXPECT_TRUE(Until([&] { return all_[0]->usage().objects == 0; }));
  EXPECT_EQ(Get(1, ref).status().code(), absl::StatusCode::kNotFound);
}

// What lies where a name says is anything that a stranger has put there.
TEST_F(ObjectsTest, WhatIsNoObjectIsNotRead) {
  ObjectRef ref = Put(0, "some bytes");
  for (ObjectRef wrong = ref;
       uint64_t * field : {&wrong.id, &wrong.bytes, &wrong.owner.high, &wrong.owner.low}) {
    ++*field;
    EXPECT_FALSE(ObjectMemory::Open(wrong).ok());
    --*field;
  }
  EXPECT_TRUE(ObjectMemory::Open(ref).ok());
  const UniqueFd open_memory(memfd_create("test-open", MFD_ALLOW_SEALING)), null(open("/dev/null", O_RDONLY));
  ASSERT_EQ(ftruncate(open_memory.get(), 1 << 20), 0);
  for (const int fd : {open_memory.get(), null.get(), 0, 1 << 20}) {
    ref.descriptor = static_cast<uint32_t>(fd);
    EXPECT_FALSE(ObjectMemory::Open(ref).ok()) << fd;
  }
}

TEST_F(ObjectsTest, WhoWaitsHearsOfTheEnd) {
  Put(0, std::string(60 << 20, 'x'));
  Heard<Objects::Draft> heard;
  all_[0]->Create(40 << 20, kLong, heard.Taker());
  all_[0]->Close();
  EXPECT_EQ(heard.Get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Create(0, 1).status().code(), absl::StatusCode::kCancelled);
}

// Whoever wants to write into a pipe waits for a reader, and would be told that there is one, and none.
TEST_F(ObjectsTest, APipeIsNotOpened) {
  ObjectRef ref = Put(0, "some bytes");
  const std::string path = TestFolder() + "/pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const UniqueFd pipe(open(path.c_str(), O_PATH));
  ref.descriptor = static_cast<uint32_t>(pipe.get());
  EXPECT_FALSE(ObjectMemory::Open(ref).ok());
  const UniqueFd writer(open(path.c_str(), O_WRONLY | O_NONBLOCK));
  EXPECT_FALSE(writer.valid());
  EXPECT_EQ(errno, ENXIO);
}

// A name of the same object with another size is no name of it.
TEST_F(ObjectsTest, ANameWithAnotherSizeIsNone) {
  const ObjectRef ref = Put(0, "some bytes");
  ASSERT_TRUE(Get(3, ref).ok());
  ObjectRef longer = ref;
  longer.bytes = 64 << 10;
  for (const uint64_t at : {0, 1, 2, 3}) {
    const auto read = Get(at, longer);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kNotFound) << at << " " << read.status();
  }
  EXPECT_EQ(Text(Get(3, ref)), "some bytes");
  EXPECT_EQ(all_[3]->usage().copies, 0u);
}

// Each hears at its own time, and the fetch goes on for who has more.
TEST_F(ObjectsTest, WhoJoinsAFetchHasATimeOfItsOwn) {
  const ObjectRef ref = Put(0, "some bytes");
  hold_ = true;
  Heard<Objects::Bytes> first, second;
  all_[2]->Get(ref, absl::Milliseconds(50), first.Taker());
  all_[2]->Get(ref, kLong, second.Taker());
  EXPECT_EQ(first.Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(second.there());
  LetGo();
  EXPECT_EQ(Text(second.Get()), "some bytes");
}

// Also when nobody waited for it any more.
TEST_F(ObjectsTest, WhoComesWhileItIsFetchedFetchesNothing) {
  const ObjectRef ref = Put(0, "some bytes");
  hold_ = true;
  EXPECT_EQ(Get(2, ref, kShort).status().code(), absl::StatusCode::kDeadlineExceeded);
  Heard<Objects::Bytes> second;
  all_[2]->Get(ref, kLong, second.Taker());
  EXPECT_EQ(held_.size(), 1u);
  LetGo();
  EXPECT_EQ(Text(second.Get()), "some bytes");
  EXPECT_EQ(all_[2]->usage().objects, 1u);
}

// The parts that are asked for of those that have failed already are nobody's turn.
TEST_F(ObjectsTest, WhatFailsHoldsUpNoOther) {
  std::vector<ObjectRef> refs;
  for (int i = 0; i < 6; ++i) refs.push_back(Put(0, std::string(7 << 20, 'x')));
  const ObjectRef there = Put(1, std::string(1 << 20, 'y'));
  hold_ = true;
  std::vector<Heard<Objects::Bytes>> heard(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) all_[2]->Get(refs[i], kLong, heard[i].Taker());
  gone_ = 0;
  Heard<Objects::Bytes> other;
  bool asked = false;
  for (int turn = 0; turn < 200 && !held_.empty(); ++turn) {
    // It comes when those before it are over, and wait.
    if (turn == 12) {
      all_[2]->Get(there, kLong, other.Taker());
      asked = true;
    }
    auto one = std::move(held_.front());
    held_.erase(held_.begin());
    one();
  }
  EXPECT_TRUE(asked);
  for (auto& one : heard) {
    const auto read = one.Get();
    EXPECT_EQ(read.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Text(read), HasSubstr("makes it again"));
  }
  EXPECT_TRUE(Text(other.Get()) == std::string(1 << 20, 'y'));
}

TEST_F(ObjectsTest, WhatNobodyWantsAgainIsAQuarterAtMost) {
  std::vector<ObjectRef> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(Put(0, std::string(10 << 20, 'x')));
  for (const ObjectRef& ref : refs) all_[0]->Release(ref.id, absl::ZeroDuration());
  EXPECT_EQ(all_[0]->usage().objects, 0u);
  EXPECT_LE(all_[0]->usage().bytes, 16u << 20);
}

// Readers of one object share a mapping, and its descriptor.
TEST_F(ObjectsTest, ManyViewsAreOneMapping) {
  const ObjectRef ref = Put(0, "some bytes");
  const auto one = Get(1, ref), other = Get(1, ref);
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_EQ(one->memory, other->memory);
}

// However many objects one process wants, a few parts are under way.
TEST_F(ObjectsTest, AProcessFetchesAFewPartsAtATime) {
  std::vector<ObjectRef> refs;
  for (int i = 0; i < 6; ++i) refs.push_back(Put(0, std::string(3 << 20, static_cast<char>('a' + i))));
  hold_ = true;
  std::vector<Heard<Objects::Bytes>> heard(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) all_[2]->Get(refs[i], kLong, heard[i].Taker());
  EXPECT_EQ(held_.size(), 4u);
  LetGo();
  for (size_t i = 0; i < refs.size(); ++i)
    EXPECT_EQ(Text(heard[i].Get()), std::string(3 << 20, static_cast<char>('a' + i)));
}

// Who waits for more room than there can be holds up no reader, and nothing is thrown away for it.
TEST_F(ObjectsTest, WhatCannotFitThrowsNothingOut) {
  const ObjectRef ref = Put(0, std::string(1 << 20, 'x')), other = Put(0, std::string(1 << 20, 'y'));
  ASSERT_TRUE(Get(2, ref).ok());
  const auto draft = Create(2, 40 << 20);
  ASSERT_TRUE(draft.ok());
  Heard<Objects::Draft> large;
  all_[2]->Create(30 << 20, kLong, large.Taker());
  EXPECT_TRUE(Get(2, ref).ok());
  EXPECT_EQ(all_[2]->usage().copies, 1u);
  EXPECT_TRUE(Get(2, other).ok());
  EXPECT_FALSE(large.there());
}

}  // namespace
}  // namespace gtrain::actors

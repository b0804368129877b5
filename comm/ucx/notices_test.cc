// What a transport makes of members that say things by hand, tag by tag. In a child, because UCX stays in the
// process that loads it.
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
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/module.h"
#include "comm/port/bootstrap.h"
#include "comm/ucx/ucx_abi.h"
#include "comm/ucx/ucx_transport.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr uint64_t kNonce = 7;                             // its upper half is zero: that of tags, as it is
constexpr uint64_t kNoticeTag = uint64_t{1} << 31;         // of the member that is told, and number 0
constexpr uint64_t kOfAnySender = ~uint64_t{0x7fff0000u};  // mask of a look for notices

bool UcxHere() {
  const char* build = getenv("GTRAIN_BUILD_DIR");
  return build == nullptr || std::filesystem::exists(absl::StrCat(build, "/lib/libgtrain_comm_ucx.so"));
}

const GtrainUcxApi* Api() {
  const auto module = LoadModule("libgtrain_comm_ucx.so", "GTRAIN_COMM_UCX", "this test needs");
  if (!module.ok()) return nullptr;
  const auto entry = ModuleEntry(*module, GTRAIN_UCX_ENTRY, "libgtrain_comm_ucx.so");
  return entry.ok() ? reinterpret_cast<const GtrainUcxApi* (*)()>(*entry)() : nullptr;
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
class ByHand {
 public:
  ByHand(const GtrainUcxApi* api, uint64_t self) : api_(api), self_(self) {
    GtrainUcxError error{};
    worker_ = api->open("tcp", "lo", 0, &error);
  }
  ~ByHand() { api_->close(worker_, 0); }

  std::string Address() const {
    const void* data = nullptr;
    size_t bytes = 0;
    api_->address(worker_, &data, &bytes);
    return absl::StrCat("\n", absl::string_view(static_cast<const char*>(data), bytes));
  }
  // Answers the call of member 0 and sends it a first message of one byte.
  bool GreetAndSpeak(const std::string& address) {
    GtrainUcxError error{};
    char byte = 0;
    return Done(Post(GTRAIN_UCX_RECEIVE, &byte, 1, TagOf(0, 0))) &&
           api_->connect(worker_, 0, address.data() + address.find('\n') + 1, &error) == 0 &&
           Done(Post(GTRAIN_UCX_SEND_RECEIVED, &byte, 1, TagOf(self_, 0))) &&
           Done(Post(GTRAIN_UCX_SEND_RECEIVED, &byte, 1, TagOf(self_, 1)));
  }
  bool Notify(std::string words) {
    return Done(Post(GTRAIN_UCX_SEND, words.data(), words.size(), TagOf(self_, 0) | kNoticeTag)) &&
           Done(api_->flush(worker_, &error_));
  }
  // Whether member 0, which has closed its connections, had sent a notice before.
  bool WasNotified() {
    char byte = 0;
    if (Done(Post(GTRAIN_UCX_RECEIVE, &byte, 1, TagOf(0, 1)))) return false;  // fails with the connection
    uint64_t tag = 0;
    size_t bytes = 0;
    return api_->find(worker_, TagOf(0, 0) | kNoticeTag, kOfAnySender, &tag, &bytes) == 1;
  }

 private:
  static uint64_t TagOf(uint64_t from, uint64_t number) { return kNonce << 32 | from << 16 | number; }
  void* Post(GtrainUcxWay way, void* data, size_t bytes, uint64_t tag) {
    return api_->post(worker_, 0, way, data, bytes, tag, nullptr, &error_);
  }
  bool Done(void* ticket) {
    int state = ticket == nullptr ? -1 : 0;
    const Instant give_up = RealClock().Now() + kPatience;
    while (state == 0 && RealClock().Now() < give_up) {
      if ((state = api_->test(worker_, ticket, &error_)) == 0) api_->progress(worker_, 1);
    }
    return state > 0;
  }

  const GtrainUcxApi* const api_;
  const uint64_t self_;
  GtrainUcxWorker* worker_ = nullptr;
  GtrainUcxError error_{};
};

// Member 1 says `words` of its end; then member 0 gives up. What member 0 heard, and whether member 2 was
// told by it.
struct Heard {
  std::string words;
  bool told = false;
};
absl::StatusOr<Heard> HearOf(const GtrainUcxApi* api, const std::string& words) {
  ThreeMachines bootstrap;
  const Watch watch(&bootstrap, kPatience);
  ByHand one(api, 1), two(api, 2);
  auto transport = OpenUcxTransport(bootstrap, kNonce, "", nullptr, {});
  if (!transport.ok()) return transport.status();
  const auto address = (*transport)->Address();
  if (!address.ok()) return address.status();
  const absl::Status connected = (*transport)->Connect({*address, one.Address(), two.Address()}, 0);
  if (!connected.ok()) return connected;

  char bytes[2];
  const Transfer transfers[] = {{1, false, &bytes[0], 1}, {2, false, &bytes[1], 1}};
  absl::Status exchanged;
  std::thread exchange([&] {
    exchanged = (*transport)
                    ->Exchange(
                        transfers, [](size_t) {}, watch);
  });
  const bool greeted = one.GreetAndSpeak(*address) && two.GreetAndSpeak(*address);
  if (!greeted) bootstrap.Revoke();
  exchange.join();
  if (!exchanged.ok() || !greeted) return exchanged;

  if (!words.empty() && !one.Notify(words)) return absl::InternalError("the notice does not leave");
  Heard heard;
  const Instant give_up = RealClock().Now() + kPatience;
  while (!words.empty() && heard.words.empty() && RealClock().Now() < give_up)
    heard.words = std::string((*transport)->Heard().message());
  (*transport)->Fail("rank 0 gave up: words");
  heard.told = two.WasNotified();
  return heard;
}

// Number of the first thing that is wrong.
int Child() {
  const GtrainUcxApi* const api = Api();
  if (api == nullptr) return 1;
  const auto itself = HearOf(api, "");
  if (!itself.ok()) return std::fprintf(stderr, "%s\n", itself.status().ToString().c_str()), 2;
  if (!itself->told) return 3;
  // Who sent a notice has told the others: one more of each that heard it would be n times n messages.
  const auto longest = HearOf(api, std::string(kNoticeBytesMax, 'x'));
  if (!longest.ok()) return 4;
  if (longest->words != std::string(kNoticeBytesMax, 'x')) return 5;
  if (longest->told) return 6;
  // Its length is the peer's word alone.
  const auto longer = HearOf(api, std::string(kNoticeBytesMax + 1, 'x'));
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

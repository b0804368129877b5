// Tests a transport with members that send messages by hand, piece by piece. In a child, because UCX stays in
// the process that loads it.
#include "comm/ucx/fabric.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "comm/port/bootstrap.h"
#include "comm/port/message.h"
#include "comm/ucx/fabric_transport.h"
#include "comm/ucx/ucx_test_here.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr ContextId kId{.generation = 3, .context = 7};

// The Bootstrap of member 0 among three machines, for the questions of a transport.
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
  absl::StatusOr<UniqueFd> Arena(uint64_t, uint64_t, uint64_t, absl::Duration) override {
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
  // Speaks in another communicator from now on.
  void Become(ContextId id) { id_ = id, sent_ = 0; }
  bool Reach(const std::string& zero) {
    Fabric::Lock lock(fabric_.get());
    const auto reached = fabric_->Reach(zero);
    if (!reached.ok()) return false;
    fabric_->Want(zero_ = *reached);
    return true;
  }
  // Sends a message to member 0, in one piece.
  bool Say(MessageKind kind, absl::string_view bytes) {
    Fabric::Lock lock(fabric_.get());
    fabric_->Post(zero_, Header(kind, bytes.size(), sent_++), bytes);
    fabric_->LetLeave();
    return Wait([&] { return Fabric::Up(zero_); });
  }
  // Posts so many pieces to member 0 and waits for nothing.
  void Flood(int pieces) {
    const std::string piece(kPieceBytes, 'x');
    Fabric::Lock lock(fabric_.get());
    for (int i = 0; i < pieces; ++i) fabric_->Post(zero_, Header(MessageKind::kData, piece.size(), i), piece);
    fabric_->LetLeave();
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
  MessageHeader Header(MessageKind kind, uint64_t total, uint64_t number) const {
    MessageHeader header;
    header.kind = kind;
    header.generation = id_.generation;
    header.context = id_.context;
    header.sender = self_;
    header.number = number;
    header.total = total;
    return header;
  }
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
  ContextId id_ = kId;
  uint64_t sent_ = 0;
  std::vector<std::string> notices_;
};

absl::Status OpenAll(absl::Span<std::shared_ptr<Fabric>> fabrics) {
  for (auto& fabric : fabrics) {
    auto opened = Fabric::Open("127.0.0.1", "");
    if (!opened.ok()) return opened.status();
    fabric = *std::move(opened);
  }
  return absl::OkStatus();
}

// Lets member 1 send the notice `words`; then member 0 gives up. Returns the notice that member 0 heard, and
// whether it told member 2.
struct Said {
  std::string words;
  bool told = false;
};
absl::StatusOr<Said> HearOf(const std::string& words) {
  ThreeMachines bootstrap;
  const Watch watch(&bootstrap, kPatience);
  std::shared_ptr<Fabric> fabrics[3];
  if (const absl::Status opened = OpenAll(absl::MakeSpan(fabrics)); !opened.ok()) return opened;
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

// Member 1 posts far more than a socket takes and returns; member 0, which looks only then, gets all.
absl::Status FloodOf(int pieces) {
  ThreeMachines bootstrap;
  const Watch watch(&bootstrap, kPatience);
  std::shared_ptr<Fabric> fabrics[3];
  if (const absl::Status opened = OpenAll(absl::MakeSpan(fabrics)); !opened.ok()) return opened;
  ByHand one(fabrics[1], 1);
  auto transport = OpenFabricTransport(fabrics[0], kId, nullptr);
  const absl::Status connected =
      transport->Connect({fabrics[0]->address(), one.Address(), fabrics[2]->address()}, 0);
  if (!connected.ok()) return connected;
  if (!one.Reach(fabrics[0]->address())) return absl::InternalError("no way there");
  one.Flood(pieces);
  std::vector<std::string> memory(static_cast<size_t>(pieces), std::string(kPieceBytes, '\0'));
  std::vector<Transfer> transfers;
  for (std::string& piece : memory) transfers.push_back({1, false, piece.data(), piece.size()});
  const absl::Status exchanged = transport->Exchange(
      transfers, [](size_t) {}, watch);
  if (!exchanged.ok()) return exchanged;
  for (const std::string& piece : memory)
    if (piece != std::string(kPieceBytes, 'x')) return absl::DataLossError("other bytes");
  return absl::OkStatus();
}

// Member 0 gives up while it waits for a message of member 1, which comes afterwards.
absl::Status LateFor() {
  ThreeMachines bootstrap;
  std::shared_ptr<Fabric> fabrics[3];
  if (const absl::Status opened = OpenAll(absl::MakeSpan(fabrics)); !opened.ok()) return opened;
  ByHand one(fabrics[1], 1);
  auto transport = OpenFabricTransport(fabrics[0], kId, nullptr);
  const absl::Status connected =
      transport->Connect({fabrics[0]->address(), one.Address(), fabrics[2]->address()}, 0);
  if (!connected.ok()) return connected;
  std::string memory(kPieceBytes, '-'), first(1, '-');
  const Watch watch(&bootstrap, kPatience), short_watch(&bootstrap, absl::Milliseconds(200));
  absl::Status greeted;
  std::thread exchange([&] {
    const Transfer transfer[] = {{1, false, first.data(), 1}};
    greeted = transport->Exchange(
        transfer, [](size_t) {}, watch);
  });
  const bool spoke = one.Reach(fabrics[0]->address()) && one.Say(MessageKind::kData, "1");
  if (!spoke) bootstrap.Revoke();
  exchange.join();
  if (!greeted.ok() || !spoke) return greeted.ok() ? absl::InternalError("nothing is said") : greeted;
  const Transfer transfer[] = {{1, false, memory.data(), memory.size()}};
  const absl::Status over = transport->Exchange(
      transfer, [](size_t) {}, short_watch);
  if (!absl::IsDeadlineExceeded(over)) return absl::InternalError("it did not give up");
  if (!one.Say(MessageKind::kData, std::string(kPieceBytes, 'x')))
    return absl::InternalError("nothing is said");
  // A second communicator of the same two, whose message comes behind that one.
  constexpr ContextId kNext{.generation = 3, .context = 8};
  auto next = OpenFabricTransport(fabrics[0], kNext, nullptr);
  const absl::Status again = next->Connect({fabrics[0]->address(), one.Address(), fabrics[2]->address()}, 0);
  if (!again.ok()) return again;
  one.Become(kNext);
  std::string last(1, '-');
  absl::Status heard;
  std::thread second([&] {
    const Transfer receive[] = {{1, false, last.data(), 1}};
    heard = next->Exchange(
        receive, [](size_t) {}, watch);
  });
  const bool said = one.Say(MessageKind::kData, "2");
  if (!said) bootstrap.Revoke();
  second.join();
  if (!heard.ok() || !said) return heard.ok() ? absl::InternalError("nothing is said") : heard;
  return memory == std::string(kPieceBytes, '-') ? absl::OkStatus()
                                                 : absl::DataLossError("it was written to");
}

// Member 0 sleeps because nothing comes. The notice that then comes ends its wait at once: it does not sleep
// once more because it is no data.
absl::Status NoticeInASleep() {
  std::shared_ptr<Fabric> fabrics[2];
  if (const absl::Status opened = OpenAll(absl::MakeSpan(fabrics)); !opened.ok()) return opened;
  struct Zero final : public Fabric::Context {
    explicit Zero(Fabric* of) : fabric(of) {}
    void Hear(const MessageHeader& header, absl::string_view) override {
      if (header.kind == MessageKind::kGaveUp) naps_when_heard = fabric->naps(), heard = true;
    }
    Fabric* const fabric;
    std::atomic<bool> heard = false;
    std::atomic<uint64_t> naps_when_heard = 0;
  } zero(fabrics[0].get());
  ByHand one(fabrics[1], 1);
  std::atomic<bool> failed = false;
  std::atomic<uint64_t> naps_when_asked = 0;
  std::thread waits([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Fabric::Lock lock(fabrics[0].get());
    fabrics[0]->Add(kId, &zero);
    const auto peer = fabrics[0]->Reach(one.Address());
    if (peer.ok()) fabrics[0]->Want(*peer);
    (void)fabrics[0]->Until([] { return false; },
                            [&] {
                              naps_when_asked = fabrics[0]->naps();
                              return zero.heard || failed ? absl::CancelledError("") : absl::OkStatus();
                            });
    fabrics[0]->Remove(kId);
    if (peer.ok()) fabrics[0]->Drop(*peer);
  });
  // Connected, and nothing on its way: from then on it sleeps longer and longer.
  bool said = one.Reach(fabrics[0]->address()) && one.Say(MessageKind::kData, "1");
  const uint64_t before = fabrics[0]->naps();
  const Instant give_up = RealClock().Now() + kPatience;
  while (said && fabrics[0]->naps() < before + 6 && RealClock().Now() < give_up) std::this_thread::yield();
  said = said && one.Say(MessageKind::kGaveUp, "rank 1 gave up: words");
  while (said && !zero.heard && RealClock().Now() < give_up) std::this_thread::yield();
  failed = !said || !zero.heard;
  waits.join();
  if (failed) return absl::InternalError("nothing is heard");
  return naps_when_asked == zero.naps_when_heard ? absl::OkStatus() : absl::InternalError("it slept with it");
}

// Number of the first thing that is wrong.
int Child() {
  const auto itself = HearOf("");
  if (!itself.ok()) return std::fprintf(stderr, "%s\n", itself.status().ToString().c_str()), 2;
  if (!itself->told) return 3;
  // The sender of a notice has told the others: another one from each that heard it would be n times n
  // messages.
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

int InAChild(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  return WEXITSTATUS(status);
}

int ExitOf(const absl::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

TEST(UcxNotices, NeitherTooLongNorRepeated) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  EXPECT_EQ(InAChild(Child), 0);
}

TEST(UcxFabric, WhatHasNotLeftLeavesThoughNobodyWaits) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  EXPECT_EQ(InAChild([] { return ExitOf(FloodOf(400)); }), 0);
}

TEST(UcxFabric, ANoticeThatComesInASleepIsNotSleptOver) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  EXPECT_EQ(InAChild([] { return ExitOf(NoticeInASleep()); }), 0);
}

// L7: an ended call's memory is the caller's again.
TEST(UcxFabric, WhatComesAfterTheEndIsDropped) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  EXPECT_EQ(InAChild([] { return ExitOf(LateFor()); }), 0);
}

// Opening sets global settings of UCX. Without a lock a round in some tens ends with damaged memory.
TEST(UcxFabric, ThreadsMayOpenAtOnce) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  const auto open_at_once = [] {
    std::array<absl::Status, 4> results;
    std::barrier together(4);
    std::vector<std::thread> threads;
    for (absl::Status& result : results) {
      threads.emplace_back([&] {
        for (int round = 0; round < 300; ++round) {
          together.arrive_and_wait();
          result.Update(Fabric::Open("127.0.0.1", "").status());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& result : results) results[0].Update(result);
    return results[0];
  };
  EXPECT_EQ(InAChild([&] { return ExitOf(open_at_once()); }), 0);
}

}  // namespace
}  // namespace gtrain::comm

// Every event, from the program's threads or from the keeper, goes through the core under one mutex; its
// effects are put into the outbox and the thread is woken. The thread alone touches the socket, so
// no call of the program ever waits for the keeper to read.
#include "runtime/worker/keeper_link.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/units.h"

namespace gtrain::worker {
namespace {

using core::WorkerCore;

// How often the thread looks whether collectives were counted; they are too frequent to wake it.
constexpr int kIdlePollMs = 500;
constexpr int kBusyPollMs = 100;
constexpr absl::Duration kSayWaiting = absl::Seconds(3);
constexpr absl::Duration kLookWanted = absl::Milliseconds(100);
constexpr char kPauseText[] = "pause";
constexpr char kNoPlaceYet[] =
    "this process came up beside a running generation and has no place in one before the first step of its "
    "elastic run: collectives and checkpoints of its own come behind that";
constexpr absl::Duration kGoodbye = absl::Milliseconds(500);
// The patience, after a deadline, for the answer to the question which ranks are missing.
constexpr absl::Duration kWhoIsMissing = absl::Seconds(2);
constexpr absl::Duration kAskWhoIsMissing = absl::Seconds(2);

Instant Now() { return RealClock().Now(); }

std::string ToJson(const core::WorkerEffect& effect) {
  nlohmann::json json;
  if (std::get_if<core::SendJoined>(&effect)) {
    json["type"] = "joined";
  } else if (const auto* e = std::get_if<core::SendExchange>(&effect)) {
    json = {{"type", "exchange"}, {"sequence", e->sequence}, {"blob", absl::Base64Escape(e->blob)}};
  } else if (const auto* o = std::get_if<core::SendOverdue>(&effect)) {
    json = {{"type", "overdue"}, {"sequence", o->sequence}};
  } else if (const auto* p = std::get_if<core::SendProgress>(&effect)) {
    json = {{"type", "progress"}, {"collective", p->collective}};
    if (p->step) json["step"] = *p->step;
    if (p->loss && std::isfinite(*p->loss)) json["loss"] = *p->loss;
    if (p->loss && !std::isfinite(*p->loss)) json["loss"] = "nan";  // JSON has no number for it
    if (p->samples != 0) json["samples"] = p->samples;
    if (p->pace) {
      json["waited"] = absl::ToDoubleSeconds(p->pace->waited);
      json["joined"] = absl::ToDoubleSeconds(p->pace->joined);
      json["stalled"] = absl::ToDoubleSeconds(p->pace->stalled);
    }
  } else if (const auto* c = std::get_if<core::SendCheckpoint>(&effect)) {
    json = {{"type", "checkpoint"}, {"step", c->step}, {"manifest", c->manifest}};
    if (!c->policy.empty()) json["policy"] = c->policy;
  } else if (const auto* l = std::get_if<core::SendLinkDown>(&effect)) {
    json = {{"type", "link"}, {"peer", l->peer}, {"text", l->text}};
  } else if (const auto* n = std::get_if<core::SendNote>(&effect)) {
    json = {{"type", n->kind}, {"text", n->text}};
  } else if (const auto* w = std::get_if<core::SendPause>(&effect)) {
    json = {{"type", "pause"}, {"paused", w->paused}};
  }
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::optional<core::WorkerMissing> ParseMissing(absl::string_view body) {
  if (!absl::ConsumePrefix(&body, "missing ")) return std::nullopt;
  const std::vector<absl::string_view> words = absl::StrSplit(body, ' ', absl::SkipEmpty());
  core::WorkerMissing missing;
  if (words.empty() || !absl::SimpleAtoi(words[0], &missing.sequence)) return std::nullopt;
  missing.ranks.resize(words.size() - 1);
  for (size_t i = 1; i < words.size(); ++i) {
    if (!absl::SimpleAtoi(words[i], &missing.ranks[i - 1])) return std::nullopt;
  }
  return missing;
}

std::optional<core::WorkerLeft> ParseLeft(absl::string_view body) {
  if (!absl::ConsumePrefix(&body, "left ")) return std::nullopt;
  core::WorkerLeft left;
  for (const absl::string_view word : absl::StrSplit(body, ' ', absl::SkipEmpty())) {
    if (!absl::SimpleAtoi(word, &left.ranks.emplace_back())) return std::nullopt;
  }
  return left;
}

std::optional<core::WorkerTable> ParseTable(const std::string& body) {
  const std::vector<absl::string_view> lines = absl::StrSplit(body, '\n');
  core::WorkerTable table;
  absl::string_view sequence = lines[0];
  if (!absl::ConsumePrefix(&sequence, "table ") || !absl::SimpleAtoi(sequence, &table.sequence))
    return std::nullopt;
  table.blobs.resize(lines.size() - 1);
  for (size_t rank = 0; rank < table.blobs.size(); ++rank) {
    if (!absl::Base64Unescape(lines[rank + 1], &table.blobs[rank])) return std::nullopt;
  }
  return table;
}

// The variables of the environment that a keeper sent; nullptr: there is none.
class SentEnvironment {
 public:
  explicit SentEnvironment(const std::string& body) {
    for (absl::string_view entry : absl::StrSplit(body, '\0', absl::SkipEmpty())) {
      const std::pair<absl::string_view, absl::string_view> parts =
          absl::StrSplit(entry, absl::MaxSplits('=', 1));
      values_[std::string(parts.first)] = std::string(parts.second);
    }
  }
  const char* Get(const std::string& name) const {
    const auto it = values_.find(name);
    return it == values_.end() ? nullptr : it->second.c_str();
  }

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace

absl::Status KeeperLink::ForkedError() {
  return absl::FailedPreconditionError(
      "this is a forked child of a rank: the session belongs to the process that joined");
}

KeeperLink::KeeperLink(RankEnvironment environment, bool stays, bool place_later)
    : job_(environment.job),
      keeper_socket_(environment.keeper_socket),
      stays_(stays && environment.in_place),
      place_later_(place_later),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      membership_(std::make_shared<Membership>(this, std::move(environment))),
      core_(membership_->world_size()) {}

KeeperLink::~KeeperLink() {
  if (Forked()) {
    // The thread exists only in the parent: its handle can be neither joined nor destroyed here.
    (void)new std::thread(std::move(thread_));
    return;
  }
  {
    MutexLock lock(&mutex_);
    closing_ = true;
  }
  eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Membership> KeeperLink::membership() const {
  MutexLock lock(&mutex_);
  return membership_;
}

// Exchange 0 carries what people need to find the process.
core::WorkerJoin KeeperLink::JoinEvent() const {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  return {nlohmann::json{{"pid", getpid()}, {"host", host}}.dump(-1, ' ', false,
                                                                 nlohmann::json::error_handler_t::replace)};
}

absl::Status KeeperLink::Join(absl::Duration timeout) {
  const Instant deadline = Now() + timeout;
  if (!wake_.valid()) return ErrnoStatus(errno, "eventfd");
  GT_ASSIGN_OR_RETURN(KeeperClient client, KeeperClient::Connect(keeper_socket_));
  MutexLock lock(&mutex_);
  const std::shared_ptr<Membership> membership = membership_;
  const RankEnvironment& env = membership->environment();
  RankHello hello{};
  hello.protocol = GTRAIN_RANK_PROTOCOL;
  hello.rank = static_cast<uint32_t>(env.rank);
  hello.generation = env.generation;
  std::memcpy(hello.token, env.token.data(), sizeof(hello.token));
  client.Queue(kRankHello, std::string(reinterpret_cast<const char*>(&hello), sizeof(hello)));
  StepLocked(JoinEvent());

  // Signals are the program's: none is ever delivered to our thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, c = std::move(client)]() mutable { Loop(std::move(c)); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);

  absl::Status status = AwaitTable(*membership, 0, deadline).status();
  if (!absl::IsDeadlineExceeded(status)) return status;
  if (!welcome_) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the keeper at ", keeper_socket_, " did not answer within ", absl::FormatDuration(timeout)));
  }
  return absl::DeadlineExceededError(absl::StrCat("not all ", env.world_size, " ranks of generation ",
                                                  env.generation, " joined within ",
                                                  absl::FormatDuration(timeout), WhoIsMissingLocked()));
}

// What was told of the generation before does not count in this one, but that the user wants an end does.
void KeeperLink::BeginNextLocked() {
  const std::optional<std::string> stop = core_.stop_reason();
  membership_ = std::make_shared<Membership>(this, *std::exchange(next_, std::nullopt));
  core_ = core::WorkerCore(membership_->world_size());
  collectives_.store(0, std::memory_order_relaxed);
  waited_ns_.store(0, std::memory_order_relaxed);
  stalled_ns_.store(0, std::memory_order_relaxed);
  some_left_.store(false, std::memory_order_release);
  if (stop) StepLocked(core::WorkerStop{*stop});
  StepLocked(JoinEvent());
}

absl::Status KeeperLink::Rejoin(absl::Duration timeout, absl::Duration over_timeout) {
  if (Forked()) return ForkedError();
  constexpr absl::Duration kLongest = absl::Hours(24 * 365);
  Instant deadline = Now() + std::min(timeout, kLongest);
  MutexLock lock(&mutex_);
  // A collective fails before everybody has heard that the generation is over.
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !AliveLocked().ok(); };
  const absl::Duration ends_within = std::min(timeout, over_timeout);
  if (!mutex_.AwaitFor(std::min(ends_within, kLongest), over))
    return absl::DeadlineExceededError(
        absl::StrCat("the generation was not over within ", absl::FormatDuration(ends_within)));
  if (!stays_ || !keeper_keeps_ranks_) return AliveLocked();
  if (std::exchange(comes_up_, false)) SendReleasedLocked(membership_->environment().generation);
  for (;;) {
    const auto known = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return next_ || !lost_.ok(); };
    // Its keeper says when it is needed, and ends it when it is not: that may take as long as nobody is lost.
    const bool waited = std::exchange(waits_, false);
    mutex_.AwaitFor(waited ? kLongest : deadline - Now(), known);
    if (waited) deadline = Now() + std::min(timeout, kLongest);
    GT_RETURN_IF_ERROR(lost_);
    if (!next_) {
      return absl::DeadlineExceededError(
          absl::StrCat("there was no other generation within ", absl::FormatDuration(timeout)));
    }
    BeginNextLocked();
    const std::shared_ptr<Membership> membership = membership_;
    const absl::Status joined = AwaitTable(*membership, 0, deadline).status();
    // Only the end of the generation brings another one: it may live, and a rank that is needed have left it.
    if (!absl::IsUnavailable(joined) || !lost_.ok() || AliveLocked().ok()) return joined;
  }
}

// ------------------------------------------------------------------ the program's side

absl::StatusOr<std::vector<std::string>> KeeperLink::AllGather(const Membership& of, absl::string_view blob,
                                                               absl::Duration timeout) {
  if (Forked()) return ForkedError();
  const Instant deadline = Now() + std::min(timeout, absl::Hours(24 * 365));
  if (blob.size() > kRankFrameBytesMax / 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("a blob of ", blob.size(), " bytes is too large to exchange"));
  }
  MutexLock lock(&mutex_);
  if (!StandsLocked(of)) return of.Alive();
  StepLocked(core::WorkerExchange{std::string(blob)});
  return AwaitTable(of, core_.exchanges() - 1, deadline);
}

// The agent's answer to WorkerOverdue.
std::string KeeperLink::WhoIsMissingLocked() const {
  if (core_.missing().empty()) return absl::StrCat("; `gtrain status ", job_, "` shows who is late");
  return absl::StrCat("; no word from rank", core_.missing().size() > 1 ? "s " : " ",
                      PrintRanks(core_.missing()));
}

absl::Status KeeperLink::AwaitedLeftLocked(const Membership& of, uint64_t sequence) {
  StepLocked(core::WorkerOverdue{sequence});
  mutex_.AwaitFor(kWhoIsMissing, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !StandsLocked(of) || !core_.missing().empty();
  });
  if (!StandsLocked(of)) return of.Alive();
  for (const int rank : core_.missing()) {
    if (std::ranges::count(core_.left(), rank) == 0) continue;
    return absl::UnavailableError(absl::StrCat("rank ", rank,
                                               " ended with exit code 0 and has no part in exchange ",
                                               sequence, ", for which rank ", of.rank(), " waits"));
  }
  return absl::OkStatus();
}

std::vector<int> KeeperLink::Left(const Membership& of) const {
  if (!some_left_.load(std::memory_order_acquire)) return {};
  MutexLock lock(&mutex_);
  return StandsLocked(of) ? core_.left() : std::vector<int>{};
}

absl::StatusOr<std::vector<std::string>> KeeperLink::AwaitTable(const Membership& of, uint64_t sequence,
                                                                Instant deadline) {
  std::optional<std::vector<std::string>> table;
  const auto wait_until = [&](Instant until, bool heed_left) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    mutex_.AwaitFor(until - Now(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (!StandsLocked(of)) return true;
      table = core_.TakeTable(sequence);
      return table || (heed_left && !core_.left().empty());
    });
    return table || !StandsLocked(of) || Now() >= deadline;
  };
  // Once a rank has left, the missing ranks are asked for now and then: the table may only be slow.
  for (bool over = wait_until(deadline, true); !over;) {
    over = wait_until(std::min(deadline, Now() + kAskWhoIsMissing), false);
    if (!over) GT_RETURN_IF_ERROR(AwaitedLeftLocked(of, sequence));
  }
  if (!table && StandsLocked(of)) {
    StepLocked(core::WorkerOverdue{sequence});
    mutex_.AwaitFor(kWhoIsMissing, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (!StandsLocked(of)) return true;
      table = core_.TakeTable(sequence);
      return table || !core_.missing().empty();
    });
  }
  if (table) return *std::move(table);
  GT_RETURN_IF_ERROR(of.Alive());
  return absl::DeadlineExceededError(absl::StrCat("exchange ", sequence, " of rank ", of.rank(),
                                                  ": not all ranks answered in time", WhoIsMissingLocked()));
}

absl::StatusOr<UniqueFd> KeeperLink::Arena(const Membership& of, const RankUsedArenaRequest& request,
                                           absl::Duration timeout) {
  if (Forked()) return ForkedError();
  const Instant deadline = Now() + std::min(timeout, absl::Hours(24 * 365));
  MutexLock one_at_a_time(&arena_mutex_);
  MutexLock lock(&mutex_);
  if (!StandsLocked(of)) return of.Alive();
  arena_reply_.reset();
  arena_wanted_ = request.id;
  const RankArenaRequest all_zeros{request.id, request.bytes};
  if (keeper_reuses_arenas_)
    QueueLocked(kRankUsedArena, std::string(reinterpret_cast<const char*>(&request), sizeof(request)));
  else
    QueueLocked(kRankArena, std::string(reinterpret_cast<const char*>(&all_zeros), sizeof(all_zeros)));
  mutex_.AwaitFor(deadline - Now(),
                  [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return arena_reply_ || !StandsLocked(of); });
  if (!StandsLocked(of)) return of.Alive();
  if (!arena_reply_) {
    return absl::DeadlineExceededError("the keeper did not hand out a shared-memory arena in time");
  }
  absl::StatusOr<UniqueFd> reply = *std::move(arena_reply_);
  arena_reply_.reset();
  return reply;
}

// An older keeper has freed what belonged to a generation that is over, and knows the newest one alone.
void KeeperLink::FreeArena(const Membership& of, uint64_t id) {
  if (Forked()) return;
  MutexLock lock(&mutex_);
  const RankArenaOf arena{id, of.environment().generation};
  if (keeper_reuses_arenas_)
    return SendLocked(kRankFreeArena, std::string(reinterpret_cast<const char*>(&arena), sizeof(arena)));
  if (keeper_frees_arenas_ && StandsLocked(of))
    QueueLocked(kRankFreeArena, std::string(reinterpret_cast<const char*>(&id), sizeof(id)));
}

absl::StatusOr<port::WriterLink> KeeperLink::StartWriter(uint64_t arena_bytes, absl::Duration timeout,
                                                         absl::FunctionRef<bool()> wanted) {
  if (Forked()) return ForkedError();
  const Instant begin = Now(), deadline = begin + std::min(timeout, absl::Hours(24 * 365));
  MutexLock one_at_a_time(&writer_mutex_);
  MutexLock lock(&mutex_);
  if (!keeper_has_writers_)
    return absl::FailedPreconditionError("this rank's keeper is of an older gtrain and starts no writers");
  writer_reply_.reset();
  const RankArenaRequest request{++writer_wanted_, arena_bytes};
  QueueLocked(kRankWriter, std::string(reinterpret_cast<const char*>(&request), sizeof(request)));
  const auto answered = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return writer_reply_ || !AliveLocked().ok();
  };
  bool said = false;
  while (!mutex_.AwaitFor(std::min(kLookWanted, deadline - Now()), answered) && Now() < deadline) {
    mutex_.Unlock();
    const bool go_on = wanted();
    mutex_.Lock();
    if (!go_on) {
      ++writer_wanted_;  // a late answer is to nobody
      return absl::CancelledError("no writer is wanted any more");
    }
    if (said || Now() - begin < kSayWaiting) continue;
    LogInfo("checkpoint: rank ", membership_->rank(),
            " gets the memory for its saves when those of an earlier ",
            "generation are written on this machine");
    said = true;
  }
  if (!writer_reply_) {
    GT_RETURN_IF_ERROR(AliveLocked());
    return absl::DeadlineExceededError(
        absl::StrCat("saves of an earlier generation were still being written on this machine after ",
                     absl::FormatDuration(timeout)));
  }
  absl::StatusOr<port::WriterLink> reply = *std::move(writer_reply_);
  writer_reply_.reset();
  return reply;
}

// The answer to a request that was given up on ends here: its descriptors close.
void KeeperLink::WriterFrameIn(KeeperFrame& frame) {
  RankArenaRequest reply{};
  if (frame.kind == kKeeperNoWriter) {
    writer_reply_ = absl::FailedPreconditionError(frame.body);
    return;
  }
  if (frame.body.size() != sizeof(reply) || !frame.fd.valid()) return;
  std::memcpy(&reply, frame.body.data(), sizeof(reply));
  if (reply.id != writer_wanted_) return;
  if (frame.kind == kKeeperWriter) {
    writer_coming_.arena = std::move(frame.fd);
  } else if (writer_coming_.arena.valid()) {
    writer_coming_.channel = std::move(frame.fd);
    writer_reply_ = std::exchange(writer_coming_, {});
  }
}

absl::Status KeeperLink::Alive() const {
  if (Forked()) return ForkedError();
  if (!over_.load(std::memory_order_acquire)) return absl::OkStatus();
  MutexLock lock(&mutex_);
  return AliveLocked();
}

absl::Status KeeperLink::AliveLocked() const {
  if (core_.state() != WorkerCore::State::kOver) return absl::OkStatus();
  return absl::UnavailableError(core_.over_reason());
}

void KeeperLink::Report(const Membership& of, const core::WorkerEvent& event) {
  if (Forked()) return;
  MutexLock lock(&mutex_);
  if (StandsLocked(of)) StepLocked(event);
}

void KeeperLink::Report(const core::WorkerEvent& event) {
  if (Forked()) return;
  MutexLock lock(&mutex_);
  StepLocked(event);
}

void KeeperLink::ReportProgress(core::WorkerProgress progress) {
  if (Forked()) return;
  MutexLock lock(&mutex_);
  progress.counted = Counted();
  StepLocked(progress);
}

core::WorkerCollectives KeeperLink::Counted() const {
  return {collectives_.load(std::memory_order_relaxed),
          absl::Nanoseconds(waited_ns_.load(std::memory_order_relaxed)),
          absl::Nanoseconds(stalled_ns_.load(std::memory_order_relaxed))};
}

bool KeeperLink::stop_requested() const {
  return !Forked() && stop_requested_.load(std::memory_order_relaxed);
}

bool KeeperLink::comes_up() const {
  if (Forked()) return false;
  MutexLock lock(&mutex_);
  return comes_up_;
}

bool KeeperLink::pause_requested() const {
  return !Forked() && pause_requested_.load(std::memory_order_relaxed);
}

std::optional<Instant> KeeperLink::preempted_at() const {
  if (Forked()) return std::nullopt;
  MutexLock lock(&mutex_);
  return core_.preempted_at();
}

void KeeperLink::StepLocked(const core::WorkerEvent& event) {
  for (const core::WorkerEffect& effect : core_.Step(event, Now()).effects) {
    QueueLocked(kRankToAgent, ToJson(effect));
  }
  stop_requested_.store(core_.stop_reason().has_value(), std::memory_order_relaxed);
  pause_requested_.store(core_.pause_requested(), std::memory_order_relaxed);
  const bool over = core_.state() == WorkerCore::State::kOver;
  if (over) membership_->End(core_.over_reason());
  if (!over_.exchange(over, std::memory_order_acq_rel) && over) wakers().WakeAll();
}

void KeeperLink::QueueLocked(uint16_t kind, std::string body) {
  if (core_.state() != WorkerCore::State::kOver) SendLocked(kind, std::move(body));
}

void KeeperLink::SendLocked(uint16_t kind, std::string body) {
  outbox_.emplace_back(kind, std::move(body));
  eventfd_write(wake_.get(), 1);
}

// ------------------------------------------------------------------ the thread

void KeeperLink::Loop(KeeperClient client) {
  for (;;) {
    absl::Status status = Turn(client);
    KeeperFrame frame;
    while (client.Next(&frame)) FrameIn(frame);
    MutexLock lock(&mutex_);
    if (!status.ok()) {
      lost_ = status;
      return StepLocked(core::WorkerOver{std::string(status.message())});
    }
    if (closing_) break;
    StepLocked(Counted());
    if (auto due = core_.NextDeadline(); due && *due <= Now()) StepLocked(core::WorkerTick{});
  }
  SayGoodbye(client);
}

absl::Status KeeperLink::Turn(KeeperClient& client) {
  int timeout_ms = 0;
  {
    MutexLock lock(&mutex_);
    for (auto& [kind, body] : outbox_) client.Queue(kind, body);
    outbox_.clear();
    timeout_ms = closing_ ? 0 : PollMs();
  }
  if (absl::Status written = client.Write(); !written.ok()) {
    client.Read().IgnoreError();  // a keeper that closed may have said why
    return written;
  }
  pollfd fds[2] = {{client.fd(), static_cast<int16_t>(POLLIN | (client.wants_to_write() ? POLLOUT : 0)), 0},
                   {wake_.get(), POLLIN, 0}};
  if (poll(fds, 2, timeout_ms) < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
  eventfd_t ignored;
  if (fds[1].revents != 0) eventfd_read(wake_.get(), &ignored);
  if ((fds[0].revents & (POLLIN | POLLHUP | POLLERR)) == 0) return absl::OkStatus();
  return client.Read();
}

int KeeperLink::PollMs() const {
  int ms = kIdlePollMs;
  if (auto due = core_.NextDeadline()) {
    ms = static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(*due - Now()) + 1, 0, kBusyPollMs));
  }
  return ms;
}

void KeeperLink::SetAsked(std::function<std::string(absl::string_view question)> answer) {
  if (Forked()) return;
  const bool answers = answer != nullptr;
  MutexLock asked_lock(&asked_mutex_);
  asked_ = std::move(answer);
  MutexLock lock(&mutex_);
  answers_ = answers;
  SayAnswersLocked();
}

// A keeper asks those alone that have said so once: others it need not wait for.
void KeeperLink::SayAnswersLocked() {
  if (answers_ && keeper_asks_) SendLocked(kRankAnswers, "");
}

void KeeperLink::AskedIn(const std::string& body) {
  RankQuestion question{};
  if (body.size() < sizeof(question)) return;
  std::memcpy(&question, body.data(), sizeof(question));
  std::string answer(reinterpret_cast<const char*>(&question), sizeof(question));
  {
    MutexLock lock(&asked_mutex_);
    if (asked_) answer += asked_(absl::string_view(body).substr(sizeof(question)));
  }
  MutexLock lock(&mutex_);
  SendLocked(kRankAnswer, std::move(answer));
}

void KeeperLink::FrameIn(KeeperFrame& frame) {
  if (frame.kind == kKeeperAsks) return AskedIn(frame.body);
  MutexLock lock(&mutex_);
  switch (frame.kind) {
    case kKeeperWelcome:
      return WelcomeIn(frame.body);
    case kKeeperWriter:
    case kKeeperChannel:
    case kKeeperNoWriter:
      return WriterFrameIn(frame);
    case kKeeperRefused:
    case kKeeperArena:
      return ArenaFrameIn(frame);
    case kKeeperRevoked:
      return RevokedIn(frame.body);
    case kKeeperMember:
      return MemberIn(frame.body);
    case kKeeperStop:
      return StepLocked(core::WorkerStop{frame.body});
    case kKeeperNotice: {
      uint32_t seconds = 0;
      if (frame.body.size() != sizeof(seconds)) return;
      std::memcpy(&seconds, frame.body.data(), sizeof(seconds));
      return StepLocked(core::WorkerNotice{absl::Seconds(seconds)});
    }
    case kKeeperFromAgent:
      return RelayedIn(frame.body);
    default:
      return;  // of a newer keeper: not for us
  }
}

void KeeperLink::WelcomeIn(const std::string& body) {
  welcome_ = true;
  uint32_t abilities = 0;
  if (body.size() == sizeof(abilities)) std::memcpy(&abilities, body.data(), sizeof(abilities));
  keeper_has_writers_ = (abilities & kKeeperHasWriters) != 0;
  keeper_frees_arenas_ = (abilities & kKeeperFreesArenas) != 0;
  keeper_reuses_arenas_ = (abilities & kKeeperReusesArenas) != 0;
  keeper_keeps_ranks_ = (abilities & kKeeperKeepsRanks) != 0;
  keeper_asks_ = (abilities & kKeeperAsksRanks) != 0;
  waits_ = (abilities & kKeeperYouWait) != 0;
  comes_up_ = waits_ && place_later_;
  if (stays_ && keeper_keeps_ranks_) SendLocked(kRankStays, "");
  SayAnswersLocked();
}

void KeeperLink::ArenaFrameIn(KeeperFrame& frame) {
  if (frame.kind == kKeeperRefused && !welcome_) {
    lost_ = absl::UnavailableError(absl::StrCat("the keeper refused this rank: ", frame.body));
    return StepLocked(core::WorkerOver{std::string(lost_.message())});
  }
  if (frame.kind == kKeeperRefused) {
    arena_reply_ = absl::ResourceExhaustedError(frame.body);
    return;
  }
  RankArenaRequest reply{};
  if (frame.body.size() == sizeof(reply)) std::memcpy(&reply, frame.body.data(), sizeof(reply));
  // The answer to a request that was given up on: its file closes here.
  if (reply.id == arena_wanted_ && frame.fd.valid()) arena_reply_ = std::move(frame.fd);
}

// A generation may end before this process has joined it.
void KeeperLink::RevokedIn(const std::string& reason) {
  uint64_t generation = membership_->environment().generation;
  if (next_) generation = std::exchange(next_, std::nullopt)->generation;
  StepLocked(core::WorkerOver{comes_up_ ? kNoPlaceYet : reason});
  if (stays_ && keeper_keeps_ranks_ && !comes_up_) SendReleasedLocked(generation);
}

void KeeperLink::SendReleasedLocked(uint64_t generation) {
  SendLocked(kRankReleased, std::string(reinterpret_cast<const char*>(&generation), sizeof(generation)));
}

void KeeperLink::MemberIn(const std::string& environment) {
  const SentEnvironment sent(environment);
  auto next = ReadRankEnvironment([&](const char* name) -> const char* {
    return absl::string_view(name) == "GTRAIN_KEEPER_SOCKET" ? keeper_socket_.c_str() : sent.Get(name);
  });
  if (next.ok()) {
    next_ = *std::move(next);
  } else {
    lost_ = absl::FailedPreconditionError(
        absl::StrCat("the keeper's word on the next generation: ", next.status().message()));
  }
}

void KeeperLink::RelayedIn(const std::string& body) {
  if (auto table = ParseTable(body)) return StepLocked(*table);
  if (auto left = ParseLeft(body)) {
    StepLocked(*left);
    some_left_.store(!core_.left().empty(), std::memory_order_release);
    return;
  }
  if (auto missing = ParseMissing(body)) StepLocked(*missing);
  if (body == kPauseText) StepLocked(core::WorkerPause{});
}

// The last report of the program must not be lost because it ends at once.
void KeeperLink::SayGoodbye(KeeperClient& client) {
  const Instant deadline = Now() + kGoodbye;
  {
    MutexLock lock(&mutex_);
    for (const core::WorkerEffect& effect :
         core_.Step(core::WorkerTick{}, core_.NextDeadline().value_or(Now())).effects) {
      outbox_.emplace_back(kRankToAgent, ToJson(effect));
    }
    for (auto& [kind, body] : outbox_) client.Queue(kind, body);
    outbox_.clear();
  }
  while (client.Write().ok() && client.wants_to_write() && Now() < deadline) {
    pollfd fd{client.fd(), POLLOUT, 0};
    poll(&fd, 1, 50);
  }
  // A child that was forked while we had it holds it, too, and would keep the keeper from hearing the end.
  shutdown(client.fd(), SHUT_WR);
}

}  // namespace gtrain::worker

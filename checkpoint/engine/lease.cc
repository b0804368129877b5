// A renewal is a new key, because a store can only create and delete: the new one is put before the old one
// is deleted, so a living owner always has one. Renewals are compared by their number alone; the clocks of
// two machines are never compared.
#include "checkpoint/engine/lease.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "checkpoint/engine/chunk_share.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kLookAtHolderEvery = absl::Seconds(1);

// The leases that this process holds: a program that opens a directory a second time while its first
// Checkpointer lives is told apart from one whose first is gone, although the storage may still have its
// lease.
struct Held {
  Mutex mu;
  std::set<uint64_t> nonces ABSL_GUARDED_BY(mu);
};
Held& HeldHere() {
  static Held* const held = new Held;
  return *held;
}

// Field 22, behind the name of the program, which may hold blanks and parentheses; 0: there is no such
// process.
uint64_t StartOf(uint64_t pid) {
  const absl::StatusOr<std::string> text = ReadFile(absl::StrCat("/proc/", pid, "/stat"), 4096);
  if (!text.ok()) return 0;
  const size_t behind = text->rfind(')');
  if (behind == std::string::npos) return 0;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(*text).substr(behind + 1), ' ', absl::SkipEmpty());
  constexpr size_t kStart = 22 - 3;  // the state, the first field here, is the third
  uint64_t start = 0;
  if (fields.size() <= kStart || fields[0] == "Z" || !absl::SimpleAtoi(fields[kStart], &start)) return 0;
  return start;
}

uint64_t ThisMachine() { return static_cast<uint64_t>(MachineKey("")); }

std::string Show(const LeaseMark& mark) {
  return absl::StrCat(
      "process ", mark.holder.pid, " on host ", mark.holder.host,
      mark.generation > 0 ? absl::StrCat(" (generation ", mark.generation, ")") : "", " since ",
      absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixSeconds(static_cast<int64_t>(mark.since)),
                       absl::UTCTimeZone()));
}

// The newest renewal; nullopt: there is none.
absl::StatusOr<std::optional<LeaseMark>> Newest(port::BlobStore* store, uint64_t epoch) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(LeasePrefix(epoch)));
  std::optional<LeaseName> newest;
  for (const std::string& key : keys) {
    const std::optional<LeaseName> name = ParseLeaseKey(key);
    if (name && (!newest || *newest < *name)) newest = name;
  }
  if (!newest) return std::nullopt;
  const std::string key = LeaseKey(*newest);
  const absl::StatusOr<std::string> text = store->Get(key, kLeaseBytesMax);
  if (absl::IsNotFound(text.status())) return LeaseMark{.name = *newest};  // renewed just now
  GT_RETURN_IF_ERROR(text.status());
  const absl::StatusOr<LeaseMark> mark = ParseLeaseMark(key, *text);
  return mark.ok() ? *mark
                   : LeaseMark{.name = *newest, .holder = {.host = "(unknown: its lease is damaged)"}};
}

}  // namespace

std::string DescribeOwner(const Identity& owner) {
  if (owner.job.empty()) return "a program that was run by hand";
  return absl::StrCat("job \"", owner.job, "\"",
                      owner.cluster.empty() ? "" : absl::StrCat(" of cluster ", owner.cluster.substr(0, 12)));
}

Lease::Lease(port::BlobStore* store, uint64_t epoch, uint64_t generation, bool fresh,
             std::function<void(const absl::Status&)> lost, absl::Duration every)
    : store_(store), lost_(std::move(lost)), every_(every) {
  char host[128] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  mark_ = {.name = {.epoch = epoch, .renewal = 0},
           .since = static_cast<uint64_t>(absl::ToUnixSeconds(absl::Now())),
           .generation = generation,
           .holder = {.host = host,
                      .machine = ThisMachine(),
                      .pid = static_cast<uint64_t>(getpid()),
                      .started = StartOf(static_cast<uint64_t>(getpid())),
                      .nonce = Rng::FromSystem().Next()}};
  {
    MutexLock lock(&HeldHere().mu);
    HeldHere().nonces.insert(mark_.holder.nonce);
  }
  if (fresh) {
    LeaseMark first = mark_;
    first.name.renewal = 1;
    first_ = store_->PutIfAbsent(LeaseKey(first.name), Print(first));
    if (first_.ok()) mark_ = first;
    if (absl::IsAlreadyExists(first_)) return;
    if (!first_.ok()) NotRenewed(std::exchange(first_, absl::OkStatus()));
  } else {
    // An earlier life of this owner may have left renewals: ours are newer.
    const auto left = Newest(store_, epoch);
    if (left.ok() && *left) mark_.name.renewal = (*left)->name.renewal;
    Renew();
  }
  thread_ = std::thread([this] { Loop(); });
}

Lease::~Lease() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  if (thread_.joinable()) thread_.join();
  {
    MutexLock lock(&HeldHere().mu);
    HeldHere().nonces.erase(mark_.holder.nonce);
  }
  if (mark_.name.renewal > 0 && !leave_behind_) store_->Delete(LeaseKey(mark_.name)).IgnoreError();
}

absl::Status Lease::held() const {
  MutexLock lock(&mu_);
  return held_;
}

bool Lease::claim_gone() const {
  MutexLock lock(&mu_);
  return claim_gone_;
}

void Lease::Loop() {
  Rng rng = Rng::FromSystem();
  const RealClock clock;
  const auto next = [&] { return clock.Now() + every_ * (0.9 + 0.2 * rng.Unit()); };
  Instant renew = next();
  while (true) {
    {
      MutexLock lock(&mu_);
      mu_.AwaitFor(std::max(renew - clock.Now(), absl::ZeroDuration()),
                   [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stop_ || look_; });
      if (stop_) return;
      look_ = false;
    }
    if (!Look().ok()) return;  // the lease of a lost directory says nothing to anybody
    if (clock.Now() < renew) continue;
    Renew();
    renew = next();
  }
}

void Lease::LookSoon() {
  MutexLock lock(&mu_);
  look_ = true;
}

void Lease::Renew() {
  constexpr int kTriesMax = 3;
  const LeaseName old = mark_.name;
  LeaseMark next = mark_;
  absl::Status put = absl::AlreadyExistsError("");
  for (int i = 0; i < kTriesMax && absl::IsAlreadyExists(put); ++i) {
    next.name.renewal = std::min(next.name.renewal + 1, kCounterMax);
    put = store_->PutIfAbsent(LeaseKey(next.name), Print(next));
    if (!absl::IsAlreadyExists(put)) break;
    // Either this is ours and the answer was lost, or another program opens the directory just now: the lease
    // of that one is not ours to delete.
    const absl::StatusOr<std::string> there = store_->Get(LeaseKey(next.name), kLeaseBytesMax);
    if (there.ok() && *there == Print(next)) put = absl::OkStatus();
  }
  if (put.ok()) {
    mark_ = next;
    told_ = false;
    // An old lease that cannot be deleted now is harmless, because a newer one is there.
    if (old.renewal > 0 && old != next.name) store_->Delete(LeaseKey(old)).IgnoreError();
  } else {
    NotRenewed(put);
  }
}

void Lease::NotRenewed(const absl::Status& why) {
  if (!std::exchange(told_, true))
    LogWarning("checkpoint: the lease of ", store_->Describe(), " cannot be renewed: ", why.message());
}

absl::Status Lease::Look() {
  GT_RETURN_IF_ERROR(held());
  const absl::StatusOr<std::vector<std::string>> owners = store_->List(kOwnerPrefix);
  if (!owners.ok()) return absl::OkStatus();  // the storage cannot say so now
  uint64_t newest = mark_.name.epoch;
  bool there = false;
  for (const std::string& key : *owners) {
    const uint64_t epoch = ParseOwnerKey(key).value_or(0);
    newest = std::max(newest, epoch);
    there = there || epoch == mark_.name.epoch;
  }
  if (!there) {
    MutexLock lock(&mu_);
    claim_gone_ = true;
  }
  if (newest == mark_.name.epoch) return absl::OkStatus();
  const std::string key = OwnerKey(newest);
  const absl::StatusOr<std::string> text = store_->Get(key, kSmallFileBytesMax);
  const absl::StatusOr<OwnerClaim> claim = text.ok() ? ParseOwnerClaim(key, *text) : text.status();
  const absl::Status lost = absl::FailedPreconditionError(absl::StrCat(
      store_->Describe(), " was taken over by ", claim.ok() ? DescribeOwner(claim->owner) : "(unknown)",
      "; nothing more is saved there. Stop one of the two, or give this one a checkpoint directory of its "
      "own"));
  {
    MutexLock lock(&mu_);
    if (!held_.ok()) return held_;
    held_ = lost;
  }
  lost_(lost);
  return lost;
}

absl::StatusOr<std::optional<std::string>> WhoHolds(port::BlobStore* store, const OwnerClaim& claim,
                                                    const LivenessCheck& check) {
  GT_ASSIGN_OR_RETURN(std::optional<LeaseMark> mark, Newest(store, claim.epoch));
  if (!mark) return std::nullopt;
  const bool managed = !claim.owner.cluster.empty();
  const Holder& holder = mark->holder;
  if (holder.machine != 0 && holder.machine == ThisMachine()) {
    if (holder.pid == static_cast<uint64_t>(getpid())) {
      MutexLock lock(&HeldHere().mu);
      return HeldHere().nonces.contains(holder.nonce) ? std::optional(Show(*mark)) : std::nullopt;
    }
    const uint64_t started = StartOf(holder.pid);
    if (started != 0 && started == holder.started) return Show(*mark);
    if (!managed) return std::nullopt;  // a job of a cluster may be between two generations
  }
  const RealClock clock;
  const Instant deadline = clock.Now() + check.patience;
  LogInfo("checkpoint: ", store->Describe(), " belongs to ", DescribeOwner(claim.owner), ", ", Show(*mark),
          ": watching for ", absl::FormatDuration(check.patience), " whether it is alive");
  StopFlag never;
  while (clock.Now() < deadline) {
    GT_RETURN_IF_ERROR(check.alive());
    (void)never.Await(std::min(kLookAtHolderEvery, deadline - clock.Now()));
    GT_ASSIGN_OR_RETURN(const std::optional<LeaseMark> now, Newest(store, claim.epoch));
    if (!now) return std::nullopt;  // it has just ended
    if (now->name != mark->name) return Show(*now);
  }
  return std::nullopt;
}

}  // namespace gtrain::ckpt

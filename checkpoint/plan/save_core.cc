// The commit rule in one place. The engine does one effect at a time and tells what came of it; nothing here
// waits. A stop (revoke, cancel) that arrives while a call is out is remembered and acted on when its answer
// comes: once PutManifest is out only reading the key can tell what happened, so from there a stop changes
// nothing but the retention.
#include "checkpoint/plan/save_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/overloaded.h"

namespace gtrain::ckpt {

using save::State;

namespace save {
const char* StateName(State state) {
  switch (state) {
    case State::kIdle:
      return "idle";
    case State::kWriting:
      return "writing";
    case State::kIndexing:
      return "indexing";
    case State::kGathering:
      return "gathering";
    case State::kParting:
      return "parting";
    case State::kAuthorizing:
      return "authorizing";
    case State::kPutting:
      return "putting";
    case State::kVerifying:
      return "verifying";
    case State::kRetaining:
      return "retaining";
    case State::kFollowing:
      return "following";
    case State::kAborting:
      return "aborting";
    case State::kDone:
      return "done";
  }
  return "?";
}
}  // namespace save

namespace {

bool IsOneOf(State state, std::initializer_list<State> states) {
  return std::find(states.begin(), states.end(), state) != states.end();
}

bool Allowed(State from, State to) {
  switch (to) {
    case State::kIdle:
      return false;
    case State::kWriting:
      return IsOneOf(from, {State::kIdle, State::kDone});
    case State::kIndexing:
      return from == State::kWriting;
    case State::kGathering:
      return IsOneOf(from, {State::kIndexing, State::kParting});
    case State::kParting:
      return IsOneOf(from, {State::kIndexing, State::kGathering});
    case State::kFollowing:
      return IsOneOf(from, {State::kIndexing, State::kParting, State::kAborting});
    case State::kAuthorizing:
      return IsOneOf(from, {State::kGathering, State::kParting});
    case State::kPutting:
      return from == State::kAuthorizing;
    case State::kVerifying:
      return from == State::kPutting;
    case State::kRetaining:
      return from == State::kVerifying;
    case State::kAborting:
      return IsOneOf(from, {State::kWriting, State::kIndexing, State::kGathering, State::kParting,
                            State::kAuthorizing, State::kVerifying});
    case State::kDone:
      return !IsOneOf(from, {State::kIdle, State::kDone});
  }
  return false;
}

save::Result Both(save::Effect first, save::Effect second, absl::string_view why) {
  save::Result result{.why = std::string(why)};
  result.effects.push_back(std::move(first));
  result.effects.push_back(std::move(second));
  return result;
}

}  // namespace

void SaveCore::Move(State next) {
  GT_CHECK(Allowed(state_, next));
  state_ = next;
  next_poll_.reset();
}

save::Result SaveCore::Step(const save::Event& event, Instant now) {
  return std::visit(
      Overloaded{
          [&](const save::SnapshotTaken& e) { return Start(e, now); },
          [&](const save::ShardWritten& e) { return OnShardWritten(e); },
          [&](const save::IndexWritten& e) { return OnIndexWritten(e, now); },
          [&](const save::IndexSeen& e) { return OnIndexSeen(e); },
          [&](const save::PartSeen& e) { return OnPartSeen(e); },
          [&](const save::PartPut& e) { return OnPartPut(e, now); },
          [&](const save::AuthorityChecked& e) { return OnAuthority(e); },
          [&](const save::ManifestPut& e) {
            Move(State::kVerifying);
            put_ = e.status;
            return save::Result{{save::ReadManifest{}},
                                "the key, not the answer to the put, says what is committed"};
          },
          [&](const save::ManifestRead& e) { return OnManifestRead(e, now); },
          [&](const save::AbortPut&) { return OnAbortPut(now); },
          [&](const save::RetentionApplied& e) {
            return Done(absl::OkStatus(), e.status.ok()
                                              ? "committed"
                                              : absl::StrCat("committed; old checkpoints could not be "
                                                             "deleted: ",
                                                             e.status.message()));
          },
          [&](const save::Revoked& e) {
            return OnStop(absl::UnavailableError(absl::StrCat("the generation is over: ", e.reason)));
          },
          [&](const save::Cancelled&) {
            return OnStop(
                absl::CancelledError("the checkpointer was destroyed before the save was committed"));
          },
          [&](const save::Tick&) { return OnTick(now); },
      },
      event);
}

save::Result SaveCore::Start(const save::SnapshotTaken& event, Instant now) {
  GT_CHECK(idle());
  Move(State::kWriting);
  step_ = event.step;
  deadline_ = now + config_.commit_timeout;
  missing_ = leads() ? std::min(config_.part_ranks, config_.world_size - config_.rank) : 0;
  index_seen_.assign(static_cast<size_t>(missing_), false);
  parts_missing_ =
      config_.rank == 0 ? (config_.world_size + config_.part_ranks - 1) / config_.part_ranks - 1 : 0;
  part_seen_.assign(static_cast<size_t>(parts_missing_) + 1, false);
  part_put_ = false;
  shard_ = failure_ = put_ = absl::OkStatus();
  stop_.reset();
  poll_interval_ = config_.poll_min;
  return {{save::WriteShard{}}, absl::StrCat("step ", step_, " is in host memory")};
}

save::Result SaveCore::OnShardWritten(const save::ShardWritten& event) {
  GT_CHECK(state_ == State::kWriting);
  shard_ = stop_.value_or(event.status);
  Move(State::kIndexing);
  return {{save::WriteIndex{shard_}},
          shard_.ok() ? "the shard is durable" : absl::StrCat("no shard: ", shard_.message())};
}

save::Result SaveCore::OnIndexWritten(const save::IndexWritten& event, Instant now) {
  GT_CHECK(state_ == State::kIndexing);
  const absl::Status failed = !shard_.ok() ? shard_ : stop_.value_or(event.status);
  if (!leads()) {
    if (!event.status.ok()) return PutMarker(failed);
    if (!failed.ok()) return Done(failed, "the index says why, or this rank was stopped");
    return Follow(now);
  }
  if (!failed.ok()) return Abort(failed);
  Move(State::kGathering);
  index_seen_[0] = true;
  if (--missing_ == 0) {
    Move(State::kParting);
    return {{save::PutPart{}}, "the only shard of the part is written"};
  }
  PollLater(now);
  return Poll();
}

save::Result SaveCore::Follow(Instant now) {
  Move(State::kFollowing);
  // Each look is a request to the storage. After as long as it took last time it is mostly there; if it was
  // there at the first look, it may come sooner.
  follows_since_ = now;
  const absl::Duration expected = looks_ == 1 ? followed_ * 7 / 8 : followed_;
  poll_interval_ = std::clamp(expected, config_.poll_min, config_.poll_max) + config_.phase * config_.spread;
  looks_ = 0;
  PollLater(now);
  poll_interval_ = std::max(std::clamp(followed_ / 8, config_.poll_min, config_.poll_max), config_.spread);
  return {{}, "the manifest is awaited"};
}

save::Result SaveCore::OnIndexSeen(const save::IndexSeen& event) {
  if (state_ != State::kGathering) return {{}, "an index after its time"};
  GT_CHECK(event.rank >= config_.rank && event.rank < config_.rank + static_cast<int>(index_seen_.size()));
  if (!event.status.ok()) {
    const std::string words = absl::StrCat("rank ", event.rank, ": ", event.status.message());
    return Abort(absl::Status(event.status.code(), words), words);
  }
  const auto member = static_cast<size_t>(event.rank - config_.rank);
  if (index_seen_[member]) return {{}, "an index seen before"};
  index_seen_[member] = true;
  poll_interval_ = config_.poll_min;
  if (--missing_ > 0) return {{}, Missing()};
  Move(State::kParting);
  return {{save::PutPart{}}, "every shard of the part is written"};
}

save::Result SaveCore::OnPartSeen(const save::PartSeen& event) {
  if (state_ != State::kGathering && state_ != State::kParting) return {{}, "a part after its time"};
  GT_CHECK(event.part > 0 && event.part < static_cast<int>(part_seen_.size()));
  if (!event.status.ok()) {
    if (state_ == State::kGathering) return Abort(event.status);
    if (!stop_) stop_ = event.status;
    return {{}, "remembered until our own part is put"};
  }
  const auto part = static_cast<size_t>(event.part);
  if (part_seen_[part]) return {{}, "a part seen before"};
  part_seen_[part] = true;
  poll_interval_ = config_.poll_min;
  --parts_missing_;
  if (part_put_ && parts_missing_ == 0) return Authorize();
  return {{}, Missing()};
}

save::Result SaveCore::OnPartPut(const save::PartPut& event, Instant now) {
  GT_CHECK(state_ == State::kParting);
  if (!failure_.ok()) return event.status.ok() ? Done(failure_, "the part says why") : PutMarker(failure_);
  if (config_.rank == 0) {
    const absl::Status status = stop_.value_or(event.status);
    if (!status.ok()) return Abort(status);
    part_put_ = true;
    if (parts_missing_ == 0) return Authorize();
    Move(State::kGathering);
    PollLater(now);
    return Poll();
  }
  if (!event.status.ok()) return PutMarker(event.status);
  save::Result result = Follow(now);
  if (!stop_) return result;
  next_poll_.reset();
  return {{save::ReadManifest{}}, "stopped: one last look"};
}

save::Result SaveCore::Authorize() {
  Move(State::kAuthorizing);
  return {{save::CheckAuthority{}}, "every rank's shard is written"};
}

save::Result SaveCore::OnAuthority(const save::AuthorityChecked& event) {
  GT_CHECK(state_ == State::kAuthorizing);
  const absl::Status status = stop_.value_or(event.status);
  if (!status.ok()) return Abort(status);
  Move(State::kPutting);
  return {{save::PutManifest{}}, "all shards are sound and this generation may commit"};
}

save::Result SaveCore::OnManifestRead(const save::ManifestRead& event, Instant now) {
  if (state_ == State::kGathering) {
    if (event.holds == save::KeyHolds::kAbortMarker) return GivenUp(event.detail);
    return {{}, "nobody has given the save up"};
  }
  GT_CHECK(state_ == State::kVerifying || state_ == State::kFollowing);
  const bool leader = state_ == State::kVerifying;
  ++looks_;
  switch (event.holds) {
    case save::KeyHolds::kThisManifest:
      if (!leader) {
        followed_ = now - follows_since_;
        Move(State::kDone);
        return Both(save::ReportCommitted{}, save::Finish{}, "rank 0 committed it");
      }
      Move(State::kRetaining);
      return Both(save::ReportCommitted{}, save::ApplyRetention{},
                  "read back: the manifest is there and whole");
    case save::KeyHolds::kAbortMarker:
      return failure_.ok() ? GivenUp(event.detail) : Done(failure_, "the marker keeps the save out");
    case save::KeyHolds::kOther:
      return Done(absl::DataLossError(absl::StrCat("the manifest of step ", step_,
                                                   " is not the one that was written: ", event.detail)),
                  "somebody else's manifest");
    case save::KeyHolds::kOutranked:
      // A put whose answer was lost may still arrive: only the marker keeps it out.
      if (!put_.ok()) return Abort(put_);
      return Done(absl::AbortedError(
                      absl::StrCat("step ", step_, " was committed and is deleted again: ", event.detail)),
                  "retention of a newer timeline took it");
    case save::KeyHolds::kNothing:
      if (leader) {
        return Abort(put_.ok()
                         ? absl::DataLossError("the manifest was created and is not there: the storage lies")
                         : put_);
      }
      break;
    case save::KeyHolds::kUnreadable:
      break;
  }
  if (stop_) return Done(*stop_, "stopped while waiting for the manifest");
  if (now >= deadline_) {
    return Done(absl::DeadlineExceededError(absl::StrCat("nobody can say yet whether step ", step_,
                                                         " is committed", event.detail.empty() ? "" : ": ",
                                                         event.detail, "; the next restore will know")),
                "deadline");
  }
  PollLater(now);
  return {{}, "no manifest yet"};
}

save::Result SaveCore::OnTick(Instant now) {
  if (!next_poll_ || now < *next_poll_) return {{}, "nothing is due"};
  if (state_ == State::kGathering && now >= deadline_) {
    const std::string words =
        absl::StrCat(Missing(), " of step ", step_, " within ", absl::FormatDuration(config_.commit_timeout));
    return Abort(absl::DeadlineExceededError(words), words);
  }
  next_poll_.reset();
  if (state_ == State::kGathering) PollLater(now);
  return Poll();
}

save::Result SaveCore::OnStop(absl::Status why) {
  if (idle()) return {{}, "no save runs"};
  if (!stop_) stop_ = std::move(why);
  if (state_ == State::kGathering) return Abort(*stop_);
  // One last look at the key is worth more than an early answer.
  if (state_ == State::kFollowing && next_poll_) {
    next_poll_.reset();
    return {{save::ReadManifest{}}, "stopped: one last look"};
  }
  return {{}, "remembered until the call that is out returns"};
}

save::Result SaveCore::Abort(absl::Status why, std::string words) {
  GT_CHECK(leads());
  if (config_.rank == 0) return PutMarker(std::move(why));
  // Rank 0 waits for this part, and gives the save up with these words as soon as it sees them.
  Move(State::kParting);
  failure_ = std::move(why);
  if (words.empty()) words = RankSays(failure_);
  return {{save::PutPart{absl::Status(failure_.code(), words)}},
          absl::StrCat("given up: ", failure_.message())};
}

save::Result SaveCore::PutMarker(absl::Status why) {
  Move(State::kAborting);
  failure_ = std::move(why);
  return {{save::PutAbort{config_.rank == 0 ? std::string(failure_.message()) : RankSays(failure_)}},
          absl::StrCat("given up: ", failure_.message())};
}

save::Result SaveCore::OnAbortPut(Instant now) {
  GT_CHECK(state_ == State::kAborting);
  if (config_.rank == 0) return Done(failure_, "aborted");
  // The put of this rank may have happened although it failed, and rank 0 may have committed with it.
  stop_ = failure_;
  follows_since_ = now;
  Move(State::kFollowing);
  return {{save::ReadManifest{}}, "whoever creates the key first wins"};
}

save::Result SaveCore::GivenUp(const std::string& reason) {
  return Done(absl::AbortedError(absl::StrCat("step ", step_, " was given up: ", reason)), "abort marker");
}

std::string SaveCore::RankSays(const absl::Status& why) const {
  return absl::StrCat("rank ", config_.rank, ": ", why.message());
}

save::Result SaveCore::Done(absl::Status status, std::string why) {
  Move(State::kDone);
  return {{save::Finish{std::move(status)}}, std::move(why)};
}

void SaveCore::PollLater(Instant now) {
  next_poll_ = std::min(now + poll_interval_, std::max(now, deadline_));
  poll_interval_ = std::min(poll_interval_ * 2, config_.poll_max);
}

save::Result SaveCore::Poll() const {
  if (state_ != State::kGathering) return {{save::ReadManifest{}}, "is it committed?"};
  save::PollIndices poll;
  for (size_t member = 0; member < index_seen_.size(); ++member) {
    if (!index_seen_[member]) poll.missing.push_back(config_.rank + static_cast<int>(member));
  }
  for (size_t part = 1; part < part_seen_.size(); ++part) {
    if (!part_seen_[part]) poll.parts.push_back(static_cast<int>(part));
  }
  return {{std::move(poll)}, Missing()};
}

// "rank 2 and 1 more did not write a shard", "ranks 64 to 127 and 3 other parts did not say ..."
std::string SaveCore::Missing() const {
  if (missing_ > 0) {
    const auto first = std::find(index_seen_.begin(), index_seen_.end(), false) - index_seen_.begin();
    return absl::StrCat("rank ", config_.rank + first,
                        missing_ > 1 ? absl::StrCat(" and ", missing_ - 1, " more") : "",
                        " did not write a shard");
  }
  if (parts_missing_ == 0) return "our own part is being put";
  const int first =
      static_cast<int>(std::find(part_seen_.begin() + 1, part_seen_.end(), false) - part_seen_.begin()) *
      config_.part_ranks;
  const int last = std::min(first + config_.part_ranks, config_.world_size) - 1;
  return absl::StrCat("rank ", first, " did not put the part of ranks ", first, " to ", last,
                      parts_missing_ > 1 ? absl::StrCat(" (and ", parts_missing_ - 1, " more parts)") : "");
}

std::optional<Instant> SaveCore::NextDeadline() const {
  if (idle()) return std::nullopt;
  return next_poll_;
}

}  // namespace gtrain::ckpt

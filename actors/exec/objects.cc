#include "actors/exec/objects.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/threads.h"
#include "base/units.h"

namespace gtrain::actors {
namespace {

constexpr int kPartsAtOnce = 4;        // that a process fetches, of all objects
constexpr size_t kReapedAtOnce = 256;  // released ones that are looked at in a turn
constexpr size_t kWaitingMax = 1024;   // who wants room
// How often readers of other processes are looked for, who say nothing when they are done.
constexpr absl::Duration kLookWhenWanted = absl::Milliseconds(2), kLookWhenRead = absl::Milliseconds(200);

}  // namespace

Objects::Objects(const CallerId& self, const ObjectOptions& options, Functions functions, const Clock& clock)
    : self_(self),
      options_(options),
      functions_(std::move(functions)),
      clock_(clock),
      bytes_max_(options.bytes_max) {}

Objects::~Objects() { Close(); }

void Objects::SetShares(size_t processes) {
  MutexLock lock(&mutex_);
  if (options_.of_machine) bytes_max_ = options_.bytes_max / std::max<size_t>(1, processes);
}

void Objects::Close() {
  Heard heard;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    for (Waiting& one : std::exchange(waiting_, {})) {
      heard.push_back([reply = std::move(one.reply)]() mutable {
        reply(absl::CancelledError("the cluster of this process is closed"));
      });
    }
    for (auto& [id, block] : blocks_) block.memory->Withdraw();
    blocks_.clear();
    released_.clear();
    idle_.clear();
    used_ = idle_bytes_ = 0;
  }
  Tell(heard);
  if (thread_.joinable()) thread_.join();
}

void Objects::Tell(Heard& heard) {
  for (auto& one : heard) one();
  heard.clear();
}

// ---- memory

void Objects::CreateBehind(uint64_t bytes, absl::Duration timeout, bool passes, Hears<Draft> reply) {
  absl::StatusOr<Draft> made;
  {
    MutexLock lock(&mutex_);
    if (closed_) {
      made = absl::CancelledError("the cluster of this process is closed");
    } else if (bytes > bytes_max_) {
      made = absl::ResourceExhaustedError(absl::StrCat(
          "an object of ", PrintBytes(static_cast<int64_t>(bytes)), ": the objects of a process have ",
          PrintBytes(static_cast<int64_t>(bytes_max_)), " at most (object_bytes of its cluster)"));
    } else if (waiting_.size() >= kWaitingMax) {
      made = absl::ResourceExhaustedError(absl::StrCat(
          kWaitingMax, " wait for room for an object already: let some go, or make fewer at a time"));
    } else {
      const bool first = waiting_.empty() || passes;
      if (first) made = Take(bytes);
      if (!first || absl::IsUnavailable(made.status())) {
        waiting_.push_back({bytes, clock_.Now() + timeout, std::move(reply)});
        StartThread();
        return;
      }
    }
  }
  reply(std::move(made));
}

// Unavailable: there is no room now.
absl::StatusOr<Objects::Draft> Objects::Take(uint64_t bytes) {
  std::shared_ptr<ObjectMemory> memory = TakeIdle(bytes);
  if (memory == nullptr) {
    if (!MakeRoom(bytes)) return absl::UnavailableError("no room");
    absl::StatusOr<std::shared_ptr<ObjectMemory>> made = ObjectMemory::Make(bytes);
    if (!made.ok()) return made.status();
    memory = *std::move(made);
    used_ += memory->footprint();
  }
  const uint64_t id = ++last_;
  blocks_[id].memory = memory;
  return Draft{id, std::move(memory)};
}

// Memory that was used before needs no page of the kernel's.
std::shared_ptr<ObjectMemory> Objects::TakeIdle(uint64_t bytes) {
  if (blocks_.size() >= options_.objects_max) return nullptr;
  for (auto it = idle_.rbegin(); it != idle_.rend(); ++it) {
    if ((*it)->capacity() < bytes || (*it)->capacity() / 2 > bytes) continue;
    std::shared_ptr<ObjectMemory> memory = std::move(*it);
    idle_.erase(std::next(it).base());
    idle_bytes_ -= memory->footprint();
    return memory;
  }
  return nullptr;
}

// Nothing is thrown away for what does not fit all the same.
bool Objects::MakeRoom(uint64_t bytes) {
  const auto fits = [&](uint64_t without) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // Heads are not counted against whoever asks for all that there may be.
    return blocks_.size() < options_.objects_max && used_ - without <= bytes_max_ &&
           bytes <= bytes_max_ - (used_ - without);
  };
  if (fits(0)) return true;
  if (!released_.empty()) Reap();
  std::vector<std::map<Key, Copy>::iterator> copies;  // that nobody reads
  uint64_t found = idle_bytes_;
  for (auto it = copies_.begin(); it != copies_.end() && !fits(found); ++it) {
    if (!it->second.whole || InUse(blocks_.at(it->second.id))) continue;
    copies.push_back(it);
    found += blocks_.at(it->second.id).memory->footprint();
  }
  if (!fits(found) && copies.empty()) return false;
  if (blocks_.size() < options_.objects_max && !fits(found)) return false;
  std::ranges::sort(copies, {}, [](const auto& it) { return it->second.used; });
  for (size_t next = 0; !fits(0);) {
    if (!idle_.empty()) {
      DropIdle();
    } else if (next < copies.size()) {
      Evict(copies[next++]);
    } else {
      return false;
    }
  }
  return true;
}

bool Objects::InUse(const Block& block) { return block.memory.use_count() > 1 || block.memory->IsRead(); }

void Objects::Evict(std::map<Key, Copy>::iterator copy) {
  const auto block = blocks_.find(copy->second.id);
  copies_.erase(copy);
  block->second.memory->Withdraw();
  if (!InUse(block->second)) {
    Free(block);
    return;
  }
  block->second.withdrawn = true;  // somebody was quicker
  block->second.ends_at = clock_.Now();
  released_.insert(block->first);
  StartThread();
}

void Objects::DropIdle() {
  used_ -= idle_.front()->footprint();
  idle_bytes_ -= idle_.front()->footprint();
  doomed_.push_back(std::move(idle_.front()));
  idle_.pop_front();
  StartThread();
}

// What nobody may want again is a quarter of all at most.
std::map<uint64_t, Objects::Block>::iterator Objects::Free(std::map<uint64_t, Block>::iterator it) {
  it->second.memory->set_used();
  idle_bytes_ += it->second.memory->footprint();
  idle_.push_back(std::move(it->second.memory));
  while (!idle_.empty() && (idle_bytes_ > bytes_max_ / 4 || idle_.size() > options_.objects_max / 4))
    DropIdle();
  return blocks_.erase(it);
}

// Frees what was released and nobody reads any more, some of them a turn.
void Objects::Reap() {
  const Instant now = clock_.Now();
  auto id = released_.upper_bound(reaped_to_);
  for (size_t looked = 0; looked < std::min(kReapedAtOnce, released_.size()) && !released_.empty();
       ++looked) {
    if (id == released_.end()) id = released_.begin();
    reaped_to_ = *id;
    id = ReapOne(*id, now) ? released_.erase(id) : std::next(id);
  }
}

bool Objects::ReapOne(uint64_t id, Instant now) {
  const auto it = blocks_.find(id);
  if (it->second.ends_at > now) return false;
  if (!std::exchange(it->second.withdrawn, true)) it->second.memory->Withdraw();
  if (InUse(it->second)) return false;
  Free(it);
  return true;
}

ObjectRef Objects::Seal(const Draft& draft, uint64_t bytes) {
  ObjectRef ref;
  ref.owner = self_;
  ref.id = draft.id;
  ref.bytes = bytes;
  MutexLock lock(&mutex_);
  const auto it = blocks_.find(draft.id);
  if (it == blocks_.end()) return ref;  // closed
  it->second.sealed = true;
  it->second.bytes = bytes;
  it->second.memory->Publish(&ref);
  return ref;
}

void Objects::Release(uint64_t id, absl::Duration grace) {
  Heard heard;
  {
    MutexLock lock(&mutex_);
    const auto it = blocks_.find(id);
    if (it == blocks_.end() || it->second.ends_at) return;
    const Instant now = clock_.Now();
    it->second.ends_at = now + grace;
    if (!ReapOne(id, now)) released_.insert(id);
    Serve(heard);
    if (!released_.empty()) StartThread();
  }
  Tell(heard);
}

void Objects::Serve(Heard& heard) {
  const Instant now = clock_.Now();
  while (!waiting_.empty()) {
    absl::StatusOr<Draft> made = Take(waiting_.front().bytes);
    if (absl::IsUnavailable(made.status())) break;
    heard.push_back([reply = std::move(waiting_.front().reply), made = std::move(made)]() mutable {
      reply(std::move(made));
    });
    waiting_.pop_front();
  }
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (now < it->deadline) {
      ++it;
      continue;
    }
    const absl::Status full = absl::ResourceExhaustedError(
        absl::StrCat("no room for an object of ", PrintBytes(static_cast<int64_t>(it->bytes)),
                     ": those of this process have ", PrintBytes(static_cast<int64_t>(used_)), " of ",
                     PrintBytes(static_cast<int64_t>(bytes_max_)), ", and are ", blocks_.size(), " of ",
                     options_.objects_max, ": let some go, or give its cluster more (object_bytes)"));
    heard.push_back([reply = std::move(it->reply), full]() mutable { reply(full); });
    it = waiting_.erase(it);
  }
}

void Objects::StartThread() {
  if (thread_.joinable() || closed_) return;
  thread_ = StartWithoutSignals([this] { Run(); });
}

absl::Duration Objects::NextLook() const {
  if (!doomed_.empty()) return absl::ZeroDuration();
  if (!waiting_.empty() || fetches_ > 0) return kLookWhenWanted;
  return released_.empty() ? absl::InfiniteDuration() : kLookWhenRead;
}

void Objects::Run() {
  for (;;) {
    Heard heard;
    std::vector<std::shared_ptr<ObjectMemory>> doomed;
    {
      MutexLock lock(&mutex_);
      const absl::Duration wait = NextLook();
      mutex_.AwaitFor(wait,
                      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_ || NextLook() < wait; });
      if (closed_) return;
      doomed = std::exchange(doomed_, {});
      Reap();
      Serve(heard);
      ExpireReaders(heard);
    }
    Tell(heard);
  }
}

Objects::Usage Objects::usage() const {
  MutexLock lock(&mutex_);
  return {used_, blocks_.size(), copies_.size(), waiting_.size()};
}

// ---- reading

std::string Objects::NameOf(const CallerId& owner, uint64_t id) const {
  return absl::StrCat("object ", id, " of ", functions_.name(owner));
}

absl::Status Objects::NoMore(const ObjectRef& ref) const {
  return absl::NotFoundError(
      absl::StrCat(NameOf(ref.owner, ref.id),
                   " is no more: its owner has let it go, and has to keep it for as long as others read it"));
}

absl::Status Objects::Late(const CallerId& owner, uint64_t id) const {
  return absl::DeadlineExceededError(absl::StrCat(
      NameOf(owner, id), " was not fetched in time: read it again, with a longer time where it is large"));
}

void Objects::Get(const ObjectRef& ref, absl::Duration timeout, Hears<Bytes> reply) {
  if (ref.owner == self_) {
    Bytes bytes;
    {
      MutexLock lock(&mutex_);
      const auto it = blocks_.find(ref.id);
      if (it != blocks_.end() && it->second.sealed && !it->second.withdrawn && it->second.bytes == ref.bytes)
        bytes = {it->second.memory, ref.bytes};
    }
    if (bytes.memory == nullptr) return reply(NoMore(ref));
    return reply(std::move(bytes));
  }
  if (functions_.is_near(ref.owner)) {
    absl::StatusOr<std::shared_ptr<ObjectMemory>> opened = OpenOnce(ref);
    if (opened.ok()) return reply(Bytes{*std::move(opened), ref.bytes});
    return CopyHere(ref, timeout, std::move(reply));  // or its owner says why there is none
  }
  const CallerId at = functions_.copies_at();
  if (at == self_) return CopyHere(ref, timeout, std::move(reply));
  functions_.ask(at, Control::kCopy, PrintObject(ref), timeout,
                 [self = shared_from_this(), ref, deadline = clock_.Now() + timeout,
                  reply = std::move(reply)](const absl::Status& status, absl::string_view result) mutable {
                   if (absl::IsNotFound(status)) return reply(status);
                   const absl::StatusOr<ObjectRef> copy = status.ok() ? ParseObject(result) : status;
                   if (copy.ok()) {
                     absl::StatusOr<std::shared_ptr<ObjectMemory>> opened = self->OpenOnce(*copy);
                     if (opened.ok() && copy->bytes == ref.bytes)
                       return reply(Bytes{*std::move(opened), ref.bytes});
                   }
                   const absl::Duration left = deadline - self->clock_.Now();
                   if (left <= absl::ZeroDuration()) return reply(status.ok() ? self->NoMore(ref) : status);
                   self->CopyHere(ref, left, std::move(reply));
                 });
}

// All who read it in this process share the mapping.
absl::StatusOr<std::shared_ptr<ObjectMemory>> Objects::OpenOnce(const ObjectRef& ref) {
  constexpr size_t kPruneAt = 1024;
  const Key key{ref.owner, ref.id};
  {
    MutexLock lock(&mutex_);
    const auto it = opened_.find(key);
    std::shared_ptr<ObjectMemory> there = it == opened_.end() ? nullptr : it->second.lock();
    if (there != nullptr && there->Is(ref)) return there;
  }
  absl::StatusOr<std::shared_ptr<ObjectMemory>> opened = ObjectMemory::Open(ref);
  if (!opened.ok()) return opened;
  MutexLock lock(&mutex_);
  if (opened_.size() >= kPruneAt)
    std::erase_if(opened_, [](const auto& one) { return one.second.expired(); });
  opened_[key] = *opened;
  return opened;
}

void Objects::OnPart(const PartRequest& request, Reply reply) {
  std::shared_ptr<ObjectMemory> memory;
  {
    MutexLock lock(&mutex_);
    const auto it = blocks_.find(request.ref.id);
    if (request.ref.owner == self_ && it != blocks_.end() && it->second.sealed && !it->second.withdrawn &&
        it->second.bytes == request.ref.bytes)
      memory = it->second.memory;
  }
  if (memory == nullptr) return reply(absl::NotFoundError("its owner has let it go"), {});
  reply(absl::OkStatus(), {memory->data() + request.from, request.size});
}

void Objects::OnCopy(const ObjectRef& ref, absl::Duration timeout, Reply reply) {
  CopyHere(ref, timeout,
           [self = shared_from_this(), ref, reply = std::move(reply)](absl::StatusOr<Bytes> bytes) mutable {
             if (!bytes.ok()) return reply(bytes.status(), {});
             ObjectRef copy;
             copy.owner = self->self_;
             copy.bytes = ref.bytes;
             {
               MutexLock lock(&self->mutex_);
               const auto it = self->copies_.find({ref.owner, ref.id});
               if (it != self->copies_.end() && it->second.whole) {
                 copy.id = it->second.id;
                 self->blocks_.at(copy.id).memory->Publish(&copy);
               }
             }
             if (copy.id == 0) return reply(absl::UnavailableError("the copy had to make room"), {});
             reply(absl::OkStatus(), PrintObject(copy));
           });
}

// ---- copies

struct Objects::Fetch {
  ObjectRef ref;
  Draft draft;
  Instant deadline;
  Mutex mutex;
  uint64_t next ABSL_GUARDED_BY(mutex) = 0;
  int under_way ABSL_GUARDED_BY(mutex) = 0;
  bool over ABSL_GUARDED_BY(mutex) = false;
};

void Objects::CopyHere(const ObjectRef& ref, absl::Duration timeout, Hears<Bytes> reply) {
  const Key key{ref.owner, ref.id};
  const Instant deadline = clock_.Now() + timeout;
  absl::StatusOr<Bytes> there = absl::CancelledError("the cluster of this process is closed");
  bool begins = false, waits = false;
  {
    MutexLock lock(&mutex_);
    if (!closed_) {
      Copy& copy = copies_.try_emplace(key, Copy{.bytes = ref.bytes}).first->second;
      copy.used = clock_.Now();
      if (copy.bytes != ref.bytes) {
        there = NoMore(ref);
      } else if (copy.whole) {
        there = Bytes{blocks_.at(copy.id).memory, ref.bytes};
      } else {
        begins = !std::exchange(copy.fetching, true);
        waits = true;
        copy.waiting.push_back({deadline, std::move(reply)});
        if (begins) ++fetches_;
        StartThread();
      }
    }
  }
  if (!waits) return reply(std::move(there));
  if (begins) BeginFetch(ref, deadline);
}

void Objects::BeginFetch(const ObjectRef& ref, Instant deadline) {
  auto fetch = std::make_shared<Fetch>();
  fetch->ref = ref;
  fetch->deadline = deadline;
  CreateBehind(ref.bytes, std::max(absl::Milliseconds(1), deadline - clock_.Now()), /*passes=*/true,
               [self = shared_from_this(), fetch](absl::StatusOr<Draft> made) {
                 if (!made.ok()) return self->EndFetch(fetch, made.status());
                 {
                   MutexLock lock(&fetch->mutex);
                   fetch->draft = *std::move(made);
                 }
                 self->FetchMore(fetch);
               });
}

// Each hears at its own time.
void Objects::ExpireReaders(Heard& heard) {
  if (fetches_ == 0) return;
  const Instant now = clock_.Now();
  for (auto& [key, copy] : copies_) {
    std::erase_if(copy.waiting, [&](Reader& reader) {
      if (now < reader.deadline) return false;
      heard.push_back(
          [late = Late(key.first, key.second), reply = std::move(reader.reply)]() mutable { reply(late); });
      return true;
    });
  }
}

// Of all that this process fetches a few parts are under way: they are memory of their owner, too.
bool Objects::TakeTurn(const std::shared_ptr<Fetch>& fetch) {
  MutexLock lock(&mutex_);
  if (parts_ < kPartsAtOnce) {
    ++parts_;
    return true;
  }
  if (std::ranges::find(starved_, fetch) == starved_.end()) starved_.push_back(fetch);
  return false;
}

// To who has waited longest and still wants one.
void Objects::PassTurn() {
  for (;;) {
    std::shared_ptr<Fetch> next;
    {
      MutexLock lock(&mutex_);
      if (starved_.empty() || parts_ >= kPartsAtOnce) return;
      next = std::move(starved_.front());
      starved_.pop_front();
    }
    FetchMore(next);
  }
}

void Objects::FetchMore(const std::shared_ptr<Fetch>& fetch) {
  for (;;) {
    PartRequest part;
    part.ref = fetch->ref;
    {
      MutexLock lock(&fetch->mutex);
      if (fetch->over) return;
      const uint64_t left = fetch->ref.bytes - fetch->next;
      if (left == 0 && fetch->under_way == 0) break;
      if (left == 0 || !TakeTurn(fetch)) return;
      part.from = fetch->next;
      part.size = std::min(left, kObjectPartBytes);
      fetch->next += part.size;
      ++fetch->under_way;
    }
    functions_.ask(
        fetch->ref.owner, Control::kPart, PrintPart(part),
        std::max(absl::Milliseconds(1), fetch->deadline - clock_.Now()),
        [self = shared_from_this(), fetch, part](const absl::Status& status, absl::string_view bytes) {
          const bool whole = !status.ok() || bytes.size() == part.size;
          self->OnFetched(fetch, part.from,
                          whole ? status : absl::InternalError("its owner sent another size"), bytes);
        });
  }
  EndFetch(fetch, absl::OkStatus());
}

void Objects::OnFetched(const std::shared_ptr<Fetch>& fetch, uint64_t from, const absl::Status& status,
                        absl::string_view bytes) {
  absl::Status now = status;
  {
    MutexLock lock(&mutex_);
    --parts_;
  }
  PassTurn();
  std::shared_ptr<ObjectMemory> memory;  // nobody else gets it while it is written here
  {
    MutexLock lock(&fetch->mutex);
    if (fetch->over) return;
    memory = fetch->draft.memory;
  }
  if (now.ok()) now = memory->Write(from, bytes.data(), bytes.size());
  memory.reset();
  {
    MutexLock lock(&fetch->mutex);
    --fetch->under_way;
  }
  if (now.ok()) return FetchMore(fetch);
  if (absl::IsUnavailable(now)) {
    now = absl::UnavailableError(absl::StrCat(NameOf(fetch->ref.owner, fetch->ref.id),
                                              " is lost with its process: whoever made it makes it again"));
  }
  if (absl::IsNotFound(now)) now = NoMore(fetch->ref);
  if (absl::IsDeadlineExceeded(now)) now = Late(fetch->ref.owner, fetch->ref.id);
  EndFetch(fetch, now);
}

void Objects::EndFetch(const std::shared_ptr<Fetch>& fetch, const absl::Status& status) {
  Bytes bytes;
  {
    MutexLock lock(&fetch->mutex);
    if (std::exchange(fetch->over, true)) return;
    bytes = {std::exchange(fetch->draft.memory, nullptr), fetch->ref.bytes};
  }
  std::vector<Reader> waiting;
  Instant latest;
  absl::Status now = status;
  {
    MutexLock lock(&mutex_);
    if (closed_ && now.ok()) now = absl::CancelledError("the cluster of this process is closed");
    const auto it = copies_.find({fetch->ref.owner, fetch->ref.id});
    if (it != copies_.end()) {
      for (const Reader& reader : it->second.waiting) latest = std::max(latest, reader.deadline);
      // Who came later has more time.
      const bool late = absl::IsDeadlineExceeded(now) || absl::IsResourceExhausted(now);
      if (!late || latest <= clock_.Now()) {
        latest = {};
        --fetches_;
        waiting = std::exchange(it->second.waiting, {});
      }
      if (latest != Instant()) {
        // It is fetched again.
      } else if (now.ok()) {
        it->second.id = fetch->draft.id;
        it->second.whole = true;
        it->second.fetching = false;
        it->second.used = clock_.Now();
        blocks_.at(it->second.id).sealed = true;
        blocks_.at(it->second.id).bytes = fetch->ref.bytes;
      } else {
        copies_.erase(it);
      }
    }
  }
  if (!now.ok()) {
    bytes.memory.reset();
    if (fetch->draft.id != 0) Release(fetch->draft.id, absl::ZeroDuration());
  }
  if (latest != Instant()) return BeginFetch(fetch->ref, latest);
  for (Reader& one : waiting) one.reply(now.ok() ? absl::StatusOr<Bytes>(bytes) : now);
}

}  // namespace gtrain::actors

// Objects: arrays of bytes that stay in the memory of the process that made them, which others map where they
// are on its machine, and fetch once a machine where they are not.
//
// An object is written once and never changes. It belongs to the process that made it, and is there until
// that lets it go; those that read it then keep its memory until they are done. All memory of a process, that
// which is read after its end and copies of objects of other machines with it, is at most `bytes_max`:
// whoever wants more waits until there is room. Copies that nobody reads make room first, the longest unused
// before others. Of a machine one process, the first of its ranks, has the copies; the others map them there.
//
// Thread-safe; nothing blocks. Cost: of an object a descriptor and two pages; a reader of the same machine
// three system calls; of one of another machine a call for each MiB, four at a time in all.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/exec/object_memory.h"
#include "actors/plan/members.h"
#include "actors/plan/objects.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace gtrain::actors {

struct ObjectOptions {
  uint64_t bytes_max = uint64_t{1} << 30;
  bool of_machine = false;   // they are for all processes of the machine, which have a share each
  size_t objects_max = 256;  // and copies, together: a descriptor each
};

class Objects : public std::enable_shared_from_this<Objects> {
 public:
  struct Functions {
    // A call to a process itself (Peers::Ask).
    std::function<void(const CallerId& process, Control method, const std::string& arguments,
                       absl::Duration timeout, Reply reply)>
        ask;
    std::function<bool(const CallerId& process)> is_near;      // it is on this machine
    std::function<CallerId()> copies_at;                       // who has the copies of this machine
    std::function<std::string(const CallerId& process)> name;  // for people
  };
  // Memory that is being filled, and has its number already.
  struct Draft {
    uint64_t id = 0;
    std::shared_ptr<ObjectMemory> memory;
  };
  // Bytes that are read for as long as somebody has this.
  struct Bytes {
    std::shared_ptr<const ObjectMemory> memory;
    uint64_t size = 0;
  };
  template <typename T>
  using Hears = absl::AnyInvocable<void(absl::StatusOr<T> result)>;
  struct Usage {
    uint64_t bytes = 0, objects = 0, copies = 0, waiting = 0;
  };

  // `clock` outlives it.
  Objects(const CallerId& self, const ObjectOptions& options, Functions functions, const Clock& clock);
  ~Objects();
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;
  // So many processes of the job are on this machine now.
  void SetShares(size_t processes);
  // Those that wait hear kCancelled. What is read may go on being read.
  void Close();

  // ResourceExhausted: there was no room within `timeout`, or there never is for so much.
  void Create(uint64_t bytes, absl::Duration timeout, Hears<Draft> reply) {
    CreateBehind(bytes, timeout, /*passes=*/false, std::move(reply));
  }
  // From now on it is an object of `bytes` and may be read; it is not written any more.
  ObjectRef Seal(const Draft& draft, uint64_t bytes);
  // The object, or the draft, is no more: after `grace` nobody begins to read it.
  void Release(uint64_t id, absl::Duration grace);
  // NotFound: it is no more. Unavailable: nor is the process that had it. DeadlineExceeded.
  // ResourceExhausted: there was no room for a copy.
  void Get(const ObjectRef& ref, absl::Duration timeout, Hears<Bytes> reply);

  // What other processes ask: some of its bytes; and the name of a copy that they may map.
  void OnPart(const PartRequest& request, Reply reply);
  void OnCopy(const ObjectRef& ref, absl::Duration timeout, Reply reply);

  Usage usage() const;

 private:
  struct Block {
    std::shared_ptr<ObjectMemory> memory;
    bool sealed = false;
    uint64_t bytes = 0;              // of the object
    std::optional<Instant> ends_at;  // when nobody may begin to read it; it was released
    bool withdrawn = false;
  };
  using Key = std::pair<CallerId, uint64_t>;  // of an object anywhere
  struct Reader {
    Instant deadline;
    Hears<Bytes> reply;
  };
  struct Copy {
    uint64_t id = 0;     // of its block; 0: there is no room yet
    uint64_t bytes = 0;  // as whoever fetches it was told
    bool whole = false, fetching = false;
    Instant used;
    std::vector<Reader> waiting;
  };
  struct Waiting {
    uint64_t bytes = 0;
    Instant deadline;
    Hears<Draft> reply;
  };
  struct Fetch;
  using Heard = std::vector<absl::AnyInvocable<void()>>;

  static void Tell(Heard& heard);
  // `passes`: a copy that fits waits behind nobody.
  void CreateBehind(uint64_t bytes, absl::Duration timeout, bool passes, Hears<Draft> reply);
  absl::StatusOr<Draft> Take(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<ObjectMemory> TakeIdle(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MakeRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Evict(std::map<Key, Copy>::iterator copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reap() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ReapOne(uint64_t id, Instant now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static bool InUse(const Block& block);
  void DropIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::map<uint64_t, Block>::iterator Free(std::map<uint64_t, Block>::iterator it)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Serve(Heard& heard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration NextLook() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();
  std::string NameOf(const CallerId& owner, uint64_t id) const;
  absl::Status NoMore(const ObjectRef& ref) const;
  absl::Status Late(const CallerId& owner, uint64_t id) const;

  absl::StatusOr<std::shared_ptr<ObjectMemory>> OpenOnce(const ObjectRef& ref);
  void CopyHere(const ObjectRef& ref, absl::Duration timeout, Hears<Bytes> reply);
  void BeginFetch(const ObjectRef& ref, Instant deadline);
  void ExpireReaders(Heard& heard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FetchMore(const std::shared_ptr<Fetch>& fetch);
  bool TakeTurn(const std::shared_ptr<Fetch>& fetch);
  void PassTurn();
  void OnFetched(const std::shared_ptr<Fetch>& fetch, uint64_t from, const absl::Status& status,
                 absl::string_view bytes);
  void EndFetch(const std::shared_ptr<Fetch>& fetch, const absl::Status& status);

  const CallerId self_;
  const ObjectOptions options_;
  const Functions functions_;
  const Clock& clock_;

  mutable Mutex mutex_;
  std::map<uint64_t, Block> blocks_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> released_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Copy> copies_ ABSL_GUARDED_BY(mutex_);
  size_t fetches_ ABSL_GUARDED_BY(mutex_) = 0;  // under way
  // Of other processes of this machine, while somebody reads them.
  std::map<Key, std::weak_ptr<ObjectMemory>> opened_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<ObjectMemory>> idle_ ABSL_GUARDED_BY(mutex_);  // to be used again
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t bytes_max_ ABSL_GUARDED_BY(mutex_);
  uint64_t used_ ABSL_GUARDED_BY(mutex_) = 0;  // bytes of all of them
  uint64_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // To be unmapped by the thread: of large ones that takes long.
  std::vector<std::shared_ptr<ObjectMemory>> doomed_ ABSL_GUARDED_BY(mutex_);
  uint64_t reaped_to_ ABSL_GUARDED_BY(mutex_) = 0;  // released ones up to there were looked at last
  int parts_ ABSL_GUARDED_BY(mutex_) = 0;           // under way to this process
  std::deque<std::shared_ptr<Fetch>> starved_ ABSL_GUARDED_BY(mutex_);  // that wait for one of them to end
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // of StartThread and Close
};

}  // namespace gtrain::actors

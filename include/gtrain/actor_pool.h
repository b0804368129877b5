// Pools of actors. gtrain/actor.h says how they are used; programs include that.
#pragma once
#include <gtrain/actor_ref.h>
#include <gtrain/status.h>
#include <gtrain/task.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace gtrain {

// Actors of which any one does: a call goes to the one that has the fewest of this pool's calls under way.
// Thread-safe; copies share what is under way.
template <typename T>
class ActorPool {
 public:
  explicit ActorPool(GroupRef<T> group) : shared_(std::make_shared<Shared>(std::move(group))) {}
  size_t size() const { return shared_->group.size(); }
  // kInvalidArgument: the pool is empty.
  template <auto kMethod, typename... Given>
  Future<typename internal::TraitsOf<kMethod>::Value> Call(Given&&... given) const {
    using Value = typename internal::TraitsOf<kMethod>::Value;
    if (size() == 0)
      return internal::Failed<Value>(Status(StatusCode::kInvalidArgument, "the pool has no actors"));
    const size_t at = shared_->Begin();
    return shared_->group[at].With(timeout_).template CallAnd<kMethod>(
        [shared = shared_, at](StatusCode code) { shared->End(at, code); }, std::forward<Given>(given)...);
  }
  ActorPool With(std::chrono::nanoseconds timeout) const {
    ActorPool with = *this;
    with.timeout_ = timeout;
    return with;
  }

 private:
  struct Shared {
    explicit Shared(GroupRef<T> actors)
        : group(std::move(actors)), under_way(group.size()), ended(group.size()) {}
    // One that is no more answers at once, and would get all calls.
    size_t Begin() {
      const std::lock_guard lock(mutex);
      const size_t first = next++ % under_way.size();
      size_t best = first;
      for (size_t i = 1; i < under_way.size(); ++i) {
        const size_t at = (first + i) % under_way.size();
        if (std::pair(ended[at], under_way[at]) < std::pair(ended[best], under_way[best])) best = at;
      }
      ++under_way[best];
      return best;
    }
    void End(size_t at, StatusCode code) {
      const std::lock_guard lock(mutex);
      --under_way[at];
      if (code == StatusCode::kNotFound) ended[at] = true;
    }
    const GroupRef<T> group;
    std::mutex mutex;
    std::vector<size_t> under_way;
    std::vector<bool> ended;
    size_t next = 0;
  };
  std::shared_ptr<Shared> shared_;
  std::chrono::nanoseconds timeout_ = kCallTimeout;
};

}  // namespace gtrain

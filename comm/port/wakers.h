// The functions that wake sleeping threads when a generation ends.
#pragma once
#include <functional>
#include <iterator>
#include <list>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace gtrain::comm {

// Thread-safe; outlives its handles. A hundred bytes and a call for each communicator of the process.
class Wakers {
 private:
  using List = std::list<std::function<void()>>;

 public:
  // While it lives, its function may be called.
  class Handle {
   public:
    Handle() = default;
    Handle(Handle&& other) noexcept : wakers_(std::exchange(other.wakers_, nullptr)), place_(other.place_) {}
    Handle& operator=(Handle&& other) noexcept {
      Drop();
      wakers_ = std::exchange(other.wakers_, nullptr);
      place_ = other.place_;
      return *this;
    }
    ~Handle() { Drop(); }

   private:
    friend class Wakers;
    Handle(Wakers* wakers, List::iterator place) : wakers_(wakers), place_(place) {}
    void Drop() {
      if (wakers_ == nullptr) return;
      MutexLock lock(&wakers_->mutex_);
      wakers_->list_.erase(place_);
      wakers_ = nullptr;
    }
    Wakers* wakers_ = nullptr;
    List::iterator place_;
  };

  // `wake` is called from any thread; it neither blocks nor uses this object.
  Handle Add(std::function<void()> wake) {
    MutexLock lock(&mutex_);
    list_.push_back(std::move(wake));
    return Handle(this, std::prev(list_.end()));
  }
  void WakeAll() {
    MutexLock lock(&mutex_);
    for (const std::function<void()>& wake : list_) wake();
  }

 private:
  Mutex mutex_;
  List list_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gtrain::comm

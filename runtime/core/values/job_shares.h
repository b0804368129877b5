// JobShares: entries of many jobs in a room that all of them share. PURE.
#pragma once
#include <cstddef>
#include <iterator>
#include <list>
#include <map>
#include <set>
#include <utility>

#include "base/ids.h"

namespace gtrain::core {

// Owner thread only. `Key` has a member `job` and an order. A caller that needs room takes Oldest(), an entry
// of the job that holds most, so that no job costs another one, which holds less, anything.
template <typename Key, typename Value>
class JobShares {
 public:
  struct Entry {
    Key key;
    Value value;
    size_t bytes = 0;  // as Count() was told
  };

  size_t bytes() const { return bytes_; }
  size_t size() const { return index_.size(); }

  Entry* Find(const Key& key) {
    const auto it = index_.find(key);
    return it == index_.end() ? nullptr : &*it->second;
  }
  const Entry* Find(const Key& key) const {
    const auto it = index_.find(key);
    return it == index_.end() ? nullptr : &*it->second;
  }

  // The entry, made if it was not there; it is the newest of its job then.
  Entry& Renew(const Key& key) {
    std::list<Entry>& entries = jobs_[key.job].entries;
    if (const auto it = index_.find(key); it != index_.end()) {
      entries.splice(entries.end(), entries, it->second);
      return *it->second;
    }
    entries.push_back({key, Value(), 0});
    index_[key] = std::prev(entries.end());
    return entries.back();
  }

  // Says that the size of an entry has changed.
  void Count(Entry& entry, size_t bytes) {
    Job& job = jobs_.at(entry.key.job);
    by_bytes_.erase({job.bytes, entry.key.job});
    job.bytes = job.bytes - entry.bytes + bytes;
    bytes_ = bytes_ - entry.bytes + bytes;
    entry.bytes = bytes;
    by_bytes_.insert({job.bytes, entry.key.job});
  }

  // The size and number of the entries of one job.
  size_t BytesOf(const JobId& job) const { return jobs_.at(job).bytes; }
  size_t EntriesOf(const JobId& job) const { return jobs_.at(job).entries.size(); }

  // The entry of the job that holds most which was not renewed for longest; nullptr: there is none.
  Entry* Oldest() {
    return by_bytes_.empty() ? nullptr : &jobs_.at(by_bytes_.rbegin()->second).entries.front();
  }

  void Erase(Key key) {
    const auto it = index_.find(key);
    if (it == index_.end()) return;
    Count(*it->second, 0);
    Job& job = jobs_.at(key.job);
    job.entries.erase(it->second);
    index_.erase(it);
    if (!job.entries.empty()) return;
    by_bytes_.erase({job.bytes, key.job});
    jobs_.erase(key.job);
  }

  // Calls `gone` with each entry of the job, and forgets them.
  template <typename Gone>
  void EraseJob(const JobId& id, const Gone& gone) {
    const auto job = jobs_.find(id);
    if (job == jobs_.end()) return;
    for (const Entry& entry : job->second.entries) {
      gone(entry);
      index_.erase(entry.key);
    }
    bytes_ -= job->second.bytes;
    by_bytes_.erase({job->second.bytes, id});
    jobs_.erase(job);
  }

 private:
  struct Job {
    size_t bytes = 0;
    std::list<Entry> entries;  // oldest first
  };
  size_t bytes_ = 0;
  std::map<JobId, Job> jobs_;
  std::set<std::pair<size_t, JobId>> by_bytes_;
  std::map<Key, typename std::list<Entry>::iterator> index_;
};

}  // namespace gtrain::core

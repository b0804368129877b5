// DataTransport for tests whose ranks are threads: mailboxes behind one mutex.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "comm/port/data_transport.h"

namespace gtrain::comm {

// Thread-safe; outlives the transports made from it.
class FakeNetwork {
 public:
  std::unique_ptr<DataTransport> MakeTransport();

 private:
  friend class FakeTransport;
  friend class FakeLink;
  struct Packet {
    std::string to;
    MessageHeader header;
    std::string bytes;
  };
  void Deliver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Mutex mutex_;
  int transports_ = 0;
  std::map<std::pair<std::string, std::string>, std::deque<std::string>> mail_;  // by (from, to)
  std::map<std::string, std::string> notices_;                                   // the first, by to
  std::map<std::string, MessageLink::Listener*> listeners_;
  std::deque<Packet> packets_;               // not delivered yet, or their listener is not there yet
  std::map<std::string, std::string> left_;  // words, by who has left
};

}  // namespace gtrain::comm

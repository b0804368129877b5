// Loads libgtrain_comm_ucx.so, once a process and for good; programs whose ranks share one machine never do.
#pragma once
#include <csignal>
#include <iterator>

#include "absl/status/statusor.h"
#include "comm/ucx/ucx_abi.h"

namespace gtrain::comm {

// NotFound without the module, FailedPrecondition where it belongs to another build. Thread-safe.
absl::StatusOr<const GtrainUcxApi*> UcxApi();

// UCX catches fatal signals as soon as it is loaded; a library inside someone's program must not. The
// threads it starts inherit a mask that leaves all signals to the program's own.
class SignalsKept {
 public:
  SignalsKept();
  ~SignalsKept();
  SignalsKept(const SignalsKept&) = delete;
  SignalsKept& operator=(const SignalsKept&) = delete;

 private:
  static constexpr int kSignals[] = {SIGILL, SIGSEGV, SIGBUS,  SIGFPE, SIGABRT,
                                     SIGHUP, SIGINT,  SIGTERM, SIGPIPE};
  struct sigaction before_[std::size(kSignals)];
  sigset_t mask_;
};

}  // namespace gtrain::comm

#include "comm/ucx/ucx_loader.h"

#include <unistd.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "base/module.h"
#include "base/status_macros.h"

namespace gtrain::comm {
namespace {

constexpr const char kModuleName[] = "libgtrain_comm_ucx.so";

// UCX's constructors patch the code of mmap and catch signals, which only its environment can prevent. Not
// setenv(): other threads may be in getenv() now. They see either the old array or this one, which is never
// freed.
class UcxEnvironment {
 public:
  UcxEnvironment() : before_(environ) {
    static const char* const settings[] = {"UCX_MEM_EVENTS=n", "UCX_HANDLE_ERRORS=none",
                                           "UCX_LOG_LEVEL=fatal", "UCX_VFS_ENABLE=n"};
    static std::vector<char*>* const copy =
        new std::vector<char*>;  // reachable: no leak for who looks for leaks
    for (const char* setting : settings) copy->push_back(const_cast<char*>(setting));
    for (char** entry = before_; entry != nullptr && *entry != nullptr; ++entry) copy->push_back(*entry);
    copy->push_back(nullptr);
    environ = copy->data();
  }
  ~UcxEnvironment() { environ = before_; }

 private:
  char** const before_;
};

absl::StatusOr<const GtrainUcxApi*> Load() {
  SignalsKept keep;
  UcxEnvironment quiet;
  GT_ASSIGN_OR_RETURN(void* const module,
                      LoadModule(kModuleName, "GTRAIN_COMM_UCX", "ranks on several machines need"));
  GT_ASSIGN_OR_RETURN(void* const entry, ModuleEntry(module, GTRAIN_UCX_ENTRY, kModuleName));
  const GtrainUcxApi* api = reinterpret_cast<const GtrainUcxApi* (*)()>(entry)();
  if (api == nullptr || api->abi != GTRAIN_UCX_ABI || api->bytes != sizeof(GtrainUcxApi)) {
    return absl::FailedPreconditionError(absl::StrCat(kModuleName, " belongs to another version of gtrain"));
  }
  return api;
}

}  // namespace

SignalsKept::SignalsKept() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &mask_);
}

SignalsKept::~SignalsKept() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
}

absl::StatusOr<const GtrainUcxApi*> UcxApi() {
  static const auto* loaded = new absl::StatusOr<const GtrainUcxApi*>(Load());
  return *loaded;
}

}  // namespace gtrain::comm

#include "absl/strings/str_cat.h"
#include "base/module.h"
#include "base/status_macros.h"
#include "net/http/client.h"

namespace gtrain::http {

absl::StatusOr<std::unique_ptr<Client>> LoadClient() {
  constexpr char kFile[] = "libgtrain_http.so";
  GT_ASSIGN_OR_RETURN(void* const module, LoadModule(kFile, "GTRAIN_HTTP_MODULE", "notices of clouds need"));
  GT_ASSIGN_OR_RETURN(void* const entry, ModuleEntry(module, kModuleEntry, kFile));
  const Module* loaded = reinterpret_cast<const Module* (*)()>(entry)();
  if (loaded->abi != kModuleAbi) {
    return absl::FailedPreconditionError(absl::StrCat(kFile, " belongs to another version of gtrain"));
  }
  return loaded->make();
}

}  // namespace gtrain::http

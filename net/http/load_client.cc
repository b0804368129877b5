#include "base/module.h"
#include "base/status_macros.h"
#include "net/http/client.h"

namespace gtrain::http {

absl::StatusOr<std::unique_ptr<Client>> LoadClient() {
  GT_ASSIGN_OR_RETURN(const Module* const loaded,
                      LoadModuleTable<Module>("libgtrain_http.so", "GTRAIN_HTTP_MODULE",
                                              "notices of clouds need", kModuleEntry, kModuleAbi));
  return loaded->make();
}

}  // namespace gtrain::http

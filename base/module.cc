#include "base/module.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#ifndef GTRAIN_INSTALL_LIBDIR
#define GTRAIN_INSTALL_LIBDIR "lib"
#endif

namespace gtrain {
namespace {

std::vector<std::string> Candidates(const char* file, const char* variable) {
  if (const char* named = std::getenv(variable); named != nullptr && *named != 0) return {named};
  std::vector<std::string> paths;
  Dl_info here;
  std::error_code error;
  if (dladdr(reinterpret_cast<const void*>(&LoadModule), &here) != 0 && here.dli_fname != nullptr) {
    std::filesystem::path self = std::filesystem::canonical(here.dli_fname, error);
    // A program started by a bare name found in $PATH.
    if (error) self = std::filesystem::read_symlink("/proc/self/exe", error);
    for (const char* relative :
         {".", "gtrain", "../lib", "../../lib", "../" GTRAIN_INSTALL_LIBDIR "/gtrain"}) {
      paths.push_back((self.parent_path() / relative / file).lexically_normal().string());
    }
  }
  paths.emplace_back(file);
  return paths;
}

}  // namespace

absl::StatusOr<void*> LoadModule(const char* file, const char* variable, absl::string_view purpose) {
  std::vector<std::string> tried;
  for (const std::string& path : Candidates(file, variable)) {
    if (void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); module != nullptr) return module;
    tried.emplace_back(dlerror());
  }
  return absl::NotFoundError(
      absl::StrCat("cannot load ", file, ", which ", purpose, " (", absl::StrJoin(tried, "; "),
                   "). Install it beside the program or set ", variable, " to its path"));
}

absl::StatusOr<void*> ModuleEntry(void* module, const char* name, absl::string_view file) {
  if (void* entry = dlsym(module, name); entry != nullptr) return entry;
  return absl::FailedPreconditionError(absl::StrCat(file, " belongs to another version of gtrain"));
}

}  // namespace gtrain

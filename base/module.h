// Parts of gtrain that are loaded only when needed, so that a rank starts without their libraries.
#pragma once
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace gtrain {

// dlopen of `file` ("libgtrain_s3.so") from $`variable` if set; else beside this code (program or shared
// library), in
// ../lib of it, then wherever the system looks. It is never unloaded. NotFound names every place tried;
// `purpose` says what cannot be done without it ("checkpoints in s3:// need").
absl::StatusOr<void*> LoadModule(const char* file, const char* variable, absl::string_view purpose);

// The address of a function of the module; FailedPrecondition if it has none: another version.
absl::StatusOr<void*> ModuleEntry(void* module, const char* name, absl::string_view file);

// What the function `entry` of the module returns: a table of functions that begins with the number `abi`.
// FailedPrecondition: another one, of another version.
template <typename Table>
absl::StatusOr<const Table*> LoadModuleTable(const char* file, const char* variable,
                                             absl::string_view purpose, const char* entry, uint32_t abi) {
  GT_ASSIGN_OR_RETURN(void* const module, LoadModule(file, variable, purpose));
  GT_ASSIGN_OR_RETURN(void* const function, ModuleEntry(module, entry, file));
  const Table* table = reinterpret_cast<const Table* (*)()>(function)();
  if (table->abi == abi) return table;
  return absl::FailedPreconditionError(absl::StrCat(
      file, " belongs to another version of gtrain: install both from one build, or set $", variable));
}

}  // namespace gtrain

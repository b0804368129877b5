// Parts of gtrain that are loaded only when needed, so that a rank starts without their libraries.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain {

// dlopen of `file` ("libgtrain_s3.so") from $`variable` if set; else beside this code (program or shared
// library), in
// ../lib of it, then wherever the system looks. It is never unloaded. NotFound names every place tried;
// `purpose` says what cannot be done without it ("checkpoints in s3:// need").
absl::StatusOr<void*> LoadModule(const char* file, const char* variable, absl::string_view purpose);

// The address of a function of the module; FailedPrecondition if it has none: another version.
absl::StatusOr<void*> ModuleEntry(void* module, const char* name, absl::string_view file);

}  // namespace gtrain

#include "launcher/cli/local_secrets.h"

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "runtime/zmq/keys.h"

namespace gtrain::cli {
namespace {

namespace fs = std::filesystem;

std::string FolderOf(const std::string& cluster_dir) { return cluster_dir + "/secrets"; }

}  // namespace

absl::Status CheckSecretsAreSet(const spec::JobSpec& spec) {
  for (const auto& [name, reference] : spec.secrets) {
    if (reference.env.empty() || getenv(reference.env.c_str()) != nullptr) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("secret ", name, ": the variable ", reference.env,
                     " is not set here. Export it before the launch, or name a file: secrets: {", name,
                     ": {file: PATH}}"));
  }
  return absl::OkStatus();
}

absl::StatusOr<spec::JobSpec> KeepSecrets(const std::string& cluster_dir, spec::JobSpec spec) {
  GT_RETURN_IF_ERROR(CheckSecretsAreSet(spec));
  std::string folder;
  for (auto& [name, reference] : spec.secrets) {
    if (reference.env.empty()) continue;
    if (folder.empty()) {
      folder = absl::StrCat(FolderOf(cluster_dir), "/", net::RandomHex(8));
      GT_RETURN_IF_ERROR(MakeDirs(folder));
    }
    std::string file = absl::StrCat(folder, "/", reference.env);
    GT_RETURN_IF_ERROR(WriteFileDurable(file, getenv(reference.env.c_str())));
    reference = {.env = "", .file = std::move(file)};
  }
  return spec;
}

void DropSecrets(const std::string& cluster_dir) {
  const auto young = fs::file_time_type::clock::now() - std::chrono::minutes(1);
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(FolderOf(cluster_dir), error)) {
    std::error_code ignored;  // what cannot be removed now is removed at the next end
    if (const auto at = fs::last_write_time(folder.path(), ignored); !ignored && at < young)
      fs::remove_all(folder.path(), ignored);
  }
}

}  // namespace gtrain::cli

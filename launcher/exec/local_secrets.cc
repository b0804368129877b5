#include "launcher/exec/local_secrets.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/status_macros.h"
#include "net/zmq/keys.h"
#include "runtime/agent/node.h"

namespace gtrain::exec {
namespace {

namespace fs = std::filesystem;

std::string FolderOf(const std::string& cluster_dir) { return cluster_dir + "/secrets"; }

constexpr char kLockEnd[] = ".lock";

absl::Status TooLong(const std::string& name, const std::string& where, uint64_t bytes) {
  return absl::InvalidArgumentError(absl::StrCat("secret ", name, ": ", where, " has ", bytes,
                                                 " bytes, and a secret has at most ", agent::kSecretBytesMax,
                                                 ": give the ranks the path of a file"));
}

}  // namespace

absl::Status CheckSecretsAreSet(const spec::JobSpec& spec) {
  for (const auto& [name, reference] : spec.secrets) {
    if (reference.env.empty()) {
      std::error_code unknown;  // then the agent says what is wrong with it
      const uint64_t bytes = fs::file_size(reference.file, unknown);
      if (!unknown && bytes > agent::kSecretBytesMax + 1) return TooLong(name, reference.file, bytes);
      continue;
    }
    const char* const value = getenv(reference.env.c_str());
    if (value == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("secret ", name, ": the variable ", reference.env,
                       " is not set here. Export it before the launch, or name a file: secrets: {", name,
                       ": {file: PATH}}"));
    }
    const size_t bytes = strlen(value);
    if (bytes > agent::kSecretBytesMax) return TooLong(name, "the variable " + reference.env, bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<KeptSecrets> KeepSecrets(const std::string& cluster_dir, spec::JobSpec spec) {
  GT_RETURN_IF_ERROR(CheckSecretsAreSet(spec));
  KeptSecrets kept;
  for (auto& [name, reference] : spec.secrets) {
    if (reference.env.empty()) continue;
    if (kept.folder.empty()) {
      const std::string folder = absl::StrCat(FolderOf(cluster_dir), "/", net::RandomHex(8));
      GT_RETURN_IF_ERROR(MakeDirs(FolderOf(cluster_dir)));
      GT_ASSIGN_OR_RETURN(kept.lock, WriteLockedFile(folder + kLockEnd, ""));
      GT_RETURN_IF_ERROR(MakeDirs(folder));
      kept.folder = folder;
    }
    std::string file = absl::StrCat(kept.folder, "/", reference.env);
    // A reader of a secret's file drops one line end: with one added here, the value arrives byte by byte.
    if (absl::Status written = WriteFileDurable(file, absl::StrCat(getenv(reference.env.c_str()), "\n"));
        !written.ok()) {
      Remove(kept);
      return written;
    }
    reference = {.env = "", .file = std::move(file)};
  }
  kept.spec = std::move(spec);
  return kept;
}

void Remove(const KeptSecrets& kept) {
  if (kept.folder.empty()) return;
  std::error_code ignored;  // what cannot be removed now is removed when the cluster ends
  fs::remove_all(kept.folder, ignored);
  fs::remove(kept.folder + kLockEnd, ignored);
}

void DropSecrets(const std::string& cluster_dir) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(FolderOf(cluster_dir), error))
    paths.push_back(entry.path().native());
  for (const std::string& path : paths) {
    // A lock without a folder is of a launch that ended, or that has none yet.
    const std::string folder(absl::StripSuffix(path, kLockEnd));
    if (IsLocked(folder + kLockEnd)) continue;
    std::error_code ignored;  // what cannot be removed now is removed at the next end
    fs::remove_all(folder, ignored);
    fs::remove(folder + kLockEnd, ignored);
  }
}

}  // namespace gtrain::exec

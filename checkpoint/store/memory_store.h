// Blobs in this process's memory: tests, and the shape every other store is compared with.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Thread-safe; never blocks for long.
class MemoryStore final : public port::BlobStore {
 public:
  using port::BlobStore::PutIfAbsent;
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override;
  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override;
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override;
  absl::StatusOr<uint64_t> Size(absl::string_view key) override;
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override;
  absl::StatusOr<std::vector<std::string>> ListFolders() override;
  absl::Status Delete(absl::string_view key) override;
  absl::Status DropEmptyFolder(absl::string_view) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override { return std::vector<Unfinished>(); }
  absl::Status DropUnfinished(const Unfinished&) override { return absl::OkStatus(); }
  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override;
  bool ChecksEveryPut() const override { return true; }
  std::string Describe() const override { return "memory"; }

  // Makes everything that is there look older by so much.
  void Age(absl::Duration by);

 private:
  struct Blob {
    std::string bytes;
    absl::Duration put;  // on clock_
  };
  Mutex mu_;
  absl::Duration clock_ ABSL_GUARDED_BY(mu_);  // only Age() moves it
  std::map<std::string, Blob, std::less<>> blobs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gtrain::ckpt

// A store that misbehaves on purpose: calls fail, or their answers are lost (C1, C2).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "base/mutex.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

enum class Fault {
  kNone,
  kBefore,  // the call does not happen
  kAfter,   // the call happens, its answer is lost
};

// The plan says which fault happens at call number `call` (from 0). Called by several threads.
struct FaultPlan {
  std::function<Fault(uint64_t call, absl::string_view name)> fault;
  // The answer of a call with kBefore or kAfter; by default Unavailable.
  absl::Status error = absl::UnavailableError("injected fault");
};

// Thread-safe; `base` must outlive it. Counts every call that reaches storage; DeleteAll is one for
// each key, PutStream is called PutIfAbsent.
class FaultyStore : public port::BlobStore {
 public:
  FaultyStore(port::BlobStore* base, FaultPlan plan) : base_(base), plan_(std::move(plan)) {}
  // Owns `base`.
  FaultyStore(std::unique_ptr<port::BlobStore> base, FaultPlan plan)
      : owned_(std::move(base)), base_(owned_.get()), plan_(std::move(plan)) {}

  using port::BlobStore::PutIfAbsent;
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override;
  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override;
  uint64_t BytesMax() const override { return base_->BytesMax(); }
  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override;
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override;
  uint64_t ReadSize() const override { return base_->ReadSize(); }
  absl::StatusOr<uint64_t> Size(absl::string_view key) override;
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override;
  absl::StatusOr<std::vector<std::string>> ListAll(absl::Span<const absl::string_view> prefixes) override;
  absl::StatusOr<std::vector<std::string>> ListFolders() override;
  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override;
  absl::Status Delete(absl::string_view key) override;
  bool ChecksEveryPut() const override { return base_->ChecksEveryPut(); }
  bool DeletesTogether() const override { return base_->DeletesTogether(); }
  absl::Status DropEmptyFolder(absl::string_view folder) override;
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override;
  absl::Status DropUnfinished(const Unfinished& unfinished) override;
  std::string Describe() const override { return base_->Describe(); }

  // "PutIfAbsent manifests/..." of each call so far.
  std::vector<std::string> calls() const;

 private:
  template <typename Result>
  Result Run(absl::string_view name, absl::string_view key, absl::FunctionRef<Result()> call);

  const std::unique_ptr<port::BlobStore> owned_;  // null: somebody else's
  port::BlobStore* const base_;
  const FaultPlan plan_;
  mutable Mutex mu_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gtrain::ckpt

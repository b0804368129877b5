// The names of a job's actors, as the process that keeps them has them. PURE.
//
// A name belongs to one actor until its owner lets it go, or is dead. Whether the actor itself still lives
// only its owner knows: who finds a name taken, or asks for one, asks the owner then (Directory). Not
// thread-safe. Cost: O(log n) of n names; about 200 bytes and the texts a name.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "actors/plan/call_ledger.h"

namespace gtrain::actors {

inline constexpr size_t kNamesMax = 65'536;

// 1 to 255 bytes without control characters.
absl::Status CheckName(absl::string_view name);

struct NamedActor {
  std::string name, type, signature;
  CallerId owner;
  uint64_t id = 0;        // the owner's number of it
  std::string reference;  // as it travels
  bool detached = false;  // of the owner alone
  bool operator==(const NamedActor&) const = default;
};

class NameTable {
 public:
  explicit NameTable(size_t names_max = kNamesMax) : names_max_(names_max) {}

  // AlreadyExists: another actor has the name. ResourceExhausted: there are as many names as may be.
  absl::Status Put(const NamedActor& named);
  // Null: nobody has it. Until the next change.
  const NamedActor* Find(absl::string_view name) const;
  // The actor has the name no more, if it had it.
  void Drop(absl::string_view name, const CallerId& owner, uint64_t id);
  // Nothing of this process comes any more.
  void DropOwner(const CallerId& owner);
  size_t size() const { return names_.size(); }

 private:
  const size_t names_max_;
  std::map<std::string, NamedActor, std::less<>> names_;
  std::map<CallerId, std::set<std::string>> of_owner_;
};

}  // namespace gtrain::actors

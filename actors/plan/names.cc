#include "actors/plan/names.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gtrain::actors {

absl::Status CheckName(absl::string_view name) {
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (!name.empty() && name.size() <= 255 && std::ranges::none_of(name, control)) return absl::OkStatus();
  return absl::InvalidArgumentError("the name of an actor has 1 to 255 bytes, and no control characters");
}

absl::Status NameTable::Put(const NamedActor& named) {
  const auto it = names_.find(named.name);
  if (it != names_.end() && (it->second.owner != named.owner || it->second.id != named.id)) {
    return absl::AlreadyExistsError(
        absl::StrCat("another actor, of class ", it->second.type, ", has the name '", named.name, "'"));
  }
  if (it == names_.end() && names_.size() >= names_max_)
    return absl::ResourceExhaustedError(absl::StrCat("the actors of this job have ", names_max_,
                                                     " names, which "
                                                     "is as many as there may be"));
  names_.insert_or_assign(named.name, named);
  of_owner_[named.owner].insert(named.name);
  return absl::OkStatus();
}

const NamedActor* NameTable::Find(absl::string_view name) const {
  const auto it = names_.find(name);
  return it == names_.end() ? nullptr : &it->second;
}

void NameTable::Drop(absl::string_view name, const CallerId& owner, uint64_t id) {
  const auto it = names_.find(name);
  if (it == names_.end() || it->second.owner != owner || it->second.id != id) return;
  const auto of = of_owner_.find(owner);
  of->second.erase(it->first);
  if (of->second.empty()) of_owner_.erase(of);
  names_.erase(it);
}

void NameTable::DropOwner(const CallerId& owner) {
  const auto of = of_owner_.find(owner);
  if (of == of_owner_.end()) return;
  for (const std::string& name : of->second) names_.erase(name);
  of_owner_.erase(of);
}

}  // namespace gtrain::actors

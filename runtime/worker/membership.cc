#include "runtime/worker/membership.h"

#include <utility>

#include "base/status_macros.h"
#include "runtime/worker/keeper_link.h"

namespace gtrain::worker {

absl::Status Membership::ReadMembers() {
  MutexLock lock(&members_mutex_);
  if (!members_.empty()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(members_, worker::ReadMembers(env_));
  return absl::OkStatus();
}

std::shared_ptr<comm::Fabric>& Membership::fabric() { return link_->fabric(); }

comm::Wakers& Membership::wakers() { return link_->wakers(); }

absl::StatusOr<std::vector<std::string>> Membership::AllGather(absl::string_view blob,
                                                               absl::Duration timeout) {
  return link_->AllGather(*this, blob, timeout);
}

absl::StatusOr<UniqueFd> Membership::Arena(uint64_t id, uint64_t bytes, uint64_t zeros,
                                           absl::Duration timeout) {
  return link_->Arena(*this, {id, bytes, zeros}, timeout);
}

void Membership::FreeArena(uint64_t id) { link_->FreeArena(*this, id); }

absl::Status Membership::Alive() const {
  if (link_->Forked()) return link_->ForkedError();
  if (!over_.load(std::memory_order_acquire)) return absl::OkStatus();
  return absl::UnavailableError(reason_);
}

std::vector<int> Membership::Left() const { return link_->Left(*this); }

void Membership::ReportLink(int peer, const std::string& text) {
  link_->Report(*this, core::WorkerLinkDown{peer, text});
}

void Membership::ReportCompression(const std::string& text) {
  link_->Report(*this, core::WorkerNote{core::kCompressionNote, text});
}

void Membership::End(const std::string& reason) {
  if (over_.load(std::memory_order_relaxed)) return;
  reason_ = reason;
  over_.store(true, std::memory_order_release);
}

}  // namespace gtrain::worker

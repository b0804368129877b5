// A transport that does what another one does. Tests override the call that they count, slow down or break.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/port/data_transport.h"

namespace gtrain::comm {

class ForwardingTransport : public DataTransport {
 public:
  explicit ForwardingTransport(std::unique_ptr<DataTransport> inner) : inner_(std::move(inner)) {}
  absl::StatusOr<std::string> Address() override { return inner_->Address(); }
  absl::Status Connect(const std::vector<std::string>& addresses, int self) override {
    return inner_->Connect(addresses, self);
  }
  // The part is the inner transport's, and forwards nothing.
  absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                      uint64_t id) override {
    return inner_->Part(members, self, id);
  }
  absl::StatusOr<std::unique_ptr<MessageLink>> Messages(MessageLink::Listener* listener) override {
    return inner_->Messages(listener);
  }
  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    return inner_->Exchange(transfers, done, watch);
  }
  void Fail(absl::string_view notice) override { inner_->Fail(notice); }
  void Leave(absl::string_view words) override { inner_->Leave(words); }
  std::vector<int> Unfinished() const override { return inner_->Unfinished(); }
  absl::Status Heard() override { return inner_->Heard(); }

 private:
  const std::unique_ptr<DataTransport> inner_;
};

}  // namespace gtrain::comm

#include "comm/ucx/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gtrain::comm {

// Null: too far ahead.
Mailbox::Slot* Mailbox::At(From& from, uint64_t number) {
  if (number < from.first || number - from.first >= kAheadMax) return nullptr;
  while (from.slots.size() <= number - from.first) from.slots.emplace_back();
  return &from.slots[number - from.first];
}

uint64_t Mailbox::Expect(int from, void* data, size_t bytes, size_t* received) {
  From& sender = from_[static_cast<size_t>(from)];
  const uint64_t number = sender.expected++;
  Slot* const slot = At(sender, number);
  if (slot == nullptr) {
    wrong_ = absl::StrCat("more than ", kAheadMax, " messages of member ", from, " are waited for");
    return number;
  }
  slot->expected = true;
  slot->to = static_cast<char*>(data);
  slot->bytes = bytes;
  slot->received = received;
  if (slot->begun) Fits(from, *slot);
  if (!slot->early.empty()) {
    if (wrong_.empty()) std::memcpy(slot->to, slot->early.data(), slot->early.size());
    slot->early = std::string();
  }
  AskForMore(from, number, *slot);
  return number;
}

void Mailbox::Fits(int from, Slot& slot) {
  const bool fits = slot.received == nullptr ? slot.total == slot.bytes : slot.total <= slot.bytes;
  if (fits) {
    if (slot.received != nullptr) *slot.received = slot.total;
    return;
  }
  wrong_ = absl::StrCat("member ", from, " sent ", slot.total, " bytes where ", slot.bytes, " were expected");
}

// Asks at once where it is known that there is more: a sender that comes later need not ask.
void Mailbox::AskForMore(int from, uint64_t number, Slot& slot) {
  if (slot.asked || !slot.expected) return;
  const uint64_t total = slot.begun ? slot.total : slot.received == nullptr ? slot.bytes : 0;
  if (total <= kPieceBytes) return;
  slot.asked = true;
  ready_.push_back({from, number});
}

absl::Status Mailbox::Take(const MessageHeader& h, absl::string_view bytes) {
  const auto strange = [&] {
    return absl::DataLossError(absl::StrCat("member ", h.sender, " sent what is no piece of a message"));
  };
  if (h.sender >= from_.size() || h.offset > h.total || bytes.size() > h.total - h.offset) return strange();
  From& sender = from_[h.sender];
  Slot* const slot = At(sender, h.number);
  if (slot == nullptr) return strange();
  const auto from = static_cast<int>(h.sender);
  if (!slot->begun) {
    slot->begun = true;
    slot->total = h.total;
    if (slot->expected) Fits(from, *slot);
  }
  if (slot->total != h.total || slot->got + bytes.size() > h.total) return strange();
  slot->got += bytes.size();
  if (!slot->expected) {
    if (h.offset != 0 || bytes.size() > kPieceBytes) return strange();
    slot->early.assign(bytes.data(), bytes.size());
  } else if (wrong_.empty()) {
    std::memcpy(slot->to + h.offset, bytes.data(), bytes.size());
  }
  AskForMore(from, h.number, *slot);
  return absl::OkStatus();
}

bool Mailbox::Done(int from, uint64_t number) {
  From& sender = from_[static_cast<size_t>(from)];
  if (number < sender.first) return true;
  if (!sender.slots[number - sender.first].done()) return false;
  while (!sender.slots.empty() && sender.slots.front().done()) {
    sender.slots.pop_front();
    ++sender.first;
  }
  return true;
}

std::vector<Mailbox::Ready> Mailbox::TakeReady() { return std::exchange(ready_, {}); }

}  // namespace gtrain::comm

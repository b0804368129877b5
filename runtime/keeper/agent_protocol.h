// Bytes between an agent and a keeper: a frame header and the fields of one value of
// runtime/core/values/keeper_messages.h. Both sides run on one machine, so integers travel in host
// byte order. std only, no exceptions.
//
// Transport: SOCK_STREAM unix socket `agent.sock` in the keeper's state directory; the keeper
// accepts peers of its own uid only. A frame longer than kAgentFrameBytesMax or with bytes missing inside a
// field closes the connection. The neighbour may be one version older or newer (Compatible): fields missing
// at the end keep their defaults, bytes left over and unknown kinds are ignored.
#pragma once
#include <cstring>
#include <optional>
#include <type_traits>

#include "runtime/core/values/keeper_messages.h"

namespace gtrain::keeper {

inline constexpr uint32_t kAgentFrameBytesMax = 32u << 20;

// Ranks of one generation on one machine: an agent starts no more. Each takes descriptors of the keeper, and
// many of them a connection.
inline constexpr int kRanksMax = 4096;

struct AgentFrame {
  uint32_t bytes;  // of body
  uint32_t kind;   // index of the value in its variant
};

class Writer {
 public:
  explicit Writer(std::string* out) : out_(out) {}
  template <typename... T>
  void All(T&... fields) {
    (One(fields), ...);
  }

 private:
  void Raw(const void* data, size_t bytes) { out_->append(static_cast<const char*>(data), bytes); }
  void One(std::string& text) {
    uint32_t size = static_cast<uint32_t>(text.size());
    Raw(&size, sizeof(size));
    Raw(text.data(), text.size());
  }
  template <typename A, typename B>
  void One(std::pair<A, B>& pair) {
    All(pair.first, pair.second);
  }
  template <typename T>
  void One(std::vector<T>& items) {
    uint32_t size = static_cast<uint32_t>(items.size());
    Raw(&size, sizeof(size));
    for (T& item : items) One(item);
  }
  template <typename T>
  void One(T& value) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      Raw(&value, sizeof(value));
    } else {
      value.Fields(*this);
    }
  }

  std::string* out_;
};

class Reader {
 public:
  Reader(const char* data, size_t bytes) : at_(data), left_(bytes) {}
  template <typename... T>
  void All(T&... fields) {
    (Next(fields), ...);
  }
  bool ok() const { return ok_; }

 private:
  template <typename T>
  void Next(T& field) {
    if (depth_ == 0 && left_ == 0) return;  // an older sender knows no more fields
    ++depth_;
    One(field);
    --depth_;
  }
  bool Raw(void* data, size_t bytes) {
    if (!ok_ || bytes > left_) return ok_ = false;
    std::memcpy(data, at_, bytes);
    at_ += bytes;
    left_ -= bytes;
    return true;
  }
  // A length can never exceed the bytes left, so hostile sizes allocate nothing.
  bool Size(uint32_t* size) { return Raw(size, sizeof(*size)) && (*size <= left_ || (ok_ = false)); }
  void One(std::string& text) {
    uint32_t size = 0;
    if (!Size(&size)) return;
    text.assign(at_, size);
    at_ += size;
    left_ -= size;
  }
  template <typename A, typename B>
  void One(std::pair<A, B>& pair) {
    All(pair.first, pair.second);
  }
  template <typename T>
  void One(std::vector<T>& items) {
    uint32_t size = 0;
    if (!Size(&size)) return;
    for (uint32_t i = 0; i < size && ok_; ++i) One(items.emplace_back());
  }
  void One(bool& value) {
    uint8_t byte = 0;
    Raw(&byte, sizeof(byte));
    value = byte != 0;
  }
  template <typename T>
  void One(T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      Raw(&value, sizeof(value));
    } else if constexpr (std::is_enum_v<T>) {
      if (Raw(&value, sizeof(value)) && value > Last(value)) ok_ = false;
    } else {
      value.Fields(*this);
    }
  }

  const char* at_;
  size_t left_;
  int depth_ = 0;
  bool ok_ = true;
};

// Appends one whole frame to `out`.
template <typename Variant>
void AppendFrame(Variant message, std::string* out) {
  const size_t start = out->size();
  AgentFrame frame{0, static_cast<uint32_t>(message.index())};
  out->append(reinterpret_cast<const char*>(&frame), sizeof(frame));
  Writer writer(out);
  std::visit([&](auto& value) { value.Fields(writer); }, message);
  frame.bytes = static_cast<uint32_t>(out->size() - start - sizeof(frame));
  std::memcpy(out->data() + start, &frame, sizeof(frame));
}

template <typename Variant, size_t I = 0>
std::optional<Variant> ReadBody(uint32_t kind, const char* data, size_t bytes) {
  if constexpr (I < std::variant_size_v<Variant>) {
    if (kind != I) return ReadBody<Variant, I + 1>(kind, data, bytes);
    std::variant_alternative_t<I, Variant> value;
    Reader reader(data, bytes);
    value.Fields(reader);
    if (!reader.ok()) return std::nullopt;
    return Variant(std::in_place_index<I>, std::move(value));
  } else {
    return std::nullopt;
  }
}

enum class Take { kMessage, kNeedMore, kBroken };

// Takes the next whole frame from the front of `buffer`, starting at *used.
template <typename Variant>
Take TakeFrame(const std::string& buffer, size_t* used, Variant* message) {
  AgentFrame frame;
  while (true) {
    if (buffer.size() - *used < sizeof(frame)) return Take::kNeedMore;
    std::memcpy(&frame, buffer.data() + *used, sizeof(frame));
    if (frame.bytes > kAgentFrameBytesMax) return Take::kBroken;
    if (buffer.size() - *used - sizeof(frame) < frame.bytes) return Take::kNeedMore;
    if (frame.kind < std::variant_size_v<Variant>) break;
    *used += sizeof(frame) + frame.bytes;
  }
  auto read = ReadBody<Variant>(frame.kind, buffer.data() + *used + sizeof(frame), frame.bytes);
  if (!read) return Take::kBroken;
  *message = std::move(*read);
  *used += sizeof(frame) + frame.bytes;
  return Take::kMessage;
}

}  // namespace gtrain::keeper

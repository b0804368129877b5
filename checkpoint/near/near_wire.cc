#include "checkpoint/near/near_wire.h"

#include <cstring>

#include "base/check.h"

namespace gtrain::ckpt {
namespace {

constexpr size_t kTextBytesMax = 255;
constexpr size_t kSentenceBytesMax = 1024;

template <typename Number>
void Put(Number number, std::string* out) {
  for (size_t i = 0; i < sizeof(number); ++i) out->push_back(static_cast<char>(number >> (8 * i) & 0xff));
}

void PutText(absl::string_view text, std::string* out) {
  GT_CHECK(text.size() <= kTextBytesMax);
  Put(static_cast<uint8_t>(text.size()), out);
  out->append(text.data(), text.size());
}

template <typename Number>
bool Take(absl::string_view* from, Number* number) {
  if (from->size() < sizeof(Number)) return false;
  *number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i)
    *number = static_cast<Number>(*number | static_cast<Number>(static_cast<uint8_t>((*from)[i])) << (8 * i));
  from->remove_prefix(sizeof(Number));
  return true;
}

bool TakeText(absl::string_view* from, std::string* text) {
  uint8_t size = 0;
  if (!Take(from, &size) || from->size() < size) return false;
  text->assign(from->data(), size);
  from->remove_prefix(size);
  return true;
}

bool TakeMagic(absl::string_view* from) {
  uint32_t magic = 0;
  return Take(from, &magic) && magic == kNearMagic;
}

}  // namespace

std::string PrintRequest(const NearRequest& request) {
  std::string out;
  out.reserve(request.data.size() + 1024);
  Put(kNearMagic, &out);
  Put(static_cast<uint8_t>(request.kind), &out);
  Put(request.offset, &out);
  Put(request.bytes, &out);
  for (const std::string* text : {&request.attempt, &request.file, &request.committed}) PutText(*text, &out);
  out.append(request.data.data(), request.data.size());
  return out;
}

absl::StatusOr<NearRequest> ParseRequest(absl::string_view message) {
  NearRequest request;
  uint8_t kind = 0;
  const bool whole = TakeMagic(&message) && Take(&message, &kind) && Take(&message, &request.offset) &&
                     Take(&message, &request.bytes) && TakeText(&message, &request.attempt) &&
                     TakeText(&message, &request.file) && TakeText(&message, &request.committed);
  if (!whole || kind < 1 || kind > 5) return absl::InvalidArgumentError("not a request for copies");
  request.kind = static_cast<NearRequest::Kind>(kind);
  request.data = message;
  if (request.data.empty() == (request.kind == NearRequest::Kind::kPiece))
    return absl::InvalidArgumentError("data where none belongs, or none where it does");
  return request;
}

std::string PrintReply(const absl::Status& status, absl::string_view data) {
  std::string out;
  out.reserve(data.size() + 16);
  Put(kNearMagic, &out);
  Put(static_cast<uint8_t>(status.code()), &out);
  const absl::string_view rest = status.ok() ? data : status.message().substr(0, kSentenceBytesMax);
  out.append(rest.data(), rest.size());
  return out;
}

absl::StatusOr<absl::string_view> ParseReply(absl::string_view message) {
  uint8_t code = 0;
  if (!TakeMagic(&message) || !Take(&message, &code) || code > 16)
    return absl::DataLossError("not an answer about copies");
  if (code == 0) return message;
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

std::string PrintShards(const std::vector<port::NearTier::Shard>& shards) {
  std::string out;
  for (const port::NearTier::Shard& shard : shards) {
    PutText(shard.file, &out);
    Put(shard.bytes, &out);
  }
  return out;
}

absl::StatusOr<std::vector<port::NearTier::Shard>> ParseShards(absl::string_view data) {
  std::vector<port::NearTier::Shard> shards;
  while (!data.empty()) {
    port::NearTier::Shard& shard = shards.emplace_back();
    if (!TakeText(&data, &shard.file) || !Take(&data, &shard.bytes))
      return absl::DataLossError("not a list of copies");
  }
  return shards;
}

}  // namespace gtrain::ckpt

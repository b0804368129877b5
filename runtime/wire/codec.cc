// Decode copies the bytes into its own aligned words before Cap'n Proto sees them, bounds what a
// message may make the reader touch, looks at the kind before any field, then reads every field
// through message_fields.h, which checks each one. Cap'n Proto reports broken structure by exceptions; they
// end here.
#include "runtime/wire/codec.h"

#include <kj/exception.h>

#include "absl/functional/function_ref.h"
#include "runtime/wire/message_fields.h"

namespace gtrain::wire {
namespace {

constexpr int kNestingMax = 16;
constexpr uint64_t kTraversalFactor = 4;  // a word may be reached that many times on average

#define GT_COUNT(...) +1
static_assert(std::variant_size_v<core::Message> == 0 GT_MESSAGES(GT_COUNT),
              "an alternative of core::Message is not in message_table.h");
static_assert(std::variant_size_v<core::ClientRequestBody> == 0 GT_REQUESTS(GT_COUNT),
              "a client request is not in message_table.h");
#undef GT_COUNT
static_assert(static_cast<int>(core::ExitCause::kLost) == static_cast<int>(proto::ExitCause::LOST));
static_assert(static_cast<int>(core::RankState::kExited) == static_cast<int>(proto::RankState::EXITED));
static_assert(static_cast<int>(core::RankPause::kPaused) == static_cast<int>(proto::RankPause::PAUSED));
static_assert(static_cast<int>(core::NoticeKind::kLeave) == static_cast<int>(proto::NoticeKind::LEAVE));
static_assert(static_cast<int>(core::EndMode::kStopNow) == static_cast<int>(proto::EndMode::STOP_NOW));
static_assert(static_cast<int>(core::AgentQuery::Kind::kActors) ==
              static_cast<int>(proto::QueryKind::ACTORS));

struct KindInfo {
  absl::string_view name;
  Sender sender;
  core::Bound bound;
};

absl::StatusOr<KindInfo> InfoOf(proto::Message::Which which) {
  switch (which) {
#define GT_CASE(Type, ENUM, sender, bound) \
  case proto::Message::ENUM:               \
    return KindInfo{#Type, Sender::sender, core::Bound::bound};
    GT_MESSAGES(GT_CASE)
#undef GT_CASE
    default:
      return absl::InvalidArgumentError("message of an unknown kind");
  }
}

// `read` gets the root of bytes that may be anything.
absl::Status ReadRoot(absl::string_view bytes, absl::FunctionRef<absl::Status(proto::Message::Reader)> read) {
  if (bytes.size() < 2 * sizeof(capnp::word) || bytes.size() > kMessageBytesMax ||
      bytes.size() % sizeof(capnp::word) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("not a control message: ", bytes.size(), " bytes"));
  }
  try {
    kj::Array<capnp::word> words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
    std::memcpy(words.begin(), bytes.data(), bytes.size());
    capnp::ReaderOptions options;
    options.nestingLimit = kNestingMax;
    options.traversalLimitInWords = words.size() * kTraversalFactor;
    capnp::FlatArrayMessageReader reader(words, options);
    return read(reader.getRoot<proto::Message>());
  } catch (const kj::Exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("not a control message: ", e.getDescription().cStr()));
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("not a control message: ", e.what()));
  }
}

absl::Status DecodeRoot(proto::Message::Reader root, size_t bytes, Sender sender, core::Message& message) {
  absl::StatusOr<KindInfo> info = InfoOf(root.which());
  if (!info.ok()) return info.status();
  if (sender != Sender::kAny && sender != info->sender) {
    return absl::InvalidArgumentError(absl::StrCat("a ", info->name, " may not come from this peer"));
  }
  if (info->bound == core::Bound::kSmall && bytes > kControlBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(info->name, " of ", bytes, " bytes"));
  }
  Archive archive;
  switch (root.which()) {
#define GT_CASE(Type, ENUM, sender, bound)                            \
  case proto::Message::ENUM:                                          \
    Fields(archive, root.get##Type(), message.emplace<core::Type>()); \
    break;
    GT_MESSAGES(GT_CASE)
#undef GT_CASE
    default:
      break;
  }
  if (!archive.ok()) return absl::InvalidArgumentError(absl::StrCat(info->name, ".", archive.error));
  return absl::OkStatus();
}

}  // namespace

std::string Encode(const core::Message& message) {
  capnp::MallocMessageBuilder builder;
  proto::Message::Builder root = builder.initRoot<proto::Message>();
  Archive archive;
#define GT_CASE(Type, ENUM, sender, bound) \
  if (auto* part = std::get_if<core::Type>(&message)) Fields(archive, root.init##Type(), *part);
  GT_MESSAGES(GT_CASE)
#undef GT_CASE
  kj::Array<capnp::word> words = capnp::messageToFlatArray(builder);
  auto bytes = words.asChars();
  return std::string(bytes.begin(), bytes.size());
}

absl::StatusOr<core::Message> Decode(absl::string_view bytes, Sender sender) {
  core::Message message;
  const absl::Status read = ReadRoot(
      bytes, [&](proto::Message::Reader root) { return DecodeRoot(root, bytes.size(), sender, message); });
  if (!read.ok()) return read;
  return message;
}

std::string RequestIdOf(absl::string_view bytes) {
  std::string id;
  const absl::Status read = ReadRoot(bytes, [&](proto::Message::Reader root) {
    if (root.isClientRequest()) id = std::string(View(root.getClientRequest().getId()));
    return absl::OkStatus();
  });
  return read.ok() && ValidId(id) ? id : "";
}

void ReadSealed(Archive& a, absl::string_view bytes, core::GenerationGrant& grant) {
  const absl::Status read = ReadRoot(bytes, [&](proto::Message::Reader root) {
    if (!root.isStartGeneration() || root.getStartGeneration().hasSeal())
      return absl::InvalidArgumentError("not a grant");  // seals in seals would never end
    Fields(a, root.getStartGeneration().getGrant(), grant);
    return absl::OkStatus();
  });
  if (!read.ok()) a.Fail("seal", read.message());
}

absl::string_view KindName(const core::Message& message) {
  absl::string_view name;
#define GT_CASE(Type, ENUM, sender, bound) \
  if (std::holds_alternative<core::Type>(message)) name = #Type;
  GT_MESSAGES(GT_CASE)
#undef GT_CASE
  return name;
}

}  // namespace gtrain::wire

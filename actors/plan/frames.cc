#include "actors/plan/frames.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "actors/plan/bytes.h"
#include "base/status_macros.h"

namespace gtrain::actors {
namespace {

enum Kind : uint8_t { kHello = 1, kWelcome = 2, kCall = 3, kAnswer = 4, kAgain = 5, kAcknowledge = 6 };
enum Flag : uint8_t { kGivenUp = 1, kFull = 1 };

void PutId(const CallerId& id, std::string* to) {
  PutNumber(id.high, to);
  PutNumber(id.low, to);
}

absl::Status Wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("a message about calls is wrong: ", what));
}

// Whoever takes looks at the end whether all was there.
class Reader {
 public:
  explicit Reader(absl::string_view* bytes) : bytes_(*bytes) {}
  template <typename T>
  T Take() {
    T value{};
    if (!TakeNumber(&bytes_, &value)) short_ = true;
    return value;
  }
  CallerId TakeId() {
    CallerId id;
    id.high = Take<uint64_t>();
    id.low = Take<uint64_t>();
    return id;
  }
  absl::string_view Text(size_t most) {
    absl::string_view text;
    if (!TakeText(&bytes_, most, &text)) short_ = true;
    return text;
  }
  bool ok() const { return !short_; }
  absl::string_view rest() const { return bytes_; }

 private:
  absl::string_view bytes_;
  bool short_ = false;
};

struct Appender {
  std::string* to;
  void operator()(const HelloFrame& frame) const {
    PutNumber<uint8_t>(kHello, to);
    PutNumber(kFramesVersion, to);
    PutId(frame.from, to);
    PutId(frame.to, to);
  }
  void operator()(const WelcomeFrame& frame) const {
    PutNumber<uint8_t>(kWelcome, to);
    PutNumber(kFramesVersion, to);
    PutId(frame.process, to);
  }
  void operator()(const CallFrame& frame) const {
    PutNumber<uint8_t>(kCall, to);
    PutNumber<uint8_t>(frame.given_up ? kGivenUp : 0, to);
    PutNumber(frame.actor, to);
    PutNumber(frame.number, to);
    PutNumber(frame.acknowledged, to);
    PutNumber(frame.method, to);
    PutNumber(frame.timeout_ms, to);
    PutText(frame.arguments, to);
  }
  void operator()(const AnswerFrame& frame) const {
    PutNumber<uint8_t>(kAnswer, to);
    PutNumber(static_cast<uint8_t>(frame.code), to);
    PutNumber(frame.actor, to);
    PutNumber(frame.number, to);
    PutText(frame.text, to);
  }
  void operator()(const AcknowledgeFrame& frame) const {
    PutNumber<uint8_t>(kAcknowledge, to);
    PutNumber(frame.actor, to);
    PutNumber(frame.acknowledged, to);
  }
  void operator()(const AgainFrame& frame) const {
    PutNumber<uint8_t>(kAgain, to);
    PutNumber<uint8_t>(frame.full ? kFull : 0, to);
    PutNumber(frame.actor, to);
    PutNumber(frame.next, to);
  }
};

absl::StatusOr<Frame> TakeGreeting(Reader& reader, Kind kind) {
  const auto version = reader.Take<uint8_t>();
  if (reader.ok() && version != kFramesVersion)
    return Wrong(absl::StrCat("its version is ", version, ", and here ", kFramesVersion,
                              ": is another build of gtrain in one of the processes?"));
  if (kind == kWelcome) return WelcomeFrame{reader.TakeId()};
  const CallerId from = reader.TakeId();
  return HelloFrame{from, reader.TakeId()};
}

absl::StatusOr<Frame> TakeCall(Reader& reader) {
  CallFrame frame;
  const auto flags = reader.Take<uint8_t>();
  if (flags > kGivenUp) return Wrong("an unknown flag");
  frame.given_up = flags == kGivenUp;
  frame.actor = reader.Take<uint64_t>();
  frame.number = reader.Take<uint64_t>();
  frame.acknowledged = reader.Take<uint64_t>();
  frame.method = reader.Take<uint32_t>();
  frame.timeout_ms = reader.Take<uint32_t>();
  frame.arguments = reader.Text(kCallBytesMax);
  if (reader.ok() && (frame.number == 0 || frame.acknowledged >= frame.number))
    return Wrong("a call that is acknowledged already");
  return frame;
}

absl::StatusOr<Frame> TakeAnswer(Reader& reader) {
  AnswerFrame frame;
  const auto code = reader.Take<uint8_t>();
  if (code > static_cast<uint8_t>(absl::StatusCode::kUnauthenticated)) return Wrong("no status code");
  frame.code = static_cast<absl::StatusCode>(code);
  frame.actor = reader.Take<uint64_t>();
  frame.number = reader.Take<uint64_t>();
  frame.text = reader.Text(code == 0 ? kCallBytesMax : kErrorBytesMax);
  if (reader.ok() && frame.number == 0) return Wrong("an answer to no call");
  return frame;
}

absl::StatusOr<Frame> TakeAgain(Reader& reader) {
  AgainFrame frame;
  const auto flags = reader.Take<uint8_t>();
  if (flags > kFull) return Wrong("an unknown flag");
  frame.full = flags == kFull;
  frame.actor = reader.Take<uint64_t>();
  frame.next = reader.Take<uint64_t>();
  if (reader.ok() && frame.next == 0) return Wrong("calls are numbered from 1");
  return frame;
}

absl::StatusOr<Frame> TakeKind(Reader& reader) {
  const auto kind = reader.Take<uint8_t>();
  switch (kind) {
    case kHello:
    case kWelcome:
      return TakeGreeting(reader, static_cast<Kind>(kind));
    case kCall:
      return TakeCall(reader);
    case kAnswer:
      return TakeAnswer(reader);
    case kAgain:
      return TakeAgain(reader);
    case kAcknowledge: {
      AcknowledgeFrame frame;
      frame.actor = reader.Take<uint64_t>();
      frame.acknowledged = reader.Take<uint64_t>();
      return frame;
    }
    default:
      return Wrong("an unknown kind of frame");
  }
}

}  // namespace

void AppendFrame(const Frame& frame, std::string* message) { std::visit(Appender{message}, frame); }

absl::StatusOr<Frame> TakeFrame(absl::string_view* message) {
  Reader reader(message);
  GT_ASSIGN_OR_RETURN(Frame frame, TakeKind(reader));
  if (!reader.ok()) return Wrong("it ends too early");
  *message = reader.rest();
  return frame;
}

}  // namespace gtrain::actors

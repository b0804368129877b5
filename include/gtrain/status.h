// The result of a call: a Status, or a Result<T> that has a value or a Status.
#pragma once
#include <gtrain/gtrain_c.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace gtrain {

// The numbers of gtrain_status.
enum class StatusCode : int {
  kOk = GTRAIN_OK,
  kCancelled = GTRAIN_CANCELLED,
  kUnknown = GTRAIN_UNKNOWN,
  kInvalidArgument = GTRAIN_INVALID_ARGUMENT,
  kDeadlineExceeded = GTRAIN_DEADLINE_EXCEEDED,
  kNotFound = GTRAIN_NOT_FOUND,
  kAlreadyExists = GTRAIN_ALREADY_EXISTS,
  kPermissionDenied = GTRAIN_PERMISSION_DENIED,
  kResourceExhausted = GTRAIN_RESOURCE_EXHAUSTED,
  kFailedPrecondition = GTRAIN_FAILED_PRECONDITION,
  kAborted = GTRAIN_ABORTED,
  kOutOfRange = GTRAIN_OUT_OF_RANGE,
  kUnimplemented = GTRAIN_UNIMPLEMENTED,
  kInternal = GTRAIN_INTERNAL,
  kUnavailable = GTRAIN_UNAVAILABLE,  // a rank was lost or the generation revoked: end the step, exit with 75
  kDataLoss = GTRAIN_DATA_LOSS,
  kUnauthenticated = GTRAIN_UNAUTHENTICATED,
};

// The exit code that main() returns for kUnavailable: gtrain starts the next generation and charges no
// restart.
inline constexpr int kExitRunMeAgain = 75;

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "OK", or "UNAVAILABLE: rank 3 gave up: ...".
  std::string ToString() const {
    const std::string name = gtrain_status_name(static_cast<gtrain_status>(code_));
    return ok() ? name : name + ": " + message_;
  }
  // For main(): 0, 75 for kUnavailable, else 1.
  int exit_code() const { return ok() ? 0 : code_ == StatusCode::kUnavailable ? kExitRunMeAgain : 1; }
  // Throws Error unless ok.
  void ThrowIfError() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A Status as an exception, which Result::value and Status::ThrowIfError throw. Nothing else of gtrain
// throws.
class Error : public std::runtime_error {
 public:
  explicit Error(Status status) : std::runtime_error(status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

namespace internal {

[[noreturn]] inline void Raise(const Status& status) {
#if defined(__cpp_exceptions)
  throw Error(status);
#else
  std::fprintf(stderr, "gtrain: %s\n", status.ToString().c_str());
  std::abort();
#endif
}

// Makes a call of the C interface, which gets the buffer for its error as its last argument.
template <typename Function, typename... Arguments>
Status Call(Function function, Arguments... arguments) {
  gtrain_error error;
  const gtrain_status status = function(arguments..., &error);
  return status == GTRAIN_OK ? Status() : Status(static_cast<StatusCode>(status), error.message);
}

}  // namespace internal

inline void Status::ThrowIfError() const {
  if (!ok()) internal::Raise(*this);
}

// A T, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (status_.ok()) status_ = Status(StatusCode::kInternal, "a result of no value and no error");
  }
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // The value; throws Error (without exceptions: prints it and aborts) where there is none.
  T& value() & {
    Check();
    return *value_;
  }
  const T& value() const& {
    Check();
    return *value_;
  }
  T value() && {
    Check();
    return *std::move(value_);
  }

  // Only if ok.
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  void Check() const {
    if (!ok()) internal::Raise(status_);
  }

  Status status_;
  std::optional<T> value_;
};

namespace internal {

// A handle of the C interface and how it is freed.
template <typename Handle, void (*kFree)(Handle*)>
struct Freer {
  void operator()(Handle* handle) const { kFree(handle); }
};

}  // namespace internal
}  // namespace gtrain

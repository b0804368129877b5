#include "checkpoint/format/lease_mark.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/format/strict_json.h"

namespace gtrain::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "gtrain-checkpoint-lease";
constexpr size_t kHostBytesMax = 256;

std::string BoundedHost(absl::string_view text) {
  std::string out(text.substr(0, kHostBytesMax));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
  return out;
}

}  // namespace

std::string Print(const LeaseMark& mark) {
  const Json out = {{"format", kFormat},
                    {"version", 1},
                    {"epoch", mark.name.epoch},
                    {"renewal", mark.name.renewal},
                    {"since", mark.since},
                    {"generation", mark.generation},
                    {"host", BoundedHost(mark.holder.host)},
                    {"machine", mark.holder.machine},
                    {"pid", mark.holder.pid},
                    {"started", mark.holder.started},
                    {"nonce", mark.holder.nonce}};
  return PrintSealed(out);
}

absl::StatusOr<LeaseMark> ParseLeaseMark(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kLeaseBytesMax));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "renewal", "since", "generation",
                                          "host", "machine", "pid", "started", "nonce"}));
  GT_ASSIGN_OR_RETURN(const std::string format, GetString(object, "format", 64));
  GT_ASSIGN_OR_RETURN(const uint64_t version, GetUint(object, "version", UINT32_MAX));
  if (format != kFormat || version != 1)
    return absl::DataLossError(absl::StrCat("format \"", format, "\", version ", version, " is no lease"));
  LeaseMark mark;
  GT_ASSIGN_OR_RETURN(mark.name.epoch, GetUint(object, "epoch", kCounterMax));
  GT_ASSIGN_OR_RETURN(mark.name.renewal, GetUint(object, "renewal", kCounterMax));
  GT_ASSIGN_OR_RETURN(mark.since, GetUint(object, "since", INT64_MAX));
  GT_ASSIGN_OR_RETURN(mark.generation, GetUint(object, "generation", kCounterMax));
  GT_ASSIGN_OR_RETURN(const std::string host, GetString(object, "host", kHostBytesMax));
  mark.holder.host = BoundedHost(host);
  GT_ASSIGN_OR_RETURN(mark.holder.machine, GetUint(object, "machine", UINT64_MAX));
  GT_ASSIGN_OR_RETURN(mark.holder.pid, GetUint(object, "pid", INT32_MAX));
  GT_ASSIGN_OR_RETURN(mark.holder.started, GetUint(object, "started", UINT64_MAX));
  GT_ASSIGN_OR_RETURN(mark.holder.nonce, GetUint(object, "nonce", UINT64_MAX));
  if (LeaseKey(mark.name) != key) return absl::DataLossError("its numbers derive another name");
  return mark;
}

}  // namespace gtrain::ckpt

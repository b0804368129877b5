// The parser's callback sees every key before the value is built: duplicates and depth are caught there, so
// hostile text costs no more memory than its own size allows. The seal is textual: the checksum is the last
// field, on a line of its own, and covers every byte before that line. A flipped bit anywhere in the file,
// white space included, is found without a canonical form of JSON.
#include "checkpoint/format/strict_json.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kSealField[] = ",\n \"checksum\": \"";
constexpr char kSealEnd[] = "\"\n}\n";
constexpr size_t kSealBytes = sizeof(kSealField) - 1 + 32 + sizeof(kSealEnd) - 1;

absl::Status Wrong(const char* name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("field \"", name, "\" ", what));
}

}  // namespace

absl::StatusOr<Json> ParseStrictJson(absl::string_view text, size_t bytes_max) {
  if (text.size() > bytes_max) {
    return absl::DataLossError(
        absl::StrCat("JSON of ", text.size(), " bytes, over the limit of ", bytes_max));
  }
  std::vector<std::set<std::string>> keys;
  std::string fault;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case Json::parse_event_t::array_start:
        if (depth >= kJsonDepthMax) fault = absl::StrCat("nested deeper than ", kJsonDepthMax);
        break;
      case Json::parse_event_t::object_end:
        if (!keys.empty()) keys.pop_back();
        break;
      case Json::parse_event_t::key: {
        const std::string& key = value.get_ref<const std::string&>();
        if (fault.empty() && !keys.empty() && !keys.back().insert(key).second) {
          fault = absl::StrCat("key \"", key.substr(0, 64), "\" twice");
        }
        break;
      }
      default:
        break;
    }
    return fault.empty();
  };
  Json parsed = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (!fault.empty()) return absl::DataLossError(absl::StrCat("JSON ", fault));
  if (parsed.is_discarded()) return absl::DataLossError("not valid JSON");
  if (!parsed.is_object()) return absl::DataLossError("not a JSON object");
  return parsed;
}

absl::StatusOr<uint64_t> GetUint(const Json& object, const char* name, uint64_t value_max) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_number_unsigned()) return Wrong(name, "is not a whole number of at least 0");
  const uint64_t value = it->get<uint64_t>();
  if (value > value_max) return Wrong(name, absl::StrCat("is ", value, ", over the limit of ", value_max));
  return value;
}

absl::StatusOr<std::string> GetString(const Json& object, const char* name, size_t bytes_max) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_string()) return Wrong(name, "is not a string");
  const std::string& value = it->get_ref<const std::string&>();
  if (value.size() > bytes_max) return Wrong(name, "is too long");
  return value;
}

absl::StatusOr<bool> GetBool(const Json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_boolean()) return Wrong(name, "is not true or false");
  return it->get<bool>();
}

absl::StatusOr<const Json*> GetArray(const Json& object, const char* name, size_t count_max) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_array()) return Wrong(name, "is not an array");
  if (it->size() > count_max)
    return Wrong(name, absl::StrCat("has ", it->size(), " entries, over ", count_max));
  return &*it;
}

absl::Status CheckFields(const Json& object, std::initializer_list<absl::string_view> known) {
  if (!object.is_object()) return absl::DataLossError("an entry is not a JSON object");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), absl::string_view(key)) == known.end()) {
      return absl::DataLossError(absl::StrCat("unknown field \"", key.substr(0, 64), "\""));
    }
  }
  return absl::OkStatus();
}

std::string PrintSealed(const Json& object) {
  std::string text = object.dump(1, ' ', false, Json::error_handler_t::replace);
  text.resize(text.size() - 2);  // the final "\n}"
  const std::string hash = Xxh3Hex(text);
  absl::StrAppend(&text, kSealField, hash, kSealEnd);
  return text;
}

absl::StatusOr<Json> ParseSealed(absl::string_view text, size_t bytes_max) {
  if (text.size() < kSealBytes || text.size() > bytes_max) {
    return absl::DataLossError(
        absl::StrCat("a file of ", text.size(), " bytes is not one of ours (limit ", bytes_max, ")"));
  }
  const absl::string_view body = text.substr(0, text.size() - kSealBytes);
  if (text.substr(body.size()) != absl::StrCat(kSealField, Xxh3Hex(body), kSealEnd)) {
    return absl::DataLossError("its own checksum does not match its bytes");
  }
  GT_ASSIGN_OR_RETURN(Json object, ParseStrictJson(text, bytes_max));
  object.erase("checksum");
  return object;
}

}  // namespace gtrain::ckpt

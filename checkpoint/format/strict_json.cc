// A text is gone through twice. First only its keys and depth are looked at, so that hostile text costs no
// more memory than its own size allows; then it is built. The library's parser with a callback does both at
// once, but looks through all of an object at the end of each of its values: n * n for n tensors. The seal is
// textual: the checksum is the last field, on a line of its own, and covers every byte before that line. A
// flipped bit anywhere in the file, white space included, is found without a canonical form of JSON.
#include "checkpoint/format/strict_json.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {
namespace {

constexpr char kSealField[] = ",\n \"checksum\": \"";
constexpr char kSealEnd[] = "\"\n}\n";
constexpr size_t kSealBytes = sizeof(kSealField) - 1 + 32 + sizeof(kSealEnd) - 1;

absl::Status Wrong(const char* name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("field \"", name, "\" ", what));
}

// Sees every key and every nesting of a text before anything is built of it.
class Watch final : public nlohmann::json_sax<ParsedJson> {
 public:
  // Empty: there is none but that the text may not be JSON.
  const std::string& fault() const { return fault_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return Enter();
  }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    fault_ = absl::StrCat("key \"", key.substr(0, 64), "\" twice");
    return false;
  }
  bool end_object() override {
    keys_.pop_back();
    return Leave();
  }
  bool start_array(size_t) override { return Enter(); }
  bool end_array() override { return Leave(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  bool Enter() {
    if (depth_++ < kJsonDepthMax) return true;
    fault_ = absl::StrCat("nested deeper than ", kJsonDepthMax);
    return false;
  }
  bool Leave() {
    --depth_;
    return true;
  }

  int depth_ = 0;
  std::vector<absl::flat_hash_set<std::string>> keys_;  // of each object that is open
  std::string fault_;
};

}  // namespace

absl::StatusOr<ParsedJson> ParseStrictJson(absl::string_view text, size_t bytes_max) {
  if (text.size() > bytes_max) {
    return absl::DataLossError(
        absl::StrCat("JSON of ", text.size(), " bytes, over the limit of ", bytes_max));
  }
  Watch watch;
  if (!ParsedJson::sax_parse(text.begin(), text.end(), &watch)) {
    return absl::DataLossError(watch.fault().empty() ? "not valid JSON"
                                                     : absl::StrCat("JSON ", watch.fault()));
  }
  ParsedJson parsed = ParsedJson::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return absl::DataLossError("not a JSON object");
  return parsed;
}

absl::StatusOr<uint64_t> GetUint(const ParsedJson& object, const char* name, uint64_t value_max) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_number_unsigned()) return Wrong(name, "is not a whole number of at least 0");
  const uint64_t value = it->get<uint64_t>();
  if (value > value_max) return Wrong(name, absl::StrCat("is ", value, ", over the limit of ", value_max));
  return value;
}

absl::StatusOr<std::string> GetString(const ParsedJson& object, const char* name, size_t bytes_max) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_string()) return Wrong(name, "is not a string");
  const std::string& value = it->get_ref<const std::string&>();
  if (value.size() > bytes_max) return Wrong(name, "is too long");
  return value;
}

absl::StatusOr<bool> GetBool(const ParsedJson& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_boolean()) return Wrong(name, "is not true or false");
  return it->get<bool>();
}

absl::StatusOr<const ParsedJson*> GetArray(const ParsedJson& object, const char* name, size_t count_max) {
  const auto it = object.find(name);
  if (it == object.end()) return Wrong(name, "is missing");
  if (!it->is_array()) return Wrong(name, "is not an array");
  if (it->size() > count_max)
    return Wrong(name, absl::StrCat("has ", it->size(), " entries, over ", count_max));
  return &*it;
}

absl::Status CheckFields(const ParsedJson& object, std::initializer_list<absl::string_view> known) {
  if (!object.is_object()) return absl::DataLossError("an entry is not a JSON object");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), absl::string_view(key)) == known.end()) {
      return absl::DataLossError(absl::StrCat("unknown field \"", key.substr(0, 64), "\""));
    }
  }
  return absl::OkStatus();
}

std::string PrintSealed(const nlohmann::ordered_json& object) {
  std::string text = object.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize(text.size() - 2);  // the final "\n}"
  const std::string hash = Xxh3Hex(text);
  absl::StrAppend(&text, kSealField, hash, kSealEnd);
  return text;
}

absl::StatusOr<ParsedJson> ParseSealed(absl::string_view text, size_t bytes_max) {
  if (text.size() < kSealBytes || text.size() > bytes_max) {
    return absl::DataLossError(
        absl::StrCat("a file of ", text.size(), " bytes is not one of ours (limit ", bytes_max, ")"));
  }
  const absl::string_view body = text.substr(0, text.size() - kSealBytes);
  if (text.substr(body.size()) != absl::StrCat(kSealField, Xxh3Hex(body), kSealEnd)) {
    return absl::DataLossError("its own checksum does not match its bytes");
  }
  GT_ASSIGN_OR_RETURN(ParsedJson object, ParseStrictJson(text, bytes_max));
  object.erase("checksum");
  return object;
}

}  // namespace gtrain::ckpt

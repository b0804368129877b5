#include "job/spec/values.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/units.h"
#include "job/spec/nearest.h"
#include "job/spec/words.h"

namespace gtrain::spec {
namespace {

bool AllDigits(absl::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return absl::ascii_isdigit(c); });
}

absl::string_view WithoutSign(absl::string_view text) {
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  return text;
}

// Says what to write instead of a number in another notation; "" when it is none (fault J5).
std::string NumberAdvice(absl::string_view text) {
  const absl::string_view digits = WithoutSign(text);
  const std::string lower = absl::AsciiStrToLower(digits);
  if (AllDigits(digits) && digits.size() > 1 && digits[0] == '0') {
    absl::string_view rest = digits;
    while (rest.size() > 1 && rest[0] == '0') rest.remove_prefix(1);
    return absl::StrCat("it looks octal; write ", rest, " in decimal");
  }
  if (absl::StartsWith(lower, "0x") || absl::StartsWith(lower, "0o") || absl::StartsWith(lower, "0b")) {
    return "write it in decimal";
  }
  if (absl::StrContains(digits, "_") && AllDigits(absl::StrReplaceAll(digits, {{"_", ""}}))) {
    return absl::StrCat("write ", absl::StrReplaceAll(digits, {{"_", ""}}), " without underscores");
  }
  if (lower == ".nan" || lower == "nan" || lower == ".inf" || lower == "inf")
    return "it must be a finite number";
  double value = 0;
  if (absl::SimpleAtod(text, &value) && !AllDigits(digits)) {
    if (value == static_cast<double>(static_cast<int64_t>(value)) && std::abs(value) < 1e15) {
      return absl::StrCat("write ", static_cast<int64_t>(value), " as a whole number");
    }
    return "it must be a whole number";
  }
  return "";
}

bool LooksLikeDate(absl::string_view text) {
  return text.size() >= 8 && AllDigits(text.substr(0, 4)) && text[4] == '-' &&
         absl::ascii_isdigit(static_cast<unsigned char>(text[5]));
}

bool IsBooleanWord(absl::string_view lower) {
  for (absl::string_view word : {"yes", "no", "on", "off", "true", "false", "y", "n"}) {
    if (lower == word) return true;
  }
  return false;
}

}  // namespace

std::string Shown(absl::string_view value) {
  const bool cut = value.size() > 60;
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(value.substr(0, 60)), cut ? "...'" : "'");
}

absl::string_view LooksLike(absl::string_view plain) {
  if (IsBooleanWord(absl::AsciiStrToLower(plain))) return "a boolean";
  if (plain == "~" || absl::EqualsIgnoreCase(plain, "null")) return "nothing";
  if (AllDigits(WithoutSign(plain)) || !NumberAdvice(plain).empty()) return "a number";
  if (LooksLikeDate(plain)) return "a date";
  return "";
}

void Values::Error(const Node& node, absl::string_view key, absl::string_view message) {
  report_.Error(node.place, key.empty() ? std::string(message) : absl::StrCat("`", key, "`: ", message));
}

bool Values::Is(const Node& node, absl::string_view word) {
  return node.kind == Node::Kind::kScalar && node.scalar == word;
}

bool Values::Scalar(const Node& node, absl::string_view key, absl::string_view wanted) {
  switch (node.kind) {
    case Node::Kind::kScalar:
      return true;
    case Node::Kind::kNull:
      Error(node, key, absl::StrCat("the value is missing; it must be ", wanted));
      return false;
    case Node::Kind::kSequence:
      Error(node, key, absl::StrCat("must be ", wanted, ", not a list"));
      return false;
    case Node::Kind::kMapping:
      Error(node, key, absl::StrCat("must be ", wanted, ", not a mapping"));
      return false;
  }
  return false;
}

bool Values::Mapping(const Node& node, absl::string_view key) {
  if (node.kind == Node::Kind::kMapping) return true;
  if (node.kind == Node::Kind::kNull) {
    Error(node, key, "the value is missing; remove the key or give it its keys");
  } else {
    Error(node, key, "must be a mapping (key: value)");
  }
  return false;
}

std::optional<int64_t> Values::Int(const Node& node, absl::string_view key, int64_t min, int64_t max) {
  const std::string range = absl::StrCat("a whole number from ", min, " to ", max);
  if (!Scalar(node, key, range)) return std::nullopt;
  const std::string& text = node.scalar;
  if (node.quoted) {
    Error(node, key,
          absl::StrCat("must be ", range, ", not the string ", Shown(text), "; remove the quotes"));
    return std::nullopt;
  }
  if (const std::string advice = NumberAdvice(text); !advice.empty()) {
    Error(node, key, absl::StrCat(Shown(text), " is not accepted: ", advice));
    return std::nullopt;
  }
  int64_t value = 0;
  if (!AllDigits(WithoutSign(text)) || text[0] == '+') {
    Error(node, key, absl::StrCat(Shown(text), " is not ", range));
    return std::nullopt;
  }
  if (!absl::SimpleAtoi(text, &value) || value < min || value > max) {
    Error(node, key, absl::StrCat(Shown(text), " is out of range; it must be ", range));
    return std::nullopt;
  }
  return value;
}

std::optional<bool> Values::Bool(const Node& node, absl::string_view key) {
  if (!Scalar(node, key, "true or false")) return std::nullopt;
  if (!node.quoted && node.scalar == "true") return true;
  if (!node.quoted && node.scalar == "false") return false;
  const std::string lower = absl::AsciiStrToLower(node.scalar);
  std::string advice;
  if (lower == "yes" || lower == "on" || lower == "y" || lower == "1" || lower == "true")
    advice = "; write true";
  if (lower == "no" || lower == "off" || lower == "n" || lower == "0" || lower == "false")
    advice = "; write false";
  Error(node, key, absl::StrCat("must be true or false, not ", Shown(node.scalar), advice));
  return std::nullopt;
}

std::optional<std::string> Values::String(const Node& node, absl::string_view key, const StringRules& rules) {
  if (!Scalar(node, key, "a string")) return std::nullopt;
  if (!node.quoted) {
    if (const absl::string_view like = LooksLike(node.scalar); !like.empty()) {
      Error(node, key,
            absl::StrCat(Shown(node.scalar), " looks like ", like, "; for a string write \"",
                         node.scalar.substr(0, 60), "\""));
      return std::nullopt;
    }
  }
  std::string text = node.scalar;
  if (rules.expand) {
    static const std::map<std::string, std::string> kNone;
    auto expanded = ExpandVariables(text, rules.variables != nullptr ? *rules.variables : kNone);
    if (!expanded.ok()) {
      Error(node, key, expanded.status().message());
      return std::nullopt;
    }
    text = *std::move(expanded);
  }
  if (rules.secret_free) {
    if (const std::string secret = LooksLikeSecret(text); !secret.empty()) {
      Error(node, key,
            absl::StrCat("this looks like ", secret,
                         ". A job file and the cluster's records must hold none: "
                         "set it in the environment and name it under `secrets`"));
      return std::nullopt;
    }
  }
  if (text.empty() && !rules.may_be_empty) {
    Error(node, key, "must not be empty");
  } else if (text.size() > rules.bytes_max) {
    Error(node, key, absl::StrCat("is longer than ", rules.bytes_max, " bytes"));
  } else if (!IsCleanText(text)) {
    Error(node, key, "holds a NUL character or invalid UTF-8");
  } else if (rules.one_line &&
             std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; })) {
    Error(node, key, "must be one line without control characters");
  } else {
    return text;
  }
  return std::nullopt;
}

std::optional<std::vector<std::string>> Values::Strings(const Node& node, absl::string_view key,
                                                        const StringRules& rules) {
  if (node.kind != Node::Kind::kSequence) {
    Error(node, key, "must be a list, like [a, b]");
    return std::nullopt;
  }
  std::vector<std::string> out;
  bool ok = true;
  for (const Node& item : node.items) {
    std::optional<std::string> text = String(item, key, rules);
    ok = ok && text.has_value();
    if (text) out.push_back(*std::move(text));
  }
  if (!ok) return std::nullopt;
  return out;
}

std::optional<absl::Duration> Values::Duration(const Node& node, absl::string_view key, absl::Duration min,
                                               absl::Duration max) {
  if (!Scalar(node, key, "a time such as 30s, 15m or 24h")) return std::nullopt;
  const absl::StatusOr<absl::Duration> parsed = ParseDuration(node.scalar);
  if (!parsed.ok()) {
    Error(node, key,
          AllDigits(node.scalar)
              ? absl::StrCat(Shown(node.scalar), " has no unit; write ", node.scalar, "s for seconds")
              : std::string(parsed.status().message()));
    return std::nullopt;
  }
  if (*parsed < min || *parsed > max) {
    Error(node, key,
          absl::StrCat(Shown(node.scalar), " is out of range; it must be from ", PrintDuration(min), " to ",
                       PrintDuration(max)));
    return std::nullopt;
  }
  return *parsed;
}

std::optional<uint64_t> Values::Bytes(const Node& node, absl::string_view key, uint64_t min, uint64_t max) {
  if (!Scalar(node, key, "a size such as 512MiB or 2GiB")) return std::nullopt;
  const absl::StatusOr<uint64_t> parsed = ParseBytes(node.scalar);
  if (!parsed.ok()) {
    Error(node, key, parsed.status().message());
    return std::nullopt;
  }
  if (*parsed < min || *parsed > max) {
    Error(node, key,
          absl::StrCat(Shown(node.scalar), " is out of range; it must be from ", PrintBytes(min), " to ",
                       PrintBytes(max), AllDigits(node.scalar) ? " (a bare number is bytes)" : ""));
    return std::nullopt;
  }
  return *parsed;
}

std::optional<int> Values::Share(const Node& node, absl::string_view key, int min, int max) {
  if (!Scalar(node, key, "a share such as 0.01 or 1%")) return std::nullopt;
  const absl::StatusOr<int> parsed = ParseShare(node.scalar);
  if (!parsed.ok()) {
    Error(node, key, parsed.status().message());
    return std::nullopt;
  }
  if (*parsed < min || *parsed > max) {
    Error(node, key,
          absl::StrCat(Shown(node.scalar), " is out of range; it must be from ", PrintShare(min), " to ",
                       PrintShare(max)));
    return std::nullopt;
  }
  return *parsed;
}

std::optional<size_t> Values::Choice(const Node& node, absl::string_view key,
                                     const std::vector<std::string>& words) {
  const std::string wanted = absl::StrJoin(words, " or ");
  if (!Scalar(node, key, wanted)) return std::nullopt;
  for (size_t i = 0; i < words.size(); ++i) {
    if (node.scalar == words[i]) return i;
  }
  const std::string nearest = Nearest(node.scalar, words);
  Error(node, key,
        absl::StrCat(Shown(node.scalar), " is not known; it must be ", wanted,
                     nearest.empty() ? "" : absl::StrCat(". Did you mean ", nearest, "?")));
  return std::nullopt;
}

}  // namespace gtrain::spec

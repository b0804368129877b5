#include "job/spec/words.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace gtrain::spec {
namespace {

constexpr absl::string_view kUseScript =
    "; `run` is words, not a shell. Put it under `script: |`, which bash runs";

absl::Status ShellCharacter(absl::string_view text, size_t pos) {
  const char c = text[pos];
  if (c == '\n') return absl::InvalidArgumentError(absl::StrCat("a line end in `run`", kUseScript));
  size_t end = pos + 1;
  if (c == '&' && end < text.size() && text[end] == '&') ++end;
  if (c == '$') {
    while (end < text.size() && (absl::ascii_isalnum(static_cast<unsigned char>(text[end])) ||
                                 absl::StrContains("_{}", text.substr(end, 1)))) {
      ++end;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("`", text.substr(pos, std::min<size_t>(end - pos, 64)),
                                                 "` in `run`", kUseScript,
                                                 " (or quote it with '...' if the program is to see it)"));
}

bool IsShellCharacter(char c, bool in_double_quotes) {
  return absl::StrContains(in_double_quotes ? "$`" : "|&;<>$`\n", absl::string_view(&c, 1));
}

// A character class of the secret patterns below.
bool IsTokenCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-';
}

size_t RunLength(absl::string_view text, size_t pos) {
  size_t end = pos;
  while (end < text.size() && IsTokenCharacter(text[end])) ++end;
  return end - pos;
}

struct SecretPrefix {
  absl::string_view prefix;
  size_t rest_min;  // token characters that follow
  absl::string_view what;
};

constexpr SecretPrefix kSecretPrefixes[] = {
    {"AKIA", 16, "an AWS access key id"},
    {"ASIA", 16, "an AWS access key id"},
    {"ghp_", 20, "a GitHub token"},
    {"gho_", 20, "a GitHub token"},
    {"ghs_", 20, "a GitHub token"},
    {"github_pat_", 20, "a GitHub token"},
    {"glpat-", 16, "a GitLab token"},
    {"hf_", 30, "a Hugging Face token"},
    {"sk-", 20, "an API key"},
    {"xoxb-", 16, "a Slack token"},
    {"xoxp-", 16, "a Slack token"},
    {"AIza", 35, "a Google API key"},
    {"npm_", 30, "an npm token"},
    {"wandb_v1_", 20, "a W&B key"},
    {"eyJhbGciOi", 20, "a JSON web token"},
};

// user:password@ of a url: a colon between "://" and the "@" that ends the user part.
bool HasUrlPassword(absl::string_view text) {
  for (size_t pos = text.find("://"); pos != absl::string_view::npos; pos = text.find("://", pos + 3)) {
    absl::string_view rest = text.substr(pos + 3);
    rest = rest.substr(0, rest.find_first_of("/?# \t\n\"'"));
    const size_t at = rest.rfind('@');
    if (at == absl::string_view::npos) continue;
    const size_t colon = rest.substr(0, at).find(':');
    if (colon != absl::string_view::npos && colon + 1 < at) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> SplitWords(absl::string_view text) {
  while (absl::EndsWith(text, "\n") || absl::EndsWith(text, " ")) text.remove_suffix(1);
  std::vector<std::string> words;
  std::string word;
  bool open = false;  // a word has begun (it may be empty: '')
  char quote = '\0';
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote == '\'') {
      if (c == quote)
        quote = '\0';
      else
        word += c;
      continue;
    }
    if (IsShellCharacter(c, quote == '"')) return ShellCharacter(text, i);
    if (c == '\\' && i + 1 < text.size()) {
      word += text[++i];
      open = true;
    } else if (quote == '"') {
      if (c == quote)
        quote = '\0';
      else
        word += c;
    } else if (c == '\'' || c == '"') {
      quote = c;
      open = true;
    } else if (c == ' ') {
      if (open) words.push_back(std::move(word));
      word.clear();
      open = false;
    } else {
      word += c;
      open = true;
    }
  }
  if (quote != '\0')
    return absl::InvalidArgumentError(absl::StrCat("a quote (", std::string(1, quote), ") is not closed"));
  if (open) words.push_back(std::move(word));
  if (words.empty()) return absl::InvalidArgumentError("no command");
  return words;
}

absl::StatusOr<std::string> ExpandVariables(absl::string_view text,
                                            const std::map<std::string, std::string>& variables) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '$' || i + 1 == text.size()) {
      out += text[i];
    } else if (text[i + 1] == '$') {
      out += '$';
      ++i;
    } else if (text[i + 1] == '{') {
      const size_t close = text.find('}', i);
      const absl::string_view name =
          close == absl::string_view::npos ? "" : text.substr(i + 2, close - i - 2);
      if (!IsEnvName(name)) {
        return absl::InvalidArgumentError(
            "`${` must be followed by a variable's name and `}`; write $$ for a dollar sign");
      }
      const auto it = variables.find(std::string(name));
      if (it == variables.end()) {
        return absl::InvalidArgumentError(absl::StrCat("`${", name,
                                                       "}` is not set in the environment of this command; "
                                                       "set it, or write $${",
                                                       name, "} for the text itself"));
      }
      if (MayBeSecret(name, it->second)) {
        return absl::InvalidArgumentError(
            absl::StrCat("`${", name,
                         "}` seems to hold a secret, which would get into the cluster's records: name it "
                         "under `secrets`, and it is set in the ranks alone"));
      }
      out += it->second;
      i = close;
    } else {
      out += '$';
    }
  }
  return out;
}

std::string LooksLikeSecret(absl::string_view text) {
  if (absl::StrContains(text, "-----BEGIN ") && absl::StrContains(text, "PRIVATE KEY-----"))
    return "a private key";
  if (HasUrlPassword(text)) return "a url with a password";
  for (const SecretPrefix& secret : kSecretPrefixes) {
    for (size_t pos = text.find(secret.prefix); pos != absl::string_view::npos;
         pos = text.find(secret.prefix, pos + 1)) {
      const bool starts_word = pos == 0 || !absl::ascii_isalnum(static_cast<unsigned char>(text[pos - 1]));
      if (starts_word && RunLength(text, pos + secret.prefix.size()) >= secret.rest_min) {
        return std::string(secret.what);
      }
    }
  }
  return "";
}

bool IsNamedLikeSecret(absl::string_view name) {
  constexpr absl::string_view kEnds[] = {"_TOKEN",   "_SECRET",    "PASSWORD",    "PASSWD",
                                         "_API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "_CREDENTIALS"};
  return std::any_of(std::begin(kEnds), std::end(kEnds),
                     [&](absl::string_view end) { return absl::EndsWith(name, end); });
}

bool MayBeSecret(absl::string_view name, absl::string_view value) {
  constexpr size_t kSecretMin = 20;
  if (!IsNamedLikeSecret(name) || value.empty() || value[0] == '/') return false;
  if (absl::EndsWith(name, "PASSWORD") || absl::EndsWith(name, "PASSWD")) return true;
  const auto digit = [](unsigned char c) { return absl::ascii_isdigit(c); };
  const auto letter = [](unsigned char c) { return absl::ascii_isalpha(c); };
  return value.size() >= kSecretMin && std::none_of(value.begin(), value.end(), absl::ascii_isspace) &&
         std::any_of(value.begin(), value.end(), digit) && std::any_of(value.begin(), value.end(), letter);
}

bool IsEnvName(absl::string_view name) {
  if (name.empty() || name.size() > 256 || absl::ascii_isdigit(static_cast<unsigned char>(name[0])))
    return false;
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; });
}

bool IsJobName(absl::string_view name) {
  const auto letter_or_digit = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  if (name.empty() || name.size() > 63 || !letter_or_digit(name.front()) || !letter_or_digit(name.back()))
    return false;
  return std::all_of(name.begin(), name.end(), [&](char c) { return letter_or_digit(c) || c == '-'; });
}

bool IsUsersGtrainVariable(absl::string_view name) {
  return std::find(kUsersGtrainVariables.begin(), kUsersGtrainVariables.end(), name) !=
         kUsersGtrainVariables.end();
}

}  // namespace gtrain::spec

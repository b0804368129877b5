#include "base/units.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace gtrain {
namespace {

using UnitTable = std::pair<absl::string_view, uint64_t>;

constexpr std::array<UnitTable, 13> kByteUnits = {{{"B", 1},
                                                   {"kB", 1000},
                                                   {"KiB", 1024},
                                                   {"Ki", 1024},
                                                   {"MB", 1'000'000},
                                                   {"MiB", 1 << 20},
                                                   {"Mi", 1 << 20},
                                                   {"GB", 1'000'000'000},
                                                   {"GiB", 1 << 30},
                                                   {"Gi", 1 << 30},
                                                   {"TB", 1'000'000'000'000},
                                                   {"TiB", uint64_t{1} << 40},
                                                   {"Ti", uint64_t{1} << 40}}};

constexpr std::array<UnitTable, 5> kTimeUnitsMs = {
    {{"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}, {"d", 86'400'000}}};

// Splits "12unit" and multiplies; an empty unit means 1 when `bare_allowed`.
template <size_t N>
absl::StatusOr<uint64_t> Scale(absl::string_view text, const std::array<UnitTable, N>& units,
                               bool bare_allowed, absl::string_view example) {
  size_t digits = 0;
  while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits]))) ++digits;
  const absl::string_view unit = text.substr(digits);
  uint64_t number = 0;
  const bool octal_looking = digits > 1 && text[0] == '0';
  if (digits == 0 || octal_looking || !absl::SimpleAtoi(text.substr(0, digits), &number)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not a number with a unit, like ", example));
  }
  uint64_t factor = unit.empty() && bare_allowed ? 1 : 0;
  for (const auto& [name, value] : units) {
    if (unit == name) factor = value;
  }
  if (factor == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text, "' has ", unit.empty() ? "no unit" : "an unknown unit", "; write it like ", example));
  }
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / factor) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is too large"));
  }
  return number * factor;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  return Scale(text, kByteUnits, /*bare_allowed=*/true, "512MiB or 2GiB");
}

std::string PrintBytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  uint64_t exact = bytes;
  while (unit + 1 < kNames.size() && exact >= 1024 && exact % 1024 == 0) {
    exact /= 1024;
    ++unit;
  }
  if (exact < 10240) return absl::StrCat(exact, kNames[unit]);
  double value = static_cast<double>(bytes);
  unit = 0;
  while (unit + 1 < kNames.size() && value >= 1024) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f%s", value, kNames[unit]);
}

absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text) {
  auto ms = Scale(text, kTimeUnitsMs, /*bare_allowed=*/false, "30s, 15m or 24h");
  if (!ms.ok()) return ms.status();
  if (*ms > uint64_t{1000} * 365 * 86'400'000) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is longer than 1000 years"));
  }
  return absl::Milliseconds(static_cast<int64_t>(*ms));
}

std::string PrintDuration(absl::Duration d) {
  const int64_t ms = absl::ToInt64Milliseconds(d);
  for (auto it = kTimeUnitsMs.rbegin(); it != kTimeUnitsMs.rend(); ++it) {
    const auto factor = static_cast<int64_t>(it->second);
    if (ms >= factor && ms % factor == 0) return absl::StrCat(ms / factor, it->first);
  }
  return absl::StrCat(ms, "ms");
}

absl::StatusOr<int> ParseShare(absl::string_view text) {
  absl::string_view digits = text;
  const size_t decimals = absl::ConsumeSuffix(&digits, "%") ? 4 : 6;
  const size_t point = std::min(digits.find('.'), digits.size());
  const absl::string_view whole = digits.substr(0, point);
  std::string fraction(digits.substr(std::min(point + 1, digits.size())));
  const bool pointed = point < digits.size();
  int parts = 0;
  const bool good = !whole.empty() && whole.size() <= 3 && fraction.empty() != pointed &&
                    fraction.size() <= decimals && digits.find_first_not_of("0123456789.") == digits.npos &&
                    fraction.find('.') == std::string::npos;
  fraction.resize(decimals, '0');
  if (!good || !absl::SimpleAtoi(absl::StrCat(whole, fraction), &parts)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not a share of at most ", decimals, " decimals, like 0.01 or 1%"));
  }
  return parts;
}

std::string PrintShare(int parts) {
  std::string text = absl::StrFormat("%d.%06d", parts / 1'000'000, parts % 1'000'000);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string PrintRanks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string out;
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    absl::StrAppend(&out, out.empty() ? "" : ",", ranks[i]);
    if (j > i) absl::StrAppend(&out, j == i + 1 ? "," : "-", ranks[j]);
    i = j + 1;
  }
  return out;
}

}  // namespace gtrain

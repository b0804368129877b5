// The words in which a job's wish reaches its ranks.
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "comm/codec/compressor.h"

namespace gtrain {
namespace {

constexpr size_t kCodecsMax = 16;

absl::Status Bad(absl::string_view word, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("compression: \"", word, "\" ", why));
}

absl::Status ReadParameter(absl::string_view word, CompressionOptions* options) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
  const auto& [name, value] = parts;
  const bool top_k = options->codec == Codec::kTopK;
  const bool one_bit = options->codec == Codec::kOneBit;
  const bool power_sgd = options->codec == Codec::kPowerSgd;
  double share = 0;
  int steps = 0;
  if (name == "density" && top_k) {
    if (!absl::SimpleAtod(value, &share) || !(share > 0 && share <= 1)) return Bad(word, "is not in (0, 1]");
    options->density = share;
  } else if (name == "momentum" && one_bit) {
    if (!absl::SimpleAtod(value, &share) || !(share >= 0 && static_cast<float>(share) < 1))
      return Bad(word, "is not in [0, 1)");
    options->optimizer_momentum = static_cast<float>(share);
  } else if (name == "rank" && power_sgd) {
    if (!absl::SimpleAtoi(value, &options->matrix_rank) || options->matrix_rank < 1 ||
        options->matrix_rank > kMatrixRankMax) {
      return Bad(word, absl::StrCat("is not from 1 to ", kMatrixRankMax));
    }
  } else if (name == "warmup" && (top_k || one_bit || power_sgd)) {
    if (!absl::SimpleAtoi(value, &steps) || steps < 0 || steps > kWarmupStepsMax)
      return Bad(word, absl::StrCat("is not a number of steps from 0 to ", kWarmupStepsMax));
    options->warmup_steps = steps;
  } else if (name == "residual" && options->codec != Codec::kNone && !power_sgd) {
    if (value != "fp32" && value != "bf16") return Bad(word, "is neither fp32 nor bf16");
    options->residual = value == "bf16" ? ResidualType::kBFloat16 : ResidualType::kFloat32;
  } else {
    return Bad(word, absl::StrCat("is nothing that ", CodecName(options->codec), " has"));
  }
  return absl::OkStatus();
}

absl::StatusOr<CompressionOptions> ReadOne(absl::string_view text) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
  if (words.empty()) return Bad(text, "names no codec");
  CompressionOptions options;
  GT_ASSIGN_OR_RETURN(options.codec, ParseCodec(words[0]));
  const bool warms_up =
      options.codec == Codec::kTopK || options.codec == Codec::kOneBit || options.codec == Codec::kPowerSgd;
  if (warms_up) options.warmup_steps = 100;
  if (options.codec == Codec::kOneBit) options.optimizer_momentum = 0.9f;
  std::set<absl::string_view> named;
  for (size_t i = 1; i < words.size(); ++i) {
    if (!named.insert(words[i].substr(0, words[i].find('='))).second) return Bad(words[i], "is said twice");
    GT_RETURN_IF_ERROR(ReadParameter(words[i], &options));
  }
  return options;
}

}  // namespace

absl::StatusOr<CompressionPolicy> ParseCompression(absl::string_view text) {
  CompressionPolicy policy;
  policy.automatic = absl::ConsumePrefix(&text, "auto:");
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  if (parts.size() > kCodecsMax || (!policy.automatic && parts.size() > 1)) {
    return Bad(text.substr(0, 100), "names too many codecs; several are for \"auto: \"");
  }
  std::set<absl::string_view> named;
  for (const absl::string_view part : parts) {
    if (!named.insert(absl::StripAsciiWhitespace(part)).second) return Bad(part, "is named twice");
    GT_ASSIGN_OR_RETURN(const CompressionOptions options, ReadOne(part));
    if (options.codec != Codec::kNone) policy.codecs.push_back(options);
  }
  return policy;
}

}  // namespace gtrain

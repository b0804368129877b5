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

bool HasParameter(Codec codec, absl::string_view name) {
  switch (codec) {
    case Codec::kNone:
      return false;
    case Codec::kTopK:
      return name == "density" || name == "warmup" || name == "residual";
    case Codec::kOneBit:
      return name == "momentum" || name == "warmup" || name == "residual";
    case Codec::kPowerSgd:
      return name == "rank" || name == "warmup";
    default:
      return name == "residual";
  }
}

absl::Status ReadDensity(absl::string_view word, absl::string_view value, CompressionOptions* options) {
  double share = 0;
  if (!absl::SimpleAtod(value, &share) || !(share > 0 && share <= 1)) return Bad(word, "is not in (0, 1]");
  options->density = share;
  return absl::OkStatus();
}

absl::Status ReadMomentum(absl::string_view word, absl::string_view value, CompressionOptions* options) {
  double share = 0;
  if (!absl::SimpleAtod(value, &share) || !(share >= 0 && static_cast<float>(share) < 1))
    return Bad(word, "is not in [0, 1)");
  options->optimizer_momentum = static_cast<float>(share);
  return absl::OkStatus();
}

absl::Status ReadRank(absl::string_view word, absl::string_view value, CompressionOptions* options) {
  if (!absl::SimpleAtoi(value, &options->matrix_rank) || options->matrix_rank < 1 ||
      options->matrix_rank > kMatrixRankMax) {
    return Bad(word, absl::StrCat("is not from 1 to ", kMatrixRankMax));
  }
  return absl::OkStatus();
}

absl::Status ReadWarmup(absl::string_view word, absl::string_view value, CompressionOptions* options) {
  int steps = 0;
  if (!absl::SimpleAtoi(value, &steps) || steps < 0 || steps > kWarmupStepsMax)
    return Bad(word, absl::StrCat("is not a number of steps from 0 to ", kWarmupStepsMax));
  options->warmup_steps = steps;
  return absl::OkStatus();
}

absl::Status ReadResidual(absl::string_view word, absl::string_view value, CompressionOptions* options) {
  if (value != "fp32" && value != "bf16") return Bad(word, "is neither fp32 nor bf16");
  options->residual = value == "bf16" ? ResidualType::kBFloat16 : ResidualType::kFloat32;
  return absl::OkStatus();
}

absl::Status ReadParameter(absl::string_view word, CompressionOptions* options) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
  const auto& [name, value] = parts;
  if (!HasParameter(options->codec, name))
    return Bad(word, absl::StrCat("is nothing that ", CodecName(options->codec), " has"));
  if (name == "density") return ReadDensity(word, value, options);
  if (name == "momentum") return ReadMomentum(word, value, options);
  if (name == "rank") return ReadRank(word, value, options);
  if (name == "warmup") return ReadWarmup(word, value, options);
  return ReadResidual(word, value, options);
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

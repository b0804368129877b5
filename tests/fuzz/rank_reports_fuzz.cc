// Fuzzes the reports of programs (fault P9 and the lying rank): relayed JSON, report lines, output lines
// against patterns, any cut of the stream into pieces.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "runtime/core/agent/rank_reports.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

using core::RankSaid;

void CheckSaid(const RankSaid& said) {
  if (said.step) GT_CHECK(*said.step >= 0);
}

}  // namespace

GT_FUZZ_RUN(rank_reports) {
  const std::string text(bytes);
  CheckSaid(core::ReadRelay(text));

  constexpr size_t kLineMax = 256;
  core::LineCutter whole(kLineMax), cut(kLineMax);
  std::vector<std::string> lines = whole.Take(bytes), pieces;
  for (size_t at = 0, step = 1; at < bytes.size(); at += step, step = step % 7 + 1) {
    for (std::string& line : cut.Take(bytes.substr(at, step))) pieces.push_back(std::move(line));
  }
  GT_CHECK(lines == pieces);

  spec::Progress progress;
  progress.step = R"(step[ =:]+(\d+))";
  progress.loss = R"(loss[ =:]+([-+.\deE]+))";
  static const core::ProgressPatterns patterns(progress);
  for (const std::string& line : lines) {
    GT_CHECK(line.size() <= kLineMax);
    CheckSaid(core::ReadReportLine(line));
    CheckSaid(patterns.Match(line));
  }
}

GT_FUZZ_SEEDS(rank_reports) {
  return {R"({"type":"joined"})",
          R"({"type":"exchange","sequence":3,"blob":"aGVsbG8="})",
          R"({"type":"progress","step":12,"loss":0.25,"samples":64,"collective":99})",
          R"({"type":"checkpoint","step":12,"timeline":2,"manifest":"manifests/x.json"})",
          "{\"step\": 1, \"loss\": 2.5, \"samples\": 32}\n{\"step\": 2}\r\n{\"checkpoint\": 2}\n",
          "epoch 1 step=12 loss: 1e-3\nsaved 12\nstep: 99999999999999999999\n",
          core::TableText(7, {"a", "", "long blob"})};
}

}  // namespace gtrain::fuzz

#include "launcher/cli/plot.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/units.h"

namespace gtrain::cli {
namespace {

constexpr double kWidth = 800, kHeight = 500, kLeft = 80, kRight = 170, kTop = 50, kBottom = 50;
constexpr const char* kColors[] = {"#0b6", "#c33", "#36c", "#c80", "#808", "#555"};

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

std::string Text(double x, double y, const char* anchor, const std::string& text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
                         Escaped(text));
}

std::string Line(double x1, double y1, double x2, double y2) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", x1, y1,
                         x2, y2);
}

// Maps a logarithm of [low, high] to a place of [from, to].
struct Axis {
  double low, high, from, to;
  double At(double log) const { return from + (log - low) / (high - low) * (to - from); }
};

}  // namespace

std::string PlotSvg(const std::string& title, const std::string& y_name, const std::vector<Curve>& curves) {
  double x_low = 62, x_high = 0, y_low = 99, y_high = -99;
  for (const Curve& curve : curves) {
    for (const auto& [x, y] : curve.points) {
      x_low = std::min(x_low, std::log2(x));
      x_high = std::max(x_high, std::log2(x));
      y_low = std::min(y_low, std::floor(std::log10(y)));
      y_high = std::max(y_high, std::ceil(std::log10(y)));
    }
  }
  const Axis across{x_low, std::max(x_high, x_low + 1), kLeft, kWidth - kRight};
  const Axis up{y_low, std::max(y_high, y_low + 1), kHeight - kBottom, kTop};
  std::string out = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  absl::StrAppend(&out, Text(kWidth / 2, 25, "middle", title), Text(10, kTop - 12, "start", y_name));
  for (double y = up.low; y <= up.high; ++y) {
    absl::StrAppend(&out, Line(across.from, up.At(y), across.to, up.At(y)),
                    Text(across.from - 6, up.At(y) + 4, "end", absl::StrFormat("%g", std::pow(10, y))));
  }
  for (double x = std::ceil(across.low); x <= across.high; x += 3) {
    absl::StrAppend(&out, Line(across.At(x), up.from, across.At(x), up.to),
                    Text(across.At(x), up.from + 18, "middle",
                         PrintBytes(static_cast<uint64_t>(std::llround(std::exp2(x))))));
  }
  for (size_t i = 0; i < curves.size(); ++i) {
    const char* color = kColors[i % std::size(kColors)];
    std::string points;
    for (const auto& [x, y] : curves[i].points) {
      absl::StrAppendFormat(&points, "%.1f,%.1f ", across.At(std::log2(x)), up.At(std::log10(y)));
    }
    absl::StrAppendFormat(&out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"%s\"/>\n",
                          color, points);
    absl::StrAppendFormat(
        &out, "<g fill=\"%s\">%s</g>\n", color,
        Text(kWidth - kRight + 10, kTop + 18.0 * static_cast<double>(i), "start", curves[i].name));
  }
  return out + "</svg>\n";
}

}  // namespace gtrain::cli

// A plot of curves over sizes as an SVG picture. PURE.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace gtrain::cli {

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  // both above 0
};

// Both axes are logarithmic: decades of y, powers of two of x, which is in bytes. No points: an empty frame.
std::string PlotSvg(const std::string& title, const std::string& y_name, const std::vector<Curve>& curves);

}  // namespace gtrain::cli

// Notices that links no longer cost what was measured. PURE. Some dozen bytes and a few operations a
// collective, independent of the number of ranks.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace gtrain::comm {

// The ratio of the actual to the predicted time of one collective is no measure of the link: predictions are
// wrong by some factor, and collectives wait for ranks that come late. But the best of many collectives
// waited for nobody, and its factor stays the same as long as the link does. Not thread-safe.
class LinkDrift {
 public:
  static constexpr int kWindow = 32;  // collectives of which the best counts
  static constexpr int kWindows = 3;  // in a row that must agree
  static constexpr int kWindowsMax = 3 << 8;
  static constexpr double kFactor = 2;

  // Both in seconds, above zero.
  void Took(double predicted, double actual) {
    best_ = taken_ == 0 ? actual / predicted : std::min(best_, actual / predicted);
    if (++taken_ < kWindow) return;
    taken_ = 0;
    if (reference_ == 0) {
      reference_ = best_;
      return;
    }
    const bool off = best_ > kFactor * reference_ || best_ < reference_ / kFactor;
    off_ = off ? off_ + 1 : 0;
  }

  // The costs should be measured again.
  bool drifted() const { return off_ >= patience_; }

  // Says that the costs were measured. Where they did not change, the link is not what made collectives slow,
  // and it takes longer until the next time.
  void Measured(bool changed) {
    patience_ = changed ? kWindows : std::min(2 * patience_, kWindowsMax);
    reference_ = 0;
    taken_ = off_ = 0;
  }

 private:
  double best_ = 0;       // of this window
  double reference_ = 0;  // of the first window behind a measurement; 0: it is not over
  int taken_ = 0, off_ = 0, patience_ = kWindows;
};

// A LinkDrift for each class of sizes, because predictions are wrong by another factor for each size.
class LinkDrifts {
 public:
  void Took(uint64_t bytes, double predicted, double actual) {
    size_t of = 0;
    while (of + 1 < classes_.size() && bytes > kLargest[of]) ++of;
    classes_[of].Took(predicted, actual);
  }
  bool drifted() const {
    return std::ranges::any_of(classes_, [](const LinkDrift& drift) { return drift.drifted(); });
  }
  void Measured(bool changed) {
    for (LinkDrift& drift : classes_) drift.Measured(changed);
  }

 private:
  static constexpr std::array<uint64_t, 4> kLargest{8 << 10, 64 << 10, 512 << 10, 4 << 20};
  std::array<LinkDrift, kLargest.size() + 1> classes_;
};

}  // namespace gtrain::comm

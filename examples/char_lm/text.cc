#include "examples/char_lm/text.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <numeric>

namespace gtrain::examples {
namespace {

constexpr size_t kCharactersMin = 10'000;

// SplitMix64 (Steele, Lea and Flood 2014): a hash whose bits are all good.
uint64_t Mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

Result<Text> ReadText(const std::string& path, size_t class_count) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Status(StatusCode::kNotFound, "cannot open " + path);
  Text text;
  text.classes.assign(std::istreambuf_iterator<char>(file), {});
  if (text.classes.size() < kCharactersMin) {
    return Status(StatusCode::kInvalidArgument, path + " has " + std::to_string(text.classes.size()) +
                                                    " characters: a text of at least " +
                                                    std::to_string(kCharactersMin) + " is needed");
  }
  std::array<size_t, 256> times{};
  for (const uint8_t c : text.classes) ++times[c];
  std::array<uint8_t, 256> order{}, class_of{};
  std::iota(order.begin(), order.end(), uint8_t{0});
  std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return times[a] > times[b]; });
  for (size_t i = 0; i < order.size(); ++i) {
    class_of[order[i]] = static_cast<uint8_t>(std::min(i, class_count - 1));
  }
  for (uint8_t& c : text.classes) c = class_of[c];
  text.train = text.classes.size() / 20 * 19;
  return text;
}

size_t SamplePosition(uint64_t seed, int64_t step, int64_t index, size_t positions) {
  return Mix(Mix(Mix(seed) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(index)) % positions;
}

}  // namespace gtrain::examples

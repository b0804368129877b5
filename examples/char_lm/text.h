// A text as classes of characters, and which part of it is trained when.
#pragma once
#include <gtrain/status.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gtrain::examples {

// The most frequent characters have a class each; all others share the last one.
struct Text {
  std::vector<uint8_t> classes;  // of the characters, one after the other
  size_t train = 0;              // the first so many are trained, the rest is for validation
};

// The first 95 % are for training. kInvalidArgument: shorter than 10,000 characters.
Result<Text> ReadText(const std::string& path, size_t class_count);

// Where sample `index` of the global batch of `step` begins: a pure function in [0, positions), so that
// nothing but the step has to be saved and any number of ranks trains the same samples.
size_t SamplePosition(uint64_t seed, int64_t step, int64_t index, size_t positions);

}  // namespace gtrain::examples

// Writes tests/fuzz/corpus/<target>/seed-NN from the code that makes real inputs. Run after a format changed:
//   build/tests/fuzz_seeds tests/fuzz/corpus
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_format.h"
#include "tests/fuzz/target.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds CORPUS_DIRECTORY\n");
    return 2;
  }
  for (const gtrain::fuzz::Target& target : gtrain::fuzz::Targets()) {
    const std::filesystem::path folder = std::filesystem::path(argv[1]) / target.name;
    std::filesystem::create_directories(folder);
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().filename().string().rfind("seed-", 0) == 0) std::filesystem::remove(entry.path());
    }
    int number = 0;
    for (const std::string& seed : target.seeds()) {
      std::ofstream file(folder / absl::StrFormat("seed-%02d", number++), std::ios::binary);
      file.write(seed.data(), static_cast<std::streamsize>(seed.size()));
      if (!file.flush()) return 1;
    }
    std::printf("%s: %d seeds\n", target.name, number);
  }
  return 0;
}

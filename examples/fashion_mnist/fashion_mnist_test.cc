// Tests of what needs no torch: the reader.
#include <zlib.h>

#include <fstream>
#include <string>

#include "base/test_folder.h"
#include "examples/fashion_mnist/idx.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::examples {
namespace {

using ::testing::HasSubstr;

std::string WriteGz(const std::string& name, const std::string& bytes) {
  const std::string path = TestFolder() + "/" + name;
  gzFile file = gzopen(path.c_str(), "wb");
  EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())), static_cast<int>(bytes.size()));
  EXPECT_EQ(gzclose(file), Z_OK);
  return path;
}

TEST(Idx, ReadsLabelsAndImages) {
  const std::string labels("\0\0\x08\x01\0\0\0\x03\x07\x08\x09", 11);
  auto array = ReadIdxGz(WriteGz("labels.gz", labels), 1);
  ASSERT_TRUE(array.ok()) << array.status().ToString();
  EXPECT_THAT(array->dims, ::testing::ElementsAre(3));
  EXPECT_THAT(array->data, ::testing::ElementsAre(7, 8, 9));

  const std::string images(
      "\0\0\x08\x03\0\0\0\x01\0\0\0\x02\0\0\0\x02"
      "abcd",
      20);
  array = ReadIdxGz(WriteGz("images.gz", images), 3);
  ASSERT_TRUE(array.ok()) << array.status().ToString();
  EXPECT_THAT(array->dims, ::testing::ElementsAre(1, 2, 2));
  EXPECT_EQ(array->data[3], 'd');
}

TEST(Idx, DamagedFilesAreErrors) {
  EXPECT_THAT(ReadIdxGz(TestFolder() + "/absent.gz", 1).status().message(),
              HasSubstr("install dataset-fashion-mnist"));
  const std::string labels("\0\0\x08\x01\0\0\0\x03\x07\x08\x09", 11);
  EXPECT_FALSE(ReadIdxGz(WriteGz("kind.gz", labels), 3).ok());
  EXPECT_THAT(ReadIdxGz(WriteGz("short.gz", labels.substr(0, 10)), 1).status().message(),
              HasSubstr("ends after 2 of 3 bytes"));
  EXPECT_FALSE(ReadIdxGz(WriteGz("empty.gz", ""), 1).ok());
  const std::string huge("\0\0\x08\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 16);
  EXPECT_THAT(ReadIdxGz(WriteGz("huge.gz", huge), 3).status().message(), HasSubstr("impossible size"));

  const std::string cut =
      WriteGz("cut.gz", std::string("\0\0\x08\x01\0\0\x10\0", 8) + std::string(4096, 'x'));
  std::string bytes;
  {
    std::ifstream in(cut, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  std::ofstream(cut, std::ios::binary | std::ios::trunc).write(bytes.data(), bytes.size() / 2);
  EXPECT_FALSE(ReadIdxGz(cut, 1).ok());
}

}  // namespace
}  // namespace gtrain::examples

#include "elastic/plan/cpu.h"

#include "gtest/gtest.h"

namespace gtrain::elastic {
namespace {

constexpr char kX86[] = R"(processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 85
model name	: Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz
stepping	: 7
microcode	: 0x5003604
cpu MHz		: 2499.998
flags		: fpu sse sse2 ht lm ssse3 fma cx16 sse4_1 avx f16c avx2 smep avx512f avx512_vnni xsaves
bugs		: spectre_v1 mmio_stale_data

processor	: 1
vendor_id	: GenuineIntel
stepping	: 8
flags		: fpu
)";

TEST(CpuTest, SaysWhatLibrariesChooseBy) {
  EXPECT_EQ(
      DescribeCpu(kX86),
      "GenuineIntel, family 6, model 85, stepping 7, with avx avx2 avx512_vnni avx512f f16c fma sse sse2 "
      "sse4_1 ssse3");
  EXPECT_EQ(
      DescribeCpu("processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd evtstrm aes atomics fphp "
                  "asimdhp sve bf16\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
                  "CPU part\t: 0xd40\nCPU revision\t: 1\n\n"),
      "Arm 0x41, architecture 8, variant 0x1, part 0xd40, revision 1, with asimd asimdhp bf16 fphp sve");
}

TEST(CpuTest, NothingThatIsKnownIsEmpty) {
  EXPECT_EQ(DescribeCpu(""), "");
  EXPECT_EQ(DescribeCpu("processor : 0\nbogus\n: \n"), "");
  EXPECT_EQ(DescribeCpu("\n\nvendor_id : AuthenticAMD"), "AuthenticAMD");
}

}  // namespace
}  // namespace gtrain::elastic

// What of a processor decides which instructions a library picks, and so which bits it computes. PURE.
#pragma once
#include <string>

#include "absl/strings/string_view.h"

namespace gtrain::elastic {

// Reads the first processor of /proc/cpuinfo: vendor, family, model, stepping (on Arm implementer,
// architecture, variant, part and revision), and those of its features that arithmetic uses. In one line, for
// people and to be compared: "AuthenticAMD, family 26, model 2, stepping 1, with avx avx2 fma". The name in
// shops is left out, since one model has several. Empty: nothing of it is there. O(text).
std::string DescribeCpu(absl::string_view cpuinfo);

}  // namespace gtrain::elastic

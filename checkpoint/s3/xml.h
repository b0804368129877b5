// XML as S3 answers with it, into a small tree. DTDs, entities of a document's own, deep nesting and large
// documents are refused (fault B11).
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

struct XmlElement {
  std::string name;  // without namespace
  std::string text;
  std::vector<XmlElement> children;

  const XmlElement* Child(absl::string_view child) const;  // the first; null: none
  std::string Text(absl::string_view child) const;         // its text; empty: none
};

inline constexpr int kXmlDepthMax = 8;
inline constexpr size_t kXmlElementsMax = 20'000;  // a page of a listing has 1,000 entries of ten

// DataLoss: not one whole document within the limits.
absl::StatusOr<XmlElement> ParseXml(absl::string_view text);

}  // namespace gtrain::ckpt

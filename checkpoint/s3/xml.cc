#include "checkpoint/s3/xml.h"

#include <expat.h>

#include <memory>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace gtrain::ckpt {
namespace {

struct Reading {
  XML_Parser parser = nullptr;
  XmlElement top;            // holds the root as its only child
  std::vector<size_t> path;  // child numbers from `top`
  size_t elements = 0;
  std::string refused;

  XmlElement& Here() {
    XmlElement* here = &top;
    for (const size_t child : path) here = &here->children[child];
    return *here;
  }
  void Refuse(absl::string_view why) {
    if (refused.empty()) refused = std::string(why);
    XML_StopParser(parser, XML_FALSE);
  }
};

// expat calls End for <empty/> also when Start has stopped it: what comes after a refusal is not looked at.
void Start(void* user, const char* name, const char**) {
  auto* r = static_cast<Reading*>(user);
  if (!r->refused.empty()) return;
  if (++r->elements > kXmlElementsMax) return r->Refuse("too many elements");
  if (r->path.size() >= static_cast<size_t>(kXmlDepthMax)) return r->Refuse("nested too deep");
  absl::string_view local = name;
  if (const size_t colon = local.rfind(':'); colon != absl::string_view::npos) local.remove_prefix(colon + 1);
  if (local.empty()) return r->Refuse("an element without a name");  // expat takes <prefix:/>
  XmlElement& here = r->Here();
  here.children.push_back({std::string(local), "", {}});
  r->path.push_back(here.children.size() - 1);
}

void End(void* user, const char*) {
  auto* r = static_cast<Reading*>(user);
  if (r->refused.empty()) r->path.pop_back();
}

void Characters(void* user, const char* text, int length) {
  auto* r = static_cast<Reading*>(user);
  if (r->refused.empty()) r->Here().text.append(text, static_cast<size_t>(length));
}

void Doctype(void* user, const char*, const char*, const char*, int) {
  static_cast<Reading*>(user)->Refuse("it has a DTD");
}

}  // namespace

const XmlElement* XmlElement::Child(absl::string_view child) const {
  for (const XmlElement& element : children) {
    if (element.name == child) return &element;
  }
  return nullptr;
}

std::string XmlElement::Text(absl::string_view child) const {
  const XmlElement* element = Child(child);
  return element == nullptr ? "" : element->text;
}

absl::StatusOr<XmlElement> ParseXml(absl::string_view text) {
  const std::unique_ptr<std::remove_pointer_t<XML_Parser>, decltype(&XML_ParserFree)> parser(
      XML_ParserCreate("UTF-8"), &XML_ParserFree);
  if (parser == nullptr) return absl::ResourceExhaustedError("no memory for an XML parser");
  Reading reading;
  reading.parser = parser.get();
  XML_SetUserData(parser.get(), &reading);
  XML_SetElementHandler(parser.get(), &Start, &End);
  XML_SetCharacterDataHandler(parser.get(), &Characters);
  XML_SetStartDoctypeDeclHandler(parser.get(), &Doctype);
  if (text.size() > (size_t{1} << 30) ||
      XML_Parse(parser.get(), text.data(), static_cast<int>(text.size()), XML_TRUE) != XML_STATUS_OK) {
    const std::string why =
        reading.refused.empty() ? XML_ErrorString(XML_GetErrorCode(parser.get())) : reading.refused;
    return absl::DataLossError(
        absl::StrCat("XML answer, line ", XML_GetCurrentLineNumber(parser.get()), ": ", why));
  }
  return std::move(reading.top.children[0]);
}

}  // namespace gtrain::ckpt

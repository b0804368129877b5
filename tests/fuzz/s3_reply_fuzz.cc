// Fuzzes the replies of an S3 server (fault B11), and its address: a whole small tree, or an error.
#include "base/check.h"
#include "checkpoint/s3/s3_store.h"
#include "checkpoint/s3/xml.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

size_t CheckTree(const ckpt::XmlElement& element, int depth) {
  GT_CHECK(depth <= ckpt::kXmlDepthMax && !element.name.empty());
  size_t elements = 1;
  for (const ckpt::XmlElement& child : element.children) elements += CheckTree(child, depth + 1);
  return elements;
}

}  // namespace

GT_FUZZ_RUN(s3_reply) {
  const auto tree = ckpt::ParseXml(bytes);
  if (tree.ok()) GT_CHECK(CheckTree(*tree, 1) <= ckpt::kXmlElementsMax);
  const auto options =
      ckpt::ParseS3Uri(bytes, [](const char*) -> std::optional<std::string> { return std::nullopt; });
  if (options.ok()) GT_CHECK(!options->bucket.empty());
}

GT_FUZZ_SEEDS(s3_reply) {
  return {
      R"(<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">)"
      R"(<IsTruncated>true</IsTruncated><Contents><Key>a/b&amp;c</Key><Size>7</Size><ETag>"x"</ETag></Contents>)"
      R"(<NextContinuationToken>t</NextContinuationToken></ListBucketResult>)",
      "<Error><Code>SlowDown</Code><Message>&#60;later&#62;</Message></Error>",
      "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
      "<!DOCTYPE a [<!ENTITY e \"x\"><!ENTITY f \"&e;&e;\">]><a>&f;</a>",
      "<a><a><a><a><a><a><a><a><a/></a></a></a></a></a></a></a></a>",
      "s3://bucket/prefix/of/it"};
}

}  // namespace gtrain::fuzz

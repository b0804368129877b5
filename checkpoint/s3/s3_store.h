// Blobs in an S3-compatible object store. Amazon S3 User Guide: conditional writes, multipart upload, error
// responses.
#pragma once
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "checkpoint/port/blob_store.h"
#include "checkpoint/s3/credentials.h"
#include "net/http/client.h"

namespace gtrain::ckpt {

struct S3Options {
  std::string bucket;
  std::string prefix;  // "" or "a/b", without a slash at either end
  std::string region = "us-east-1";
  std::string endpoint;     // "https://host:port"; empty: Amazon's of the region
  bool path_style = false;  // https://host/bucket/key instead of https://bucket.host/key
  // How what is put is protected on its way. False: its SHA-256 is part of the signature. True: the signature
  // leaves it out and a CRC32C goes along, which the store compares; where it turns out not to, false.
  bool checksums = false;
  // The size of a part of a multipart upload, at least 5 MiB. Larger where parts_max would not do.
  uint64_t part_bytes = 16 << 20;
  uint64_t parts_max = 10'000;                             // what S3 takes
  int uploads = 4;                                         // parts on the way at a time
  int attempts = 8;                                        // of one request, the first included
  absl::Duration first_backoff = absl::Milliseconds(100);  // doubles up to 5 s, jittered
  absl::Duration patience = absl::Minutes(5);              // with one request and its repetitions
  const Clock* clock = nullptr;                            // of the patience; outlives the store; null: real
};

// The longest object that S3 takes.
inline constexpr uint64_t kS3BytesMax = uint64_t{5} << 40;

// How long the parts of a multipart upload of `bytes` bytes are: whole MiB, and at most `parts_max` parts.
uint64_t S3PartBytes(uint64_t bytes, uint64_t part_bytes, uint64_t parts_max);

// Parses "s3://bucket/prefix" and $AWS_REGION, $AWS_DEFAULT_REGION, $AWS_ENDPOINT_URL_S3, $AWS_ENDPOINT_URL,
// $GTRAIN_S3_ADDRESSING (path | virtual; the default is path for an endpoint of one's own),
// $GTRAIN_S3_PAYLOAD (signed | checksum; the default is checksum over https). InvalidArgument says what is
// wrong with which.
absl::StatusOr<S3Options> ParseS3Uri(absl::string_view uri, const S3Environment& environment);

// The store is thread-safe; large puts use threads of their own.
absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenS3Store(
    const S3Options& options, std::shared_ptr<http::Client> http,
    std::shared_ptr<CredentialsProvider> credentials);
// Opens a store from a URI and this process's environment, with a client ($AWS_CA_BUNDLE) and credentials of
// its own.
absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenS3Store(absl::string_view uri,
                                                             const S3Environment& environment);

}  // namespace gtrain::ckpt

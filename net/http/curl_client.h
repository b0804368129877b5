// The HTTP client of libcurl.
#pragma once
#include <memory>
#include <string>

#include "net/http/client.h"

namespace gtrain::http {

// `ca_bundle`: a file of certificates, empty for the system's.
absl::StatusOr<std::unique_ptr<Client>> MakeCurlClient(const std::string& ca_bundle);

}  // namespace gtrain::http

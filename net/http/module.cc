// The entry of libgtrain_http.so.
#include "net/http/curl_client.h"

extern "C" __attribute__((visibility("default"))) const gtrain::http::Module* gtrain_http_module() {
  static const gtrain::http::Module module = {gtrain::http::kModuleAbi,
                                              [] { return gtrain::http::MakeCurlClient(""); }};
  return &module;
}

// The entry of libgtrain_net.so.
#include "net/zmq/job_net.h"

extern "C" __attribute__((visibility("default"))) const gtrain::port::NetModule* gtrain_net_module() {
  return &gtrain::net::JobNet();
}

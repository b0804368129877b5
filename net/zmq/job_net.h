// Connections between the processes of one job, which have one CURVE key between them: who has the secret of
// the job is let in, and nobody else. Thread-safe; what it makes is as ServerTransport and ClientTransport
// say.
#pragma once
#include "net/port/net_module.h"

namespace gtrain::net {

const port::NetModule& JobNet();

}  // namespace gtrain::net

// How much of the machine this process may use: memory that it can still fill, and what control groups leave
// it.
#pragma once
#include <cstdint>
#include <string>

namespace gtrain {

// Bytes: what the kernel says is available on the machine (proc(5), MemAvailable), and at most what lacks to
// the limit of each control group (version 2) that this process is in, where pages of files count as free.
// UINT64_MAX when nothing can be read. `root` is where /proc and /sys are; only tests give another. Reads a
// few small files; thread-safe.
uint64_t AvailableMemory(const std::string& root = "");

// Bytes: the smallest limit of the control groups (either version) that this process is in, which is what a
// container has; UINT64_MAX without one. As above otherwise.
uint64_t MemoryLimit(const std::string& root = "");

// Processors, of which a part may be meant: the smallest quota of the control groups (either version) that
// this process is in (`docker run --cpus`, a Kubernetes limit); infinity without one. As above otherwise.
double ProcessorLimit(const std::string& root = "");

}  // namespace gtrain

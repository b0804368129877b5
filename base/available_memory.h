// How much memory this process can still fill.
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

}  // namespace gtrain

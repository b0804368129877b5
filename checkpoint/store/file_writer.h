// Writes a new file front to back. A large one goes past the page cache (O_DIRECT) where the file system can:
// a checkpoint that is written through the cache costs a copy, pushes out what training reads, and waits for
// the kernel's writeback in the end.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

class FileWriter {
 public:
  // `fd` is open for writing at offset 0 and outlives the writer. `path` is for messages.
  FileWriter(int fd, std::string path, uint64_t bytes_to_come);
  // Memory that lies like its place in the file, seen modulo kBlock, is written without a copy.
  absl::Status Append(absl::string_view data);
  // Writes the rest of the last block. The file is not synced.
  absl::Status Finish();

  static constexpr size_t kBlock = 4096;  // what O_DIRECT wants memory, offset and length to be a multiple of

 private:
  bool SetDirect(bool on);
  // All of `data` at the end of what is written.
  absl::Status Write(absl::string_view data);
  absl::Status Flush();

  const int fd_;
  const std::string path_;
  bool direct_ = false;
  uint64_t written_ = 0;
  struct Free {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> held_;  // comes after what is written; one block is aligned as the next
  size_t held_bytes_ = 0;
};

}  // namespace gtrain::ckpt

// Memory for state (gtrain_state_* of elastic_c.h), and what is said where a program writes to it while the
// permission is taken away.
#include "runtime/capi/state_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "gtrain/elastic_c.h"

namespace gtrain::capi {
namespace {

// What the handler knows of one block of memory. It may run at any moment, on any thread, and takes no lock:
// a block is never destroyed, and who comes next takes one that is free.
struct Block {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<size_t> bytes{0};
  std::array<char, 64> name{};        // not changed once it has a size
  std::atomic<size_t> name_bytes{0};  // 0: it has no name yet
  Block* next = nullptr;
};

std::atomic<Block*> blocks{nullptr};
struct sigaction before {};  // what was there for SIGSEGV; set before our handler is

// Held by whoever changes which blocks there are. Never destroyed: threads may outlive main().
Mutex& BlocksMutex() {
  static auto* const mutex = new Mutex();
  return *mutex;
}

Block* FindBlock(uintptr_t address) {
  for (Block* block = blocks.load(); block != nullptr; block = block->next) {
    const uintptr_t begin = block->begin.load();
    if (begin != 0 && address >= begin && address - begin < block->bytes.load()) return block;
  }
  return nullptr;
}

void AddBlock(const void* data, size_t bytes) {
  MutexLock lock(&BlocksMutex());
  Block* block = blocks.load();
  while (block != nullptr && block->begin.load() != 0) block = block->next;
  const bool is_new = block == nullptr;
  if (is_new) block = new Block();
  block->bytes = bytes;
  block->begin = reinterpret_cast<uintptr_t>(data);
  if (!is_new) return;
  block->next = blocks.load();
  blocks = block;
}

void RemoveBlock(const void* data) {
  MutexLock lock(&BlocksMutex());
  Block* const block = FindBlock(reinterpret_cast<uintptr_t>(data));
  if (block == nullptr) return;
  block->begin = 0;
  block->name_bytes = 0;
}

// One line, made without memory or locks, so a signal handler may.
class Line {
 public:
  Line& operator<<(absl::string_view text) {
    const size_t count = std::min(text.size(), text_.size() - size_);
    std::memcpy(text_.data() + size_, text.data(), count);
    size_ += count;
    return *this;
  }
  Line& Number(uint64_t number, int base) {
    const auto [end, error] = std::to_chars(text_.data() + size_, text_.data() + text_.size(), number, base);
    if (error == std::errc()) size_ = static_cast<size_t>(end - text_.data());
    return *this;
  }
  void WriteTo(int fd) const {
    // In one piece, so that the lines of several threads do not mix. Where stderr is gone nobody is told.
    [[maybe_unused]] const ssize_t written = write(fd, text_.data(), size_);
  }

 private:
  std::array<char, 1024> text_;
  size_t size_ = 0;
};

void SayWrite(const Block& block, uintptr_t address) {
  Line line;
  line << "gtrain: the program wrote to its state ";
  if (const size_t bytes = block.name_bytes.load(); bytes > 0)
    line << "'" << absl::string_view(block.name.data(), bytes) << "' ";
  line << "outside an update, at 0x";
  line.Number(address, 16) << " (byte ";
  line.Number(address - block.begin.load(), 10) << " of ";
  line.Number(block.bytes.load(), 10)
      << "), and gets SIGSEGV there: this rank's state would not be that of the others. Write to it in the "
         "update that is passed to Step::Apply, or keep what is no state in memory that is not registered; "
         "a debugger, or the core file, shows the line\n";
  line.WriteTo(STDERR_FILENO);
}

// The handler that was there, for a fault that is none of ours. False: there is none that could be called.
bool CallBefore(int number, siginfo_t* info, void* context) {
  if ((before.sa_flags & static_cast<int>(SA_RESETHAND)) != 0) return false;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
    return true;
  }
  // The kernel ends a program that ignores a fault of its own, and leaves it alone when others send one.
  if (before.sa_handler == SIG_IGN) return info->si_code <= 0;
  if (before.sa_handler == SIG_DFL) return false;
  before.sa_handler(number);
  return true;
}

// Says what it knows and puts back what was there. The instruction runs again and ends the program as it
// would have without us: with its exit by SIGSEGV, and a core file of the place.
void OnFault(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  const Block* const block = info->si_code == SEGV_ACCERR ? FindBlock(address) : nullptr;
  if (block != nullptr) SayWrite(*block, address);
  if (block != nullptr || !CallBefore(number, info, context)) {
    sigaction(SIGSEGV, &before, nullptr);
    if (info->si_code <= 0) raise(number);  // no instruction will do it again
  }
  errno = error;
}

void InstallOnce() {
  [[maybe_unused]] static const bool installed = [] {
    sigaction(SIGSEGV, nullptr, &before);
    struct sigaction ours = before;
    ours.sa_sigaction = &OnFault;
    ours.sa_flags = (before.sa_flags & ~static_cast<int>(SA_RESETHAND)) | SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &ours, nullptr) == 0;
  }();
}

}  // namespace

void NameState(const void* data, const char* name) {
  if (data == nullptr || name == nullptr) return;
  MutexLock lock(&BlocksMutex());
  Block* const block = FindBlock(reinterpret_cast<uintptr_t>(data));
  if (block == nullptr || block->name_bytes.load() > 0) return;
  const size_t bytes = strnlen(name, block->name.size());
  std::memcpy(block->name.data(), name, bytes);
  block->name_bytes = bytes;
}

}  // namespace gtrain::capi

void* gtrain_state_allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  gtrain::capi::AddBlock(data, bytes);
  return data;
}

void gtrain_state_free(void* data, size_t bytes) {
  if (data == nullptr) return;
  gtrain::capi::RemoveBlock(data);
  munmap(data, bytes);
}

void gtrain_state_set_writable(void* data, size_t bytes, int writable) {
  if (data == nullptr) return;
  if (writable == 0) gtrain::capi::InstallOnce();
  mprotect(data, bytes, writable != 0 ? PROT_READ | PROT_WRITE : PROT_READ);
}

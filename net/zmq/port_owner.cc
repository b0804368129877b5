// Finds the process that listens on a port: the socket's inode from /proc/net/tcp{,6}, then the process that
// holds it.
#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "net/zmq/server.h"

namespace gtrain::net {
namespace {

std::string ListeningInode(const std::string& table, int port) {
  std::FILE* file = std::fopen(table.c_str(), "re");
  if (file == nullptr) return "";
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> owner(file, std::fclose);
  char line[512];
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipWhitespace());
    if (words.size() < 10 || words[3] != "0A") continue;  // LISTEN
    size_t colon = words[1].rfind(':');
    if (colon != std::string::npos && std::strtol(words[1].c_str() + colon + 1, nullptr, 16) == port)
      return words[9];
  }
  return "";
}

std::vector<std::string> Entries(const std::string& path) {
  std::vector<std::string> names;
  std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(path.c_str()), closedir);
  if (!dir) return names;
  while (dirent* entry = readdir(dir.get())) names.push_back(entry->d_name);
  return names;
}

bool Holds(const std::string& pid, const std::string& link) {
  std::string folder = absl::StrCat("/proc/", pid, "/fd");
  for (const std::string& fd : Entries(folder)) {
    char target[64];
    ssize_t length = readlink(absl::StrCat(folder, "/", fd).c_str(), target, sizeof(target));
    if (length > 0 && std::string(target, length) == link) return true;
  }
  return false;
}

}  // namespace

std::string OwnerOfPort(int port) {
  std::string inode = ListeningInode("/proc/net/tcp", port);
  if (inode.empty()) inode = ListeningInode("/proc/net/tcp6", port);
  if (inode.empty()) return "";
  std::string link = absl::StrCat("socket:[", inode, "]");
  for (const std::string& pid : Entries("/proc")) {
    int number;
    if (!absl::SimpleAtoi(pid, &number) || !Holds(pid, link)) continue;
    char name[64] = "";
    std::FILE* file = std::fopen(absl::StrCat("/proc/", pid, "/comm").c_str(), "re");
    if (file != nullptr) {
      if (std::fgets(name, sizeof(name), file) == nullptr) name[0] = '\0';
      std::fclose(file);
    }
    return absl::StrCat("pid ", pid, " (", absl::StripAsciiWhitespace(name), ")");
  }
  return "";
}

}  // namespace gtrain::net

#include "bench/http_sink.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace gtrain::bench {
namespace {

constexpr size_t kHeadBytesMax = 64 << 10;

bool SendAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

std::string Reply(absl::string_view status, absl::string_view headers, absl::string_view body) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Length: ", body.size(), "\r\n", headers, "\r\n",
                      body);
}

// Answers as S3 would. No object is ever there.
std::string Answer(absl::string_view method, absl::string_view target) {
  // A store is asked whether it compares checksums: by a small object with a wrong one.
  if (method == "PUT" && absl::StrContains(target, "/probe-"))
    return Reply("400 Bad Request", "", "<Error><Code>BadDigest</Code></Error>");
  if (method == "PUT") return Reply("200 OK", "ETag: \"0123abc\"\r\n", "");
  if (method == "POST" && absl::EndsWith(absl::StripSuffix(target, "="), "uploads")) {
    return Reply("200 OK", "",
                 "<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>");
  }
  if (method == "POST") {
    return Reply("200 OK", "",
                 "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>");
  }
  if (method == "DELETE") return Reply("204 No Content", "", "");
  // To HEAD no body may follow; with an empty one it is the same for all.
  return Reply("404 Not Found", "", "");
}

// The number in ".../key?partNumber=7&uploadId=u1"; 0 without.
int PartNumber(absl::string_view target) {
  constexpr absl::string_view kName = "partNumber=";
  const size_t at = target.find(kName);
  int number = 0;
  if (at == absl::string_view::npos) return 0;
  const absl::string_view rest = target.substr(at + kName.size());
  return absl::SimpleAtoi(rest.substr(0, rest.find('&')), &number) ? number : 0;
}

}  // namespace

HttpSink::HttpSink(const Settings& settings) : settings_(settings) {
  listener_.reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(at);
  GT_CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0);
  GT_CHECK(listen(listener_.get(), 64) == 0);
  GT_CHECK(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
  port_ = ntohs(at.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

HttpSink::~HttpSink() {
  {
    MutexLock lock(&mu_);
    end_ = true;
    for (const int fd : open_) shutdown(fd, SHUT_RDWR);
  }
  shutdown(listener_.get(), SHUT_RDWR);
  acceptor_.join();
  std::vector<std::thread> threads;
  {
    MutexLock lock(&mu_);
    threads.swap(threads_);
  }
  for (std::thread& t : threads) t.join();
}

std::string HttpSink::endpoint() const { return absl::StrCat("http://127.0.0.1:", port_); }

void HttpSink::Accept() {
  while (true) {
    const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    MutexLock lock(&mu_);
    if (fd < 0 || end_) {
      if (fd >= 0) close(fd);
      return;
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    open_.push_back(fd);
    threads_.emplace_back([this, fd] {
      Serve(fd);
      MutexLock done(&mu_);
      std::erase(open_, fd);
      close(fd);
    });
  }
}

void HttpSink::Serve(int fd) {
  std::string text;
  char piece[16 << 10];
  while (true) {
    size_t end;
    while ((end = text.find("\r\n\r\n")) == std::string::npos) {
      const ssize_t n = recv(fd, piece, sizeof(piece), 0);
      if (n <= 0 || text.size() > kHeadBytesMax) return;
      text.append(piece, static_cast<size_t>(n));
    }
    const std::vector<std::string> lines = absl::StrSplit(text.substr(0, end), "\r\n");
    const std::vector<std::string> words = absl::StrSplit(lines[0], ' ');
    if (words.size() != 3) return;
    uint64_t length = 0;
    bool waits = false;
    for (const std::string& line : lines) {
      const std::string lower = absl::AsciiStrToLower(line);
      if (absl::StartsWith(lower, "content-length:") && !absl::SimpleAtoi(lower.substr(15), &length)) return;
      waits |= absl::StartsWith(lower, "expect:");
    }
    text.erase(0, end + 4);
    const uint64_t here = std::min<uint64_t>(length, text.size());
    std::string kept = settings_.keep ? text.substr(0, here) : "";
    text.erase(0, here);
    Pace(here);
    if (waits && !SendAll(fd, "HTTP/1.1 100 Continue\r\n\r\n")) return;
    if (!Take(fd, length - here, settings_.keep ? &kept : nullptr)) return;
    bool refuse;
    {
      MutexLock lock(&mu_);
      refuse = rng_.Unit() < settings_.refuse;
    }
    const std::string answer = refuse ? Reply("503 Slow Down", "", "<Error><Code>SlowDown</Code></Error>")
                                      : Answer(words[0], words[1]);
    if (words[0] == "PUT" && absl::StrContains(answer, " 200 ")) {
      put_bytes_ += length;
      MutexLock lock(&mu_);
      if (settings_.keep) kept_[PartNumber(words[1])] = std::move(kept);
    }
    if (!SendAll(fd, answer)) return;
  }
}

std::string HttpSink::TakeKept() {
  MutexLock lock(&mu_);
  std::string all;
  for (const auto& [number, part] : kept_) all += part;
  kept_.clear();
  return all;
}

bool HttpSink::Take(int fd, uint64_t bytes, std::string* kept) {
  constexpr uint64_t kAtOnce = 256 << 10;
  std::vector<char> buffer(kept != nullptr ? kAtOnce : 0);
  while (bytes > 0) {
    const ssize_t n = recv(fd, buffer.data(), std::min(bytes, kAtOnce), kept != nullptr ? 0 : MSG_TRUNC);
    if (n <= 0) return false;
    if (kept != nullptr) kept->append(buffer.data(), static_cast<size_t>(n));
    bytes -= static_cast<uint64_t>(n);
    Pace(static_cast<uint64_t>(n));
  }
  return true;
}

void HttpSink::Pace(uint64_t bytes) {
  if (settings_.bytes_per_second == 0 || bytes == 0) return;
  int64_t until;
  {
    MutexLock lock(&mu_);
    const int64_t now = absl::GetCurrentTimeNanos();
    next_ns_ = std::max(next_ns_, now - 10'000'000) +
               static_cast<int64_t>(1e9 * static_cast<double>(bytes) /
                                    static_cast<double>(settings_.bytes_per_second));
    until = next_ns_ - now;
  }
  if (until > 0) absl::SleepFor(absl::Nanoseconds(until));
}

}  // namespace gtrain::bench

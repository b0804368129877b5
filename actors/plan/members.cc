#include "actors/plan/members.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "actors/plan/bytes.h"
#include "actors/plan/frames.h"
#include "actors/plan/placement.h"

namespace gtrain::actors {
namespace {

constexpr absl::string_view kVersion = "gtrain-actors-2";
constexpr size_t kNameBytesMax = 255, kSignatureBytesMax = 64 << 10;

absl::Status Malformed(absl::string_view what) { return absl::InvalidArgumentError(what); }

}  // namespace

std::string PrintIntroduction(const Introduction& introduction) {
  return absl::StrCat(kVersion, " ", absl::Hex(introduction.process.high, absl::kZeroPad16),
                      absl::Hex(introduction.process.low, absl::kZeroPad16), " ", introduction.drives ? 1 : 0,
                      " ", introduction.endpoint, " ", introduction.node);
}

absl::StatusOr<Introduction> ParseIntroduction(absl::string_view text) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
  if (words.size() != 5 || words[0] != kVersion) {
    return absl::FailedPreconditionError(
        "a process of this job runs no actors, or another version of gtrain: all ranks of a job of actors "
        "run "
        "one program");
  }
  Introduction introduction;
  if (words[1].size() != 32 || !absl::SimpleHexAtoi(words[1].substr(0, 16), &introduction.process.high) ||
      !absl::SimpleHexAtoi(words[1].substr(16), &introduction.process.low))
    return Malformed("an introduction has no process");
  if (words[2] != "0" && words[2] != "1") return Malformed("an introduction does not say whether it drives");
  introduction.drives = words[2] == "1";
  if (words[3].empty() || words[3].size() > kNameBytesMax || words[4].size() > kNameBytesMax)
    return Malformed("an introduction has no address");
  introduction.endpoint = std::string(words[3]);
  introduction.node = std::string(words[4]);
  return introduction;
}

size_t DriverOf(const std::vector<Introduction>& all) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].drives) return i;
  }
  return 0;
}

std::string PrintSpawn(const SpawnRequest& request) {
  std::string bytes;
  PutText(request.type, &bytes);
  PutText(request.signature, &bytes);
  PutText(request.name, &bytes);
  PutNumber(request.restarts, &bytes);
  PutNumber(request.concurrency, &bytes);
  PutNumber(request.id, &bytes);
  PutNumber(request.kept, &bytes);
  PutNumber(request.detached, &bytes);
  PutNumber(request.spread, &bytes);
  PutNumber(request.rank, &bytes);
  PutText(request.record, &bytes);
  bytes.append(request.arguments.data(), request.arguments.size());
  return bytes;
}

absl::StatusOr<SpawnRequest> ParseSpawn(absl::string_view bytes) {
  SpawnRequest request;
  if (!TakeText(&bytes, kNameBytesMax, &request.type) ||
      !TakeText(&bytes, kSignatureBytesMax, &request.signature) ||
      !TakeText(&bytes, kNameBytesMax, &request.name) || !TakeNumber(&bytes, &request.restarts) ||
      !TakeNumber(&bytes, &request.concurrency) || !TakeNumber(&bytes, &request.id) ||
      !TakeNumber(&bytes, &request.kept) || !TakeNumber(&bytes, &request.detached) ||
      !TakeNumber(&bytes, &request.spread) || !TakeNumber(&bytes, &request.rank) ||
      !TakeText(&bytes, kCallBytesMax, &request.record))
    return Malformed("what is to be spawned ends too early");
  if (request.kept > 1) return Malformed("kept more than once");
  if (request.detached > 2) return Malformed("detached more than once");
  if (request.restarts < 0) return Malformed("fewer than no restarts");
  if (request.concurrency < 1 || (request.concurrency > 1 && request.kept != 0))
    return Malformed("no call at a time, or several of a kept actor");
  if (request.spread > kSpreadMax) return Malformed("it is to be made at no known place");
  request.arguments = bytes;
  return request;
}

std::string PrintAdopt(const AdoptRequest& request) {
  std::string bytes;
  PutNumber(static_cast<uint32_t>(request.names.size()), &bytes);
  for (const OwnedName& name : request.names) {
    for (const uint64_t number : {name.owner.high, name.owner.low, name.id}) PutNumber(number, &bytes);
  }
  PutNumber(request.number, &bytes);
  bytes.append(request.spawn.data(), request.spawn.size());
  return bytes;
}

absl::StatusOr<AdoptRequest> ParseAdopt(absl::string_view bytes) {
  AdoptRequest request;
  uint32_t names = 0;
  if (!TakeNumber(&bytes, &names) || names == 0 || names > kAdoptionsMax)
    return Malformed("a detached actor has no name, or too many");
  request.names.resize(names);
  for (OwnedName& name : request.names) {
    for (uint64_t* number : {&name.owner.high, &name.owner.low, &name.id}) {
      if (!TakeNumber(&bytes, number)) return Malformed("what is to be adopted ends too early");
    }
  }
  if (!TakeNumber(&bytes, &request.number)) return Malformed("what is to be adopted ends too early");
  request.spawn = bytes;
  return request;
}

std::string PrintRecord(const KeptRecord& record) {
  std::string bytes;
  PutNumber(record.version, &bytes);
  PutText(record.state, &bytes);
  for (const CallerRecord& one : record.callers) {
    PutNumber(one.caller.high, &bytes);
    PutNumber(one.caller.low, &bytes);
    PutNumber(one.acknowledged, &bytes);
    PutNumber(static_cast<uint32_t>(one.answers.size()), &bytes);
    for (const auto& [number, answer] : one.answers) {
      PutNumber(number, &bytes);
      PutText(answer, &bytes);
    }
  }
  return bytes;
}

absl::StatusOr<KeptRecord> ParseRecord(absl::string_view bytes) {
  KeptRecord record;
  absl::string_view state;
  if (!TakeNumber(&bytes, &record.version) || !TakeText(&bytes, kCallBytesMax, &state))
    return Malformed("the record of an actor ends too early");
  record.state = std::string(state);
  while (!bytes.empty()) {
    CallerRecord one;
    uint32_t answers = 0;
    if (!TakeNumber(&bytes, &one.caller.high) || !TakeNumber(&bytes, &one.caller.low) ||
        !TakeNumber(&bytes, &one.acknowledged) || !TakeNumber(&bytes, &answers) || answers > kCallsInWindow)
      return Malformed("the record of an actor has a wrong caller");
    for (uint32_t i = 0; i < answers; ++i) {
      uint64_t number = 0;
      absl::string_view answer;
      if (!TakeNumber(&bytes, &number) || !TakeText(&bytes, kCallBytesMax, &answer))
        return Malformed("the record of an actor has a wrong answer");
      one.answers.emplace_back(number, std::string(answer));
    }
    record.callers.push_back(std::move(one));
  }
  return record;
}

std::string PrintOwned(const OwnedReport& report) {
  std::string bytes;
  PutNumber(report.id, &bytes);
  return bytes.append(report.text.data(), report.text.size());
}

absl::StatusOr<OwnedReport> ParseOwned(absl::string_view bytes) {
  OwnedReport report;
  if (!TakeNumber(&bytes, &report.id)) return Malformed("which actor is this about?");
  report.text = bytes;
  return report;
}

std::string PrintName(const NameRequest& request) {
  std::string bytes;
  PutNumber(request.kind, &bytes);
  PutNumber(request.id, &bytes);
  PutText(request.name, &bytes);
  PutText(request.type, &bytes);
  PutText(request.signature, &bytes);
  PutText(request.reference, &bytes);
  return bytes;
}

absl::StatusOr<NameRequest> ParseName(absl::string_view bytes) {
  NameRequest request;
  if (!TakeNumber(&bytes, &request.kind) || request.kind > NameRequest::kTold ||
      !TakeNumber(&bytes, &request.id) || !TakeText(&bytes, kNameBytesMax, &request.name) ||
      !TakeText(&bytes, kNameBytesMax, &request.type) ||
      !TakeText(&bytes, kSignatureBytesMax, &request.signature) ||
      !TakeText(&bytes, kNameBytesMax, &request.reference) || !bytes.empty())
    return Malformed("which actor is to have which name?");
  return request;
}

std::string PrintFind(const FindRequest& request) {
  std::string bytes;
  PutText(request.name, &bytes);
  PutText(request.type, &bytes);
  PutText(request.signature, &bytes);
  return bytes;
}

absl::StatusOr<FindRequest> ParseFind(absl::string_view bytes) {
  FindRequest request;
  if (!TakeText(&bytes, kNameBytesMax, &request.name) || !TakeText(&bytes, kNameBytesMax, &request.type) ||
      !TakeText(&bytes, kSignatureBytesMax, &request.signature) || !bytes.empty())
    return Malformed("which name is looked for?");
  return request;
}

std::string PrintEnd(const EndRequest& request) {
  std::string bytes;
  PutText(request.reason, &bytes);
  const size_t before = bytes.size();
  bytes.resize(before + request.actors.size() * sizeof(uint64_t));
  if (!request.actors.empty())
    std::memcpy(bytes.data() + before, request.actors.data(), bytes.size() - before);
  return bytes;
}

absl::StatusOr<EndRequest> ParseEnd(absl::string_view bytes) {
  EndRequest request;
  if (!TakeText(&bytes, kSignatureBytesMax, &request.reason) || bytes.size() % sizeof(uint64_t) != 0)
    return Malformed("which actors are to end?");
  request.actors.resize(bytes.size() / sizeof(uint64_t));
  if (!bytes.empty()) std::memcpy(request.actors.data(), bytes.data(), bytes.size());
  return request;
}

}  // namespace gtrain::actors

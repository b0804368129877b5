// What the processes of a job tell each other when a generation begins, and what one asks another for. PURE.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "actors/plan/call_ledger.h"

namespace gtrain::actors {

// What each says of itself; printed below 600 bytes, since n of them come to each of n.
struct Introduction {
  CallerId process;
  std::string endpoint;  // "address:port"
  std::string node;
  bool drives = false;  // it has been the driver since an earlier generation
  bool operator==(const Introduction&) const = default;
};
std::string PrintIntroduction(const Introduction& introduction);
absl::StatusOr<Introduction> ParseIntroduction(absl::string_view text);

// The index of the one that drives: who did before, else the first. `all` is not empty.
size_t DriverOf(const std::vector<Introduction>& all);

// Methods of the process itself, which is actor 0.
enum class Control : uint32_t {
  kSpawn = 0,    // a SpawnRequest; the answer is the address of the actor
  kEnd = 1,      // an EndRequest
  kFinish = 2,   // the driver has ended, and so does this process
  kLocate = 3,   // of the owner: a LocateRequest; the answer is an address
  kKeep = 4,     // of the owner: an OwnedReport with a KeptRecord
  kEnded = 5,    // of the owner: an OwnedReport of an actor that has ended by itself, and why
  kName = 6,     // of who keeps the names: a NameRequest
  kFind = 7,     // likewise: a FindRequest; the answer is a reference
  kPart = 8,     // of the owner of an object: a PartRequest; the answer is those bytes
  kDetach = 10,  // of who keeps the names: a SpawnRequest with a name; the answer is a reference
  kAdopt =
      11,  // likewise, of a detached actor whose owner is lost: an AdoptRequest; the answer is its number
  kRelease = 12,  // of the owner of a detached actor: a reference; it is to end
  kNamed = 13,    // of who has a detached actor, by its owner: its number there; it has its name
  kCopy = 9,      // of who has the copies of its machine: an ObjectRef; the answer is that of a copy there
};

// What references call an actor: its owner, and the number that it has there.
struct OwnedName {
  CallerId owner;
  uint64_t id = 0;
  auto operator<=>(const OwnedName&) const = default;
};

struct SpawnRequest {
  absl::string_view type, signature;
  absl::string_view name;  // that the actor was spawned with; "": none
  int32_t restarts = 0;
  int32_t concurrency = 1;
  uint64_t id = 0;       // the owner's number of it
  uint8_t kept = 0;      // 1: the owner keeps its state
  uint8_t detached = 0;  // it outlives its owner; 1: if it gets its name; 2: it has that
  // Where it is made anew, of a detached actor.
  uint8_t spread = 0;
  int32_t rank = -1;
  absl::string_view
      record;  // that the owner has of it: a KeptRecord; empty: it is made of its arguments alone
  absl::string_view arguments;
};
std::string PrintSpawn(const SpawnRequest& request);
// Views into `bytes`.
absl::StatusOr<SpawnRequest> ParseSpawn(absl::string_view bytes);

// A detached actor that lives, and whose owner does not.
struct AdoptRequest {
  std::vector<OwnedName>
      names;                // that references to it have, the newest first; its first is the lost owner's
  uint64_t number = 0;      // at the process that has it, which says this
  absl::string_view spawn;  // a SpawnRequest
};
inline constexpr size_t kAdoptionsMax = 64;  // names of one actor; then the oldest references find it no more
std::string PrintAdopt(const AdoptRequest& request);
// Views into `bytes`.
absl::StatusOr<AdoptRequest> ParseAdopt(absl::string_view bytes);

// What the owner of an actor keeps of it: its state, and which calls are in it.
inline constexpr size_t kRecordBytesMax = size_t{40} << 20;    // printed
inline constexpr size_t kKeptArgumentsMax = size_t{16} << 20;  // of a kept actor; a spawn has both
struct KeptRecord {
  uint64_t version = 0;
  std::string state;
  std::vector<CallerRecord> callers;
  bool operator==(const KeptRecord&) const = default;
};
std::string PrintRecord(const KeptRecord& record);
absl::StatusOr<KeptRecord> ParseRecord(absl::string_view bytes);

// What the process that has an actor says to its owner.
struct OwnedReport {
  uint64_t id = 0;  // the owner's number of it
  absl::string_view text;
};
std::string PrintOwned(const OwnedReport& report);
// A view into `bytes`.
absl::StatusOr<OwnedReport> ParseOwned(absl::string_view bytes);

struct NameRequest {
  enum Kind : uint8_t {
    kNew = 0,
    kDrop = 1,   // the actor is to have the name no more
    kAgain = 2,  // it has had it, and another process keeps the names now
    kTold = 3,   // these were all names of the process; of no actor
  };
  uint8_t kind = kNew;
  absl::string_view name, type, signature, reference;
  uint64_t id = 0;  // the number of the actor at its owner, who says this
};
std::string PrintName(const NameRequest& request);
// Views into `bytes`.
absl::StatusOr<NameRequest> ParseName(absl::string_view bytes);

struct FindRequest {
  absl::string_view name, type, signature;
};
std::string PrintFind(const FindRequest& request);
// Views into `bytes`.
absl::StatusOr<FindRequest> ParseFind(absl::string_view bytes);

struct EndRequest {
  absl::string_view reason;
  std::vector<uint64_t> actors;
};
std::string PrintEnd(const EndRequest& request);
absl::StatusOr<EndRequest> ParseEnd(absl::string_view bytes);

}  // namespace gtrain::actors

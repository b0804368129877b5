// Requests carries out what clients ask of the head. PURE. Private to runtime/core/head.
//
// The role of a client comes from its connection's key, and the answer to a request that changes something
// is remembered. HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its
// own.
#pragma once
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {

class Directories;
class JobLife;
class Membership;
class OverJobs;
class Polls;
class Queries;
class RememberedAnswers;
class Sizing;

class Requests {
 public:
  Requests(HeadContext& context, HeadModel& model, RememberedAnswers& answers, Queries& queries, Polls& polls,
           JobLife& life, Sizing& sizing, Directories& directories, Membership& membership, OverJobs& over);

  void OnRequest(const PeerMessage& event, const ClientRequest& request, Instant now);

 private:
  // A request with its rule and its target.
  struct Asked {
    const PeerMessage& event;
    const ClientRequest& request;
    const RequestRule& rule;
    const JobId* job;  // nullptr: requests of this kind name none
    std::string target;
    Instant now;
  };

  void Refuse(const Asked& asked, const absl::Status& status);
  bool AnswersAgain(const Asked& asked);
  bool ComesTooLate(const Asked& asked);
  absl::Status MayAsk(const Asked& asked, Job* job);
  std::optional<absl::StatusOr<std::string>> Change(const Asked& asked);
  void AnswerChange(const Asked& asked, absl::StatusOr<std::string> changed);
  bool Show(const Asked& asked, const Job* job);
  void AskAgent(const Asked& asked);

  absl::StatusOr<std::string> Submit(const PeerMessage& event, const std::string& id,
                                     const ClientSubmit& submit, Instant now);
  absl::Status RoomForJob(const ClientSubmit& submit, const std::string& owner);
  JobRecord RecordOf(const PeerMessage& event, const std::string& id, const ClientSubmit& submit,
                     const std::string& name, Instant now) const;
  absl::Status MayBeStored(const JobRecord& record) const;
  absl::StatusOr<std::string> Stop(const Peer& peer, const ClientStop& stop, Instant now);
  void StopBetween(Job& job, std::string reason, bool at_once);
  absl::StatusOr<std::string> Shutdown(const ClientShutdown& shutdown, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  RememberedAnswers& answers_;
  Queries& queries_;
  Polls& polls_;
  JobLife& life_;
  Sizing& sizing_;
  Directories& directories_;
  Membership& membership_;
  OverJobs& over_;
};

}  // namespace gtrain::core

// The records of samples among the events of a job, and the steps that the head knew of by then. Pure.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sharding/ledger/audit.h"

namespace gtrain::cli {

// `why`: what WhyWithEvents returns. With each record goes the highest step that the job had reported when
// its ranks stopped to train before that: the head writes it into the event that ends a generation or the
// job. Behind that of a generation that was ended they can have made steps for as long as nobody reported and
// 2.2 s before, as late as a report may be heard, at a hundred times the pace of the job and for no longer
// than they trained; and at ten times from then to the record. Behind that of a job whose ranks ended by
// themselves, as many again, since a program may report each hundredth step only. Nothing goes with records
// where reported steps need not be those of the ledger: of a program with several ledgers, and of one that
// counts its steps anew. InvalidArgument: an event says that it is a record and is none.
absl::StatusOr<std::vector<sharding::SaidRecord>> RecordsIn(const std::string& why);

}  // namespace gtrain::cli

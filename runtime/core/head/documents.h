// The documents for people and scripts; docs/protocols/control-plane.md gives their shapes. PURE. Private to
// runtime/core/head.
//
// Each is made in two parts: the values that it needs are copied while the loop waits, and the Document
// builds its text later, on another thread, since a job of 1,000 ranks makes megabytes of it.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "runtime/core/head/head_model.h"
#include "topology/topology.h"

namespace gtrain::core {

// `reader` sees, of the jobs that are over, those that ended last and its own.
std::shared_ptr<const Document> StatusOf(const HeadModel& model, bool local, const ClientStatus& asked,
                                         const std::string& reader, Instant now);
std::shared_ptr<const Document> WhyOf(const Job& job, Instant now);
std::shared_ptr<const Document> NodesOf(const HeadModel& model, Instant now);
// What grants follow: `given`, or else what nodes say in their labels.
std::shared_ptr<const Document> TopologyOf(const HeadModel& model,
                                           const std::shared_ptr<const topology::Topology>& given);
// The second is the number of bytes of the events' texts.
std::pair<std::shared_ptr<const Document>, size_t> EventsAfter(const Job& job, uint64_t after);
std::shared_ptr<const Document> FailureOf(const HeadModel& model, const Job& job, Instant now);
// The same object as JSON in `status`.
std::string GoodputText(const Job& job, Instant now);
// nullopt: there is no such job, or it is not over.
std::optional<WriteResult> ResultOf(const HeadModel& model, const JobId& id, Instant now);

}  // namespace gtrain::core

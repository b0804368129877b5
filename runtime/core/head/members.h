// Members: who is a member of the next generation of a job, and which processes wait beside it. PURE. Private
// to runtime/core/head.
//
// Processes that wait on a machine go on there (`elastic.mode: in-place`): as members, first those that were
// members, then those that came up beside them. Where they are enough, the others are started beside the
// generation; else all of its places are members'. What is beyond the size of the job are spares. For r ranks
// a node, each rank costs r steps.
#pragma once
#include <map>
#include <set>
#include <vector>

#include "base/clock.h"
#include "runtime/core/head/job.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// Sets `ranks`, `waiting` and `world_size` of the grant that follows the newest of the job.
void Divide(const Job& job, std::vector<RankPlace> places, GenerationGrant& grant);

// Nothing is started beside the ranks of the grant: only who is on its way already. True: something would
// have been.
bool StartNothing(GenerationGrant& grant);

// The processes that are its members.
std::set<ProcessId> MembersOfGrant(const GenerationGrant& grant);

// How many members of the newest generation of the job are members of the one that follows it: these have the
// state, unlike those that waited beside it.
int MembersThatStay(const Job& job, const GenerationGrant& next);

// Of these nodes those of the grant: rank 0 is on the first of them.
std::vector<NodeId> NodesOf(const GenerationGrant& grant, std::vector<NodeId> nodes);

// Since when those that wait beside the newest generation have been on their way.
std::map<ProcessId, Instant> WaitingSince(const Job& job);
// Those of them that still wait, beside the generation that is now the newest, are as old as before.
void KeepWaitingSince(const std::map<ProcessId, Instant>& since, Job& job);

}  // namespace gtrain::core

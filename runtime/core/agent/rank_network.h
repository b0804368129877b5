// Which NICs and which interface the network libraries of a rank are told to use. PURE.
// docs/protocols/rank-environment.md has the rules for people, docs/design/topology.md why they are so.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "runtime/core/values/messages.h"

namespace gtrain::core {

// The ports that lead into the network of the job, in the order of their slots: those that may be used, of
// InfiniBand where there is some, and of these the fastest, because slower ones are for storage or for
// people. `address`: the node's data-plane address. None where there is EFA, which aws-ofi-nccl chooses
// itself.
std::vector<const NicInfo*> RailsOf(const Inventory& inventory, const Network& network,
                                    const std::string& address);

// Names of the rails of each of these ranks of one machine, whose places are in the order of their local
// ranks: the nearest to its GPUs, without these to its CPUs. Ranks to which the same rails are the nearest
// share them out evenly, so that the n-th has the same one on all machines that are built and filled alike.
std::vector<std::vector<std::string>> NicsOfRanks(const Inventory& inventory,
                                                  const std::vector<const NicInfo*>& rails,
                                                  const std::vector<const RankPlace*>& places);

// The only interface that has this address; empty: none, or several.
std::string InterfaceOf(const Network& network, const std::string& address);

// Adds the variables by which NCCL, UCX, gloo and TensorPipe choose their network. One that is there already
// stays, and one of the agent's own environment (`own_env`), by which a machine's administrator chooses,
// comes before what is chosen here.
void AddNetwork(const Inventory& inventory, const Network& network, const GenerationGrant& grant, int rank,
                const std::map<std::string, std::string>& own_env, std::map<std::string, std::string>* env);

// RankStatus::nics of a process with this environment.
std::string NicsOf(const std::map<std::string, std::string>& env);

}  // namespace gtrain::core

// Hears what ranks with the SDK say to their keeper (rank_protocol.h). A connection may do nothing before its
// hello proves the rank's token. Relayed bodies are opaque; only "progress" is recognised, because the newest
// replaces older ones.
//
// Owner thread only; nothing blocks. A turn costs what the ready connections have sent.
#pragma once
#include <stdint.h>

#include <string>

#include "runtime/keeper/arenas.h"
#include "runtime/keeper/asks.h"
#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/rank_protocol.h"
#include "runtime/keeper/writers.h"

namespace gtrain::keeper {

class KeptRanks;

class RankSocket {
 public:
  RankSocket(Context& context, Connections& connections, Arenas& arenas, Writers& writers, Asks& asks)
      : context_(context), connections_(connections), arenas_(arenas), writers_(writers), asks_(asks) {}

  // Once, before anything else. It outlives this.
  void SetKept(KeptRanks* kept) { kept_ = kept; }
  // Reads the connections that Connections::MarkReady found ready.
  void ReadReady();
  // The rank is dead: the agent hears what it said before its exit, whose meaning that may change (a storage
  // fault).
  void HearLastWords(const RankProcess& rank);

 private:
  void Read(RankConnection& connection);
  void ReadBytes(RankConnection& connection);
  void OnFrame(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes);
  void OnArena(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes);
  void OnAnswer(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes);
  void OnStays(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes);
  void OnComesUp(const RankConnection& connection, RankProcess& rank);
  void OnHello(RankConnection& connection, const RankHello& hello);
  void OnRelay(RankConnection& connection, std::string json);
  // Where a process is: a rank of a generation, or of kNoGeneration (KeptRanks).
  struct Seat {
    uint64_t generation = 0;
    int number = 0;
    RankProcess* process = nullptr;
  };
  Seat SeatOf(const RankHello& hello) const;
  RankProcess* ProcessOf(const RankConnection& connection) const;

  Context& context_;
  Connections& connections_;
  Arenas& arenas_;
  Writers& writers_;
  Asks& asks_;
  KeptRanks* kept_ = nullptr;
};

}  // namespace gtrain::keeper

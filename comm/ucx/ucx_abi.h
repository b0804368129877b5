// What libgtrain_comm_ucx.so offers to the loader beside it. Plain C, because the module is loaded
// with dlopen into programs that may carry any C++ library: nothing but these functions crosses. A worker has
// what UCX needs once (comm/ucx/ucx_transport.h counts its descriptors), an endpoint for each peer that
// `connect` named, and a ticket for each message under way; it knows nothing of the other ranks.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define GTRAIN_UCX_ABI 5
#define GTRAIN_UCX_ENTRY "gtrain_ucx_api"

extern "C" {

struct GtrainUcxWorker;

struct GtrainUcxError {
  char text[400];
};

enum GtrainUcxWay {
  GTRAIN_UCX_RECEIVE,
  GTRAIN_UCX_SEND,           // complete when UCX has a copy, or the peer has it
  GTRAIN_UCX_SEND_RECEIVED,  // complete when the peer has it
};

// Not thread-safe: one caller at a time. Nothing blocks, except `progress` for at most the time it is given.
struct GtrainUcxApi {
  uint32_t abi;
  uint32_t bytes;  // of this struct

  // `transports` and `devices`: UCX's names, commas between; devices may be "all". Those are used that are
  // there, unless `every` is not 0: then each transport must be. Null: failed, see error.
  GtrainUcxWorker* (*open)(const char* transports, const char* devices, int every, GtrainUcxError* error);
  // What peers need; lives as long as the worker.
  void (*address)(GtrainUcxWorker* worker, const void** data, size_t* bytes);
  // Starts a connection to one peer, by its address. 0 or -1. Without it messages of the peer can be
  // received, but nobody notices that it is lost.
  int (*connect)(GtrainUcxWorker* worker, int peer, const void* address, GtrainUcxError* error);
  // Starts one message; a receive takes only a message of exactly this tag. With `received` it may be shorter
  // than `bytes`, and its length is written there. Its ticket, or null.
  void* (*post)(GtrainUcxWorker* worker, int peer, GtrainUcxWay way, void* data, size_t bytes, uint64_t tag,
                size_t* received, GtrainUcxError* error);
  // Looks for a message that has come, for which no receive was started and whose tag agrees with `tag` in
  // the bits of `mask`. 1: there is one, of that tag and length.
  int (*find)(GtrainUcxWorker* worker, uint64_t tag, uint64_t mask, uint64_t* found, size_t* bytes);
  // Starts to push out everything that was sent. Its ticket, or null.
  void* (*flush)(GtrainUcxWorker* worker, GtrainUcxError* error);
  // 1: complete, the ticket is spent; 0: not yet; -1: failed, close the worker.
  int (*test)(GtrainUcxWorker* worker, void* ticket, GtrainUcxError* error);
  // Moves things on; with nothing to do sleeps up to wait_ms. Returns 0 if nothing moved.
  int (*progress)(GtrainUcxWorker* worker, int wait_ms);
  // Ends all connections; when it returns no buffer is in use any more. With grace_ms > 0 what was sent gets
  // that long to leave; with 0 connections are dropped without the peers' help.
  void (*close)(GtrainUcxWorker* worker, int grace_ms);
};

const GtrainUcxApi* gtrain_ucx_api(void);

}  // extern "C"

// The functions that libgtrain_comm_ucx.so offers to the loader beside it. Plain C, because the module is
// loaded with dlopen into programs that may carry any C++ library: nothing but these functions crosses. A
// worker has what UCX needs once (comm/ucx/fabric.h counts its descriptors), an endpoint for each process
// that `connect` named, and a ticket for each message under way.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define GTRAIN_UCX_ABI 6
#define GTRAIN_UCX_ENTRY "gtrain_ucx_api"

// Longest message: over TCP what UCX takes in one piece.
#define GTRAIN_UCX_MESSAGE_MAX (60 << 10)

extern "C" {

struct GtrainUcxWorker;
struct GtrainUcxEndpoint;
struct GtrainUcxTicket;

struct GtrainUcxError {
  char text[400];
};

// A message has come: its bytes, which are there during the call alone. Called inside `progress`, `send`,
// `flush`, `drop` and `close`; it must not call anything of this interface.
typedef void (*GtrainUcxHeard)(void* user, const void* data, size_t bytes);

// Not thread-safe: one caller at a time. Nothing blocks, except `close` for at most the time it is given.
struct GtrainUcxApi {
  uint32_t abi;
  uint32_t bytes;  // of this struct

  // Opens a worker. `transports` and `devices` are UCX's names, with commas between; devices may be "all".
  // The transports that are there are used, unless `every` is not 0: then each must be there. Null: failed,
  // see error.
  GtrainUcxWorker* (*open)(const char* transports, const char* devices, int every, GtrainUcxHeard heard,
                           void* user, GtrainUcxError* error);
  // The address for peers; lives as long as the worker.
  void (*address)(GtrainUcxWorker* worker, const void** data, size_t* bytes);
  // Starts a connection to one process, by its address. Null: failed.
  GtrainUcxEndpoint* (*connect)(GtrainUcxWorker* worker, const void* address, GtrainUcxError* error);
  // The reason why nothing gets there any more; null while that is not known. Lives as long as the endpoint.
  const char* (*failed)(const GtrainUcxEndpoint* endpoint);
  // Starts one message of at most GTRAIN_UCX_MESSAGE_MAX. 1: UCX has a copy; 0: *ticket says when, and the
  // data stays where it is until then; -1: failed. Messages to one endpoint arrive in their order.
  int (*send)(GtrainUcxWorker* worker, GtrainUcxEndpoint* endpoint, const void* data, size_t bytes,
              GtrainUcxTicket** ticket, GtrainUcxError* error);
  // Starts to push out everything that was sent, answers as `send`. Connections that are not up yet are
  // waited for, too.
  int (*flush)(GtrainUcxWorker* worker, GtrainUcxTicket** ticket, GtrainUcxError* error);
  // 1: complete, the ticket is spent; 0: not yet; -1: failed, the ticket is spent.
  int (*test)(GtrainUcxWorker* worker, GtrainUcxTicket* ticket, GtrainUcxError* error);
  // Moves things on. 0: nothing moved.
  int (*progress)(GtrainUcxWorker* worker);
  // 1: `descriptor` becomes readable when something comes; 0: something has come in between.
  int (*arm)(GtrainUcxWorker* worker);
  int (*descriptor)(const GtrainUcxWorker* worker);
  // Ends a connection without the peer's help; its open tickets fail. The endpoint is gone.
  void (*drop)(GtrainUcxWorker* worker, GtrainUcxEndpoint* endpoint);
  // Ends all. With grace_ms > 0 what was sent gets that long to leave.
  void (*close)(GtrainUcxWorker* worker, int grace_ms);
};

const GtrainUcxApi* gtrain_ucx_api(void);

}  // extern "C"

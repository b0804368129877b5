/* The plain C interface of gtrain: sessions, collectives, checkpoints.
 *
 * Rules that hold for every function:
 *  - It returns a gtrain_status; GTRAIN_OK is 0. With a non-NULL `error` the reason is written there as text.
 *  - No exception, exit or output crosses it. Log lines go to the callback of gtrain_set_log, else nowhere.
 *  - Only gtrain_* symbols are exported; no signal handler (but by gtrain_state_set_writable) or memory hook.
 *  - No wait is without an end: every one has a timeout in milliseconds, which must not be negative.
 *  - In a forked child (a data loader's worker) every call returns GTRAIN_FAILED_PRECONDITION and has no
 *    effect; the getters of a session answer from the copy that was made at join.
 *  - Handles are opaque. A handle keeps what it was made from alive, so they may be freed in any order;
 *    freeing NULL is allowed. A handle is used by one thread at a time, except sessions, which are
 * thread-safe.
 *  - Structures that may grow begin with their size: set it to sizeof. Functions are only added.
 *
 * C++ programs include gtrain/gtrain.h, which stands on this header alone. */
#ifndef GTRAIN_GTRAIN_C_H_
#define GTRAIN_GTRAIN_C_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define GTRAIN_API __attribute__((visibility("default")))
#else
#define GTRAIN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every incompatible change of this header. */
#define GTRAIN_C_ABI 3

/* The default timeout of a collective: ten minutes. Lost ranks end a collective within seconds whatever the
 * timeout is, so this one is for a rank that lives and hangs. */
#define GTRAIN_TIMEOUT_MS 600000

/* The numbers are those of absl::StatusCode. */
typedef enum gtrain_status {
  GTRAIN_OK = 0,
  GTRAIN_CANCELLED = 1,
  GTRAIN_UNKNOWN = 2,
  GTRAIN_INVALID_ARGUMENT = 3,
  GTRAIN_DEADLINE_EXCEEDED = 4,
  GTRAIN_NOT_FOUND = 5,
  GTRAIN_ALREADY_EXISTS = 6,
  GTRAIN_PERMISSION_DENIED = 7,
  GTRAIN_RESOURCE_EXHAUSTED = 8,
  GTRAIN_FAILED_PRECONDITION = 9,
  GTRAIN_ABORTED = 10,
  GTRAIN_OUT_OF_RANGE = 11,
  GTRAIN_UNIMPLEMENTED = 12,
  GTRAIN_INTERNAL = 13,
  GTRAIN_UNAVAILABLE = 14, /* a rank was lost or the generation revoked: end the step, exit with 75 */
  GTRAIN_DATA_LOSS = 15,
  GTRAIN_UNAUTHENTICATED = 16
} gtrain_status;

typedef struct gtrain_error {
  char message[1024]; /* one sentence, cut to fit, always ended by a zero byte; empty on success */
} gtrain_error;

/* Integers and not enums, so that a wrong value is an error and not undefined behaviour. */
typedef int32_t gtrain_dtype;
enum {
  GTRAIN_FLOAT32 = 0,
  GTRAIN_FLOAT64 = 1,
  GTRAIN_FLOAT16 = 2,
  GTRAIN_BFLOAT16 = 3,
  GTRAIN_INT32 = 4,
  GTRAIN_INT64 = 5,
  GTRAIN_UINT8 = 6,
  GTRAIN_BOOL = 7, /* one byte */
  GTRAIN_INT8 = 8,
  GTRAIN_INT16 = 9,
  GTRAIN_UINT16 = 10,
  GTRAIN_UINT32 = 11,
  GTRAIN_UINT64 = 12,
  GTRAIN_FLOAT8_E4M3 = 13, /* without infinities */
  GTRAIN_FLOAT8_E5M2 = 14,
  GTRAIN_COMPLEX64 = 15 /* two float32 */
};

/* For bool every byte but 0 is true and results are 0 or 1; sum, max and bit_or are "or", product, min and
 * bit_and are "and". 8-bit and 16-bit floats are computed in float and rounded to nearest; a result that is
 * too large for float8_e4m3 becomes 448 with its sign, in the other types infinity. A rank alone leaves its
 * data as they are. An operation that a type does not have is GTRAIN_INVALID_ARGUMENT. */
typedef int32_t gtrain_op;
enum {
  GTRAIN_SUM = 0,     /* integers wrap around */
  GTRAIN_MEAN = 1,    /* not of bool; of integers that of the exact sum, cut off towards zero */
  GTRAIN_MIN = 2,     /* not of complex64; a NaN wins */
  GTRAIN_MAX = 3,     /* not of complex64; a NaN wins */
  GTRAIN_PRODUCT = 4, /* integers wrap around */
  GTRAIN_BIT_AND = 5, /* these three of integers and bool */
  GTRAIN_BIT_OR = 6,
  GTRAIN_BIT_XOR = 7
};

typedef struct gtrain_session gtrain_session;
typedef struct gtrain_communicator gtrain_communicator;
typedef struct gtrain_request gtrain_request;
typedef struct gtrain_checkpointer gtrain_checkpointer;

/* ---- library ---- */

GTRAIN_API int gtrain_abi(void);             /* GTRAIN_C_ABI of the library that was loaded */
GTRAIN_API const char* gtrain_version(void); /* "0.1.0" */
GTRAIN_API const char* gtrain_status_name(gtrain_status status);

/* Called with level 0 (info), 1 (warning) or 2 (error) and a line of text, from any thread, one call at a
 * time; it must not call gtrain. NULL: silence, the default; the Python package shows warnings and
 * errors on stderr. */
typedef void (*gtrain_log_function)(int level, const char* text, void* user);
GTRAIN_API void gtrain_set_log(gtrain_log_function function, void* user);

/* ---- session: this process as one rank of a job ---- */

/* Joins from the environment, once a process, and waits for all ranks; outside gtrain there is one. See also
 * elastic_c.h. */
GTRAIN_API gtrain_status gtrain_session_join(int64_t timeout_ms, gtrain_session** out, gtrain_error* error);
GTRAIN_API void gtrain_session_free(gtrain_session* session);

GTRAIN_API int gtrain_session_rank(const gtrain_session* session);
GTRAIN_API int gtrain_session_local_rank(const gtrain_session* session);
GTRAIN_API int gtrain_session_world_size(const gtrain_session* session);
GTRAIN_API uint64_t gtrain_session_generation(const gtrain_session* session);
GTRAIN_API uint64_t gtrain_session_timeline(const gtrain_session* session);
GTRAIN_API int gtrain_session_managed(const gtrain_session* session);     /* 0 outside gtrain */
GTRAIN_API const char* gtrain_session_job(const gtrain_session* session); /* lives as long as the session */

/* Sets what `gtrain status` shows. Never blocks. `loss` may be NULL; `samples` are new since the last one. */
GTRAIN_API gtrain_status gtrain_session_report(gtrain_session* session, int64_t step, const double* loss,
                                               int64_t samples, gtrain_error* error);
/* GTRAIN_OK, or GTRAIN_UNAVAILABLE with the reason once this generation is over. */
GTRAIN_API gtrain_status gtrain_session_alive(gtrain_session* session, gtrain_error* error);
/* Sets *out to 1 once the user asked to stop. Ranks see it at different steps:
 * gtrain_checkpointer_stop_agreed and gtrain_communicator_stop_agreed return the same on all. */
GTRAIN_API gtrain_status gtrain_session_stop_requested(gtrain_session* session, int* out,
                                                       gtrain_error* error);
/* Returns the seconds left after a preemption notice; negative when there is none. */
GTRAIN_API gtrain_status gtrain_session_notice(gtrain_session* session, double* out_seconds,
                                               gtrain_error* error);

/* ---- collectives ---- */

/* Collective. `timeout_ms` is the longest that a single collective may take. What a communicator costs as a
 * function of its ranks and machines (shared memory, connections, rounds) stands in docs/design/comm.md;
 * operations with a handle add one thread to it. */
GTRAIN_API gtrain_status gtrain_communicator_create(gtrain_session* session, int64_t timeout_ms,
                                                    gtrain_communicator** out, gtrain_error* error);
/* Collective. Ranks with the same `color` get a communicator of their own, in the order of (key, rank here);
 * *out is NULL where color < 0. The new communicator is independent of this one. */
GTRAIN_API gtrain_status gtrain_communicator_split(gtrain_communicator* comm, int color, int key,
                                                   gtrain_communicator** out, gtrain_error* error);
/* Collective. Sets *out to 1 on all ranks or on none, once rank 0 has heard that the user asked to stop:
 * save, then exit with 0. */
GTRAIN_API gtrain_status gtrain_communicator_stop_agreed(gtrain_communicator* comm, int* out,
                                                         gtrain_error* error);
/* Operations that have not begun are cancelled; the one under way is waited for, at most its timeout. */
GTRAIN_API void gtrain_communicator_free(gtrain_communicator* comm);
/* This rank takes no further part: its own running operation ends, and the running or next one of the other
 * ranks fails with GTRAIN_UNAVAILABLE, this rank and `why`. From any thread; other communicators go on. An
 * operation with impossible arguments does the same, in its turn. Does nothing where the communicator has one
 * rank. */
GTRAIN_API gtrain_status gtrain_communicator_abort(gtrain_communicator* comm, const char* why,
                                                   gtrain_error* error);
/* Sets the longest that an operation, or a wait for a message, may take from the next one on, for this rank
 * alone. */
GTRAIN_API gtrain_status gtrain_communicator_set_timeout(gtrain_communicator* comm, int64_t timeout_ms,
                                                         gtrain_error* error);
GTRAIN_API int gtrain_communicator_rank(const gtrain_communicator* comm);
GTRAIN_API int gtrain_communicator_size(const gtrain_communicator* comm);
/* Returns zeroed memory (64-byte aligned) that collectives reach fastest. It belongs to the communicator. */
GTRAIN_API gtrain_status gtrain_allocate(gtrain_communicator* comm, size_t bytes, void** out,
                                         gtrain_error* error);

/* Frees memory of gtrain_allocate before the communicator is freed. */
GTRAIN_API gtrain_status gtrain_deallocate(gtrain_communicator* comm, void* memory, gtrain_error* error);

/* Every rank calls the same collectives in the same order with the same count, dtype and op.
 *
 * `stream` must be NULL: host memory. `out` NULL: the call returns when the operation is done. Else the
 * operation is queued (at most 256, then GTRAIN_RESOURCE_EXHAUSTED), *out is a handle to wait for, and
 * the buffers must stay untouched until the wait succeeded or the communicator was freed.
 * After any error the communicator is dead: every later call returns the same error. */
GTRAIN_API gtrain_status gtrain_all_reduce(gtrain_communicator* comm, void* data, size_t count,
                                           gtrain_dtype dtype, gtrain_op op, void* stream,
                                           gtrain_request** out, gtrain_error* error);
/* data[count] of `root` overwrites data[count] everywhere. */
GTRAIN_API gtrain_status gtrain_broadcast(gtrain_communicator* comm, void* data, size_t count,
                                          gtrain_dtype dtype, int root, void* stream, gtrain_request** out,
                                          gtrain_error* error);
/* Copies input[count] of each rank into output[size * count] in rank order; the buffers do not overlap. */
GTRAIN_API gtrain_status gtrain_all_gather(gtrain_communicator* comm, const void* input, void* output,
                                           size_t count, gtrain_dtype dtype, void* stream,
                                           gtrain_request** out, gtrain_error* error);
/* Reduces input[size * count]: output[count] is the reduction of all ranks' elements [rank * count, (rank +
 * 1) * count). output may be input + rank * count; they overlap in no other way. */
GTRAIN_API gtrain_status gtrain_reduce_scatter(gtrain_communicator* comm, const void* input, void* output,
                                               size_t count, gtrain_dtype dtype, gtrain_op op, void* stream,
                                               gtrain_request** out, gtrain_error* error);
/* data[count] of `root` becomes the reduction of all ranks' data[count], which stay as they are elsewhere. */
GTRAIN_API gtrain_status gtrain_reduce(gtrain_communicator* comm, void* data, size_t count,
                                       gtrain_dtype dtype, gtrain_op op, int root, void* stream,
                                       gtrain_request** out, gtrain_error* error);
/* Block i of input[size * count] goes to rank i, whose output[size * count] has the blocks in the order of
 * the ranks that they come from. The buffers do not overlap. */
GTRAIN_API gtrain_status gtrain_all_to_all(gtrain_communicator* comm, const void* input, void* output,
                                           size_t count, gtrain_dtype dtype, void* stream,
                                           gtrain_request** out, gtrain_error* error);
/* Copies input[count] of each rank into output[size * count] of `root`, in rank order; on other ranks output
 * is ignored. */
GTRAIN_API gtrain_status gtrain_gather(gtrain_communicator* comm, const void* input, void* output,
                                       size_t count, gtrain_dtype dtype, int root, void* stream,
                                       gtrain_request** out, gtrain_error* error);
/* Copies block i of input[size * count] of `root` into output[count] of rank i; others ignore input. */
GTRAIN_API gtrain_status gtrain_scatter(gtrain_communicator* comm, const void* input, void* output,
                                        size_t count, gtrain_dtype dtype, int root, void* stream,
                                        gtrain_request** out, gtrain_error* error);
/* The _v collectives take parts of different sizes: part i has counts[i] elements (counts has one entry for
 * each rank and is the same on all) and lies right behind the parts before it. The lists are copied. */
GTRAIN_API gtrain_status gtrain_all_gather_v(gtrain_communicator* comm, const void* input, void* output,
                                             const size_t* counts, gtrain_dtype dtype, void* stream,
                                             gtrain_request** out, gtrain_error* error);
GTRAIN_API gtrain_status gtrain_reduce_scatter_v(gtrain_communicator* comm, const void* input, void* output,
                                                 const size_t* counts, gtrain_dtype dtype, gtrain_op op,
                                                 void* stream, gtrain_request** out, gtrain_error* error);
/* Sends send_counts[i] elements to rank i and gets receive_counts[i] from it, as many as it sends here. */
GTRAIN_API gtrain_status gtrain_all_to_all_v(gtrain_communicator* comm, const void* input,
                                             const size_t* send_counts, void* output,
                                             const size_t* receive_counts, gtrain_dtype dtype, void* stream,
                                             gtrain_request** out, gtrain_error* error);
GTRAIN_API gtrain_status gtrain_barrier(gtrain_communicator* comm, void* stream, gtrain_request** out,
                                        gtrain_error* error);

/* ---- messages ---- */

/* Messages are not collective, and in no order with collectives, beside which they are sent. They match by
 * sender and tag; messages with the same sender and tag match in the order in which they were sent. */
enum { GTRAIN_SEND = 0, GTRAIN_RECEIVE = 1 };
enum { GTRAIN_ANY_SOURCE = -1, GTRAIN_ANY_TAG = -1 }; /* of receives */

/* Sends data[count] to rank `to` with a tag of 0 or more. Without `out` it returns when `data` may be used
 * again: at once if it could be copied (up to 64 MiB of copies are kept), else when the receiver has it; so
 * all ranks may send before they receive. With `out` nothing is copied and it returns at once. */
GTRAIN_API gtrain_status gtrain_send(gtrain_communicator* comm, const void* data, size_t count,
                                     gtrain_dtype dtype, int to, int tag, void* stream, gtrain_request** out,
                                     gtrain_error* error);
/* Receives data[count] from rank `from`, which must have sent exactly as many elements of the same type, else
 * GTRAIN_FAILED_PRECONDITION. */
GTRAIN_API gtrain_status gtrain_receive(gtrain_communicator* comm, void* data, size_t count,
                                        gtrain_dtype dtype, int from, int tag, void* stream,
                                        gtrain_request** out, gtrain_error* error);

typedef struct gtrain_message {
  int kind; /* GTRAIN_SEND, GTRAIN_RECEIVE */
  void* data;
  size_t count; /* of a receive the most that may come */
  gtrain_dtype dtype;
  int peer, tag;
  /* Set for a receive once it is done: */
  int from, from_tag;
  size_t received;
} gtrain_message;

/* Starts a group of messages, receives first; none waits for another. With `out` the list must stay where it
 * is until a wait finds all of them done; at most 65,536 may be under way (GTRAIN_RESOURCE_EXHAUSTED). */
GTRAIN_API gtrain_status gtrain_exchange(gtrain_communicator* comm, gtrain_message* messages, size_t count,
                                         void* stream, gtrain_request** out, gtrain_error* error);

/* ---- requests ---- */

/* Returns the result of the operation, or GTRAIN_DEADLINE_EXCEEDED while it is still running (wait again).
 * With a timeout of 0 it only asks. When the operation itself took too long the status is also
 * GTRAIN_DEADLINE_EXCEEDED: *done tells them apart (may be NULL). */
GTRAIN_API gtrain_status gtrain_request_wait(gtrain_request* request, int64_t timeout_ms, int* done,
                                             gtrain_error* error);
/* Gives up the handle, not the operation. */
GTRAIN_API void gtrain_request_free(gtrain_request* request);

/* ---- how a tensor lies on the ranks ---- */

typedef struct gtrain_mesh_axis {
  const char* name; /* "dp", "pp", "tp" */
  int64_t size;
} gtrain_mesh_axis;

/* How n elements are cut into p parts. Balanced: they differ by one at most, 10 over 4 is 3, 3, 2, 2. Chunk:
 * n / p rounded up until none are left, as torch.chunk and DTensor do, 3, 3, 3, 1. */
typedef int32_t gtrain_split_rule;
enum { GTRAIN_SPLIT_BALANCED = 0, GTRAIN_SPLIT_CHUNK = 1 };

/* Dimension `dimension` is cut into a part for each coordinate of `axis`. */
typedef struct gtrain_split {
  int32_t dimension;
  const char* axis;
  gtrain_split_rule rule;
} gtrain_split;

/* The tensor exists only on ranks with this coordinate. */
typedef struct gtrain_only {
  const char* axis;
  int64_t index;
} gtrain_only;

/* Ranks are laid out row by row, the last axis fastest; the sizes multiply to the world size. Splits apply in
 * order. Over axes that are not named the tensor is replicated. No axis twice. */
typedef struct gtrain_sharding {
  size_t size; /* sizeof(gtrain_sharding) */
  const gtrain_mesh_axis* mesh;
  int axes;
  const gtrain_split* splits;
  int split_count;
  const gtrain_only* only;
  int only_count;
} gtrain_sharding;

/* Computes the part of a tensor that `rank` holds: begin[dimensions] and local_shape[dimensions]. When the
 * tensor is only on other ranks, *holds (may be NULL) is 0, and so are all numbers of both. */
GTRAIN_API gtrain_status gtrain_local_box(const int64_t* shape, int dimensions,
                                          const gtrain_sharding* sharding, int rank, int64_t* begin,
                                          int64_t* local_shape, int* holds, gtrain_error* error);

/* ---- checkpoints ---- */

typedef struct gtrain_checkpoint_options {
  size_t size;               /* sizeof(gtrain_checkpoint_options) */
  const char* uri;           /* a directory all ranks see; NULL: $GTRAIN_CHECKPOINT_URI */
  int keep;                  /* newest committed ones kept; 0: 3 */
  int64_t every_steps;       /* when save_if_due saves; 0: not by steps */
  double every_seconds;      /* 0: not by time */
  int64_t commit_timeout_ms; /* 0: ten minutes */
  int lazy;                  /* not 0: save returns at once; see gtrain_checkpointer_fence */
  /* "off", "first" or "every N": in which saves ranks compare their replicated state; NULL: "every 100" */
  const char* verify_replicas;
  int max_rollback; /* damaged checkpoints in a row that restore may pass over; 0: 1, -1: none */
  int read_only;    /* not 0: restore works, saves are GTRAIN_FAILED_PRECONDITION, nothing is written */
  int takeover;     /* not 0: takes the directory from a program that is alive */
  /* Called with `user` by each save that is not skipped before it copies; must not call gtrain. Anything but
   * GTRAIN_OK is the result of that save, which then saves nothing. May be NULL. */
  gtrain_status (*before_save)(void* user);
  void* user;
} gtrain_checkpoint_options;

/* `options` may be NULL. Set GTRAIN_CHECKPOINT_* in the environment (from the job file) win over them. */
GTRAIN_API gtrain_status gtrain_checkpointer_open(gtrain_session* session,
                                                  const gtrain_checkpoint_options* options,
                                                  gtrain_checkpointer** out, gtrain_error* error);
/* Under gtrain a save that is not committed yet goes on; by hand it is given up: wait first to keep it. */
GTRAIN_API void gtrain_checkpointer_free(gtrain_checkpointer* checkpointer);

/* Registers state that is equal on all ranks. Registered memory is the caller's and must outlive the
 * checkpointer. `bytes` is its size: another size than shape and dtype say is GTRAIN_INVALID_ARGUMENT, with
 * both numbers. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_replicated(gtrain_checkpointer* checkpointer,
                                                            const char* name, void* data, size_t bytes,
                                                            const int64_t* shape, int dimensions,
                                                            gtrain_dtype dtype, gtrain_error* error);
/* Registers a tensor of the global `shape` of which this rank holds the box that gtrain_local_box computes:
 * `data` is that box, dense, row by row; NULL and 0 bytes where it is empty. Every rank registers every
 * tensor. The tensor is restored under any other layout. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_sharded(gtrain_checkpointer* checkpointer, const char* name,
                                                         void* data, size_t bytes, const int64_t* shape,
                                                         int dimensions, const gtrain_sharding* sharding,
                                                         gtrain_dtype dtype, gtrain_error* error);
/* Registers a tensor with any cut: this rank holds the box of local_shape[dimensions] at begin[dimensions].
 * The boxes of two ranks are equal (they share the writing) or have nothing in common, and together the boxes
 * are the whole tensor: the first restore or save names the ranks that break this. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_box(gtrain_checkpointer* checkpointer, const char* name,
                                                     void* data, size_t bytes, const int64_t* shape,
                                                     const int64_t* begin, const int64_t* local_shape,
                                                     int dimensions, gtrain_dtype dtype, gtrain_error* error);

/* What happens to the state of ranks that a smaller world does not have any more; the log says it too. */
typedef int32_t gtrain_per_rank_rule;
enum {
  GTRAIN_PER_RANK_DROP = 0, /* left out */
  GTRAIN_PER_RANK_KEEP = 1, /* carried along, by rank `old rank % size`, until a world has that rank again */
  GTRAIN_PER_RANK_MERGE = 2 /* of add_bytes: `load` is called with it too, on rank `old rank % size` */
};

/* Registers state of this rank alone; the same rank number restores it, with the same size. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_per_rank(gtrain_checkpointer* checkpointer, const char* name,
                                                          void* data, size_t bytes, gtrain_per_rank_rule rule,
                                                          gtrain_error* error);
/* Sets *data and *bytes to the bytes to save now; they are copied before the calling function of gtrain
 * returns. Anything but GTRAIN_OK is the result of that function. */
typedef gtrain_status (*gtrain_bytes_save)(void* user, const void** data, size_t* bytes);
typedef gtrain_status (*gtrain_bytes_load)(void* user, const void* data, size_t bytes);
/* Registers bytes of this rank alone whose number may change from save to save. The functions are called on
 * the thread that saves or restores, and must not call gtrain. All together may have 64 MiB at most. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_bytes(gtrain_checkpointer* checkpointer, const char* name,
                                                       gtrain_bytes_save save, gtrain_bytes_load load,
                                                       void* user, gtrain_per_rank_rule rule,
                                                       gtrain_error* error);

typedef struct gtrain_restore_options {
  size_t size; /* sizeof(gtrain_restore_options) */
  /* Names of tensors, * and ? stand for any characters, that are left as they are if the checkpoint lacks
   * them. */
  const char* const* may_be_missing;
  int may_be_missing_count;
} gtrain_restore_options;

/* Collective. Reads the newest committed and intact checkpoint into the registered memory. *step is -1 when
 * there is none. `options` may be NULL. */
GTRAIN_API gtrain_status gtrain_checkpointer_restore(gtrain_checkpointer* checkpointer,
                                                     const gtrain_restore_options* options, int64_t* step,
                                                     gtrain_error* error);
/* Returns two numbers of the last restore: bytes of this rank's state, each counted once, and bytes read from
 * storage for them (whole chunks). Both are 0 when nothing was restored. */
GTRAIN_API gtrain_status gtrain_checkpointer_restored_bytes(gtrain_checkpointer* checkpointer,
                                                            uint64_t* bytes, uint64_t* bytes_read,
                                                            gtrain_error* error);
/* Collective. Copies the state and returns; writing goes on beside training. *saved (may be NULL) is 0 when
 * the save was skipped because the previous one is still being written. Where the last save was save_if_due's
 * of this same step, nothing is saved a second time and *saved is 1. */
GTRAIN_API gtrain_status gtrain_checkpointer_save(gtrain_checkpointer* checkpointer, int64_t step, int* saved,
                                                  gtrain_error* error);
/* Collective. Saves when the policy says so, and once when a machine of the job is about to be taken away or
 * the user asks to stop; call it after every step. `comm` may be NULL: a communicator of its own. */
GTRAIN_API gtrain_status gtrain_checkpointer_save_if_due(gtrain_checkpointer* checkpointer, int64_t step,
                                                         gtrain_communicator* comm, int* saved,
                                                         gtrain_error* error);
/* Whether the last save_if_due found that the user asked to stop; equal on all ranks. The state is saved
 * then, unless an earlier save was still being written: leave the loop, wait, save the same step (one
 * commit), exit with 0. */
GTRAIN_API gtrain_status gtrain_checkpointer_stop_agreed(gtrain_checkpointer* checkpointer, int* out,
                                                         gtrain_error* error);
/* With `lazy`: call it after each save before anything changes the registered state, in a training step right
 * before the optimiser. Blocks until the state is copied, and helps to copy it; after a step that computed
 * for longer than a copy takes it costs nothing. From here on the save is committed whatever becomes of this
 * process. Nothing else fences: a save that was not fenced when wait, save, save_if_due or free is called may
 * hold values of two steps, so it is given up with a warning, and wait (or, with on_error: fail, save)
 * returns GTRAIN_FAILED_PRECONDITION. */
GTRAIN_API gtrain_status gtrain_checkpointer_fence(gtrain_checkpointer* checkpointer, gtrain_error* error);
/* Waits until the last save is committed or failed, and returns its error. */
GTRAIN_API gtrain_status gtrain_checkpointer_wait(gtrain_checkpointer* checkpointer, int64_t timeout_ms,
                                                  gtrain_error* error);
/* Returns the step of the newest commit that this process knows of, or -1. */
GTRAIN_API gtrain_status gtrain_checkpointer_last_committed(gtrain_checkpointer* checkpointer, int64_t* step,
                                                            gtrain_error* error);

/* ---- gradients: means that leave while backward runs, compressed on their way ---- */

typedef int32_t gtrain_codec;
enum {
  GTRAIN_CODEC_NONE = 0,
  GTRAIN_CODEC_FLOAT16 = 1,
  GTRAIN_CODEC_BFLOAT16 = 2,
  GTRAIN_CODEC_INT8 = 3,
  GTRAIN_CODEC_FLOAT8 = 4,
  GTRAIN_CODEC_TOP_K = 5,
  GTRAIN_CODEC_ONE_BIT = 6,
  GTRAIN_CODEC_POWER_SGD = 7
};

/* gtrain/compression.h says what each field does. gtrain_compression_parse fills all of it. */
typedef struct gtrain_compression {
  size_t size; /* sizeof(gtrain_compression) */
  gtrain_codec codec;
  int32_t error_feedback;    /* 0 or 1 */
  int32_t residual_bfloat16; /* 0: residuals are float32 */
  uint32_t rounding_seed;
  double density; /* of top-k */
  int32_t exact;  /* 0 or 1 */
  float momentum;
  int32_t matrix_rank; /* of PowerSGD */
  float optimizer_momentum;
  int32_t warmup_steps;
} gtrain_compression;

/* Parses the words of a job file for one codec: "none", "topk density=0.01 warmup=100", "onebit", "powersgd
 * rank=2". Options that are not given have their defaults. The caller sets `size` of *out first. */
GTRAIN_API gtrain_status gtrain_compression_parse(const char* words, gtrain_compression* out,
                                                  gtrain_error* error);

typedef struct gtrain_gradient {
  const char* name;
  size_t count;         /* float32 */
  const int64_t* shape; /* its product is `count`; NULL with 0 dimensions where PowerSGD is not used */
  int dimensions;
} gtrain_gradient;

typedef struct gtrain_reducer_options {
  size_t size;         /* sizeof(gtrain_reducer_options) */
  size_t bucket_bytes; /* 0: 8 MiB */
  /* Buckets of fewer elements travel as float32; 0: 16,384 */
  size_t compress_from;
  /* NULL: no compression. `comm.compression` of the job file wins over it. */
  const gtrain_compression* compression;
} gtrain_reducer_options;

typedef struct gtrain_reducer gtrain_reducer;

/* Collective. Gradients in the order of the forward pass, equal on all ranks; `options` may be NULL. The
 * reducer splits communicators of its own from `comm`. gtrain/reducer.h says what it does and costs. */
GTRAIN_API gtrain_status gtrain_reducer_create(gtrain_communicator* comm, const gtrain_gradient* gradients,
                                               size_t count, const gtrain_reducer_options* options,
                                               gtrain_reducer** out, gtrain_error* error);
/* A running collective is waited for. */
GTRAIN_API void gtrain_reducer_free(gtrain_reducer* reducer);
/* The memory of gradient `index`, owned by the reducer, zeroed at first, the program's between steps. */
GTRAIN_API gtrain_status gtrain_reducer_gradient(gtrain_reducer* reducer, size_t index, float** data,
                                                 size_t* count, gtrain_error* error);
/* Gradient `index` is complete. From any thread, never blocks. */
GTRAIN_API gtrain_status gtrain_reducer_ready(gtrain_reducer* reducer, size_t index, gtrain_error* error);

typedef struct gtrain_reduced_step {
  size_t size; /* sizeof(gtrain_reduced_step) */
  uint64_t bytes_sent;
  size_t selected, wanted;    /* elements that top-k sent and should send */
  size_t clipped;             /* elements that codecs clipped on this rank */
  size_t early;               /* buckets that were means before finish was called */
  int32_t momentum_travelled; /* see gtrain/gradients.h */
  const size_t* unused;       /* gradients nobody called ready for on this rank; until the next finish */
  size_t unused_count;
} gtrain_reduced_step;

/* Blocks until every gradient is the mean over the ranks. `out` may be NULL. */
GTRAIN_API gtrain_status gtrain_reducer_finish(gtrain_reducer* reducer, gtrain_reduced_step* out,
                                               gtrain_error* error);
/* Says that this rank cannot go on with its step; the others get `why`. From any thread, never blocks. */
GTRAIN_API gtrain_status gtrain_reducer_abort(gtrain_reducer* reducer, const char* why, gtrain_error* error);
/* Called after finish, on all ranks or none: the step is not applied, and nothing of it is carried over. */
GTRAIN_API gtrain_status gtrain_reducer_drop(gtrain_reducer* reducer, gtrain_error* error);
/* Saves and restores the state that compression carries over from step to step with the rest, for this rank.
 * Call it before restore and save. Where nothing is carried over it adds nothing. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_reducer(gtrain_checkpointer* checkpointer,
                                                         gtrain_reducer* reducer, gtrain_error* error);

/* The sample ledger: the samples of each batch, and this rank's share of them. gtrain/samples.h says what it
 * promises and costs. */
typedef struct gtrain_samples_options {
  size_t size;          /* sizeof(gtrain_samples_options) */
  const char* name;     /* 1 to 64 of a-z, A-Z, 0-9, '_', '-', '.'; NULL: "train" */
  int64_t samples;      /* 1 to 2^48 */
  int64_t epochs;       /* at least 1 */
  int64_t global_batch; /* samples a batch of all ranks together; 0: elastic.global_batch of the job file */
  uint64_t seed;
  int in_order;  /* not 0: samples are not shuffled */
  int drop_last; /* not 0: the short batch at the end of each epoch is left out; else it is trained, too */
  int share;  /* which of `shares` this rank takes: its coordinate along the data-parallel axis of a mesh */
  int shares; /* 0: `share` is the rank and `shares` the world size */
} gtrain_samples_options;

typedef struct gtrain_samples gtrain_samples;

/* Equal options on all ranks, but for `share`. */
GTRAIN_API gtrain_status gtrain_samples_open(gtrain_session* session, const gtrain_samples_options* options,
                                             gtrain_samples** out, gtrain_error* error);
GTRAIN_API void gtrain_samples_free(gtrain_samples* samples);

typedef struct gtrain_samples_place {
  size_t size;    /* sizeof(gtrain_samples_place), set by the caller */
  int64_t step;   /* batches that are behind */
  int64_t epoch;  /* of the next batch, from 0; `epochs` when all are trained */
  int64_t offset; /* samples of that epoch that are behind */
  int64_t batch; /* samples of the next batch, of all ranks: what a mean divides by; 0 when all are trained */
  int64_t steps; /* batches from the first to the last, those behind included */
} gtrain_samples_place;

GTRAIN_API gtrain_status gtrain_samples_where(gtrain_samples* samples, gtrain_samples_place* out,
                                              gtrain_error* error);
/* Computes this rank's share of the next batch, or of the one `ahead` batches later: `count` samples go to
 * `indices`, which has room for `room`; with NULL they are only counted. Does not move the position. */
GTRAIN_API gtrain_status gtrain_samples_share(gtrain_samples* samples, int64_t ahead, int64_t* indices,
                                              int64_t room, int64_t* count, gtrain_error* error);
/* Says that the next batch is trained; call it before its save. GTRAIN_OUT_OF_RANGE: there is none. */
GTRAIN_API gtrain_status gtrain_samples_advance(gtrain_samples* samples, gtrain_error* error);
/* Adds the cursor as replicated state "gtrain/samples/NAME". Call it before restore and save. */
GTRAIN_API gtrain_status gtrain_checkpointer_add_samples(gtrain_checkpointer* checkpointer,
                                                         gtrain_samples* samples, gtrain_error* error);

/* The mean of float32[count] among the ranks of a communicator, compressed on its way: the way of one bucket
 * in a reducer, for programs that have buckets of their own. Each call applies what the previous one carried
 * over, unless drop came in between. */
typedef struct gtrain_compressed_mean gtrain_compressed_mean;

/* Collective. `shapes` are those of the tensors that lie in the data one behind the other, for PowerSGD; with
 * NULL the data is one vector of `count`. */
GTRAIN_API gtrain_status gtrain_compressed_mean_create(gtrain_communicator* comm,
                                                       const gtrain_compression* compression, size_t count,
                                                       const gtrain_gradient* shapes, size_t shape_count,
                                                       gtrain_compressed_mean** out, gtrain_error* error);
GTRAIN_API void gtrain_compressed_mean_free(gtrain_compressed_mean* mean);
GTRAIN_API gtrain_status gtrain_compressed_mean_all_reduce(gtrain_compressed_mean* mean, float* data,
                                                           size_t count, gtrain_error* error);
GTRAIN_API gtrain_status gtrain_compressed_mean_drop(gtrain_compressed_mean* mean, gtrain_error* error);
/* Bytes that this rank gave to collectives so far. */
GTRAIN_API gtrain_status gtrain_compressed_mean_bytes_sent(gtrain_compressed_mean* mean, uint64_t* bytes,
                                                           gtrain_error* error);

#ifdef __cplusplus
}
#endif

#endif /* GTRAIN_GTRAIN_C_H_ */

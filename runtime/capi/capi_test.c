/* A C program that uses everything in gtrain_c.h as one rank, by hand, and checks the rules of its first
 * comment. */
#define _GNU_SOURCE
#include <gtrain/gtrain_c.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static gtrain_error err;

#define CHECK(condition)                                                                                   \
  do {                                                                                                     \
    if (!(condition)) {                                                                                    \
      fprintf(stderr, "%s:%d: %s failed (last error: %s)\n", __FILE__, __LINE__, #condition, err.message); \
      exit(1);                                                                                             \
    }                                                                                                      \
  } while (0)
#define OK(call) CHECK((call) == GTRAIN_OK)

enum { kTimeoutMs = 60000 };

static void TestArguments(gtrain_session* session) {
  gtrain_communicator* comm = NULL;
  CHECK(gtrain_session_join(-1, &session, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(strstr(err.message, "negative") != NULL);
  CHECK(gtrain_session_join(1, NULL, NULL) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_communicator_create(NULL, kTimeoutMs, &comm, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_all_reduce(NULL, NULL, 0, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_request_wait(NULL, 0, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_checkpointer_save(NULL, 1, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  gtrain_session_free(NULL);
  gtrain_communicator_free(NULL);
  gtrain_request_free(NULL);
  gtrain_checkpointer_free(NULL);
  CHECK(gtrain_abi() == GTRAIN_C_ABI);
  CHECK(strcmp(gtrain_status_name(GTRAIN_UNAVAILABLE), "UNAVAILABLE") == 0);
  CHECK(strchr(gtrain_version(), '.') != NULL);
}

static void TestSession(gtrain_session* session) {
  double loss = 0.5, seconds = 0;
  int stop = 7;
  CHECK(gtrain_session_rank(session) == 0 && gtrain_session_world_size(session) == 1);
  CHECK(gtrain_session_managed(session) == 0);
  OK(gtrain_session_report(session, 3, &loss, 64, &err));
  OK(gtrain_session_report(session, 4, NULL, 0, NULL));
  OK(gtrain_session_alive(session, &err));
  OK(gtrain_session_stop_requested(session, &stop, &err));
  CHECK(stop == 0);
  OK(gtrain_session_notice(session, &seconds, &err));
  CHECK(seconds < 0);
}

/* Of one rank to itself. */
static void TestMessages(gtrain_communicator* comm) {
  float data[3] = {1, 2, 3}, got[4] = {0, 0, 0, 7};
  const size_t counts[1] = {3};
  gtrain_message group[2];
  gtrain_request* request = NULL;
  int done = 0;
  CHECK(gtrain_send(comm, data, 3, GTRAIN_FLOAT32, 1, 0, NULL, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_send(comm, data, 3, GTRAIN_FLOAT32, 0, -1, NULL, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_receive(comm, data, 3, GTRAIN_FLOAT32, -2, 0, NULL, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_send(comm, data, 3, GTRAIN_FLOAT32, 0, 5, NULL, NULL, &err));
  OK(gtrain_receive(comm, got, 3, GTRAIN_FLOAT32, GTRAIN_ANY_SOURCE, 5, NULL, NULL, &err));
  CHECK(got[2] == 3 && got[3] == 7);
  memset(group, 0, sizeof(group));
  group[0].kind = GTRAIN_SEND;
  group[1].kind = GTRAIN_RECEIVE;
  group[0].data = data;
  group[1].data = got;
  group[0].count = 2;
  group[1].count = 4; /* at most */
  group[0].tag = 8;
  group[1].tag = GTRAIN_ANY_TAG;
  got[0] = 0;
  OK(gtrain_exchange(comm, group, 2, NULL, &request, &err));
  OK(gtrain_request_wait(request, kTimeoutMs, &done, &err));
  CHECK(done == 1 && got[0] == 1 && got[3] == 7);
  CHECK(group[1].from == 0 && group[1].from_tag == 8 && group[1].received == 2);
  gtrain_request_free(request);
  group[0].kind = 9;
  CHECK(gtrain_exchange(comm, group, 2, NULL, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_exchange(comm, NULL, 2, NULL, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_receive(comm, got, 3, GTRAIN_FLOAT32, 0, 9, NULL, &request, &err)); /* nobody sends it */
  CHECK(gtrain_request_wait(request, 10, &done, &err) == GTRAIN_DEADLINE_EXCEEDED && done == 0);
  OK(gtrain_send(comm, data, 3, GTRAIN_FLOAT32, 0, 9, NULL, NULL, &err));
  OK(gtrain_request_wait(request, kTimeoutMs, &done, &err));
  gtrain_request_free(request);
  OK(gtrain_gather(comm, data, got, 3, GTRAIN_FLOAT32, 0, NULL, NULL, &err));
  OK(gtrain_scatter(comm, data, got, 3, GTRAIN_FLOAT32, 0, NULL, NULL, &err));
  OK(gtrain_all_gather_v(comm, data, got, counts, GTRAIN_FLOAT32, NULL, NULL, &err));
  OK(gtrain_reduce_scatter_v(comm, data, got, counts, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err));
  OK(gtrain_all_to_all_v(comm, data, counts, got, counts, GTRAIN_FLOAT32, NULL, NULL, &err));
  CHECK(gtrain_all_gather_v(comm, data, got, NULL, GTRAIN_FLOAT32, NULL, NULL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_communicator_set_timeout(comm, kTimeoutMs, &err));
}

static void TestCollectives(gtrain_communicator* comm) {
  float data[3] = {1, 2, 3};
  int64_t in[2] = {4, 5}, out[2] = {0, 0};
  void* memory = NULL;
  gtrain_request* requests[8];
  gtrain_communicator* part = NULL;
  int done = 0, i;
  OK(gtrain_all_reduce(comm, data, 3, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err));
  CHECK(data[0] == 1 && data[2] == 3);
  OK(gtrain_broadcast(comm, data, 3, GTRAIN_FLOAT32, 0, NULL, NULL, &err));
  for (i = 0; i < 8; ++i) OK(gtrain_all_gather(comm, in, out, 2, GTRAIN_INT64, NULL, &requests[i], &err));
  OK(gtrain_barrier(comm, NULL, NULL, &err)); /* behind the queued ones */
  OK(gtrain_reduce_scatter(comm, in, out, 2, GTRAIN_INT64, GTRAIN_SUM, NULL, NULL, &err));
  CHECK(out[0] == in[0] && out[1] == in[1]);
  OK(gtrain_reduce(comm, data, 3, GTRAIN_FLOAT32, GTRAIN_MEAN, 0, NULL, NULL, &err));
  CHECK(data[2] == 3);
  OK(gtrain_all_to_all(comm, in, out, 2, GTRAIN_INT64, NULL, NULL, &err));
  CHECK(out[1] == in[1]);
  OK(gtrain_communicator_split(comm, 5, 0, &part, &err));
  CHECK(gtrain_communicator_size(part) == 1);
  OK(gtrain_all_reduce(part, data, 3, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err));
  gtrain_communicator_free(part);
  OK(gtrain_communicator_split(comm, -1, 0, &part, &err));
  CHECK(part == NULL);
  TestMessages(comm);
  for (i = 0; i < 8; ++i) {
    OK(gtrain_request_wait(requests[i], kTimeoutMs, &done, &err));
    CHECK(done == 1);
    OK(gtrain_request_wait(requests[i], 0, NULL, NULL)); /* may be asked again */
    gtrain_request_free(requests[i]);
  }
  CHECK(out[0] == 4 && out[1] == 5);
  OK(gtrain_allocate(comm, 100, &memory, &err));
  CHECK((uintptr_t)memory % 64 == 0 && ((char*)memory)[99] == 0);
  OK(gtrain_deallocate(comm, memory, &err));
  CHECK(gtrain_deallocate(comm, memory, &err) == GTRAIN_INVALID_ARGUMENT);

  OK(gtrain_all_reduce(comm, in, 4, GTRAIN_UINT32, GTRAIN_BIT_XOR, NULL, NULL, &err));
  CHECK(in[1] == 5);
  CHECK(gtrain_all_reduce(comm, data, 3, (gtrain_dtype)77, GTRAIN_SUM, NULL, NULL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_all_reduce(comm, data, 3, GTRAIN_FLOAT32, (gtrain_op)9, NULL, NULL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_all_reduce(comm, NULL, 3, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_all_reduce(comm, data, SIZE_MAX / 2, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_broadcast(comm, data, 3, GTRAIN_FLOAT32, 1, NULL, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_all_reduce(comm, data, 3, GTRAIN_FLOAT32, GTRAIN_SUM, data, NULL, &err) ==
        GTRAIN_UNIMPLEMENTED);
  CHECK(strstr(err.message, "stream") != NULL);
  OK(gtrain_barrier(comm, NULL, NULL, &err)); /* refused arguments do not kill the communicator */
}

static gtrain_status Refuse(void* user) { return *(int*)user ? GTRAIN_DATA_LOSS : GTRAIN_OK; }

/* Gradients through a reducer whose makers are gone, and what it carries over beside a weight. */
static void TestReducer(gtrain_session* session, const char* uri) {
  const int64_t shape[2] = {64, 64};
  const gtrain_gradient gradients[2] = {{"w", 4096, shape, 2}, {"b", 3, NULL, 0}};
  gtrain_compression compression = {0};
  gtrain_reducer_options options = {0};
  gtrain_checkpoint_options place = {0};
  gtrain_reduced_step step = {0};
  gtrain_communicator* comm = NULL;
  gtrain_reducer* reducer = NULL;
  gtrain_compressed_mean* mean = NULL;
  gtrain_checkpointer* ckpt = NULL;
  float weight[1] = {1}, *memory = NULL, data[4] = {1, 2, 3, 4};
  size_t count = 0;
  uint64_t bytes = 7;
  int stop = 7, saved = 0, refuses = 1;
  int64_t restored = 0;
  CHECK(gtrain_compression_parse("topk", &compression, &err) == GTRAIN_INVALID_ARGUMENT);
  compression.size = sizeof(compression);
  CHECK(gtrain_compression_parse("auto: fp16", &compression, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_compression_parse("topk density=7", &compression, &err) == GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_compression_parse("topk density=0.02 warmup=0", &compression, &err));
  CHECK(compression.codec == GTRAIN_CODEC_TOP_K && compression.density == 0.02 &&
        compression.error_feedback == 1);
  options.compression = &compression;
  options.compress_from = 1;
  OK(gtrain_communicator_create(session, kTimeoutMs, &comm, &err));
  OK(gtrain_communicator_stop_agreed(comm, &stop, &err));
  CHECK(stop == 0);
  CHECK(gtrain_reducer_create(comm, gradients, 2, &options, &reducer, &err) == GTRAIN_INVALID_ARGUMENT);
  options.size = sizeof(options);
  CHECK(gtrain_reducer_create(comm, gradients, 0, &options, &reducer, &err) == GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_reducer_create(comm, gradients, 2, &options, &reducer, &err));
  compression.codec = 99;
  CHECK(gtrain_compressed_mean_create(comm, &compression, 4, NULL, 0, &mean, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_compressed_mean_create(comm, NULL, 4, NULL, 0, &mean, &err));
  gtrain_communicator_free(comm);
  OK(gtrain_compressed_mean_all_reduce(mean, data, 4, &err));
  CHECK(data[3] == 4);
  CHECK(gtrain_compressed_mean_all_reduce(mean, data, 3, &err) == GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_compressed_mean_bytes_sent(mean, &bytes, &err));
  gtrain_compressed_mean_free(mean);
  CHECK(gtrain_reducer_gradient(reducer, 2, &memory, &count, &err) == GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_reducer_gradient(reducer, 1, &memory, &count, &err));
  CHECK(count == 3 && memory[2] == 0);
  memory[2] = 5;
  OK(gtrain_reducer_ready(reducer, 1, &err));
  CHECK(gtrain_reducer_ready(reducer, 1, &err) == GTRAIN_FAILED_PRECONDITION);
  CHECK(gtrain_reducer_finish(reducer, &step, &err) == GTRAIN_INVALID_ARGUMENT);
  step.size = sizeof(step);
  OK(gtrain_reducer_finish(reducer, &step, &err));
  CHECK(memory[2] == 5 && step.unused_count == 1 && step.unused[0] == 0);
  OK(gtrain_reducer_drop(reducer, &err));
  place.size = sizeof(place);
  place.uri = uri;
  place.before_save = Refuse;
  place.user = &refuses;
  OK(gtrain_checkpointer_open(session, &place, &ckpt, &err));
  OK(gtrain_checkpointer_add_replicated(ckpt, "weight", weight, sizeof(weight), NULL, 0, GTRAIN_FLOAT32,
                                        &err));
  OK(gtrain_checkpointer_add_reducer(ckpt, reducer, &err));
  gtrain_reducer_free(reducer);
  CHECK(gtrain_checkpointer_save(ckpt, 1, &saved, &err) == GTRAIN_DATA_LOSS);
  refuses = 0;
  OK(gtrain_checkpointer_save(ckpt, 1, &saved, &err));
  OK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err));
  OK(gtrain_checkpointer_restore(ckpt, NULL, &restored, &err));
  CHECK(restored == 1);
  gtrain_checkpointer_free(ckpt);
}

static gtrain_checkpointer* OpenCheckpoint(gtrain_session* session, const char* uri, float* weights,
                                           int64_t* cursor, int64_t* step) {
  gtrain_checkpoint_options options = {0};
  gtrain_checkpointer* ckpt = NULL;
  const int64_t shape[2] = {2, 3};
  options.size = sizeof(options);
  options.uri = uri;
  options.every_steps = 2;
  OK(gtrain_checkpointer_open(session, &options, &ckpt, &err));
  OK(gtrain_checkpointer_add_replicated(ckpt, "weights", weights, 6 * sizeof(float), shape, 2, GTRAIN_FLOAT32,
                                        &err));
  OK(gtrain_checkpointer_add_per_rank(ckpt, "cursor", cursor, sizeof(*cursor), GTRAIN_PER_RANK_KEEP, &err));
  OK(gtrain_checkpointer_restore(ckpt, NULL, step, &err));
  return ckpt;
}

/* Beside the checkpointer that owns the directory. */
static void TestReadOnly(gtrain_session* session, const char* uri) {
  float weights[6] = {0};
  const int64_t shape[2] = {2, 3};
  int64_t step = 0;
  gtrain_checkpoint_options options = {0};
  gtrain_checkpointer* ckpt = NULL;
  options.size = sizeof(options);
  options.uri = uri;
  CHECK(gtrain_checkpointer_open(session, &options, &ckpt, &err) == GTRAIN_FAILED_PRECONDITION);
  options.read_only = 1;
  OK(gtrain_checkpointer_open(session, &options, &ckpt, &err));
  OK(gtrain_checkpointer_add_replicated(ckpt, "weights", weights, sizeof(weights), shape, 2, GTRAIN_FLOAT32,
                                        &err));
  OK(gtrain_checkpointer_restore(ckpt, NULL, &step, &err));
  CHECK(step == 3 && weights[5] == 60);
  CHECK(gtrain_checkpointer_save(ckpt, 4, NULL, &err) == GTRAIN_FAILED_PRECONDITION);
  gtrain_checkpointer_free(ckpt);
}

static void TestCheckpoint(gtrain_session* session, gtrain_communicator* comm, const char* uri) {
  float weights[6] = {1, 2, 3, 4, 5, 6}, again[6] = {0};
  int64_t cursor = 41, cursor_again = 0, step = 0, bad_shape[1] = {-1};
  int saved = 7;
  gtrain_checkpointer* ckpt = OpenCheckpoint(session, uri, weights, &cursor, &step);
  CHECK(step == -1);
  OK(gtrain_checkpointer_last_committed(ckpt, &step, &err));
  CHECK(step == -1);
  OK(gtrain_checkpointer_save_if_due(ckpt, 1, comm, &saved, &err));
  CHECK(saved == 0);
  OK(gtrain_checkpointer_save_if_due(ckpt, 2, comm, &saved, &err));
  CHECK(saved == 1);
  OK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err));
  OK(gtrain_checkpointer_save(ckpt, 2, &saved, &err)); /* it is saved already */
  CHECK(saved == 1);
  weights[5] = 60;
  OK(gtrain_checkpointer_save_if_due(ckpt, 3, NULL, &saved, &err));
  CHECK(saved == 0);
  saved = 7;
  OK(gtrain_checkpointer_stop_agreed(ckpt, &saved, &err));
  CHECK(saved == 0);
  OK(gtrain_checkpointer_save(ckpt, 3, &saved, &err));
  CHECK(saved == 1);
  OK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err));
  OK(gtrain_checkpointer_last_committed(ckpt, &step, &err));
  CHECK(step == 3);
  CHECK(gtrain_checkpointer_add_replicated(ckpt, "bad", weights, sizeof(weights), bad_shape, 1,
                                           GTRAIN_FLOAT32, &err) == GTRAIN_INVALID_ARGUMENT);
  gtrain_checkpointer_free(ckpt);

  ckpt = OpenCheckpoint(session, uri, again, &cursor_again, &step);
  CHECK(step == 3 && again[5] == 60 && again[0] == 1 && cursor_again == 41);
  TestReadOnly(session, uri);
  gtrain_checkpointer_free(ckpt);
}

/* A save is not there before its fence, and given up when the next call comes first. */
static void TestLazySaves(gtrain_session* session, gtrain_communicator* comm, const char* uri) {
  float weights[6] = {1, 2, 3, 4, 5, 6};
  const int64_t shape[1] = {6};
  int64_t step = 0;
  int saved = 0;
  gtrain_checkpoint_options options = {0};
  gtrain_checkpointer* ckpt = NULL;
  options.uri = uri;
  options.lazy = 1;
  options.size = offsetof(gtrain_checkpoint_options, lazy) - 1;
  CHECK(gtrain_checkpointer_open(session, &options, &ckpt, &err) == GTRAIN_INVALID_ARGUMENT);
  options.size = sizeof(options);
  options.verify_replicas = "sometimes";
  CHECK(gtrain_checkpointer_open(session, &options, &ckpt, &err) == GTRAIN_INVALID_ARGUMENT);
  options.verify_replicas = "every 2";
  options.max_rollback = -2;
  CHECK(gtrain_checkpointer_open(session, &options, &ckpt, &err) == GTRAIN_INVALID_ARGUMENT);
  options.max_rollback = -1;
  OK(gtrain_checkpointer_open(session, &options, &ckpt, &err));
  OK(gtrain_checkpointer_fence(ckpt, &err)); /* nothing was saved */
  OK(gtrain_checkpointer_add_replicated(ckpt, "weights", weights, sizeof(weights), shape, 1, GTRAIN_FLOAT32,
                                        &err));
  OK(gtrain_checkpointer_restore(ckpt, NULL, &step, &err));
  OK(gtrain_checkpointer_save(ckpt, 1, &saved, &err));
  OK(gtrain_checkpointer_fence(ckpt, &err));
  weights[0] = 10;
  OK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err));
  OK(gtrain_checkpointer_save(ckpt, 2, &saved, &err));
  OK(gtrain_checkpointer_save_if_due(ckpt, 3, comm, &saved, &err)); /* the fence is forgotten */
  weights[0] = 20;
  CHECK(saved == 0);
  CHECK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err) == GTRAIN_FAILED_PRECONDITION);
  CHECK(strstr(err.message, "Fence() was not called") != NULL);
  OK(gtrain_checkpointer_last_committed(ckpt, &step, &err));
  CHECK(step == 1);
  OK(gtrain_checkpointer_restore(ckpt, NULL, &step, &err));
  CHECK(step == 1 && weights[0] == 1);
  gtrain_checkpointer_free(ckpt);
  CHECK(gtrain_checkpointer_fence(NULL, &err) == GTRAIN_INVALID_ARGUMENT);
}

typedef struct Loader {
  char bytes[64];
  size_t count;
  int fails;
} Loader;

static gtrain_status SaveLoader(void* user, const void** data, size_t* bytes) {
  Loader* loader = (Loader*)user;
  *data = loader->bytes;
  *bytes = loader->count;
  return loader->fails ? GTRAIN_UNAVAILABLE : GTRAIN_OK;
}

static gtrain_status LoadLoader(void* user, const void* data, size_t bytes) {
  Loader* loader = (Loader*)user;
  if (bytes > sizeof(loader->bytes)) return GTRAIN_INVALID_ARGUMENT;
  memcpy(loader->bytes, data, bytes);
  loader->count = bytes;
  return GTRAIN_OK;
}

/* Bytes whose number changes between saves, and a tensor that an older checkpoint lacks. */
static void TestBytes(gtrain_session* session, const char* uri) {
  Loader loader = {"one", 3, 0};
  float extra[1] = {7};
  const int64_t shape[1] = {1};
  const char* const missing[1] = {"ex*"};
  gtrain_restore_options how = {sizeof(how), missing, 1};
  gtrain_checkpoint_options options = {0};
  gtrain_checkpointer* ckpt = NULL;
  int64_t step = 0;
  int saved = 0;
  options.size = sizeof(options);
  options.uri = uri;
  OK(gtrain_checkpointer_open(session, &options, &ckpt, &err));
  CHECK(gtrain_checkpointer_add_bytes(ckpt, "loader", SaveLoader, NULL, &loader, GTRAIN_PER_RANK_DROP,
                                      &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_checkpointer_add_bytes(ckpt, "loader", SaveLoader, LoadLoader, &loader, 9, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_checkpointer_add_bytes(ckpt, "loader", SaveLoader, LoadLoader, &loader, GTRAIN_PER_RANK_MERGE,
                                   &err));
  OK(gtrain_checkpointer_save(ckpt, 1, &saved, &err));
  OK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err));
  memcpy(loader.bytes, "longer now", 10);
  loader.count = 10;
  OK(gtrain_checkpointer_save(ckpt, 2, &saved, &err));
  OK(gtrain_checkpointer_wait(ckpt, kTimeoutMs, &err));
  loader.fails = 1;
  CHECK(gtrain_checkpointer_save(ckpt, 3, &saved, &err) == GTRAIN_UNAVAILABLE);
  CHECK(strstr(err.message, "loader") != NULL);
  gtrain_checkpointer_free(ckpt);

  memset(&loader, 0, sizeof(loader));
  OK(gtrain_checkpointer_open(session, &options, &ckpt, &err));
  OK(gtrain_checkpointer_add_bytes(ckpt, "loader", SaveLoader, LoadLoader, &loader, GTRAIN_PER_RANK_DROP,
                                   &err));
  OK(gtrain_checkpointer_add_replicated(ckpt, "extra", extra, sizeof(extra), shape, 1, GTRAIN_FLOAT32, &err));
  CHECK(gtrain_checkpointer_restore(ckpt, NULL, &step, &err) == GTRAIN_FAILED_PRECONDITION);
  how.size = 1;
  CHECK(gtrain_checkpointer_restore(ckpt, &how, &step, &err) == GTRAIN_INVALID_ARGUMENT);
  how.size = sizeof(how);
  OK(gtrain_checkpointer_restore(ckpt, &how, &step, &err));
  CHECK(step == 2 && extra[0] == 7 && loader.count == 10 && memcmp(loader.bytes, "longer now", 10) == 0);
  gtrain_checkpointer_free(ckpt);
}

/* Seen by rank 0 of one: a mesh of one rank splits nothing, one of four is another world. */
static void TestSharding(gtrain_session* session, const char* uri) {
  const gtrain_mesh_axis four[2] = {{"dp", 2}, {"tp", 2}}, one[2] = {{"dp", 1}, {"tp", 1}};
  const gtrain_split columns = {1, "tp", GTRAIN_SPLIT_BALANCED}, chunks = {0, "tp", GTRAIN_SPLIT_CHUNK},
                     no_rule = {0, "tp", 7};
  const int64_t ten[1] = {10}, box_begin[1] = {0}, box_shape[1] = {10};
  const gtrain_only last = {"dp", 1};
  gtrain_sharding sharding = {sizeof(sharding), four, 2, &columns, 1, NULL, 0};
  const int64_t shape[2] = {4, 5};
  int64_t begin[2] = {9, 9}, local[2] = {9, 9};
  int holds = 7;
  uint64_t bytes = 7, bytes_read = 7;
  float data[20] = {0};
  gtrain_checkpointer* ckpt = NULL;
  gtrain_checkpoint_options options = {0};
  OK(gtrain_local_box(shape, 2, &sharding, 3, begin, local, &holds, &err));
  CHECK(begin[0] == 0 && begin[1] == 3 && local[0] == 4 && local[1] == 2 && holds == 1);
  sharding.only = &last;
  sharding.only_count = 1;
  OK(gtrain_local_box(shape, 2, &sharding, 1, begin, local, &holds, &err));
  CHECK(local[0] == 0 && local[1] == 0 && holds == 0);
  sharding.only_count = 0;
  sharding.splits = &no_rule;
  CHECK(gtrain_local_box(shape, 2, &sharding, 1, begin, local, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  sharding.splits = &chunks;
  OK(gtrain_local_box(ten, 1, &sharding, 1, begin, local, NULL, &err));
  CHECK(begin[0] == 5 && local[0] == 5);
  sharding.splits = &columns;
  CHECK(gtrain_local_box(shape, 2, &sharding, 4, begin, local, NULL, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_local_box(shape, 2, NULL, 0, begin, local, NULL, &err) == GTRAIN_INVALID_ARGUMENT);

  options.size = sizeof(options);
  options.uri = uri;
  OK(gtrain_checkpointer_open(session, &options, &ckpt, &err));
  CHECK(gtrain_checkpointer_add_sharded(ckpt, "w", data, sizeof(data), shape, 2, &sharding, GTRAIN_FLOAT32,
                                        &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(strstr(err.message, "has 4 ranks") != NULL);
  sharding.mesh = one;
  sharding.only_count = 0;
  CHECK(gtrain_checkpointer_add_sharded(ckpt, "w", data, sizeof(data) - 4, shape, 2, &sharding,
                                        GTRAIN_FLOAT32, &err) == GTRAIN_INVALID_ARGUMENT);
  CHECK(strstr(err.message, "wants 80 bytes") != NULL && strstr(err.message, "76 are given") != NULL);
  OK(gtrain_checkpointer_add_sharded(ckpt, "w", data, sizeof(data), shape, 2, &sharding, GTRAIN_FLOAT32,
                                     &err));
  CHECK(gtrain_checkpointer_add_box(ckpt, "b", data, 9, ten, box_begin, box_shape, 1, GTRAIN_BOOL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_checkpointer_add_box(ckpt, "b", data, 10, ten, NULL, box_shape, 1, GTRAIN_BOOL, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  CHECK(gtrain_checkpointer_add_box(ckpt, "b", data, 10, ten, box_begin, box_shape, 1, 16, &err) ==
        GTRAIN_INVALID_ARGUMENT);
  OK(gtrain_checkpointer_add_box(ckpt, "b", data, 10, ten, box_begin, box_shape, 1, GTRAIN_BOOL, &err));
  OK(gtrain_checkpointer_restored_bytes(ckpt, &bytes, &bytes_read, &err));
  CHECK(bytes == 0 && bytes_read == 0);
  gtrain_checkpointer_free(ckpt);
}

/* A forked data loader is inert: calls fail, handles may be freed, and the parent notices nothing. */
static void TestFork(gtrain_session* session, gtrain_communicator* comm) {
  int status = 0;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    float x = 1;
    gtrain_session* other = NULL;
    gtrain_request* request = NULL;
    CHECK(gtrain_session_join(1000, &other, &err) == GTRAIN_FAILED_PRECONDITION && other == NULL);
    CHECK(strstr(err.message, "forked") != NULL);
    CHECK(gtrain_session_alive(session, &err) == GTRAIN_FAILED_PRECONDITION);
    CHECK(gtrain_session_report(session, 1, NULL, 0, &err) == GTRAIN_FAILED_PRECONDITION);
    CHECK(gtrain_all_reduce(comm, &x, 1, GTRAIN_FLOAT32, GTRAIN_SUM, NULL, NULL, &err) ==
          GTRAIN_FAILED_PRECONDITION);
    CHECK(gtrain_barrier(comm, NULL, &request, &err) == GTRAIN_FAILED_PRECONDITION && request == NULL);
    CHECK(gtrain_session_rank(session) == 0);
    gtrain_communicator_free(comm);
    gtrain_session_free(session);
    exit(0); /* with exit handlers and destructors, as a Python child would */
  }
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(gtrain_barrier(comm, NULL, NULL, &err));
  OK(gtrain_session_alive(session, &err));
}

static void CheckNoSignalHandlers(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return; /* the sanitizer's own are there; comm_exec_test knows them apart */
#endif
  int sig;
  for (sig = 1; sig < SIGRTMIN; ++sig) {
    struct sigaction action;
    if (sig == SIGKILL || sig == SIGSTOP || sigaction(sig, NULL, &action) != 0) continue;
    CHECK(action.sa_handler == SIG_DFL ||
          (action.sa_handler == SIG_IGN &&
           (sig == SIGPIPE || sig == SIGINT || sig == SIGQUIT || sig == SIGHUP)));
  }
}

int main(void) {
  char folder[] = "capi_test-XXXXXX", uri[64], lazy_uri[80], command[64];
  gtrain_session* session = NULL;
  gtrain_communicator* comm = NULL;
  unsetenv("GTRAIN_GENERATION"); /* by hand, even when the tests run under gtrain */
  unsetenv("GTRAIN_CHECKPOINT_URI");
  unsetenv("GTRAIN_CHECKPOINT_EVERY");
  CHECK(mkdtemp(folder) != NULL);
  snprintf(uri, sizeof(uri), "%s/ckpt", folder);

  OK(gtrain_session_join(kTimeoutMs, &session, &err));
  CHECK(err.message[0] == '\0');
  TestArguments(session);
  TestSession(session);
  OK(gtrain_communicator_create(session, kTimeoutMs, &comm, &err));
  CHECK(gtrain_communicator_rank(comm) == 0 && gtrain_communicator_size(comm) == 1);
  TestCollectives(comm);
  TestCheckpoint(session, comm, uri);
  TestSharding(session, uri);
  snprintf(lazy_uri, sizeof(lazy_uri), "%s-bytes", uri);
  TestBytes(session, lazy_uri);
  snprintf(lazy_uri, sizeof(lazy_uri), "%s-lazy", uri);
  TestLazySaves(session, comm, lazy_uri);
  snprintf(lazy_uri, sizeof(lazy_uri), "%s-reducer", uri);
  TestReducer(session, lazy_uri);
  TestFork(session, comm);
  CheckNoSignalHandlers();
  gtrain_session_free(session); /* before the communicator: any order is fine */
  OK(gtrain_barrier(comm, NULL, NULL, &err));
  gtrain_communicator_free(comm);

  snprintf(command, sizeof(command), "rm -rf '%s'", folder);
  CHECK(system(command) == 0);
  puts("ok");
  return 0;
}

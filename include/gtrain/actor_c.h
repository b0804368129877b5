/* Actors for C: gtrain_c.h says what holds for all functions.
 *
 * An actor is an object of a registered class that lives in a process, its host. Calls come to it one at a
 * time; arguments and results are values in MessagePack. C++ programs include gtrain/actor.h. */
#ifndef GTRAIN_ACTOR_C_H
#define GTRAIN_ACTOR_C_H

#include <gtrain/gtrain_c.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- values ----
 *
 * MessagePack (github.com/msgpack/msgpack/blob/master/spec.md). An array of numbers of one type is an
 * extension whose type is its gtrain_dtype, and whose bytes are the numbers one after the other, least
 * significant byte first. Before them are as many zeros, fewer than a number has bytes, as align them to
 * their size within what was packed, where there is such a number of zeros. */

typedef struct gtrain_packer gtrain_packer;

/* NULL: there is no memory left. What is packed grows until gtrain_packer_clear. A packer that ran out of
 * memory, or was given more than 4 GiB at once, says so in gtrain_packer_data. One thread at a time. */
GTRAIN_API gtrain_packer* gtrain_packer_new(void);
GTRAIN_API void gtrain_packer_free(gtrain_packer* packer);
GTRAIN_API void gtrain_packer_clear(gtrain_packer* packer);
/* What was packed since the last clear, until the next call for this packer. */
GTRAIN_API gtrain_status gtrain_packer_data(const gtrain_packer* packer, const void** data, size_t* size,
                                            gtrain_error* error);

GTRAIN_API void gtrain_pack_nil(gtrain_packer* packer);
GTRAIN_API void gtrain_pack_bool(gtrain_packer* packer, int value);
GTRAIN_API void gtrain_pack_int(gtrain_packer* packer, int64_t value);
GTRAIN_API void gtrain_pack_uint(gtrain_packer* packer, uint64_t value);
GTRAIN_API void gtrain_pack_float(gtrain_packer* packer, double value);
GTRAIN_API void gtrain_pack_string(gtrain_packer* packer, const char* text, size_t size);
GTRAIN_API void gtrain_pack_bytes(gtrain_packer* packer, const void* data, size_t size);
GTRAIN_API void gtrain_pack_numbers(gtrain_packer* packer, gtrain_dtype dtype, const void* data,
                                    size_t count);
/* `count` values follow, of a map twice as many: keys and values in turn. */
GTRAIN_API void gtrain_pack_array(gtrain_packer* packer, size_t count);
GTRAIN_API void gtrain_pack_map(gtrain_packer* packer, size_t count);

enum {
  GTRAIN_VALUE_NIL = 0,
  GTRAIN_VALUE_BOOL = 1,    /* integer: 0 or 1 */
  GTRAIN_VALUE_INT = 2,     /* integer, below 0 */
  GTRAIN_VALUE_UINT = 3,    /* unsigned_integer */
  GTRAIN_VALUE_FLOAT = 4,   /* number */
  GTRAIN_VALUE_STRING = 5,  /* data, count: its bytes, which nobody has checked to be UTF-8 */
  GTRAIN_VALUE_BYTES = 6,   /* data, count */
  GTRAIN_VALUE_NUMBERS = 7, /* data, count: elements of dtype; maybe not aligned */
  GTRAIN_VALUE_ARRAY = 8,   /* count: values that follow */
  GTRAIN_VALUE_MAP = 9      /* count: pairs that follow */
};

typedef struct {
  size_t size;  /* sizeof(gtrain_value) */
  int32_t kind; /* GTRAIN_VALUE_* */
  gtrain_dtype dtype;
  int64_t integer;
  uint64_t unsigned_integer;
  double number;
  const void* data; /* in what is unpacked */
  size_t count;
} gtrain_value;

/* Where unpacking has come to in bytes of the caller, which outlive the values. */
typedef struct {
  size_t size;      /* sizeof(gtrain_unpacker) */
  const void* data; /* the next value */
  size_t left;      /* bytes from there on */
} gtrain_unpacker;

/* Takes the next value. Of an array or a map that is its count, which is never more than the bytes that are
 * left could hold, so a hostile sender makes nobody reserve more than it has sent. DATA_LOSS: the bytes end
 * too early, or are no value. */
GTRAIN_API gtrain_status gtrain_unpack(gtrain_unpacker* unpacker, gtrain_value* out, gtrain_error* error);

/* ---- hosts and calls ---- */

typedef struct gtrain_actors gtrain_actors; /* thread-safe */
typedef struct gtrain_call gtrain_call;     /* a call that an actor has begun */

typedef struct {
  size_t size;           /* sizeof(gtrain_actors_options) */
  int32_t threads;       /* that run actors; 0: one a core, 2 at least */
  int64_t mailbox_calls; /* that wait for one actor at most; 0: 1024 */
  int64_t mailbox_bytes; /* of their arguments; 0: 64 MiB */
  int64_t object_bytes;  /* of objects that this process made, and copies of others; 0: 0.3 of the memory
                            that is free, divided by the ranks of this machine */
} gtrain_actors_options;

/* Functions of a class. They are called from threads of the library, for one actor one at a time. */
typedef struct {
  size_t size;           /* sizeof(gtrain_actor_class) */
  const char* name;      /* 1 to 255 bytes */
  const char* signature; /* its methods with their types: builds that differ in it cannot call each other */
  int32_t methods;       /* they are numbered from 0 */
  void* user;
  /* Makes one of what was packed; *self is its own. An error ends the spawn, and its text is the caller's. */
  gtrain_status (*create)(void* user, const void* arguments, size_t size, void** self, gtrain_error* error);
  void (*destroy)(void* user, void* self);
  /* Begins a call. gtrain_call_reply says what it came to, once, before it returns or later, from any thread;
   * until then the actor begins no other. `arguments` live until this function returns, and are aligned to 8.
   */
  void (*call)(void* user, void* self, int32_t method, const void* arguments, size_t size, gtrain_call* call);
  /* Packs its state; and gives it to one that was made of the same arguments. NULL, both: it cannot be kept.
   */
  gtrain_status (*save)(void* user, void* self, gtrain_packer* packer, gtrain_error* error);
  gtrain_status (*load)(void* user, void* self, const void* state, size_t size, gtrain_error* error);
  const uint8_t* constant; /* of each method: 1, it changes nothing. NULL: all do */
} gtrain_actor_class;

/* Who made a call or an actor hears what it came to, once, from any thread, maybe before the function that
 * made it returns. `data` lives as long as this function runs. Must not block. */
typedef void (*gtrain_reply_function)(void* user, gtrain_status status, const char* message, const void* data,
                                      size_t size);

/* Actors of this process. `session` is one that stays (gtrain_session_join_to_stay), or NULL for a process
 * alone, and must not be used to rejoin from here on. Options may be NULL. */
GTRAIN_API gtrain_status gtrain_actors_open(gtrain_session* session, const gtrain_actors_options* options,
                                            gtrain_actors** out, gtrain_error* error);
/* From now on the other ranks of the job are there, too. All call it, when they have registered their
 * classes: it blocks until they have. FAILED_PRECONDITION: another rank runs no actors. NOT_FOUND:
 * libgtrain_net.so is missing. */
GTRAIN_API gtrain_status gtrain_actors_join(gtrain_actors* actors, gtrain_error* error);
/* Blocks until this process is to run the driver of the program (*drives is 1), or the driver, which runs in
 * another process, has ended (0): then it ends, too. In a job alone the driver is in its one process, else in
 * rank 0; when that is lost in a job with `elastic: {mode: in-place}`, in another rank. UNAVAILABLE: the
 * generation is over: exit with 75. */
GTRAIN_API gtrain_status gtrain_actors_await_turn(gtrain_actors* actors, int* drives, gtrain_error* error);
/* Blocks so long, or until no other generation comes for this process. UNAVAILABLE: that is so; calls to
 * others come to nothing. DEADLINE_EXCEEDED: it was not so. `timeout_ms` above 0. */
GTRAIN_API gtrain_status gtrain_actors_await_over(gtrain_actors* actors, int64_t timeout_ms,
                                                  gtrain_error* error);
/* The driver has ended well: the other processes are told so. Blocks for 11 s at most. */
GTRAIN_API void gtrain_actors_finish(gtrain_actors* actors);
/* Processes that may have actors, this one counted. */
GTRAIN_API int gtrain_actors_processes(const gtrain_actors* actors);
/* `task` is called once, by a thread that runs actors, before it begins other calls. FAILED_PRECONDITION:
 * the actors are being freed, and it is not. */
GTRAIN_API gtrain_status gtrain_actors_post(gtrain_actors* actors, void (*task)(void* user), void* user,
                                            gtrain_error* error);

/* Ends all actors, when each has ended the call that it has begun; other calls are CANCELLED. Not from
 * inside an actor. */
GTRAIN_API void gtrain_actors_free(gtrain_actors* actors);

/* All strings are copied. ALREADY_EXISTS: a class of this name with another signature. */
GTRAIN_API gtrain_status gtrain_actors_register(gtrain_actors* actors, const gtrain_actor_class* type,
                                                gtrain_error* error);

enum {
  GTRAIN_SPREAD_PROCESSES = 0, /* the process that has the fewest actors of this one */
  GTRAIN_SPREAD_NODES = 1,     /* the machine with the fewest, there the process with the fewest */
  GTRAIN_SPREAD_PACK = 2,      /* this machine, the process with the fewest */
  GTRAIN_SPREAD_HERE = 3       /* this process */
};

typedef struct {
  size_t size;         /* sizeof(gtrain_spawn_options) */
  int32_t restarts;    /* of an actor that threw, within an hour: beyond them it ends; below 0: 3 */
  int32_t spread;      /* GTRAIN_SPREAD_* */
  int32_t rank;        /* instead of it, the process with this rank now; below 0: none */
  int32_t keep;        /* 1: its state outlives its process, in the memory of this one */
  int32_t concurrency; /* calls of it that are begun and not answered at most, on as many threads; 0: 1 */
  int32_t
      detached; /* 1: it is nobody's and has a name; it ends with the job, or by gtrain_actors_end_detached */
  uint64_t apart; /* above 0: of the actors of this process with this number no two are in one process, or
                     on one machine where the spread is GTRAIN_SPREAD_NODES */
  const char*
      name; /* that all ranks find it by, 1 to 255 bytes without control characters; NULL or "": none */
} gtrain_spawn_options;

/* What is replied is the reference of the actor, bytes that may be kept and sent. `timeout_ms` above 0.
 * Options may be NULL. NOT_FOUND: there is no such rank, or no such class there. FAILED_PRECONDITION: the
 * class is another one there, or no process is apart from others of its number. UNAVAILABLE: the process that
 * was chosen is gone. ALREADY_EXISTS: another actor has the name. The actor ends with this process, unless it
 * is detached: then the process that drives owns it, and when that is lost the next one that does; only one
 * that was in that process itself is lost with it. DEADLINE_EXCEEDED: a detached one may be there. */
GTRAIN_API void gtrain_actors_spawn(gtrain_actors* actors, const char* type,
                                    const gtrain_spawn_options* options, const void* arguments, size_t size,
                                    int64_t timeout_ms, gtrain_reply_function reply, void* user);
/* What is replied is the reference of the actor that was spawned with this name, by whichever rank.
 * NOT_FOUND: there is none now. FAILED_PRECONDITION: it is of another class, or another build of this one.
 * UNAVAILABLE: the rank that drives, which keeps the names, is gone: again when another one does.
 * `timeout_ms` above 0. */
GTRAIN_API void gtrain_actors_find(gtrain_actors* actors, const char* name, const char* type,
                                   int64_t timeout_ms, gtrain_reply_function reply, void* user);
/* RESOURCE_EXHAUSTED: its mailbox is full, or 1,024 calls to an actor of another process have no answer, so
 * await some calls before making others; the call has not run. UNAVAILABLE: the process of the actor is gone,
 * and the message says whether the call may have run.
 * NOT_FOUND: there is no such actor any more. DEADLINE_EXCEEDED: it may have run, or run later, unless
 * the message says that it had not begun: those never run. INVALID_ARGUMENT: the arguments are not the
 * method's. UNKNOWN: the method threw. Calls of one thread to one actor run in the order in which they were
 * made. */
GTRAIN_API void gtrain_actors_call(gtrain_actors* actors, const void* reference, size_t reference_size,
                                   int32_t method, const void* arguments, size_t size, int64_t timeout_ms,
                                   gtrain_reply_function reply, void* user);
/* Likewise, of what was packed since the last clear, which is taken and not copied: the packer is empty then.
 */
GTRAIN_API void gtrain_actors_call_packed(gtrain_actors* actors, const void* reference, size_t reference_size,
                                          int32_t method, gtrain_packer* packer, int64_t timeout_ms,
                                          gtrain_reply_function reply, void* user);
/* Ends an actor as gtrain_actors_free does. Never blocks. */
GTRAIN_API void gtrain_actors_end(gtrain_actors* actors, const void* reference, size_t reference_size,
                                  const char* reason);

/* The same of one that was spawned detached, by any process. INVALID_ARGUMENT: it was not. NOT_FOUND: it is
 * no more. `timeout_ms` above 0. */
GTRAIN_API void gtrain_actors_end_detached(gtrain_actors* actors, const void* reference,
                                           size_t reference_size, int64_t timeout_ms,
                                           gtrain_reply_function reply, void* user);
/* The reply comes when an actor of this process has ended by itself: GTRAIN_OK and why, as text. CANCELLED:
 * it was let go, or the actors are being freed. NOT_FOUND: it is no more, and nobody knows why.
 * FAILED_PRECONDITION: another process owns it. */
GTRAIN_API void gtrain_actors_await_end(gtrain_actors* actors, const void* reference, size_t reference_size,
                                        gtrain_reply_function reply, void* user);

/* `crashed`: the method threw: the actor is made anew from what it was made of, or ends if that happened too
 * often, and `message` goes to the caller, who hears UNKNOWN. */
GTRAIN_API void gtrain_call_reply(gtrain_call* call, gtrain_status status, const char* message, int crashed,
                                  const void* data, size_t size);
/* What is left of its time. */
GTRAIN_API int64_t gtrain_call_left_ms(const gtrain_call* call);

/* 1 on a thread that runs an actor just now, which must not wait for another call. */
GTRAIN_API int gtrain_actors_inside(void);

#ifdef __cplusplus
}
#endif

#endif /* GTRAIN_ACTOR_C_H */

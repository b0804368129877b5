/* Objects for C: arrays of bytes that stay where they were made, which all processes of a job read. C++
 * programs include gtrain/object.h.
 *
 * A process makes one, fills it, and seals it; its reference travels in arguments and results. Readers of its
 * machine map the same memory; on another one a process fetches it, once, and the others there map that. The
 * memory of a process for what it made, and for copies, is bounded (gtrain_actors_options): whoever makes
 * more waits until some is let go. */
#ifndef GTRAIN_OBJECT_C_H
#define GTRAIN_OBJECT_C_H

#include <gtrain/actor_c.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A draft, an object of this process, or one that is read. Functions of one handle: one thread at a time. It
 * may outlive its gtrain_actors. */
typedef struct gtrain_object gtrain_object;

enum { GTRAIN_OBJECT_REFERENCE_BYTES = 40 };

/* Called once, from any thread, maybe before the function that asked returns; must not block. `object` is
 * NULL unless the status is GTRAIN_OK, and else the caller's to release. */
typedef void (*gtrain_object_function)(void* user, gtrain_status status, const char* message,
                                       gtrain_object* object);

/* Makes a draft: memory to be filled. RESOURCE_EXHAUSTED: there was no room for it within `timeout_ms`, which
 * is above 0, or there never is for so much. Never blocks. */
GTRAIN_API void gtrain_object_create(gtrain_actors* actors, uint64_t bytes, int64_t timeout_ms,
                                     gtrain_object_function reply, void* user);
/* Reads the object of a reference; the handle keeps its memory until it is released. NOT_FOUND: its owner has
 * let it go. UNAVAILABLE: the process that had it is gone, and the message names it. DEADLINE_EXCEEDED.
 * RESOURCE_EXHAUSTED: it is on another machine, and there was no room for the copy. Never blocks. */
GTRAIN_API void gtrain_object_read(gtrain_actors* actors, const void* reference, size_t reference_size,
                                   int64_t timeout_ms, gtrain_object_function reply, void* user);

/* 64-byte aligned. A draft may be written there; what was sealed, and what is read, must not. */
GTRAIN_API void* gtrain_object_data(gtrain_object* object);
GTRAIN_API uint64_t gtrain_object_size(const gtrain_object* object);
/* Copies into a draft; of large data faster than a copy to gtrain_object_data. */
GTRAIN_API gtrain_status gtrain_object_write(gtrain_object* object, uint64_t at, const void* data,
                                             size_t size, gtrain_error* error);
/* A draft becomes an object, and `reference`, of GTRAIN_OBJECT_REFERENCE_BYTES, what others read it by.
 * FAILED_PRECONDITION: it is none, or its cluster is gone. */
GTRAIN_API gtrain_status gtrain_object_seal(gtrain_object* object, void* reference, gtrain_error* error);
/* What was made is no more: after `grace_ms` nobody begins to read it, and those that do go on. What was read
 * is not needed here any more. NULL is nothing. */
GTRAIN_API void gtrain_object_release(gtrain_object* object, int64_t grace_ms);

#ifdef __cplusplus
}
#endif

#endif /* GTRAIN_OBJECT_C_H */

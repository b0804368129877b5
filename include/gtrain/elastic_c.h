/* Training that does not stop, for C: gtrain_c.h says what holds for all functions. Since 0.2.
 *
 * In a job with `elastic: {mode: in-place}` a process that joined to stay lives through generations: when a
 * rank or a machine is lost, the others wait for their places in the next generation and go on with what they
 * have in memory. */
#ifndef GTRAIN_ELASTIC_C_H
#define GTRAIN_ELASTIC_C_H

#include <gtrain/gtrain_c.h>

#ifdef __cplusplus
extern "C" {
#endif

/* As gtrain_session_join; the process will call gtrain_session_rejoin when its generation is over. Where the
 * job does not let it stay, it is ended as any other. */
GTRAIN_API gtrain_status gtrain_session_join_to_stay(int64_t timeout_ms, gtrain_session** out,
                                                     gtrain_error* error);

/* After gtrain_session_alive failed: waits for the next generation, and until all of its ranks have joined.
 * Then rank, local rank, world size, generation and timeline of the session are those of that generation, and
 * every call of a communicator of an earlier one returns GTRAIN_UNAVAILABLE. Not to be called while another
 * thread asks the session for them.
 * DEADLINE_EXCEEDED: there was none in time, or some rank did not join. UNAVAILABLE: there is none for this
 * process: exit with 75. FAILED_PRECONDITION: the generation is not over. */
GTRAIN_API gtrain_status gtrain_session_rejoin(gtrain_session* session, int64_t timeout_ms,
                                               gtrain_error* error);

#ifdef __cplusplus
}
#endif

#endif /* GTRAIN_ELASTIC_C_H */

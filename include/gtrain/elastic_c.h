/* Training that does not stop, for C: gtrain_c.h says what holds for all functions.
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

/* As gtrain_session_join_to_stay, for a program whose steps are those of a gtrain_elastic. A process that was
 * started beside a running generation does not wait for its place here, but in its first
 * gtrain_elastic_begin: whatever it loads and allocates before that holds up nobody, for the others hear of
 * it when it is there. Until then its rank is a number behind theirs, its world size that of a generation to
 * which it does not belong, and gtrain_session_alive says UNAVAILABLE. In a job with a `mesh` of more than dp
 * it waits here, since its part of the model depends on its place. */
GTRAIN_API gtrain_status gtrain_session_join_place_later(int64_t timeout_ms, gtrain_session** out,
                                                         gtrain_error* error);

/* After a collective, or gtrain_session_alive, has said UNAVAILABLE: waits until the generation is over, for
 * the next one, and until all of its ranks have joined. Then rank, local rank, world size, generation and
 * timeline of the session are those of that generation, and every call of a communicator of an earlier one
 * returns GTRAIN_UNAVAILABLE.
 * DEADLINE_EXCEEDED: that took longer. UNAVAILABLE: there is none for this process: exit with 75.
 * FAILED_PRECONDITION: the program was started by hand. */
GTRAIN_API gtrain_status gtrain_session_rejoin(gtrain_session* session, int64_t timeout_ms,
                                               gtrain_error* error);

/* Names and sizes of the axes of the job's mesh in this generation, the last one fastest; dp alone without a
 * `mesh` in the job file. Writes the first `capacity` of them; the names live as long as the library. */
GTRAIN_API gtrain_status gtrain_session_mesh(const gtrain_session* session, gtrain_mesh_axis* out,
                                             int capacity, int* count, gtrain_error* error);

/* ---- a training loop that survives its ranks ----
 *
 * gtrain owns the order of things: which samples come next, when gradients are reduced and an update may be
 * made, who hands its state to whom after a loss, and when a checkpoint is saved (where the job says so). One
 * thread of the program calls these; all ranks register alike.
 *
 *   while (gtrain_elastic_begin(run, &step, &error) == GTRAIN_OK && !step.done) {
 *     int apply = 0;
 *     loss = compute(step.samples, step.sample_count, gradient);    may come again for the same step
 *     gtrain_elastic_ready(run, 0);                                 if others are still to be computed
 *     gtrain_elastic_reduce(run, loss, &apply, &error);
 *     if (apply) {                                                  on all ranks, or on none
 *       update(state, gradient);
 *       gtrain_elastic_applied(run, &error);
 *     }
 *   }
 *
 * Each of the three may wait for the other ranks and for the next generation. UNAVAILABLE: there is no other
 * generation for this process: exit with 75. FAILED_PRECONDITION, among others: a rank has ended with exit
 * code 0 while others train, so training cannot go on. Outside gtrain the same program is a world of one
 * rank. */
/* ---- the same bits at any number of ranks ----
 *
 * With `elastic: {determinism: bitwise}` in the job file the samples of a step are cut into parts, the
 * virtual ranks, as many as `virtual_ranks` says or the job has ranks at most. A rank computes consecutive
 * ones, one after the other, and gtrain adds their gradients and losses in an order that does not know which
 * rank had which. The loop inside of a step then is:
 *
 *   double loss = 0;
 *   while (gtrain_elastic_next_part(run, loss, &part, &error) == GTRAIN_OK && !part.done)
 *     loss = compute(part.samples, part.sample_count, part.seed, gradient);
 *   gtrain_elastic_reduce(run, 0, &apply, &error);
 *
 * In any other job a rank has one part, its share of the step, so that one program serves both. */
typedef struct gtrain_elastic gtrain_elastic;

typedef struct {
  size_t size;            /* sizeof(gtrain_elastic_step) */
  int32_t done;           /* all samples are trained, or somebody asked to stop */
  int32_t stopped;        /* done before the last sample */
  int64_t step;           /* that is to be computed; the first is 1 */
  int64_t epoch;          /* from 0 */
  int64_t batch;          /* samples of all ranks together */
  const int64_t* samples; /* this rank's share, until the next call; may be empty */
  int64_t sample_count;
  int64_t steps;         /* the number of the last one */
  int32_t share, shares; /* of each batch: which is this rank's, and of how many */
} gtrain_elastic_step;

typedef struct {
  size_t size;            /* sizeof(gtrain_elastic_part) */
  int32_t done;           /* this rank has no other part in this step, or none at all; the rest is 0 then */
  int64_t virtual_rank;   /* in this step, from 0 */
  uint64_t seed;          /* for what this part draws: of the data's seed, the step and the virtual rank */
  const int64_t* samples; /* of this part, until the next call; at least one */
  int64_t sample_count;
} gtrain_elastic_part;

/* `session` joined to stay; it may be freed first. `samples` as for gtrain_samples_open, with `shares` 0: the
 * global batch stays what it is, and ranks share it whatever their number. */
GTRAIN_API gtrain_status gtrain_elastic_open(gtrain_session* session, const gtrain_samples_options* samples,
                                             gtrain_elastic** out, gtrain_error* error);
GTRAIN_API void gtrain_elastic_free(gtrain_elastic* run);

/* Registers `count` elements that are equal on all ranks, before the first step. The caller's memory, which
 * outlives the run; only the update changes it. Where no checkpoint is restored all begin with the
 * memory of one rank: the lowest whose memory no copy has touched. */
GTRAIN_API gtrain_status gtrain_elastic_add_state(gtrain_elastic* run, const char* name, void* data,
                                                  size_t count, gtrain_dtype dtype, gtrain_error* error);
/* The same for a tensor of `dimensions` sizes, which it has in checkpoints; their product is the count. */
GTRAIN_API gtrain_status gtrain_elastic_add_state_of_shape(gtrain_elastic* run, const char* name, void* data,
                                                           const int64_t* shape, int dimensions,
                                                           gtrain_dtype dtype, gtrain_error* error);

/* Memory for state: whole pages, zeros at first; NULL for 0 bytes, or where there is none left. A program
 * that looks for writes outside its updates takes the permission to write away while a step is computed:
 * between gtrain_elastic_begin and _reduce, and behind _applied. Then such a write is a SIGSEGV where it
 * happens, with a line on stderr that has the state's name and the address. For that the first call without
 * `writable` installs a handler of SIGSEGV, which then puts back the one that was there and lets the write
 * happen again; what is not such a write goes to the one that was there. */
GTRAIN_API void* gtrain_state_allocate(size_t bytes);
GTRAIN_API void gtrain_state_free(void* data, size_t bytes);
GTRAIN_API void gtrain_state_set_writable(void* data, size_t bytes, int writable);

/* In a job with a `mesh` of several axes a rank has a part of the model, the same one as long as its process
 * lives, and every rank along dp a copy of it. gtrain_elastic_local_part says which part of a tensor of
 * `shape` that is (as gtrain_local_box, with the job's mesh: `cut` has none, and names no dp), and
 * gtrain_elastic_add_sharded registers it: `count` elements, which are equal on all copies. A lost part comes
 * from a copy; where no copy is left, all ranks go back to the newest checkpoint. */
GTRAIN_API gtrain_status gtrain_elastic_local_part(gtrain_session* session, const int64_t* shape,
                                                   int dimensions, const gtrain_sharding* cut, int64_t* begin,
                                                   int64_t* local_shape, int* holds, gtrain_error* error);
GTRAIN_API gtrain_status gtrain_elastic_add_sharded(gtrain_elastic* run, const char* name, void* data,
                                                    size_t count, gtrain_dtype dtype, const int64_t* shape,
                                                    int dimensions, const gtrain_sharding* cut,
                                                    gtrain_error* error);

/* Registers a gradient, before the first step: zeros when a step begins, the sum over this rank's samples
 * when it is reduced, the mean over the batch when it is applied. */
GTRAIN_API gtrain_status gtrain_elastic_add_gradient(gtrain_elastic* run, float* data, size_t count,
                                                     gtrain_error* error);

/* The same for a tensor of `dimensions` sizes, which PowerSGD compresses as a matrix; their product is the
 * count. */
GTRAIN_API gtrain_status gtrain_elastic_add_gradient_of_shape(gtrain_elastic* run, float* data,
                                                              const int64_t* shape, int dimensions,
                                                              gtrain_error* error);

/* The program's own choices, before the first step and equal on all ranks; what the job file says wins over
 * them. Options may be NULL: the defaults. A run saves when `uri` or the job file says where. Not for it:
 * `lazy`, `read_only` and `before_save` (INVALID_ARGUMENT). */
GTRAIN_API gtrain_status gtrain_elastic_set_checkpoints(gtrain_elastic* run,
                                                        const gtrain_checkpoint_options* options,
                                                        gtrain_error* error);
GTRAIN_API gtrain_status gtrain_elastic_set_reducer(gtrain_elastic* run,
                                                    const gtrain_reducer_options* options,
                                                    gtrain_error* error);

GTRAIN_API gtrain_status gtrain_elastic_begin(gtrain_elastic* run, gtrain_elastic_step* out,
                                              gtrain_error* error);
/* The ranks that differ from this one along `axis` alone, in the order of their coordinates: a communicator
 * for the computation of this step, which the caller frees. For an axis that the job's mesh lacks, or has
 * with size 1, it is this rank alone; the first call for it in a generation is collective. */
GTRAIN_API gtrain_status gtrain_elastic_along(gtrain_elastic* run, const char* axis,
                                              gtrain_communicator** out, gtrain_error* error);
/* The computation of a step ended in UNAVAILABLE of such a communicator: *lost is 1 when the generation is
 * over (waits for that, a minute at most): the step is over, go on with gtrain_elastic_begin. 0: it was
 * something else. */
GTRAIN_API gtrain_status gtrain_elastic_await_loss(gtrain_elastic* run, int* lost, gtrain_error* error);

/* Ends the part before, of whose samples `loss` is the sum, and begins the next one; before the first part
 * `loss` is nothing. With `determinism: bitwise` the gradients are taken, zeros for each part, and go through
 * memory three times more. Never blocks. A program that takes a part of a step takes all of them. */
GTRAIN_API gtrain_status gtrain_elastic_next_part(gtrain_elastic* run, double loss, gtrain_elastic_part* out,
                                                  gtrain_error* error);
/* Gradient `index`, in the order in which they were added, is this rank's whole sum. With `comm.compression`
 * in the job file it leaves while others are computed. Never blocks. An error (no such gradient; ready twice)
 * is that of gtrain_elastic_reduce, which takes those that nobody said to be ready. */
GTRAIN_API void gtrain_elastic_ready(gtrain_elastic* run, size_t index);
/* `loss`: the sum over this rank's samples; 0 where its parts had theirs. *apply: 1: make the update; 0: the
 * step is to be computed again. FAILED_PRECONDITION: not all parts of this rank were computed, as
 * `determinism: bitwise` wants it. */
GTRAIN_API gtrain_status gtrain_elastic_reduce(gtrain_elastic* run, double loss, int* apply,
                                               gtrain_error* error);
GTRAIN_API gtrain_status gtrain_elastic_applied(gtrain_elastic* run, gtrain_error* error);

/* What the reduction says whose update is, or was last, to be made; zeros where gradients are not compressed.
 * `momentum_travelled` is equal on all ranks, so an update may depend on it. *loss: the mean over the batch,
 * NaN where a rank was lost before it was known. Either may be NULL; nothing blocks. */
GTRAIN_API gtrain_status gtrain_elastic_reduced(gtrain_elastic* run, gtrain_reduced_step* out, double* loss,
                                                gtrain_error* error);

/* The program wants no more, on this rank: all end behind the next step that they make, as when the user asks
 * to stop. Never blocks. */
GTRAIN_API gtrain_status gtrain_elastic_stop(gtrain_elastic* run, gtrain_error* error);

/* Sums values[i] over all ranks, which call it after the same step (a validation every so many steps) or at
 * the end (the last one). *all: 1: values are the sums. 0: a rank was lost; gtrain_elastic_begin goes on, and
 * at the end says `done` once more: then all compute their values again, for the ranks that there are now.
 * Some may have sums when others have none, so no state depends on them. Blocks. */
GTRAIN_API gtrain_status gtrain_elastic_sum(gtrain_elastic* run, double* values, size_t count, int* all,
                                            gtrain_error* error);

/* *norm: the Euclidean norm of what error feedback holds back on this rank, as its part of the mean. *lost:
 * ranks that took theirs along, since this process trains. Between steps, or before the first gradient of one
 * is ready. It costs a copy of the gradients; either may be NULL. */
GTRAIN_API gtrain_status gtrain_elastic_residual(gtrain_elastic* run, double* norm, int64_t* lost,
                                                 gtrain_error* error);

#ifdef __cplusplus
}
#endif

#endif /* GTRAIN_ELASTIC_C_H */

// One rank of bench_allreduce under Open MPI or MPICH: what allreduce_rank.cc does, with MPI_Allreduce, once
// in place and once from one buffer into another. Rank 0 writes "BYTES MICROSECONDS", the better of the two
// medians.
//   allreduce_mpi FILE once|rewritten BYTES:CALLS...
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int Smaller(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double Median(void* input, void* output, size_t bytes, int calls, int rewrite) {
  double* samples = malloc((size_t)calls * sizeof(double));
  for (int call = -calls / 10 - 2; call < calls; ++call) {
    if (rewrite) memset(input == MPI_IN_PLACE ? output : input, 0, bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    MPI_Allreduce(input, output, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (call >= 0) samples[call] = MPI_Wtime() - start;
  }
  MPI_Allreduce(MPI_IN_PLACE, samples, calls, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  qsort(samples, (size_t)calls, sizeof(double), Smaller);
  const double median = samples[calls / 2] * 1e6;
  free(samples);
  return median;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  size_t largest = 64;
  for (int i = 3; i < argc; ++i) {
    const size_t bytes = strtoull(argv[i], NULL, 10);
    if (bytes > largest) largest = bytes;
  }
  void *input = aligned_alloc(64, largest), *output = aligned_alloc(64, largest);
  memset(input, 0, largest);
  memset(output, 0, largest);
  const int rewrite = strcmp(argv[2], "rewritten") == 0;
  FILE* out = rank == 0 ? fopen(argv[1], "w") : NULL;
  for (int i = 3; i < argc; ++i) {
    char* colon = NULL;
    const size_t bytes = strtoull(argv[i], &colon, 10);
    const int calls = atoi(colon + 1);
    const double in_place = Median(MPI_IN_PLACE, output, bytes, calls, rewrite);
    const double apart = Median(input, output, bytes, calls, rewrite);
    if (out) fprintf(out, "%zu %.3f\n", bytes, in_place < apart ? in_place : apart);
  }
  const int failed = rank == 0 && (out == NULL || fclose(out) != 0);
  MPI_Finalize();
  return failed;
}

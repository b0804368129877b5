/* What messages.cc measures, under Open MPI: messages between two ranks, back and forth.
 *   messages_mpi FILE BYTES:TIMES...
 * Rank 0 writes "BYTES MICROSECONDS" of one way, the median of so many returns. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int Smaller(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double OneWay(int rank, char* data, int bytes, int times) {
  double* samples = malloc((size_t)times * sizeof(double));
  for (int i = -times / 10 - 2; i < times; ++i) {
    const double start = MPI_Wtime();
    if (rank == 0) {
      MPI_Send(data, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
      MPI_Recv(data, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
      MPI_Recv(data, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      MPI_Send(data, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
    if (i >= 0) samples[i] = (MPI_Wtime() - start) / 2;
  }
  qsort(samples, (size_t)times, sizeof(double), Smaller);
  const double median = samples[times / 2] * 1e6;
  free(samples);
  return median;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  FILE* out = rank == 0 ? fopen(argv[1], "w") : NULL;
  for (int i = 2; i < argc; ++i) {
    char* colon = NULL;
    const int bytes = (int)strtoul(argv[i], &colon, 10), times = atoi(colon + 1);
    char* data = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
    memset(data, 1, (size_t)bytes);
    const double one_way = OneWay(rank, data, bytes, times);
    if (out) fprintf(out, "%d %.3f\n", bytes, one_way);
    free(data);
  }
  const int failed = rank == 0 && (out == NULL || fclose(out) != 0);
  MPI_Finalize();
  return failed;
}

// One rank of bench_launch under Open MPI: registers with the PMIx server, publishes an address, passes a
// fence that collects everybody's, ends. The least that a program of Open MPI does before it can talk.
#include <pmix.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  pmix_proc_t self, all;
  if (PMIx_Init(&self, NULL, 0) != PMIX_SUCCESS) {
    fputs("launch_pmix: PMIx_Init failed: start it with mpirun\n", stderr);
    return 1;
  }
  pmix_value_t address;
  char text[64];
  snprintf(text, sizeof(text), "tcp://10.0.0.1:%u", 20000 + (unsigned)self.rank);
  PMIX_VALUE_LOAD(&address, text, PMIX_STRING);
  PMIx_Put(PMIX_GLOBAL, "bench.address", &address);
  PMIx_Commit();
  PMIX_PROC_CONSTRUCT(&all);
  PMIX_LOAD_PROCID(&all, self.nspace, PMIX_RANK_WILDCARD);
  const int failed = PMIx_Fence(&all, 1, NULL, 0) != PMIX_SUCCESS;
  PMIx_Finalize(NULL, 0);
  return failed;
}

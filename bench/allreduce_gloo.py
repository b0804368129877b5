"""The ranks of bench_allreduce under Gloo: what allreduce_rank.cc does, with torch.distributed.all_reduce.

usage: allreduce_gloo.py FILE RANKS [rank=RANK:STORE] BYTES:CALLS...
Starts RANKS processes of itself, or is one of them, which meet in the file STORE.
"""
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist


def run(rank, ranks, store, path, sizes):
    if ranks <= os.cpu_count():
        os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    lines = []
    for size in sizes:
        count, calls = (int(n) for n in size.split(":"))
        data = torch.zeros(count // 4)
        samples = []
        for call in range(-calls // 10 - 2, calls):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(data)
            if call >= 0:
                samples.append((time.perf_counter() - start) * 1e6)
        slowest = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        lines.append("%d %.3f\n" % (count, statistics.median(slowest.tolist())))
    if rank == 0:
        with open(path, "w") as out:
            out.writelines(lines)


def main():
    path, ranks, sizes = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if sizes[0].startswith("rank="):
        rank, store = sizes[0][len("rank="):].split(":")
        run(int(rank), ranks, store, path, sizes[1:])
        return
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                run(rank, ranks, folder + "/store", path, sizes)
                os._exit(0)
            children.append(pid)
        sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))


if __name__ == "__main__":
    main()

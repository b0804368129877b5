"""A peer of bench_checkpoint: torch.distributed.checkpoint (DCP) of PyPI's torch, as tools/bench_torch.sh installs it.

usage: checkpoint_dcp.py FOLDER BYTES WORLD_SIZE thread|process

Training processes, each of which holds the same BYTES of float32 state in tensors of 64 MiB, on gloo if there are
several. The first one answers lines on its standard input:
  save    async_save into a fresh folder; answers "STALL DURABLE", seconds until async_save returned on the slowest
          rank and until every rank's future was done. The checkpoint before is removed, which is not measured.
  load    load of the newest one with nothing of it in the page cache; answers "SECONDS", of the slowest rank
          ("cached" instead of "load": leaves the page cache alone)
and ends with its standard input.

thread: a thread of the rank writes, what is saved is copied into memory that is kept from save to save.
process: a process of its own writes; what is saved is copied into shared memory that is kept, so the process does
not copy it again. Both sync their files and write with one thread for each core, each into a file of its own. Pinned
memory and staging beside training need CUDA.
"""
import os
import shutil
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

TENSOR_BYTES = 64 << 20


class Rank:
    def __init__(self, folder, size, world, mode, rank, address):
        self.folder, self.rank, self.count = folder, rank, 0
        # The process that writes has a group of its own and asks for it as torchrun's processes do.
        host, port = address.split(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world),
                          LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method="tcp://" + address)
        self.state = {"w%d" % i: torch.full((TENSOR_BYTES // 4096, 1024), float(i))
                      for i in range(size // TENSOR_BYTES)}
        outside = mode == "process"
        self.kind = AsyncCheckpointerType.PROCESS if outside else AsyncCheckpointerType.THREAD
        self.stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=outside,
                                                   use_async_staging=False, use_non_blocking_copy=False))

    def path(self):
        return os.path.join(self.folder, "dcp-%d" % self.count)

    def save(self):
        before = self.path()
        self.count += 1
        if self.rank == 0:
            shutil.rmtree(self.path(), ignore_errors=True)
        writer = dcp.FileSystemWriter(self.path(), single_file_per_rank=False, sync_files=True,
                                      thread_count=os.cpu_count())
        dist.barrier()
        begin = time.perf_counter()
        future = dcp.async_save(self.state, storage_writer=writer, async_checkpointer_type=self.kind,
                                async_stager=self.stager)
        stall = time.perf_counter() - begin
        getattr(future, "upload_completion", future).result()
        durable = time.perf_counter() - begin
        times = self.slowest([stall, durable])
        if self.rank == 0:
            shutil.rmtree(before, ignore_errors=True)
        return times

    def load(self, cold=True):
        if cold and self.rank == 0:
            os.sync()
            for name in os.listdir(self.path()):
                with open(os.path.join(self.path(), name), "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        begin = time.perf_counter()
        dcp.load(self.state, checkpoint_id=self.path())
        return self.slowest([time.perf_counter() - begin])

    def cached(self):
        return self.load(cold=False)

    def slowest(self, seconds):
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()

    def close(self):
        self.stager.close()
        dist.destroy_process_group()


def follow(rank):
    """Does what rank 0 is told, until it ends."""
    while True:
        word = [None]
        dist.broadcast_object_list(word, src=0)
        if word[0] is None:
            return
        getattr(rank, word[0])()


def lead(rank):
    for line in sys.stdin:
        dist.broadcast_object_list([line.strip()], src=0)
        print(" ".join("%.9f" % s for s in getattr(rank, line.strip())()), flush=True)
    dist.broadcast_object_list([None], src=0)


def main():
    folder, size, world, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    number = int(os.environ.get("DCP_RANK", "0"))
    others = []
    if number == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = "127.0.0.1:%d" % probe.getsockname()[1]
        for other in range(1, world):
            others.append(subprocess.Popen([sys.executable] + sys.argv, stdin=subprocess.DEVNULL,
                                           env=dict(os.environ, DCP_RANK=str(other), DCP_ADDRESS=address)))
    else:
        address = os.environ["DCP_ADDRESS"]
    rank = Rank(folder, size, world, mode, number, address)
    (lead if number == 0 else follow)(rank)
    rank.close()
    for other in others:
        other.wait(timeout=60)


if __name__ == "__main__":
    main()

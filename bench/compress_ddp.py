"""The peers of bench_compress: a rank of PyTorch's DistributedDataParallel over Gloo, with one thread.

usage: compress_ddp.py RANK RANKS ADDRESS METHOD SETTLE STEPS FILE
METHOD is dense, fp16 or powersgd (rank 1). Rank 0 writes FILE: the median of the seconds of a step, and of a step
without any communication.
"""
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

LAYERS, WIDTH, BATCH = 13, 698, 32  # 6.33 M parameters, as in compress.cc


def timed(step, settle, steps):
    seconds = []
    for i in range(settle + steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        if i >= settle:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main():
    rank, ranks, address, method, settle, steps, path = sys.argv[1:]
    rank, ranks, settle, steps = int(rank), int(ranks), int(settle), int(steps)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    data, loss = torch.randn(BATCH, WIDTH), torch.nn.MSELoss()
    alone = timed(lambda: loss(model(data), data).backward(), 3, 9)

    dist.init_process_group('gloo', init_method='tcp://%s:4100' % address, rank=rank, world_size=ranks)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if method == 'fp16':
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if method == 'powersgd':
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    seconds = timed(lambda: loss(ddp(data), data).backward(), settle, steps)
    if rank == 0:
        with open(path, 'w') as out:
            out.write('%.6f %.6f\n' % (seconds, alone))
    dist.barrier()


if __name__ == '__main__':
    main()

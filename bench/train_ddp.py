"""The peers of bench_train: a rank of PyTorch's DistributedDataParallel over Gloo, with one thread. The model,
samples and optimiser are those of train.cc and examples/char_lm.

usage: train_ddp.py RANK ADDRESS METHOD TEXT FILE
METHOD is dense, fp16 or powersgd (rank 1). Rank 0 writes FILE: seconds and steps until the loss was reached.
"""
import sys
import time

import numpy
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

RANKS, SEED, STEPS_MAX, WINDOW, SAMPLES, RATE, MOMENTUM, TARGET = 2, 1, 3000, 10, 64, 0.1, 0.9, 2.2
CONTEXT, EMBEDDING, HIDDEN, CLASSES = 16, 24, 384, 64
WORD = (1 << 64) - 1


def mix(z):
    z = (z + 0x9e3779b97f4a7c15) & WORD
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9 & WORD
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb & WORD
    return z ^ (z >> 31)


def read(path):
    characters = numpy.fromfile(path, dtype=numpy.uint8)
    times = numpy.bincount(characters, minlength=256)
    class_of = numpy.empty(256, dtype=numpy.int64)
    class_of[numpy.argsort(-times, kind='stable')] = numpy.minimum(numpy.arange(256), CLASSES - 1)
    return torch.from_numpy(class_of[characters])


def make_model():
    model = torch.nn.Sequential(torch.nn.Embedding(CLASSES, EMBEDDING), torch.nn.Flatten(),
                                torch.nn.Linear(CONTEXT * EMBEDDING, HIDDEN), torch.nn.ReLU(),
                                torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.kaiming_normal_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    return model


def main():
    rank, address, method, path, out = sys.argv[1:]
    rank = int(rank)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    text = read(path)
    positions = len(text) // 20 * 19 - CONTEXT
    dist.init_process_group('gloo', init_method='tcp://%s:4100' % address, rank=rank, world_size=RANKS)
    if method == 'powersgd':
        # One bucket: with several, ranks start the hook's all-reduces in different orders sooner or later, and hang.
        dist._DEFAULT_FIRST_BUCKET_BYTES = 25 << 20
    ddp = torch.nn.parallel.DistributedDataParallel(make_model())
    if method == 'fp16':
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if method == 'powersgd':
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimiser = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=MOMENTUM)
    along = torch.arange(CONTEXT)
    dist.barrier()
    start = time.perf_counter()
    loss_sum = torch.zeros(1, dtype=torch.float64)
    for step in range(1, STEPS_MAX + 1):
        of_step = mix(mix(SEED) ^ step)
        at = torch.tensor([mix(of_step ^ (i + SAMPLES * rank)) % positions for i in range(SAMPLES)])
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(text[at[:, None] + along]), text[at + CONTEXT])
        loss.backward()
        optimiser.step()
        loss_sum += loss.item() / (RANKS * WINDOW)
        if step % WINDOW != 0:
            continue
        dist.all_reduce(loss_sum)
        if loss_sum.item() <= TARGET:
            if rank == 0:
                with open(out, 'w') as file:
                    file.write('%.4f %d\n' % (time.perf_counter() - start, step))
            break
        loss_sum.zero_()
    dist.barrier()


if __name__ == '__main__':
    main()

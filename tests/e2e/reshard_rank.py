"""A rank that restores the state of an earlier world under its own layout, checks every bit of it, and saves it on.

  --mesh dp=4,tp=2   the axes; weights are split by columns over tp, optimizer state over dp as well, the table by rows
                     into boxes without a rule, and a mask over the first axis as torch.chunk cuts it
  --step N           N = 1 makes the state up; a later N restores N - 1. Then saves N
Prints "rank N: bytes N, read N, peak N": of this rank's state, from storage, and of memory that the restore took on top.
"""
import argparse
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'python'))

import gtrain  # noqa: E402
import numpy as np  # noqa: E402

SHAPES = {'w': (1501, 2003), 'm': (1501, 2003), 'v': (1501, 2003), 'bias': (2003,), 'table': (100, 7), 'mask': (10,)}


def whole(name):
    count = int(np.prod(SHAPES[name]))
    if name == 'mask':
        return np.arange(count) % 3 == 0
    bits = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(9)
    return (bits | np.uint32(0x3f800000 + (ord(name[0]) << 8))).view(np.float32).reshape(SHAPES[name])


def memory(which):
    with open('/proc/self/status') as status:
        return int(re.search(rf'{which}:\s+(\d+) kB', status.read()).group(1)) * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--mesh', required=True)
    parser.add_argument('--step', type=int, required=True)
    args = parser.parse_args()
    mesh = gtrain.Mesh(**{name: int(size) for name, size in (axis.split('=') for axis in args.mesh.split(','))})
    columns = [(1, 'tp')] if 'tp' in mesh.axes else []
    splits = {'w': columns, 'm': columns + [(0, 'dp')], 'v': [(0, 'dp')], 'bias': [], 'mask': [(0, 'dp', 'chunk')]}
    with gtrain.Session() as session, gtrain.Checkpointer(session) as checkpointer:
        boxes = {name: mesh.box(SHAPES[name], session.rank, split) for name, split in splits.items()}
        # Rank 1 holds what rank 0 does, others ever more rows and the last one the rest.
        at = [0, 0] + [rank * rank for rank in range(1, session.world_size - 1)] + [100]
        first = 2 if session.rank == 0 and session.world_size > 1 else session.rank + 1
        boxes['table'] = (slice(at[first - 1], at[first]), slice(0, 7))
        right = {name: np.ascontiguousarray(whole(name)[boxes[name]]) for name in SHAPES}
        mine = {name: part.copy() if args.step == 1 else np.ones_like(part) for name, part in right.items()}
        for name, split in splits.items():
            checkpointer.sharded(name, mine[name], SHAPES[name], mesh, split=split)
        checkpointer.boxed('table', mine['table'], SHAPES['table'], begin=(boxes['table'][0].start, 0))
        loader = [session.rank] * 100 * args.step  # longer in each step
        found = []
        checkpointer.bytes('loader', save=lambda: bytes(loader), load=found.append)
        with open('/proc/self/clear_refs', 'w') as peak:
            peak.write('5')  # VmHWM counts from here
        before = memory('VmRSS')
        step = checkpointer.restore()
        more = memory('VmHWM') - before
        assert step == (None if args.step == 1 else args.step - 1), step
        assert all(data == bytes([session.rank]) * 100 * step for data in found), found
        for name in SHAPES:
            assert mine[name].tobytes() == right[name].tobytes(), f'{name} is not bit-identical'
        if step is not None:
            held = sum(part.nbytes for part in mine.values()) + sum(map(len, found))
            needed, read = checkpointer.restored_bytes
            assert needed == held, (needed, held)
            print(f'rank {session.rank}: bytes {needed}, read {read}, peak {more}', flush=True)
        assert checkpointer.save(args.step)
        checkpointer.wait()


main()

"""A rank that restores the state of an earlier world under its own layout, checks every bit of it, and saves it on.

  --mesh dp=4,tp=2   the axes; weights are split by columns over tp, optimizer state over dp as well
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

SHAPES = {'w': (1501, 2003), 'm': (1501, 2003), 'v': (1501, 2003), 'bias': (2003,)}


def whole(name):
    count = int(np.prod(SHAPES[name]))
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
    splits = {'w': columns, 'm': columns + [(0, 'dp')], 'v': [(0, 'dp')], 'bias': []}
    with gtrain.Session() as session, gtrain.Checkpointer(session) as checkpointer:
        boxes = {name: mesh.box(shape, session.rank, splits[name]) for name, shape in SHAPES.items()}
        right = {name: np.ascontiguousarray(whole(name)[boxes[name]]) for name in SHAPES}
        mine = {name: part.copy() if args.step == 1 else np.ones_like(part) for name, part in right.items()}
        for name, shape in SHAPES.items():
            checkpointer.sharded(name, mine[name], shape, mesh, split=splits[name])
        with open('/proc/self/clear_refs', 'w') as peak:
            peak.write('5')  # VmHWM counts from here
        before = memory('VmRSS')
        step = checkpointer.restore()
        more = memory('VmHWM') - before
        assert step == (None if args.step == 1 else args.step - 1), step
        for name in SHAPES:
            assert mine[name].tobytes() == right[name].tobytes(), f'{name} is not bit-identical'
        if step is not None:
            held = sum(part.nbytes for part in mine.values())
            needed, read = checkpointer.restored_bytes
            assert needed == held, (needed, held)
            print(f'rank {session.rank}: bytes {needed}, read {read}, peak {more}', flush=True)
        assert checkpointer.save(args.step)
        checkpointer.wait()


main()

"""A rank that is lost right after a save, for writer_test.py; in its next generation it says what it resumed.

  --out DIR          where it leaves saved.RANK once Save(2) returned, and looks for files of the test
  --die RANKS|all    these ranks end themselves 10 ms after Save(2) had returned on all ranks
  --signal NAME      by this signal
  --hold             before Save(2) leaves ready.RANK and waits for DIR/go; then waits for DIR/die instead of 10 ms
"""
import argparse
import os
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'python'))

import gtrain  # noqa: E402
import numpy as np  # noqa: E402

COUNT = 4 << 20  # floats: what hashing and writing them takes is much longer than a snapshot


def wait_for(path):
    deadline = time.monotonic() + 300
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            sys.exit(f'{path} did not come')
        time.sleep(0.001)


def first(args, session, checkpointer, weights, mine):
    def leave(name):
        open(os.path.join(args.out, f'{name}.{session.rank}'), 'w').close()

    for step in (1, 2):
        weights[:] = np.arange(COUNT, dtype=np.float32) + step
        mine[:] = 100 * step + session.rank
        if step == 2 and args.hold:
            leave('ready')
            wait_for(os.path.join(args.out, 'go'))
        assert checkpointer.save(step)
        session.report(step)
        if step == 1:
            checkpointer.wait()
    leave('saved')
    weights[:] = -1
    mine[:] = -1
    if args.die == 'all' or str(session.rank) in args.die.split(','):
        for rank in range(session.world_size):
            wait_for(os.path.join(args.out, f'saved.{rank}'))
        if args.hold:
            wait_for(os.path.join(args.out, 'die'))
        else:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, 'SIG' + args.signal))
    while True:  # the others learn of it
        session.barrier()
        time.sleep(0.001)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', required=True)
    parser.add_argument('--die', required=True)
    parser.add_argument('--signal', default='SEGV')
    parser.add_argument('--hold', action='store_true')
    args = parser.parse_args()
    gtrain.set_log(lambda level, text: print(text, file=sys.stderr, flush=True))
    weights, mine = np.zeros(COUNT, dtype=np.float32), np.zeros(5, dtype=np.int64)
    try:
        with gtrain.Session() as session, gtrain.Checkpointer(session) as checkpointer:
            checkpointer.replicated({'weights': weights})
            checkpointer.per_rank('mine', mine)
            step = checkpointer.restore()
            if step is None:
                first(args, session, checkpointer, weights, mine)
            assert np.array_equal(weights, np.arange(COUNT, dtype=np.float32) + step), step
            assert np.all(mine == 100 * step + session.rank), (step, mine)
            print(f'rank {session.rank}: resumed {step}', flush=True)
    except gtrain.Unavailable as error:
        print(f'rank left: {error}', file=sys.stderr)
        sys.exit(gtrain.EXIT_RUN_ME_AGAIN)
    finally:
        gtrain.set_log(None)


main()

"""A rank that trains nothing but writes down which samples it was given, for ledger_test.py.

  --out DIR     a line a step in DIR/trained.RANK: generation, step, epoch, then the numbers of its samples; and
                DIR/pid.GENERATION.RANK
  --until FILE  the last epoch is begun when FILE exists
  --forget      does not save where it is in its data
"""
import argparse
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'python'))

import gtrain  # noqa: E402
import numpy as np  # noqa: E402

SAMPLES, EPOCHS, BATCH = 997, 3, 24


def train(args, session):
    seen = np.zeros(1, dtype=np.int64)
    with gtrain.Checkpointer(session, uri='unused', every_steps=5) as checkpointer:
        data = gtrain.Samples(session, samples=SAMPLES, epochs=EPOCHS, global_batch=BATCH, seed=3)
        checkpointer.replicated(seen=seen)
        if not args.forget:
            checkpointer.add_samples(data)
        checkpointer.restore()
        with open(os.path.join(args.out, f'trained.{session.rank}'), 'a', buffering=1) as out:
            while not data.done:
                epoch = data.epoch
                if epoch == EPOCHS - 1 and data.offset == 0:
                    deadline = time.monotonic() + 300
                    while not os.path.exists(args.until) and time.monotonic() < deadline:
                        session.barrier()
                        time.sleep(0.01)
                mine = data.next()
                total = np.array([len(mine)], dtype=np.int64)
                session.all_reduce(total)
                assert total[0] == data.total, (total, data.total)
                seen += total
                out.write(f'{session.generation} {data.step} {epoch} {" ".join(map(str, mine))}\n')
                session.report(data.step, samples=len(mine))
                checkpointer.save_if_due(data.step)
                if checkpointer.stop_agreed:
                    break
                time.sleep(0.01)
        checkpointer.wait()
        checkpointer.save(data.step)
        checkpointer.wait()
        assert not data.done or args.forget or seen[0] == SAMPLES * EPOCHS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', required=True)
    parser.add_argument('--until', required=True)
    parser.add_argument('--forget', action='store_true')
    args = parser.parse_args()
    try:
        with gtrain.Session() as session:
            with open(os.path.join(args.out, f'pid.{session.generation}.{session.rank}'), 'w') as out:
                out.write(str(os.getpid()))
            train(args, session)
    except gtrain.Unavailable:
        sys.exit(gtrain.EXIT_RUN_ME_AGAIN)


if __name__ == '__main__':
    main()

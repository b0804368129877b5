"""One rank of elastic_test.py: adds the ranks' numbers at each step, and keeps its process from generation to generation.

With --late, a process that is started after the first generation comes up when there is DIR/come; with a word in it, it ends.
DIR/life.PID has a line for each generation that the process joined: generation, rank, ranks, the step it had before, that
at which it went on, seconds since it heard that the generation before was over. DIR/step.PID has the last step."""
import os
import sys
import time

if '--late' in sys.argv and os.environ['GTRAIN_GENERATION'] != '1':
    due = time.monotonic() + 300
    while not os.path.exists(os.path.join(sys.argv[1], 'come')):
        if time.monotonic() > due:
            sys.exit('nobody let this process come up within 300 s')
        time.sleep(0.01)  # between two looks
    with open(os.path.join(sys.argv[1], 'come')) as come:
        if word := come.read():
            sys.exit(word)

import numpy as np

import gtrain

folder, pause = sys.argv[1], float(sys.argv[2])


def write(name, text, mode='w'):
    with open(os.path.join(folder, f'{name}.{os.getpid()}'), mode) as out:
        out.write(text)


with gtrain.Session(stay='--restart' not in sys.argv) as session:
    step, over = 0, time.monotonic()
    while True:
        try:
            had = step
            newest = np.array([step], dtype=np.int64)
            session.all_reduce(newest, op='max')  # who is behind takes what the others have
            step = int(newest[0])
            write('life', f'{session.generation} {session.rank} {session.world_size} {had} {step} {time.monotonic() - over:.4f}\n', 'a')
            while True:
                data = np.full(1000, session.rank + 1, dtype=np.float32)
                session.all_reduce(data)
                assert data[0] == data[999] == session.world_size * (session.world_size + 1) / 2, (data, session.world_size)
                step += 1
                write('step', str(step))
                session.report(step=step)
                done = np.array([int(os.path.exists(os.path.join(folder, 'go')) or session.stop_requested)], dtype=np.int64)
                session.all_reduce(done, op='max')
                if done[0]:
                    sys.exit(0)
                time.sleep(pause)
        except gtrain.Unavailable as error:
            over = time.monotonic()
            print(f'generation {session.generation} is over at step {step}: {error}', flush=True)
            try:
                session.rejoin(60)
            except gtrain.Unavailable:
                sys.exit(gtrain.EXIT_RUN_ME_AGAIN)

"""A training program without training: steps, reports, keeps its own checkpoint, and fails when told to.

Per rank it leaves in --out:  pid.<generation>.<rank>, step.<rank> (last step done), env.<generation>.<rank> (JSON).
It resumes after step.<rank>, so that a test can tell a resume from a fresh start.
  --steps N            steps to do (100)
  --step-seconds S     length of one (0.05)
  --until FILE         no fixed number of steps: stop after a step when FILE exists
  --escape             print a line of escape codes, as a hostile or careless program would
  --checkpoints        report every fifth step as a committed checkpoint
  --hold FILE          after the last step wait until FILE exists
  --crash RANK:STEP    that rank exits 7 before that step, once (every time with --always)
  --deaf               ignore SIGTERM
  --on-notice          on SIGUSR1: write noticed.<generation>.<rank> (the seconds left), report the next step as a checkpoint
  --slow-stop          on SIGTERM: write stopped.<rank>, then exit 0
"""
import argparse
import json
import os
import select
import signal
import sys


def write(path, text):
    with open(path + '.new', 'w') as out:
        out.write(text)
    os.rename(path + '.new', path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', required=True)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--step-seconds', type=float, default=0.05)
    parser.add_argument('--hold')
    parser.add_argument('--until')
    parser.add_argument('--checkpoints', action='store_true')
    parser.add_argument('--escape', action='store_true')
    parser.add_argument('--crash')
    parser.add_argument('--always', action='store_true')
    parser.add_argument('--slow-stop', action='store_true')
    parser.add_argument('--deaf', action='store_true')
    parser.add_argument('--on-notice', action='store_true')
    options = parser.parse_args()
    rank = int(os.environ['RANK'])
    generation = os.environ['GTRAIN_GENERATION']

    def place(name):
        return os.path.join(options.out, name)

    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    noticed = []
    if options.on_notice:
        def notice(number, frame):
            with open(os.environ['GTRAIN_NOTICE_FILE']) as left:
                write(place(f'noticed.{generation}.{rank}'), left.read())
            noticed.append(True)
        signal.signal(signal.SIGUSR1, notice)
    if options.slow_stop:
        def stop(number, frame):
            write(place(f'stopped.{rank}'), generation)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)

    write(place(f'env.{generation}.{rank}'), json.dumps(dict(os.environ)))
    write(place(f'pid.{generation}.{rank}'), str(os.getpid()))
    step = 0
    if os.path.exists(place(f'step.{rank}')):
        with open(place(f'step.{rank}')) as data:
            step = int(data.read())
    print(f'rank {rank} generation {generation} starts after step {step}', flush=True)
    if options.escape:
        print('\x1b[2J\x1b[31mred\x1b]0;title\x07', flush=True)
    report = open(os.environ['GTRAIN_REPORT'], 'a', buffering=1)
    while not os.path.exists(options.until) if options.until else step < options.steps:
        step += 1
        select.select([], [], [], options.step_seconds)
        if options.crash == f'{rank}:{step}':
            once = place('crashed')
            if options.always or not os.path.exists(once):
                write(once, generation)
                print(f'rank {rank} crashes as told before step {step}', file=sys.stderr, flush=True)
                os._exit(7)
        write(place(f'step.{rank}'), str(step))
        said = {'step': step, 'loss': 1.0 / step, 'samples': 8}
        if (options.checkpoints and step % 5 == 0) or noticed:
            said['checkpoint'] = True
            noticed.clear()
        report.write(json.dumps(said) + '\n')
    while options.hold and not os.path.exists(options.hold):
        select.select([], [], [], 0.05)
    print(f'rank {rank} done at step {step}', flush=True)


if __name__ == '__main__':
    main()

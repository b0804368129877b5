#!/usr/bin/env python3
"""Measures ratios again that bench/baseline.json holds, and fails when one has grown beyond what both runs scatter.

usage: bench_gate.py BUILD_FOLDER [--turns N] [--only BENCH[,BENCH]] [--record]
  --turns   how often each bench runs (5); a row's ratio is the median of its turns
  --only    these benches of those in the file (with --record: of GATED)
  --record  writes what was measured into the file instead of comparing

A ratio is ours over the peer's of the same run, smaller is better, so it says the same on a fast and on a slow machine. Its
spread is half of what lies between the lowest and the highest turn. A row fails when its median exceeds the recorded one by
more than both spreads and by at least a tenth. Run it on a machine that does nothing else: `make bench-gate`.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..'))
BASELINE = os.path.join(ROOT, 'bench', 'baseline.json')
GATED = ['agents', 'launch', 'allreduce', 'codec']
SECONDS = 90
LEAST = 0.1


def run(build, bench):
    """Name of a row -> its ratio, of one run."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, 'report.json')
        try:
            done = subprocess.run([os.path.join(build, 'bin', 'bench_' + bench), '--quick', '--json', report],
                                  timeout=SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f'bench-gate: {error}; build it (make build) and leave the machine to it') from None
        if done.returncode != 0:
            raise SystemExit(f'bench-gate: bench_{bench} failed: {done.stderr.strip()}')
        with open(report, encoding='utf-8') as data:
            rows = json.load(data)['results']
    return {f'{row["name"]}, beside {row["peer"]}': row['ratio'] for row in rows if row.get('peer')}


def measure(build, benches, turns):
    found = {}
    for turn in range(turns):
        for bench in benches:
            print(f'turn {turn + 1} of {turns}: bench_{bench}', flush=True)
            for name, ratio in run(build, bench).items():
                found.setdefault(bench, {}).setdefault(name, []).append(ratio)
    return {bench: {name: {'ratio': round(statistics.median(ratios), 4),
                           'spread': round((max(ratios) - min(ratios)) / 2, 4)}
                    for name, ratios in rows.items() if len(ratios) == turns}
            for bench, rows in found.items()}


def compare(before, now):
    """The rows that grew, and those which are not measured any more."""
    failed = []
    for bench, rows in before.items():
        for name, old in rows.items():
            new = now.get(bench, {}).get(name)
            if new is None:
                failed.append(f'{bench}: {name}: is not measured any more')
                print(f'{"gone":>6}  {bench}: {name}')
                continue
            allowed = max(old['spread'] + new['spread'], LEAST * old['ratio'])
            worse = new['ratio'] > old['ratio'] + allowed
            print(f'{"WORSE" if worse else "ok":>6}  {bench}: {name}: {old["ratio"]:.3f} -> {new["ratio"]:.3f} (allowed: '
                  f'{allowed:.3f} more)')
            if worse:
                failed.append(f'{bench}: {name}')
    return failed


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split('usage: ')[1].split('\n')[0])
    parser.add_argument('build')
    parser.add_argument('--turns', type=int, default=5)
    parser.add_argument('--only', default='')
    parser.add_argument('--record', action='store_true')
    options = parser.parse_args()
    if options.turns < 2:
        parser.error('a spread takes two turns')
    before = {}
    if os.path.exists(BASELINE):
        with open(BASELINE, encoding='utf-8') as data:
            before = json.load(data)['benches']
    known = GATED if options.record else list(before)
    benches = options.only.split(',') if options.only else known
    if unknown := set(benches) - set(known):
        parser.error(f'no such bench: {", ".join(sorted(unknown))}; there are {", ".join(known)}')
    now = measure(options.build, benches, options.turns)
    if options.record:
        with open(BASELINE, 'w', encoding='utf-8') as data:
            json.dump({'turns': options.turns, 'benches': {**before, **now}}, data, indent=1, sort_keys=True)
            data.write('\n')
        print(f'bench-gate: recorded {", ".join(now)} in {os.path.relpath(BASELINE)}')
        return 0
    failed = compare({bench: before[bench] for bench in benches}, now)
    print(f'bench-gate: {"FAILED: " + "; ".join(failed) if failed else "nothing has become worse"}')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""Measures ratios again that bench/baseline.json holds, and fails when one has grown beyond what both runs scatter.

usage: bench_gate.py BUILD_FOLDER [--turns N] [--only BENCH[,BENCH]] [--record]
  --turns   how often each bench runs (5); a row's ratio is the median of its turns
  --only    these benches of those in the file (with --record: of GATED)
  --record  writes what was measured into the file instead of comparing

A ratio is ours over the peer's of the same run, smaller is better, so it says the same on a fast and on a slow machine. Its
spread is half of what lies between the second lowest and the second highest turn. A row fails when its median exceeds the
recorded one by more than three recorded spreads, which count as a tenth at least and as a half at most; when it scatters
more than that itself, so that nothing can be said; and when it is in one of the two only. A row that scattered more than that
when it was recorded is printed and gates nothing ("loose"): no run on the same tree could pass it. Run it on a machine that
does nothing else: `make bench-gate`.
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
LEAST, MOST = 0.1, 0.5  # of the recorded ratio, what it may grow by


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


def spread(ratios):
    inner = sorted(ratios)[1:-1] if len(ratios) >= 4 else ratios
    return (max(inner) - min(inner)) / 2


def measure(build, benches, turns):
    found = {}
    for turn in range(turns):
        for bench in benches:
            print(f'turn {turn + 1} of {turns}: bench_{bench}', flush=True)
            for name, ratio in run(build, bench).items():
                found.setdefault(bench, {}).setdefault(name, []).append(ratio)
    for bench, rows in found.items():
        for name, ratios in rows.items():
            if len(ratios) != turns:
                raise SystemExit(f'bench-gate: {bench}: {name} was measured in {len(ratios)} of {turns} turns')
    return {bench: {name: {'ratio': round(statistics.median(ratios), 4), 'spread': round(spread(ratios), 4)}
                    for name, ratios in rows.items()} for bench, rows in found.items()}


def verdict(old, new):
    """'ok', 'loose', 'WORSE', 'noisy', 'gone' or 'new', and how much more than `old` is allowed."""
    if new is None:
        return 'gone', 0
    if old is None:
        return 'new', 0
    allowed = min(max(3 * old['spread'], LEAST * old['ratio']), MOST * old['ratio'])
    if old['spread'] > allowed:
        return 'loose', allowed
    if new['ratio'] > old['ratio'] + allowed:
        return 'WORSE', allowed
    return ('noisy' if new['spread'] > allowed else 'ok'), allowed


def compare(before, now):
    """The rows that grew, that scatter too much to tell, and that are measured or recorded only."""
    failed = []
    for bench in before:
        for name in sorted({*before[bench], *now.get(bench, {})}):
            old, new = before[bench].get(name), now.get(bench, {}).get(name)
            word, allowed = verdict(old, new)
            numbers = ' -> '.join(f'{row["ratio"]:.3f} +- {row["spread"]:.3f}' if row else 'nothing' for row in (old, new))
            print(f'{word:>6}  {bench}: {name}: {numbers} (allowed: {allowed:.3f} more)')
            if word not in ('ok', 'loose'):
                failed.append(f'{bench}: {name}: {word}')
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
        loose = [f'{bench}: {name}' for bench, rows in now.items() for name, row in rows.items() if verdict(row, row)[0] == 'loose']
        if loose:
            print(f'bench-gate: these scatter too much to gate anything: {"; ".join(loose)}')
        return 0
    failed = compare({bench: before[bench] for bench in benches}, now)
    print(f'bench-gate: {"FAILED: " + "; ".join(failed) if failed else "nothing has become worse"}')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())

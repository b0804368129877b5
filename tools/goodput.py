#!/usr/bin/env python3
"""What a training job made of the machines that a spot market gave it, counted from what was applied.

    goodput.py EVENTS [--trace TRACE] [--least 0.97] [--json]
    goodput.py --table [--trace TRACE] [--sim build/bin/gtrain-sim] [--hours H] [--jobs N]

EVENTS is what `gtrain-sim --spot-trace TRACE --samples-out EVENTS` or tests/e2e/spot_test.py wrote (docs/formats/spot-run.md). This script knows
nothing else of them and shares no code with them.

    goodput = steps kept / steps that an undisturbed job with that membership would have made

Steps kept: the batches that were applied, without those that were given up because training went back behind them. Whatever goes back is
seen in the steps themselves: a batch of step k gives up all of step k and later that came before.

Membership at a time: the machines that the trace gives then and that have started up. One counts from the moment at which its start-up is
over ("up": its agent begins to run, and has yet to find its head) until the trace takes it away. With n of them an undisturbed job makes a
step in ceil(batch / n) * sample_seconds, as it would for ever with n ranks that never come or go, and with fewer than ranks_min none; those
above ranks_max count for nothing. Its steps are the integral of that over the run. So this holds against the job: that it learns late of a
loss or of a machine, that programs have to be started, that state is copied or read, that steps are lost.

With TRACE it is also checked that the machines are those of the trace: as many are given in each stretch as it says, and each start-up took
from start_min to start_max seconds.

Errors, exit code 1: a sample of an epoch is among the kept ones twice or never, a step is missing, a generation trained with a machine that
was not up, a step took less than its samples take on the ranks of a generation that are all there when it is applied, training went back
although a machine of the generation before was there all the time and had not been told that it goes (mode in-place), or less goodput than
--least."""
import argparse
import bisect
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile

TRACE = '../shared/traces/aws-v100-16node-us-west-2a-2023-08-27.json'
EPSILON = 0.0015  # seconds: times are written in milliseconds; real processes say in `tolerance` how late a note may be


class Run:
    def __init__(self, path, trace=None):
        with open(path) as lines:
            events = [json.loads(line) for line in lines]
        self.head, self.errors = events[0], []
        self.epsilon = self.head.get('tolerance', EPSILON)
        if self.head.get('spot_run') != 1:
            sys.exit(f'goodput: {path} does not begin with {{"spot_run":1,..: it was not written by a spot run')
        self.nodes = [event for event in events if 'node' in event]
        self.begins = [event for event in events if 'begins_behind' in event]
        self.batches = [event for event in events if 'first' in event]
        ends = [event['at'] for event in events if 'end' in event]
        if not ends:
            sys.exit(f'goodput: {path} has no end: the run was cut off')
        self.end = ends[-1]
        self.lives, self.told = {}, {}  # node -> [given, up, gone]; when it heard that it goes
        for event in self.nodes:
            if event['is'] == 'told':
                self.told[event['node']] = event['at']
                continue
            place = ('given', 'up', 'gone').index(event['is'])
            self.lives.setdefault(event['node'], [None, None, None])[place] = event['at']
        self.kept = self.keep()
        self.check_ledger()
        self.check_generations()
        if trace:
            self.check_trace(trace)

    def error(self, text):
        self.errors.append(text)

    def step_seconds(self, ranks):
        return -(-self.head['batch'] // ranks) * self.head['sample_seconds']

    def keep(self):
        kept = []
        for batch in self.batches:
            while kept and kept[-1]['step'] >= batch['step']:
                kept.pop()
            kept.append(batch)
        return kept

    def check_ledger(self):
        epoch, position = 0, 0
        for step, batch in enumerate(self.kept, 1):
            if batch['step'] != step:
                return self.error(f'step {step} is not among the kept ones: the next is {batch}')
            if (batch['epoch'], batch['first']) != (epoch, position):
                return self.error(f'of epoch {epoch} the sample at {position} is next, and step {step} has {batch}: '
                                  'one was trained twice or never')
            position += batch['count']
            if position > self.head['samples'] or batch['count'] < 1:
                return self.error(f'step {step} has samples that there are not: {batch}')
            if position == self.head['samples']:
                epoch, position = epoch + 1, 0
            elif batch['count'] != self.head['batch']:
                return self.error(f'step {step} is short in the middle of an epoch: {batch}')

    def was_up(self, node, since, until):
        given, up, gone = self.lives.get(node, (None, None, None))
        return up is not None and up <= since + self.epsilon and (gone is None or gone >= until - self.epsilon)

    def could_compute(self, begin, batch, computing):
        """By one generation's ranks, which are all in the one that applies it: others that come meanwhile undo nothing of it."""
        return any(nodes <= set(begin['nodes']) and batch['at'] - since >= self.step_seconds(len(nodes)) - self.epsilon
                   for nodes, since in computing)

    def check_generations(self):
        numbers = [begin['generation'] for begin in self.begins]
        if numbers != sorted(set(numbers)):
            return self.error('generations do not follow one another')
        self.rollbacks, self.lost, steps = 0, 0, iter(self.batches)
        batch = next(steps, None)
        # Those that may have computed the next step since then: a generation, and those before it that have the same step behind them.
        before, newest, computing = None, 0, []
        for index, begin in enumerate(self.begins):
            for node in begin['nodes']:
                if not self.was_up(node, begin['at'], begin['at']):
                    self.error(f'node {node} trains in generation {begin["generation"]} at {begin["at"]} and is not up')
            if begin['begins_behind'] < newest:
                self.rollbacks += 1
                self.lost += newest - begin['begins_behind']
                stayed = [node for node in (before or {'nodes': []})['nodes']
                          if self.was_up(node, before['at'], begin['at']) and self.told.get(node, begin['at']) >= begin['at']]
                if self.head['mode'] == 'in-place' and stayed:
                    self.error(f'generation {begin["generation"]} goes back from step {newest} to {begin["begins_behind"]} although '
                               f'nodes {stayed} of the generation before were there all the time')
            if begin['begins_behind'] != newest:
                computing = []
            computing.append((set(begin['nodes']), begin['at']))
            newest = begin['begins_behind']
            while batch and batch['generation'] == begin['generation']:
                if batch['step'] != newest + 1:
                    self.error(f'generation {begin["generation"]} makes step {batch["step"]} behind step {newest}')
                if batch['ranks'] != len(begin['nodes']) or not self.could_compute(begin, batch, computing):
                    self.error(f'step {batch["step"]} was made {batch["at"] - computing[0][1]:.3f} s after what came before, which is less '
                               f'than its samples take, or by other ranks than its generation has')
                gone = [node for node in begin['nodes'] if not self.was_up(node, begin['at'], batch['at'])]
                if gone:
                    self.error(f'step {batch["step"]} was made at {batch["at"]} with nodes {gone}, which are not up then')
                newest, computing = batch['step'], [(set(begin['nodes']), batch['at'])]
                batch = next(steps, None)
                if len(self.errors) > 10:
                    return
            before = begin
        if batch:
            self.error(f'{batch} belongs to no generation that began')

    def check_trace(self, path):
        with open(path) as text:
            trace = json.load(text)
        gap, wanted = trace['metadata']['gap_seconds'], trace['data']
        if gap != self.head['gap']:
            return self.error(f'the trace has ticks of {gap} s, the run of {self.head["gap"]} s')
        given = sorted(life[0] for life in self.lives.values())
        gone = sorted(life[2] for life in self.lives.values() if life[2] is not None)
        for tick, count in enumerate(wanted):
            at = tick * gap
            if at >= self.end - self.epsilon:
                break
            for when in (at + self.epsilon, min(at + gap, self.end) - self.epsilon):
                have = bisect.bisect(given, when) - bisect.bisect(gone, when)
                if have != count:
                    return self.error(f'at {when:.1f} s there are {have} nodes, and the trace says {count}')
        for node, (came, up, _) in self.lives.items():
            if up is not None and not self.head['start_min'] - self.epsilon <= up - came <= self.head['start_max'] + self.epsilon:
                self.error(f'node {node} started up within {up - came:.3f} s')

    def possible(self):
        """Steps of an undisturbed job, and the seconds in which it had ranks enough."""
        changes = sorted([(up, 1) for _, up, _ in self.lives.values() if up is not None] +
                         [(gone, -1) for _, up, gone in self.lives.values() if up is not None and gone is not None])
        steps, seconds, ranks, since = 0.0, 0.0, 0, 0.0
        for at, change in changes + [(self.end, 0)]:
            if ranks >= self.head['ranks_min']:
                steps += (at - since) / self.step_seconds(min(ranks, self.head['ranks_max']))
                seconds += at - since
            ranks, since = ranks + change, at
        return steps, seconds

    def report(self):
        possible, seconds = self.possible()
        if len(self.kept) > possible * 1.01 + 2:
            self.error(f'{len(self.kept)} steps were kept, and {possible:.1f} are possible with the machines that there were')
        return {'mode': self.head['mode'], 'seconds': self.end, 'seconds_with_ranks': round(seconds, 3),
                'node_losses': sum(life[2] is not None for life in self.lives.values()), 'generations': len(self.begins),
                'steps_applied': len(self.batches), 'steps_kept': len(self.kept), 'rollbacks': self.rollbacks,
                'steps_given_up': len(self.batches) - len(self.kept), 'steps_possible': round(possible, 1),
                'goodput': round(len(self.kept) / possible, 4) if possible else None, 'errors': self.errors}


def words(report):
    return (f'{report["mode"]}: goodput {report["goodput"]}: {report["steps_kept"]} steps kept of {report["steps_possible"]:.0f} possible; '
            f'{report["steps_given_up"]} given up when training went back {report["rollbacks"]} times; {report["generations"]} generations, '
            f'{report["node_losses"]} nodes lost in {report["seconds"] / 3600:.1f} h')


TABLE = [('in place', ['--mode', 'in-place']), ('plain restart', ['--mode', 'restart']),
         ('in place, checkpoints of 5 minutes', ['--mode', 'in-place', '--checkpoint-every', '5m']),
         ('restart with 5 minutes of checkpoints', ['--mode', 'restart', '--checkpoint-every', '5m'])]


def table(options):
    """The rows differ in `elastic.mode` and in how often checkpoints are made; each with and without the cloud's notice."""
    if not os.path.exists(options.trace):
        print(f'goodput: skipped: the trace {options.trace} is not here')
        return 0
    print('| job | checkpoints | notice | goodput | steps kept | given up | possible | generations |\n|---|---|---|---|---|---|---|---|', flush=True)
    rows = [(name, [*flags, *notice]) for notice in ([], ['--notice', '120s']) for name, flags in TABLE]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        reports = pool.map(lambda row: play(options, row[1]), rows)
        errors = [error for (name, flags), report in zip(rows, reports) for error in show(name, flags, report)]
    for error in errors:
        print(f'goodput: {error}', file=sys.stderr)
    return 1 if errors else 0


def play(options, flags):
    with tempfile.NamedTemporaryFile(suffix='.jsonl') as events:
        subprocess.run([options.sim, '--spot-trace', options.trace, '--samples-out', events.name, '--seed', str(options.seed), *flags] +
                       (['--hours', str(options.hours)] if options.hours else []), check=True, stdout=subprocess.DEVNULL)
        return Run(events.name, options.trace).report()


def show(name, flags, report):
    told = dict(zip(flags[::2], flags[1::2]))
    print(f'| {name} | {told.get("--checkpoint-every", "1m")} | {told.get("--notice", "none")} | {report["goodput"]:.4f} | {report["steps_kept"]:,} | '
          f'{report["steps_given_up"]:,} | {report["steps_possible"]:,.0f} | {report["generations"]} |', flush=True)
    return [f'{name}: {error}' for error in report['errors']]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('events', nargs='?')
    parser.add_argument('--trace')
    parser.add_argument('--least', type=float, default=0)
    parser.add_argument('--json', action='store_true')
    parser.add_argument('--table', action='store_true')
    parser.add_argument('--sim', default='build/bin/gtrain-sim')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--hours', type=int)
    parser.add_argument('--jobs', type=int, default=2)
    options = parser.parse_args()
    if options.table:
        options.trace = options.trace or TRACE
        return table(options)
    if not options.events:
        parser.error('name the EVENTS of a run, or --table')
    report = Run(options.events, options.trace).report()
    print(json.dumps(report) if options.json else words(report))
    for error in report['errors']:
        print(f'goodput: {error}', file=sys.stderr)
    if (report['goodput'] or 0) < options.least:
        print(f'goodput: {report["goodput"]} is less than {options.least}', file=sys.stderr)
        return 1
    return 1 if report['errors'] else 0


if __name__ == '__main__':
    sys.exit(main())

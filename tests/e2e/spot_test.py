"""A job in place on machines that a spot market gives and takes, with real processes; counted by tools/goodput.py.

A machine is an agent with a key and a folder of its own; when it goes all of its processes get SIGKILL at once. Unlike one that loses its
power its connections end, which others see at once. Time runs faster than in the trace: a tick and a start-up are that much shorter, and
nothing of gtrain is. Computing is emulated by sleeping (spot_rank.cc)."""
import json
import os
import random
import signal
import sys
import threading
import time
import unittest

import cluster
import harness
from harness import SOURCE, wait_until

sys.path.insert(0, os.path.join(SOURCE, 'tools'))
import goodput  # noqa: E402

RANK = os.path.join(harness.BUILD, 'tests', 'e2e_spot_rank')
RECORDED = os.path.join(SOURCE, '..', 'shared', 'traces', 'aws-v100-16node-us-west-2a-2023-08-27.json')
BATCH, SAMPLES, EPSILON = 64, 1000, 0.5


class Market:
    """Orders and takes machines as `counts` say, one element a `gap` of seconds, and writes down what it did."""

    def __init__(self, test, counts, gap, starts, rng):
        self.test, self.counts, self.gap, self.starts, self.rng = test, counts, gap, starts, rng
        self.zero, self.came, self.given, self.events, self.timers = time.monotonic(), 0, [], [], []
        self.lock = threading.Lock()

    def note(self, node, what):
        self.events.append({'at': round(time.monotonic() - self.zero, 3), 'node': node, 'is': what})

    def order(self):
        node = self.came
        self.came += 1
        self.given.append(node)
        self.note(node, 'given')
        timer = threading.Timer(self.rng.uniform(*self.starts), self.start, [node])
        self.timers.append(timer)
        timer.start()

    def start(self, node):
        with self.lock:
            if node in self.given:
                self.note(node, 'up')
                self.test.start_agent(node, '--cpus', '1', GTRAIN_JOIN_TOKEN=self.test.tokens[node])

    def take(self, nodes):
        for node in nodes:
            self.given.remove(node)
            self.note(node, 'gone')
        if nodes:
            self.test.end_machines(nodes)

    def play(self):
        for tick, count in enumerate(self.counts):
            wait_until(f'tick {tick}', lambda: time.monotonic() >= self.zero + tick * self.gap, self.gap + harness.PATIENCE)
            with self.lock:
                self.take(self.rng.sample(self.given, max(0, len(self.given) - count)))
                while len(self.given) < count:
                    self.order()
        wait_until('the end', lambda: time.monotonic() >= self.zero + len(self.counts) * self.gap, self.gap + harness.PATIENCE)
        end = time.monotonic() - self.zero
        for timer in self.timers:
            timer.cancel()
            timer.join()
        return end


@unittest.skipUnless(os.path.exists(RANK), 'e2e_spot_rank is not built')
class SpotTest(cluster.ClusterTest):
    agent_count = 0

    def end_machines(self, nodes):
        """Everything that runs below the machines' folders, also what is started meanwhile."""
        marks = [self.node_home(node).encode() + b'/' for node in nodes]
        while True:
            pids = [pid for pid in self.marked() if any(mark in harness.read_proc(pid, 'environ') for mark in marks)]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not pids:
                return

    def steps_of(self, zero):
        """pid -> its node and [(generation, rank, ranks, step, epoch, batch, first, count, at)]."""
        found = {}
        for name in os.listdir(self.out):
            lines = [line.split() for line in self.read(name).splitlines()] if name.startswith('rank.') else []
            if lines and len(lines[0]) == 2:
                steps = [tuple(map(int, line[:8])) + (int(line[8]) / 1e9 - zero,) for line in lines[1:] if len(line) == 9]
                found[int(name[5:])] = (lines[0][1], steps)
        return found

    def claims(self, lines):
        """What the processes say of a batch: ranks, epoch, size and first sample. It is cut among all ranks, or, in the first step of a
        generation, among those that are not new."""
        def of(shares):
            return {(line[2], line[4], line[5], line[6] - share * (line[5] // among) - min(share, line[5] % among))
                    for line, share, among in shares}
        trained = sorted((line for line in lines if line[7]), key=lambda line: line[6])
        all_ranks = of((line, line[1], line[2]) for line in trained)
        return all_ranks if len(all_ranks) == 1 else of((line, share, len(trained)) for share, line in enumerate(trained))

    def batches(self, found, nodes):
        """The batches of each generation in turn. What all processes say of a step is one, also those that made the update behind the end
        of the generation that computed it: they write down that one. Who came meanwhile had no part in it."""
        by_generation, events = {}, []
        for pid, (node, steps) in found.items():
            self.assertEqual([step[3] for step in steps], list(range(steps[0][3], steps[0][3] + len(steps))) if steps else [], f'process {pid}')
            for step in steps:
                by_generation.setdefault(step[0], {}).setdefault(step[3], []).append((pid, step))
        for generation, steps in sorted(by_generation.items()):
            where = [nodes[found[pid][0]] for pid in sorted({pid for lines in steps.values() for pid, _ in lines})]
            for step in [step for step, lines in steps.items() if not any(line[7] for _, line in lines)]:
                self.assertTrue(any(step in by_generation[before] for before in by_generation if before < generation), steps.pop(step))
            for step in sorted(steps):
                claims = self.claims([line for _, line in steps[step]])
                self.assertEqual(len(claims), 1, f'ranks do not agree on the batch of step {step}: {steps[step]}')
                ranks, epoch, count, begin = claims.pop()
                at = min(line[8] for _, line in steps[step])
                if step == min(steps):  # a rank that was lost before its first update left no word
                    began = at - -(-count // ranks) * self.sample_seconds
                    events.append({'at': round(began, 3), 'generation': generation, 'begins_behind': step - 1,
                                   'nodes': where + [where[0]] * (ranks - len(where))})
                events.append({'at': round(at, 3), 'generation': generation, 'ranks': ranks, 'step': step, 'epoch': epoch, 'first': begin,
                               'count': count})
        return events

    def run_spot(self, counts, gap, starts, ranks, sample_seconds, every):
        seed = int(os.environ.get('GTRAIN_SPOT_SEED') or random.SystemRandom().randrange(1 << 32))
        self.sample_seconds = sample_seconds
        self.tokens = [self.token() for _ in range(sum(max(0, now - before) for before, now in zip([0] + counts, counts)))]
        job = self.job_file('spot', f'name: spot\nrun: {RANK} {self.out} {SAMPLES} {BATCH} {round(sample_seconds * 1e6)}\n'
                                    f'ranks: {{min: {ranks[0]}, max: {ranks[1]}}}\nresources: {{cpus: 1}}\nelastic: {{mode: in-place}}\n'
                                    f'restart: {{budget: 1000}}\ncheckpoint: {{uri: {self.dir}/ckpt, every: {every}}}\n')
        self.submit(job)
        market = Market(self, counts, gap, starts, random.Random(seed))
        end = market.play()
        names = {node['hostname']: node['id'] for node in self.nodes()}
        nodes = {names[f'node{node}']: node for node in range(market.came) if f'node{node}' in names}
        found = self.steps_of(market.zero)
        head = {'spot_run': 1, 'mode': 'in-place', 'batch': BATCH, 'samples': SAMPLES, 'sample_seconds': sample_seconds, 'gap': gap,
                'ranks_min': ranks[0], 'ranks_max': ranks[1], 'start_min': starts[0], 'start_max': starts[1], 'tolerance': EPSILON}
        batches = [event for event in self.batches(found, nodes) if event['at'] <= end]
        path, trace = os.path.join(self.dir, 'events.jsonl'), os.path.join(self.dir, 'trace.json')
        with open(path, 'w') as out:
            for event in [head, *market.events, *batches, {'at': round(end, 3), 'end': True}]:
                out.write(json.dumps(event) + '\n')
        with open(trace, 'w') as out:
            json.dump({'metadata': {'gap_seconds': gap}, 'data': counts}, out)
        report = goodput.Run(path, trace).report()
        print(f'\n{goodput.words(report)}; seed {seed}', flush=True)
        if os.environ.get('GTRAIN_SPOT_EVENTS'):
            os.replace(path, os.environ['GTRAIN_SPOT_EVENTS'])
        self.client('stop', 'spot', '--now')
        self.wait_for_state('spot', 'CANCELLED')
        self.assertEqual(report['errors'], [])
        return report

    def test_machines_come_and_go(self):
        """N5, N7, P1: forty seconds, four machines of which two go at once and others come."""
        report = self.run_spot([3, 4, 4, 2, 2, 4, 4], 6, (0.5, 1.5), (1, 4), 0.02, '2s')
        self.assertGreaterEqual(report['generations'], 2, 'one of those that were left at least')
        self.assertGreater(report['steps_kept'], 10)
        self.assertEqual(report['rollbacks'], 0, 'two were there all the time')

    @unittest.skipUnless(harness.SOAK, 'takes ten minutes: make soak ARGS=spot_test.SpotTest.test_ten_minutes_of_a_recorded_trace')
    @unittest.skipUnless(os.path.exists(RECORDED), f'the recorded traces are not here: {RECORDED}')
    def test_ten_minutes_of_a_recorded_trace(self):
        """100 minutes of it ten times as fast: 16 machines come, after 65 minutes five go, ten minutes later others come."""
        with open(RECORDED) as text:
            counts = json.load(text)['data'][24:44]
        report = self.run_spot(counts, 30, (6, 30), (4, 16), 0.25, '10s')
        self.assertGreaterEqual(report['goodput'], 0.9)


if __name__ == '__main__':
    harness.main()

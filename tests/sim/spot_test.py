"""A job in place on machines that come and go, in virtual time: goodput and ledger by tools/goodput.py, which shares no code with it."""
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.environ.get('GTRAIN_SOURCE_DIR', os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..')))
SIM = os.path.join(os.environ.get('GTRAIN_BUILD_DIR', os.path.join(SOURCE, 'build')), 'bin', 'gtrain-sim')
TRACE = os.path.join(SOURCE, 'tests', 'sim', 'spot_trace.json')
RECORDED = os.path.join(SOURCE, '..', 'shared', 'traces', 'aws-v100-16node-us-west-2a-2023-08-27.json')
sys.path.insert(0, os.path.join(SOURCE, 'tools'))
import goodput  # noqa: E402


class SpotTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix='gtrain-spot-')
        self.addCleanup(folder.cleanup)
        self.events = os.path.join(folder.name, 'events.jsonl')

    def play(self, *flags, trace=TRACE):
        done = subprocess.run([SIM, '--spot-trace', trace, '--samples-out', self.events, *flags], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.words = done.stdout
        report = goodput.Run(self.events, trace).report()
        self.assertEqual(report['errors'], [])
        return report

    def test_in_place_beside_restarts(self):
        """N5, N7, P13: a trace of 3.3 hours that takes and gives machines every ten minutes, which no market does for long."""
        self.assertGreaterEqual(self.play()['goodput'], 0.92)
        self.assertGreaterEqual(self.play('--notice', '120s')['goodput'], 0.92)
        in_place, restart = self.play('--checkpoint-every', '5m'), self.play('--checkpoint-every', '5m', '--mode', 'restart')
        self.assertGreaterEqual(in_place['goodput'], 0.87, 'growth waits for no checkpoint; two rollbacks of up to five minutes are in it')
        self.assertEqual(in_place['rollbacks'], 2, 'only where all machines were gone')
        self.assertLess(restart['goodput'], 0.75)
        self.assertEqual(in_place['node_losses'], restart['node_losses'])

    def test_who_is_told_in_time_has_handed_over_when_its_machine_goes(self):
        """P13: INV-15, which the simulator checks: when a machine goes no rank of a generation is left on it."""
        told = 0
        for seed, notice in enumerate(('30s', '120s') * (20 if os.environ.get('GTRAIN_SOAK') else 2), 1):
            for mode in ('in-place', 'restart'):
                self.play('--notice', notice, '--seed', str(seed), '--mode', mode)
                told += int(re.search(r'(\d+) machines were told in time and went', self.words).group(1))
        print(f'\n{told} machines were told in time and went, none with a rank', flush=True)
        self.assertGreater(told, 100)

    @unittest.skipUnless(os.path.exists(RECORDED), f'the recorded traces are not here: {RECORDED}')
    def test_the_first_day_of_a_recorded_trace(self):
        self.assertGreaterEqual(self.play('--hours', '24', trace=RECORDED)['goodput'], 0.96)

    def test_a_seed_is_one_course(self):
        self.play('--hours', '1', '--seed', '7')
        with open(self.events) as lines:
            first = lines.read()
        self.play('--hours', '1', '--seed', '7')
        with open(self.events) as lines:
            self.assertEqual(lines.read(), first)

    def test_what_is_wrong_is_said(self):
        for text, words in (('{}', 'no JSON object with a list'), ('{"metadata": {"gap_seconds": 0}, "data": [1]}', 'gap_seconds'),
                            ('{"metadata": {"gap_seconds": 300}, "data": [-1]}', 'no number of nodes')):
            with open(self.events, 'w') as out:
                out.write(text)
            done = subprocess.run([SIM, '--spot-trace', self.events], capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, words in done.stderr), (2, True), done.stderr)
        done = subprocess.run([SIM, '--spot-trace', '/nowhere.json'], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, 'cannot read the trace' in done.stderr), (2, True), done.stderr)


class GoodputTest(unittest.TestCase):
    """What the script finds in what was written: two machines, a step of 2 s each, one lost at 12 s."""
    HEAD = {'spot_run': 1, 'mode': 'in-place', 'batch': 4, 'samples': 18, 'sample_seconds': 1.0, 'gap': 10, 'ranks_min': 1, 'ranks_max': 2,
            'start_min': 0, 'start_max': 5}

    def setUp(self):
        self.events = [dict(self.HEAD)]
        for node in (0, 1):
            self.events += [{'at': 0, 'node': node, 'is': 'given'}, {'at': 1, 'node': node, 'is': 'up'}]
        self.events.append({'at': 1, 'generation': 1, 'begins_behind': 0, 'nodes': [0, 1]})
        self.events += [self.batch(at, 1, 2, step) for step, at in enumerate((3, 5, 7, 9, 11), 1)]
        self.events += [{'at': 12, 'node': 1, 'is': 'gone'}, {'at': 14, 'generation': 2, 'begins_behind': 5, 'nodes': [0]}]
        self.events += [self.batch(at, 2, 1, step) for step, at in enumerate((18, 22), 6)]
        self.events.append({'at': 25, 'end': True})

    def batch(self, at, generation, ranks, step):
        epoch, place = divmod(step - 1, 5)
        return {'at': at, 'generation': generation, 'ranks': ranks, 'step': step, 'epoch': epoch, 'first': place * 4,
                'count': 2 if place == 4 else 4}

    def run_of(self, events, trace=None):
        with tempfile.NamedTemporaryFile('w', suffix='.jsonl') as out:
            out.write('\n'.join(map(json.dumps, events)))
            out.flush()
            return goodput.Run(out.name, trace).report()

    def errors_with(self, index, **changed):
        events = copy.deepcopy(self.events)
        events[index].update(changed)
        return ' '.join(self.run_of(events)['errors'])

    def test_what_is_counted(self):
        report = self.run_of(self.events)
        self.assertEqual(report['errors'], [])
        self.assertEqual((report['steps_kept'], report['rollbacks'], report['steps_possible']), (7, 0, 8.8))  # 11 s and 13 s: 8.75
        self.assertEqual(report['goodput'], 0.8)

    def test_who_goes_back_gives_up_what_it_had(self):
        events = self.events[:11] + [{'at': 12, 'node': 0, 'is': 'gone'}, {'at': 12, 'node': 1, 'is': 'gone'}, {'at': 20, 'node': 2, 'is': 'given'},
                                     {'at': 21, 'node': 2, 'is': 'up'}, {'at': 22, 'generation': 2, 'begins_behind': 3, 'nodes': [2]},
                                     self.batch(26, 2, 1, 4), {'at': 29, 'end': True}]
        report = self.run_of(events)
        self.assertEqual(report['errors'], [])
        self.assertEqual((report['steps_applied'], report['steps_kept'], report['steps_given_up'], report['rollbacks']), (6, 4, 2, 1))

    def test_a_survivor_that_has_lost_its_state_is_found(self):
        events = self.events[:12] + [{'at': 14, 'generation': 2, 'begins_behind': 3, 'nodes': [0]}, self.batch(18, 2, 1, 4), {'at': 25, 'end': True}]
        self.assertRegex(' '.join(self.run_of(events)['errors']), r'goes back from step 5 to 3 although nodes \[0\]')
        self.assertEqual(self.run_of([dict(self.HEAD, mode='restart')] + events[1:])['errors'], [], 'a job that restarts may')

    def test_samples_and_steps_that_do_not_add_up_are_found(self):
        self.assertRegex(self.errors_with(8, first=4), 'trained twice or never')
        self.assertRegex(self.errors_with(8, count=3), 'short in the middle')
        self.assertRegex(self.errors_with(10, count=3), 'samples that there are not')
        self.assertRegex(self.errors_with(9, step=6), 'makes step 6 behind step 3')
        self.assertRegex(self.errors_with(8, at=6.5), 'less than its samples take')
        self.assertRegex(self.errors_with(12, nodes=[0, 1]), 'node 1 trains in generation 2 at 14 and is not up')

    def test_machines_that_are_not_those_of_the_trace_are_found(self):
        with tempfile.NamedTemporaryFile('w', suffix='.json') as trace:
            def errors_of(*counts):
                trace.seek(0)
                trace.truncate()
                json.dump({'metadata': {'gap_seconds': 10}, 'data': counts}, trace)
                trace.flush()
                return ' '.join(self.run_of(self.events, trace.name)['errors'])
            self.assertRegex(errors_of(2, 1, 1), 'at 10.0 s there are 2 nodes, and the trace says 1')
            self.events[11]['at'] = 10  # where a tick is; the last step before ends later, so that it is left out
            del self.events[10]
            self.events[10 + 1]['begins_behind'] = 4
            self.events[10 + 2:10 + 4] = [self.batch(18, 2, 1, 5), self.batch(22, 2, 1, 6)]
            self.assertEqual(errors_of(2, 1, 1), '')
            self.events[2]['at'] = 6
            self.assertRegex(errors_of(2, 1, 1), 'started up within 6.000 s')


if __name__ == '__main__':
    unittest.main()

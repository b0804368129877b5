"""`gtrain report`: each second of each rank has a label, and everybody who tells of them tells the same."""
import glob
import json
import os
import re
import signal
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import SOURCE, wait_until

RANK = os.path.join(SOURCE, 'tests', 'e2e', 'elastic_rank.py')
LINEAR = os.path.join(harness.BUILD, 'tests', 'e2e_elastic_linear')
BEGINS_AGAIN = '''
import json, os, select, sys
report = open(os.environ['GTRAIN_REPORT'], 'a', buffering=1)
step = 0
while not os.path.exists(sys.argv[1]):
    select.select([], [], [], 0.02)
    step += 1
    report.write(json.dumps({'step': step}) + '\\n')
'''


class GoodputTest(harness.GtrainTest):
    def report(self, *words):
        return json.loads(self.gtrain('report', '--json', *words).stdout)['goodput']

    def adds_up(self, goodput):
        self.assertAlmostEqual(sum(goodput['seconds'].values()), goodput['rank_seconds'], places=3)
        self.assertAlmostEqual(goodput['seconds']['step'] / goodput['rank_seconds'], goodput['goodput'], places=6)
        self.assertTrue(all(seconds >= 0 for seconds in goodput['seconds'].values()), goodput)
        return goodput

    def events(self):
        (path,) = glob.glob(os.path.join(self.dir, 'gtrain-runs', '*', 'events.jsonl'))
        return [json.loads(line) for line in self.read(path).splitlines()]

    def kill(self, name, rank):
        """Waits for the next generation, in which the ranks step."""
        job = self.job(name)
        (pid,) = [one['pid'] for one in job['ranks'] if one['rank'] == rank]
        os.kill(pid, signal.SIGKILL)
        wait_until('a step of the next generation', lambda: (lambda now: now['generation'] > job['generation'] and now['step'])(self.job(name)))

    def finish(self, name):
        open(os.path.join(self.out, 'go'), 'w').close()
        return self.wait_for_state(name, 'SUCCEEDED')

    def agrees(self, name, job):
        """What is told of a job that is over, by whomever."""
        goodput = self.adds_up(job['goodput'])
        self.assertEqual(self.report(name), goodput)
        told = [event for event in self.events() if 'goodput' in event]
        self.assertEqual([event['kind'] for event in told], ['revoke', 'state'])
        for event in told:
            self.adds_up(event['goodput'])
        self.assertEqual(told[-1]['goodput'], goodput)
        self.assertLess(told[0]['goodput']['rank_seconds'], goodput['rank_seconds'])
        text = self.gtrain('report', name).stdout
        for label, seconds in (('all', goodput['rank_seconds']), ('steps', goodput['seconds']['step']), ('re-forming', goodput['seconds']['reforming'])):
            self.assertRegex(text, rf'(?m)^  {label} +{seconds:.1f} +[0-9.]+ %$')
        self.assertIn(f'{goodput["goodput"] * 100:.1f} % of all rank-seconds', text)
        self.end_local_cluster()
        self.assertEqual(self.report(name), goodput, 'without a head, from what the job left')
        self.assertEqual(self.gtrain('report').stdout, text, 'the newest that is over')
        return goodput, text

    @unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
    def test_survivors_of_a_killed_rank(self):
        """P1: with the library ranks say how long they wait."""
        self.gtrain('launch', '-d', self.job_file('stays', f'name: stays\nrun: /usr/bin/python3 {RANK} {self.out} 0.01\nranks: 3\nelastic: {{mode: in-place}}\n'
                                                          'resources: {cpus: 1, oversubscribe: true}\n'),
                    GTRAIN_LIBRARY=LIBRARY, PYTHONPATH=os.path.join(SOURCE, 'python'))
        wait_until('waits that were measured', lambda: self.jobs() and self.job('stays')['goodput']['seconds'].get('idle'))
        before = self.adds_up(self.job('stays')['goodput'])
        self.kill('stays', 1)
        now = self.adds_up(self.report('stays'))
        self.assertEqual((now['generations'], now['losses'], now['wanted']), (2, 1, 3))
        self.assertGreater(now['seconds']['reforming'], 0)
        self.assertGreater(now['seconds']['starting'], before['seconds']['starting'], 'one is started anew')
        self.assertGreater(now['steps']['last'], before['steps']['last'])
        self.assertIn('stays-1 RUNNING: 2 generations, 1 loss\n', self.gtrain('report', 'stays').stdout)
        self.assertIn('no job stayed;', self.gtrain('report', 'stayed', expect=1).stderr)
        goodput, text = self.agrees('stays', self.finish('stays'))
        self.assertEqual(goodput['steps']['recomputed'], 0, 'nobody goes back')
        self.assertEqual(goodput['seconds']['checkpoint_stall'], 0, 'measured, and there was none')
        self.assertNotIn('not measured', text)

    @unittest.skipUnless(os.path.exists(LINEAR), 'e2e_elastic_linear is not built')
    def test_steps_that_take_a_second_are_counted_from_the_first(self):
        """Against the program's own clock; reports of steps come with heartbeats, once a second."""
        self.gtrain('launch', '-d', self.job_file('slow', f'name: slow\nrun: {LINEAR} {self.out} 24 8 1000\nranks: 2\nelastic: {{mode: in-place}}\n'
                                                          'resources: {cpus: 1, oversubscribe: true}\n'))
        goodput = self.adds_up(self.wait_for_state('slow', 'SUCCEEDED')['goodput'])
        trained = 0
        for name in glob.glob(os.path.join(self.out, 'trained.*')):
            at = [int(line.split()[2]) for line in self.read(name).splitlines()]
            self.assertEqual(len(at), 6)
            trained += (at[-1] - at[0]) / 1e9 + 1  # and the first
        self.assertAlmostEqual(goodput['seconds']['step'], trained, delta=1, msg=goodput)

    def test_a_program_without_the_library_makes_its_steps_again(self):
        with open(os.path.join(self.dir, 'again.py'), 'w') as out:
            out.write(BEGINS_AGAIN)
        self.gtrain('launch', '-d', self.job_file('again', f'name: again\nrun: /usr/bin/python3 {self.dir}/again.py {self.out}/go\nranks: 2\n'))
        wait_until('some steps', lambda: self.jobs() and (self.job('again')['step'] or 0) > 20)
        self.kill('again', 1)
        before = self.report('again')['steps']
        wait_until('new steps', lambda: self.report('again')['steps']['last'] > before['last'])
        goodput, text = self.agrees('again', self.finish('again'))
        self.assertGreater(goodput['seconds']['recomputed'], 0)
        self.assertTrue(0 < goodput['steps']['recomputed'] <= before['last'], (goodput, before))
        self.assertEqual({'idle', 'checkpoint_stall'} & set(goodput['seconds']), set())
        self.assertEqual(len(re.findall(r'(?m)^  waiting for (checkpoints|other ranks) +not measured$', text)), 2)
        self.assertIn('at most', text)


if __name__ == '__main__':
    harness.main()

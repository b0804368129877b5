"""A machine is about to be taken away: a cloud says so, or a person. Fault ids P13, C13, B12."""
import json
import os
import time
import unittest

import clouds
import harness
from cluster import ClusterTest
from harness import wait_until

LINEAR = os.path.join(os.path.dirname(harness.GTRAIN), '..', 'tests', 'e2e_elastic_linear')


class NoticesTest(ClusterTest):
    def setUp(self):
        self.clouds = [clouds.Aws() for _ in range(self.agent_count)]
        for cloud in self.clouds:
            self.addCleanup(cloud.close)
        super().setUp()
        self.until = os.path.join(self.dir, 'go')

    def start_agent(self, index, *flags, **options):
        return super().start_agent(index, *self.clouds[index].agent_flags, *flags, **options)

    def place_of(self, job):
        """The number of the node that rank 0 runs on."""
        return int(self.job(job)['ranks'][0]['hostname'][4:])

    def finish(self, job):
        open(self.until, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')

    def said_of(self, index):
        return self.node(f'node{index}')['notices']

    def why(self, job):
        return self.client('why', job).stdout

    def test_a_notice_of_the_cloud(self):
        """The ranks are told, a checkpoint is made, the job goes on elsewhere long before the end; taken back, the
        machine is used again."""
        job = self.submit(self.stepper_job('train', '--until', self.until, '--on-notice', ranks='1',
                                           extra='preempt: {signal: SIGUSR1}\nresources: {cpus: 1}\n'))
        self.wait_for_steps(5, ranks=1)
        place = self.place_of(job)
        self.clouds[place].leave(120)
        left = int(wait_until('the rank to be told', lambda: os.path.exists(os.path.join(self.out, 'noticed.1.0')) and
                              self.read('noticed.1.0')))
        self.assertTrue(60 < left <= 120, left)
        seen = wait_until('the job to go on elsewhere', lambda: (self.job(job) or {}).get('generation') == 2 and
                          self.wait_for_state(job, 'RUNNING'))
        self.assertNotEqual(self.place_of(job), place)
        self.assertEqual((seen['restarts'], seen['first_fault']), (0, None), seen)
        self.assertRegex(self.why(job), f'node{place} is leaving: aws spot interruption .terminate.; a checkpoint was made')
        self.assertEqual(self.said_of(place)[0]['kind'], 'leave')
        self.assertRegex(self.client('nodes').stdout, f'node{place} .*leaving(.|\\n)*leave: aws spot interruption')

        both = self.submit(self.job_file('both', 'name: both\nrun: /bin/true\nnodes: 2\nranks_per_node: 1\n'
                                                 'resources: {cpus: 1}\n'))
        self.wait_for_state(both, 'WAITING')
        self.assertIn('leaving: aws spot interruption', self.why(both))
        self.clouds[place].stay()
        self.wait_for_state(both, 'SUCCEEDED')
        self.assertEqual(self.said_of(place), [])
        self.finish(job)

    def test_drains_on_purpose(self):
        """`gtrain chaos --drain`: the job moves, charged nothing, and the drain is taken back."""
        job = self.submit(self.stepper_job('moving', '--until', self.until, ranks='1', extra='restart: {budget: 0}\n'))
        self.wait_for_steps(3, ranks=1)
        report = json.loads(self.client('chaos', 'moving', '--drain', '60s', '--every', '1s', '--for', '2s', '--json').stdout)
        self.assertGreaterEqual(report['stepped_on'], 1, report)
        seen = self.job(job)
        self.assertEqual((seen['state'], seen['restarts'], seen['first_fault']), ('RUNNING', 0, None))
        wait_until('the drain to be taken back', lambda: self.said_of(0) == [] and self.said_of(1) == [])
        self.finish(job)

    def test_drained_by_hand(self):
        """A program that knows nothing of notices dies of the signal: it goes on elsewhere and is charged nothing; the
        drain outlives the head; undrain."""
        job = self.submit(self.stepper_job('train', '--until', self.until, ranks='1', extra='restart: {budget: 0}\n'))
        self.wait_for_steps(3, ranks=1)
        place = self.place_of(job)
        said = self.client('node', 'drain', f'node{place}', '--deadline', '90s', '--reason', 'new disk').stdout
        self.assertIn('1 job goes on without it within 90s. Its ranks have 80s of that to save', said)
        seen = wait_until('the job to go on elsewhere', lambda: (self.job(job) or {}).get('generation') == 2 and
                          self.wait_for_state(job, 'RUNNING'))
        self.assertNotEqual(self.place_of(job), place)
        self.assertEqual((seen['restarts'], seen['first_fault']), (0, None), seen)
        self.kill_head()
        self.start_head()
        wait_until('both nodes to be back', lambda: self.nodes_in('alive') == 2)
        self.assertRegex(self.said_of(place)[0]['source'], 'drained by .*: new disk')
        self.client('node', 'undrain', f'node{place}')
        self.assertEqual(self.said_of(place), [])
        actions = [json.loads(line)['action'] for line in self.client('audit', '--context', 'lab').stdout.splitlines() if line]
        self.assertEqual([action for action in actions if 'drain' in action], ['node drain', 'node undrain'])
        refused = self.client('node', 'drain', 'nowhere', expect=None)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn('no node nowhere', refused.stderr)
        self.finish(job)

    @unittest.skipUnless(os.path.exists(LINEAR), 'e2e_elastic_linear is not built')
    def test_who_stays_goes_on_where_another_machine_leaves(self):
        """P1, P13: in place a notice is a hand-over. Whoever is on another machine keeps its process and every step, nobody is
        charged, and it is over before the machine goes."""
        job = self.submit(self.job_file('in-place', f'name: in-place\nrun: {LINEAR} {self.out} 600000 60 10\nranks: {{min: 2, max: 4}}\n'
                                                    'elastic: {mode: in-place}\nresources: {cpus: 1}\nrestart: {budget: 0}\n'))

        def steps():
            return {int(name[8:]): len(self.read(name).splitlines()) for name in os.listdir(self.out) if name.startswith('trained.')}
        wait_until('all four to step', lambda: len(steps()) == 4 and min(steps().values()) > 10)
        hosts = {rank['pid']: rank['hostname'] for rank in self.job(job)['ranks']}
        self.assertEqual(sorted(hosts.values()), ['node0', 'node0', 'node1', 'node1'])
        stay = {pid for pid, host in hosts.items() if host == 'node1'}
        began = time.monotonic()
        self.clouds[0].leave(24)
        seen = wait_until('the two to go on', lambda: (lambda now: now['generation'] == 2 and now['state'] == 'RUNNING' and now)(self.job(job)))
        self.assertLess(time.monotonic() - began, 24, 'it is over before the machine goes')
        self.assertEqual((seen['restarts'], {rank['pid'] for rank in seen['ranks']}), (0, stay))
        before = steps()
        wait_until('their next steps', lambda: all(steps()[pid] >= before[pid] + 10 for pid in stay))
        self.client('stop', job)
        self.wait_for_state(job, 'CANCELLED')
        for pid in stay:
            numbers = [int(line.split()[1]) for line in self.read(f'trained.{pid}').splitlines()]
            self.assertEqual(numbers, list(range(1, len(numbers) + 1)), 'no step is lost or made twice')

    def test_sdk_ranks_see_it(self):
        """All ranks of the job, on every machine: it takes all of them to save. Then the machine comes back in time."""
        job = self.submit(self.sdk_job('train', 20, self.until))
        self.wait_for_sdk_steps(10, ranks=2)
        self.clouds[1].leave(115)
        for rank in range(2):
            left = int(wait_until(f'rank {rank} to see it', lambda: os.path.exists(
                os.path.join(self.out, f'noticed.1.{rank}')) and self.read(f'noticed.1.{rank}')))
            self.assertTrue(60 < left <= 115, left)
        self.clouds[1].stay()
        wait_until('the notice to be taken back', lambda: not self.said_of(1))
        seen = self.wait_for_state(job, 'RUNNING')
        self.assertEqual((seen['generation'], seen['restarts']), (1, 0), seen)
        self.finish(job)


class HostileTest(ClusterTest):
    """B12: what answers in the place of a cloud. Six machines, two of each, all with a rank of one job."""
    agent_count = 6

    def setUp(self):
        self.clouds = [cloud() for cloud in [*clouds.CLOUDS.values()] * 2]
        for cloud in self.clouds:
            self.addCleanup(cloud.close)
        super().setUp()

    def start_agent(self, index, *flags, **options):
        return super().start_agent(index, '--cpus', '1', *self.clouds[index].agent_flags, *flags, **options)

    def said(self):
        """What is said of each machine: kind and source."""
        nodes = {node['hostname']: node['notices'] for node in self.nodes()}
        return [[(notice['kind'], notice['source']) for notice in nodes.get(f'node{index}', [('', '')])] for index in range(self.agent_count)]

    def kinds(self):
        return [[kind for kind, _ in said] for said in self.said()]

    def rounds(self):
        """Who says what, six at a time: each reply in the place of one cloud, in turn; with GTRAIN_SOAK=1 of each."""
        waiting = [(hostile, name) for number, hostile in enumerate(clouds.HOSTILE) for turn, name in enumerate(clouds.CLOUDS)
                   if harness.SOAK or number % len(clouds.CLOUDS) == turn]
        while waiting:
            plan = {}
            for index, cloud in enumerate(self.clouds):
                mine = next((one for one in waiting if one[1] == cloud.name), None)
                if mine:
                    waiting.remove(mine)
                    plan[index] = mine[0]
            yield plan

    def test_what_is_no_notice(self):
        """The machine is said to be at risk, and nothing else happens: not to its ranks, and nothing is asked elsewhere."""
        until = os.path.join(self.dir, 'go')
        words = ' '.join(['/usr/bin/python3', self.stepper, '--out', self.out, '--until', until])
        job = self.submit(self.job_file('train', f'name: train\nrun: {words}\nnodes: 6\nranks_per_node: 1\nresources: {{cpus: 1}}\n'
                                                 'restart: {budget: 0}\n'))
        self.wait_for_steps(3, ranks=6)
        wait_until('all clouds to have answered', lambda: all(cloud.answers >= 3 for cloud in self.clouds))
        for plan in self.rounds():
            names = {index: f'{self.clouds[index].name} {hostile.__name__}' for index, hostile in plan.items()}
            for index, hostile in plan.items():
                self.clouds[index].hostile = hostile
            expected = [['at-risk'] if index in plan else [] for index in range(self.agent_count)]
            try:
                wait_until('the alarms', lambda: self.kinds() == expected)
            except AssertionError as error:
                raise AssertionError(f'{error}: {names}; {self.said()}') from None
            for index, said in enumerate(self.said()):
                for _, source in said:
                    self.assertRegex(source, '^notices of its cloud are not heard: .', names[index])
            self.assertIn('at-risk: notices of its cloud are not heard: ', self.client('nodes').stdout)
            for index in plan:
                self.clouds[index].hostile = None
            wait_until(f'all to be heard again after {names}', lambda: self.kinds() == [[]] * self.agent_count)
        self.assertEqual([cloud.followed for cloud in self.clouds], [0] * self.agent_count, 'no redirect is followed')
        self.assertEqual(self.nodes_in('alive'), self.agent_count)
        before = min(self.steps().values())
        self.wait_for_steps(before + 3, ranks=6)
        seen = self.job(job)
        self.assertEqual((seen['state'], seen['generation'], seen['restarts'], seen['first_fault']), ('RUNNING', 1, 0, None))
        self.assertFalse([name for name in os.listdir(self.out) if name.startswith('noticed.')], 'no rank was told of anything')
        self.assertRegex(self.client('why', job).stdout, 'node[0-5]: notices of its cloud are not heard: .')
        for agent in self.agents:
            self.assertIn('notices of the cloud: ', agent.output())
        open(until, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')

        self.clouds[0].leave()
        wait_until('a notice', lambda: self.kinds()[0] == ['leave'])
        self.clouds[0].answers, self.clouds[0].hostile = 0, clouds.portal
        wait_until('more than ten seconds of nonsense', lambda: self.clouds[0].answers >= 15)
        self.assertEqual(self.kinds()[0], ['leave'], 'losing the service takes nothing back, and raises no alarm of who leaves anyway')


if __name__ == '__main__':
    harness.main()

"""Agents on machines that are network namespaces; the data plane is UCX over TCP."""
import os
import random
import signal
import subprocess
import time
import unittest

import harness
import nets
from cluster import ClusterTest
from harness import soak, wait_until

REASON = nets.usable()
FASHION = os.path.join(harness.BUILD, 'examples', 'fashion_mnist')
LINEAR = os.path.join(harness.BUILD, 'tests', 'e2e_elastic_linear')
ALLREDUCE = os.path.join(harness.BUILD, 'tests', 'e2e_allreduce')


@unittest.skipIf(REASON, REASON)
class MachinesTest(ClusterTest):
    agent_count = 4

    def setUp(self):
        self.nets = nets.Nets(self.agent_count)
        self.addCleanup(self.nets.remove)  # after the clean-up of processes, which super().setUp() registers
        super().setUp()

    def inside(self, index):
        return self.nets.inside(index)

    def address(self, index):
        return self.nets.address(index)

    def steps_of(self):
        """pid of LINEAR -> [(generation, step, seconds)]."""
        found = {}
        for name in os.listdir(self.out):
            if name.startswith('trained.'):
                lines = [line.split() for line in self.read(name).splitlines()]
                found[int(name[8:])] = [(int(line[0]), int(line[1]), int(line[2]) / 1e9) for line in lines if len(line) > 2]
        return found


class FourMachinesTest(MachinesTest):
    def test_one_rank_a_machine(self):
        """The contract across machines: one rank each, MASTER_ADDR is rank 0's machine, no shared loopback."""
        job = self.job_file('spread', f'name: spread\nrun: /usr/bin/python3 {self.stepper} --out {self.out} --steps 3\n'
                                      'nodes: 4\nranks_per_node: 1\n')
        launch = self.launch(job)
        self.assertEqual(launch.wait(), 0, launch.output())
        self.assertEqual(self.steps(), {rank: 3 for rank in range(4)})

    def test_pulled_cable_resumes_on_the_rest(self):
        """N1: a link goes down; the node is declared dead, the job goes on with three ranks and finishes."""
        done = os.path.join(self.dir, 'go')
        job = self.job_file('elastic', f'name: elastic\nrun: /usr/bin/python3 {self.stepper} --out {self.out} --steps 60 '
                                       f'--hold {done}\nnodes: {{min: 2, max: 4}}\nranks_per_node: 1\nstop_grace: 2s\noverlap: allow\n')
        launch = self.launch(job)
        self.wait_for_steps(5, ranks=4)
        self.nets.unplug(3)
        wait_until('generation 2 on three ranks', lambda: len(self.rank_pids(2)) == 3, 120)
        open(done, 'w').close()
        self.assertEqual(launch.wait(120), 0, launch.output())
        self.nets.plug(3)
        wait_until('the node that is back to end what was left there', lambda: not self.daemons('keeper'), 120)

    @unittest.skipUnless(os.access(FASHION, os.X_OK), 'examples/fashion_mnist is not built (no libtorch)')
    def test_fashion_mnist_survives_a_pulled_cable(self):
        """N1: the main job over four machines; one is cut off; three resume from the last checkpoint and still learn."""
        job = self.job_file('fashion', f'name: fashion\nrun: {FASHION} --epochs 1 --min-accuracy 0.8\n'
                                       f'nodes: {{min: 2, max: 4}}\nranks_per_node: 1\n'
                                       f'checkpoint: {{uri: {self.dir}/ckpt, every: 50 steps}}\n')
        launch = self.launch(job)
        wait_until('some checkpoints', lambda: 'step 200' in launch.output(), 120)
        self.nets.unplug(3)
        self.assertEqual(launch.wait(240), 0, launch.output())
        self.assertRegex(launch.output(), r'resumed at step [1-9]\d*')
        self.assertIn('on 3 rank(s)', launch.output())
        self.nets.plug(3)
        wait_until('the node that is back to end what was left there', lambda: not self.daemons('keeper'), 120)

    def test_all_reduce_over_ucx(self):
        """SDK ranks on four machines agree on every sum; a cable is pulled, three go on and finish."""
        done = os.path.join(self.dir, 'go')
        job = self.job_file('sum', f'name: sum\nrun: {ALLREDUCE} {done}\nnodes: {{min: 2, max: 4}}\n'
                                   'ranks_per_node: 1\nstop_grace: 2s\n')
        launch = self.launch(job)
        launch.wait_for(r'generation 1 world 4 step 21 ok')
        self.nets.unplug(2)
        launch.wait_for(r'generation \d+ world 3 step 21 ok', 120)
        open(done, 'w').close()
        self.assertEqual(launch.wait(120), 0, launch.output())
        self.nets.plug(2)
        wait_until('the node that is back to end what was left there', lambda: not self.daemons('keeper'), 120)



@unittest.skipIf(REASON, REASON)
@unittest.skipUnless(os.access(LINEAR, os.X_OK), 'e2e_elastic_linear is not built')
class CutOffTest(MachinesTest):
    agent_count = 3

    def test_too_few_save_and_wait_in_memory(self):
        """N1, N7: a cable is pulled and there is no other machine; what only the two others know is in the storage soon, and they go on when it is back."""
        self.client('launch', '-d', self.job_file('few', f'name: few\nrun: {LINEAR} {self.out} 1000000000 48 10\n'
                                                         'nodes: 3\nranks_per_node: 1\nelastic: {mode: in-place}\n'
                                                         f'resources: {{cpus: 1, oversubscribe: true}}\ncheckpoint: {{uri: {self.dir}/ckpt, every: 1h}}\n'))
        wait_until('steps', lambda: (lambda ranks: len(ranks) == 3 and all((rank['step'] or 0) > 50 for rank in ranks))((self.job('few') or {}).get('ranks', [])))
        before = {rank['pid'] for rank in self.job('few')['ranks'] if rank['hostname'] != 'node2'}
        self.nets.unplug(2)
        applied = lambda: max(lines[-1][1] for pid, lines in self.steps_of().items() if pid in before and lines)
        known = applied()
        seen = wait_until('to wait', lambda: (lambda job: job if job['state'] == 'WAITING' and job['last_checkpoint'] else None)(self.job('few')), 120)
        self.assertIn('2 processes keep its state', seen['reason'])
        self.assertGreaterEqual(seen['last_checkpoint']['step'], known, 'it was saved every hour')
        at = applied()
        self.nets.plug(2)
        again = wait_until('all three', lambda: (lambda job: job if job['state'] == 'RUNNING' and job['world_size'] == 3 and (job['step'] or 0) > at else None)(
            self.job('few')), 120)
        self.assertLessEqual(before, {rank['pid'] for rank in again['ranks']}, 'the others kept their processes')
        self.client('stop', 'few', '--now')
        wait_until('all of it to end', lambda: not self.daemons('keeper'), 120)

    def test_the_verb_cuts_a_machine_off(self):
        """N1, N7: `gtrain chaos --cut`: no packet for a while, and by itself all of them again; for two seconds nobody is lost, for twenty the
        others go on without it."""
        self.client('launch', '-d', self.job_file('cut', f'name: cut\nrun: {LINEAR} {self.out} 1000000000 48 10\n'
                                                         'nodes: {min: 2, max: 3}\nranks_per_node: 1\nelastic: {mode: in-place}\n'
                                                         'resources: {cpus: 1, oversubscribe: true}\nrestart: {budget: 10000}\n'))
        wait_until('steps', lambda: (lambda ranks: len(ranks) == 3 and all((rank['step'] or 0) > 5 for rank in ranks))((self.job('cut') or {}).get('ranks', [])))
        before = {rank['pid'] for rank in self.job('cut')['ranks'] if rank['hostname'] != 'node2'}  # the head is on node0
        self.assertEqual(len(before), 2)
        short = self.client('chaos', 'cut', '--cut', '2s', '--node', 'node2', '--every', '200ms', '--for', '500ms')
        self.assertRegex(short.stderr, r'rank . on \S+: step \d+, on at step \d+ in generation 1')
        long = self.client('chaos', 'cut', '--cut', '20s', '--node', 'node2', '--every', '200ms', '--for', '500ms', timeout=120)
        self.assertRegex(long.stderr, r'rank . on \S+: step \d+, on at step \d+ in generation 2')
        self.assertLessEqual(before, {rank['pid'] for rank in self.job('cut')['ranks']}, 'the others kept their processes')
        wait_until('the machine to be back', lambda: self.nodes_in('alive') == 3, 120)
        wait_until('three again', lambda: self.job('cut')['world_size'] == 3, 120)
        self.client('stop', 'cut', '--now')
        wait_until('all of it to end', lambda: not self.daemons('keeper'), 120)


@unittest.skipIf(REASON, REASON)
@unittest.skipUnless(os.access(LINEAR, os.X_OK), 'e2e_elastic_linear is not built')
class SixteenRanksTest(MachinesTest):
    """Four ranks on each of four machines, trained in place."""

    def members(self, but=()):
        """The pids of the newest generation, once all 16 have made steps in it; None before."""
        steps = {pid: all_ for pid, all_ in self.steps_of().items() if all_}
        newest = max((all_[-1][0] for all_ in steps.values()), default=0)
        found = {pid for pid, all_ in steps.items() if sum(one[0] == newest for one in all_) >= 3 and harness.alive(pid)}
        return found if len(found) == 16 and not found & set(but) else None

    def machine_of(self):
        return {rank['pid']: rank['node'] for rank in self.job('many')['ranks']}

    def test_ranks_are_killed(self):
        """P1, N7: one rank, some on any machines, or all of a machine, again and again. GTRAIN_SOAK=1: 600 times, 1,600 ranks."""
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        self.client('launch', '-d', self.job_file('many', f'name: many\nrun: {LINEAR} {self.out} 1000000000 48 10\n'
                                                          'nodes: {min: 2, max: 4}\nranks_per_node: 4\nelastic: {mode: in-place}\n'
                                                          'resources: {cpus: 1, oversubscribe: true}\nrestart: {budget: 10000}\n'))
        killed = 0
        for round_ in range(soak(600, 6)):
            before = wait_until('steps of 16 ranks', self.members, 180)
            machines = self.machine_of()
            place = rng.choice(sorted(set(machines.values())))
            victims = (rng.sample(sorted(before), 1), rng.sample(sorted(before), 3),
                       [pid for pid in before if machines[pid] == place])[round_ % 3]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            after = wait_until('16 ranks again', lambda: self.members(victims), 180)
            self.assertLessEqual(before - set(victims), after, f'who is not killed keeps its process: round {round_}, seed {seed}')
            killed += len(victims)
        self.client('stop', 'many')
        self.wait_for_state('many', 'SUCCEEDED', 'CANCELLED')
        for pid, all_ in self.steps_of().items():
            numbers = [step for _, step, _ in all_]
            self.assertEqual(numbers, sorted(set(numbers)), f'no rank makes an update twice: process {pid}, seed {seed}')
        weights = {pid: self.read(f'weights.{pid}') for pid in after}
        self.assertEqual(len(set(weights.values())), 1, (weights, seed))
        self.assertIn('given out once', self.client('data', 'audit', 'many').stdout)
        print(f'\n{killed} kills of 16 ranks on 4 machines, seed {seed}', flush=True)


class SilentMachineTest(MachinesTest):
    """A machine that says nothing any more, neither FIN nor RST, under a job in place; the head waits as long as it was told."""
    agent_count = 3

    def start_head(self, *flags, **options):
        return super().start_head('--node-timeout', '2s', *flags, **options)

    def train(self, samples):
        self.client('launch', '-d', self.job_file('linear', f'name: linear\nrun: {LINEAR} {self.out} {samples} 12 20\n'
                                                            'nodes: {min: 2, max: 3}\nranks_per_node: 1\nelastic: {mode: in-place}\n'))

    def test_a_machine_that_falls_silent_is_missed_in_time(self):
        """N1: --node-timeout 2s: the others go on in their processes, with the step that was under way."""
        self.train(2_000_000)
        wait_until('steps of three ranks', lambda: sum(len(steps) > 20 for steps in self.steps_of().values()) == 3)
        self.nets.unplug(2)
        cut = time.monotonic()
        before = {pid: steps[-1][1] for pid, steps in self.steps_of().items()}

        def two_step():
            steps = self.steps_of()
            on = {pid: [one for one in all_ if one[0] >= 2] for pid, all_ in steps.items()}
            return {pid: all_ for pid, all_ in on.items() if len(all_) > 5}
        on = wait_until('two ranks that step on', lambda: (lambda found: found if len(found) == 2 else None)(two_step()), 60)
        first = {pid: steps[0] for pid, steps in on.items()}
        self.assertLess(set(first), set(before), 'who survives keeps its process')
        for pid, (_, step, _) in first.items():
            # A step that all had reduced when the cable was pulled is behind `before`.
            self.assertLessEqual(step - before[pid], 2, f'{first} {before}')
        took = max(seconds for _, _, seconds in first.values()) - cut
        self.assertLess(took, 10, 'the machine was given up as if nobody had said 2s')
        print(f'\nfrom the pulled cable until both made another step: {took:.3f} s, with --node-timeout 2s', flush=True)
        self.nets.plug(2)
        self.client('stop', 'linear')
        wait_until('the node that is back to end what was left there', lambda: not self.daemons('keeper'), 120)

    @unittest.skipUnless(harness.SOAK, 'GTRAIN_SOAK=1: ten minutes')
    def test_a_busy_machine_is_not_missed(self):
        """N1: both cores are busy for ten minutes, and no machine is given up at --node-timeout 2s."""
        self.train(100_000_000)
        wait_until('steps of three ranks', lambda: sum(len(steps) > 20 for steps in self.steps_of().values()) == 3)
        busy = [subprocess.Popen(['sh', '-c', 'while :; do :; done']) for _ in range(4)]
        try:
            end = time.monotonic() + 600
            wait_until('ten minutes', lambda: time.monotonic() > end or self.job('linear')['generation'] != 1, 650)
        finally:
            for one in busy:
                one.kill()
                one.wait()
        self.assertEqual(self.job('linear')['generation'], 1)
        self.client('stop', 'linear')


if __name__ == '__main__':
    harness.main()

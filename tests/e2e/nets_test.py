"""Four agents on four machines (network namespaces), one rank each; the data plane is UCX over TCP."""
import os
import unittest

import harness
import nets
from cluster import ClusterTest
from harness import wait_until

REASON = nets.usable()
FASHION = os.path.join(harness.BUILD, 'examples', 'fashion_mnist')
ALLREDUCE = os.path.join(harness.BUILD, 'tests', 'e2e_allreduce')


@unittest.skipIf(REASON, REASON)
class FourMachinesTest(ClusterTest):
    agent_count = 4

    def setUp(self):
        self.nets = nets.Nets(4)
        self.addCleanup(self.nets.remove)  # after the clean-up of processes, which super().setUp() registers
        super().setUp()

    def inside(self, index):
        return self.nets.inside(index)

    def address(self, index):
        return self.nets.address(index)

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


if __name__ == '__main__':
    harness.main()

"""A process that SIGKILL does not end (P10): no wait is unbounded, the node is told as unclean and gets no ranks."""
import json
import os
import signal
import tempfile

import harness
from cluster import ClusterTest
from harness import wait_until

FREEZER = '/sys/fs/cgroup/freezer'


class UnkillableTest(ClusterTest):
    """Stuck in a frozen control group of version 1: there SIGKILL waits for the thaw, as in any uninterruptible sleep."""

    group = None

    def setUp(self):
        if not os.access(os.path.join(FREEZER, 'cgroup.procs'), os.W_OK):
            self.skipTest(f'no writable freezer hierarchy of control groups version 1 at {FREEZER}')
        super().setUp()

    def freeze(self, pid):
        self.group = tempfile.mkdtemp(prefix='gt-frozen-', dir=FREEZER)
        self.write('cgroup.procs', str(pid))
        self.write('freezer.state', 'FROZEN')
        wait_until('the freeze', lambda: self.read_state() == 'FROZEN')

    def thaw(self):
        self.write('freezer.state', 'THAWED')

    def write(self, name, text):
        with open(os.path.join(self.group, name), 'w') as out:
            out.write(text)

    def read_state(self):
        with open(os.path.join(self.group, 'freezer.state')) as data:
            return data.read().strip()

    def remove(self):
        try:
            os.rmdir(self.group)
        except OSError:
            return False
        return True

    def clean_up(self):
        if self.group:
            self.thaw()
        super().clean_up()
        if self.group:
            wait_until('the frozen group to be empty', self.remove)

    def run_one(self, name):
        """A job of one rank: where it ran."""
        end = os.path.join(self.dir, name)
        job = self.submit(self.job_file(name, f'name: {name}\nscript: |\n  while [ ! -e {end} ]; do sleep 0.05; done\n'
                                              'ranks: 1\nresources: {cpus: 1}\n'))
        seen = self.wait_for_state(job, 'RUNNING')
        open(end, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')
        return seen['ranks'][0]['hostname']

    def test_the_node_is_unclean_until_it_starts_anew(self):
        """P10: a rank cannot be killed: its job ends all the same, the node is unclean in `nodes` and in the reason of a job
        that waits for it, gets no ranks, and answers as before; it is used again when the process is gone and its agent
        was started anew, not before."""
        job = self.submit(self.stepper_job('stuck', '--until', os.path.join(self.dir, 'go'), ranks='1',
                                           extra='resources: {cpus: 1}\nstop_grace: 1s\n'))
        self.wait_for_steps(3, ranks=1)
        pid = self.rank_pids(1)[0]
        name = next(node['hostname'] for node in self.nodes() if node['jobs'])
        index = int(name[len('node'):])
        self.freeze(pid)
        self.client('stop', '--now', job)
        self.wait_for_state(job, 'CANCELLED')
        wait_until('the node to be unclean', lambda: self.node(name)['unclean'])
        self.assertTrue(harness.alive(pid), 'it cannot be killed')
        self.assertRegex(self.client('nodes').stdout, rf'(?m)^{name} .* unclean ')
        for number in range(2):
            self.assertNotEqual(self.run_one(f'next{number}'), name)
        waiting = self.submit(self.job_file('both', 'name: both\nrun: "true"\nnodes: 2\nranks_per_node: 1\n'
                                                    'resources: {cpus: 1}\n'))
        wait_until('the reason to be told', lambda: 'survived SIGKILL' in json.dumps(self.job(waiting)))
        self.assertIn('starts after step 0', self.client('logs', job).stdout, 'its agent answers')
        self.assertEqual(self.node(name)['state'], 'alive')
        wait_until('its keeper to leave', lambda: not self.daemons('keeper'))
        self.restart(index)
        self.assertTrue(self.node(name)['unclean'], 'the process is still there')
        self.thaw()
        wait_until('the process to be gone', lambda: not harness.alive(pid))
        self.restart(index)
        wait_until('the node to be clean', lambda: not self.node(name)['unclean'])
        self.wait_for_state(waiting, 'SUCCEEDED')

    def restart(self, index):
        self.agents[index].signal(signal.SIGTERM)
        self.assertEqual(self.agents[index].wait(), 0, self.agents[index].output())
        self.agents[index] = self.start_agent(index)
        self.agents[index].wait_for('welcomed by the head')


if __name__ == '__main__':
    harness.main()

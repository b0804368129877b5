"""Head and agents are replaced by a newer gtrain and by the old one again, under ranks that keep stepping (promise 2)."""
import json
import os
import signal

import harness
from cluster import ClusterTest
from harness import wait_until

NEXT = os.path.join(harness.BUILD, 'tests', 'next', 'gtrain')  # one version ahead, or as many as its environment says
AHEAD = 'GTRAIN_TEST_VERSIONS_AHEAD'


class UpgradeTest(ClusterTest):
    def setUp(self):
        super().setUp()
        if self.prefix:
            self.skipTest('the newer program lies in the build folder')
        self.until = os.path.join(self.dir, 'go')
        self.job_id = self.submit(self.sdk_job('train', 50, self.until))
        self.wait_for_sdk_steps(5, ranks=2)
        self.pids = self.rank_processes()
        self.assertEqual(len(self.pids), 2, self.pids)

    def rank_processes(self):
        return sorted(pid for pid, argv in self.marked().items() if argv and argv[0].endswith('e2e_sdk_stepper'))

    def replace_head(self, program=None, **env):
        self.head.signal(signal.SIGTERM)
        self.assertEqual(self.head.wait(), 0, self.head.output())
        return self.start_head(program=program, **env)

    def replace_agent(self, index, program=None, **env):
        self.agents[index].signal(signal.SIGTERM)
        self.assertEqual(self.agents[index].wait(), 0, self.agents[index].output())
        self.agents[index] = self.start_agent(index, program=program, **env)
        return self.agents[index]

    def versions(self):
        """Of the agents that have said hello to the present head."""
        return sorted(node['version'] for node in self.nodes() if node['state'] == 'alive')

    def record(self):
        """What must be equal after a head was replaced."""
        job = self.job(self.job_id)
        return job and {key: job.get(key) for key in ('job', 'name', 'state', 'generation', 'timeline', 'world_size',
                                                       'restarts', 'submitted')}

    def stepped_on(self, versions):
        """The agents are of these versions, and the same processes make further steps of the same generation."""
        wait_until(f'agents of versions {versions}', lambda: self.versions() == versions)
        counts = {rank: len(lines) for rank, lines in self.step_times().items()}
        self.wait_for_sdk_steps(max(counts.values()) + 10, ranks=2)
        wait_until('the job to be running for the head', lambda: self.record() == self.before)
        self.assertEqual(self.rank_processes(), self.pids, 'no rank was started again')

    def finish(self):
        open(self.until, 'w').close()
        self.wait_for_state(self.job_id, 'SUCCEEDED')
        # A keeper whose agent ends before it says that all is over waits for the next agent.
        wait_until('its keepers to end', lambda: not self.daemons('keeper'))
        for rank, lines in self.step_times().items():
            self.assertEqual([step for _, step, _ in lines], list(range(1, len(lines) + 1)), f'rank {rank}')
            self.assertEqual({generation for generation, _, _ in lines}, {1})

    def test_up_and_down_again(self):
        """H15, N13: head first, then agents, then the head back, then the agents: every pair of neighbours works, no
        rank is started again, and the head knows what it acknowledged."""
        old = json.loads(self.client('version', '--json').stdout)['version']
        self.before = wait_until('the job to run', self.record)
        self.assertEqual(self.before['state'], 'RUNNING', self.before)
        self.stepped_on([old, old])
        self.replace_head(NEXT)
        self.stepped_on([old, old])  # head N+1, agents N
        for index in range(2):
            self.replace_agent(index, NEXT)
        self.stepped_on(['next+1', 'next+1'])
        self.replace_head()
        self.stepped_on(['next+1', 'next+1'])  # head N, agents N+1
        for index in range(2):
            self.replace_agent(index)
        self.stepped_on([old, old])
        self.finish()

    def test_two_versions_apart(self):
        """N13: refused with both versions in the sentence, by the head and, for what its keeper speaks, by the agent;
        no rank is ended and the agent of the old version takes them up again."""
        old = json.loads(self.client('version', '--json').stdout)
        self.before = wait_until('the job to run', self.record)
        self.replace_head(NEXT, **{AHEAD: '2'})
        for agent in self.agents:
            agent.wait_for('protocol {} of gtrain {} is more than one version away from protocol {} of this head '
                           r'\(gtrain next\+2\)'.format(old['protocol'], old['version'], old['protocol'] + 2))
            self.assertNotEqual(agent.wait(), 0, agent.output())
        self.replace_head()
        late = self.start_agent(0, program=NEXT, **{AHEAD: '2'})
        late.wait_for(r'the keeper of job \S+ speaks keeper protocol \d+, more than one version away from protocol \d+ of '
                      r'gtrain next\+2')
        self.assertNotEqual(late.wait(), 0, late.output())
        for index in range(2):
            self.agents[index] = self.start_agent(index)
        self.stepped_on([old['version']] * 2)
        self.finish()


if __name__ == '__main__':
    harness.main()

"""The control plane never ends a healthy rank: kill -9 of agent and head while the ranks keep stepping (promise 2)."""
import os
import signal

import harness
from harness import wait_until


class AgentKilledTest(harness.GtrainTest):
    def test_ranks_step_on_and_the_new_agent_adopts_them(self):
        """P4: agent killed; ranks keep stepping; a new agent finds the keeper; exit codes and logs are complete."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('adopt', '--until', done)
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        pids = self.rank_pids()
        self.kill_agent()
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        self.assertEqual(self.rank_pids(), pids)
        self.agent_is_back()
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        self.assertEqual(self.rank_pids(), pids, 'no new generation: the ranks were adopted')
        seen = self.wait_for_state('adopt', 'RUNNING')
        self.assertEqual((seen['generation'], seen['restarts']), (1, 0), seen)
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        for rank in range(2):
            self.assertIn(f'rank {rank} done at step {self.steps()[rank]}', launch.output(), 'what ranks wrote meanwhile is not lost')
        self.end_local_cluster()

    def test_exit_while_the_agent_is_away_is_not_lost(self):
        """P4, P8: ranks end while no agent runs; the next agent reads their exit codes from the keeper."""
        job = self.stepper_job('away', '--steps', '60')
        detached = self.start('launch', '-d', job)
        self.assertEqual(detached.wait(), 0, detached.output())
        self.wait_for_steps(3, ranks=2)
        self.kill_agent()
        pids = self.rank_pids()
        wait_until('the ranks end by themselves', lambda: not any(map(harness.alive, pids.values())))
        self.assertEqual(self.steps(), {0: 60, 1: 60})
        attach = self.start('attach', 'away')  # so does any command that opens the local cluster
        self.agent_is_back()
        self.assertEqual(attach.wait(), 0, attach.output())
        self.assertEqual(list(self.rank_pids(2)), [], 'nothing was run twice')
        self.end_local_cluster()

    def kill_agent(self):
        agents = self.daemons('agent')
        self.assertEqual(len(agents), 1, self.marked())
        os.kill(agents[0], signal.SIGKILL)

    def agent_is_back(self):
        """Without help: whoever follows a job on the local cluster starts again an agent that died."""
        wait_until('the agent to run', lambda: self.daemons('agent'))


class AgentKilledOrdinaryUserTest(AgentKilledTest):
    ordinary_user = True


class HeadKilledTest(harness.GtrainTest):
    def test_ranks_step_on_and_the_new_head_knows_the_job(self):
        """H1: head killed; ranks keep stepping; a new head reads its records and the job finishes."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('head', '--until', done)
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        heads = self.daemons('head')
        self.assertEqual(len(heads), 1, self.marked())
        pids = self.rank_pids()
        os.kill(heads[0], signal.SIGKILL)
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        wait_until('the following client to start a new head', lambda: self.daemons('head'))
        self.wait_for_state('head', 'RUNNING')
        self.assertEqual(self.rank_pids(), pids, 'no new generation')
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

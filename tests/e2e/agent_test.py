"""The control plane never ends a healthy rank: kill -9 of agent and head while the ranks keep stepping (promise 2)."""
import os
import signal

import harness
from harness import wait_until


class AgentKilledTest(harness.GtrainTest):
    def test_ranks_step_on_and_the_new_agent_adopts_them(self):
        """P4: agent killed; ranks keep stepping; a new agent finds the keeper; exit codes and logs are complete."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('adopt', '--steps', '400', '--hold', done)
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        pids = self.rank_pids()
        agents = self.daemons('agent')
        self.assertEqual(len(agents), 1, self.marked())
        argv = self.marked()[agents[0]]
        os.kill(agents[0], signal.SIGKILL)
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        self.assertEqual(self.rank_pids(), pids)
        restarted = self.restart(argv)
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        self.assertEqual(self.rank_pids(), pids, 'no new generation: the ranks were adopted')
        self.wait_for_state('adopt', 'RUNNING')
        open(done, 'w').close()
        self.wait_for_steps(400, ranks=2)
        self.assertEqual(launch.wait(), 0, launch.output() + restarted.output())
        self.wait_for_no_processes()

    def test_exit_while_the_agent_is_away_is_not_lost(self):
        """P4, P8: ranks end while no agent runs; the next agent reads their exit codes from the keeper."""
        job = self.stepper_job('away', '--steps', '60')
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        agents = self.daemons('agent')
        argv = self.marked()[agents[0]]
        os.kill(agents[0], signal.SIGKILL)
        pids = self.rank_pids()
        wait_until('the ranks end by themselves', lambda: not any(map(harness.alive, pids.values())))
        self.assertEqual(self.steps(), {0: 60, 1: 60})
        restarted = self.restart(argv)
        self.assertEqual(launch.wait(), 0, launch.output() + restarted.output())
        self.assertEqual(list(self.rank_pids(2)), [], 'nothing was run twice')
        self.wait_for_no_processes()

    def restart(self, argv):
        process = harness.Process(argv, self.env(), self.dir, prefix=self.prefix)
        self.started.append(process)
        return process


class AgentKilledOrdinaryUserTest(AgentKilledTest):
    ordinary_user = True


class HeadKilledTest(harness.GtrainTest):
    def test_ranks_step_on_and_the_new_head_knows_the_job(self):
        """H1: head killed; ranks keep stepping; a new head reads its records and the job finishes."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('head', '--steps', '400', '--hold', done)
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        heads = self.daemons('head')
        self.assertEqual(len(heads), 1, self.marked())
        argv = self.marked()[heads[0]]
        pids = self.rank_pids()
        os.kill(heads[0], signal.SIGKILL)
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        restarted = harness.Process(argv, self.env(), self.dir, prefix=self.prefix)
        self.started.append(restarted)
        self.wait_for_state('head', 'RUNNING')
        self.assertEqual(self.rank_pids(), pids, 'no new generation')
        open(done, 'w').close()
        self.wait_for_steps(400, ranks=2)
        self.assertEqual(launch.wait(), 0, launch.output() + restarted.output())
        self.wait_for_no_processes()


if __name__ == '__main__':
    harness.main()

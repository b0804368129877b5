"""`gtrain launch` on one machine: the local cluster starts, works, survives faults, and is gone afterwards."""
import json
import os
import signal
import unittest

import harness
from harness import wait_until


class LocalTest(harness.GtrainTest):
    def test_four_ranks_succeed_with_the_contract(self):
        """Four ranks find what docs/protocols/rank-environment.md promises; nothing is left when the job ends."""
        job = self.stepper_job('four', '--steps', '3', ranks='4')
        launch = self.start('launch', job)
        self.assertEqual(launch.wait(), 0, launch.output())
        envs = [json.loads(self.read(f'env.1.{rank}')) for rank in range(4)]
        for rank, env in enumerate(envs):
            self.assertEqual(env['RANK'], str(rank))
            self.assertEqual(env['LOCAL_RANK'], str(rank))
            self.assertEqual(env['WORLD_SIZE'], '4')
            self.assertEqual(env['LOCAL_WORLD_SIZE'], '4')
            self.assertEqual(env['GROUP_RANK'], '0')
            self.assertEqual(env['TORCHELASTIC_RESTART_COUNT'], '0')
            self.assertEqual(env['TORCHELASTIC_USE_AGENT_STORE'], 'False')
            self.assertEqual(env['OMP_NUM_THREADS'], '1')
            self.assertEqual(env['GTRAIN_GENERATION'], '1')
            self.assertEqual(env['OMPI_COMM_WORLD_RANK'], str(rank))
            self.assertTrue(env['GTRAIN_TOKEN'])
        self.assertEqual(len({env['MASTER_PORT'] for env in envs}), 1)
        self.assertEqual(len({env['GTRAIN_TOKEN'] for env in envs}), 4, 'each rank has a token of its own')
        self.assertEqual(self.steps(), {rank: 3 for rank in range(4)})
        self.wait_for_no_processes()
        for name in ('head', 'agent', 'watch'):
            with open(os.path.join(self.home, 'state', 'gtrain', 'local', name + '.log')) as log:
                self.assertNotIn('is started again', log.read(), 'none is missed when all end')

    def test_killed_rank_comes_back(self):
        """P1: kill -9 of one rank ends the generation; all ranks come back in a new one and finish."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('kill', '--steps', '40', '--hold', done)
        launch = self.start('launch', job)
        self.wait_for_steps(5, ranks=2)
        first = self.rank_pids(1)
        os.kill(first[1], signal.SIGKILL)
        wait_until('ranks of generation 2', lambda: len(self.rank_pids(2)) == 2)
        wait_until('ranks of generation 1 to be gone', lambda: not any(map(harness.alive, first.values())))
        self.wait_for_steps(40, ranks=2)
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        self.assertRegex(launch.output(), r'(?i)rank 1\b.*(SIGKILL|signal 9|killed)')
        env = json.loads(self.read('env.2.0'))
        self.assertEqual(env['TORCHELASTIC_RESTART_COUNT'], '1')
        self.assertNotEqual(env['MASTER_PORT'], json.loads(self.read('env.1.0'))['MASTER_PORT'])
        self.end_local_cluster()

    def test_a_head_killed_at_its_start_is_named(self):
        """It could not say anything itself: the limit on files it writes ends it by a signal."""
        text = self.gtrain('launch', '-n', '1', '--', 'true', expect=1, prefix=['prlimit', '--fsize=4096']).stderr
        self.assertRegex(text, r'head of the local cluster was killed .* signal 25 \(File size limit exceeded\)')
        self.assertRegex(text, r'head\.log says')

    def test_launch_in_the_moment_in_which_the_cluster_ends(self):
        """The head ends before it reads the submit: the next one gets it, and the agent of before finds that one."""
        self.assertEqual(self.start('launch', '-n', '1', '--', 'true').wait(), 0)
        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))
        (head,), (agent,) = self.daemons('head'), self.daemons('agent')
        os.kill(head, signal.SIGSTOP)
        launch = self.start('launch', '-n', '1', '--', 'true')
        wait_until('the client to connect', lambda: len(os.listdir(f'/proc/{launch.popen.pid}/task')) >= 3)
        os.kill(head, signal.SIGKILL)
        # Less than the 20 s for which an agent without a head waits before it ends.
        self.assertEqual(launch.wait(15), 0, launch.output())
        self.assertEqual(self.daemons('agent'), [agent])

        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))
        (head,) = self.daemons('head')
        os.kill(agent, signal.SIGSTOP)  # else it might end, too
        os.kill(head, signal.SIGTERM)
        wait_until('the head to end in order', lambda: not self.daemons('head'))
        launch = self.start('launch', '-n', '1', '--', 'true')
        wait_until('the next head', lambda: self.daemons('head'))
        os.kill(agent, signal.SIGCONT)
        self.assertEqual(launch.wait(15), 0, launch.output())
        self.assertEqual(self.daemons('agent'), [agent])
        self.end_local_cluster()

    def test_crash_loop_fails_with_the_first_fault(self):
        """A rank that always crashes before its first step: FAILED, exit 1, failure.json names rank and exit code."""
        job = self.stepper_job('loop', '--steps', '5', '--crash', '1:1', '--always')
        launch = self.start('launch', job)
        self.assertEqual(launch.wait(), 1, launch.output())
        reports = []
        for folder, _, files in os.walk(self.dir):
            reports += [os.path.join(folder, name) for name in files if name == 'failure.json']
        self.assertEqual(len(reports), 1, launch.output())
        with open(reports[0]) as data:
            text = data.read()
        report = json.loads(text)
        first = report.get('first_fault', report)
        self.assertEqual(first.get('rank'), 1, text)
        self.assertIn('7', json.dumps(first), text)
        self.assertIn('crashes as told before step 1', text, 'the last lines of the rank are evidence')
        self.end_local_cluster()

    def test_setup_runs_once_before_the_ranks(self):
        """`setup` runs once on the node, before any rank and not again after a crash; its output is in the logs."""
        marks = os.path.join(self.out, 'setups')
        extra = f'setup: |\n  echo preparing the node\n  test ! -e {self.out}/pid.0.1\n  echo once >> {marks}\n'
        job = self.stepper_job('prepared', '--steps', '5', '--crash', '1:3', ranks='4', extra=extra)
        launch = self.start('launch', job)
        self.assertEqual(launch.wait(), 0, launch.output())
        self.assertIn('preparing the node', launch.output())
        self.assertEqual(self.read('setups'), 'once')
        self.assertEqual(self.job('prepared')['restarts'], 1)
        self.end_local_cluster()

    def test_failing_setup_is_a_failure_of_the_job(self):
        """Nothing of the job runs behind a setup that failed; the reason and its last lines are shown."""
        marks = os.path.join(self.out, 'setups')
        extra = f'setup: |\n  echo run >> {marks}\n  echo no such package >&2\n  false\n'
        launch = self.start('launch', self.stepper_job('unprepared', '--steps', '5', ranks='4', extra=extra))
        self.assertEqual(launch.wait(), 1, launch.output())
        self.assertIn("the job's `setup` failed on this node", launch.output())
        self.assertIn('no such package', launch.output())
        self.assertFalse(self.rank_pids(), 'no rank may have started')
        generations = self.job('unprepared')['generation']
        self.assertEqual(self.read('setups').split(), ['run'] * generations, 'once a generation, not once a rank')
        self.end_local_cluster()

    def test_stop_from_another_terminal(self):
        """`status` in a second terminal finds the job; `stop` ends it with a chance to save."""
        job = self.stepper_job('stopme', '--steps', '100000', '--slow-stop')
        launch = self.start('launch', job)
        self.wait_for_steps(2, ranks=2)
        seen = self.wait_for_state('stopme', 'RUNNING')
        self.assertIn('stopme', self.gtrain('status').stdout)
        self.assertIn('reason', seen)
        self.gtrain('stop', seen.get('id') or seen.get('job'))
        self.assertNotEqual(launch.wait(), 0, launch.output())
        wait_until('both ranks saw SIGTERM', lambda: all(
            os.path.exists(os.path.join(self.out, f'stopped.{rank}')) for rank in range(2)))
        self.end_local_cluster()

    def test_hostile_job_file_starts_nothing(self):
        """J table, one of each kind: exit 2, place and nearest key named, no process left."""
        path = self.job_file('bad', 'name: bad\nrun: echo a | cat\nranks: 010\nrnaks: 4\n')
        done = self.gtrain('launch', path, expect=None)
        self.assertEqual(done.returncode, 2, done.stderr)
        text = done.stdout + done.stderr
        self.assertIn('bad.yaml:2:', text)
        self.assertIn('bad.yaml:3:', text)
        self.assertIn('bad.yaml:4:', text)
        self.assertIn('ranks', text)
        self.assertEqual(self.marked(), {})


class OrdinaryUserTest(harness.GtrainTest):
    ordinary_user = True

    def test_killed_rank_comes_back_without_cgroups(self):
        """P1, P7 as nobody: no delegated cgroup, the keeper as subreaper ends the tree."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('user', '--steps', '20', '--hold', done)
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        os.kill(self.rank_pids(1)[0], signal.SIGKILL)
        wait_until('ranks of generation 2', lambda: len(self.rank_pids(2)) == 2)
        self.wait_for_steps(20, ranks=2)
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

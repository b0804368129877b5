"""The terminal: Ctrl-C, a closed window, detach and attach."""
import os
import signal

import harness
from harness import wait_until


class TerminalTest(harness.GtrainTest):
    def test_ctrl_c_stops_gracefully(self):
        """One Ctrl-C on a local job: the ranks get SIGTERM and may save; nothing is left."""
        job = self.stepper_job('ctrlc', '--steps', '100000', '--slow-stop')
        launch = self.start('launch', job, terminal=True)
        self.wait_for_steps(2, ranks=2)
        launch.type(b'\x03')
        self.assertNotEqual(launch.wait(), 0, launch.output())
        wait_until('both ranks saw SIGTERM', lambda: all(
            os.path.exists(os.path.join(self.out, f'stopped.{rank}')) for rank in range(2)))
        self.wait_for_no_processes()

    def test_closing_the_terminal_detaches(self):
        """SIGHUP of the session: the job goes on, status finds it, and it finishes."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('hup', '--steps', '20', '--hold', done)
        launch = self.start('launch', job, terminal=True)
        self.wait_for_steps(2, ranks=2)
        launch.close_terminal()
        launch.wait()
        pids = self.rank_pids()
        self.wait_for_steps(20, ranks=2)
        self.assertEqual(self.rank_pids(), pids, 'the ranks are the same processes')
        self.wait_for_state('hup', 'RUNNING')
        open(done, 'w').close()
        self.wait_for_no_processes()

    def test_detach_and_attach(self):
        """launch -d returns at once; attach follows to the end and gives the job's exit code."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('detached', '--steps', '5', '--hold', done)
        launch = self.start('launch', '-d', job)
        self.assertEqual(launch.wait(), 0, launch.output())
        seen = self.wait_for_state('detached', 'RUNNING')
        attach = self.start('attach', seen.get('id') or seen.get('job'))
        self.wait_for_steps(5, ranks=2)
        self.assertIsNone(attach.popen.poll(), attach.output())
        open(done, 'w').close()
        self.assertEqual(attach.wait(), 0, attach.output())
        self.wait_for_no_processes()

    def test_client_killed_job_goes_on(self):
        """kill -9 of the client is nothing to the job; a new client attaches."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('client', '--steps', '5', '--hold', done)
        launch = self.start('launch', job)
        self.wait_for_steps(2, ranks=2)
        launch.signal(signal.SIGKILL)
        launch.wait()
        seen = self.wait_for_state('client', 'RUNNING')
        attach = self.start('attach', seen.get('id') or seen.get('job'))
        open(done, 'w').close()
        self.assertEqual(attach.wait(), 0, attach.output())
        self.wait_for_no_processes()


if __name__ == '__main__':
    harness.main()

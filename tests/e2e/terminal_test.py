"""The terminal: Ctrl-C, a closed window, detach and attach."""
import os
import re
import signal
import time

import harness
from harness import wait_until


def caught(pid, number):
    """Whether the process has a handler for the signal."""
    mask = re.search(rb'SigCgt:\s*(\w+)', harness.read_proc(pid, 'status'))
    return mask and int(mask.group(1), 16) >> (number - 1) & 1


class TerminalTest(harness.GtrainTest):
    def test_live_view(self):
        """The block of status lines follows the job; what ranks write stays above it and cannot drive the terminal
        (P9); a fault is said once."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('live', '--until', done, '--checkpoints', '--escape')
        launch = self.start('launch', job, terminal=True)
        launch.wait_for(r'-- live-1 -- RUNNING -- generation 1, 2 ranks -- \d+s\r\n')
        wait_until('both ranks to run', lambda: len(self.rank_pids(1)) == 2)
        os.kill(self.rank_pids(1)[1], signal.SIGKILL)
        launch.wait_for(r'-- live-1 -- RUNNING -- generation 2, 2 ranks -- (\d+m)?\d+s\r\n')
        launch.wait_for(r'   \S+: ranks 0,1 running\r\n')
        launch.wait_for(r'   step \d+, loss \S+, .*checkpoint at step \d+, 1 restart\r\n')
        launch.wait_for(r'   Ctrl-C stops the job\r\n')
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        output = launch.output()
        self.assertRegex(output, r':(0|1|0,1): \\x1b\[2Jred\\x1b\]0;title\\x07\r\n')
        for code in ('\x1b[2J', '\x1b[31m', '\x1b]', '\x07'):
            self.assertNotIn(code, output)
        shown = self.replay(output)
        self.assertFalse([line for line in shown if '-- live-1 --' in line or 'Ctrl-C' in line], 'the block is gone')
        for rank in range(2):
            self.assertEqual(sum(f'rank {rank} generation 2 starts' in line for line in shown), 1, shown)
        fault = [line for line in shown if 'signal 9' in line]
        self.assertEqual(len(fault), 2, shown)
        self.assertIn('RECONFIGURING: ' + fault[0].removeprefix('gtrain: ') + '; ', fault[1])
        self.assertIn('gtrain: live-1 SUCCEEDED', shown[-1])
        self.end_local_cluster()

    def test_what_a_shell_said_meanwhile_stays(self):
        """Ctrl-Z and fg: the block was drawn anew over what the shell had written below it."""
        done = os.path.join(self.dir, 'go')
        launch = self.start('launch', self.stepper_job('paused', '--until', done), terminal=True)
        launch.wait_for(r'   Ctrl-C stops the job\r\n')
        launch.signal(signal.SIGSTOP)
        wait_until('it to stand still', lambda: b'T' in harness.read_proc(launch.pid, 'stat').rsplit(b')', 1)[1].split()[:1])
        shown = launch.size()
        launch.signal(signal.SIGCONT)
        wait_until('the block anew', lambda: 'Ctrl-C stops the job' in launch.output()[shown:])
        self.assertNotRegex(launch.output()[shown:].split('-- paused-1 --')[0], r'\x1b\[\d*A')
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        self.end_local_cluster()

    def replay(self, output):
        """The lines which a terminal of endless height shows at the end; understands what the view uses: cursor up,
        erase below."""
        lines, row = [''], 0
        for part in re.findall(r'\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+|\x1b', output):
            if part == '\n':
                row += 1
                lines += [''] * (row + 1 - len(lines))
            elif re.fullmatch(r'\x1b\[\d+A', part):
                row -= int(part[2:-1])
                self.assertGreaterEqual(row, 0, 'never above what the view wrote')
            elif part == '\x1b[J':
                lines[row:] = ['']
            elif part != '\r':
                self.assertFalse(part.startswith('\x1b'), repr(part))
                lines[row] += part
        return [line for line in lines if line]

    def test_ctrl_c_stops_gracefully(self):
        """One Ctrl-C on a local job: the ranks get SIGTERM and may save; nothing is left."""
        job = self.stepper_job('ctrlc', '--steps', '100000', '--slow-stop')
        launch = self.start('launch', job, terminal=True)
        self.wait_for_steps(2, ranks=2)
        launch.type(b'\x03')
        self.assertEqual(launch.wait(), 130, launch.output())
        wait_until('both ranks saw SIGTERM', lambda: all(
            os.path.exists(os.path.join(self.out, f'stopped.{rank}')) for rank in range(2)))
        self.assertIn('gtrain: ctrlc-1 CANCELLED', launch.output())
        self.end_local_cluster()

    def test_ctrl_c_on_a_slow_terminal(self):
        """Of a rank that writes without end, to a terminal of 20 kB/s: a write of what waits for it takes minutes."""
        launch = self.start('launch', '-n', '1', '--name', 'slow', '--', 'sh', '-c',
                            'while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done',
                            terminal=True, rate=20_000)
        wait_until('output', lambda: launch.size() > 20_000)
        pressed = time.monotonic()
        launch.type(b'\x03')
        wait_until('the job to be stopped', lambda: [job for job in self.jobs() if job['state'] == 'CANCELLED'])
        self.assertLess(time.monotonic() - pressed, 15, 'the stop came with the Ctrl-C, not behind the output')
        self.assertEqual(launch.wait(), 130)
        self.assertRegex(launch.output(), r'\[\d+ bytes of output are not shown here; `gtrain logs` has them\]')
        self.end_local_cluster()

    def test_ctrl_c_twice_stops_now(self):
        """The second Ctrl-C does not wait for a rank which takes its time; stop_grace is far longer than the test."""
        job = self.stepper_job('now', '--steps', '100000', '--deaf', extra='stop_grace: 30m\n')
        launch = self.start('launch', job, terminal=True)
        self.wait_for_steps(2, ranks=2)
        launch.type(b'\x03')
        launch.wait_for('Ctrl-C again stops now')
        before = max(self.steps().values())
        self.wait_for_steps(before + 3, ranks=2)
        self.assertIsNone(launch.popen.poll(), 'one Ctrl-C leaves the ranks their time')
        launch.type(b'\x03')
        self.assertEqual(launch.wait(), 130, launch.output())
        self.assertIn('gtrain: now-1 CANCELLED', launch.output())
        self.end_local_cluster()

    def test_many_ctrl_c(self):
        """300 of them are a stop that is said once; each was asked for and said again, and the last ones spoiled the
        exit code."""
        job = self.stepper_job('many', '--steps', '100000', '--deaf', extra='stop_grace: 30m\n')
        launch = self.start('launch', job)
        self.wait_for_steps(2, ranks=2)
        for said in ('stopping', 'CANCELLED'):  # signals that come too fast for the client are one to it
            for _ in range(150):
                launch.signal(signal.SIGINT)
            launch.wait_for(said)
        while launch.popen.poll() is None:  # to the very end of the process
            launch.signal(signal.SIGINT)
        self.assertEqual(launch.wait(), 130, launch.output())
        lines = re.findall(r'^gtrain: (stopping.*|.* CANCELLED.*|.*not taken.*)$', launch.output(), re.M)
        self.assertLessEqual(len(lines), 3, lines)  # "stopping", "stopping now", and how it ended
        self.assertIn('many-1 CANCELLED', lines[-1])
        self.end_local_cluster()

    def test_ctrl_c_before_there_is_a_job(self):
        """Said in one line, with the same exit code."""
        self.gtrain('launch', '-n', '1', '--', 'true')
        (head,) = self.daemons('head')
        os.kill(head, signal.SIGSTOP)
        try:
            launch = self.start('launch', '-n', '1', '--', 'true')
            wait_until('it to catch the signal', lambda: caught(launch.pid, signal.SIGINT))
            while launch.popen.poll() is None:
                launch.signal(signal.SIGINT)
            self.assertEqual(launch.wait(), 130, launch.output())
            self.assertRegex(launch.output(), r'^gtrain: interrupted[^\n]*\n$')
        finally:
            os.kill(head, signal.SIGCONT)
        self.end_local_cluster()

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
        self.assertEqual(launch.popen.returncode, 128 + signal.SIGHUP)
        self.wait_for_state('hup', 'RUNNING')
        open(done, 'w').close()
        self.end_local_cluster()

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
        self.end_local_cluster()

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
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

"""The operating system at its worst: closed descriptors, small limits, output without end."""
import os
import re
import subprocess

import harness

PATIENCE = 120


class OsTest(harness.GtrainTest):
    def launch_by(self, shell, expect=0):
        """`gtrain launch -n 1 -- true` by a shell that does something to the process first."""
        done = subprocess.run([*self.prefix, 'bash', '-c', shell, 'bash', self.program], env=self.env(), cwd=self.dir,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done

    def test_closed_standard_files(self):
        """A file of the store or a socket must not become descriptor 0, 1 or 2."""
        for closed in ('<&-', '>&-', '2>&-', '<&- >&- 2>&-'):
            with self.subTest(closed):
                self.launch_by(f'exec "$1" launch -n 1 -- true {closed}')
        self.end_local_cluster()

    def test_too_few_descriptors_are_said(self):
        """The head hung holding its lock, or libzmq ended the program."""
        for limit in (24, 100):
            with self.subTest(limit):
                done = self.launch_by(f'ulimit -n {limit}; exec "$1" launch -n 1 -- true', expect=1)
                self.assertRegex(done.stderr, rf'may have {limit} open files and needs \d+: raise `ulimit -n`')
        self.gtrain('launch', '-n', '1', '--', 'true')  # nothing holds the lock
        self.end_local_cluster()

    def test_equal_lines_without_end(self):
        """Half a minute for 80 kB of them, before; and a signal was not looked at."""
        done = self.gtrain('launch', '-n', '2', '--', 'bash', '-c', 'yes | head -n 300000', timeout=PATIENCE)
        for rank in '01':
            shown = re.findall(rf'^[^:]+:(?:{rank}|0,1): y$', done.stdout, re.M)
            self.assertEqual(len(shown), 300000, 'each once, alone or together with the other')

    def test_what_is_not_shown_is_said(self):
        written = 100_000_000  # far more than is read of a job that is over
        done = self.gtrain('launch', '-n', '1', '--', 'bash', '-c', f'head -c {written} /dev/zero | tr "\\0" x',
                           timeout=PATIENCE)
        self.assertLess(len(done.stdout), written)
        self.assertRegex(done.stdout + done.stderr,
                         r'the rest of what rank 0 wrote is not shown; all of it: gtrain logs \S+ --rank 0 --generation 1')


if __name__ == '__main__':
    harness.main()

"""Input and terminals: `exec -i`, `exec -it`, `launch -i` and `launch -it`, as a person or a script uses them."""
import fcntl
import hashlib
import os
import pty
import random
import signal
import struct
import subprocess
import termios
import time

import harness
from harness import PATIENCE, wait_until

MEGABYTES = 20


class InteractiveTest(harness.GtrainTest):
    def give(self, *args, data=b'', expect=0, timeout=PATIENCE, **env):
        """Runs gtrain with `data` as stdin; bytes come back as they are."""
        done = subprocess.run([self.program, *args], env=self.env(**env), cwd=self.dir, input=data,
                              capture_output=True, timeout=timeout)
        if expect is not None:
            self.assertEqual(done.returncode, expect,
                             f'gtrain {" ".join(args)}\n--- stdout\n{done.stdout[-2000:]}\n--- stderr\n{done.stderr}')
        return done

    def popen(self, *args):
        process = subprocess.Popen([self.program, *args], env=self.env(), cwd=self.dir, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(lambda: [stream.close() for stream in (process.stdin, process.stdout, process.stderr)])
        self.addCleanup(lambda: (process.kill(), process.wait()))
        return process

    def sleeping_job(self):
        job = self.gtrain('launch', '-d', '-n', '1', '--', 'sleep', '600').stdout.strip()
        self.wait_for_state(job, 'RUNNING')
        return job

    def stop(self, job):
        self.gtrain('stop', '--now', job)
        self.wait_for_state(job, 'CANCELLED')
        self.end_local_cluster()

    def noted_pid(self, name='pid'):
        path = os.path.join(self.out, name)
        return int(wait_until(f'a process id in {path}', lambda: os.path.exists(path) and self.read(name)))

    @staticmethod
    def resize(process, rows, columns):
        fcntl.ioctl(process.master, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))


class ExecPipeTest(InteractiveTest):
    def test_input_output_and_exit_code(self):
        self.gtrain('exec', '-i', '--', 'cat', expect=1)  # no job
        job = self.sleeping_job()
        done = self.give('exec', '-i', '--', 'cat', data=b'hi\n')
        self.assertEqual((done.stdout, done.stderr), (b'hi\n', b''))
        done = self.give('exec', '-i', job, '--', 'sh', '-c', 'cat >&2; echo out; exit 7', data=b'err', expect=7)
        self.assertEqual((done.stdout, done.stderr), (b'out\n', b'err'))
        self.give('exec', '-i', '--', 'sh', '-c', 'kill -9 $$', expect=128 + signal.SIGKILL)
        done = self.give('exec', '-i', '--', 'no-such-program', expect=127)
        self.assertIn(b'cannot run no-such-program', done.stderr)
        # It ends although its input does not.
        endless = self.popen('exec', '-i', '--', 'head', '-c', '3')
        endless.stdin.write(b'abcdef')
        endless.stdin.flush()
        self.assertEqual((endless.wait(PATIENCE), endless.stdout.read()), (0, b'abc'))
        done = self.give('exec', '-i', '--rank', '5', '--', 'cat', expect=2)
        self.assertIn(b'no rank 5', done.stderr)
        self.give('exec', '-i', '--json', '--', 'cat', expect=2)
        self.stop(job)

    def test_output_comes_as_it_is_written_and_without_a_limit_of_time(self):
        job = self.sleeping_job()
        talk = self.popen('exec', '-i', '--', 'sh', '-c', 'while read word; do echo "<$word>"; done; sleep 10; echo end')
        for word in (b'one', b'two'):
            talk.stdin.write(word + b'\n')
            talk.stdin.flush()
            self.assertEqual(talk.stdout.readline(), b'<' + word + b'>\n')
        talk.stdin.close()
        self.assertEqual(talk.stdout.read(), b'end\n')
        self.assertEqual(talk.wait(PATIENCE), 0)
        talk.stdin = open(os.devnull, 'wb')
        self.stop(job)

    def test_megabytes_are_whole(self):
        job = self.sleeping_job()
        data = random.Random(7).randbytes(MEGABYTES << 20)
        digest = hashlib.sha256(data).hexdigest().encode()
        self.assertEqual(self.give('exec', '-i', '--', 'sha256sum', data=data).stdout.split()[0], digest)
        done = self.give('exec', '-i', '--', 'cat', data=data)
        self.assertEqual((len(done.stdout), hashlib.sha256(done.stdout).hexdigest().encode()), (len(data), digest))
        self.stop(job)

    def test_a_reader_that_does_not_read_holds_up_the_program_alone(self):
        job = self.sleeping_job()
        talk = self.popen('exec', '-i', '--', 'sh', '-c', f'echo $$ > {self.out}/pid; head -c 1000000 /dev/zero; echo $? > {self.out}/code')
        pid = self.noted_pid()
        # Longer than a keeper waits for a client that is gone.
        until = time.monotonic() + 17
        wait_until('17 s', lambda: time.monotonic() > until)
        self.assertTrue(harness.alive(pid))
        self.assertEqual(len(talk.stdout.read()), 1000000)
        self.assertEqual(talk.wait(PATIENCE), 0)
        self.stop(job)

    def test_a_client_that_is_gone_ends_its_program(self):
        job = self.sleeping_job()
        # One that is told so ends at once, one that is killed after the silence; a program that ignores SIGHUP, too.
        for name, number in (('term', signal.SIGTERM), ('kill', signal.SIGKILL)):
            talk = self.popen('exec', '-i', '--', 'sh', '-c', f'trap "" HUP; echo $$ > {self.out}/{name}; sleep 600')
            pid = self.noted_pid(name)
            talk.send_signal(number)
            talk.wait(PATIENCE)
            wait_until(f'the end of the program after {name}', lambda: not harness.alive(pid))
        self.stop(job)

    def kill_and_wait_for_the_next(self, verb):
        before = self.daemons(verb)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(f'the next {verb}', lambda: self.daemons(verb) and self.daemons(verb) != before)

    def test_a_head_and_an_agent_that_restart_are_no_end(self):
        job = self.sleeping_job()
        talk = self.popen('exec', '-i', '--', 'cat')
        talk.stdin.write(b'before\n')
        talk.stdin.flush()
        self.assertEqual(talk.stdout.readline(), b'before\n')
        self.kill_and_wait_for_the_next('head')
        talk.stdin.write(b'after\n')
        talk.stdin.flush()
        self.assertEqual(talk.stdout.readline(), b'after\n')
        self.kill_and_wait_for_the_next('agent')
        talk.stdin.write(b'last\n')
        talk.stdin.close()
        self.assertEqual(talk.stdout.read(), b'last\n')
        self.assertEqual(talk.wait(PATIENCE), 0)
        talk.stdin = open(os.devnull, 'wb')
        self.stop(job)

    def test_the_job_that_ends_ends_it(self):
        job = self.sleeping_job()
        talk = self.popen('exec', '-i', '--', 'sh', '-c', f'echo $$ > {self.out}/pid; sleep 600')
        pid = self.noted_pid()
        self.stop(job)
        self.assertNotEqual(talk.wait(PATIENCE), 0)
        self.assertFalse(harness.alive(pid))


class ExecTerminalTest(InteractiveTest):
    def test_without_a_terminal_it_is_refused(self):
        done = self.give('exec', '-it', '--', 'bash', expect=2)
        self.assertIn(b'exec -t: stdin is not a terminal', done.stderr)
        done = self.give('launch', '-it', '-n', '1', '--', 'bash', expect=2)
        self.assertIn(b'launch -t: stdin is not a terminal', done.stderr)
        self.assertEqual(self.daemons('head'), [])

    def settings(self, process):
        return termios.tcgetattr(process.master)

    def test_a_terminal_of_its_own(self):
        job = self.sleeping_job()
        shell = self.start('exec', '-it', '--', 'sh', '-i', terminal=True, TERM='vt220', PS1='')
        before = termios.tcgetattr(pty.openpty()[0])  # as they are before a program changes them
        shell.type(b'stty size; tty; echo term=$TERM.\n')
        shell.wait_for(r'30 100\r\n/dev/pts/\d+\r\nterm=vt220\.\r\n')
        self.assertNotEqual(self.settings(shell), before)
        self.resize(shell, 41, 132)
        shell.type(b'stty size\n')
        shell.wait_for(r'41 132\r\n')
        # Ctrl-C is the program's.
        shell.type(b'echo sle""ep; sleep 600\n')
        shell.wait_for(r'sleep\r\n')
        shell.type(b'\x03')
        shell.type(b'echo code=$?.\n')
        shell.wait_for(r'code=130\.')
        shell.type(b'exit 9\n')
        self.assertEqual(shell.wait(), 9)
        self.assertEqual(self.settings(shell), before)
        self.stop(job)

    def test_the_size_is_followed(self):
        job = self.sleeping_job()
        watch = self.start('exec', '-it', '--', 'bash', '--norc', '-c',
                           'trap "stty size" WINCH; echo ready; while true; do sleep 0.1; done', terminal=True)
        watch.wait_for('ready')
        self.resize(watch, 50, 90)
        watch.wait_for(r'50 90\r\n')
        watch.type(b'\x03')
        self.assertEqual(watch.wait(), 128 + signal.SIGINT)
        self.stop(job)

    def test_a_client_that_is_ended_hangs_up_and_leaves_the_terminal_as_it_was(self):
        job = self.sleeping_job()
        script = f'echo $$ > {self.out}/%s; echo ready; sleep 600'
        shell = self.start('exec', '-it', '--', 'sh', '-c', script % 'term', terminal=True)
        before = self.settings(shell)
        pid = self.noted_pid('term')
        wait_until('a terminal that passes every key on', lambda: self.settings(shell) != before)
        shell.signal(signal.SIGTERM)
        self.assertEqual(shell.wait(), 128 + signal.SIGTERM)
        self.assertEqual(self.settings(shell), before)
        wait_until('the end of the program', lambda: not harness.alive(pid))
        shell = self.start('exec', '-it', '--', 'sh', '-c', script % 'window', terminal=True)
        pid = self.noted_pid('window')
        shell.close_terminal()
        shell.popen.wait(PATIENCE)
        wait_until('the end of the program', lambda: not harness.alive(pid))
        self.stop(job)


class LaunchTest(InteractiveTest):
    def test_stdin_is_rank_0s(self):
        done = self.give('launch', '-i', '-n', '2', '--', 'sh', '-c', 'echo "$RANK got $(wc -c)"', data=b'x' * 300000)
        self.assertIn(b':0: 0 got 300000\n', done.stdout)
        self.assertIn(b':1: 1 got 0\n', done.stdout)
        path = self.job_file('reads', 'name: reads\nrun: [cat]\nstdin: true\n')
        self.assertIn(b'words', self.give('launch', path, data=b'words\n').stdout)
        done = self.give('launch', '-i', '-d', '--', 'cat', expect=2)
        self.assertIn(b'leave -d away', done.stderr)

    def test_a_talk_with_rank_0(self):
        talk = self.popen('launch', '-i', '-n', '2', '--', 'sh', '-c',
                          'test $RANK = 0 || exec sleep 600; while read word; do echo "<$word>"; done; exit 3')
        for word in (b'one', b'two'):
            talk.stdin.write(word + b'\n')
            talk.stdin.flush()
            self.assertIn(b'<' + word + b'>', talk.stdout.readline())
        talk.send_signal(signal.SIGINT)
        self.assertEqual(talk.wait(PATIENCE), 130)

    def test_the_next_generation_goes_on_with_the_input(self):
        talk = self.popen('launch', '-i', '-n', '1', '--set', 'restart.budget=1', '--', 'sh', '-c',
                          'read word; echo "$GTRAIN_GENERATION $word"; test $GTRAIN_GENERATION = 2')
        talk.stdin.write(b'one\n')
        talk.stdin.flush()
        self.assertEqual(talk.stdout.readline().split(b': ')[-1], b'1 one\n')
        self.wait_for_state('sh', 'RUNNING', 'STARTING', 'RECONFIGURING')
        wait_until('generation 2', lambda: (self.job('sh') or {}).get('generation') == 2)
        talk.stdin.write(b'two\n')
        talk.stdin.flush()
        self.assertEqual(talk.stdout.readline().split(b': ')[-1], b'2 two\n')
        self.assertEqual(talk.wait(PATIENCE), 0)

    def test_a_launch_that_is_killed_hangs_up(self):
        shell = self.start('launch', '-it', '-n', '1', '--', 'sh', '-c', f'echo $$ > {self.out}/pid; sleep 600', terminal=True)
        pid = self.noted_pid()
        wait_until('a terminal that passes every key on', lambda: not termios.tcgetattr(shell.master)[3] & termios.ICANON)
        shell.signal(signal.SIGKILL)
        shell.popen.wait(PATIENCE)
        self.wait_for_state('sh', 'FAILED')
        self.assertFalse(harness.alive(pid))

    def test_a_job_in_this_terminal(self):
        program = os.path.join(self.dir, 'train.py')
        with open(program, 'w') as out:
            out.write('import sys\nloss = 41\nloss += 1\nprint("lo" + "ss", loss, sys.stdin.isatty(), sys.stderr.isatty())\n')
        pdb = self.start('launch', '-it', '-n', '1', '--', 'python3', '-m', 'pdb', program, terminal=True)
        pdb.wait_for(r'\(Pdb\) ')
        for word in (b'next\n', b'next\n', b'p 1000 + loss\n'):
            pdb.type(word)
        pdb.wait_for(r'1041\r\n')
        pdb.type(b'continue\n')
        pdb.wait_for(r'loss 42 True True\r\n')
        pdb.wait_for(r'will be restarted')
        pdb.type(b'q\n')
        code = pdb.wait()
        self.assertEqual(code, 0, pdb.output())
        self.assertRegex(pdb.output(), r'gtrain: \S+ SUCCEEDED')
        self.assertEqual(pdb.output().count('loss 42 True True'), 1)

    def test_a_rank_that_ends_while_its_client_stands_still(self):
        """Its output was shown as it came, and is not shown a second time as lines of a log."""
        done = os.path.join(self.dir, 'go')
        shell = self.start('launch', '-it', '-n', '1', '--name', 'still', '--', 'sh', '-c',
                           f'echo be""gun; until [ -e {done} ]; do sleep 0.05; done; echo la""st-words', terminal=True)
        shell.wait_for('begun')
        shell.signal(signal.SIGSTOP)
        open(done, 'w').close()
        self.wait_for_state('still', 'SUCCEEDED')
        shell.signal(signal.SIGCONT)
        self.assertEqual(shell.wait(), 0, shell.output())
        self.assertEqual(shell.output().count('begun'), 1, shell.output())
        self.assertEqual(shell.output().count('last-words'), 1, shell.output())

    def test_more_ranks_have_no_terminal(self):
        several = self.start('launch', '-it', '-n', '2', '--', 'bash', terminal=True)
        self.assertEqual(several.wait(), 2)
        self.assertIn('a terminal is for a job of one rank', several.output())

    def test_a_failure_is_not_tried_again(self):
        shell = self.start('launch', '-it', '-n', '1', '--', 'sh', '-i', terminal=True, PS1='')
        shell.type(b'stty size; echo sle""ep; sleep 600\n')
        shell.wait_for(r'30 100\r\nsleep\r\n')
        shell.type(b'\x03')
        shell.type(b'echo code=$?.\n')
        shell.wait_for(r'code=130\.')
        shell.type(b'exit 4\n')
        self.assertEqual(shell.wait(), 1)
        self.assertRegex(shell.output(), r'FAILED')


if __name__ == '__main__':
    harness.main()

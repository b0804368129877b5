"""What is seen of a rank from outside: a command beside it, its stacks, and that it stands still."""
import json
import os
import shutil
import signal

import harness
from harness import PlainShellTest, wait_until


class ExecTest(PlainShellTest):
    """`gtrain exec` is used in scripts, so what the command says of itself must come through."""

    def launch(self, *args, **env):
        job = json.loads(self.gtrain('launch', '-d', '--json', *args, **env).stdout)['job']
        self.wait_for_state(job, 'RUNNING')
        self.addCleanup(self.gtrain, 'stop', '--now', job, expect=None)
        return job

    def test_the_exit_code_is_that_of_the_command(self):
        job = self.launch('-n', '2', '--', 'sleep', '600')
        done = self.gtrain('exec', '--rank', '1', job, '--', 'sh', '-c', 'echo out $RANK; echo err >&2; exit 7', expect=7)
        self.assertEqual((done.stdout, done.stderr), ('out 1\n', 'err\n'))
        self.gtrain('exec', job, '--', 'true')
        self.gtrain('exec', job, '--', 'sh', '-c', 'kill -SEGV $$', expect=128 + signal.SIGSEGV)
        missing = self.gtrain('exec', job, '--', 'no-such-program', expect=127)
        self.assertIn('cannot run no-such-program', missing.stderr)
        done = self.gtrain('exec', '--json', '--rank', '1', job, '--', 'sh', '-c', 'echo out; echo err >&2; exit 3', expect=3)
        document = json.loads(done.stdout)
        self.assertEqual({key: document[key] for key in ('exit_code', 'stdout', 'stderr', 'rank', 'host', 'timed_out')},
                         {'exit_code': 3, 'stdout': 'out\n', 'stderr': 'err\n', 'rank': 1, 'host': os.uname().nodename,
                          'timed_out': False})

    def test_the_time_limit_is_said(self):
        job = self.launch('-n', '1', '--', 'sleep', '600')
        done = self.gtrain('exec', job, '--', 'sh', '-c', 'echo begun; sleep 600', expect=124)
        self.assertEqual(done.stdout, 'begun\n')
        self.assertIn('time limit', done.stderr)

    def test_a_terminal_makes_output_live(self):
        """perl holds its output back on a pipe, as most programs do."""
        for tty, live in (('true', True), ('false', False)):
            go = os.path.join(self.dir, 'go-' + tty)
            job = self.launch(self.job_file('tty', f"""name: tty-{tty}
run: [perl, -e, 'print "first words\\n"; print STDERR -t STDOUT ? "terminal" : "pipe", "\\n"; sleep 1 until -e "{go}"']
tty: {tty}
"""))
            wait_until('the kind of its output', lambda: self.gtrain('logs', '--err', job).stdout)
            self.assertIn('terminal' if live else 'pipe', self.gtrain('logs', '--err', job).stdout)
            self.assertEqual('first words' in self.gtrain('logs', job).stdout, live)
            open(go, 'w').close()
            self.wait_for_state(job, 'SUCCEEDED')
            self.assertNotIn('\\x0d', self.gtrain('logs', job).stdout)


class StallTest(PlainShellTest):
    """Rank 0 of a program that knows nothing of gtrain stands still; rank 1 waits for a word of it."""

    PAIR = """import os, socket, sys, time
go, rank, port = sys.argv[1], int(os.environ['RANK']), int(os.environ['MASTER_PORT'])

def load_batch():
    while not os.path.exists(go):
        time.sleep(2)

def wait_for_rank_0():
    while True:
        try:
            return socket.create_connection(('127.0.0.1', port)).recv(1)
        except ConnectionRefusedError:
            time.sleep(0.05)

if rank == 0:
    listener = socket.create_server(('127.0.0.1', port))
    for step in range(3):
        print('step', step, flush=True)
    peer = listener.accept()[0]
    load_batch()
    print('step 3', flush=True)
    peer.sendall(b'x')
else:
    wait_for_rank_0()
"""

    def launch(self, progress, program=PAIR, ranks=2, **env):
        path = os.path.join(self.dir, 'train.py')
        with open(path, 'w') as out:
            out.write(program)
        os.chmod(path, 0o644)
        self.go = os.path.join(self.dir, 'go')
        job = self.gtrain('launch', '-d', '--json', self.job_file(
            'train', f'name: train\nrun: [/usr/bin/python3, {path}, {self.go}]\nranks: {ranks}\n{progress}'), **env)
        job = json.loads(job.stdout)['job']
        self.addCleanup(self.gtrain, 'stop', '--now', job, expect=None)
        self.wait_for_state(job, 'RUNNING')
        return job

    def go_on(self, job):
        open(self.go, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')

    def test_a_hang_without_any_pattern_is_a_state(self):
        job = self.launch('progress: {stall: 4s}\n')
        said = wait_until('the verdict', lambda: (self.job(job) or {}).get('stuck'))
        self.assertRegex(said, r'^seems stuck: no output and no CPU for \d+s; rank 0 on \S+ is blocked in \w*nanosleep\w*, '
                               r'rank 1 on \S+ is blocked in \w+; `gtrain stack \S+ --rank 0` shows more$')
        self.assertIn('seems stuck: no output', self.gtrain('status').stdout)
        self.assertIn('seems stuck: no output', self.gtrain('status', job).stdout)
        why = self.gtrain('why', job).stdout
        self.assertIn('now: seems stuck', why)
        self.assertEqual(why.count('  stall: seems stuck'), 1, why)
        self.assertEqual(self.job(job)['state'], 'RUNNING', 'it is said, and nothing is killed')
        self.go_on(job)
        self.assertFalse(self.job(job)['stuck'])

    def test_the_rank_that_sleeps_is_named_not_the_silent_one(self):
        job = self.launch("progress: {step: 'step (\\d+)', stall: 4s}\n")
        stalls = lambda: [event['text'] for event in json.loads(self.gtrain('why', job, '--json').stdout)['events']
                          if event['kind'] == 'stall']
        wait_until('the verdict and two stacks', lambda: len(stalls()) >= 3)
        self.assertRegex(stalls()[0], r'^no step for 4s; rank 0 on \S+ is blocked in \w*nanosleep')
        for rank in (0, 1):
            self.assertEqual(len([text for text in stalls() if f'stacks of rank {rank} ' in text]), 1, stalls())
        lines = [line.strip() for line in self.gtrain('why', job).stdout.splitlines()]
        self.assertTrue([line for line in lines if line.startswith('thread ')], lines)
        self.assertFalse([line for line in lines if '\\x0a' in line])
        self.assertIn('seems stuck', self.job(job)['stuck'])
        self.go_on(job)

    def test_a_limit_that_measures_nothing_is_said(self):
        job = self.launch('progress: {stall: 2s}\n', ranks=1, program="""import os, sys, time
while not os.path.exists(sys.argv[1]):
    print('still here', flush=True)
    time.sleep(0.1)
""")
        wait_until('the warning', lambda: 'progress.stall: 2s measures no steps' in self.gtrain('status', job).stdout)
        self.assertIn('warning: progress.stall: 2s', self.gtrain('why', job).stdout)
        self.assertFalse(self.job(job)['stuck'])
        self.go_on(job)

    def test_stack_shows_kernel_python_and_native_frames_once(self):
        tools = os.path.join(self.dir, 'tools')
        os.makedirs(tools)
        with open(os.path.join(tools, 'py-spy'), 'w') as spy:
            spy.write('#!/bin/sh\necho "asked: $*"\necho "    load_batch (train.py:6)"\n')
        os.chmod(os.path.join(tools, 'py-spy'), 0o755)
        job = self.launch('', PATH=tools + ':' + os.environ['PATH'])
        wait_until('rank 0 to sleep', lambda: 'nanosleep' in self.gtrain('stack', job, '--rank', '0').stdout)
        stack = self.gtrain('stack', job, '--rank', '0').stdout
        pid = next(rank['pid'] for rank in self.job(job)['ranks'] if rank['rank'] == 0)
        self.assertRegex(stack.splitlines()[0], r'^rank 0 on \S+$')
        self.assertEqual(stack.count(f'thread {pid} (python3)'), 1, stack)
        self.assertEqual(stack.count(f'process {pid}: /usr/bin/python3'), 1, stack)
        self.assertIn('asked: dump --pid %d\n' % pid, stack)
        self.assertIn('load_batch (train.py:6)', stack)
        if shutil.which('gdb') or shutil.which('eu-stack'):
            self.assertRegex(stack, r'native frames, by \S+:\n(.*\n)*? +#0 +.*nanosleep')
        both = json.loads(self.gtrain('stack', job, '--json').stdout)
        self.assertEqual([rank['rank'] for rank in both['ranks']], [0, 1])
        self.go_on(job)

    def test_a_rank_that_may_not_be_traced_is_explained(self):
        job = self.launch('', ranks=1, program="""import ctypes, os, sys, time
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
print('hidden', flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
""")
        wait_until('it hides', lambda: 'hidden' in self.gtrain('logs', job).stdout)
        stack = self.gtrain('stack', job).stdout
        self.assertRegex(stack, r'may not be traced \(ptrace: Operation not permitted\): .*PR_SET_DUMPABLE')
        self.go_on(job)


if __name__ == '__main__':
    harness.main()

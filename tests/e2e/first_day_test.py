"""What a stranger meets on the first day, typed as a user would: in a terminal of 100 x 30 and through pipes, without root.
One class for each habit; their order is that of a day."""
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import unittest

import cluster
import harness
from ckpt_test import LIBRARY, sanitized
from harness import wait_until


class FirstDayTest(harness.GtrainTest):
    ordinary_user = True

    def env(self, home=None, **more):
        """A shell that was never told about gtrain or its needs."""
        env = super().env(home)
        env.pop('PYTHONUNBUFFERED', None)
        return dict(env, **more)


# ---- live output
class LiveOutputTest(FirstDayTest):
    PRINTS = 'import os, time; print("first words", os.environ.get("PYTHONUNBUFFERED")); time.sleep(600)'

    def test_what_a_python_program_prints_is_seen_at_once(self):
        launch = self.start('launch', '-n', '1', '--', 'python3', '-c', self.PRINTS)
        launch.wait_for('first words 1')
        launch.signal(signal.SIGINT)
        self.assertEqual(launch.wait(), 130)

    def test_a_value_of_the_users_own_wins(self):
        quick = 'import os; print("it is", repr(os.environ.get("PYTHONUNBUFFERED")))'
        self.assertIn("it is ''", self.gtrain('launch', '-n', '1', '--', 'python3', '-c', quick, PYTHONUNBUFFERED='').stdout)
        job = self.job_file('own', f'run: [python3, -c, {quick!r}]\nenv: {{PYTHONUNBUFFERED: ""}}\n')
        self.assertIn("it is ''", self.gtrain('launch', job).stdout)

    def test_a_healthy_program_that_prints_is_not_called_stalled(self):
        """Output is progress; it was held back for as long as the program ran."""
        loop = 'import time\nfor i in range(600): print("step", i); time.sleep(0.2)'
        job = self.job_file('alive', f'run: [python3, -c, {json.dumps(loop)}]\nprogress: {{step: "step ([0-9]+)", startup: 3s}}\n')
        launch = self.start('launch', job)
        launch.wait_for('step 40')
        self.assertNotIn('stall', launch.output())
        launch.signal(signal.SIGINT)
        self.assertEqual(launch.wait(), 130)


# ---- exec and interactive programs
class ExecTest(FirstDayTest):
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


# ---- stalls and stacks
class StallTest(FirstDayTest):
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


# ---- a second launch of the same job


class SecondLaunchTest(FirstDayTest):
    def test_it_is_refused_by_name_and_starts_nothing(self):
        go = os.path.join(self.dir, 'go')
        job = self.stepper_job('train', '--until', go, extra='checkpoint: {uri: ./ckpt}\n')
        self.gtrain('launch', '-d', job)
        self.wait_for_steps(2, ranks=2)
        pids = self.rank_pids()
        for flags in ((), ('-d',), ('--fresh',), ('-d', '--json')):
            refused = self.gtrain('launch', *flags, job, expect=2)
            self.assertRegex(refused.stderr, r'job train-1 of \S+ saves its checkpoints to \S+/ckpt and is not over \(RUNNING, started \S+ ago\)')
            for way in ('gtrain attach train-1', 'gtrain stop train-1', '--takeover'):
                self.assertIn(way, refused.stderr)
            self.assertEqual(refused.stdout != '', '--json' in flags)
        self.assertEqual([job['id'] for job in self.jobs()], ['train-1'])
        self.assertEqual(self.rank_pids(), pids)
        self.assertFalse(os.path.exists(os.path.join(self.dir, 'ckpt')), 'nor is a folder made')
        self.gtrain('stop', 'train-1', '--now')
        self.wait_for_state('train-1', 'CANCELLED')
        self.end_local_cluster()

    def test_a_program_that_chooses_its_folder_itself(self):
        """No checkpoint.uri: the second launch would save where the first does."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            out.write('a line of text that is learned by heart\n' * 500)
        os.chmod(text, 0o644)
        char_lm = shutil.copy(os.path.join(harness.BUILD, 'examples', 'char_lm'), self.dir)
        words = (f'{char_lm} --text {text} --batch 16 --steps 1000000').split()
        first = self.start('launch', '--name', 'lm', '-n', '1', '--', *words)
        manifests = os.path.join(self.dir, 'ckpt', 'char_lm', 'manifests')
        wait_until('a checkpoint', lambda: os.path.isdir(manifests) and os.listdir(manifests))
        wait_until('the head to know', lambda: (self.job('lm') or {}).get('last_checkpoint'))
        refused = self.gtrain('launch', '--name', 'lm', '-n', '1', '--', *words, expect=2)
        self.assertRegex(refused.stderr, r'job lm-1 of \S+ saves its checkpoints to a folder that its program chose.* started \S+ ago')
        self.assertIn('gtrain stop lm-1', refused.stderr)
        # Another name is another job for the head; the folder knows better.
        other = self.gtrain('launch', '--name', 'other', '-n', '1', '--', *words, expect=None)
        self.assertNotEqual(other.returncode, 0)
        self.assertRegex(other.stdout + other.stderr, r'in use: it belongs to job .?lm-1.*which is not over')
        self.gtrain('stop', 'lm-1', '--now')
        first.wait()
        self.end_local_cluster()


# ---- nothing vanishes


class NothingVanishesTest(FirstDayTest):
    def state(self, *names):
        return os.path.join(self.home, 'state', 'gtrain', 'local', *names)

    def listed(self):
        """The ids in the index."""
        try:
            with open(self.state('runs.json')) as index:
                return [job['id'] for job in json.load(index)['jobs']]
        except FileNotFoundError:
            return []

    def read_result(self, path):
        with open(path) as result:
            return json.load(result)

    def result_of(self, job):
        """The result in the run directory, once it is there."""
        found = lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', job + '-*', 'result.json'))
        return wait_until(f'the result of {job}', found)[0]

    def test_what_a_cluster_leaves_when_it_has_ended(self):
        good = self.stepper_job('good', '--steps', '3', extra='progress: {step: "step (\\\\d+)"}\n')
        self.assertEqual(self.gtrain('launch', good).returncode, 0)
        both = f': > {self.out}/said.$RANK; while [ ! -e {self.out}/said.0 ] || [ ! -e {self.out}/said.1 ]; do sleep 0.05; done'
        self.gtrain('launch', '-n', '2', '--', 'sh', '-c', f'echo before the end; echo what went wrong >&2; {both}; exit 93',
                    expect=93)
        self.end_local_cluster()
        listed = self.gtrain('status')
        self.assertEqual(listed.stderr, 'gtrain: no cluster runs; this is what it left\n')
        self.assertRegex(listed.stdout, r'(?s)JOB.*\nsh-2 +FAILED .*\ngood-1 +SUCCEEDED ')
        document = json.loads(self.gtrain('status', '--json').stdout)
        self.assertEqual([(job['id'], job['state'], job['exit_code']) for job in document['jobs']],
                         [('good-1', 'SUCCEEDED', 0), ('sh-2', 'FAILED', 93)])
        self.assertIs(document['head'], False)
        one = self.gtrain('status', 'sh')
        self.assertRegex(one.stdout, r'(?s)sh-2 -- FAILED.*ended [0-9:]+, ran .*first fault: .*exit code 93.*logs: /')
        why = self.gtrain('why').stdout
        self.assertRegex(why, r'(?s)sh-2 is FAILED.*\n  [0-9:]{8}  state: QUEUED.*\n  [0-9:]{8}  fault: ')
        self.assertIn('before the end', self.gtrain('logs', 'sh-2').stdout)
        self.assertIn('what went wrong', self.gtrain('logs', 'sh-2', '--err', '--rank', '1').stdout)
        self.assertIn('nothing that it left is called nosuch', self.gtrain('why', 'nosuch', expect=1).stderr)
        result = self.read_result(self.result_of('good'))
        for key in ('submitted', 'started', 'ended', 'run_seconds', 'restarts', 'events', 'exit_code', 'user', 'cluster'):
            self.assertIsNotNone(result[key], key)
        self.assertLessEqual(result['submitted'], result['started'])
        self.assertLessEqual(result['started'], result['ended'])
        self.assertEqual(result['events'][-1]['text'][:9], 'SUCCEEDED')

    def test_a_run_directory_says_it_without_any_cluster(self):
        self.gtrain('launch', '-n', '1', '--', 'sh', '-c', 'echo to be kept')
        run_dir = os.path.dirname(self.result_of('sh'))
        self.end_local_cluster()
        shutil.rmtree(self.state())
        self.assertIn('no local cluster runs', self.gtrain('status', expect=1).stderr)
        self.assertIn('SUCCEEDED', self.gtrain('status', run_dir).stdout)
        self.assertIn('SUCCEEDED', self.gtrain('status', 'sh-1').stdout)
        self.assertIn('what happened', self.gtrain('why', os.path.relpath(run_dir, self.dir)).stdout)
        self.assertEqual(self.gtrain('logs', run_dir).stdout, 'to be kept\n')

    def test_a_head_that_died_before_it_wrote(self):
        """The next one writes what is missing; the folder of who removed his run is not made again."""
        for name in ('one', 'two'):
            self.gtrain('launch', '--name', name, '-n', '1', '--', 'true')
        results = [self.result_of(name) for name in ('one', 'two')]
        wait_until('the index', lambda: self.listed() == ['one-1', 'two-2'])
        self.end_local_cluster()
        os.remove(self.state('runs.json'))
        os.remove(results[0])
        shutil.rmtree(os.path.dirname(results[1]))
        self.gtrain('launch', '--name', 'three', '-n', '1', '--', 'true')
        wait_until('all three in the index', lambda: self.listed() == ['one-1', 'two-2', 'three-3'])
        wait_until('the result of the first', lambda: os.path.exists(results[0]))
        self.assertEqual(self.read_result(results[0])['state'], 'SUCCEEDED')
        self.assertFalse(os.path.exists(os.path.dirname(results[1])))
        self.end_local_cluster()

    def test_a_killed_cluster_is_no_cluster_that_ended(self):
        """What is over can be read all the same; that something may run is said, and is an error for a list."""
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.result_of('true')
        wait_until('the index', self.listed)
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        self.wait_for_no_processes()
        listed = self.gtrain('status', expect=1)
        self.assertIn('was killed', listed.stderr)
        self.assertIn('true-1', listed.stdout)
        self.assertIn('SUCCEEDED', self.gtrain('status', 'true-1').stdout)


# ---- times and owners


class TimesTest(FirstDayTest):
    def test_times_and_owners_newest_first(self):
        for name in ('one', 'two'):
            self.gtrain('launch', '--name', name, '-n', '1', '--', 'true')
        job = self.stepper_job('long', '--until', os.path.join(self.dir, 'go'),
                               extra='progress: {step: "step (\\\\d+)", steps: 1000000}\n')
        self.gtrain('launch', '-d', job)
        self.wait_for_steps(2, ranks=2)
        wait_until('an estimate of its end', lambda: (self.job('long') or {}).get('eta_seconds'))
        self.assertRegex(self.gtrain('status', 'long').stdout, r'step \d+/1000000, .*, ends in \d+')
        self.assertRegex(self.gtrain('status').stdout,
                         r'(?s)^JOB +STATE +RANKS +STARTED +TIME .*\nlong-3 +RUNNING +2 +[0-9:]{8} +\d+s .*\ntwo-2 .*\none-1 ')
        self.assertRegex(self.gtrain('status', 'long').stdout, r'user \S+, submitted [0-9:]{8}, started [0-9:]{8}, running for \d+s')
        jobs = json.loads(self.gtrain('status', '--json').stdout)['jobs']
        self.assertEqual([job['id'] for job in jobs], ['one-1', 'two-2', 'long-3'], 'as submitted')
        self.assertRegex(jobs[2]['started'], r'^\d{4}-\d\d-\d\dT[0-9:.]+Z$')
        self.assertTrue(jobs[2]['user'])
        self.assertIsNone(jobs[2]['ended'])
        self.assertGreater(jobs[2]['run_seconds'], 0)
        self.assertRegex(self.gtrain('why', 'long').stdout, r'\n  [0-9:]{8}  grant: generation 1')
        self.assertRegex(json.loads(self.gtrain('why', 'long', '--json').stdout)['events'][0]['time'], r'^\d{4}-.*Z$')
        newest = self.gtrain('status', '--limit', '1').stdout
        self.assertRegex(newest, r'(?s)long-3.*\nand 2 older; --all')
        self.assertNotIn('one-1', newest)
        self.assertEqual([job['id'] for job in json.loads(self.gtrain('status', '--limit', '2', '--json').stdout)['jobs']],
                         ['two-2', 'long-3'])
        self.assertIn('one-1', self.gtrain('status', '--all').stdout)
        self.assertIn('do not go together', self.gtrain('status', '--all', '--limit', '1', expect=2).stderr)
        self.gtrain('stop', 'long', '--now')
        self.wait_for_state('long', 'CANCELLED')
        self.end_local_cluster()

    def test_watch(self):
        self.assertIn('draws on a terminal', self.gtrain('status', '--watch', expect=2).stderr)
        job = self.stepper_job('seen', '--until', os.path.join(self.dir, 'go'))
        self.gtrain('launch', '-d', job)
        self.wait_for_steps(2, ranks=2)
        watch = self.start('status', '--watch', terminal=True)
        watch.wait_for(r'(?s)seen-1 +RUNNING.*\x1b\[\d+A\r\x1b\[J.*seen-1 +RUNNING')  # it is drawn in its own place
        watch.type(b'\x03')
        self.assertEqual(watch.wait(), 0, watch.output())
        one = self.start('status', '-w', 'seen', terminal=True)
        one.wait_for('running for')
        open(os.path.join(self.dir, 'go'), 'w').close()
        self.assertEqual(one.wait(), 0, one.output())
        self.assertIn('SUCCEEDED', one.output())
        self.end_local_cluster()


# ---- a head that restarts or moves


class HeadThatMovesTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 1

    def endpoint(self):
        with open(os.path.join(self.home, 'state', 'gtrain', 'lab', 'endpoint.json')) as endpoint:
            return json.load(endpoint)['endpoint']

    def end_head(self):
        self.head.signal(signal.SIGTERM)
        self.assertEqual(self.head.wait(), 0, self.head.output())

    def move_head(self):
        port = cluster.free_port()  # while the head has its own
        self.end_head()
        self.port = port
        self.start_head()

    def wait_for_node(self):
        wait_until('the node to be back', lambda: self.nodes_in('alive') == 1)

    def test_without_listen_it_serves_where_it_did(self):
        for end in (self.end_head, self.kill_head):
            end()
            self.head = self.start('head', '--context', 'lab', '--allow-root')
            self.wait_for_node()
            self.assertEqual(self.endpoint(), f'127.0.0.1:{self.port}')
        self.end_head()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(('127.0.0.1', self.port))
            taken.listen()
            said = self.gtrain('head', '--context', 'lab', '--allow-root', expect=1).stderr
        self.assertRegex(said, r'It served there before, says .*/lab/served.json; --listen ADDRESS:PORT')

    def test_a_dead_head_is_named(self):
        credential = os.path.join(self.dir, 'ann.credential')
        with open(credential, 'w') as out:
            out.write(self.gtrain('user', 'add', 'ann').stdout)
        os.chmod(credential, 0o644)
        far = os.path.join(self.dir, 'far')
        os.makedirs(far)
        os.chmod(far, 0o777)
        self.gtrain('context', 'add', 'lab', '--credential', credential, home=far)
        self.gtrain('context', 'use', 'lab', home=far)
        self.gtrain('status', home=far)
        self.kill_head()
        for verb in ('status', 'why', 'nodes', 'logs'):
            self.assertRegex(self.gtrain(verb, expect=1).stderr,
                             r'the head of context lab \(process \d+, at \S+\) has died.*gtrain head --context lab')
            self.assertRegex(self.gtrain(verb, expect=1, home=far).stderr,
                             r'the head of context lab does not answer: nothing listens at \S+\. .*gtrain head --context lab')
        self.start_head()
        self.wait_for_node()

    def test_an_agent_finds_a_head_that_moved(self):
        """By what a person wrote into its file while it ran; it remembers that; and by a flag."""
        self.move_head()
        path = os.path.join(self.agent_state(0), 'cluster.json')
        with open(path) as file:
            membership = json.load(file)
        first = membership['endpoints'][0]
        membership['endpoints'] = [first, 'localhost:1', f'127.0.0.1:{self.port}']
        with open(path, 'w') as file:
            json.dump(membership, file)
        self.wait_for_node()

        def remembered():
            with open(path) as file:
                return json.load(file)
        self.assertEqual(remembered()['endpoint'], f'127.0.0.1:{self.port}')
        self.assertIn(first, remembered()['endpoints'])
        self.agents[0].signal(signal.SIGTERM)
        self.agents[0].wait()
        self.move_head()
        self.agents[0] = self.start_agent(0, '--head', f'127.0.0.1:{self.port}')
        self.wait_for_node()
        self.assertEqual(remembered()['endpoint'], f'127.0.0.1:{self.port}')


# ---- secrets
class SecretsTest(FirstDayTest):
    JOB = 'name: secret\nrun: [sh, -c, \'echo "the key is $(echo $KEY | tr a-z A-Z)"; exec sleep 600\']\nsecrets: {KEY: {env: MY_KEY}}\n'

    def test_they_come_from_whoever_launches(self):
        """The local cluster was started by a command that had none."""
        first = self.start('launch', '-n', '1', '--', 'sleep', '600')
        wait_until('the cluster to run', lambda: self.daemons('agent'))
        second = self.start('launch', self.job_file('secret', self.JOB), MY_KEY='of-the-second-launch')
        second.wait_for('the key is OF-THE-SECOND-LAUNCH')
        third = self.start('launch', self.job_file('secret', self.JOB), MY_KEY='of-the-third-launch')
        third.wait_for('the key is OF-THE-THIRD-LAUNCH')
        secrets = os.path.join(self.home, 'state', 'gtrain', 'local', 'secrets')
        for folder, _, files in os.walk(secrets):
            self.assertFalse(os.stat(folder).st_mode & 0o077, folder)
            for name in files:
                self.assertEqual(os.stat(os.path.join(folder, name)).st_mode & 0o777, 0o600, name)
        # The agent that starts the next generation knows it, too.
        os.kill(self.daemons('agent')[0], signal.SIGKILL)
        os.kill(next(pid for pid, argv in self.marked().items() if argv[:1] == ['sleep'] and
                     b'KEY=of-the-second-launch' in harness.read_proc(pid, 'environ')), signal.SIGKILL)
        second.wait_for('(?s)(the key is OF-THE-SECOND-LAUNCH.*){2}')
        for process in (first, second, third):
            process.signal(signal.SIGINT)
        for process in (first, second, third):
            self.assertEqual(process.wait(), 130, process.output())
        self.assertFalse([path for path, _, names in os.walk(os.path.dirname(secrets)) if 'secrets' not in path
                          for name in names if self.holds(os.path.join(path, name), b'of-the-second-launch')])

    @staticmethod
    def holds(path, text):
        try:
            with open(path, 'rb') as data:
                return text in data.read()
        except OSError:
            return False

    def test_a_variable_that_is_not_set_is_said_before_anything_starts(self):
        done = self.gtrain('launch', self.job_file('secret', self.JOB), expect=2)
        self.assertIn('the variable MY_KEY is not set here', done.stderr)
        self.assertFalse(self.daemons('head'))

    def test_a_key_in_the_job_file_is_refused_and_not_repeated(self):
        key = '0123456789abcdef0123456789abcdef01234567'
        for words in (('validate', '--env', f'WANDB_API_KEY={key}', '--', 'true'),
                      ('launch', self.job_file('inline', f'run: "true"\nenv: {{WANDB_API_KEY: "{key}"}}\n'))):
            done = self.gtrain(*words, expect=2)
            self.assertIn('WANDB_API_KEY: {env: WANDB_API_KEY}', done.stderr)
            self.assertNotIn(key, done.stdout + done.stderr)
        self.gtrain('validate', '--env', 'PAD_TOKEN=<pad>', '--', 'true')


# ---- attach
class AttachTest(FirstDayTest):
    def test_ctrl_c_detaches(self):
        """As in tmux and docker: who looks at a job of the own machine does not end it by looking away."""
        done = os.path.join(self.dir, 'go')
        self.gtrain('launch', '-d', self.stepper_job('watched', '--until', done))
        self.wait_for_steps(2, ranks=2)
        for terminal in (True, False):
            attach = self.start('attach', 'watched', terminal=terminal)
            if terminal:
                attach.wait_for(r'   Ctrl-C detaches, the job goes on; gtrain stop watched-1 ends it\r\n')
                attach.type(b'\x03')
            else:
                attach.wait_for('step')
                attach.signal(signal.SIGINT)
            self.assertEqual(attach.wait(), 130, attach.output())
            self.assertRegex(attach.output().strip().splitlines()[-1],
                             r'gtrain: detached; watched-1 goes on. gtrain attach watched-1 \| gtrain stop watched-1')
            before = max(self.steps().values())
            self.wait_for_steps(before + 2, ranks=2)
        self.assertEqual(self.job('watched')['state'], 'RUNNING')
        open(done, 'w').close()
        self.end_local_cluster()


# ---- ranks between min and max



class ScaleTest(FirstDayTest):
    def test_a_job_gets_less_and_more_ranks_while_it_runs(self):
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            out.write('a line of text that is learned by heart\n' * 500)
        os.chmod(text, 0o644)
        char_lm = shutil.copy(os.path.join(harness.BUILD, 'examples', 'char_lm'), self.dir)
        self.gtrain('launch', '-d', self.job_file('lm', f"""name: lm
run: {char_lm} --text {text} --steps 1000000
ranks: {{min: 1, max: 3}}
checkpoint: {{uri: ./ckpt, every: 10 steps}}
"""))
        size = lambda: (job := self.job('lm') or {}).get('state') == 'RUNNING' and job['world_size']
        cpus = min(3, len(os.sched_getaffinity(0)))
        wait_until('as many as there are CPUs', lambda: size() == cpus)
        answer = json.loads(self.gtrain('scale', 'lm', '-n', '3', '--json').stdout)
        self.assertEqual((answer['size'], answer['wanted'], answer['room']), (cpus, 3, 3))
        wait_until('all three', lambda: size() == 3)
        self.assertIn('lm-1: 1 rank behind its next checkpoint; it has 3', self.gtrain('scale', 'lm', '-n', '1').stdout)
        wait_until('one rank', lambda: size() == 1)
        self.assertRegex(self.gtrain('why', 'lm').stdout, r'it shrinks from 3 to 1 rank, from the checkpoint of step [1-9]\d*')
        self.gtrain('scale', 'lm', '-n', '2', '--now')
        wait_until('two ranks', lambda: size() == 2)
        self.assertEqual(self.job('lm')['restarts'], 0, 'nobody is charged')
        refused = self.gtrain('scale', 'lm', '-n', '4', expect=2)
        self.assertIn('the job file of lm-1 allows 1 to 3 ranks, not 4', refused.stderr)
        self.gtrain('scale', 'lm', expect=2)
        self.gtrain('stop', 'lm', '--now')
        self.wait_for_state('lm', 'CANCELLED')
        self.assertIn('is over', self.gtrain('scale', 'lm-1', '-n', '2', expect=1).stderr)

    def test_a_size_that_does_not_work_is_given_up(self):
        """By a program that never reports a step, nor a checkpoint."""
        self.gtrain('launch', '-d', self.job_file('picky', """name: picky
run: ['sh', '-c', '[ "$WORLD_SIZE" -le 2 ] || exit 1; exec sleep 1000']
ranks: {min: 1, max: 6000}
resources: {cpus: 1}
restart: {budget: 0}
"""))
        size = lambda: (job := self.job('picky') or {}).get('state') == 'RUNNING' and job['world_size']
        wait_until('it runs', size)
        self.gtrain('scale', 'picky', '-n', '2', '--now')
        wait_until('two ranks', lambda: size() == 2)
        refused = self.gtrain('scale', 'picky', '-n', '5000', '--now', expect=2)
        self.assertRegex(refused.stderr, r'5000 ranks are more than \S+ can hold, which is \d+: ')
        self.gtrain('scale', 'picky', '-n', '3', '--now')
        wait_until('it is given up', lambda: 'it goes back to 2 ranks: rank' in self.gtrain('why', 'picky').stdout)
        wait_until('two ranks again', lambda: size() == 2)
        self.assertEqual(self.job('picky')['restarts'], 0)
        answer = self.gtrain('scale', 'picky', '-n', '1').stdout
        self.assertIn('picky-1: 1 rank behind its next checkpoint; it has 2; it has committed no checkpoint so far', answer)
        self.assertIn('wants 1 rank behind its next checkpoint', self.gtrain('why', 'picky').stdout)
        for i in range(6):
            self.gtrain('scale', 'picky', '-n', str(1 + i % 2), '--now')
            wait_until('another size', lambda: size() == 1 + i % 2)
        self.assertNotIn('again in', self.gtrain('why', 'picky').stdout)
        self.gtrain('stop', 'picky', '--now')
        self.wait_for_state('picky', 'CANCELLED')


class NewcomerTest(cluster.ClusterTest):
    agent_count = 0

    def test_a_machine_that_cannot_start_the_program_costs_only_the_growth(self):
        programs = os.path.join(self.dir, 'programs')
        os.mkdir(programs, 0o755)
        program = os.path.join(programs, 'mytrain')
        with open(program, 'w') as out:
            out.write('#!/bin/sh\nwhile sleep 1; do s=$((s + 1)); echo "{\\"step\\": $s, \\"checkpoint\\": true}"'
                      ' >> $GTRAIN_REPORT; done\n')
        os.chmod(program, 0o755)
        path = os.environ['PATH']
        os.makedirs(self.node_home(0)), os.makedirs(self.node_home(1))
        self.start_agent(0, GTRAIN_JOIN_TOKEN=self.token(), PATH=f'{programs}:{path}')
        wait_until('one node', lambda: self.nodes_in('alive') == 1)
        job = self.submit(self.job_file('grow', 'name: grow\nrun: [mytrain]\nnodes: {min: 1, max: 2}\nranks_per_node: 1\n'))
        size = lambda: (job := self.job('grow') or {}).get('state') == 'RUNNING' and job['world_size']
        wait_until('one rank', lambda: size() == 1)
        self.start_agent(1, GTRAIN_JOIN_TOKEN=self.token(), PATH=path)
        why = lambda: self.client('why', job).stdout
        wait_until('it is given up', lambda: 'it goes back to 1 rank: rank 1 on node1: could not be started' in why(), 120)
        self.assertIn('it grows from 1 to 2 ranks, from the checkpoint of step', why())
        wait_until('one rank again', lambda: size() == 1)
        now = self.job('grow')
        self.assertEqual((now['restarts'], [node['hostname'] for node in now['avoided']]), (0, ['node1']), why())
        self.client('stop', job, '--now')
        wait_until('its end', lambda: self.job('grow')['state'] == 'CANCELLED')


# ---- terminals and colours
ATTACKS = (r'\033]0;title\007', r'\033]52;c;ZXZpbA==\007', r'\033[?2004h', r'\033[?1049h', r'\033[6n', r'\033[8m',
           r'\033[5m', r'\033c', r'\007', r'\233')


class ColourTest(FirstDayTest):
    def show(self, script, *flags, ranks=1, terminal=True, **env):
        launch = self.start('launch', *flags, '-n', str(ranks), '--', 'sh', '-c', script, terminal=terminal,
                            NO_COLOR='', **env)
        self.assertEqual(launch.wait(), 0, launch.output())
        return launch.output()

    def test_progress_of_one_rank_is_drawn(self):
        """The bar of one rank moves on a terminal; elsewhere its last state is one line."""
        bar = (r"printf '  0%%|    |'; sleep 1; printf '\r 50%%|##  |'; while [ ! -e " + self.dir + r"/go ]; do sleep 0.1; "
               r"done; printf '\r100%%|####|\nend\n'")
        launch = self.start('launch', '-n', '1', '--', 'sh', '-c', bar, terminal=True)
        launch.wait_for(r':0:  50%\|##  \|')
        open(os.path.join(self.dir, 'go'), 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        self.assertRegex(launch.output(), r':0: 100%\|####\|\r\n\S+:0: end\r\n')
        piped = self.show(bar, terminal=False)
        self.assertEqual(re.findall(r':0: .*%.*', piped), [':0: 100%|####|'])
        shown = self.show(bar, ranks=2)
        self.assertRegex(shown, r':[01,]+: 100%\|####\|\r\n')
        self.assertNotIn('50%', shown)
        self.end_local_cluster()

    def test_colours(self):
        """Of ranks and of gtrain itself: on a terminal, or as --color and NO_COLOR say."""
        red = r"printf '\033[1;31mred\033[0m\n'"
        coloured, plain = '\x1b[0;1;31mred\x1b[0m', ':0: red'
        for flags, terminal, env, wanted in (((), True, {}, True), ((), True, {'NO_COLOR': '1'}, False),
                                             ((), True, {'TERM': 'dumb'}, False), ((), False, {}, False),
                                             (('--color', 'always'), False, {}, True),
                                             (('--color', 'never'), True, {}, False)):
            launch = self.start('launch', *flags, '-n', '1', '--', 'sh', '-c', red, terminal=terminal,
                                **dict({'NO_COLOR': ''}, **env))
            self.assertEqual(launch.wait(), 0, launch.output())
            self.assertIn(coloured if wanted else plain, launch.output(), (flags, terminal, env))
            self.assertEqual('mgtrain:\x1b[0m ' in launch.output(), wanted, launch.output())
        self.gtrain('launch', '--color', 'blue', '-n', '1', '--', 'true', expect=2)
        self.end_local_cluster()

    def test_nothing_but_colours_reaches_the_terminal(self):
        """P9: title, clipboard, bracketed paste, other screen, hidden and blinking text."""
        for ranks in (1, 2):
            shown = self.show("printf '" + ''.join(ATTACKS) + r"\n'", ranks=ranks)
            self.assertIn(r'\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[?2004h\x1b[?1049h\x1b[6n\x1b[8m\x1b[5m\x1bc\x07', shown)
            for code in re.findall(r'\x1b.{0,3}', shown):
                self.assertRegex(code, r'^\x1b\[(\d|J|m)', shown)
            for code in ('\x1b[8', '\x1b[5m', '\x1b[6n', '\x07', '\x9b'):
                self.assertNotIn(code, shown)
        self.end_local_cluster()


# ---- errors once
class ErrorsTest(FirstDayTest):
    def run_failing(self, *words):
        """What a launch that fails says; the job document."""
        done = self.gtrain('launch', '--name', 'broken', '-n', '2', '--', *words, expect=1,
                           PATH='/usr/local/bin:/usr/bin:/bin')  # folders that everybody may look into
        return done.stderr, self.job('broken')

    def test_a_missing_command_is_said_once(self):
        """Not tried again; where it was looked for stands in one line."""
        said, job = self.run_failing('pythn', 'train.py')
        self.assertEqual(said.count('PATH='), 1, said)
        self.assertRegex(said, r'cannot run pythn: No such file or directory\); a command that was not found is not tried '
                               r'again')
        self.assertRegex(said, r'pythn was looked for in PATH=/')
        self.assertEqual((job['state'], job['generation'], job['restarts']), ('FAILED', 1, 0))
        said, job = self.run_failing('sh', '-c', 'pythn train.py')
        self.assertEqual((job['state'], job['generation'], job['restarts']), ('FAILED', 1, 0), said)
        self.end_local_cluster()

    def test_a_failed_import_is_not_tried_again(self):
        said, job = self.run_failing('/usr/bin/python3', '-c', 'import no_such_module')
        self.assertRegex(said, r"No module named 'no_such_module'; a failed import is not tried again")
        self.assertEqual((job['state'], job['generation'], job['restarts']), ('FAILED', 1, 0))
        said, job = self.run_failing('/usr/bin/python3', '-c', 'raise RuntimeError("now and then")')
        self.assertEqual((job['state'], job['generation']), ('FAILED', 2), 'as before_first_step says')
        self.end_local_cluster()


SAVES_ONCE = f'''
import sys
sys.path.insert(0, {os.path.join(harness.SOURCE, 'python')!r})
import gtrain
with gtrain.Session() as session, gtrain.Checkpointer(session) as checkpointer:
    checkpointer.replicated({{'weights': bytearray(b'1234')}})
    checkpointer.restore()
    checkpointer.save(1)
'''


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class AnotherJobTest(harness.GtrainTest):
    def test_says_which_words_changed(self):
        """Two launches that differ in an argument: the refusal names it."""
        with open(os.path.join(self.dir, 'train.py'), 'w') as out:
            out.write(SAVES_ONCE)

        def launch(rate, *flags, expect=0):
            job = self.job_file('lr', f'name: lr\nrun: /usr/bin/python3 {out.name} --lr {rate} --steps 5\nranks: 1\n'
                                      f'env: {{LR: "{rate}"}}\ncheckpoint: {{uri: {self.dir}/ckpt}}\n')
            return self.gtrain('launch', job, *flags, expect=expect, GTRAIN_LIBRARY=LIBRARY)
        launch(0.1)
        said = launch(0.2, expect=2).stderr
        self.assertRegex(said, r'and that was another job: --lr 0.1 is now --lr 0.2; env LR 0.1 is now 0.2 \(its hash over '
                               r'run, script, mesh and env is \w{12}, this one.s \w{12}\). Say --resume latest')
        launch(0.2, '--resume', 'latest')
        self.end_local_cluster()


# ---- plan and logs
class PlanTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 0  # made here, of sizes that no test machine has

    def test_plans_where_launch_would_run(self):
        """plan answers for the machines of the cluster, with what is free there now."""
        self.join_agent(0, '--cpus', '3')
        self.join_agent(1, '--cpus', '5')
        wait_until('both nodes to be ready', lambda: self.nodes_in('alive') == 2)

        def plan(ranks, *flags, expect=0):
            done = self.client('plan', '--json', '-n', str(ranks), *flags, '--', 'true', expect=expect)
            document = json.loads(done.stdout)
            names = {node['node']: node['hostname'] for node in document['nodes']}
            return document, sorted(names[rank['node']] for rank in document['ranks'])

        for flags in (('--context', 'lab'), ()):  # lab is the current one: launch would go there, too
            self.assertEqual(plan(8, *flags)[1], ['node0'] * 3 + ['node1'] * 5)
            self.assertIn('there is room for 8', plan(9, *flags, expect=1)[0]['reason'])
        here = {node['hostname'] for node in plan(1, '--context', 'local')[0]['nodes']}
        self.assertEqual(here, {socket.gethostname()})
        done = os.path.join(self.dir, 'go')
        self.client('launch', '-d', self.stepper_job('holder', '--until', done, ranks='4'))
        self.wait_for_state('holder', 'RUNNING')
        self.assertEqual(plan(4)[1], ['node0'] * 3 + ['node1'])
        self.client('node', 'drain', 'node1')
        document, _ = plan(4, expect=1)
        self.assertRegex(next(node['limit'] for node in document['nodes'] if node['hostname'] == 'node1'), 'leaving')
        said = self.client('plan', '-n', '1', '--', 'true', expect=None).stdout
        self.assertRegex(said, r'^job true \(hash \w+\) on cluster lab\n')
        self.client('node', 'undrain', 'node1')
        self.assertIn("--nodes: 'a' is given twice",
                      self.client('plan', '-n', '16', '--nodes', 'a:8,b:8,a:8', '--', 'true', expect=2).stderr)
        open(done, 'w').close()
        self.wait_for_state('holder', 'SUCCEEDED')


class LogsTest(FirstDayTest):
    def shell(self, name, script, ranks=1, expect=0):
        return self.gtrain('launch', '--name', name, '-n', str(ranks), '--', 'sh', '-c', script, expect=expect)

    def test_both_streams(self):
        """launch keeps the ranks' stderr on stderr, and logs shows both: stdout, then stderr."""
        done = self.shell('two', 'echo to-out; echo to-err >&2')
        host = socket.gethostname()
        self.assertEqual(done.stdout, f'{host}:0: to-out\n')
        self.assertIn(f'\n{host}:0: to-err\n', done.stderr)
        self.assertEqual(self.gtrain('logs', 'two').stdout, 'to-out\nto-err\n')
        self.assertEqual(self.gtrain('logs', 'two', '-f').stdout, 'to-out\nto-err\n')
        self.assertEqual(self.gtrain('logs', 'two', '--out').stdout, 'to-out\n')
        self.assertEqual(self.gtrain('logs', 'two', '--err', '--rank', '0').stdout, 'to-err\n')
        self.shell('four', 'echo to-out; echo to-err >&2', ranks=2)
        self.assertEqual(self.gtrain('logs', 'four').stdout, f'{host}:0,1: to-out\n{host}:0,1: to-err\n')
        self.end_local_cluster()

    def test_an_unknown_generation_is_an_error(self):
        self.shell('crash', 'echo $GTRAIN_GENERATION; exit 3', ranks=2, expect=1)
        self.assertEqual(self.gtrain('logs', 'crash', '--generation', '1', '--rank', '0').stdout, '1\n')
        for words in ((), ('--rank', '0'), ('-f',)):
            done = self.gtrain('logs', 'crash', '--generation', '99', *words, expect=1)
            self.assertRegex(done.stderr, r'crash-\d+ has no generation 99; its newest is 2')
        self.assertIn('has ranks 0 to 1', self.gtrain('logs', 'crash', '--rank', '2', expect=1).stderr)
        self.end_local_cluster()


# ---- JSON and completion
class JsonTest(FirstDayTest):
    def test_errors_are_documents(self):
        """One JSON document on stdout, the same words on stderr, and the same exit code as without --json."""
        wrong = self.job_file('wrong', 'run: x\nrnaks: 2\n')
        for words, code in ((('status', 'nobody'), 1), (('why', 'nobody'), 1), (('stop', 'nobody'), 1), (('nodes',), 1),
                            (('exec', 'nobody'), 2), (('plan', wrong), 2), (('validate', wrong), 2),
                            (('launch', '-d', wrong), 2), (('launch', '-d', wrong, '--no-such-flag'), 2),
                            (('node', 'drain', 'nobody'), 1), (('user', 'ls'), 1), (('token', 'ls'), 1),
                            (('nodes', '--context', 'nowhere'), 2)):
            plain = self.gtrain(*words, expect=None)
            self.assertEqual(plain.stdout, '', words)
            done = self.gtrain(*words, '--json', expect=None)
            self.assertEqual((done.returncode, done.stderr), (plain.returncode, plain.stderr), words)
            self.assertEqual(done.returncode, code, (words, done.stderr))
            error = json.loads(done.stdout)['error']
            for line in error.split('\n'):
                self.assertIn(line, done.stderr)
            self.assertTrue(error, words)
        self.assertIn('rnaks', json.loads(self.gtrain('validate', wrong, '--json', expect=2).stdout)['error'])


class CompletionTest(FirstDayTest):
    def complete(self, *words):
        """What bash offers for the last word."""
        script = ('source <("$1" completion bash); shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _gtrain; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        done = subprocess.run([*self.prefix, 'bash', '-c', script, 'bash', self.program, self.program, *words],
                              env=self.env(), cwd=self.dir, capture_output=True, text=True, timeout=harness.PATIENCE)
        return done.stdout.split()

    def test_bash(self):
        done = os.path.join(self.dir, 'go')
        self.assertEqual(self.complete('logs', ''), [], 'nothing runs, and nothing is started')
        self.gtrain('launch', '-d', self.stepper_job('offered', '--until', done))
        self.wait_for_state('offered', 'RUNNING')
        self.gtrain('launch', '-n', '1', '--name', 'over', '--', 'true')
        for words, offered in ((('att',), ['attach']), (('logs', 'off'), ['offered-1']), (('stop', ''), ['offered-1']),
                               (('logs', 'ov'), ['over-2']), (('attach', 'ov'), []), (('ckpt', 'ver'), ['verify']),
                               (('head', ''), ['backup', 'restore', 'recover', '--init', '--token']),
                               (('head', '--to'), ['--token']), (('bench', ''), ['allreduce', 'link', 'codec']),
                               (('launch', '--resume', 'l'), ['latest']), (('launch', '--resume', 'S'), []),
                               (('launch', '--resume', 'offered'), ['offered.yaml']),
                               (('logs', '--ra'), ['--rank']), (('node', 'dr'), ['drain']),
                               (('node', 'drain', ''), [socket.gethostname()]),
                               (('context', 'use', ''), ['local']), (('status', '--context', 'lo'), ['local']),
                               (('launch', '--set', 'checkpoint.ev'), ['checkpoint.every=']),
                               (('status', '--color', 'a'), ['auto', 'always']),
                               (('launch', 'offered'), ['offered.yaml']), (('launch', '--', 'offered'), ['offered.yaml'])):
            self.assertEqual(self.complete(*words), offered, words)
        open(done, 'w').close()
        self.end_local_cluster()


class ContextsTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 1

    def test_add_does_not_switch(self):
        """Who gets a credential goes on where he was."""
        with open(os.path.join(self.dir, 'ann'), 'w') as out:
            out.write(self.client('user', 'add', 'ann').stdout)
        os.chmod(out.name, 0o644)
        home = os.path.join(self.dir, 'ann-home')
        os.makedirs(home)
        if self.prefix:
            os.chown(home, harness.NOBODY, harness.NOBODY)
        said = self.gtrain('context', 'add', 'far', '--credential', out.name, home=home).stdout
        self.assertIn('gtrain context use far', said)
        self.assertRegex(self.gtrain('context', 'ls', home=home).stdout, r'(?m)^\* local')
        self.assertEqual(len(json.loads(self.gtrain('nodes', '--json', '--context', 'far', home=home).stdout)['nodes']), 1)
        self.gtrain('context', 'use', 'far', home=home)
        self.gtrain('nodes', home=home)

    def test_ids_stay_short_after_a_restore(self):
        self.assertEqual(self.submit(self.stepper_job('short', '--steps', '1', ranks='1')), 'short-1')
        self.wait_for_state('short', 'SUCCEEDED')
        backup = os.path.join(self.dir, 'backup')
        self.client('head', 'backup', backup, '--context', 'lab')
        self.kill_head()
        self.client('head', 'restore', backup, '--context', 'lab', '--replace')
        self.start_head()
        wait_until('the node to be back', lambda: self.nodes_in('alive') == 1)
        self.assertRegex(self.submit(self.stepper_job('short', '--steps', '1', ranks='1')), r'^short-\d{1,3}$')
        self.assertNotEqual(self.job('short')['id'], 'short-1')


# ---- C++ users link a product
@unittest.skipUnless(not sanitized(), 'a program that is not instrumented cannot load a sanitized libgtrain.so')
class ProductTest(FirstDayTest):
    """What `cmake --install --component sdk` puts somewhere, seen by a user who has nothing else of the tree."""

    def setUp(self):
        super().setUp()
        if not os.path.exists(os.path.join(harness.BUILD, 'lib', 'libgtrain.so')):
            self.skipTest('libgtrain.so is not built')
        installed = os.path.join(self.dir, 'installed')
        self.run_tool('cmake', '--install', harness.BUILD, '--component', 'sdk', '--prefix', installed)
        self.prefix_folder = os.path.join(self.dir, 'moved', 'gtrain')  # nothing in it may say where it was made
        os.makedirs(os.path.dirname(self.prefix_folder))
        os.rename(installed, self.prefix_folder)

    def run_tool(self, *argv, **env):
        done = subprocess.run(argv, env=self.env(**env), cwd=self.dir, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, f'{" ".join(argv)}\n{done.stdout}{done.stderr}')
        return done.stdout

    def write(self, name, text):
        path = os.path.join(self.dir, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as out:
            out.write(text)
        return path

    def compile(self, source, compiler='g++'):
        config = os.path.join(self.prefix_folder, 'lib', 'pkgconfig')
        flags = self.run_tool('pkg-config', '--cflags', '--libs', 'gtrain', PKG_CONFIG_PATH=config).split()
        program = os.path.join(self.dir, 'train')
        self.run_tool(compiler, '-std=c++20', '-Wall', '-Wextra', '-Werror', '-o', program, source, *flags)
        return program

    def readme_program(self):
        with open(os.path.join(harness.SOURCE, 'README.md')) as readme:
            return self.write('train.cc', re.search(r'```cpp\n(.*?)```', readme.read(), re.S)[1])

    def commits(self, folder='ckpt'):
        return sorted(name for name in os.listdir(os.path.join(self.dir, folder)) if name.startswith('step-'))

    def check_readme_program(self, compiler):
        if not shutil.which(compiler):
            self.skipTest(f'{compiler} is not installed')
        program = self.compile(self.readme_program(), compiler)
        for _ in range(2):  # the second run resumes at the last step, and has nothing to save
            done = self.gtrain('launch', '-n', '2', '--', program)
            self.assertIn('step 1000, last weight 14.999', done.stdout)
            self.assertEqual(self.commits(), ['step-000000001000.e0001.t0001.g0001.a01'])

    def test_the_program_of_the_readme_built_by_gcc_12(self):
        self.check_readme_program('g++-12')

    def test_the_program_of_the_readme_built_by_clang_14(self):
        self.check_readme_program('clang++-14')

    def test_find_package(self):
        self.readme_program()
        self.write('CMakeLists.txt', 'cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES CXX)\n'
                   'find_package(gtrain 0.1 REQUIRED)\nadd_executable(train train.cc)\n'
                   'target_link_libraries(train PRIVATE gtrain::gtrain)\n')
        self.run_tool('cmake', '-S', '.', '-B', 'made', f'-DCMAKE_PREFIX_PATH={self.prefix_folder}')
        self.run_tool('cmake', '--build', 'made')
        done = self.gtrain('launch', '-n', '2', '--', os.path.join(self.dir, 'made', 'train'))
        self.assertIn('step 1000, last weight 14.999', done.stdout)

    def test_no_header_of_the_product_names_another_library(self):
        for folder, _, files in os.walk(os.path.join(self.prefix_folder, 'include')):
            for name in files:
                with open(os.path.join(folder, name)) as header:
                    for include in re.findall(r'#include\s*[<"](.*?)[>"]', header.read()):
                        self.assertRegex(include, r'^(gtrain/)?[a-z_]+(\.h)?$', name)

    def test_handles_go_in_any_order_on_several_ranks(self):
        program = self.compile(os.path.join(harness.SOURCE, 'runtime', 'capi', 'cpp_test.cc'))
        for ranks in (2, 3):
            done = self.gtrain('launch', '--set', 'restart.budget=0', '-n', str(ranks), '--', program,
                               os.path.join(self.dir, f'shared-{ranks}'))
            for rank in range(ranks):
                self.assertIn(f'ok on rank {rank} of {ranks}', done.stdout)

    def test_all_ranks_stop_after_the_same_step_and_save_it_once(self):
        program = self.compile(self.write('stops.cc', STOPS))
        launch = self.start('launch', '-n', '3', '--', program)
        launch.wait_for(r'step 20\b')
        self.gtrain('stop', self.job('train')['id'])
        launch.wait()
        self.assertEqual(self.job('train')['state'], 'CANCELLED', launch.output())
        left = set(re.findall(r'left at step (\d+)', launch.output()))  # equal lines of ranks are one
        self.assertEqual(len(left), 1, launch.output())
        self.assertEqual(self.commits(), [f'step-{int(min(left)):012d}.e0001.t0001.g0001.a01'])


# Ranks of different speed, which ask SaveIfDue alone whether to stop.
STOPS = r"""
#include <gtrain/gtrain.h>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

int main() try {
  auto session = gtrain::Session::Join().value();
  std::vector<float> weights(16);
  auto checkpointer = gtrain::Checkpointer::Open(session, {.uri = "ckpt", .every_steps = 1000000}).value();
  checkpointer.AddReplicated("weights", weights).ThrowIfError();
  int64_t step = 0;
  while (step < 100000) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + 4 * session.rank()));
    if (++step % 20 == 0 && session.rank() == 0) std::printf("step %d\n", static_cast<int>(step)), std::fflush(stdout);
    if (checkpointer.SaveIfDue(step).value().stop) break;
  }
  checkpointer.Commit(step).ThrowIfError();
  std::printf("left at step %d\n", static_cast<int>(step));
} catch (const gtrain::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return error.status().exit_code();
}
"""


# ---- a wheel
class WheelTest(FirstDayTest):
    """What `make wheel` makes, installed by an ordinary user who sees nothing of the tree."""

    def setUp(self):
        super().setUp()
        if not os.path.exists(LIBRARY) or sanitized():
            self.skipTest('needs libgtrain.so, without a sanitizer')
        absent = 'import importlib.util as u; print(*(m for m in ("pip", "setuptools", "wheel", "ensurepip") if not u.find_spec(m)))'
        lacks = subprocess.run(['/usr/bin/python3', '-c', absent], capture_output=True, text=True).stdout.strip()
        if lacks:
            self.skipTest(f'/usr/bin/python3 has no {lacks}')

    def run_tool(self, *argv, prefix=()):
        done = subprocess.run([*prefix, *argv], env=self.env(), cwd=self.dir, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, f'{" ".join(argv)}\n{done.stdout}{done.stderr}')
        return done.stdout

    def test_install_and_launch(self):
        made = os.path.join(self.dir, 'made')
        said = self.run_tool(os.path.join(harness.SOURCE, 'tools', 'wheel.sh'), harness.BUILD, made)
        self.assertIn('libzmq5', said)  # what the other machine needs
        wheel, = glob.glob(made + '/gtrain-*.whl')
        venv = os.path.join(self.home, 'venv')
        self.run_tool('/usr/bin/python3', '-m', 'venv', venv, prefix=self.prefix)
        self.run_tool(venv + '/bin/pip', 'install', '--no-index', '--no-deps', wheel, prefix=self.prefix)
        self.program = os.path.join(venv, 'bin', 'gtrain')
        script = os.path.join(self.dir, 'train.py')
        with open(script, 'w') as out:
            out.write('import array, gtrain\n'
                      'with gtrain.Session() as session, gtrain.Checkpointer(session, "ckpt", takeover=True) as checkpointer:\n'
                      '    weights = array.array("f", [session.rank + 1])\n'
                      '    checkpointer.replicated(weights=weights)\n'
                      '    session.all_reduce(weights)\n'
                      '    checkpointer.save(1)\n'
                      '    checkpointer.wait()\n'
                      '    print("sum", weights[0], "by", gtrain.library_path())\n')
        activated = {'PATH': f'{venv}/bin:{os.environ["PATH"]}'}
        done = self.gtrain('launch', '-n', '2', '--', 'python', script, **activated)
        self.assertIn(f'sum 3.0 by {os.path.realpath(venv)}/lib/libgtrain.so', done.stdout)
        processes = {os.path.realpath(f'/proc/{pid}/exe') for pid in self.marked()}
        self.assertIn(self.program, processes)  # the head and the agent are the installed ones
        self.assertFalse([path for path in processes if path.startswith(harness.BUILD)])
        checks = json.loads(self.gtrain('doctor', '--json', **activated).stdout)
        self.assertEqual({check['text'] for check in checks if check['check'] in ('keeper', 'writer')},
                         {f'{venv}/bin/gtrain-keeper', f'{venv}/bin/gtrain-writer'})
        self.run_tool(venv + '/bin/pip', 'uninstall', '--yes', 'gtrain', prefix=self.prefix)
        self.assertFalse(glob.glob(venv + '/bin/gtrain*') + glob.glob(venv + '/lib/libgtrain*'))
        self.end_local_cluster()


# ---- another Python
class AnotherPythonTest(cluster.ClusterTest):
    agent_count = 1

    def test_a_virtual_environment_that_the_node_does_not_use_is_said(self):
        """The client's own is in its PATH; a cluster's ranks have the PATH of the agent."""
        venv = os.path.join(self.dir, 'venv', 'bin')
        os.makedirs(venv)
        os.symlink('/usr/bin/python3', os.path.join(venv, 'python3'))
        activated = {'PATH': f'{venv}:{os.environ["PATH"]}'}
        there = os.path.join(os.path.realpath(os.path.dirname(shutil.which('python3'))), 'python3')
        run = ('launch', '--context', 'lab', '--set', 'restart.budget=1')
        which = 'import os, sys; sys.exit(3 if os.environ["GTRAIN_GENERATION"] == "1" else 0)'
        done = self.gtrain(*run, '--', 'python3', '-c', which, **activated)
        warned = [line for line in (done.stdout + done.stderr).splitlines() if 'where the job was launched' in line]
        self.assertEqual(len(warned), 1, done.stdout + done.stderr)  # and not of the second generation again
        self.assertIn(f'gtrain: node0: python3 is {there} here and was {venv}/python3 ', warned[0])
        self.assertIn(warned[0][len('gtrain: '):], self.gtrain('why', '--context', 'lab', 'python3-1').stdout)

        for words in (('python3', '-c', ''),                                           # the same on both sides
                      ('--set', 'inherit_env=[PATH]', '--', 'python3', '-c', '')):     # the client's PATH there, too
            path = activated if 'inherit_env=[PATH]' in words else {}
            quiet = self.gtrain(*run, *(words if path else ('--', *words)), **path)
            self.assertNotIn('where the job was launched', quiet.stdout + quiet.stderr)


# ---- commands that kill
class KillTest(FirstDayTest):
    """Others use the machine, too: a pattern meets their processes."""

    def readme_command(self, start):
        with open(os.path.join(harness.SOURCE, 'README.md')) as readme:
            line, = [line for line in readme if line.startswith('    ' + start)]
        return re.sub(r'^build/bin/gtrain', self.program, line.split(' #')[0].strip())

    def run_shell(self, command):
        return subprocess.run([*self.prefix, 'sh', '-c', command], env=self.env(), cwd=self.dir, capture_output=True, text=True,
                              timeout=harness.PATIENCE).stdout

    def test_no_document_kills_by_a_pattern(self):
        for path in glob.glob(os.path.join(harness.SOURCE, '**', '*.md'), recursive=True):
            with open(path) as document:
                self.assertEqual(re.findall(r'.*\b(?:pkill|killall)\b.*', document.read()), [], path)

    def test_what_the_readme_tells(self):
        launch = self.start('launch', '-n', '2', '--', 'sleep', '600')
        launch.wait_for('RUNNING')
        command = self.readme_command('build/bin/gtrain status --json')

        def pids():
            found = [int(pid) for pid in re.findall(r'\d+', self.run_shell(command))]
            return found if all(found) else None

        ranks = wait_until('both ranks to run', pids)
        self.assertEqual([self.marked()[pid] for pid in ranks], 2 * [['sleep', '600']])
        agent, = self.daemons('agent')
        self.assertRegex(self.run_shell(self.readme_command('pgrep')), rf'(?m)^{agent} \S+ agent ')
        os.kill(agent, signal.SIGKILL)
        self.assertTrue(all(map(harness.alive, ranks)))
        wait_until('the next agent', lambda: self.daemons('agent') not in ([], [agent]))
        os.kill(ranks[1], signal.SIGKILL)
        launch.wait_for('generation 2, .*2 ranks')
        self.gtrain('stop', '--now', 'sleep')
        launch.wait()
        self.end_local_cluster()


# ---- the end

if __name__ == '__main__':
    harness.main()

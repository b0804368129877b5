"""What every end-to-end test stands on: a home of its own, commands with deadlines, nothing left behind.

Each test gets a temporary folder as HOME and XDG folders. Every process it causes has that folder somewhere in its
environment or command line; whatever still has at the end is killed, and that fails the test. No test sleeps:
wait_until() looks at a condition until it holds or its deadline passes.
"""
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest

SOURCE = os.environ.get('GTRAIN_SOURCE_DIR') or os.path.abspath(os.path.join(os.path.dirname(__file__), '../..'))
BUILD = os.environ.get('GTRAIN_BUILD_DIR') or os.path.join(SOURCE, 'build')
GTRAIN = os.path.join(BUILD, 'bin', 'gtrain')
STEPPER = os.path.join(SOURCE, 'tests', 'e2e', 'stepper.py')
NOBODY = 65534
# Generous: the box may run eight things at once. A deadline that passes is a hang, not a slow machine.
PATIENCE = float(os.environ.get('GTRAIN_E2E_PATIENCE', '60'))
TERMINAL_STATES = ('SUCCEEDED', 'FAILED', 'CANCELLED')
SOAK = bool(os.environ.get('GTRAIN_SOAK'))


def soak(full, short):
    """A length: the real one under `make soak`, the short one in `make test`."""
    return full if SOAK else short


def is_root():
    return os.geteuid() == 0


def wait_until(what, condition, seconds=PATIENCE):
    """Returns the first true value of condition(); AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f'not within {seconds:.0f} s: {what}')
        time.sleep(0.05)


class Process:
    """A started command: its output is collected as it comes, so that a test may wait for a line."""

    def __init__(self, argv, env, cwd, terminal=False, prefix=(), in_namespace=None, rate=None):
        """`rate`: bytes a second that its terminal takes."""
        self.argv, self.rate = list(argv), rate
        self.chunks, self.lock = [], threading.Lock()
        if terminal:
            self.master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 30, 100, 0, 0))
            self.popen = subprocess.Popen([*prefix, *argv], env=dict({'TERM': 'xterm'}, **env), cwd=cwd, stdin=slave,
                                          stdout=slave, stderr=slave, start_new_session=True,
                                          preexec_fn=_take_terminal)
            os.close(slave)
        else:
            self.popen = subprocess.Popen([*prefix, *argv], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            self.master = self.popen.stdout.fileno()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, self.rate // 20 if self.rate else 65536)
            except OSError:
                return
            if self.rate:
                threading.Event().wait(0.05)
            if not data:
                return
            with self.lock:
                self.chunks.append(data)

    @property
    def pid(self):
        return self.popen.pid

    def output(self):
        with self.lock:
            return b''.join(self.chunks).decode(errors='replace')

    def size(self):
        """Bytes of output so far."""
        with self.lock:
            return sum(map(len, self.chunks))

    def wait_for(self, pattern, seconds=PATIENCE):
        def look():
            return re.search(pattern, self.output())

        try:
            return wait_until(f'{pattern!r} in the output of {" ".join(self.argv)}', look, seconds)
        except AssertionError as error:
            raise AssertionError(f'{error}\n--- output so far (exit {self.popen.poll()}):\n{self.output()}') from None

    def wait(self, seconds=PATIENCE):
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'{" ".join(self.argv)} did not end within {seconds:.0f} s\n'
                                 f'--- output:\n{self.output()}') from None
        self.reader.join(2)
        return code

    def signal(self, number):
        self.popen.send_signal(number)

    def type(self, data):
        os.write(self.master, data)

    def close_terminal(self):
        """What closing the window does: the terminal is gone, its session gets SIGHUP."""
        self.popen.send_signal(signal.SIGHUP)
        os.close(self.master)


def _take_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_proc(pid, name):
    try:
        with open(f'/proc/{pid}/{name}', 'rb') as data:
            return data.read()
    except OSError:
        return b''


def alive(pid):
    stat = read_proc(pid, 'stat')
    return bool(stat) and stat.rsplit(b')', 1)[1].split()[0] not in (b'Z', b'X')


class GtrainTest(unittest.TestCase):
    ordinary_user = False  # run everything through setpriv as nobody (only root can; others are ordinary already)

    def setUp(self):
        if not os.path.exists(GTRAIN):
            self.fail(f'{GTRAIN} is not built')
        if self.ordinary_user and is_root() and not shutil.which('setpriv'):
            self.skipTest('setpriv is not installed')
        self.dir = tempfile.mkdtemp(prefix='gt-')
        self.out = os.path.join(self.dir, 'out')
        self.home = os.path.join(self.dir, 'home')
        self.started = []
        for folder in (self.out, self.home):
            os.makedirs(folder)
        self.prefix = []
        self.program, self.stepper = GTRAIN, STEPPER
        if self.ordinary_user and is_root():
            self.become_nobody()
        self.addCleanup(self.clean_up)

    def become_nobody(self):
        """The build may lie in a folder nobody cannot read, so the programs travel."""
        programs = os.path.join(self.dir, 'bin')
        os.makedirs(programs)
        for name in os.listdir(os.path.dirname(GTRAIN)):
            if name in ('gtrain', 'gtrain-keeper', 'gtrain-writer'):
                shutil.copy(os.path.join(os.path.dirname(GTRAIN), name), programs)
        self.program = os.path.join(programs, 'gtrain')
        self.stepper = shutil.copy(STEPPER, self.dir)
        for folder in (self.dir, self.out, self.home):
            os.chown(folder, NOBODY, NOBODY)
        self.prefix = ['setpriv', f'--reuid={NOBODY}', f'--regid={NOBODY}', '--clear-groups', '--no-new-privs']

    # ---- commands

    def env(self, home=None, **more):
        home = home or self.home
        env = {key: value for key, value in os.environ.items()
               if not key.startswith(('GTRAIN_', 'XDG_', 'SLURM_', 'RANK', 'WORLD_SIZE', 'LOCAL_', 'MASTER_'))
               and key != 'TERM'}
        env.update(HOME=home, XDG_STATE_HOME=home + '/state', XDG_CONFIG_HOME=home + '/config',
                   XDG_RUNTIME_DIR=home + '/run', PYTHONDONTWRITEBYTECODE='1', LC_ALL='C.UTF-8', NO_COLOR='1')
        # Sanitizer options travel as they are.
        for key in ('ASAN_OPTIONS', 'UBSAN_OPTIONS', 'LSAN_OPTIONS', 'TSAN_OPTIONS'):
            if key in os.environ:
                env[key] = os.environ[key]
        env.update(more)
        return env

    def gtrain(self, *args, timeout=PATIENCE, expect=0, home=None, prefix=None, **env):
        """Runs to the end. expect=None accepts any exit code."""
        prefix = self.prefix if prefix is None else prefix
        try:
            done = subprocess.run([*prefix, self.program, *args], env=self.env(home, **env), cwd=self.dir,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
                                  errors='replace')
        except subprocess.TimeoutExpired as late:
            self.fail(f'gtrain {" ".join(args)} did not end within {timeout:.0f} s\n{late.stdout}\n{late.stderr}')
        if expect is not None:
            self.assertEqual(done.returncode, expect,
                             f'gtrain {" ".join(args)}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}')
        return done

    def start(self, *args, terminal=False, home=None, prefix=None, program=None, rate=None, **env):
        prefix = self.prefix if prefix is None else prefix
        process = Process([program or self.program, *args], self.env(home, **env), self.dir, terminal, prefix, rate=rate)
        self.started.append(process)
        return process

    # ---- jobs

    def stepper_job(self, name, *args, ranks='2', extra=''):
        """A job file whose ranks run stepper.py, which steps, remembers and resumes; see its own words."""
        words = ' '.join(['/usr/bin/python3', self.stepper, '--out', self.out, *args])
        return self.job_file(name, f'name: {name}\nrun: {words}\nranks: {ranks}\n{extra}')

    def job_file(self, name, text):
        path = os.path.join(self.dir, name + '.yaml')
        with open(path, 'w') as out:
            out.write(text)
        os.chmod(path, 0o644)
        return path

    def jobs(self, *words, **options):
        """The jobs that the head lists, as `gtrain status --json` gives them; [] while there is no head."""
        done = self.gtrain('status', '--json', *words, expect=None, **options)
        try:
            document = json.loads(done.stdout)
        except ValueError:
            return []
        return document if isinstance(document, list) else document.get('jobs', [document] if 'state' in document else [])

    def job(self, name, **options):
        """Also one that is over and not among the newest, which alone are listed."""
        named = (j for jobs in (lambda: self.jobs(**options), lambda: self.jobs(name, **options))
                 for j in reversed(jobs()) if name in (j.get('name'), j.get('id'), j.get('job')))
        return next(named, None)

    def wait_for_state(self, name, *states, seconds=PATIENCE, **options):
        seen = []

        def look():
            found = self.job(name, **options)
            if found:
                seen[:] = [found]
            return found if found and found.get('state') in states else None

        try:
            return wait_until(f'job {name} in {"/".join(states)}', look, seconds)
        except AssertionError as error:
            raise AssertionError(f'{error}; last seen: {seen}') from None

    # ---- what ranks of stepper.py left in self.out

    def rank_pids(self, generation=None):
        """rank -> pid of the newest (or that) generation, from stepper.py's pid files."""
        found = {}
        for name in os.listdir(self.out):
            match = re.fullmatch(r'pid\.(\d+)\.(\d+)', name)
            if match:
                found.setdefault(int(match.group(1)), {})[int(match.group(2))] = int(self.read(name))
        if not found:
            return {}
        return found.get(max(found) if generation is None else generation, {})

    def read(self, name):
        with open(os.path.join(self.out, name)) as data:
            return data.read().strip()

    def steps(self):
        """rank -> last step it wrote."""
        return {int(name[5:]): int(self.read(name) or 0) for name in os.listdir(self.out)
                if re.fullmatch(r'step\.\d+', name)}

    def wait_for_steps(self, step, ranks, seconds=PATIENCE):
        wait_until(f'step {step} on {ranks} ranks; have {self.steps()}',
                   lambda: sum(1 for value in self.steps().values() if value >= step) >= ranks, seconds)

    # ---- processes

    def marked(self):
        """pid -> command line of every living process this test caused."""
        needle = self.dir.encode()
        found = {}
        for name in os.listdir('/proc'):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            words = read_proc(name, 'cmdline')
            if (needle in words or needle in read_proc(name, 'environ')) and alive(name):
                found[int(name)] = words.decode(errors='replace').split('\0')[:-1]
        return found

    def daemons(self, verb):
        """pids of `gtrain head`, `gtrain agent`, `gtrain local-watch` or keepers ('keeper')."""
        return sorted(pid for pid, argv in self.marked().items()
                      if argv and ((verb in argv[1:3] and os.path.basename(argv[0]) == 'gtrain') or
                                   os.path.basename(argv[0]) == 'gtrain-' + verb))

    def wait_for_no_processes(self, seconds=PATIENCE, but=()):
        """The local cluster ends by itself after its last job."""
        try:
            wait_until('every process of this test to end', lambda: not set(self.marked()).difference(but), seconds)
        except AssertionError as error:
            raise AssertionError(f'{error}; left: {self.marked()}') from None

    def end_local_cluster(self, but=()):
        """As wait_for_no_processes, but without the ten seconds for which an idle cluster waits for another job:
        LocalTest sees that they end by themselves."""
        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))
        for pid in self.daemons('head') + self.daemons('agent'):  # without a head nobody wants an agent
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        self.wait_for_no_processes(but=but)

    def clean_up(self):
        for process in self.started:
            if process.popen.poll() is None and process.argv[1:2] in (['head'], ['agent']):
                process.signal(signal.SIGTERM)
        # A local cluster ends ten seconds after its last job, and a keeper waits fifteen for what still writes a checkpoint.
        grace = 40 if not self.failed() else 3
        deadline = time.monotonic() + grace
        while self.marked() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.marked()
        rounds = 0
        while self.marked() and rounds < 100:
            for pid in self.marked():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.02)
            rounds += 1
        for process in self.started:
            process.popen.wait()
            process.reader.join(2)
            if process.popen.stdout and not process.reader.is_alive():
                process.popen.stdout.close()
        failed = self.failed()
        if failed or left:
            self.show_evidence()
        shutil.rmtree(self.dir, ignore_errors=True)
        if left and not failed:
            self.fail(f'processes were left behind: {left}')

    def failed(self):
        outcome = getattr(self, '_outcome', None)
        result = getattr(outcome, 'result', None)
        return bool(outcome) and (not outcome.success or
                                  any(test is self for test, _ in (result.errors + result.failures if result else [])))

    def show_evidence(self):
        print(f'--- evidence of {self.id()}', file=sys.stderr)
        for process in self.started:
            print(f'$ {" ".join(process.argv)} -> {process.popen.returncode}\n{process.output()[-4000:]}', file=sys.stderr)
        for folder, folders, files in os.walk(self.dir):
            folders[:] = [name for name in folders if name != 'store']
            for name in sorted(files):
                path = os.path.join(folder, name)
                if re.search(r'\.(log|err|out|jsonl|json|yaml)$', name) and os.path.isfile(path):
                    with open(path, errors='replace') as data:
                        text = data.read()[-3000:]
                    print(f'--- {os.path.relpath(path, self.dir)}\n{text}', file=sys.stderr)


class PlainShellTest(GtrainTest):
    """The shell of an ordinary user, which was never told about gtrain or its needs."""
    ordinary_user = True

    def char_lm(self):
        """The words that start examples/char_lm on a text of its own."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            out.write('a line of text that is learned by heart\n' * 500)
        os.chmod(text, 0o644)
        return f'{shutil.copy(os.path.join(BUILD, "examples", "char_lm"), self.dir)} --text {text}'

    def env(self, home=None, **more):
        env = super().env(home)
        env.pop('PYTHONUNBUFFERED', None)
        return dict(env, **more)


def main():
    unittest.main(verbosity=2)

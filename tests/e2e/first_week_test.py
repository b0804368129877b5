"""What somebody meets in the first week: names used twice, jobs that are over, output that nobody reads, words of a script.
Typed as a user would, without root."""
import concurrent.futures
import glob
import json
import os
import re
import select
import shutil
import signal
import subprocess

import harness
from ckpt_test import LIBRARY, sanitized
from harness import PlainShellTest, wait_until


class WeekTest(PlainShellTest):
    def launch(self, *args):
        return json.loads(self.gtrain('launch', '-d', '--json', *args).stdout)['job']


class NamesTest(WeekTest):
    def test_a_name_is_the_job_that_runs(self):
        older = self.launch('--name', 'dup', '-n', '1', '--', 'sleep', '600')
        self.wait_for_state(older, 'RUNNING')
        self.gtrain('launch', '--name', 'dup', '-n', '1', '--', 'true')
        self.assertIn(older + ' -- RUNNING', self.gtrain('status', 'dup').stdout)
        self.assertIn(older + ' is RUNNING', self.gtrain('why', 'dup').stdout)
        self.assertIn('dup-2 is over: SUCCEEDED', self.gtrain('stop', 'dup-2').stdout)
        third = self.launch('--name', 'dup', '-n', '1', '--', 'sleep', '600')
        said = self.gtrain('stop', 'dup', expect=1).stderr
        self.assertIn(f'several jobs called dup run: say which: {older}, {third}', said)
        self.gtrain('stop', '--now', third)
        self.wait_for_state(third, 'CANCELLED')
        self.assertIn(older + ': stopping', self.gtrain('stop', 'dup').stdout)
        self.wait_for_state(older, 'CANCELLED')
        self.end_local_cluster()


class HistoryTest(WeekTest):
    """What a job said and what happened to it, also when somebody was killed or was too fast."""

    def test_why_knows_what_happened_before_the_head_was_killed(self):
        job = self.launch('--name', 'long', '-n', '1', '--', 'sleep', '600')
        self.wait_for_state(job, 'RUNNING')
        before = self.daemons('head')
        os.kill(before[0], signal.SIGKILL)
        wait_until('the next head', lambda: self.daemons('head') not in ([], before))
        said = wait_until('it to answer', lambda: 'the head restarted' in self.gtrain('why', job).stdout and self.gtrain('why', job).stdout)
        self.assertRegex(said, r'(?s)QUEUED: submitted.*generation 1, timeline 1: .*the head restarted')
        events = json.loads(self.gtrain('why', '--json', job).stdout)['events']
        numbers = [event['sequence'] for event in events]
        self.assertEqual(numbers, sorted(set(numbers)), 'each once, in order')
        self.gtrain('stop', '--now', job)
        self.wait_for_state(job, 'CANCELLED')
        self.end_local_cluster()

    def test_the_last_step_counts_and_a_loss_may_be_nan(self):
        words = 'for i in $(seq 1 100); do echo step $i loss 0.$i; done; echo step 101 loss nan'
        self.gtrain('launch', '--name', 'fast', '-n', '1', '--set', r'progress.step=step (\d+)', '--set', r'progress.loss=loss (\S+)',
                    '--', 'sh', '-c', words)
        self.assertIn('step 101, loss nan', self.gtrain('status', 'fast').stdout)
        self.end_local_cluster()
        left = json.loads(self.gtrain('status', '--json', 'fast').stdout)
        job, = left['jobs'] if 'jobs' in left else [left]
        self.assertEqual((job['step'], job['loss'], job['diverged']), (101, None, True))


class ManyTest(WeekTest):
    def test_all_is_more_than_the_newest_hundred(self):
        names = [f'j{number}' for number in range(103)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: self.gtrain('launch', '--name', name, '-n', '1', '--', 'true'), names))
        shown = json.loads(self.gtrain('status', '--all', '--json').stdout)['jobs']
        self.assertEqual(sorted(job['name'] for job in shown), sorted(names))
        self.assertEqual(len(json.loads(self.gtrain('status', '--limit', '101', '--json').stdout)['jobs']), 101)
        self.assertLess(len(json.loads(self.gtrain('status', '--json').stdout)['jobs']), 101)
        self.end_local_cluster()


class OverTest(PlainShellTest):
    """Verbs about a job that is over."""

    def test_logs_are_those_of_the_job_that_was_chosen(self):
        locked = os.path.join(self.dir, 'locked')
        os.makedirs(locked, mode=0o500)
        if os.geteuid() != 0 or self.prefix:  # root may write anywhere
            refused = self.gtrain('launch', '--run-dir', locked, '-n', '1', '--', 'true', expect=2).stderr
            self.assertIn(f'cannot be made in {locked}: {locked}: Permission denied. Choose another place: --run-dir DIR', refused)
        self.gtrain('launch', '--name', 'crash', '-n', '3', '--', 'sh', '-c', 'echo of crash; exit 3', expect=1)
        self.gtrain('launch', '--name', 'fine', '-n', '1', '--', 'echo', 'of fine')
        for words in (('--generation', '2'), ('--rank', '2')):
            for more in ((), ('-f',)):
                done = self.gtrain('logs', *words, *more, expect=1)
                self.assertRegex(done.stderr, r'^gtrain: (job )?fine-2 has ')
                self.assertEqual(done.stdout, '')
        self.end_local_cluster()
        done = self.gtrain('logs', 'crash', '--generation', '7', expect=1)
        self.assertRegex(done.stderr, r'crash-1 has no generation 7; its newest is 2')
        run_dir = next(name for name in os.listdir(self.dir + '/gtrain-runs') if name.startswith('crash-1'))
        logs = os.path.join(self.dir, 'gtrain-runs', run_dir, 'logs')
        os.rename(logs + '/generation-1', logs + '/moved')
        done = self.gtrain('logs', 'crash', '--generation', '1', expect=1)
        self.assertIn('no logs of generation 1 are left of crash-1', done.stderr)
        self.assertIn('; that of generation 2 is there', done.stderr)

    def test_it_is_said_also_when_the_cluster_has_ended(self):
        self.gtrain('launch', '--name', 'fin', '-n', '1', '--', 'true')
        self.gtrain('launch', '--name', 'bad', '-n', '1', '--', 'sh', '-c', 'exit 93', expect=93)
        for ended in (False, True):
            if ended:
                self.end_local_cluster()
            self.assertIn('fin-1 is over: SUCCEEDED', self.gtrain('stop', 'fin').stdout)
            over = {'job': 'fin-1', 'state': 'SUCCEEDED', 'stop': 'over'}
            self.assertEqual(json.loads(self.gtrain('stop', '--json', 'fin').stdout), over)
            for words in (('exec', 'fin', '--', 'true'), ('stack', 'fin'), ('scale', 'fin', '-n', '2')):
                self.assertIn('fin-1 is over: SUCCEEDED, so it has no ranks', self.gtrain(*words, expect=1).stderr)
            self.gtrain('attach', 'fin', expect=0)
            self.gtrain('attach', 'bad', expect=93)
        self.assertIn('bad-2 is over: FAILED', self.gtrain('attach', 'bad', expect=93).stderr)
        self.assertIn('nothing that it left is called nosuch', self.gtrain('attach', 'nosuch', expect=1).stderr)
        self.assertIn('no local cluster runs', self.gtrain('attach', expect=1).stderr)


class WhichJobTest(PlainShellTest):
    """What is left of a job answers for no other one: a monitor that reads FAILED would start a training again that runs."""

    def killed(self, **options):
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        self.wait_for_no_processes()

    def test_a_newer_one_of_the_name_may_run(self):
        self.gtrain('launch', '--name', 'train', '-n', '1', '--', 'false', expect=1)
        wait_until('its result', lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', 'train-1-*', 'result.json')))
        self.gtrain('launch', '-d', '--name', 'train', '-n', '1', '--', 'sleep', '600')
        self.wait_for_state('train-2', 'RUNNING')
        self.killed()
        for verb in ('status', 'why', 'logs'):
            with self.subTest(verb):
                said = self.gtrain(verb, 'train', expect=1)
                self.assertNotIn('FAILED', said.stdout)
                self.assertIn('the newest called train is train-1: ask for it by its id', said.stderr)
                self.gtrain(verb, 'train-1')

    def test_a_job_of_another_cluster_has_the_same_id(self):
        other = os.path.join(self.dir, 'other')
        os.makedirs(other)
        if self.prefix:
            os.chown(other, harness.NOBODY, harness.NOBODY)
        self.gtrain('launch', '--name', 'train', '-n', '1', '--', 'false', expect=1, home=other)
        wait_until('its result', lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', 'train-1-*', 'result.json')))
        self.gtrain('launch', '-d', '--name', 'train', '-n', '1', '--', 'sleep', '600')
        self.wait_for_state('train-1', 'RUNNING')
        self.killed()
        said = self.gtrain('status', 'train-1', '--json', expect=1)
        self.assertNotIn('FAILED', said.stdout)
        self.assertIn('FAILED', self.gtrain('status', 'train-1', home=other).stdout)

    def test_what_is_left_and_calls_itself_alive(self):
        """A rank may write there. `exec` and `scale` died of it."""
        self.gtrain('launch', '--name', 'one', '-n', '1', '--', 'true')
        (path,) = wait_until('its result', lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', 'one-1-*', 'result.json')))
        self.end_local_cluster()
        with open(path) as data:
            text = data.read()
        with open(path, 'w') as out:
            out.write(text.replace('SUCCEEDED', 'RUNNING'))
        for words in (['exec', 'one-1', '--', 'true'], ['scale', 'one-1', '-n', '2'], ['stack', 'one-1'], ['stop', 'one-1']):
            with self.subTest(words):
                done = self.gtrain(*words, expect=None)
                self.assertGreaterEqual(done.returncode, 0, done.stderr)
                self.assertNotIn('RUNNING', done.stdout)


class FailedTest(PlainShellTest):
    def test_status_and_why_say_what_the_rank_said(self):
        job = self.job_file('bad', 'name: bad\nscript: |\n  echo "KeyError: the word" >&2\n  exit 3\nranks: 1\nrestart: {before_first_step: 0}\n')
        self.gtrain('launch', '-d', job)
        self.wait_for_state('bad', 'FAILED')
        for verb in ('status', 'why'):
            self.assertRegex(self.gtrain(verb, 'bad').stdout, r'first fault: .*exit code 3\n +KeyError: the word')
        self.end_local_cluster()

    def test_what_ended_the_job_is_told_beside_its_first_fault(self):
        """P1: first a kill, then an error of the program, which was edited while it ran."""
        first = os.path.join(self.dir, 'first')
        job = self.job_file('edited', f'name: edited\nscript: |\n  [ -e {first} ] || {{ touch {first}; kill -9 $$; }}\n'
                                      '  echo "SyntaxError: invalid syntax" >&2\n  exit 3\nranks: 1\nrestart: {before_first_step: 3}\n')
        told = (r'first fault: rank 0 on .*signal 9 .*\n(?s:.*)last fault: rank 0 on .*exit code 3\n(?:gtrain: )? +SyntaxError: invalid syntax\n'
                r'(?:gtrain: )? +all that it wrote: (gtrain logs edited-1 --generation ([0-9]+) --rank 0)\n')
        self.assertRegex(self.gtrain('launch', job, expect=1).stderr, told)
        for verb in ('status', 'why'):
            self.assertRegex(self.gtrain(verb, 'edited').stdout, told)
        advice = re.search(told, self.gtrain('why', 'edited').stdout).group(1)
        self.assertIn('SyntaxError: invalid syntax', self.gtrain(*advice.split()[1:]).stdout)
        self.end_local_cluster()

    def test_logs_of_a_generation_that_wrote_nothing(self):
        first = os.path.join(self.dir, 'first')
        self.gtrain('launch', '-d', '--name', 'twice', '-n', '1', '--', 'sh', '-c',
                    f'[ -e {first} ] && exec sleep 600; touch {first}; echo the word; kill -9 $$')
        wait_until('another generation', lambda: (self.job('twice') or {}).get('generation', 0) > 1 and self.job('twice')['state'] == 'RUNNING')
        done = self.gtrain('logs', 'twice')
        self.assertEqual(done.stdout, '')
        self.assertRegex(done.stderr, r'generation 2 has written nothing yet; what an earlier one wrote: --generation 1')
        self.assertEqual(self.gtrain('logs', 'twice', '--generation', '1').stdout, 'the word\n')
        self.gtrain('stop', '--now', 'twice')
        self.wait_for_state('twice', 'CANCELLED')
        self.end_local_cluster()

    def test_who_asks_to_stop_twice_stops_at_once(self):
        self.gtrain('launch', '-d', '--name', 'firm', '-n', '1', '--', 'sh', '-c', 'trap "" TERM; echo ready; while :; do sleep 0.1; done')
        wait_until('it to be ready', lambda: 'ready' in self.gtrain('logs', 'firm', expect=None).stdout)
        self.assertIn('stopping; the ranks may save', self.gtrain('stop', 'firm', '--reason', 'the first').stdout)
        self.assertIn('firm-1: stopping now', self.gtrain('stop', 'firm').stdout)
        self.assertIn('the first', self.wait_for_state('firm', 'CANCELLED')['reason'])
        self.end_local_cluster()


class SlowPipeTest(PlainShellTest):
    def test_a_signal_ends_launch_into_a_pipe_that_nobody_reads(self):
        for number, code in ((signal.SIGTERM, None), (signal.SIGINT, 130)):
            with self.subTest(number):
                read, write = os.pipe()
                launch = subprocess.Popen([*self.prefix, self.program, 'launch', '-n', '2', '--', 'sh', '-c', 'yes word'],
                                          env=self.env(), cwd=self.dir, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE,
                                          start_new_session=True)
                try:
                    # A full pipe may hold less than its size in bytes: what is written in pieces fills pages in part.
                    wait_until('the pipe to be full', lambda: harness.alive(launch.pid) and self.jobs() and not select.select([], [write], [], 0)[1])
                    launch.send_signal(number)
                    _, said = launch.communicate(timeout=harness.PATIENCE)
                    if code is not None:
                        self.assertEqual(launch.returncode, code, said)
                finally:
                    launch.kill()
                    launch.wait()
                    os.close(read)
                    os.close(write)
                for job in self.jobs():
                    self.gtrain('stop', '--now', job['id'], expect=None)
        self.end_local_cluster()


class ClosedOutputTest(PlainShellTest):
    def test_a_job_that_is_over_does_not_go_on(self):
        """`launch | head -1`, and the first that nobody reads are the last words of the job."""
        for attempt in range(3):
            go = os.path.join(self.dir, f'go{attempt}')
            script = f'while [ ! -e {go} ]; do sleep 0.05; done; echo last words'
            launch = subprocess.Popen([*self.prefix, self.program, 'launch', '-n', '2', '--', 'sh', '-c', script],
                                      env=self.env(), cwd=self.dir, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True)
            self.addCleanup(launch.kill)
            launch.stdout.close()
            said = ''
            while 'RUNNING' not in said:
                line = launch.stderr.readline()
                self.assertTrue(line, said)
                said += line
            open(go, 'w').close()
            said += launch.stderr.read()
            launch.stderr.close()
            code = launch.wait(harness.PATIENCE)
            if 'SUCCEEDED' in said:
                self.assertNotIn('goes on', said)
                self.assertEqual(code, 0, said)
            else:
                self.assertEqual(code, 141, said)
        self.end_local_cluster()


class WordsTest(PlainShellTest):
    def test_ranks_that_are_not_shown_are_named(self):
        done = self.gtrain('launch', '-n', '34', '--', 'sh', '-c', 'echo of $RANK')
        self.assertEqual(done.stderr.count('gtrain: output of ranks 32-33 is not shown here: gtrain logs sh-1 --rank 32 -f\n'), 1)
        self.assertNotIn(':33: of 33', done.stdout)
        self.gtrain('launch', '-n', '1', '-d', '--name', 'long', '--', 'sleep', '600')
        self.wait_for_state('long', 'RUNNING')
        self.assertTrue(self.gtrain('exec', 'long', '--', 'no-such', expect=127).stderr.startswith('gtrain: cannot run no-such: '))
        self.gtrain('stop', '--now', 'long')
        self.wait_for_state('long', 'CANCELLED')
        self.end_local_cluster()


class ResumeTest(PlainShellTest):
    """The programs of docs/python.md, which choose their checkpoint directory themselves."""

    def programs(self):
        with open(os.path.join(harness.SOURCE, 'docs', 'python.md')) as page:
            return re.findall(r'```python\n(.*?)```', page.read(), re.S)

    def write(self, name, text):
        path = os.path.join(self.dir, name)
        with open(path, 'w') as out:
            out.write(text)
        os.chmod(path, 0o644)
        return path

    def train(self, program, *flags):
        """Launches it under Debian's own Python, which the tests have numpy for."""
        return self.gtrain('launch', '-n', '2', *flags, '--', '/usr/bin/python3', program, GTRAIN_LIBRARY=self.library,
                           PYTHONPATH=self.package)

    def setUp(self):
        super().setUp()
        if not os.path.exists(LIBRARY):
            self.skipTest('libgtrain.so is not built')
        if sanitized():
            self.skipTest('Python cannot load a sanitized library')
        if subprocess.run(['/usr/bin/python3', '-c', 'import numpy'], capture_output=True).returncode != 0:
            self.skipTest('/usr/bin/python3 has no numpy')
        self.package = os.path.join(self.dir, 'python')
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(os.path.join(harness.SOURCE, 'python', 'gtrain'), self.package + '/gtrain', ignore=ignored)
        libraries = shutil.copytree(os.path.dirname(LIBRARY), os.path.join(self.dir, 'lib'), symlinks=True,
                                    ignore=shutil.ignore_patterns('*.a'))
        self.library = os.path.join(libraries, 'libgtrain.so')

    def test_the_whole_program_and_what_a_second_launch_says(self):
        whole = self.write('train.py', self.programs()[0])
        first = self.train(whole)
        self.assertIn('step 1000, last weight 1.900', first.stdout)
        self.assertNotIn('resumed', first.stderr)
        second = self.train(whole)
        self.assertIn('step 1000, last weight 1.900', second.stdout)
        said = re.findall(r'gtrain: resumed step 1000 in .* from \S*ckpt\. To begin anew: gtrain launch --fresh', second.stderr)
        self.assertEqual(len(said), 1, second.stderr)
        fresh = self.train(whole, '--fresh')
        self.assertNotIn('resumed', fresh.stderr)
        self.assertRegex(self.gtrain('status', 'python3-3').stdout,
                         r'restored nothing: --fresh was given, and the \d checkpoints? that (is|are) in \S*ckpt')
        self.end_local_cluster()

    def test_the_lazy_one(self):
        whole, lazy = next((text, other) for text in self.programs()[:1] for other in self.programs() if 'lazy=True' in other)
        program = self.write('lazy.py', whole.split('\ntry:\n')[0] + '\n' + lazy)
        self.train(program)
        newest = json.loads(self.gtrain('ckpt', 'ls', '--json', 'ckpt').stdout)[0]
        self.assertEqual((newest['step'], newest['state']), (1000, 'committed'))
        verified = json.loads(self.gtrain('ckpt', 'verify', '--json', 'ckpt').stdout)
        self.assertEqual((verified['checkpoints'][0]['attempt'], verified['checkpoints'][0]['state'], verified['damaged']),
                         (newest['attempt'], 'intact', 0))
        garbage = json.loads(self.gtrain('ckpt', 'gc', '--json', '--dry-run', 'ckpt').stdout)
        self.assertEqual((garbage['dry_run'], garbage['never_committed']), (True, []))
        self.assertIn('--json is for', json.loads(self.gtrain('ckpt', 'unpin', 'ckpt', '1000', '--json', expect=2).stdout)['error'])
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

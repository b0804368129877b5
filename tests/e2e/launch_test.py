"""A job from its launch to what it leaves: launched twice, with secrets, watched, ended, and remembered."""
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import PlainShellTest, wait_until


class SecondLaunchTest(PlainShellTest):
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
        words = (f'{self.char_lm()} --batch 16 --steps 1000000').split()
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


SAVES_ONCE = f'''
import sys
sys.path.insert(0, {os.path.join(harness.SOURCE, 'python')!r})
import gtrain
with gtrain.Session() as session, gtrain.Checkpointer(session) as checkpointer:
    checkpointer.replicated({{'weights': bytearray(b'1234')}})
    checkpointer.restore()
    checkpointer.save(1)
    checkpointer.wait()  # the next launch looks for the commit at once
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


class SecretsTest(PlainShellTest):
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


class AttachTest(PlainShellTest):
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


class KillTest(PlainShellTest):
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


class NothingVanishesTest(PlainShellTest):
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


if __name__ == '__main__':
    harness.main()

"""What gtrain prints: output as it comes, tables, colours, errors, JSON, and the words that a shell completes.
Typed as a user would, in a terminal of 100 x 30 and through pipes, without root."""
import json
import os
import re
import signal
import socket
import subprocess

import harness
from harness import PlainShellTest, wait_until


class LiveOutputTest(PlainShellTest):
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


class LogsTest(PlainShellTest):
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


class TimesTest(PlainShellTest):
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


ATTACKS = (r'\033]0;title\007', r'\033]52;c;ZXZpbA==\007', r'\033[?2004h', r'\033[?1049h', r'\033[6n', r'\033[8m',
           r'\033[5m', r'\033c', r'\007', r'\233')


class ColourTest(PlainShellTest):
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


class ErrorsTest(PlainShellTest):
    def run_failing(self, *words):
        """What a launch that fails says; the job document."""
        done = self.gtrain('launch', '--name', 'broken', '-n', '2', '--', *words, expect=1,
                           PATH='/usr/local/bin:/usr/bin:/bin')  # folders that everybody may look into
        return done.stderr, self.job('broken')

    def test_a_missing_command_is_said_once(self):
        """Not tried again; where it was looked for stands in one line."""
        said, job = self.run_failing('pythn', 'train.py')
        self.assertEqual(said.count('PATH='), 1, said)
        self.assertRegex(said, r'cannot run pythn: No such file or directory\); (?:1 more rank ended with it: 1; )?a command that was not found is not tried '
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


class JsonTest(PlainShellTest):
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


class CompletionTest(PlainShellTest):
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
                               (('head', '--tok'), ['--token']), (('bench', ''), ['allreduce', 'link', 'codec']),
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


if __name__ == '__main__':
    harness.main()

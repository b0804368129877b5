"""What a stranger meets on the first day, typed as a user would: in a terminal of 100 x 30 and through pipes, without root.
One class for each habit; their order is that of a day."""
import json
import os
import signal

import harness
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
# ---- stalls and stacks
# ---- a second launch of the same job
# ---- nothing vanishes
# ---- times and owners
# ---- a head that restarts or moves
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
# ---- ranks between min and max
# ---- terminals and colours
# ---- errors once
# ---- plan and logs
# ---- JSON and completion
# ---- a million lines
# ---- the end

if __name__ == '__main__':
    harness.main()

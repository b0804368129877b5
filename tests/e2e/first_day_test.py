"""What a stranger meets on the first day, typed as a user would: in a terminal of 100 x 30 and through pipes, without root.
One class for each habit; their order is that of a day."""
import json
import os
import re
import shutil
import signal
import subprocess

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
# ---- C++ users link a product
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


# ---- the end

if __name__ == '__main__':
    harness.main()

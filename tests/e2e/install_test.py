"""The product where it is installed: the SDK for C++, the wheel, and the Python that a node uses."""
import glob
import json
import os
import re
import shutil
import subprocess
import unittest

import cluster
import harness
from ckpt_test import LIBRARY, sanitized
from harness import PlainShellTest


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


@unittest.skipUnless(not sanitized(), 'a program that is not instrumented cannot load a sanitized libgtrain.so')
class ProductTest(PlainShellTest):
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
            self.assertIn('trained, last weight 14.999', done.stdout)
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
        self.assertIn('trained, last weight 14.999', done.stdout)

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


class WheelTest(PlainShellTest):
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


if __name__ == '__main__':
    harness.main()

"""The commands of examples/torch/README.md, with the PyTorch of the Python that runs this file: `make test-torch`.

Each is run as written there, made slower and shorter; a rank is killed on the way, and the program must resume and end.
"""
import os
import re
import shlex
import signal
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
import cluster  # noqa: E402
import harness  # noqa: E402
from harness import SOURCE  # noqa: E402

TRAINING = 300  # seconds; two busy cores take twenty to import what these import
VENV = os.path.dirname(os.path.abspath(sys.executable))


class Examples:
    def env(self, home=None, **more):
        """As in a shell where that virtual environment is active."""
        return super().env(home, PATH=f'{VENV}:{os.environ["PATH"]}', **more)

    def setUp(self):
        super().setUp()
        os.symlink(os.path.join(SOURCE, 'examples'), os.path.join(self.dir, 'examples'))

    def of_the_readme(self, what):
        with open(os.path.join(SOURCE, 'examples', 'torch', 'README.md')) as readme:
            line, = [line for line in readme if line.startswith('    gtrain launch') and what in line]
        return shlex.split(line, comments=True)[1:]

    def pid_of_rank(self, rank):
        job, = self.jobs()
        return next(found['pid'] for found in job['ranks'] if found['rank'] == rank)


class LibrariesTest(Examples, harness.GtrainTest):
    def check(self, script):
        launch = self.start(*self.of_the_readme(script), '--steps', '60', '--step-seconds', '0.1')
        launch.wait_for('step 23 ', TRAINING)
        os.kill(self.pid_of_rank(1), signal.SIGKILL)
        self.assertEqual(launch.wait(TRAINING), 0, launch.output())
        output = launch.output()
        self.assertRegex(output, r'generation 2(?s:.*)resumed at step (20|40)\b')
        self.assertIn('finished: 60 steps on 2 rank(s)', output)
        losses = dict(re.findall(r': step (\d+) loss ([0-9.]+)', output))
        self.assertLess(float(losses['60']), float(losses['1']))

    def test_fsdp2(self):
        self.check('train_fsdp2.py')

    def test_accelerate(self):
        self.check('train_accelerate.py')

    def test_lightning(self):
        self.check('train_lightning.py')

    def test_hf_trainer(self):
        self.check('train_hf_trainer.py')


class TorchrunTest(Examples, harness.GtrainTest):
    def workers(self):
        """Those that torchrun started."""
        return [pid for pid, argv in self.marked().items()
                if any(word.endswith('torch_ddp/train.py') for word in argv[1:3])]

    def test_a_worker_is_killed(self):
        with open(os.path.join(self.dir, self.of_the_readme('torchrun.yaml')[-1])) as job:
            slower = self.job_file('slower', job.read().replace('--steps 200', '--steps 60 --step-seconds 0.1'))
        launch = self.start('launch', slower)
        launch.wait_for('step 45 ', TRAINING)
        os.kill(self.workers()[0], signal.SIGKILL)
        self.assertEqual(launch.wait(TRAINING), 0, launch.output())
        self.assertRegex(launch.output(), r'resumed at step \d+')
        self.assertRegex(launch.output(), r'finished: accuracy 0\.9\d+ on 2 rank')


class TorchrunOnTwoMachinesTest(Examples, cluster.ClusterTest):
    def test_one_torchrun_each(self):
        done = self.gtrain(*self.of_the_readme('torchrun.yaml'), '--context', 'lab', '--set', 'nodes=2',
                           timeout=TRAINING)
        self.assertRegex(done.stdout, r'finished: accuracy 0\.9\d+ on 4 rank')


if __name__ == '__main__':
    harness.main()

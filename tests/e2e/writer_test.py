"""Checkpoints are written outside of the ranks: what ends a rank, or its writer, or the agent, after Save() returned does
not end the save, and the next generation resumes from it."""
import json
import os
import re
import signal
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import SOURCE, wait_until

RANK = os.path.join(SOURCE, 'tests', 'e2e', 'save_rank.py')


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class WriterTest(harness.GtrainTest):
    def launch(self, ranks, *flags):
        self.store = os.path.join(self.dir, 'ckpt')
        job = self.job_file('lost', f'name: lost\nrun: /usr/bin/python3 {RANK} --out {self.out} {" ".join(flags)}\n'
                                    f'ranks: {ranks}\ncheckpoint: {{uri: {self.store}}}\n')
        return self.start('launch', job)

    def resumes_what_was_saved(self, launch, ranks):
        self.assertEqual(launch.wait(), 0, launch.output())
        resumed = sorted(re.findall(r'rank (\d+): resumed (\d+)', launch.output()))
        self.assertEqual(resumed, [(str(rank), '2') for rank in range(ranks)], launch.output())
        self.assertNotIn('writes its saves itself', launch.output())
        listed = json.loads(self.gtrain('ckpt', 'ls', self.store, '--json').stdout)
        self.assertEqual([c['step'] for c in listed], [2, 1])
        self.assertEqual(self.gtrain('ckpt', 'verify', self.store).stdout.count('intact'), 2)
        self.end_local_cluster()

    def writers(self):
        return self.daemons('writer')

    def signal_writers(self, number):
        pids = self.writers()
        for pid in pids:
            os.kill(pid, number)
        return pids

    def hold_writers(self, launch, ranks):
        """Both ranks have saved step 2, and their writers, stopped before, have written nothing of it."""
        for rank in range(ranks):
            wait_until(f'rank {rank} to be ready', lambda: os.path.exists(os.path.join(self.out, f'ready.{rank}')) or
                       self.assertIsNone(launch.popen.poll(), launch.output()))
        self.assertEqual(len(self.signal_writers(signal.SIGSTOP)), ranks)
        open(os.path.join(self.out, 'go'), 'w').close()
        for rank in range(ranks):
            wait_until(f'rank {rank} to have saved', lambda: os.path.exists(os.path.join(self.out, f'saved.{rank}')))
        self.assertEqual([name for name in os.listdir(self.store) if name.startswith('step-000000000002')], [])

    def die(self):
        open(os.path.join(self.out, 'die'), 'w').close()

    def test_one_rank_gets_SIGSEGV_10_ms_after_its_save(self):
        self.resumes_what_was_saved(self.launch(1, '--die', '0'), 1)

    def test_rank_0_of_three_gets_SIGSEGV(self):
        self.resumes_what_was_saved(self.launch(3, '--die', '0'), 3)

    def test_rank_1_of_three_gets_SIGSEGV(self):
        self.resumes_what_was_saved(self.launch(3, '--die', '1'), 3)

    def test_rank_2_of_three_gets_SIGSEGV(self):
        self.resumes_what_was_saved(self.launch(3, '--die', '2'), 3)

    def test_all_ranks_get_SIGKILL(self):
        self.resumes_what_was_saved(self.launch(3, '--die', 'all', '--signal', 'KILL'), 3)

    def test_the_writers_are_killed_as_well(self):
        """The snapshots are the keeper's: other writers go on with them, although no rank is left."""
        launch = self.launch(2, '--die', 'all', '--hold')
        self.hold_writers(launch, 2)
        self.die()
        self.assertEqual(len(self.signal_writers(signal.SIGKILL)), 2)
        self.resumes_what_was_saved(launch, 2)

    def test_a_writer_is_killed_and_the_rank_says_so(self):
        launch = self.launch(1, '--die', '0', '--hold')
        self.hold_writers(launch, 1)
        self.signal_writers(signal.SIGKILL)
        launch.wait_for('writer of this rank.s saves was killed')
        launch.wait_for('checkpoint at step 2')
        self.die()
        self.resumes_what_was_saved(launch, 1)

    def test_the_agent_is_killed_while_they_write(self):
        launch = self.launch(2, '--die', 'all', '--hold')
        self.hold_writers(launch, 2)
        for pid in self.daemons('agent'):
            os.kill(pid, signal.SIGKILL)
        self.die()
        self.signal_writers(signal.SIGCONT)
        self.resumes_what_was_saved(launch, 2)


if __name__ == '__main__':
    unittest.main(verbosity=2)

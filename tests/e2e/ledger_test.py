"""The sample ledger as a program uses it: crashes, other numbers of ranks, and the proof from the job's records."""
import collections
import glob
import json
import os
import re
import shutil
import signal
import time
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import SOURCE, wait_until
from ledger_rank import BATCH, EPOCHS, SAMPLES

RANK = os.path.join(SOURCE, 'tests', 'e2e', 'ledger_rank.py')


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class LedgerTest(harness.GtrainTest):
    def launch(self, name, *flags):
        self.go = os.path.join(self.dir, 'go')
        job = self.job_file(name, f'name: {name}\nrun: /usr/bin/python3 {RANK} --out {self.out} --until {self.go} {" ".join(flags)}\n'
                                  f'ranks: {{min: 1, max: 3}}\nresources: {{cpus: 1, oversubscribe: true}}\n'
                                  f'checkpoint: {{uri: {self.dir}/ckpt, every: 5 steps}}\n')
        self.gtrain('launch', '-d', job, GTRAIN_LIBRARY=LIBRARY)

    def steps(self):
        """What each generation trained: {generation: {step: (epoch, [samples of all ranks])}}."""
        steps = collections.defaultdict(lambda: collections.defaultdict(lambda: [0, []]))
        for path in glob.glob(os.path.join(self.out, 'trained.*')):
            with open(path) as lines:
                for line in lines:
                    generation, step, epoch, *samples = map(int, line.split())
                    one = steps[generation][step]
                    one[0] = epoch
                    one[1].extend(samples)
        return steps

    def reached(self):
        return max((step for steps in self.steps().values() for step in steps), default=0)

    def await_steps(self, more):
        wanted = self.reached() + more
        wait_until(f'step {wanted}', lambda: self.reached() >= wanted)

    def kept(self):
        """By step, the newest generation that trained it: what came after an older checkpoint is gone with its state."""
        kept = {}
        for _, steps in sorted(self.steps().items()):
            kept = {step: one for step, one in kept.items() if step < min(steps)}
            kept.update(steps)
        return kept

    def audit(self, *words, expect=0):
        return self.gtrain('data', 'audit', *words, expect=expect)

    def test_each_sample_once_whatever_happens(self):
        self.launch('exact')
        self.await_steps(12)
        os.kill(self.rank_pids()[0], signal.SIGKILL)
        self.await_steps(12)
        self.gtrain('scale', 'exact', '-n', '1', '--now')
        wait_until('one rank', lambda: (self.job('exact') or {}).get('world_size') == 1)
        self.await_steps(12)
        os.kill(self.rank_pids()[0], signal.SIGKILL)
        self.await_steps(8)
        half = json.loads(self.audit('exact', '--json').stdout)
        self.assertEqual((half['exact'], half['data'][0]['finished']), (True, False))
        open(self.go, 'w').close()
        self.wait_for_state('exact', 'SUCCEEDED', seconds=harness.PATIENCE * 2)

        trained = collections.Counter((epoch, sample) for epoch, samples in self.kept().values() for sample in samples)
        self.assertEqual(len(trained), SAMPLES * EPOCHS)
        self.assertEqual(set(trained.values()), {1})
        self.assertGreater(len(self.steps()), 3, 'generations')
        said = wait_until('the whole proof', lambda: (lambda text: 'all of them' in text and text)(self.audit('exact').stdout))
        self.assertIn(f'train: exact; {EPOCHS} epochs of {SAMPLES} samples, each given out once, and that is all of them', said)
        self.assertRegex(said, rf'generation \d+, 1 rank: from step \d+ \(epoch \d, sample \d+\) to step \d+, batches of {BATCH}')
        self.end_local_cluster()
        (run_dir,) = glob.glob(os.path.join(self.dir, 'gtrain-runs', 'exact-*'))
        self.assertEqual(self.audit(run_dir).stdout, said, 'also without a cluster')
        self.assertRegex(said, r'ranks reported (all these|these) steps to the head, too')
        self.check_that_changes_are_found(run_dir, said)

    def check_that_changes_are_found(self, run_dir, said):
        """A copy says the same. Whoever changes it to have trained more than the ranks reported is found out, by both files or by one alone."""
        copy = os.path.join(self.dir, 'copy')
        shutil.copytree(run_dir, copy)
        shutil.rmtree(run_dir)
        self.assertEqual(self.audit(copy).stdout, said)
        with open(os.path.join(copy, 'result.json')) as file:
            result = json.load(file)
        last = [event for event in result['events'] if event['kind'] == 'samples'][-1]
        told = last['text']
        last['text'] = re.sub(r'step \d+, ', 'step 200000, ', told)
        with open(os.path.join(copy, 'result.json'), 'w') as file:
            json.dump(result, file)
        self.assertRegex(self.audit(copy, expect=1).stdout, rf'train: NOT exact\n  event {last["sequence"]} is "rank 0 on \S+: train: step 200000, .*'
                                                           rf', and in {re.escape(copy)}/events.jsonl it is ')
        os.remove(os.path.join(copy, 'events.jsonl'))
        self.assertIn('NOT exact', self.audit(copy, expect=1).stdout)

    def test_the_end_is_told_though_the_head_died_meanwhile(self):
        """H1: ranks say that nothing is left while the head stands still, which then dies. The next one ends the job, and has heard it before."""
        self.launch('ends')
        self.await_steps(12)
        open(self.go, 'w').close()
        head = self.daemons('head')[0]
        os.kill(head, signal.SIGSTOP)
        try:
            wait_until('the last epoch', lambda: sum(len(one[1]) for one in self.kept().values() if one[0] == EPOCHS - 1) == SAMPLES, seconds=60)
            time.sleep(1)  # the agent has heard it
        finally:
            os.kill(head, signal.SIGKILL)
        self.wait_for_state('ends', 'SUCCEEDED')
        self.assertIn('and that is all of them', self.audit('ends').stdout)

    def test_data_that_is_begun_anew_is_found(self):
        self.launch('wrong', '--forget')
        self.await_steps(12)
        os.kill(self.rank_pids()[0], signal.SIGKILL)
        said = wait_until('the proof to fail', lambda: (lambda done: done.returncode == 1 and done.stdout)(self.audit('wrong', expect=None)))
        self.assertRegex(said, r'train: NOT exact\n  generation 2 began at step 0, epoch 0, sample 0: its program does not save where it is '
                               r'in its data')
        self.gtrain('stop', '--now', 'wrong')
        self.wait_for_state('wrong', 'CANCELLED', 'FAILED')
        self.end_local_cluster()

    def test_of_a_job_without_a_ledger(self):
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.assertIn('true-1 has said nothing of its data', self.audit('true-1', expect=1).stderr)
        self.assertIn("data 'check': it is audit", self.gtrain('data', 'check', expect=2).stderr)
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

"""`elastic: {determinism: bitwise}`: training ends with the same bits, whatever became of its ranks."""
import hashlib
import itertools
import os
import random
import signal
import unittest

import harness
from harness import soak, wait_until

NETWORK = os.path.join(os.path.dirname(harness.GTRAIN), '..', 'tests', 'e2e_elastic_bitwise')
STEPS = 2000


@unittest.skipUnless(os.path.exists(NETWORK), 'e2e_elastic_bitwise is not built')
class BitwiseTest(harness.GtrainTest):
    def launch(self, name, ranks, pause=0, elastic='determinism: bitwise, virtual_ranks: 8', extra='', words='', steps=STEPS):
        """A job whose ranks write into a folder of its own."""
        out = self.folder(name)
        os.makedirs(out)
        self.gtrain('launch', '-d', self.job_file(
            name, f'name: {name}\nrun: {NETWORK} {out} {steps} {pause} {words}\nranks: {ranks}\nelastic: {{{elastic}}}\n'
                  f'restart: {{budget: 100, before_first_step: 0}}\nresources: {{cpus: 1, oversubscribe: true}}\n{extra}'))

    def folder(self, name):
        return os.path.join(self.out, name)

    def trained(self, name):
        """pid -> [(generation, step, ranks)]."""
        folder, trained = self.folder(name), {}
        for file in os.listdir(folder):
            if file.startswith('trained.'):
                with open(os.path.join(folder, file)) as lines:
                    whole = [line.split() for line in lines if line.endswith('\n')]
                trained[int(file[8:])] = [tuple(map(int, line)) for line in whole]
        return trained

    def newest(self, name):
        """The last line of any process, and the pids of its generation."""
        last = {pid: lines[-1] for pid, lines in self.trained(name).items() if lines}
        if not last:
            return (0, 0, 0), []
        newest = max(last.values())
        return newest, sorted(pid for pid, line in last.items() if line[0] == newest[0] and harness.alive(pid))

    def await_size(self, name, ranks):
        """Waits for a step of so many ranks, and returns their pids."""
        def look():
            (_, _, size), pids = self.newest(name)
            return pids if size == ranks and len(pids) == ranks else None
        return wait_until(f'a step of {ranks} ranks; have {self.newest(name)}', look)

    def let_one_come(self, name):
        """One process that waits beside the others joins them."""
        came = sum(file.startswith('came.') for file in os.listdir(self.folder(name)))
        open(os.path.join(self.folder(name), 'come'), 'w').close()
        wait_until('a process that comes', lambda: sum(file.startswith('came.') for file in os.listdir(self.folder(name))) > came)

    def digest(self, name, ranks):
        """SHA-256 of the weights, which are the same on all ranks."""
        self.wait_for_state(name, 'SUCCEEDED')
        digests = []
        for file in os.listdir(self.folder(name)):
            if file.startswith('weights.'):
                with open(os.path.join(self.folder(name), file), 'rb') as data:
                    digests.append(hashlib.sha256(data.read()).hexdigest())
        self.assertEqual((len(digests), len(set(digests))), (ranks, 1), digests)
        return digests[0]

    def test_kills_and_sizes_change_no_bit(self):
        """P1, N7: 2 ranks and 4, two of which are killed at once; 2, 3 and 4 again, and one more kill."""
        self.launch('alone', 1)
        self.launch('four', 4, extra='env: {OMP_NUM_THREADS: "1"}\n')
        self.launch('changing', '{min: 2, max: 4}', 20, 'mode: in-place, determinism: bitwise, virtual_ranks: 8', words='late')
        self.await_size('changing', 2)
        self.gtrain('scale', '-n', '4', 'changing', '--now')
        self.let_one_come('changing')
        self.let_one_come('changing')
        before = self.await_size('changing', 4)
        for pid in (before[0], before[2]):
            os.kill(pid, signal.SIGKILL)
        self.await_size('changing', 2)
        self.let_one_come('changing')
        self.await_size('changing', 3)  # ten seconds later: the head waits for the other one
        self.let_one_come('changing')
        four = self.await_size('changing', 4)
        os.kill(four[1], signal.SIGKILL)
        self.await_size('changing', 3)
        open(os.path.join(self.folder('changing'), 'fast'), 'w').close()
        digests = {'alone': self.digest('alone', 1), 'four': self.digest('four', 4), 'changing': self.digest('changing', 3)}
        steps = sorted({line for lines in self.trained('changing').values() for line in lines})
        sizes = [size for size, _ in itertools.groupby(ranks for _, _, ranks in steps)]
        print(f'\n{sizes} ranks, {digests}', flush=True)
        self.assertIn('given out once', self.gtrain('data', 'audit', 'changing').stdout)
        rest = iter(sizes)
        self.assertTrue(all(size in rest for size in (2, 4, 2, 3, 4, 3)), sizes)
        self.assertEqual(len(set(digests.values())), 1, digests)
        self.assertRegex(self.job('four')['compression'], r'^bitwise, a tree of 8 virtual ranks over 4 ranks: \S+ ms a step, an all-reduce')

    def test_kills_at_any_moment_change_no_bit(self):
        """P1: ranks die between any two instructions of a step. GTRAIN_SOAK=1: 200 times."""
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        self.launch('alone', 1, steps=soak(100_000, 6_000))
        self.launch('killed', 4, 5, 'mode: in-place, determinism: bitwise, virtual_ranks: 8', steps=soak(100_000, 6_000))
        for kill in range(soak(200, 8)):
            pids = self.await_size('killed', 4)
            at = self.newest('killed')[0][1]
            wait_until(f'steps after {at}', lambda: self.newest('killed')[0][1] >= at + rng.randrange(2, 12))
            victim = rng.choice(pids)
            os.kill(victim, signal.SIGKILL)
            wait_until(f'a generation without {victim}', lambda: victim not in self.newest('killed')[1])
        self.await_size('killed', 4)
        open(os.path.join(self.folder('killed'), 'fast'), 'w').close()
        self.assertEqual(self.digest('killed', 4), self.digest('alone', 1), f'seed {seed}')
        self.assertGreater(self.newest('killed')[0][0], 8)

    def test_a_job_that_restarts_has_the_same_bits(self):
        self.launch('alone', 1, steps=120)
        self.launch('restarts', 3, 10, extra=f'checkpoint: {{uri: {self.dir}/ckpt, every: 10 steps}}\n', steps=120)
        wait_until('step 40', lambda: self.newest('restarts')[0][1] >= 40)
        os.kill(self.newest('restarts')[1][0], signal.SIGKILL)
        self.assertEqual(self.digest('restarts', 3), self.digest('alone', 1))
        self.assertEqual(self.newest('restarts')[0][0], 2, 'it was killed')

    def test_without_it_the_bits_depend_on_the_number_of_ranks(self):
        """So that the others can fail."""
        self.launch('alone', 1, elastic='mode: restart')
        self.launch('four', 4, elastic='mode: restart')
        self.assertNotEqual(self.digest('alone', 1), self.digest('four', 4))

    def test_another_number_of_virtual_ranks_has_other_bits(self):
        self.launch('eight', 1)
        self.launch('five', 1, elastic='determinism: bitwise, virtual_ranks: 5')
        self.assertNotEqual(self.digest('eight', 1), self.digest('five', 1))

    def test_a_program_that_takes_whole_steps_is_told(self):
        self.launch('whole', 2, words='whole')
        self.wait_for_state('whole', 'FAILED')
        self.assertIn('0 of the 4 parts that this step has on this rank', self.gtrain('logs', 'whole').stdout)

    def test_ranks_with_other_numbers_of_threads_are_refused(self):
        out = self.folder('mixed')
        os.makedirs(out)
        self.gtrain('launch', '-d', self.job_file(
            'mixed', f'name: mixed\nscript: |\n  [ "$RANK" != 1 ] || export MKL_NUM_THREADS=3\n  exec {NETWORK} {out} 20 0\nranks: 3\n'
                     'elastic: {determinism: bitwise}\nresources: {cpus: 1, oversubscribe: true}\nrestart: {before_first_step: 0}\n'))
        self.wait_for_state('mixed', 'FAILED')
        logs = self.gtrain('logs', 'mixed').stdout
        self.assertRegex(logs, r'rank 1 has .*MKL_NUM_THREADS=3 .*; rank 0, with whose bits training goes on, has .*MKL_NUM_THREADS=1 ')


if __name__ == '__main__':
    harness.main()

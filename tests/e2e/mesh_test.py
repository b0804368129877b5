"""`mesh:` beyond dp: a model in parts, of which any rank may be lost (issue: elastic in place)."""
import hashlib
import os
import random
import re
import signal
import subprocess
import unittest

import harness
from harness import wait_until

CHAR_LM = os.path.join(harness.BUILD, 'examples', 'char_lm')
TRAINING = 240  # seconds for a whole training on a busy machine
# What a checkpoint has, read by a program of one rank: the hash of all of the model and its momentum.
READER = '''
import hashlib, json, sys
import numpy as np
import gtrain
with gtrain.Session() as session:
    checkpointer = gtrain.Checkpointer(session, uri=sys.argv[1], read_only=True)
    shapes = {"embedding": (64, 24), "hidden1/weights": (384, 384), "hidden1/bias": (1, 384),
              "hidden2/weights": (384, 384), "hidden2/bias": (1, 384), "out/weights": (384, 64), "out/bias": (1, 64)}
    arrays = {f"{what}/{name}": np.zeros(shape, dtype=np.float32) for what in ("model", "momentum") for name, shape in shapes.items()}
    checkpointer.replicated(**arrays)
    step = checkpointer.restore()
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays)))
    print(step, digest.hexdigest(), all(array.any() for array in arrays.values()))
'''


@unittest.skipUnless(os.path.exists(CHAR_LM), 'the examples are not built')
class MeshTest(harness.GtrainTest):
    def launch(self, name, steps, ranks='4', mesh='dp: 2, tp: 2', elastic='', every=10_000):
        text = os.path.join(self.dir, 'text')
        if not os.path.exists(text):
            words = random.Random(1)
            with open(text, 'w', encoding='ascii') as file:
                file.write(' '.join(words.choice(('in', 'the', 'beginning', 'was', 'a', 'word', 'and', 'it', 'went'))
                                    for _ in range(20_000)))
        self.gtrain('launch', '-d', self.job_file(name, f'''
name: {name}
run: {CHAR_LM} --text {text} --steps {steps} --batch 64
ranks: {ranks}
mesh: {{{mesh}}}
elastic: {{mode: in-place{elastic}}}
restart: {{budget: 100, before_first_step: 0}}
resources: {{cpus: 1, oversubscribe: true}}
checkpoint: {{uri: {self.folder(name)}, every: {every} steps}}
'''))

    def folder(self, name):
        return os.path.join(self.dir, name + '-ckpt')

    def at(self, name, step, ranks=4):
        """Waits until all of so many ranks have made that step; rank -> pid."""
        def look():
            job = self.job(name)
            self.assertIn(job['state'], ('QUEUED', 'WAITING', 'STARTING', 'RUNNING', 'RECONFIGURING'), job)
            members = [rank for rank in job['ranks'] if rank['rank'] < job['world_size']]
            if job['state'] != 'RUNNING' or job['world_size'] != ranks or any((rank.get('step') or 0) < step for rank in members):
                return None
            return {rank['rank']: rank['pid'] for rank in members}
        return wait_until(f'step {step} of {ranks} ranks', look, TRAINING)

    def ends(self, name, steps):
        """The hash of what the job has saved with its last step."""
        self.wait_for_state(name, 'SUCCEEDED', seconds=TRAINING)
        self.gtrain('data', 'audit', name)
        env = dict(os.environ, PYTHONPATH=os.path.join(harness.SOURCE, 'python'),
                   GTRAIN_LIBRARY=os.path.join(harness.BUILD, 'lib', 'libgtrain.so'))
        said = subprocess.run(['/usr/bin/python3', '-c', READER, self.folder(name)], env=env, capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        step, digest, whole = said.stdout.split()
        self.assertEqual((step, whole), (str(steps), 'True'))
        return digest

    def test_a_part_is_replaced_from_its_copy(self):
        """P1, N7: any of the four parts of dp 2 x tp 2 is killed; the others keep their processes, the weights are the same bits."""
        steps = 1500
        self.launch('alone', steps)
        self.launch('killed', steps)
        kills = random.Random(7)
        for kill, rank in enumerate((1, 2, 0, 3)):
            pids = self.at('killed', 60 * (kill + 1) + kills.randrange(20))
            os.kill(pids[rank], signal.SIGKILL)
            wait_until('another process', lambda: pids[rank] not in {one['pid'] for one in self.job('killed')['ranks']})
            now = self.at('killed', 0)
            self.assertEqual({r: pid for r, pid in now.items() if r != rank}, {r: pid for r, pid in pids.items() if r != rank},
                             'who survives keeps its process, its rank and its part')
        self.assertEqual(self.job('killed')['generation'], 5)
        self.assertEqual(self.ends('killed', steps), self.ends('alone', steps))
        self.assertFalse(self.job('killed')['restore'], 'memory has it')

    def test_copies_go_and_come(self):
        """N7: with a rank lost the whole copy goes on; what is left of the other waits for its partner with what it has."""
        steps = 2500
        self.launch('copies', steps, ranks='{min: 2, max: 4}', mesh='dp: "*", tp: 2')
        self.gtrain('scale', '-n', '4', 'copies', '--now')
        pids = self.at('copies', 20)
        os.kill(pids[1], signal.SIGKILL)
        two = self.at('copies', 0, ranks=2)
        self.assertLess(set(two.values()), set(pids.values()), 'they go on alone')
        four = self.at('copies', 0, ranks=4)
        kept = set(pids.values()) - {pids[1]}
        self.assertLess(kept, set(four.values()))
        for rank, pid in four.items():
            was = [r for r, p in pids.items() if p == pid]
            self.assertTrue(not was or was[0] % 2 == rank % 2, f'{pids} {four}: a process has its part for life')
        self.ends('copies', steps)

    def test_a_part_whose_copies_are_all_lost_comes_from_a_checkpoint(self):
        """C1: both ranks that have a half of the model are killed at once: all go back to the newest checkpoint."""
        steps = 400
        self.launch('alone', steps)
        self.launch('both', steps, every=20)
        pids = self.at('both', 110)
        for rank in (1, 3):
            os.kill(pids[rank], signal.SIGKILL)
        wait_until('other processes', lambda: not {pids[1], pids[3]} & {one['pid'] for one in self.job('both')['ranks']})
        now = self.at('both', 120)
        self.assertEqual((now[0], now[2]), (pids[0], pids[2]))
        self.assertRegex(self.job('both')['restore'], 'step [1-9][0-9]* in ')
        self.assertEqual(self.ends('both', steps), self.ends('alone', steps))

    def test_what_one_rank_alone_holds_comes_from_a_step_copy(self):
        """C1, N7: dp 1 x pp 1 x tp 4, any of the four parts is killed: no checkpoint is read, and the weights are the same bits."""
        steps = 1500
        self.launch('alone', steps, mesh='dp: 1, tp: 4')
        self.launch('once', steps, mesh='dp: 1, tp: 4', elastic=', step_copies: true')
        kills = random.Random(11)
        for kill, rank in enumerate((2, 0, 3, 1, 0, 2)):
            pids = self.at('once', 60 * (kill + 1) + kills.randrange(20))
            os.kill(pids[rank], signal.SIGKILL)
            wait_until('another process', lambda: pids[rank] not in {one['pid'] for one in self.job('once')['ranks']})
            now = self.at('once', 0)
            self.assertEqual({r: pid for r, pid in now.items() if r != rank}, {r: pid for r, pid in pids.items() if r != rank},
                             'who survives keeps its process, its rank and its part')
        self.assertEqual(self.job('once')['generation'], 7)
        restored = self.job('once')['restore'] or 'nobody had to go back'
        self.assertRegex(restored, 'went back from step [0-9]+ to [0-9]+|nobody had to go back')
        self.assertEqual(self.ends('once', steps), self.ends('alone', steps))

    def test_a_mesh_that_does_not_fit_is_an_error_of_the_file(self):
        """J12: with its place."""
        for mesh, ranks, said in (('dp: 2, tp: 3', '4', r'wrong\.yaml:\d+:\d+: `mesh`: its 6 ranks do not match'),
                                  ('tp: 2, dp: "*"', '{min: 2, max: 4}', 'dp comes first'),
                                  ('dp: "*", xp: 2', '4', 'unknown mesh axis')):
            with self.subTest(mesh=mesh):
                file = self.job_file('wrong', f'name: wrong\nrun: sleep 1\nranks: {ranks}\nmesh: {{{mesh}}}\nelastic: {{mode: in-place}}\n')
                out = self.gtrain('launch', file, expect=2)
                self.assertRegex(out.stdout + out.stderr, said)


if __name__ == '__main__':
    unittest.main()

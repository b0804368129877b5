"""Copies of checkpoints near by: what a lost rank restores from, and what happens when they cannot be used."""
import json
import os
import re
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import SOURCE, wait_until

RANK = os.path.join(SOURCE, 'tests', 'e2e', 'save_rank.py')
RESTORED = r'resumed step (\d+) .*all ranks read (\S+) there and (\S+) of copies on their own machines'


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class OwnMachineTest(harness.GtrainTest):
    def launch(self, near):
        self.store = os.path.join(self.dir, 'ckpt')
        job = self.job_file('near', f'name: near\nrun: /usr/bin/python3 {RANK} --out {self.out} --die all --hold\n'
                                    f'ranks: 2\ncheckpoint: {{uri: {self.store}, near: {near}}}\n')
        return self.start('launch', job)

    def saved(self, launch):
        """Both ranks have saved step 2 and it is committed."""
        for rank in range(2):
            wait_until(f'rank {rank} to be ready', lambda: os.path.exists(os.path.join(self.out, f'ready.{rank}')) or
                       self.assertIsNone(launch.popen.poll(), launch.output()))
        open(os.path.join(self.out, 'go'), 'w').close()
        launch.wait_for('checkpoint at step 2')

    def restored(self, launch):
        open(os.path.join(self.out, 'die'), 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        found = re.findall(RESTORED, launch.output())
        self.assertEqual([step for step, _, _ in found], ['2'], launch.output())
        return found[0][1:]

    def node_id(self):
        return json.loads(self.gtrain('nodes', '--json').stdout)['nodes'][0]['id']

    def test_lost_ranks_restore_from_the_memory_of_their_machine(self):
        """Pain 27: a crash of the ranks costs no read of the storage. Nothing stays in memory when the job is over."""
        launch = self.launch('memory')
        self.saved(launch)
        near = f'/dev/shm/gtrain-{self.node_id()}'
        self.assertEqual(len(os.listdir(near)), 3, os.listdir(near))  # the job, .lock, .coming
        storage, copies = self.restored(launch)
        self.assertEqual(storage, '0B', launch.output())
        self.assertNotEqual(copies, '0B')
        self.wait_for_no_processes()
        self.assertFalse(os.path.exists(near))

    def test_a_local_disk_serves_as_well_and_a_flipped_bit_there_is_found(self):
        """S6: the bad chunk is read from the storage, loudly; all others from the disk."""
        scratch = os.path.join(self.dir, 'scratch')
        launch = self.launch(scratch)
        self.saved(launch)
        copy = next(os.path.join(folder, name) for folder, _, names in os.walk(scratch) for name in names
                    if 'step-000000000002' in folder and name == 'rank-00000-of-00002.safetensors')
        with open(copy, 'r+b') as data:
            data.seek(1_000_000)
            byte = data.read(1)[0]
            data.seek(1_000_000)
            data.write(bytes([byte ^ 1]))
        storage, copies = self.restored(launch)
        self.assertRegex(launch.output(), r'rank-00000-of-00002\.safetensors in this machine.s \w+ \(.*NOT USED')
        self.assertEqual(storage, '8MiB', launch.output())  # one chunk, of each rank
        self.assertNotEqual(copies, '0B')
        self.end_local_cluster()


if __name__ == '__main__':
    unittest.main(verbosity=2)

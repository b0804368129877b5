"""Copies of checkpoints near by: what a lost rank restores from, and what happens when they cannot be used."""
import glob
import json
import os
import re
import shutil
import signal
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from cluster import ClusterTest
from harness import SOURCE, wait_until

RANK = os.path.join(SOURCE, 'tests', 'e2e', 'save_rank.py')
RESTORED = (r'resumed step (\d+) .*all ranks read (\S+) there, (\S+) of copies on their own machines and (\S+) of copies on '
            r'others')


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
        self.assertEqual([words[0] for words in found], ['2'], launch.output())
        self.assertEqual(found[0][3], '0B', launch.output())
        return found[0][1:3]

    def node_id(self):
        return json.loads(self.gtrain('nodes', '--json').stdout)['nodes'][0]['id']

    def test_lost_ranks_restore_from_the_memory_of_their_machine(self):
        """A crash of the ranks costs no read of the storage. Nothing stays in memory when the job is over."""
        launch = self.launch('memory')
        self.saved(launch)
        near = f'/dev/shm/gtrain-{self.node_id()}'
        self.assertEqual(len(os.listdir(near)), 3, os.listdir(near))  # the job, .lock, .coming
        storage, copies = self.restored(launch)
        self.assertEqual(storage, '0B', launch.output())
        self.assertNotEqual(copies, '0B')
        self.wait_for_no_processes()
        self.assertFalse(os.path.exists(near))

    def test_a_save_that_the_storage_did_not_take_is_resumed_from_memory(self):
        """Step 2 lies whole in the machine's memory and will never be committed; nobody gave it up."""
        launch = self.launch('memory')
        wait_until('the ranks to be ready', lambda: len(glob.glob(os.path.join(self.out, 'ready.*'))) == 2 or
                   self.assertIsNone(launch.popen.poll(), launch.output()))
        unfinished = os.path.join(self.store, '.unfinished')
        os.rename(unfinished, unfinished + '.away')
        open(unfinished, 'w').close()  # every put fails
        open(os.path.join(self.out, 'go'), 'w').close()
        launch.wait_for('step 2 is not saved')
        copies = f'/dev/shm/gtrain-{self.node_id()}/*/step-000000000002.*/rank-*'
        wait_until('the copies and what describes them', lambda: len(glob.glob(copies)) == 5)
        os.remove(unfinished)
        os.rename(unfinished + '.away', unfinished)
        storage, copies = self.restored(launch)
        self.assertEqual(storage, '0B', launch.output())
        self.assertNotEqual(copies, '0B')
        self.assertIn('which is not committed yet', launch.output())

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


class OtherMachinesTest(ClusterTest):
    """A job of save_rank.py with a copy of each shard on another machine; machines are lost with all they had in memory."""
    agent_count = 3
    machines = 2
    cpus = 1  # of each rank

    def setUp(self):
        super().setUp()
        self.store = os.path.join(self.dir, 'ckpt')
        self.ids = {node['hostname']: node['id'] for node in self.nodes()}
        for name in self.ids:
            self.addCleanup(shutil.rmtree, self.memory(name), ignore_errors=True)
        job = self.job_file('kept', f'name: kept\nrun: /usr/bin/python3 {RANK} --out {self.out} --die none --hold\n'
                                    f'nodes: {{min: 1, max: {self.machines}}}\nranks_per_node: 1\nresources: {{cpus: {self.cpus}}}\n'
                                    f'checkpoint: {{uri: {self.store}, replicas: 1}}\n'
                                    'restart: {before_first_step: 10}\n')
        self.launched = self.launch(job)
        for rank in range(self.machines):
            wait_until(f'rank {rank} to be ready', lambda: os.path.exists(os.path.join(self.out, f'ready.{rank}')) or
                       self.assertIsNone(self.launched.popen.poll(), self.launched.output()))
        self.homes = {rank['rank']: rank['hostname'] for rank in self.job('kept')['ranks']}
        self.before_step_2()
        open(os.path.join(self.out, 'go'), 'w').close()
        self.launched.wait_for('checkpoint at step 2')
        wait_until('each shard of step 2 to be on two machines', lambda: all(
            len(self.copies(rank)) == 2 for rank in range(self.machines)))

    def before_step_2(self):
        pass

    def memory(self, hostname):
        return f'/dev/shm/gtrain-{self.ids[hostname]}'

    def copies(self, rank, step=2):
        """hostname -> path of its copy of that rank's shard."""
        return {name: path for name in self.ids for path in glob.glob(
            f'{self.memory(name)}/*/step-{step:012}.*/rank-{rank:05}-of-*.safetensors')}

    def lose(self, *hostnames):
        """Their power fails, at once."""
        lost = [self.node_home(int(name[4:])).encode() + b'/' for name in hostnames]

        def killed():
            pids = [pid for pid in self.marked() if any(home in harness.read_proc(pid, 'environ') for home in lost)]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return not pids

        wait_until(f'{hostnames} to be dead', killed)
        for name in hostnames:
            shutil.rmtree(self.memory(name), ignore_errors=True)

    def lose_shards_of_the_storage(self):
        for path in glob.glob(f'{self.store}/step-000000000002.*/*.safetensors'):
            os.unlink(path)

    def resumed(self):
        """What was read: of the storage, of copies on the own machine, on others."""
        self.assertEqual(self.launched.wait(240), 0, self.launched.output())
        found = re.findall(RESTORED, self.launched.output())
        self.assertTrue(found and all(words[0] == '2' for words in found), self.launched.output())
        storage, own, others = found[-1][1:]
        pattern = (rf"step 2 in [0-9.]+ s: {storage} from {re.escape(self.store)}, {own} from copies on the ranks' own "
                   rf"machines \(/dev/shm/gtrain-\w+\), {others} from copies on others$")
        said = lambda: self.job('kept')['restore']
        wait_until('status to say what was restored', lambda: re.match(pattern, said()))
        self.assertIn(f'restored {said()}', self.client('status', 'kept').stdout)
        return storage, own, others


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class LostMachineTest(OtherMachinesTest):
    def test_its_rank_restores_from_the_memory_of_another_machine(self):
        """Nothing of the storage is needed but the manifest. The machine that takes its place had nothing."""
        self.lose(self.homes[1])
        self.lose_shards_of_the_storage()
        storage, own, others = self.resumed()
        self.assertEqual(storage, '0B', self.launched.output())
        self.assertNotEqual(own, '0B', self.launched.output())
        self.assertNotEqual(others, '0B', self.launched.output())

    def test_a_copy_that_is_damaged_is_found_out_and_the_storage_read(self):
        """S6"""
        with open(self.copies(1)[self.homes[0]], 'r+b') as data:
            data.seek(1_000_000)
            byte = data.read(1)[0]
            data.seek(1_000_000)
            data.write(bytes([byte ^ 1]))
        self.lose(self.homes[1])
        storage, own, _ = self.resumed()
        self.assertRegex(self.launched.output(), r'rank-00001-of-00002\.safetensors in .*NOT USED')
        self.assertNotEqual(storage, '0B', self.launched.output())
        self.assertNotEqual(own, '0B', self.launched.output())

    def test_with_the_machine_of_the_copy_lost_as_well_the_storage_is_read(self):
        self.lose(self.homes[0], self.homes[1])
        storage, own, others = self.resumed()
        self.assertNotEqual(storage, '0B', self.launched.output())
        self.assertEqual((own, others), ('0B', '0B'), self.launched.output())


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class LostZoneTest(OtherMachinesTest):
    agent_count = 4
    machines = 4

    def join_agent(self, index, *flags):
        return super().join_agent(index, '--label', f'zone=z{index // 2}', *flags)

    def test_a_whole_zone_is_lost_and_every_shard_is_in_the_other(self):
        for rank in range(4):
            self.assertEqual({name in ('node0', 'node1') for name in self.copies(rank)}, {True, False}, self.copies(rank))
        self.lose('node2', 'node3')
        self.lose_shards_of_the_storage()
        storage, own, others = self.resumed()
        self.assertEqual(storage, '0B', self.launched.output())
        self.assertNotEqual(own, '0B', self.launched.output())
        self.assertNotEqual(others, '0B', self.launched.output())


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class OutsideTheJobTest(OtherMachinesTest):
    """A job on one machine, one that could take its place in the same zone, and one in another zone that is too small."""
    agent_count = 3
    machines = 1
    cpus = 2

    def flags(self, index):
        return ('--label', f'zone=z{index % 2}', '--cpus', str(1 if index == 1 else self.cpus))

    def join_agent(self, index, *flags):
        return super().join_agent(index, *self.flags(index), *flags)

    def test_its_machine_is_lost_and_the_next_restores_from_the_memory_of_one_in_another_zone(self):
        home = self.homes[0]
        self.assertEqual(set(self.copies(0)), {home, 'node1'}, 'never in the same zone while there is another')
        self.assertIn('copies of its checkpoints are also kept on node1, outside the job', self.client('status', 'kept').stdout)
        self.lose(home)
        self.lose_shards_of_the_storage()
        storage, own, others = self.resumed()
        self.assertEqual((storage, own), ('0B', '0B'), self.launched.output())
        self.assertNotEqual(others, '0B', self.launched.output())
        wait_until('the copies to go with the job', lambda: not self.copies(0))


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class HolderRestartsTest(OutsideTheJobTest):
    """The same, with another life of the agent that keeps the copies before step 2 is saved."""

    def before_step_2(self):
        home = self.homes[0]
        # A copy that is cut off on its way is another matter: for half a minute nothing more is sent there. What describes
        # a shard follows it.
        wait_until('all of step 1 to be on node1', lambda: len(self.all_of(home, 1)) > 1 and
                   self.all_of(home, 1) == self.all_of('node1', 1))
        self.agents[1].signal(signal.SIGKILL)
        self.agents[1].wait()
        self.agents[1] = self.start_agent(1, *self.flags(1))
        self.agents[1].wait_for('keeps copies of checkpoints of kept-1')

    def all_of(self, name, step):
        return {os.path.basename(path) for path in glob.glob(f'{self.memory(name)}/*/step-{step:012}.*/*')}


if __name__ == '__main__':
    unittest.main(verbosity=2)

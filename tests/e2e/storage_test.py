"""Storage of checkpoints that cannot be read, what ranks are told of checkpoints, and two launches onto one directory."""
import json
import os
import signal

import harness
from ckpt_test import LIBRARY, sanitized
from harness import wait_until

RANK = os.path.join(harness.BUILD, 'tests', 'e2e_storage_rank')


class StorageTest(harness.GtrainTest):
    def touch(self, name, text=''):
        with open(os.path.join(self.out, name), 'w') as out:
            out.write(text)

    def remove(self, name):
        os.remove(os.path.join(self.out, name))

    def submit(self, name, *flags, uri='ckpt', extra=''):
        path = self.job_file(name, f'name: {name}\nrun: {RANK} {self.out}\nranks: 2\n'
                                   f'checkpoint: {{uri: {self.dir}/{uri}}}\n{extra}')
        return json.loads(self.gtrain('launch', '-d', '--json', *flags, path).stdout)['job']

    def environment(self, generation, rank=0):
        """What storage_rank.cc wrote down."""
        path = os.path.join(self.out, f'env.{generation}.{rank}')
        wait_until(f'rank {rank} of generation {generation}', lambda: os.path.exists(path))
        return dict(line.split('=', 1) for line in self.read(f'env.{generation}.{rank}').splitlines())

    def finish(self, *jobs):
        self.touch('go')
        for job in jobs:
            self.wait_for_state(job, 'SUCCEEDED')
        self.end_local_cluster()

    def test_a_job_waits_for_its_storage_and_is_charged_for_nothing(self):
        """S7: two tries are more than the budget of 0 would allow, and the error is the same each time."""
        self.touch('away')
        job = self.submit('away', extra='restart: {budget: 0, before_first_step: 0}\n')
        def waits():
            found = self.job(job)
            return found if found and found['state'] == 'WAITING' and 'tried 2 times' in found['reason'] else None
        waiting = wait_until('a second try', waits)
        self.assertRegex(waiting['reason'], r'storage: rank 0 on .*: .*Input/output error; tried 2 times, next try in \d+s')
        self.assertEqual(waiting['restarts'], 0)
        self.assertEqual(waiting['last_fault']['kind'], 'storage')
        self.assertIn('Input/output error', waiting['storage'])
        why = self.gtrain('why', job).stdout
        self.assertRegex(why, r'the cluster: storage: rank 0 .*Input/output error.*gtrain stop')
        self.assertRegex(why, r'storage: rank 0 on .*Input/output error')
        self.assertIn('storage: ', self.gtrain('status', job).stdout)
        self.remove('away')
        running = self.wait_for_state(job, 'RUNNING')
        self.assertEqual(running['restarts'], 0)
        wait_until('the storage to be read again', lambda: self.job(job)['storage'] == '')
        self.finish(job)

    def test_stop_ends_a_job_that_waits_for_its_storage(self):
        self.touch('away')
        job = self.submit('away')
        self.wait_for_state(job, 'WAITING')
        self.gtrain('stop', job)
        self.wait_for_state(job, 'CANCELLED')
        self.end_local_cluster()

    def test_ranks_are_told_of_the_newest_checkpoint(self):
        """Also by a head that was killed in between; --fresh stays what the launch said."""
        self.touch('manifest', '/store/manifests/step-1.json\n')
        job = self.submit('told', '--fresh', '--set', 'checkpoint.max_rollback=3', '--set',
                          'checkpoint.verify_replicas=first')
        first = self.environment(1, rank=1)
        self.assertNotIn('GTRAIN_CHECKPOINT_NEWEST', first)
        self.assertNotIn('GTRAIN_TAKEOVER', first)
        self.assertEqual(first['GTRAIN_LIVE_JOBS'], job)
        self.assertEqual(first['GTRAIN_CHECKPOINT_MAX_ROLLBACK'], '3')
        self.assertEqual(first['GTRAIN_CHECKPOINT_VERIFY_REPLICAS'], 'first')
        self.assertEqual(first['GTRAIN_RESUME'], 'fresh')
        wait_until('the head to know the checkpoint', lambda: (self.job(job) or {}).get('last_checkpoint'))
        head = self.daemons('head')
        os.kill(head[0], signal.SIGKILL)
        wait_until('the head to be gone', lambda: not harness.alive(head[0]))
        wait_until('another head', lambda: self.job(job))
        ranks = self.storage_ranks()
        self.assertEqual(len(ranks), 2, ranks)
        os.kill(ranks[0], signal.SIGKILL)
        second = self.environment(2, rank=1)
        self.assertEqual(second['GTRAIN_CHECKPOINT_NEWEST'], '/store/manifests/step-1.json')
        self.assertEqual(second['GTRAIN_RESUME'], 'fresh')
        self.finish(job)

    def storage_ranks(self):
        return [pid for pid, argv in self.marked().items() if argv and argv[0] == RANK]

    def test_a_second_launch_onto_one_directory_is_refused(self):
        first = self.submit('first')
        self.wait_for_state(first, 'RUNNING')
        path = self.job_file('second', f'name: second\nrun: {RANK} {self.out}\nworkdir: {self.dir}\n'
                                       f'checkpoint: {{uri: ./out/../ckpt/}}\n')
        refused = self.gtrain('launch', '-d', path, expect=None)
        self.assertNotEqual(refused.returncode, 0)
        self.assertRegex(refused.stderr, rf'job {first} of .* saves its checkpoints to .*/ckpt and is not over \(RUNNING, started \S+ ago\)')
        for way in (f'gtrain attach {first}', f'gtrain stop {first}', '--takeover'):
            self.assertIn(way, refused.stderr)
        self.assertEqual(len(self.jobs()), 1)
        for name in os.listdir(self.out):
            if name.startswith('env.'):
                self.remove(name)
        second = json.loads(self.gtrain('launch', '-d', '--json', '--takeover', path).stdout)['job']
        env = self.environment(1)
        self.assertEqual(env['GTRAIN_TAKEOVER'], '1')
        self.assertEqual(env['GTRAIN_LIVE_JOBS'], f'{second},{first}')
        self.assertRegex(self.gtrain('why', first).stdout, rf'owner: job {second} of .* takes over .*/ckpt \(--takeover\)')
        self.finish(first, second)


PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {os.path.join(harness.SOURCE, 'python')!r})
import gtrain
folder = sys.argv[1]
with gtrain.Session() as session:
    try:
        step = bytearray(8)
        with gtrain.Checkpointer(session, every_steps=5) as checkpointer:
            checkpointer.replicated(step=step)
            at = checkpointer.restore() or 0
            print(f'starts at {{at}}', flush=True)
            with open(os.path.join(folder, f'pid.{{session.generation}}.{{session.rank}}'), 'w') as out:
                out.write(f'{{os.getpid()}} {{at}}')
            while not os.path.exists(os.path.join(folder, 'go')):
                at += 1
                step[:] = at.to_bytes(8, 'little')
                session.report(step=at)
                checkpointer.save_if_due(at)
                time.sleep(0.02)
            checkpointer.wait()
    except gtrain.Unavailable as error:
        print(error, file=sys.stderr)
        sys.exit(gtrain.EXIT_RUN_ME_AGAIN)
"""


EVALUATION = f"""
import os, sys
sys.path.insert(0, {os.path.join(harness.SOURCE, 'python')!r})
import gtrain
with gtrain.Session() as session:
    step = bytearray(8)
    with gtrain.Checkpointer(session) as checkpointer:
        checkpointer.replicated(step=step)
        at = checkpointer.restore()
        try:
            checkpointer.save(at + 1)
            said = 'saved'
        except gtrain.GtrainError as error:
            said = str(error)
    with open(os.path.join(sys.argv[1], 'evaluated'), 'w') as out:
        out.write(f'{{at}} {{int.from_bytes(step, "little")}} {{said}}')
"""


class CheckpointDirectoryTest(harness.GtrainTest):
    """The same with a program that saves and restores: finding the directory empty, or taken."""

    def setUp(self):
        super().setUp()
        if not os.path.exists(LIBRARY) or sanitized():
            self.skipTest('libgtrain.so is not built, or with a sanitizer')
        self.script = os.path.join(self.dir, 'train.py')
        with open(self.script, 'w') as out:
            out.write(PROGRAM)
        self.ckpt = os.path.join(self.dir, 'ckpt')

    def submit(self, name, *flags):
        path = self.job_file(name, f'name: {name}\nrun: /usr/bin/python3 {self.script} {self.out}\nranks: 1\n'
                                   f'checkpoint: {{uri: {self.ckpt}}}\nrestart: {{budget: 1, before_first_step: 0}}\n')
        return json.loads(self.gtrain('launch', '-d', '--json', *flags, path, GTRAIN_LIBRARY=LIBRARY).stdout)['job']

    def begun(self, generation):
        """pid and first step of a generation."""
        path = os.path.join(self.out, f'pid.{generation}.0')
        wait_until(f'generation {generation}', lambda: os.path.exists(path) and ' ' in self.read(f'pid.{generation}.0'))
        return [int(word) for word in self.read(f'pid.{generation}.0').split()]

    def checkpointed(self, job):
        wait_until('a checkpoint', lambda: (self.job(job) or {}).get('last_checkpoint'))

    def test_a_directory_that_is_not_mounted_is_waited_for(self):
        """S7. Before: generation 2 found an empty folder, began anew, and the job SUCCEEDED."""
        job = self.submit('train')
        pid, _ = self.begun(1)
        self.checkpointed(job)
        os.rename(self.ckpt, self.ckpt + '.away')
        os.mkdir(self.ckpt)
        os.kill(pid, signal.SIGKILL)
        def waits():
            found = self.job(job)
            return found if found and found['state'] == 'WAITING' and 'is the file system mounted' in found['reason'] else None
        waiting = wait_until('the job to wait for its storage', waits)
        self.assertEqual(waiting['last_fault']['kind'], 'storage')
        self.assertEqual(os.listdir(self.ckpt), [], 'nothing is begun anew')
        os.rmdir(self.ckpt)
        os.rename(self.ckpt + '.away', self.ckpt)
        self.wait_for_state(job, 'RUNNING')
        generation = self.job(job)['generation']
        self.assertGreaterEqual(self.begun(generation)[1], 5, 'it goes on where it was')
        with open(os.path.join(self.out, 'go'), 'w'):
            pass
        self.wait_for_state(job, 'SUCCEEDED')
        self.end_local_cluster()

    def test_a_read_only_job_reads_beside_the_trainer_and_takes_nothing(self):
        trainer = self.submit('train')
        self.begun(1)
        self.checkpointed(trainer)
        script = os.path.join(self.dir, 'evaluate.py')
        with open(script, 'w') as out:
            out.write(EVALUATION)
        path = self.job_file('evaluate', f'name: evaluate\nrun: /usr/bin/python3 {script} {self.out}\nranks: 1\n'
                                         f'checkpoint: {{uri: {self.ckpt}, read_only: true}}\n')
        before = self.job(trainer)['last_checkpoint']['step']
        evaluation = json.loads(self.gtrain('launch', '-d', '--json', path, GTRAIN_LIBRARY=LIBRARY).stdout)['job']
        self.wait_for_state(evaluation, 'SUCCEEDED')
        step, step_in_state, refused = self.read('evaluated').split(' ', 2)
        self.assertGreaterEqual(int(step), before)
        self.assertEqual(step, step_in_state)
        self.assertIn('read-only', refused)
        self.assertIsNone(self.job(evaluation)['last_checkpoint'])
        wait_until('the trainer to save on', lambda: self.job(trainer)['last_checkpoint']['step'] > int(step))
        self.assertEqual(self.job(trainer)['generation'], 1)
        self.assertNotIn('taken over', self.gtrain('why', trainer).stdout)
        with open(os.path.join(self.out, 'go'), 'w'):
            pass
        self.wait_for_state(trainer, 'SUCCEEDED')
        self.end_local_cluster()

    def test_a_job_that_lost_its_directory_says_so_and_ends(self):
        """Before: it trained on and saved nothing."""
        first = self.submit('first')
        self.begun(1)
        self.checkpointed(first)
        for name in os.listdir(self.out):
            os.remove(os.path.join(self.out, name))
        second = self.submit('first', '--takeover')
        self.wait_for_state(first, 'FAILED')
        for verb in ('why', 'status'):
            self.assertRegex(self.gtrain(verb, first).stdout, rf'was taken over by job "{second}"')
        self.assertRegex(self.gtrain('why', second).stdout, rf'takes over .* from {first}')
        with open(os.path.join(self.out, 'go'), 'w'):
            pass
        self.wait_for_state(second, 'SUCCEEDED')
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

"""Storage of checkpoints that cannot be read, what ranks are told of checkpoints, and two launches onto one directory."""
import json
import os
import signal

import harness
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
        self.assertEqual(running['storage'], '')
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
        self.assertNotIn('GTRAIN_LIVE_JOBS', first)
        self.assertEqual(first['GTRAIN_CHECKPOINT_MAX_ROLLBACK'], '3')
        self.assertEqual(first['GTRAIN_CHECKPOINT_VERIFY_REPLICAS'], 'first')
        self.assertEqual(first['GTRAIN_RESUME'], 'fresh')
        wait_until('the head to know the checkpoint', lambda: (self.job(job) or {}).get('last_checkpoint'))
        head = self.daemons('head')
        os.kill(head[0], signal.SIGKILL)
        wait_until('the head to be gone', lambda: not harness.alive(head[0]))
        wait_until('another head', lambda: self.job(job))  # a command that opens the cluster starts it
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
        self.assertEqual(env['GTRAIN_LIVE_JOBS'], first)
        self.assertRegex(self.gtrain('why', first).stdout, rf'owner: job {second} of .* takes over .*/ckpt \(--takeover\)')
        self.finish(first, second)


if __name__ == '__main__':
    harness.main()

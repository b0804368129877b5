"""The head's records are lost, old, somebody else's or served twice; ranks keep stepping throughout (promises 2, 3)."""
import glob
import json
import os
import shutil
import signal
import subprocess
import unittest

import harness
from cluster import ClusterTest
from harness import wait_until


class RescueBase(ClusterTest):
    lease = ()

    def setUp(self):
        super().setUp()
        self.until = os.path.join(self.dir, 'go')
        self.cluster = os.path.dirname(glob.glob(os.path.join(self.dir, '**', 'head.key'), recursive=True)[0])

    def training(self):
        job = self.submit(self.stepper_job('train', '--until', self.until))
        self.wait_for_steps(10, ranks=2)
        return job

    def lose_records(self):
        for path in glob.glob(os.path.join(self.cluster, 'store*')):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def head_verb(self, *words, expect=0):
        return self.gtrain('head', *words, '--context', 'lab', prefix=self.inside(0), expect=expect)

    def head_refuses(self, *patterns):
        """Starts a head that does not serve; its words."""
        head = self.start_head()
        self.assertNotEqual(head.wait(), 0)
        for pattern in patterns:
            self.assertRegex(head.output(), pattern)

    def expect_undisturbed(self, job):
        self.wait_for_steps(max(self.steps().values()) + 20, ranks=2)
        seen = self.wait_for_state(job, 'RUNNING')
        self.assertEqual((seen['generation'], seen['restarts']), (1, 0), seen)

    def finish(self, job):
        open(self.until, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')

    def epoch(self):
        return max(int(self.read_file(os.path.join(self.agent_state(i), 'head-epoch')).split()[0])
                   for i in range(self.agent_count))

    @staticmethod
    def read_file(path):
        with open(path) as file:
            return file.read()

    def start_head(self, *flags, **options):
        return super().start_head(*self.lease, *flags, **options)

    def remove(self, folder):
        """Again where a daemon wrote into it meanwhile."""
        wait_until(f'{folder} to be gone', lambda: shutil.rmtree(folder, ignore_errors=True) or not os.path.exists(folder))


class RescueTest(RescueBase):
    def test_lost_records_come_back_with_the_agents(self):
        """H8: the store is gone. No head makes a new one by itself; after `head recover` the job goes on as it was."""
        job = self.training()
        self.kill_head()
        self.lose_records()
        self.head_refuses('there is no store in', 'gtrain head restore', 'gtrain head recover')
        self.assertIn('no records are left', self.head_verb('recover').stdout)
        self.start_head()
        wait_until('the job to be known again', lambda: self.job(job) is not None)
        self.expect_undisturbed(job)
        later = self.submit(self.job_file('later', 'name: later\nrun: "true"\nranks: 1\nresources: {cpus: 1}\n'))
        self.assertNotEqual(later, job)
        self.finish(job)
        self.wait_for_state(later, 'SUCCEEDED')
        # An agent that is stopped before it heard of the end leaves the keeper to its successor.
        wait_until('the keepers to end with their jobs', lambda: not self.daemons('keeper'))

    def test_a_backup_is_older_than_what_runs(self):
        """H9: backup while serving, restored later: the epoch is 1,000 higher, what began since is taken up as it runs."""
        backup = os.path.join(self.dir, 'backup')
        self.assertIn('verified', self.head_verb('backup', backup).stdout)
        job = self.training()
        before = self.epoch()
        self.head_verb('restore', backup, expect=1)  # a head runs
        self.kill_head()
        self.assertIn('--replace', self.head_verb('restore', backup, expect=1).stderr)
        self.assertIn('restored', self.head_verb('restore', backup, '--replace').stdout)
        self.start_head()
        wait_until('the job to be known again', lambda: self.job(job) is not None)
        self.expect_undisturbed(job)
        self.assertGreaterEqual(self.epoch(), before + 1000)
        self.finish(job)

    def test_a_whole_machine_comes_back_from_its_backup(self):
        """H8: keys and records from the backup alone; the agents need no new tokens."""
        backup = os.path.join(self.dir, 'backup')
        job = self.training()
        self.head_verb('backup', backup)
        self.kill_head()
        shutil.rmtree(self.cluster)
        self.assertIn(job, self.head_verb('restore', backup).stdout)
        self.start_head()
        wait_until('the job to be known again', lambda: self.job(job) is not None)
        self.expect_undisturbed(job)
        self.finish(job)

    def test_the_directory_of_a_head_that_serves_is_removed(self):
        """Item 11 of issue 16: it went on, and what it acknowledged was in no file any more."""
        backup = os.path.join(self.dir, 'backup')
        job = self.training()
        self.head_verb('backup', backup)
        self.remove(self.cluster)
        self.assertEqual(self.head.wait(), 1, self.head.output())
        self.assertRegex(self.head.output(), r'gtrain: the head stops: its store \S+ was removed or replaced while it served from it, '
                                             r'and what it decided since would be lost\. Ranks are not disturbed')
        self.assertIn(job, self.head_verb('restore', backup).stdout)
        self.start_head()
        wait_until('the job to be known again', lambda: self.job(job) is not None)
        self.expect_undisturbed(job)
        self.finish(job)

    def test_a_copy_of_the_records_steps_down(self):
        """H9: a head with an older copy meets agents that a newer head has served."""
        job = self.training()
        self.kill_head()
        copy = self.cluster + '-copy'
        shutil.copytree(self.cluster, copy)
        self.start_head()
        self.wait_for_state(job, 'RUNNING')
        wait_until('the agents to be welcomed', lambda: self.nodes_in('alive') == self.agent_count)
        self.kill_head()
        os.rename(self.cluster, self.cluster + '-newer')
        os.rename(copy, self.cluster)
        stale = self.start_head()
        self.assertNotEqual(stale.wait(), 0)
        self.assertRegex(stale.output(), 'steps down')
        self.head_refuses('a newer head of this cluster')
        os.rename(self.cluster, copy)
        os.rename(self.cluster + '-newer', self.cluster)
        self.start_head()
        wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)
        self.expect_undisturbed(job)
        self.finish(job)

    def test_two_heads_and_a_foreign_store(self):
        """H9 H10: the second head names the first; records of another cluster are refused before serving."""
        pid = json.loads(self.read_file(os.path.join(self.cluster, 'endpoint.json')))['pid']
        first, self.port = self.head, self.port + 1
        self.head_refuses(rf'process {pid}\b')
        self.assertEqual(self.nodes_in('alive'), self.agent_count, 'the first head serves on')
        first.signal(signal.SIGKILL)
        first.wait()
        other = os.path.join(self.dir, 'other')
        self.gtrain('head', '--init', '--dir', other, prefix=self.inside(0))
        shutil.copy(os.path.join(self.cluster, 'cluster'), self.cluster + '-id')
        shutil.copy(os.path.join(other, 'cluster'), os.path.join(self.cluster, 'cluster'))
        self.head_refuses('the state belongs to cluster')
        shutil.copy(self.cluster + '-id', os.path.join(self.cluster, 'cluster'))

    def test_damage_is_named_with_the_way_out(self):
        """H5: a flipped bit in the log; the message holds the very command that restores the newest backup."""
        backup = os.path.join(self.dir, 'backup')
        self.head_verb('backup', backup)
        self.submit(self.job_file('later', 'name: later\nrun: "true"\nranks: 1\nresources: {cpus: 1}\n'))
        self.kill_head()
        log = max(glob.glob(os.path.join(self.cluster, 'store', '*.log')), key=os.path.getmtime)
        with open(log, 'r+b') as file:
            data = file.read()
            at = len(data.rstrip(b'\0')) // 3
            file.seek(at)
            file.write(bytes([data[at] ^ 8]))
        self.head_refuses(rf'gtrain head restore {backup} --dir {self.cluster} --replace')
        self.head_verb('restore', backup, '--replace')
        self.start_head()
        wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)

    def traced_head(self, injection):
        """A head under strace, which makes its fdatasync fail or wait."""
        if subprocess.run(['strace', '-qq', '-o', '/dev/null', 'true'], check=False).returncode != 0:
            self.skipTest('strace may not trace here')
        words = ['strace', '-f', '-qq', '-o', '/dev/null', '-e', 'trace=fdatasync', '-e', f'inject=fdatasync:{injection}']
        before = self.prefix
        self.prefix = (*before, *words)
        try:
            return self.start_head()
        finally:
            self.prefix = before

    def head_pid(self):
        return json.loads(self.read_file(os.path.join(self.cluster, 'endpoint.json')))['pid']

    def test_a_failed_fsync_ends_the_head_and_is_counted(self):
        """H4: never repeated; what was acknowledged is there; from the second failure on the disk counts as bad."""
        path = self.job_file('parked', 'name: parked\nrun: "true"\nnodes: 5\nranks_per_node: 1\n')
        acknowledged = []
        failures = 0
        for when in range(12, 24):
            self.kill_head()
            head = self.traced_head(f'error=EIO:when={when}')
            for _ in range(40):
                try:
                    done = self.client('launch', '-d', '--json', path, expect=None, timeout=20)
                except AssertionError:  # it asks a silent head for ten minutes; this one is gone for good
                    self.assertIsNotNone(head.popen.poll(), 'the head neither answers nor ends')
                    break
                if done.returncode == 0:
                    acknowledged.append(json.loads(done.stdout)['job'])
                elif head.popen.poll() is not None:
                    break
            self.assertNotEqual(head.wait(), 0)
            self.assertRegex(head.output(), 'could not write|cannot sync the audit log')
            if 'could not write' in head.output():  # otherwise it met the audit log, which ends the head too
                failures += 1
                self.assertEqual(self.read_file(os.path.join(self.cluster, 'store.errors')).split()[0], str(failures))
            self.start_head()
            wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)
            self.assertLessEqual(set(acknowledged), {job['id'] for job in self.jobs()})
            if failures == 2:
                break
        self.assertEqual(failures, 2)
        self.assertTrue(acknowledged)
        self.head.wait_for('its disk counts as bad')

    def test_a_slow_disk_kills_nobody(self):
        """H11: every fsync takes 3 s; no node is suspected, ranks step on, what is asked is done in the end."""
        job = self.training()
        self.kill_head()
        head = self.traced_head('delay_enter=3000000')
        wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)
        later = self.submit(self.job_file('later', 'name: later\nrun: "true"\nranks: 1\nresources: {cpus: 1}\n'))
        self.wait_for_state(later, 'SUCCEEDED')
        self.assertEqual(self.nodes_in('alive'), self.agent_count)
        self.assertNotRegex(head.output(), 'is suspect|is dead')
        self.assertRegex(head.output(), 'a commit took .*slow disk')
        self.expect_undisturbed(job)
        os.kill(self.head_pid(), signal.SIGKILL)
        head.wait()
        self.start_head()
        self.finish(job)

    @unittest.skipUnless(harness.is_root(), 'a file system of its own needs root')
    def test_a_full_disk_ends_nothing(self):
        """H3: no new jobs when the disk is nearly full, then nothing is stored; with room again everything is."""
        self.kill_head()
        moved = self.cluster + '-moved'
        os.rename(self.cluster, moved)
        os.mkdir(self.cluster)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=300m', 'gtrain-test', self.cluster], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', self.cluster], check=False)
        subprocess.run(['cp', '-a', moved + '/.', self.cluster], check=True)
        self.start_head()
        wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)
        job = self.training()
        parked = self.submit(self.job_file('parked', 'name: parked\nrun: "true"\nnodes: 5\nranks_per_node: 1\n'))
        filler = os.path.join(self.cluster, 'filler')
        free = lambda: os.statvfs(self.cluster).f_bavail * os.statvfs(self.cluster).f_frsize
        def fill(to):
            with open(filler, 'ab') as file:
                while free() > to:
                    file.write(b'x' * min(1 << 20, free() - to))
                    file.flush()
        fill(100 << 20)
        path = self.job_file('later', 'name: later\nrun: "true"\nranks: 1\nresources: {cpus: 1}\n')
        wait_until('new jobs to be refused', lambda: 'no new jobs' in self.client(
            'launch', '-d', '--json', path, expect=None).stderr)
        def fill_up():
            fill(40 << 20)
            wait_until('the ballast to be given back',
                       lambda: not os.path.exists(os.path.join(self.cluster, 'store.ballast')))
            fill(4 << 20)
        fill_up()
        stop = self.client('stop', parked, expect=None, timeout=30)  # has to be written, and cannot be
        self.assertRegex(stop.stderr, 'it is done, but not stored: .*free some space')
        self.assertRegex(self.head.output(), 'nothing can be stored: .*free some space')
        self.assertEqual(self.job(parked)['state'], 'CANCELLED')
        self.assertRegex(self.client('token', 'create', expect=None).stderr, 'nothing was done: the disk of .* is full')
        self.kill_head()
        self.head_refuses('to write anything')
        os.unlink(filler)
        self.start_head()
        wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)
        self.expect_undisturbed(job)
        self.assertIn(self.job(parked)['state'], ('WAITING', 'QUEUED'), 'as it was said: the head ended before')
        fill_up()
        self.assertIn('not stored', self.client('stop', parked, expect=None, timeout=30).stderr)
        os.unlink(filler)
        self.head.wait_for('room again')
        # Taken again, and answered when all before it is stored.
        wait_until('new jobs to be taken', lambda: self.client('launch', '-d', path, expect=None).returncode == 0)
        self.kill_head()
        self.start_head()
        wait_until('the agents to be back', lambda: self.nodes_in('alive') == self.agent_count)
        self.assertEqual(self.job(parked)['state'], 'CANCELLED')
        self.finish(job)


class RemovedAgentTest(RescueBase):
    lease = ('--lease', '10s')  # for so long the ranks of a silent node may still write

    def test_the_directory_of_an_agent_is_removed(self):
        """Item 11 of issue 16: no agent can ever adopt its ranks, so they are ended, and the job goes on elsewhere, once."""
        job = self.submit(self.stepper_job('train', '--until', self.until, ranks='1'))
        self.wait_for_steps(10, ranks=1)
        (old,) = self.rank_pids().values()
        (hostname,) = {rank['hostname'] if 'hostname' in rank else rank['node'] for rank in self.job(job)['ranks']}
        index = next(i for i in range(2) if hostname in (f'node{i}', self.node(f'node{i}')['id']))
        self.remove(self.agent_state(index))
        agent = self.agents[index]
        self.assertEqual(agent.wait(), 1, agent.output())
        self.assertRegex(agent.output(), r'gtrain: the state directory \S+ of this agent, or the lock in it, was removed or replaced '
                                         r'while it ran, so the agent ends\. .* join again with a token')
        wait_until('the rank to be ended', lambda: not harness.alive(old))
        wait_until('the job on the other node', lambda: len(self.rank_pids(2)) == 1)
        self.wait_for_steps(max(self.steps().values()) + 10, ranks=1)
        self.assertEqual([pid for pid, argv in self.marked().items() if any('stepper.py' in word for word in argv)],
                         list(self.rank_pids(2).values()), 'never two')
        self.join_agent(index)
        wait_until('the machine as a new node', lambda: self.nodes_in('alive') == 2)
        self.finish(job)


if __name__ == '__main__':
    harness.main()

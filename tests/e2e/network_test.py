"""Bad networks between a head and two agents, each machine a network namespace with nftables of its own (W and N rows).

Node 0 is the head's and the client's; the agents `node0` and `node1` run on machines 1 and 2.
"""
import json
import os
import random
import shutil
import signal
import time
import unittest

import harness
import nets
from cluster import SDK_STEPPER, ClusterTest
from harness import soak, wait_until

REASON = nets.usable()


@unittest.skipIf(REASON, REASON)
class NetworkTest(nets.OnNets, ClusterTest):
    six = False

    def setUp(self):
        self.nets = nets.Nets(self.agent_count + 1, self.six)
        self.addCleanup(self.nets.remove)
        super().setUp()
        # Before the clean-up of processes, which needs the agents to hear that their jobs are over.
        self.addCleanup(lambda: [self.nets.rules(index + 1) for index in range(self.agent_count)])

    def stepping(self, name, nodes='2', extra=''):
        """One rank a node that needs nobody: what is cut is the way to the head."""
        self.until = os.path.join(self.dir, 'go')
        job = self.submit(self.job_file(name, f'name: {name}\nrun: /usr/bin/python3 {self.stepper} --out {self.out} --until {self.until}\n'
                                              f'nodes: {nodes}\nranks_per_node: 1\nresources: {{cpus: 1}}\nstop_grace: 2s\n{extra}'))
        self.wait_for_steps(3, ranks=2)
        return job

    def coupled(self, name, nodes):
        """One SDK rank a node, none of which steps without the others: a node that is cut off stops all of them, so
        there is nothing to wait for once it is silent for 10 s. In a ring every two of three ranks speak, so a pair
        that cannot shows too; other algorithms go round it."""
        self.until = os.path.join(self.dir, 'go')
        job = self.submit(self.job_file(name, f'name: {name}\nrun: {SDK_STEPPER} {self.out} 50 {self.until}\nnodes: {nodes}\n'
                                              'ranks_per_node: 1\nresources: {cpus: 1}\nstop_grace: 2s\n'
                                              'env: {GTRAIN_COMM_ALGO: ring}\n'))
        self.wait_for_sdk_steps(3, ranks=self.agent_count)
        return job

    def wait_for_generation(self, job, least, ranks, seconds=120):
        """RUNNING in a generation of at least that number, with that many ranks; the job."""
        def look():
            seen = self.job(job)
            good = seen and seen['state'] == 'RUNNING' and seen['generation'] >= least and len(seen['ranks']) == ranks
            return seen if good else None
        return wait_until(f'{job} to run with {ranks} ranks', look, seconds)

    def finish(self, job):
        open(self.until, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED', seconds=120)
        wait_until('every keeper to end', lambda: not self.daemons('keeper'), 120)

    def assert_undisturbed(self, job):
        seen = self.wait_for_state(job, 'RUNNING')
        self.assertEqual((seen['generation'], seen['restarts']), (1, 0), seen)
        self.assertNotIn('is dead', self.head.output())

    def hold(self, seconds, each=lambda: None):
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            each()
            time.sleep(0.1)

    def one_operation(self, number):
        """A submit whose job runs on whichever node; acknowledged means it runs exactly once."""
        name = f'op{number}'
        job = self.submit(self.job_file(name, f'name: {name}\nscript: echo x >> {self.out}/ran.{name}\nranks: 1\nresources: {{cpus: 1}}\n'))
        self.wait_for_state(job, 'SUCCEEDED', seconds=180)
        self.assertEqual(self.read(f'ran.{name}'), 'x')


class LossTest(NetworkTest):
    def test_loss(self):
        """W1: 10 % of packets lost both ways: nobody is declared dead, nothing restarts; 30 %: operations are slower and
        still happen once."""
        job = self.stepping('lossy')
        for index in (1, 2):
            self.nets.lose(index, 10)
        numbers = iter(range(1000))
        self.hold(soak(120, 8), lambda: self.one_operation(next(numbers)))
        self.assert_undisturbed(job)
        self.nets.lose(0, 30)
        for _ in range(soak(20, 1)):
            self.one_operation(next(numbers))
        for index in range(3):
            self.nets.rules(index)
        self.finish(job)

    def test_blackouts(self):
        """W3, W7: five seconds of silence at a time, then resets of every connection in the middle of its traffic."""
        job = self.stepping('dark')
        for _ in range(soak(5, 1)):
            for index in (1, 2):
                self.nets.rules(index, 'drop', 'drop')
            self.hold(5)
            for index in (1, 2):
                self.nets.rules(index)
            wait_until('both to be heard again', lambda: self.nodes_in('alive') == 2)
            self.hold(soak(55, 0))
        for turn in range(soak(30, 5)):
            self.nets.rules(1 + turn % 2, 'meta l4proto tcp reject with tcp reset', 'meta l4proto tcp reject with tcp reset')
            self.hold(0.3)
            self.nets.rules(1 + turn % 2)
            wait_until('both to be heard again', lambda: self.nodes_in('alive') == 2)
            self.one_operation(turn)
        self.assert_undisturbed(job)
        self.finish(job)

    def test_half_open_after_the_head_died(self):
        """W7, H1: the head dies while its agents cannot hear of it; their old connections are half open. A new head hears
        them soon after the network is back."""
        job = self.stepping('half')
        for index in (1, 2):
            self.nets.rules(index, 'drop', 'drop')
        self.kill_head()
        self.start_head()
        wait_until('the new head', lambda: self.client('status', expect=None).returncode == 0)
        for index in (1, 2):
            self.nets.rules(index)
        wait_until('both nodes', lambda: self.nodes_in('alive') == 2, 30)
        self.assert_undisturbed(job)
        self.finish(job)


class CloggedTest(NetworkTest):
    agent_count = 4

    def test_swizzle_clog(self):
        """W4: nodes fall silent one after the other in a random order and come back in another, some cut both ways, some
        only one; each for less than the deadline. Afterwards everybody is there and nothing was restarted."""
        job = self.stepping('clogged', nodes='4')
        order = random.Random(4)
        for turn in range(soak(30, 3)):
            victims = order.sample(range(1, 5), 4)
            for index in victims:
                self.nets.rules(index, *order.choice([('drop', 'drop'), ('drop', ''), ('', 'drop')]))
                self.hold(order.uniform(0.2, 0.8))
            order.shuffle(victims)
            for index in victims:
                self.nets.rules(index)
                self.hold(order.uniform(0, 0.4))
            wait_until('all to be heard again', lambda: self.nodes_in('alive') == 4)
            self.one_operation(turn)
        self.assert_undisturbed(job)
        self.finish(job)


class NarrowTest(NetworkTest):
    def test_log_traffic_does_not_starve_heartbeats(self):
        """W8: 1 Mbit/s with a queue of 32 KB, and a client that follows a rank which prints far more than that: no node
        is taken for dead, operations go on, and the client still gets lines."""
        for index in range(3):
            self.nets.shape(index, '1mbit', 32 << 10)
        job = self.stepping('narrow')
        flood = self.submit(self.job_file('flood', 'name: flood\nscript: while :; do seq 1 20000; sleep 0.05; done\n'
                                                   'ranks: 1\nresources: {cpus: 1, oversubscribe: true}\nstop_grace: 1s\n'))
        self.wait_for_state(flood, 'RUNNING')
        follower = self.start('logs', '-f', flood, prefix=self.inside(0))
        self.hold(soak(120, 25))
        self.one_operation(0)
        got = len(follower.output())
        self.assertGreater(got, 10_000, 'the client gets lines of the flood')
        self.assert_undisturbed(job)
        follower.signal(signal.SIGINT)
        follower.wait(30)
        self.client('stop', '--now', flood)
        self.wait_for_state(flood, 'CANCELLED')
        for index in range(3):
            self.nets.unshape(index)
        self.finish(job)


class OneWayTest(NetworkTest):
    def one_way(self, **cut):
        job = self.coupled('oneway', nodes='{min: 1, max: 2}')
        victim = next(rank for rank in self.job(job)['ranks'] if rank['hostname'] == 'node1')
        self.nets.rules(2, **cut)
        seen = self.wait_for_generation(job, 2, ranks=1)
        self.assertEqual(seen['ranks'][0]['hostname'], 'node0', seen)
        self.assertIn('node node1 is lost: silent for', seen['last_fault']['message'], seen)
        self.nets.rules(2)
        wait_until('the node that is back to end what was left there', lambda: not harness.alive(victim['pid']))
        wait_until('both nodes', lambda: self.nodes_in('alive') == 2)
        self.finish(job)

    def test_agent_to_head(self):
        """W2, N2: what the agent says is lost: dead after 10 s, the job goes on elsewhere; the node that comes back ends its
        ranks before it is used."""
        self.one_way(outgoing='drop')

    def test_head_to_agent(self):
        """W2: what the head says is lost; TCP cannot tell the difference, so the same."""
        self.one_way(incoming='drop')


class FenceTest(NetworkTest):
    def start_head(self, *flags, **options):
        return super().start_head('--lease', '15s', *flags, **options)

    def test_no_two_generations_write_N2(self):
        """A program without the SDK steps on where nobody reaches it: its successor starts when it has ended, not before."""
        job = self.submit(self.job_file('alone', f'name: alone\nrun: /usr/bin/python3 {self.stepper} --out {self.out} --steps 100000\n'
                                                 'nodes: 1\nranks_per_node: 1\nresources: {cpus: 1}\nstop_grace: 2s\n'))
        self.wait_for_steps(3, ranks=1)
        victim, = self.job(job)['ranks']
        cut = 1 + int(victim['hostname'][len('node'):])
        self.nets.unplug(cut)
        wait_until('the reason', lambda: 'may still write' in self.client('why', job, expect=None).stdout, 60)
        seen = wait_until('generation 2', lambda: next(
            (seen for seen in [self.job(job)] if seen and seen['generation'] == 2 and seen['state'] == 'RUNNING'), None), 90)
        self.assertFalse(harness.alive(victim['pid']), 'two generations write')
        self.assertNotEqual(seen['ranks'][0]['hostname'], victim['hostname'])
        self.nets.plug(cut)
        wait_until('both nodes', lambda: self.nodes_in('alive') == 2)
        self.assertEqual(self.job(job)['generation'], 2)
        self.client('stop', '--now', job)
        self.wait_for_state(job, 'CANCELLED')
        wait_until('every keeper to end', lambda: not self.daemons('keeper'), 60)


class CapacityTest(NetworkTest):
    def test_half_the_cluster_dies(self):
        """N7, N8: too few are left: WAITING with the reason and what would unblock it; it resumes when a node is back."""
        job = self.coupled('half', nodes='2')
        self.nets.unplug(2)
        seen = self.wait_for_state(job, 'WAITING', seconds=120)
        self.assertTrue(seen['blocked_by'], seen)
        self.assertIn('node1', json.dumps(seen), seen)
        self.nets.plug(2)
        self.wait_for_generation(job, 2, ranks=2)
        self.finish(job)


class ReformTest(NetworkTest):
    agent_count = 3

    def test_a_node_dies_during_the_reform(self):
        """N9, N1: a second node is cut off while the job re-forms after the first; with both back it is RUNNING."""
        job = self.coupled('again', nodes='{min: 1, max: 3}')
        self.nets.unplug(3)
        wait_until('the job to re-form', lambda: self.job(job)['state'] != 'RUNNING' or self.job(job)['generation'] > 1)
        self.nets.unplug(2)
        self.wait_for_generation(job, 2, ranks=1)
        self.nets.plug(2)
        self.nets.plug(3)
        wait_until('all nodes', lambda: self.nodes_in('alive') == 3)
        self.finish(job)


class IdentityTest(NetworkTest):
    def test_cloned_and_foreign_agents(self):
        """N4: a copy of a node's state on another machine is refused by name and the first is unaffected; a key that nobody
        registered gets no further than the handshake."""
        job = self.stepping('mine')
        clone = os.path.join(self.dir, 'clone')
        shutil.copytree(self.node_home(1), clone, ignore=shutil.ignore_patterns('keepers'))
        second = self.start('agent', '--hostname', 'clone', '--allow-root', home=clone, prefix=self.agent_inside(0))
        self.assertNotEqual(second.wait(), 0)
        self.assertIn("another agent with this node's key is alive", second.output())
        os.unlink(os.path.join(clone, 'state/gtrain/agent/node.key'))
        stranger = self.start('agent', '--hostname', 'stranger', '--allow-root', home=clone, prefix=self.agent_inside(0))
        stranger.wait_for('does not know our key')
        stranger.signal(signal.SIGTERM)
        stranger.wait()
        self.assert_undisturbed(job)
        self.finish(job)

    def test_another_head_at_the_address(self):
        """W15, X: a head with other keys at the same address is not obeyed: ranks step on until their own is back."""
        job = self.stepping('pinned')
        self.kill_head()
        self.gtrain('head', '--init', '--dir', os.path.join(self.dir, 'impostor'), prefix=self.inside(0))
        impostor = self.start('head', '--dir', os.path.join(self.dir, 'impostor'), '--listen', f'{self.address(0)}:{self.port}',
                              '--allow-root', prefix=self.inside(0))
        impostor.wait_for('serving')
        before = max(self.steps().values())
        self.agents[0].wait_for('not the head we know', 60)
        self.wait_for_steps(before + 20, ranks=2)
        impostor.signal(signal.SIGTERM)
        impostor.wait()
        self.start_head()
        wait_until('both nodes', lambda: self.nodes_in('alive') == 2)
        self.assert_undisturbed(job)
        self.finish(job)

    def test_port_in_use(self):
        """W16: the error of a second head on the port names the process that has it."""
        other = os.path.join(self.dir, 'other')
        self.gtrain('head', '--init', '--dir', other, prefix=self.inside(0))
        done = self.gtrain('head', '--dir', other, '--listen', f'{self.address(0)}:{self.port}', '--allow-root',
                           prefix=self.inside(0), expect=None)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(str(self.daemons('head')[0]), done.stderr)

    def test_reboot(self):
        """N3: agent, keeper and ranks are gone and the boot id is another: a new incarnation, nothing stale is adopted."""
        job = self.stepping('boot')
        fake = os.path.join(self.dir, 'boot_id')
        with open(fake, 'w') as out:
            out.write('11111111-2222-3333-4444-555555555555\n')
        victims = [pid for pid in self.marked() if self.node_home(1).encode() in
                   harness.read_proc(pid, 'cmdline') + harness.read_proc(pid, 'environ')]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.agents[1].wait()
        self.agents[1] = self.start('agent', '--hostname', 'node1', '--allow-root', home=self.node_home(1), prefix=[
            *self.agent_inside(1), 'unshare', '-m', 'sh', '-c',
            f'mount --bind {fake} /proc/sys/kernel/random/boot_id && exec "$@"', 'sh'])
        wait_until('ranks of generation 2', lambda: len(self.rank_pids(2)) == 2)
        self.assertIn('as a new incarnation', self.head.output())
        self.finish(job)


class MovedHeadTest(NetworkTest):
    def setUp(self):
        self.hosts = None
        super().setUp()

    def agent_inside(self, index):
        """With an /etc/hosts of their own, rewritten in place when the head moves."""
        if self.hosts is None:
            self.hosts = os.path.join(self.dir, 'hosts')
            self.name_head(self.address(0))
        return [*super().agent_inside(index), 'unshare', '-m', 'sh', '-c', f'mount --bind {self.hosts} /etc/hosts && exec "$@"', 'sh']

    def name_head(self, address):
        with open(self.hosts, 'w') as out:
            out.write(f'127.0.0.1 localhost\n{address} head.test\n')

    def start_head(self, *flags, **options):
        return super().start_head('--advertise', f'head.test:{self.port}', *flags, **options)

    def inside(self, index):
        return self.agent_inside(-1) if index == 0 else super().inside(index)

    def test_head_moves_to_another_address(self):
        """W15: the name of the head resolves to a new address; agents find it there, because each attempt resolves again and
        identity is the key, not the address."""
        job = self.stepping('moving')
        self.kill_head()
        nets.ip('-n', self.nets.nodes[0], 'addr', 'del', f'{self.address(0)}/24', 'dev', 'eth0')
        nets.ip('-n', self.nets.nodes[0], 'addr', 'add', '10.77.0.200/24', 'dev', 'eth0')
        self.name_head('10.77.0.200')
        self.address = lambda index: '10.77.0.200'
        self.start_head()
        wait_until('both nodes', lambda: self.nodes_in('alive') == 2)
        self.assert_undisturbed(job)
        self.finish(job)


if __name__ == '__main__':
    harness.main()

"""Nodes that do not reach each other or not well, while all reach the head (W5, W14, N6). The machines are network_test's."""
import os
import re
import unittest

import harness
import network_test
from cluster import SDK_STEPPER
from harness import soak, wait_until

CHAR_LM = os.path.join(harness.BUILD, 'examples', 'char_lm')


class PartialTest(network_test.NetworkTest):
    agent_count = 3

    def test_two_nodes_lose_each_other(self):
        """W5: two nodes cannot reach each other, both reach the head. One of them is left out, by name; the job goes on with
        the other two in one new generation, and that stays so, whatever the ranks of the first one still say."""
        job = self.coupled('pair', nodes='{min: 2, max: 3}')
        self.nets.spoil_pair(1, 2, 'drop')
        seen = self.wait_for_generation(job, 2, ranks=2)
        hosts = {rank['hostname'] for rank in seen['ranks']}
        victim = ({'node0', 'node1'} - hosts).pop()
        self.assertEqual(hosts, {'node0', 'node1', 'node2'} - {victim}, seen)
        self.assertRegex(seen['last_fault']['message'],
                         rf'the link between node[01] and {victim} is broken \(.*no answer.*\): the job goes on without {victim}')
        self.assertEqual([avoided['hostname'] for avoided in seen['avoided']], [victim], seen)
        self.assertEqual(self.nodes_in('alive'), 3)
        count = max(len(lines) for lines in self.step_times().values())
        self.hold(soak(120, 20))
        self.wait_for_sdk_steps(count + 20, ranks=2)
        seen = self.wait_for_state(job, 'RUNNING')
        self.assertEqual((seen['generation'], len(seen['ranks'])), (2, 2), seen)
        self.assertIn('cannot reach rank', self.client('why', job).stdout)
        self.nets.rules(1)
        self.finish(job)

    def test_waits_when_it_needs_both(self):
        """W5, W7: connections between two nodes are reset and refused, by a firewall say. A job that cannot do without either
        waits and says why; a person who has mended the link says so."""
        job = self.coupled('both', nodes='3')
        self.nets.spoil_pair(2, 3, 'meta l4proto tcp reject with tcp reset')
        seen = self.wait_for_state(job, 'WAITING', seconds=120)
        victim = seen['avoided'][0]['hostname']
        self.assertIn(victim, ('node1', 'node2'))
        why = self.client('why', job).stdout
        self.assertRegex(why, rf'{victim}: avoided by this job for 10m: rank \d on node[12] cannot reach rank \d on node[12]')
        self.assertIn(f'gtrain node undrain {victim}', why)
        self.nets.rules(2)
        self.client('node', 'undrain', victim)
        self.wait_for_generation(job, 2, ranks=3)
        self.finish(job)


class SlowNodeTest(network_test.NetworkTest):
    def test_slow_node_is_reported_and_kept(self):
        """N6: one machine needs ten times as long for its part of each step. It is named, with a score, where people and scripts
        look; nobody is evicted. (Its ranks sleep longer instead of computing slower: the head measures who waits for whom.)"""
        self.until = os.path.join(self.dir, 'go')
        job = self.submit(self.job_file('uneven', f'name: uneven\nscript: |\n  ms=40; if [ "$NODE_RANK" = 1 ]; then ms=400; fi\n'
                                                  f'  exec {SDK_STEPPER} {self.out} $ms {self.until}\nnodes: 2\nranks_per_node: 1\n'
                                                  'resources: {cpus: 1}\nstop_grace: 2s\n'))
        self.wait_for_state(job, 'RUNNING')
        seen = wait_until('a slow node', lambda: (lambda it: it if it and it['slow'] else None)(self.job(job)), 240)
        slow = next(rank['hostname'] for rank in seen['ranks'] if rank['rank'] == 1)
        self.assertEqual([one['hostname'] for one in seen['slow']], [slow], seen)
        self.assertGreater(seen['slow'][0]['score'], 2)
        busy = {rank['hostname']: rank['busy'] for rank in seen['ranks']}
        self.assertGreater(busy.pop(slow), max(busy.values()))
        self.assertIn(f'{slow} is slow: its ranks take', self.client('status', job).stdout)
        self.assertRegex(self.client('nodes').stdout, rf'{slow} .*\n  slow: in {job} its ranks take')
        self.assertIn(f'{slow} is slow', self.client('why', job).stdout)
        self.assert_undisturbed(job)
        self.finish(job)


@unittest.skipUnless(os.path.exists(CHAR_LM), 'needs libhwy-dev')
class NarrowLinkTest(network_test.NetworkTest):
    def test_status_shows_how_gradients_travel(self):
        """`compression: auto`: where 1.3 MB a step take half a second, the ranks choose what sends less. What they chose and
        what it gains comes from rank 0 through keeper, agent and head to `gtrain status`, for people and for programs."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            out.writelines(f'{n} sheep and {n + 1} goats went up the hill, {2 * n + 1} came down. ' for n in range(2000))
        for index in range(self.agent_count):
            self.nets.shape(index + 1, '20mbit', 100_000)
        job = self.submit(self.job_file('narrow', f'name: narrow\nrun: {CHAR_LM} --text {text} --steps 1000000 --batch 16\n'
                                                  'nodes: 2\nranks_per_node: 1\nresources: {cpus: 1}\n'
                                                  f'checkpoint: {{uri: {self.dir}/ckpt, every: 1h}}\n'
                                                  'comm: {compression: auto, allow: [int8, {codec: topk, density: 1%, warmup: 5}]}\n'))

        def chosen():
            seen = self.job(job) or {}
            self.assertNotIn(seen.get('state'), harness.TERMINAL_STATES, seen)
            return re.fullmatch(r'(?:int8|topk 1 %) for 1 of 1 bucket: ([0-9.e+]+) ms a step instead of ([0-9.e+]+) ms as float32'
                                r'; the link carries (\d+) Mbit/s', seen.get('compression') or '')

        found = wait_until('the choice in `gtrain status --json`', chosen, 120)
        with_codec, as_float32, link = (float(number) for number in found.groups())
        self.assertLess(0, with_codec)
        self.assertLess(with_codec, as_float32)
        self.assertLess(0, link)
        self.assertRegex(self.client('status', job).stdout,
                         r'gradients: (int8|topk 1 %) for 1 of 1 bucket: \S+ ms a step instead of \S+ ms as float32')
        self.assert_undisturbed(job)
        self.client('stop', '--now', job)
        wait_until('every keeper to end', lambda: not self.daemons('keeper'), 120)


@unittest.skipUnless(os.path.exists(CHAR_LM), 'needs libhwy-dev')
class TransportsTest(network_test.NetworkTest):
    def test_what_is_not_there_is_named(self):
        """GTRAIN_COMM_TLS: RDMA asked for where the machines have none ends the job with what there is, before the first step,
        and it is not tried again for ever as a lost machine would be; what they have is used."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            out.writelines(f'{n} sheep and {n + 1} goats went up the hill. ' for n in range(2000))

        def submit(transports):
            return self.submit(self.job_file(transports, f'name: {transports}\nrun: {CHAR_LM} --text {text} --steps 3 --batch 16\n'
                                                         'nodes: 2\nranks_per_node: 1\nresources: {cpus: 1}\nstop_grace: 2s\n'
                                                         f'env: {{GTRAIN_COMM_TLS: {transports}}}\n'))

        job = submit('rc')
        seen = self.wait_for_state(job, 'FAILED', seconds=120)
        self.assertIsNone(seen['step'], seen)
        refused = (r'rank \d \([0-9.]+\) cannot open its connection to other machines: '
                   r"GTRAIN_COMM_TLS is 'rc', .*no rc on \S+; UCX finds here: .*tcp on ")
        wait_until('the reason in the logs', lambda: re.search(refused, self.client('logs', '--err', job).stdout), 60)
        self.wait_for_state(submit('tcp'), 'SUCCEEDED', seconds=120)


class PathTest(network_test.NetworkTest):
    def setUp(self):
        self.hosts = None
        super().setUp()

    def agent_inside(self, index):
        """As many installers leave a machine: its own name is a loopback address. And it has a second network."""
        if self.hosts is None:
            self.hosts = os.path.join(self.dir, 'hosts')
            with open(self.hosts, 'w') as out:
                out.write(f'127.0.0.1 localhost\n127.0.1.1 node0 node1 {os.uname().nodename}\n')
            for agent in range(self.agent_count):
                self.nets.second_interface(agent + 1, f'10.78.{agent}.1')
        return [*super().agent_inside(index), 'unshare', '-m', 'sh', '-c', f'mount --bind {self.hosts} /etc/hosts && exec "$@"', 'sh']

    def test_way_that_loses_large_packets(self):
        """W14: small packets pass between two nodes, large ones are lost. The job never makes a step; it waits and names the
        pair and what to look at. With the way mended it runs, over the network that reaches the head."""
        self.assertEqual([node['address'] for node in sorted(self.nodes(), key=lambda node: node['hostname'])],
                         [self.address(1), self.address(2)])
        self.nets.spoil_pair(1, 2, 'meta length > 1300 drop')
        self.until = os.path.join(self.dir, 'go')
        job = self.submit(self.sdk_job('mtu', 50, self.until, 'stop_grace: 2s\n'))
        seen = self.wait_for_state(job, 'WAITING', seconds=120)
        self.assertIsNone(seen['step'], seen)
        why = self.client('why', job).stdout
        self.assertRegex(why, r'rank [01] on node[01] cannot reach rank [01] on node[01]: connections are made')
        self.assertIn('is the MTU the same everywhere?', why)
        self.nets.rules(1)
        self.client('node', 'undrain', seen['avoided'][0]['hostname'])
        self.wait_for_sdk_steps(3, ranks=2)
        self.finish(job)


class SixTest(network_test.NetworkTest):
    six = True

    def test_only_ipv6(self):
        """W14: machines that have no IPv4 at all but on loopback: they join, and ranks on both step together."""
        self.assertEqual([node['address'] for node in sorted(self.nodes(), key=lambda node: node['hostname'])],
                         [self.address(1), self.address(2)])
        job = self.coupled('six', nodes='2')
        self.assert_undisturbed(job)
        self.finish(job)


if __name__ == '__main__':
    harness.main()

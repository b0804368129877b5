"""Launches follow the topology of the cluster: labels of agents, or the file of the head."""
import json
import os
import unittest

import cluster
import harness


class TopologyLaunchTest(cluster.ClusterTest):
    agent_count = 4

    def join_agent(self, index, *flags):
        return super().join_agent(index, '--label', f'fabric=/zone/rack{index % 2}', *flags)

    def pairs_job(self, name):
        return self.job_file(name, f'name: {name}\nrun: {cluster.SDK_STEPPER} {self.out} 20 1000000\n'
                                   'mesh: {dp: 2, tp: 2}\nnodes: 4\nranks_per_node: 1\n')

    def hosts(self, name):
        ranks = self.job(name)['ranks']
        return [rank['hostname'] for rank in sorted(ranks, key=lambda rank: rank['rank'])]

    def assert_pairs_share_a_rack(self, hosts):
        racks = [int(host[-1]) % 2 for host in hosts]
        self.assertEqual(racks[0], racks[1], hosts)
        self.assertEqual(racks[2], racks[3], hosts)
        self.assertEqual(len(set(hosts)), 4, hosts)

    def test_labels_and_then_a_file(self):
        shown = self.client('topology', 'show', '--context', 'lab').stdout
        self.assertIn('rack1', shown)
        job = self.pairs_job('pairs')
        plan = json.loads(self.client('plan', job, '--context', 'lab', '--json').stdout)
        self.assertIn('by the topology', plan['reason'])
        self.submit(job)
        self.wait_for_state('pairs', 'RUNNING')
        hosts = self.hosts('pairs')
        self.assert_pairs_share_a_rack(hosts)
        names = {node['id']: node['hostname'] for node in self.nodes()}
        self.assertEqual([names[rank['node']] for rank in plan['ranks']], hosts, 'plan and launch agree')
        self.assertIn('a step communicates', self.client('why', 'pairs').stdout)
        self.client('stop', 'pairs', '--now')
        self.wait_for_state('pairs', 'CANCELLED')

        # The file says other racks than the labels do, and counts more.
        rows = self.job_file('racks', 'node0 /a\nnode1 /a\nnode2 /b\nnode3 /b\n')
        path = os.path.join(self.dir, 'cluster.json')
        self.gtrain('topology', 'capture', '--racks', rows, '--out', path)
        self.kill_head()
        self.start_head('--topology', path)
        harness.wait_until('every node to be ready', lambda: self.nodes_in('alive') == self.agent_count)
        self.submit(self.pairs_job('halves'))
        self.wait_for_state('halves', 'RUNNING')
        hosts = self.hosts('halves')
        self.assertEqual({frozenset(hosts[:2]), frozenset(hosts[2:])},
                         {frozenset(['node0', 'node1']), frozenset(['node2', 'node3'])})
        self.client('stop', 'halves', '--now')
        self.wait_for_state('halves', 'CANCELLED')

    def test_what_is_wrong_is_said(self):
        done = self.gtrain('head', '--context', 'lab', '--topology', '/nowhere.json', expect=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('/nowhere.json', done.stderr)
        done = self.gtrain('agent', '--label', 'fabric=rack 1', expect=2)
        self.assertIn('fabric', done.stderr)


class BindingTest(cluster.ClusterTest):
    agent_count = 1

    def agent_inside(self, index):
        return ['taskset', '--cpu-list', '1', *super().agent_inside(index)]

    @unittest.skipIf(os.cpu_count() < 2, 'it needs two CPUs')
    def test_a_rank_is_bound_to_a_cpu_that_its_agent_has(self):
        """Before, index 0 of the agent's CPUs was taken for CPU 0 of the machine."""
        path = os.path.join(self.out, 'affinity')
        job = self.job_file('bound', 'name: bound\nranks: 1\nresources: {cpus: 1}\n'
                                     f'run: python3 -c "import os; print(os.sched_getaffinity(0), file=open(\'{path}\', \'w\'))"\n')
        self.client('launch', job, timeout=60)
        self.assertEqual(self.read(path).strip(), '{1}')


if __name__ == '__main__':
    harness.main()

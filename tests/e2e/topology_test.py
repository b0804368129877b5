"""Launches follow the topology of the cluster: labels of agents, or the file of the head."""
import json
import os
import signal
import unittest

import cluster
import harness
import nets

REASON = nets.usable()


class TopologyLaunchTest(cluster.ClusterTest):
    agent_count = 4

    def join_agent(self, index, *flags):
        return super().join_agent(index, '--label', f'fabric=/zone/rack{index % 2}', *flags)

    def pairs_job(self, name):
        return self.job_file(name, f'name: {name}\nrun: {cluster.SDK_STEPPER} {self.out} 20 1000000\n'
                                   'mesh: {dp: 2, tp: 2}\nnodes: 4\nranks_per_node: 1\n')

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


@unittest.skipIf(REASON, REASON)
class MeasureTest(nets.OnNets, cluster.ClusterTest):
    """Eight machines on two leaves, every second one on the other, with an eighth of a machine's link between them."""
    agent_count = 8

    def setUp(self):
        self.nets = nets.Nets(self.agent_count + 1, leaf_of=[None] + [index % 2 for index in range(self.agent_count)])
        self.addCleanup(self.nets.remove)
        super().setUp()
        self.nets.narrow_links('160mbit', '20mbit')

    def measure(self, *words, expect=0):
        return self.client('topology', 'measure', '--context', 'lab', '--run-dir', self.dir, *words, expect=expect, timeout=180)

    def test_leaves_are_found_and_launches_follow_them(self):
        path, pairs = os.path.join(self.dir, 'measured.json'), os.path.join(self.dir, 'pairs.json')
        done = self.measure('--out', path, '--pairs', pairs)
        self.assertIn('leaf', done.stdout)
        with open(path) as file:
            links = json.load(file)['links']
        leaf_of = {host: link['to'] for link in links for host in expand(link['from']) if host.startswith('node')}
        groups = {frozenset(host for host in leaf_of if leaf_of[host] == leaf) for leaf in leaf_of.values()}
        self.assertEqual(groups, {frozenset(f'node{i}' for i in range(0, 8, 2)), frozenset(f'node{i}' for i in range(1, 8, 2))}, links)
        uplinks = [link['gb_s'] for link in links if link['to'] == '/core']
        own = [link['gb_s'] for link in links if link['to'] != '/core']
        # No link carries more than it is made for (2.5 and 20 MB/s; a quarter more while its bucket empties), and the ways that the leaves share are far narrower than others.
        self.assertLess(max(uplinks), 0.0031)
        self.assertLess(max(own), 0.025)
        self.assertLess(max(uplinks) * 3, min(own))
        with open(pairs) as file:
            kept = json.load(file)['pairs']
        self.assertEqual(len(kept), 28)

        # A link that has become slow since then is named.
        for pair in kept:
            if 'node3' in (pair['a'], pair['b']):
                pair['gb_s'] *= 100
        with open(pairs, 'w') as file:
            json.dump({'gtrain_pairs': 1, 'pairs': kept}, file)
        self.assertIn('slower than it was: node0 - node3: ', self.measure('--out', path, '--pairs', pairs).stderr)

        self.kill_head()
        self.start_head('--topology', path)
        harness.wait_until('every node to be ready', lambda: self.nodes_in('alive') == self.agent_count)
        until = os.path.join(self.dir, 'go')
        self.submit(self.job_file('pairs', f'name: pairs\nrun: {cluster.SDK_STEPPER} {self.out} 20 {until}\n'
                                           'mesh: {dp: 2, tp: 4}\nnodes: 8\nranks_per_node: 1\n'))
        self.wait_for_state('pairs', 'RUNNING')
        hosts = self.hosts('pairs')
        self.assertEqual({frozenset(hosts[:4]), frozenset(hosts[4:])}, groups)
        # Machines that work are not measured.
        self.assertIn('node[0-7] have jobs', self.measure(expect=1).stderr)
        self.client('stop', 'pairs', '--now')
        self.wait_for_state('pairs', 'CANCELLED')


def expand(hosts):
    """node[0,2-3] is node0 node2 node3."""
    stem, bracket, rest = hosts.partition('[')
    if not bracket:
        return [hosts]
    out = []
    for part in rest.rstrip(']').split(','):
        first, _, last = part.partition('-')
        out += [f'{stem}{number}' for number in range(int(first), int(last or first) + 1)]
    return out


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

    @unittest.skipIf(os.cpu_count() < 2, 'it needs two CPUs')
    def test_status_shows_what_ranks_are_bound_to(self):
        until = os.path.join(self.dir, 'go')
        self.submit(self.job_file('bound', f'name: bound\nrun: {cluster.SDK_STEPPER} {self.out} 20 {until}\n'
                                           'ranks: 1\nresources: {cpus: 1}\n'))
        self.wait_for_state('bound', 'RUNNING')
        for words in (['bound'], []):
            shown = self.client('status', '--context', 'lab', '--verbose', *words).stdout
            self.assertRegex(shown, r'rank 0 on node0: CPUs 1(, NUMA 0)?\n')
            self.assertNotIn('CPUs', self.client('status', '--context', 'lab', *words).stdout)
            document = json.loads(self.client('status', '--context', 'lab', '--verbose', '--json', *words).stdout)
            rank = document['jobs'][0]['ranks'][0]
            self.assertEqual((rank['cpus'], rank['gpus'], rank['nics']), ([1], [], []))
        self.client('stop', 'bound', '--now')
        self.wait_for_state('bound', 'CANCELLED')


@unittest.skipIf(REASON, REASON)
class InterfaceTest(nets.OnNets, cluster.ClusterTest):
    """A machine with two interfaces, of which one carries the data-plane address."""
    agent_count = 1

    def setUp(self):
        self.nets = nets.Nets(self.agent_count + 1)
        self.addCleanup(self.nets.remove)
        self.nets.second_interface(1, '10.99.0.1')
        super().setUp()

    def test_network_libraries_are_told_the_interface_of_the_data_plane(self):
        path = os.path.join(self.out, 'env')
        names = ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME', 'TP_SOCKET_IFNAME')
        job = self.job_file('told', 'name: told\nranks: 1\nenv: {TP_SOCKET_IFNAME: eth1}\nscript: |\n'
                                    f'  env | grep SOCKET_IFNAME > {path}\n  sleep 600\n')
        self.submit(job)
        harness.wait_until('the rank to write', lambda: os.path.exists(path) and len(self.read(path).split()) == len(names))
        self.assertEqual(dict(line.split('=', 1) for line in self.read(path).split()),
                         {'NCCL_SOCKET_IFNAME': '=eth0', 'GLOO_SOCKET_IFNAME': 'eth0', 'TP_SOCKET_IFNAME': 'eth1'})
        self.assertIn('any CPU, NIC eth0\n', self.client('status', '--context', 'lab', '--verbose', 'told').stdout)
        interfaces = {one['name']: one['addresses'] for one in self.nodes()[0]['interfaces']}
        self.assertEqual(interfaces, {'eth0': [self.address(1)], 'eth1': ['10.99.0.1']})
        self.client('stop', 'told', '--now')
        self.wait_for_state('told', 'CANCELLED')


class NamedHostsTest(cluster.ClusterTest):
    """Launches that say which rank goes where, and ranks that have a part of a GPU."""
    agent_count = 3

    def join_agent(self, index, *flags):
        gpus = '3:NVIDIA H100 80GB HBM3 MIG 1g.10gb' if index == 2 else '2'
        return super().join_agent(index, '--cpus', '4', '--fake-gpus', gpus, *flags)

    def gpus_of(self, name, ranks, *lines):
        """What the ranks of a short job find in CUDA_VISIBLE_DEVICES."""
        where = os.path.join(self.out, name)
        job = self.job_file(name, f'name: {name}\nranks: {ranks}\n' + ''.join(f'{line}\n' for line in lines)
                            + f'script: echo "$CUDA_VISIBLE_DEVICES" > {where}.$RANK\n')
        self.client('launch', job, timeout=60)
        return [self.read(f'{where}.{rank}').strip() for rank in range(ranks)]

    def test_a_rankfile_goes_in_and_out(self):
        text = 'rank 0=node1 slot=1\nrank 1=node0 slot=0\nrank 2=node1 slot=0\n'
        rankfile, out = self.job_file('ranks', text), os.path.join(self.dir, 'out.txt')
        job = self.job_file('mapped', 'name: mapped\nrun: sleep 1000\nresources: {gpus: 1}\n')
        plan = json.loads(self.client('plan', job, '--rankfile', rankfile, '--context', 'lab', '--json').stdout)
        self.client('launch', '-d', job, '--rankfile', rankfile)
        self.wait_for_state('mapped', 'RUNNING')
        self.assertEqual(self.hosts('mapped'), ['node1', 'node0', 'node1'])
        names = {node['id']: node['hostname'] for node in self.nodes()}
        self.assertEqual([names[rank['node']] for rank in plan['ranks']], self.hosts('mapped'), 'plan and launch agree')
        self.client('status', 'mapped', '--rankfile-out', out)
        with open(out) as file:
            self.assertEqual(file.read(), text)
        # The next generation is the same.
        os.kill(self.job('mapped')['ranks'][0]['pid'], signal.SIGKILL)
        harness.wait_until('generation 2', lambda: self.job('mapped')['generation'] == 2)
        self.wait_for_state('mapped', 'RUNNING')
        self.client('status', 'mapped', '--rankfile-out', out)
        with open(out) as file:
            self.assertEqual(file.read(), text)

        far = self.job_file('far', 'rank 0=node0 slot=1\nrank 1=node9 slot=0\n')
        waits = self.job_file('waits', 'name: waits\nrun: sleep 1000\nresources: {gpus: 1}\n')
        self.client('launch', '-d', waits, '--rankfile', far)
        self.wait_for_state('waits', 'WAITING')
        why = self.client('why', 'waits').stdout
        self.assertIn('rank 1 goes on node9 by where.ranks, and no node that is up is called so', why)
        self.assertIn('a node of that name joins', why)
        for name in ('mapped', 'waits'):
            self.client('stop', name, '--now')
            self.wait_for_state(name, 'CANCELLED')

    def test_hosts_and_parts_of_gpus(self):
        self.assertEqual(self.gpus_of('halves', 3, 'resources: {gpus: 0.5}', 'where: {hosts: "node[0,7-9]"}'),
                         ['GPU-fake-0', 'GPU-fake-0', 'GPU-fake-1'])
        self.assertEqual(self.gpus_of('instances', 2, 'resources: {gpus: 1, gpu_type: "1g.10gb"}'),
                         ['MIG-fake-0', 'MIG-fake-1'], 'each sees its own')
        self.assertEqual(self.gpus_of('whole', 2, 'resources: {gpus: 1}', 'where: {exclude: "node[1-2]"}'),
                         ['GPU-fake-0,GPU-fake-1'] * 2)


if __name__ == '__main__':
    harness.main()

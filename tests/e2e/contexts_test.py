"""Clusters with a name: a head that restarts or moves, the list of contexts, and plans for their nodes."""
import json
import os
import signal
import socket

import cluster
import harness
from harness import wait_until


class HeadThatMovesTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 1

    def endpoint(self):
        with open(os.path.join(self.home, 'state', 'gtrain', 'lab', 'endpoint.json')) as endpoint:
            return json.load(endpoint)['endpoint']

    def end_head(self):
        self.head.signal(signal.SIGTERM)
        self.assertEqual(self.head.wait(), 0, self.head.output())

    def move_head(self):
        port = cluster.free_port()  # while the head has its own
        self.end_head()
        self.port = port
        self.start_head()

    def wait_for_node(self):
        wait_until('the node to be back', lambda: self.nodes_in('alive') == 1)

    def test_without_listen_it_serves_where_it_did(self):
        for end in (self.end_head, self.kill_head):
            end()
            self.head = self.start('head', '--context', 'lab', '--allow-root')
            self.wait_for_node()
            self.assertEqual(self.endpoint(), f'127.0.0.1:{self.port}')
        self.end_head()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(('127.0.0.1', self.port))
            taken.listen()
            said = self.gtrain('head', '--context', 'lab', '--allow-root', expect=1).stderr
        self.assertRegex(said, r'It served there before, says .*/lab/served.json; --listen ADDRESS:PORT')

    def test_a_dead_head_is_named(self):
        credential = os.path.join(self.dir, 'ann.credential')
        with open(credential, 'w') as out:
            out.write(self.gtrain('user', 'add', 'ann').stdout)
        os.chmod(credential, 0o644)
        far = os.path.join(self.dir, 'far')
        os.makedirs(far)
        os.chmod(far, 0o777)
        self.gtrain('context', 'add', 'lab', '--credential', credential, home=far)
        self.gtrain('context', 'use', 'lab', home=far)
        self.gtrain('status', home=far)
        self.kill_head()
        for verb in ('status', 'why', 'nodes', 'logs'):
            self.assertRegex(self.gtrain(verb, expect=1).stderr,
                             r'the head of context lab \(process \d+, at \S+\) has died.*gtrain head --context lab')
            self.assertRegex(self.gtrain(verb, expect=1, home=far).stderr,
                             r'the head of context lab does not answer: nothing listens at \S+\. .*gtrain head --context lab')
        self.start_head()
        self.wait_for_node()

    def test_an_agent_finds_a_head_that_moved(self):
        """By what a person wrote into its file while it ran; it remembers that; and by a flag."""
        self.move_head()
        path = os.path.join(self.agent_state(0), 'cluster.json')
        with open(path) as file:
            membership = json.load(file)
        first = membership['endpoints'][0]
        membership['endpoints'] = [first, 'localhost:1', f'127.0.0.1:{self.port}']
        with open(path, 'w') as file:
            json.dump(membership, file)
        self.wait_for_node()

        def remembered():
            with open(path) as file:
                return json.load(file)
        self.assertEqual(remembered()['endpoint'], f'127.0.0.1:{self.port}')
        self.assertIn(first, remembered()['endpoints'])
        self.agents[0].signal(signal.SIGTERM)
        self.agents[0].wait()
        self.move_head()
        self.agents[0] = self.start_agent(0, '--head', f'127.0.0.1:{self.port}')
        self.wait_for_node()
        self.assertEqual(remembered()['endpoint'], f'127.0.0.1:{self.port}')


class ContextsTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 1

    def test_add_does_not_switch(self):
        """Who gets a credential goes on where he was."""
        with open(os.path.join(self.dir, 'ann'), 'w') as out:
            out.write(self.client('user', 'add', 'ann').stdout)
        os.chmod(out.name, 0o644)
        home = os.path.join(self.dir, 'ann-home')
        os.makedirs(home)
        if self.prefix:
            os.chown(home, harness.NOBODY, harness.NOBODY)
        said = self.gtrain('context', 'add', 'far', '--credential', out.name, home=home).stdout
        self.assertIn('gtrain context use far', said)
        self.assertRegex(self.gtrain('context', 'ls', home=home).stdout, r'(?m)^\* local')
        self.assertEqual(len(json.loads(self.gtrain('nodes', '--json', '--context', 'far', home=home).stdout)['nodes']), 1)
        self.gtrain('context', 'use', 'far', home=home)
        self.gtrain('nodes', home=home)

    def test_ids_stay_short_after_a_restore(self):
        self.assertEqual(self.submit(self.stepper_job('short', '--steps', '1', ranks='1')), 'short-1')
        self.wait_for_state('short', 'SUCCEEDED')
        backup = os.path.join(self.dir, 'backup')
        self.client('head', 'backup', backup, '--context', 'lab')
        self.kill_head()
        self.client('head', 'restore', backup, '--context', 'lab', '--replace')
        self.start_head()
        wait_until('the node to be back', lambda: self.nodes_in('alive') == 1)
        self.assertRegex(self.submit(self.stepper_job('short', '--steps', '1', ranks='1')), r'^short-\d{1,3}$')
        self.assertNotEqual(self.job('short')['id'], 'short-1')


class PlanTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 0  # made here, of sizes that no test machine has

    def test_plans_where_launch_would_run(self):
        """plan answers for the machines of the cluster, with what is free there now."""
        self.join_agent(0, '--cpus', '3')
        self.join_agent(1, '--cpus', '5')
        wait_until('both nodes to be ready', lambda: self.nodes_in('alive') == 2)

        def plan(ranks, *flags, expect=0):
            done = self.client('plan', '--json', '-n', str(ranks), *flags, '--', 'true', expect=expect)
            document = json.loads(done.stdout)
            names = {node['node']: node['hostname'] for node in document['nodes']}
            return document, sorted(names[rank['node']] for rank in document['ranks'])

        for flags in (('--context', 'lab'), ()):  # lab is the current one: launch would go there, too
            self.assertEqual(plan(8, *flags)[1], ['node0'] * 3 + ['node1'] * 5)
            self.assertIn('there is room for 8', plan(9, *flags, expect=1)[0]['reason'])
        here = {node['hostname'] for node in plan(1, '--context', 'local')[0]['nodes']}
        self.assertEqual(here, {socket.gethostname()})
        done = os.path.join(self.dir, 'go')
        self.client('launch', '-d', self.stepper_job('holder', '--until', done, ranks='4'))
        self.wait_for_state('holder', 'RUNNING')
        self.assertEqual(plan(4)[1], ['node0'] * 3 + ['node1'])
        self.client('node', 'drain', 'node1')
        document, _ = plan(4, expect=1)
        self.assertRegex(next(node['limit'] for node in document['nodes'] if node['hostname'] == 'node1'), 'leaving')
        said = self.client('plan', '-n', '1', '--', 'true', expect=None).stdout
        self.assertRegex(said, r'^job true \(hash \w+\) on cluster lab\n')
        self.client('node', 'undrain', 'node1')
        self.assertIn("--nodes: 'a' is given twice",
                      self.client('plan', '-n', '16', '--nodes', 'a:8,b:8,a:8', '--', 'true', expect=2).stderr)
        open(done, 'w').close()
        self.wait_for_state('holder', 'SUCCEEDED')


if __name__ == '__main__':
    harness.main()

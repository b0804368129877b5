"""A cluster made by hand: `gtrain head --init`, one head, N agents that joined with tokens.

On one machine the agents are told apart by their state folders; a subclass may put each into a network of its own by
saying where node i is (inside) and which address it has (address). Node 0 is the head's and the client's place.
"""
import json
import os
import re
import signal
import socket

import harness
from harness import wait_until

SDK_STEPPER = os.path.join(harness.BUILD, 'tests', 'e2e_sdk_stepper')


def free_port():
    """Outside the ephemeral range, so that no outgoing connection takes it while the head is away."""
    for port in range(20000 + os.getpid() % 8000, 32000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(('127.0.0.1', port))
                return port
            except OSError:
                continue
    raise AssertionError('no free port')


class ClusterTest(harness.GtrainTest):
    agent_count = 2

    def setUp(self):
        super().setUp()
        self.port = free_port()
        self.gtrain('head', '--init', '--context', 'lab', prefix=self.inside(0))
        self.head = self.agents = None
        self.start_head()
        self.agents = [self.join_agent(index) for index in range(self.agent_count)]
        wait_until('every node to be ready', lambda: self.nodes_in('alive') == self.agent_count)

    # ---- where things are

    def inside(self, index):
        """The prefix of commands which run on node `index`."""
        return self.prefix

    def agent_inside(self, index):
        return self.inside(index)

    def address(self, index):
        return '127.0.0.1'

    def node_home(self, index):
        return os.path.join(self.dir, f'node{index}')

    def agent_state(self, index):
        return os.path.join(self.node_home(index), 'state', 'gtrain', 'agent')

    # ---- daemons

    def start_head(self, *flags, program=None, **env):
        """Also after a kill: the same port, the same folder, as a service manager would."""
        address = f'[{self.address(0)}]' if ':' in self.address(0) else self.address(0)
        words = ['head', '--context', 'lab', '--listen', f'{address}:{self.port}', '--allow-root', *flags]
        self.head = self.start(*words, prefix=self.inside(0), program=program, **env)
        return self.head

    def kill_head(self):
        self.head.signal(signal.SIGKILL)
        self.head.wait()

    def token(self):
        def ask():
            done = self.gtrain('head', '--context', 'lab', '--token', prefix=self.inside(0), expect=None)
            return done.stdout.strip() if done.returncode == 0 else None
        return wait_until('a join token', ask)

    def join_agent(self, index, *flags):
        os.makedirs(self.node_home(index), exist_ok=True)
        if self.prefix:
            os.chown(self.node_home(index), harness.NOBODY, harness.NOBODY)
        return self.start_agent(index, *flags, GTRAIN_JOIN_TOKEN=self.token())

    def start_agent(self, index, *flags, program=None, **env):
        if '--notices' not in flags:
            flags = ('--notices', 'off', *flags)  # the machine of the tests may be in a cloud
        return self.start('agent', '--hostname', f'node{index}', '--allow-root', *flags, home=self.node_home(index),
                          prefix=self.agent_inside(index), program=program, **env)

    # ---- what the head says

    def client(self, *words, **options):
        return self.gtrain(*words, prefix=self.inside(0), **options)

    def nodes(self):
        done = self.client('nodes', '--json', expect=None)
        return json.loads(done.stdout)['nodes'] if done.returncode == 0 else []

    def node(self, name):
        return next((node for node in self.nodes() if node['hostname'] == name), None)

    def nodes_in(self, *states):
        return sum(node['state'] in states for node in self.nodes())

    def job(self, name, **options):
        return super().job(name, prefix=self.inside(0), **options)

    def hosts(self, name):
        """Of each rank, in their order."""
        return [rank['hostname'] for rank in sorted(self.job(name)['ranks'], key=lambda rank: rank['rank'])]

    def launch(self, path, *flags):
        return self.start('launch', *flags, path, prefix=self.inside(0))

    def submit(self, path):
        """launch -d; the job id."""
        return json.loads(self.client('launch', '-d', '--json', path, timeout=120).stdout)['job']

    # ---- ranks of sdk_stepper.cc

    def sdk_job(self, name, step_ms, until, extra=''):
        return self.job_file(name, f'name: {name}\nrun: {SDK_STEPPER} {self.out} {step_ms} {until}\n'
                                   f'nodes: {self.agent_count}\nranks_per_node: 1\nresources: {{cpus: 1}}\n{extra}')

    def step_times(self):
        """rank -> [(generation, step, seconds)]"""
        found = {}
        for name in os.listdir(self.out):
            if re.fullmatch(r'steps\.\d+', name):
                lines = [line.split() for line in self.read(name).splitlines()]
                found[int(name[6:])] = [(int(line[0]), int(line[1]), int(line[2]) / 1e9)
                                        for line in lines if len(line) == 3]
        return found

    def wait_for_sdk_steps(self, count, ranks, seconds=harness.PATIENCE):
        wait_until(f'{count} steps of {ranks} ranks', lambda: sum(
            len(lines) >= count for lines in self.step_times().values()) == ranks, seconds)


def longest_gap(lines, begin, end):
    """The longest time without a step of one rank between two moments."""
    times = [begin] + [at for _, _, at in lines if begin < at < end] + [end]
    return max(after - before for before, after in zip(times, times[1:]))

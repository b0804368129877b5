"""Machines made of network namespaces: a switch (a bridge in a namespace of its own) and one cable a node; or leaf
switches, bridges with an uplink each to one in the middle.

Needs root, ip(8) and the right to make namespaces; usable() says what is missing. Names carry the pid, nothing
outside the namespaces made here is touched, and remove() takes everything away again.
"""
import os
import shutil
import subprocess


def ip(*words, check=True):
    return subprocess.run(['ip', *words], check=check, capture_output=True, text=True)


def usable():
    """None, or the reason why not."""
    if os.geteuid() != 0:
        return 'needs root to make network namespaces'
    if not shutil.which('ip'):
        return 'ip(8) is not installed'
    probe = f'gtp{os.getpid()}'
    made = ip('netns', 'add', probe, check=False)
    if made.returncode != 0:
        return f'network namespaces cannot be made here: {made.stderr.strip()}'
    cable = ip('-n', probe, 'link', 'add', 'name', 'v0', 'type', 'veth', 'peer', 'name', 'v1', check=False)
    ip('netns', 'del', probe, check=False)
    if cable.returncode != 0:
        return f'veth cannot be made here: {cable.stderr.strip()}'
    return None if shutil.which('nft') else 'nft(8) is not installed'


class OnNets:
    """For a cluster.ClusterTest with self.nets: the head on its node 0, the agents on those behind it."""

    def inside(self, index):
        return self.nets.inside(index)

    def agent_inside(self, index):
        return self.nets.inside(index + 1)

    def address(self, index):
        return self.nets.address(index)


class Nets:
    def __init__(self, nodes, six=False, leaf_of=None):
        """six: the cables carry IPv6 alone. leaf_of: of each node the number of its leaf, or None for the middle."""
        self.six = six
        self.leaf_of = leaf_of or [None] * nodes
        self.made = []
        self.stem = f'gt{os.getpid()}'
        self.switch = self.stem + 's'
        self.nodes = [f'{self.stem}n{i}' for i in range(nodes)]
        try:
            self._make()
        except Exception:
            self.remove()
            raise

    def _make(self):
        for name in [self.switch, *self.nodes]:
            ip('netns', 'add', name)
            self.made.append(name)
            ip('-n', name, 'link', 'set', 'lo', 'up')
        ip('-n', self.switch, 'link', 'add', 'name', 'br0', 'type', 'bridge')
        ip('-n', self.switch, 'link', 'set', 'br0', 'up')
        for leaf in sorted({leaf for leaf in self.leaf_of if leaf is not None}):
            ip('-n', self.switch, 'link', 'add', 'name', f'leaf{leaf}', 'type', 'bridge')
            ip('-n', self.switch, 'link', 'set', f'leaf{leaf}', 'up')
            ip('-n', self.switch, 'link', 'add', 'name', f'up{leaf}', 'type', 'veth', 'peer', 'name', f'down{leaf}')
            for end, bridge in ((f'up{leaf}', f'leaf{leaf}'), (f'down{leaf}', 'br0')):
                ip('-n', self.switch, 'link', 'set', end, 'master', bridge, 'up')
        for index, name in enumerate(self.nodes):
            bridge = 'br0' if self.leaf_of[index] is None else f'leaf{self.leaf_of[index]}'
            ip('-n', self.switch, 'link', 'add', 'name', f'p{index}', 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
            ip('-n', self.switch, 'link', 'set', f'p{index}', 'master', bridge, 'up')
            # Without duplicate address detection: for a second or two the address could not be used.
            how = ['/64', 'nodad'] if self.six else ['/24']
            ip('-n', name, 'addr', 'add', self.address(index) + how[0], 'dev', 'eth0', *how[1:])
            ip('-n', name, 'link', 'set', 'eth0', 'up')

    def address(self, index):
        return f'fd77::{index + 1}' if self.six else f'10.77.0.{index + 1}'

    def inside(self, index):
        """The prefix of a command that runs on that node."""
        return ['ip', 'netns', 'exec', self.nodes[index]]

    def unplug(self, index):
        """At the switch: the node keeps its carrier-less cable, as when somebody pulls it."""
        ip('-n', self.switch, 'link', 'set', f'p{index}', 'down')

    def plug(self, index):
        ip('-n', self.switch, 'link', 'set', f'p{index}', 'up')

    def rules(self, index, incoming='', outgoing=''):
        """nftables statements for every packet on that node's cable, e.g. 'drop'; no words: as if there were none."""
        table = 'flush ruleset\n'
        for hook, side, words in (('input', 'iifname', incoming), ('output', 'oifname', outgoing)):
            if words:
                table += (f'table inet gt{hook} {{\n chain c {{\n type filter hook {hook} priority 0\n'
                          f'{side} "eth0" {words}\n }}\n}}\n')
        subprocess.run(['ip', 'netns', 'exec', self.nodes[index], 'nft', '-f', '-'], input=table, text=True, check=True,
                       capture_output=True)

    def spoil_pair(self, one, other, words):
        """`words` for what these two nodes send each other, in place of all other rules of the first."""
        address = self.address(other)
        self.rules(one, f'ip saddr {address} {words}', f'ip daddr {address} {words}')

    def second_interface(self, index, address):
        """Another way out of the node, which leads nowhere."""
        ip('-n', self.nodes[index], 'link', 'add', 'name', 'eth1', 'type', 'veth', 'peer', 'name', 'eth1far')
        ip('-n', self.nodes[index], 'addr', 'add', f'{address}/24', 'dev', 'eth1')
        ip('-n', self.nodes[index], 'link', 'set', 'eth1', 'up')
        ip('-n', self.nodes[index], 'link', 'set', 'eth1far', 'up')

    def lose(self, index, percent):
        words = f'numgen random mod 100 < {percent} drop'
        self.rules(index, words, words)

    def shape(self, index, rate, queue):
        """What the node sends is limited, e.g. '1mbit', with a queue of so many bytes before packets are lost."""
        ip('netns', 'exec', self.nodes[index], 'tc', 'qdisc', 'replace', 'dev', 'eth0', 'root', 'tbf', 'rate', rate,
           'burst', '8kb', 'limit', str(queue))

    def narrow_links(self, node_rate, uplink_rate):
        """Both directions of each cable of a node on a leaf, and of each uplink."""
        ends = [(self.nodes[index], 'eth0', node_rate) for index, leaf in enumerate(self.leaf_of) if leaf is not None]
        ends += [(self.switch, f'p{index}', node_rate) for index, leaf in enumerate(self.leaf_of) if leaf is not None]
        ends += [(self.switch, f'{side}{leaf}', uplink_rate) for leaf in set(self.leaf_of) - {None} for side in ('up', 'down')]
        for name, device, rate in ends:
            ip('netns', 'exec', name, 'tc', 'qdisc', 'replace', 'dev', device, 'root', 'tbf', 'rate', rate,
               'burst', '16kb', 'latency', '50ms')

    def unshape(self, index):
        ip('netns', 'exec', self.nodes[index], 'tc', 'qdisc', 'del', 'dev', 'eth0', 'root', check=False)

    def remove(self):
        for name in self.made:
            ip('netns', 'del', name, check=False)
        self.made.clear()

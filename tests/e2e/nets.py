"""Machines made of network namespaces: a switch (a bridge in a namespace of its own) and one cable a node.

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
    return None if cable.returncode == 0 else f'veth cannot be made here: {cable.stderr.strip()}'


class Nets:
    def __init__(self, nodes):
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
        for index, name in enumerate(self.nodes):
            ip('-n', self.switch, 'link', 'add', 'name', f'p{index}', 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
            ip('-n', self.switch, 'link', 'set', f'p{index}', 'master', 'br0', 'up')
            ip('-n', name, 'addr', 'add', f'{self.address(index)}/24', 'dev', 'eth0')
            ip('-n', name, 'link', 'set', 'eth0', 'up')

    def address(self, index):
        return f'10.77.0.{index + 1}'

    def inside(self, index):
        """The prefix of a command that runs on that node."""
        return ['ip', 'netns', 'exec', self.nodes[index]]

    def unplug(self, index):
        """At the switch: the node keeps its carrier-less cable, as when somebody pulls it."""
        ip('-n', self.switch, 'link', 'set', f'p{index}', 'down')

    def plug(self, index):
        ip('-n', self.switch, 'link', 'set', f'p{index}', 'up')

    def remove(self):
        for name in self.made:
            ip('netns', 'del', name, check=False)
        self.made.clear()

"""Daemons that have nothing to do sleep: they share their machines with ranks, and their laptops with people."""
import os
import time
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from cluster import ClusterTest
from harness import wait_until

SECONDS = 10


def wake_ups(pid):
    """How often threads of the process have slept and were woken, so far."""
    total = 0
    for thread in os.listdir(f'/proc/{pid}/task'):
        with open(f'/proc/{pid}/task/{thread}/status') as status:
            total += sum(int(line.split()[1]) for line in status if line.startswith('voluntary_ctxt_switches'))
    return total


@unittest.skipIf(os.path.exists(LIBRARY) and sanitized(), "a sanitizer's own thread wakes ten times a second")
class IdleTest(ClusterTest):
    """Goals: 6 a second of an agent, 2 of a head and 3 more for each node, none of a keeper. The limits are twice that, for
    a machine that does other things; `python3 idle_test.py` prints what was counted."""

    def test_wake_ups_of_idle_daemons(self):
        # The program leaves a report now and is silent then.
        self.submit(self.job_file('idle', 'name: idle\nscript: |\n  echo \'{"step":1}\' >> $GTRAIN_REPORT\n  exec sleep 600\n'
                                          'nodes: 2\nranks_per_node: 1\nresources: {cpus: 1}\n'))
        self.wait_for_state('idle', 'RUNNING')
        wait_until('the report to be told', lambda: self.job('idle').get('step') == 1)
        keepers = self.daemons('keeper')
        self.assertEqual(len(keepers), self.agent_count)
        pids = {'head': [self.head.pid], 'agent': [agent.pid for agent in self.agents], 'keeper': keepers}
        before = {pid: wake_ups(pid) for group in pids.values() for pid in group}
        began = time.monotonic()
        wait_until(f'{SECONDS} seconds to pass', lambda: time.monotonic() - began >= SECONDS)
        seconds = time.monotonic() - began
        found = {name: max(wake_ups(pid) - before[pid] for pid in group) / seconds for name, group in pids.items()}
        print(f'wake-ups a second with {self.agent_count} nodes: ' +
              ', '.join(f'{name} {value:.1f}' for name, value in found.items()))
        self.assertLess(found['agent'], 2 * 6)
        self.assertLess(found['head'], 2 * (2 + 3 * self.agent_count))
        self.assertLess(found['keeper'], 1, 'the lease is told every ten seconds')
        self.client('stop', '--now', 'idle')
        self.wait_for_state('idle', 'CANCELLED')
        wait_until('the keepers to end', lambda: not self.daemons('keeper'))


if __name__ == '__main__':
    harness.main()

"""Agents that reach the head through other agents (docs/protocols/relays.md): real daemons, two to a relay at least."""
import os
import signal
import unittest

import harness
from cluster import ClusterTest, longest_gap
from harness import soak, wait_until


class RelaysTest(ClusterTest):
    agent_count = 5

    def start_head(self, *flags, **env):
        return super().start_head('--relays-from', '3', *flags, **env)

    def through(self):
        """hostname -> hostname of its relay"""
        names = {node['id']: node['hostname'] for node in self.nodes()}
        return {node['hostname']: names[node['via']] for node in self.nodes() if node['via']}

    def wait_for_relay(self, children=4, seconds=harness.PATIENCE):
        def settled():
            through = self.through()
            return through if len(through) == children and len(set(through.values())) == 1 else None
        return wait_until(f'{children} agents to go through one', settled, seconds)

    def start_job(self, name='relayed', **options):
        job = self.submit(self.sdk_job(name, 50, os.path.join(self.dir, 'go'), **options))
        self.wait_for_sdk_steps(5, ranks=self.agent_count)
        return job

    def finish(self, job):
        with open(os.path.join(self.dir, 'go'), 'w', encoding='utf-8'):
            pass
        seen = self.wait_for_state(job, 'SUCCEEDED')
        self.assertEqual((seen['generation'], seen['restarts']), (1, 0), seen)

    def agent(self, hostname):
        return self.agents[int(hostname[len('node'):])]

    def test_a_job_runs_through_a_relay(self):
        """Everything that travels between head and agents: a grant, the entry barrier, exits, logs, a command, a stop."""
        through = self.wait_for_relay()
        table = self.client('nodes').stdout
        self.assertEqual(table.count(f'through {next(iter(through.values()))}'), 4, table)
        job = self.start_job()
        child = next(rank['rank'] for rank in self.job(job)['ranks'] if rank['hostname'] in through)
        self.assertEqual(self.client('exec', job, '--rank', str(child), '--', 'echo', 'through').stdout.strip(), 'through')
        self.assertEqual(self.client('logs', job, '--rank', str(child)).returncode, 0)
        self.finish(job)
        stopped = self.submit(self.job_file('long', f'name: long\nrun: sleep 1000\nnodes: {self.agent_count}\n'
                                                    'ranks_per_node: 1\nresources: {cpus: 1}\n'))
        self.wait_for_state(stopped, 'RUNNING')
        self.client('stop', stopped)
        self.wait_for_state(stopped, 'CANCELLED')

    def test_the_death_of_a_relay_is_not_that_of_its_children(self):
        """N2, P4: kill -9 of the relay's agent, then SIGSTOP of the next one. Its children go on directly, and through another one
        later; no rank is ended."""
        for strike in (signal.SIGKILL, signal.SIGSTOP):
            through = self.wait_for_relay(seconds=90)
            relay = next(iter(through.values()))
            job = self.start_job(f'over-{strike.name.lower()}')
            self.agent(relay).signal(strike)
            wait_until('its children to be there without it',
                       lambda relay=relay: relay not in self.through().values() and self.nodes_in('alive') >= 4, seconds=60)
            self.assertEqual(self.job(job)['generation'], 1)
            if strike == signal.SIGKILL:
                self.agent(relay).wait()
                index = int(relay[len('node'):])
                self.agents[index] = self.start_agent(index)
            else:
                self.agent(relay).signal(signal.SIGCONT)
            wait_until('all agents', lambda: self.nodes_in('alive') == self.agent_count)
            self.finish(job)
            os.unlink(os.path.join(self.dir, 'go'))
            for name in os.listdir(self.out):
                os.unlink(os.path.join(self.out, name))

    def test_a_new_head_finds_all_of_them_through_their_relay(self):
        """H1: kill -9 of the head under a job: its agents come back through the relay that they had, and no rank notices."""
        through = self.wait_for_relay()
        job = self.start_job()
        for _ in range(soak(5, 1)):
            self.kill_head()
            self.start_head()
            wait_until('all agents', lambda: self.nodes_in('alive') == self.agent_count)
            self.assertEqual(self.through(), through)
        self.finish(job)
        gaps = [longest_gap(lines, lines[0][2], lines[-1][2]) for lines in self.step_times().values()]
        self.assertLess(max(gaps), 30)

    def test_agents_that_start_anew_go_through_their_relay_at_once(self):
        """An agent remembers its relay, so a thousand of them that start together are no thousand handshakes of the head."""
        through = self.wait_for_relay()
        child = next(iter(through))
        index = int(child[len('node'):])
        self.agent(child).signal(signal.SIGTERM)
        self.agent(child).wait()
        self.agents[index] = self.start_agent(index)
        wait_until('it to be back', lambda: self.node(child)['state'] == 'alive' and self.through().get(child) == through[child])

    def test_a_revoked_child_is_out(self):
        """X4: `node revoke` of an agent behind a relay: it ends, its key is refused, the others stay."""
        through = self.wait_for_relay()
        child = next(iter(through))
        self.client('node', 'revoke', child)
        self.assertNotEqual(self.agent(child).wait(), 0)
        self.assertIsNone(self.node(child))
        self.assertEqual(len(self.through()), 3)


if __name__ == '__main__':
    unittest.main()

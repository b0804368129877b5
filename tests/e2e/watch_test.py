"""The local cluster looks after itself: its head, agent and watch are killed, and no client is there to help."""
import glob
import json
import os
import signal
import socket
import time
import unittest

import harness
from harness import soak, wait_until

DAEMONS = ('head', 'agent', 'local-watch')
# A machine that does eight things may take this long for what one that does nothing else does in BACK.
SOON = 20
# Issue 16: a killed head is back in 3 s. Measured and printed always, asserted where nothing else runs (`make soak`).
BACK = soak(3, SOON)


def binds(taken, port):
    try:
        taken.bind(('127.0.0.1', port))
        return True
    except OSError:
        return False


class WatchTest(harness.GtrainTest):
    def detached_job(self, name, *args):
        """A job that nobody follows, its ranks stepping."""
        self.gtrain('launch', '-d', self.stepper_job(name, *args))
        self.wait_for_steps(3, ranks=2)
        self.wait_for_three()

    def wait_for_three(self):
        """One of each, and never two."""
        wait_until(f'one head, agent and watch; there are {self.marked()}',
                   lambda: all(len(self.daemons(verb)) == 1 for verb in DAEMONS), SOON)

    def pid(self, verb):
        (pid,) = self.daemons(verb)
        return pid

    def kill(self, pids):
        self.killed_at = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until('them to be dead', lambda: not any(map(harness.alive, pids)))

    def back(self, what, condition):
        """Waits for it and says how long it took from the kill on."""
        wait_until(what, condition, SOON)
        took = time.monotonic() - self.killed_at
        print(f'\n{self._testMethodName}: {what}: {took:.2f} s after the kill', flush=True)
        self.assertLess(took, BACK, what)

    def endpoint(self):
        """What the head that serves, or died last, said about itself; {} when it ended in order."""
        path = os.path.join(self.home, 'state', 'gtrain', 'local', 'endpoint.json')
        try:
            with open(path) as data:
                return json.load(data)
        except FileNotFoundError:
            return {}

    def serving(self):
        return self.endpoint().get('pid')

    def test_head_agent_and_a_rank_die_together(self):
        """H1, P1, P4: nobody was left that would start them again when the job was detached; 24 s when a client helped."""
        done = os.path.join(self.dir, 'go')
        self.detached_job('together', '--until', done)
        ranks = self.rank_pids(1)
        head = self.pid('head')
        self.kill([head, self.pid('agent'), ranks[1]])
        self.back('another head to serve', lambda: self.serving() not in (None, head))
        wait_until('both ranks to come back', lambda: len(self.rank_pids(2)) == 2, SOON)
        wait_until('the rank that was left of before to end', lambda: not harness.alive(ranks[0]))
        self.wait_for_three()
        open(done, 'w').close()
        self.wait_for_state('together', 'SUCCEEDED')
        self.end_local_cluster()

    def test_any_one_brings_back_the_other_two(self):
        """H1, P4: also after the client was killed; the ranks step on in their generation, and nothing runs twice."""
        done = os.path.join(self.dir, 'go')
        launch = self.start('launch', self.stepper_job('three', '--until', done))
        self.wait_for_steps(3, ranks=2)
        self.wait_for_three()
        self.kill([launch.pid])
        ranks = self.rank_pids(1)
        for left in DAEMONS:
            with self.subTest(left=left):
                before = {verb: self.pid(verb) for verb in DAEMONS}
                self.kill([pid for verb, pid in before.items() if verb != left])
                self.back(f'a head to serve, {left} was left', lambda: self.serving() in self.daemons('head'))
                self.wait_for_three()
                self.assertEqual(self.pid(left), before[left])
        step = max(self.steps().values())
        self.wait_for_steps(step + 3, ranks=2)
        self.assertEqual(self.rank_pids(), ranks, 'no new generation')
        open(done, 'w').close()
        self.wait_for_state('three', 'SUCCEEDED')
        self.end_local_cluster()

    def test_a_client_that_follows_brings_back_all_three(self):
        """Nobody else is left that could; it tried the dead head for ten minutes, while the lease of the ranks ran out."""
        done = os.path.join(self.dir, 'go')
        launch = self.start('launch', self.stepper_job('all', '--until', done))
        self.wait_for_steps(3, ranks=2)
        self.wait_for_three()
        ranks = self.rank_pids(1)
        self.kill([self.pid(verb) for verb in DAEMONS])
        wait_until('a head to serve', lambda: self.serving() in self.daemons('head'), harness.PATIENCE)
        step = max(self.steps().values())
        self.wait_for_steps(step + 3, ranks=2)
        self.assertEqual(self.rank_pids(), ranks, 'no new generation')
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        self.end_local_cluster()

    def test_the_next_head_is_at_another_address(self):
        """W15: its port was taken meanwhile; the agent, which looked for it there for ever, goes along."""
        done = os.path.join(self.dir, 'go')
        self.detached_job('moved', '--until', done)
        ranks = self.rank_pids()
        port = self.endpoint()['endpoint'].rpartition(':')[2]
        others = [self.pid('agent'), self.pid('local-watch')]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        self.kill([self.pid('head')])
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wait_until('the dead head to let go of its port', lambda: binds(taken, int(port)))
            taken.listen()
            for pid in others:
                os.kill(pid, signal.SIGCONT)
            self.killed_at = time.monotonic()  # nobody could look before
            self.back('a head elsewhere', lambda: self.serving() in self.daemons('head'))
            self.assertNotEqual(self.endpoint()['endpoint'].rpartition(':')[2], port)
            wait_until('another agent', lambda: self.daemons('agent') not in ([], others[:1]), SOON)
            open(done, 'w').close()
            self.wait_for_state('moved', 'SUCCEEDED')
        self.assertEqual(self.rank_pids(), ranks, 'no new generation')
        self.end_local_cluster()

    def test_told_to_end_it_ends(self):
        """A head that ends in order is missed by nobody, and takes the others along."""
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.wait_for_three()
        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))
        os.kill(self.pid('head'), signal.SIGTERM)
        wait_until('the head and the watch to end', lambda: not self.daemons('head') and not self.daemons('local-watch'))
        self.assertIsNone(self.serving())
        self.end_local_cluster()  # the agent; by itself it looks for a head for 20 s

    def test_a_client_that_stood_still_until_the_cluster_had_ended(self):
        """As behind a pager, or on a slow terminal: what its job has left says how it ended."""
        done = os.path.join(self.dir, 'go')
        launch = self.start('launch', '-n', '1', '--name', 'paged', '--', 'sh', '-c',
                            f'echo begun; until [ -e {done} ]; do sleep 0.05; done')
        launch.wait_for('begun')
        launch.signal(signal.SIGSTOP)
        open(done, 'w').close()
        wait_until('the job to be over', lambda: [job for job in self.jobs() if job['state'] == 'SUCCEEDED'])
        wait_until('its result', lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', 'paged-*', 'result.json')))
        self.end_local_cluster(but=[launch.pid])
        launch.signal(signal.SIGCONT)
        self.assertEqual(launch.wait(), 0, launch.output())
        self.assertIn('gtrain: paged-1 SUCCEEDED', launch.output())

    def test_told_to_end_while_a_job_runs(self):
        """The ranks go on without a head until somebody asks for their job."""
        done = os.path.join(self.dir, 'go')
        self.detached_job('asked', '--until', done)
        ranks = self.rank_pids()
        os.kill(self.pid('head'), signal.SIGTERM)
        wait_until('the head and the watch to end', lambda: not self.daemons('head') and not self.daemons('local-watch'))
        step = max(self.steps().values())
        self.wait_for_steps(step + 20, ranks=2)
        self.assertIn('no local cluster runs', self.gtrain('status', expect=1).stderr)
        self.assertEqual(self.daemons('head'), [])
        attach = self.start('attach', 'asked')
        self.wait_for_three()
        open(done, 'w').close()
        self.assertEqual(attach.wait(), 0, attach.output())
        self.assertEqual(self.rank_pids(), ranks, 'no new generation')
        self.end_local_cluster()

    def test_a_head_that_cannot_come_back(self):
        """H10: it is tried again and again while there are ranks, which go on; when they have ended nothing is left behind."""
        done = os.path.join(self.dir, 'go')
        self.detached_job('headless', '--until', done)
        ranks = self.rank_pids(1)
        state = os.path.join(self.home, 'state', 'gtrain', 'local')
        with open(os.path.join(state, 'cluster'), 'w') as out:
            out.write('f' * 32 + '\n')
        self.kill([self.pid('head')])
        log = os.path.join(state, 'head.log')

        def refusals():
            with open(log) as data:
                return data.read().count('belongs to')

        wait_until('it to be tried twice', lambda: refusals() >= 6, SOON)  # three times each
        self.assertTrue(all(map(harness.alive, ranks.values())))
        self.assertEqual(self.gtrain('status', expect=1).stdout, '')
        open(done, 'w').close()
        self.kill([self.pid('agent')])  # else it waits for a head, for it has the ranks' ends to tell
        wait_until('the ranks to end', lambda: not any(map(harness.alive, ranks.values())))
        self.kill(self.daemons('keeper'))
        self.wait_for_no_processes()


if __name__ == '__main__':
    unittest.main(verbosity=2)

"""The client is cut off, interrupted and asked twice: what it was told is true, and nothing happens twice (H15, J14)."""
import json
import os
import random
import signal
import time

import harness
from cluster import ClusterTest
from harness import soak, wait_until


def moments(rounds):
    """A seeded source of moments; the seed is printed, so that a failure can be looked at again."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f'seed {seed}', flush=True)
    return random.Random(seed), range(rounds)


class RetryTest(ClusterTest):
    agent_count = 1

    def quick_job(self, name):
        return self.job_file(name, f'name: {name}\nscript: echo x >> {self.out}/ran.{name}\nranks: 1\nresources: {{cpus: 1}}\n')

    def assert_happened_once(self, client, name):
        self.assertEqual(client.wait(120), 0, client.output())
        job = json.loads(client.output().splitlines()[-1])['job']
        self.wait_for_state(job, 'SUCCEEDED')
        self.assertEqual([one['id'] for one in self.jobs() if one['name'] == name], [job])
        self.assertEqual(self.read(f'ran.{name}'), 'x')
        # A keeper that has not heard yet that its job is over would outlive the agent that the test ends next.
        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))

    def submit_in_background(self, path):
        return self.start('launch', '-d', '--json', path)

    def test_head_killed_around_a_submit(self):
        """H15, H1: killed before, while and after it executes the request; the client asks the next head with the same id."""
        source, rounds = moments(soak(100, 8))
        for turn in rounds:
            name = f'retry{turn}'
            due = time.monotonic() + source.random() * 0.15
            client = self.submit_in_background(self.quick_job(name))
            wait_until('the moment', lambda: time.monotonic() >= due)
            self.kill_head()
            self.start_head()
            self.assert_happened_once(client, name)

    def test_asked_again_while_the_head_is_silent(self):
        """H15, H12: the head is paused, so the client repeats its request; both copies reach the head when it goes on."""
        self.head.signal(signal.SIGSTOP)
        client = self.submit_in_background(self.quick_job('again'))
        begin = time.monotonic()
        wait_until('the client to repeat itself', lambda: time.monotonic() > begin + soak(25, 12))
        self.head.signal(signal.SIGCONT)
        self.assert_happened_once(client, 'again')

    def test_client_paused_over_the_reply(self):
        """H15: the reply comes while the client does not run, and that head is dead when it goes on."""
        client = self.submit_in_background(self.quick_job('asleep'))
        wait_until('the job to be accepted', lambda: 'asleep-1 submitted' in self.head.output() or client.popen.poll() is not None)
        client.signal(signal.SIGSTOP)
        self.kill_head()
        self.start_head()
        client.signal(signal.SIGCONT)
        self.assert_happened_once(client, 'asleep')


class CtrlCTest(harness.GtrainTest):
    def test_at_any_moment(self):
        """J14: Ctrl-C while the local cluster starts, the job is submitted, its ranks start and run: the client ends soon, the
        job is stopped if there is one, and in the end nothing runs."""
        source, rounds = moments(soak(60, 8))
        for turn in rounds:
            until = time.monotonic() + source.random() * 1.5
            client = self.start('launch', self.stepper_job(f'ctrlc{turn}', '--steps', '100000'), terminal=True)
            wait_until('the moment', lambda: time.monotonic() >= until)
            client.type(b'\x03')
            if source.random() < 0.5:
                client.type(b'\x03')
            # Before main() has looked around, the signal itself ends it; a shell shows 130 for both.
            self.assertIn(client.wait(), (130, -signal.SIGINT), (turn, client.output()))
            wait_until('the ranks to end', lambda: not any(map(harness.alive, self.rank_pids().values())))
            state = self.job(f'ctrlc{turn}')
            if state is not None:
                self.wait_for_state(f'ctrlc{turn}', 'CANCELLED')
            for name in os.listdir(self.out):
                os.unlink(os.path.join(self.out, name))
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

"""The control plane never ends a healthy rank: kill -9 of agent and keeper while the ranks keep stepping (promise 2)."""
import json
import os
import platform
import re
import random
import signal
import time

import harness
from cluster import ClusterTest
from harness import soak, wait_until


class AgentKilledTest(harness.GtrainTest):
    def test_ranks_step_on_and_the_new_agent_adopts_them(self):
        """P4: agent killed; ranks keep stepping; a new agent finds the keeper; exit codes and logs are complete."""
        done = os.path.join(self.dir, 'go')
        job = self.stepper_job('adopt', '--until', done)
        launch = self.start('launch', job)
        self.wait_for_steps(3, ranks=2)
        pids = self.rank_pids()
        self.kill_agent()
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        self.assertEqual(self.rank_pids(), pids)
        self.agent_is_back()
        before = max(self.steps().values())
        self.wait_for_steps(before + 20, ranks=2)
        self.assertEqual(self.rank_pids(), pids, 'no new generation: the ranks were adopted')
        seen = self.wait_for_state('adopt', 'RUNNING')
        self.assertEqual((seen['generation'], seen['restarts']), (1, 0), seen)
        open(done, 'w').close()
        self.assertEqual(launch.wait(), 0, launch.output())
        for rank in range(2):
            self.assertIn(f'rank {rank} done at step {self.steps()[rank]}', launch.output(), 'what ranks wrote meanwhile is not lost')
        self.end_local_cluster()

    def test_exit_while_the_agent_is_away_is_not_lost(self):
        """P4, P8: ranks end while no agent runs; the next agent reads their exit codes from the keeper."""
        job = self.stepper_job('away', '--steps', '60')
        detached = self.start('launch', '-d', job)
        self.assertEqual(detached.wait(), 0, detached.output())
        self.wait_for_steps(3, ranks=2)
        self.kill_agent()
        pids = self.rank_pids()
        wait_until('the ranks end by themselves', lambda: not any(map(harness.alive, pids.values())))
        self.assertEqual(self.steps(), {0: 60, 1: 60})
        attach = self.start('attach', 'away')
        self.agent_is_back()
        self.assertEqual(attach.wait(), 0, attach.output())
        self.assertEqual(list(self.rank_pids(2)), [], 'nothing was run twice')
        self.end_local_cluster()

    def kill_agent(self):
        agents = self.daemons('agent')
        self.assertEqual(len(agents), 1, self.marked())
        os.kill(agents[0], signal.SIGKILL)

    def agent_is_back(self):
        """Without help: the daemons of the local cluster start each other again."""
        wait_until('the agent to run', lambda: self.daemons('agent'))


class AgentKilledOrdinaryUserTest(AgentKilledTest):
    ordinary_user = True


class AgentAtEveryMomentTest(ClusterTest):
    """The life of a job is cut at moments spread over all of it; deterministic ones below."""
    agent_count = 1
    # Each start leaves a line; a lock a rank shows two processes that hold one rank at the same time.
    LIFE = """  exec 9>{out}/lock.$RANK
  flock -n 9 || echo overlap >> {out}/overlap
  echo "$GTRAIN_GENERATION $RANK $$" >> {out}/starts.{name}
  sleep 0.3
  echo "rank $RANK is through"
"""

    def restart_agent(self):
        self.agents[0].signal(signal.SIGKILL)
        self.agents[0].wait()
        self.agents[0] = self.start_agent(0)

    def life(self, name):
        return self.job_file(name, f'name: {name}\nscript: |\n{self.LIFE.format(out=self.out, name=name)}ranks: 2\n'
                                   'resources: {cpus: 1}\nstop_grace: 5s\n')

    def starts(self, name):
        path = os.path.join(self.out, f'starts.{name}')
        return [tuple(map(int, line.split())) for line in self.read(path).splitlines()] if os.path.exists(path) else []

    def test_killed_at_any_moment(self):
        """P4: wherever the agent dies, the job ends well, no rank of a generation starts twice and no rank runs twice at
        once; what had started goes on in its generation."""
        seed = random.SystemRandom().randrange(1 << 32)
        print(f'seed {seed}', flush=True)
        moments = random.Random(seed)
        rounds = soak(150, 10)
        for turn in range(rounds):
            name = f'life{turn}'
            job = self.submit(self.life(name))
            due = time.monotonic() + (turn + moments.random()) / rounds * 0.9 - 0.1
            wait_until('the moment', lambda: time.monotonic() >= due)
            before = self.starts(name)
            running = len(before) == 2 and all(harness.alive(pid) for _, _, pid in before)
            self.restart_agent()
            seen = self.wait_for_state(job, *harness.TERMINAL_STATES)
            starts = self.starts(name)
            self.assertEqual(seen['state'], 'SUCCEEDED', (seed, turn, starts, seen))
            self.assertEqual(len({(g, r) for g, r, _ in starts}), len(starts), (seed, turn, starts))
            if running:
                self.assertEqual(starts, before, (seed, turn, 'what ran was adopted'))
        wait_until('the last keeper to hear that its job is over', lambda: not self.daemons('keeper'))
        self.assertFalse(os.path.exists(os.path.join(self.out, 'overlap')), seed)

    def test_killed_before_start(self):
        """P4: submitted while no agent is there: the job waits, says for what, and starts when the agent is back."""
        self.agents[0].signal(signal.SIGKILL)
        self.agents[0].wait()
        wait_until('the head to miss the node', lambda: self.nodes_in('alive') == 0)
        job = self.submit(self.life('early'))
        seen = self.wait_for_state(job, 'WAITING', 'QUEUED')
        self.assertTrue(seen['reason'], seen)
        self.agents[0] = self.start_agent(0)
        self.wait_for_state(job, 'SUCCEEDED')
        self.assertEqual([g for g, _, _ in self.starts('early')], [1, 1])

    def test_killed_during_stop(self):
        """P4, P13: the agent dies between SIGTERM and the end of the grace; the stop is finished, once."""
        job = self.submit(self.stepper_job('slow', '--steps', '100000', '--deaf', extra='resources: {cpus: 1}\nstop_grace: 3s\n'))
        self.wait_for_steps(2, ranks=2)
        pids = self.rank_pids()
        self.client('stop', job)
        self.restart_agent()
        seen = self.wait_for_state(job, *harness.TERMINAL_STATES)
        self.assertEqual(seen['state'], 'CANCELLED', seen)
        self.assertFalse(any(map(harness.alive, pids.values())))
        self.assertEqual(self.rank_pids(2), {})

    def test_killed_between_exit_and_acknowledgement(self):
        """P4: the head is paused, so nobody acknowledges; the exit code waits in the keeper for the next agent."""
        path = self.job_file('code', f'name: code\nscript: |\n  echo $$ > {self.out}/pid\n'
                                     f'  while [ ! -e {self.out}/go ]; do sleep 0.05; done\n  exit 93\nranks: 1\n')
        job = self.submit(path)
        pid = int(wait_until('the rank', lambda: os.path.exists(os.path.join(self.out, 'pid')) and self.read('pid')))
        self.wait_for_state(job, 'RUNNING')
        self.head.signal(signal.SIGSTOP)
        self.addCleanup(lambda: self.head.popen.poll() is None and self.head.signal(signal.SIGCONT))
        open(os.path.join(self.out, 'go'), 'w').close()
        wait_until('the rank to exit', lambda: not harness.alive(pid))
        self.restart_agent()
        wait_until('the new agent to hear of the exit', lambda: 'exited with code 93' in self.agents[0].output())
        self.head.signal(signal.SIGCONT)
        seen = self.wait_for_state(job, *harness.TERMINAL_STATES)
        self.assertEqual((seen['state'], seen['exit_code'], seen['generation']), ('FAILED', 93, 1), seen)
        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))


class KeeperKilledTest(ClusterTest):
    agent_count = 1

    def keeper_job(self, name):
        """Each rank leaves a process behind that escaped by setsid and a double fork."""
        return self.job_file(name, f'name: {name}\nscript: |\n'
                                   f'  (setsid sh -c "echo \\$\\$ > {self.out}/escaped.$GTRAIN_GENERATION.$RANK; exec sleep 3600" &)\n'
                                   f'  exec /usr/bin/python3 {self.stepper} --out {self.out} --until {self.out}/go\n'
                                   'ranks: 2\nresources: {cpus: 1}\n')

    def all_started(self, generation):
        names = [f'escaped.{generation}.{rank}' for rank in range(2)]
        wait_until(f'two ranks of generation {generation}', lambda: len(self.rank_pids(generation)) == 2 and all(
            os.path.exists(os.path.join(self.out, name)) and self.read(name) for name in names))
        return list(self.rank_pids(generation).values()) + [int(self.read(name)) for name in names]

    def kill_keeper(self):
        keepers = self.daemons('keeper')
        self.assertEqual(len(keepers), 1, self.marked())
        os.kill(keepers[0], signal.SIGKILL)
        wait_until('the keeper to be gone', lambda: not harness.alive(keepers[0]))  # the next agent looks at once

    def finish(self, job, pids, fault):
        later = self.all_started(2)
        self.assertFalse([pid for pid in pids if harness.alive(pid)], 'nothing of generation 1 is left')
        seen = self.wait_for_state(job, 'RUNNING')
        self.assertIn(fault, seen['last_fault']['message'], seen)
        self.assertEqual(seen['last_fault']['kind'], 'infrastructure', seen)
        open(os.path.join(self.out, 'go'), 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')
        wait_until('nothing to be left', lambda: not [pid for pid in later if harness.alive(pid)])

    def test_under_its_agent(self):
        """P4, P6: kill -9 of the keeper: its ranks and what escaped them are found and ended, the fault is told as the
        keeper's, and the job goes on in the next generation."""
        job = self.submit(self.keeper_job('bereft'))
        pids = self.all_started(1)
        self.kill_keeper()
        self.finish(job, pids, 'the keeper was killed')

    def test_while_no_agent_is_there(self):
        """P4: the keeper dies after its agent; the next agent finds and ends what is left."""
        job = self.submit(self.keeper_job('lonely'))
        pids = self.all_started(1)
        self.agents[0].signal(signal.SIGKILL)
        self.agents[0].wait()
        self.kill_keeper()
        self.agents[0] = self.start_agent(0)
        self.finish(job, pids, 'its ranks are gone')


class KeeperLeaseTest(ClusterTest):
    agent_count = 1

    def test_past_the_lease(self):
        """P4: no agent comes back: after 120 s the keeper ends the ranks, says why, and the job goes on with the next one."""
        if not harness.SOAK:
            self.skipTest('takes two minutes: make soak; runtime/host/keeper_test has it with a lease of a second')
        job = self.submit(self.stepper_job('alone', '--until', os.path.join(self.dir, 'go'), extra='resources: {cpus: 1}\n'))
        self.wait_for_steps(3, ranks=2)
        pids = list(self.rank_pids().values())
        self.agents[0].signal(signal.SIGKILL)
        self.agents[0].wait()
        begin = time.monotonic()
        wait_until('the ranks to be ended', lambda: not any(map(harness.alive, pids)), 180)
        self.assertGreater(time.monotonic() - begin, 110, 'not before the lease was over')
        self.agents[0] = self.start_agent(0)
        wait_until('ranks of the next generation', lambda: len(self.rank_pids(2)) == 2)
        open(os.path.join(self.dir, 'go'), 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')


class HangKillTest(ClusterTest):
    HANG = """
import os, sys, threading, time
rank, generation = int(os.environ['RANK']), os.environ['GTRAIN_GENERATION']
report = open(os.environ['GTRAIN_REPORT'], 'a', buffering=1)
lock = threading.Lock()
def beat():
    while True:
        open(sys.argv[1] + '/beat.%d' % rank, 'w').write(str(time.monotonic()))
        time.sleep(0.1)
threading.Thread(target=beat, daemon=True).start()
open(sys.argv[1] + '/pid.%s.%d' % (generation, rank), 'w').write(str(os.getpid()))
for step in range(1, 6):
    time.sleep(0.1)
    report.write('{"step": %d}\\n' % step)
if generation == '1':
    lock.acquire()
    lock.acquire() if rank == 0 else time.sleep(3600)
"""

    def test_stacks_of_all_ranks_before_the_kill(self):
        """P16: rank 1 sleeps holding a lock and rank 0 waits for one, while their heartbeat threads live: the verdict, and the
        stacks of all ranks on both nodes, stand in events.jsonl before the generation is ended."""
        program = os.path.join(self.dir, 'hang.py')
        with open(program, 'w') as out:
            out.write(self.HANG)
        os.chmod(program, 0o644)
        job = self.submit(self.job_file('hung', f'name: hung\nrun: /usr/bin/python3 {program} {self.out}\nnodes: 2\n'
                                                'ranks_per_node: 1\nresources: {cpus: 1}\n'
                                                'progress: {stall: 10s, on_stall: kill}\n'))
        wait_until('two hung ranks', lambda: len(self.rank_pids(1)) == 2)
        seen = self.wait_for_state(job, 'SUCCEEDED')
        self.assertEqual(seen['generation'], 2, seen)
        self.assertIn('on_stall: kill', seen['last_fault']['message'], seen)
        events = json.loads(self.client('why', job, '--json').stdout)['events']
        revoked = next(number for number, event in enumerate(events) if event['kind'] == 'fault')
        before = [event['text'] for event in events[:revoked] if event['kind'] == 'stall']
        self.assertRegex(before[0], r'no step for 10s; rank 1 on node\d is blocked in \w*nanosleep')  # and not the rank that waits
        # The system call in which the main thread is stuck (x86-64), and as root the function of the kernel.
        for rank, number, function in ((0, 202, 'futex_wait'), (1, 230, 'nanosleep')):
            stacks = next((text for text in before if text.startswith(f'stacks of rank {rank} on ')), None)
            self.assertIsNotNone(stacks, before)
            main = re.split(r'\n *thread (?=\d)', stacks)[1]
            self.assertIn(f'thread {self.rank_pids(1)[rank]} (python3)', stacks)
            self.assertEqual(len(re.findall(r'(?m)^ *thread \d', stacks)), 2, 'the heartbeat thread too')
            if platform.machine() == 'x86_64':
                self.assertIn(f'system call {number} ', main)
            if harness.is_root() and harness.read_proc(os.getpid(), 'stack'):
                self.assertIn(function, main)


class StallTest(ClusterTest):
    agent_count = 1

    def test_a_stall_is_reported_with_stacks(self):
        """P16: a rank that lives but makes no step: events.jsonl names it with its stack; it is not killed."""
        until = os.path.join(self.dir, 'go')
        job = self.submit(self.stepper_job('stuck', '--until', until, extra='resources: {cpus: 1}\nprogress: {stall: 2s}\n'))
        self.wait_for_steps(3, ranks=2)
        pid = self.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        self.addCleanup(lambda: harness.alive(pid) and os.kill(pid, signal.SIGCONT))

        def stalls():
            why = json.loads(self.client('why', job, '--json').stdout)
            return [event['text'] for event in why['events'] if event['kind'] == 'stall']

        text = '\n'.join(wait_until('a stall report', stalls))
        self.assertIn('rank 1', text)
        self.assertTrue(harness.alive(pid), 'on_stall: report is the default')
        os.kill(pid, signal.SIGCONT)
        open(until, 'w').close()
        self.wait_for_state(job, 'SUCCEEDED')


if __name__ == '__main__':
    harness.main()

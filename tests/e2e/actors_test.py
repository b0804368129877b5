"""Actors on several ranks (docs/actors.md)."""
import collections
import json
import os
import random
import re
import shutil
import signal
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import BUILD, SOURCE, soak, wait_until

DRIVER = os.path.join(BUILD, 'tests', 'e2e_actors_driver')


@unittest.skipUnless(os.path.exists(LIBRARY) and os.path.exists(DRIVER) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class ActorsTest(harness.GtrainTest):
    def launch(self, name, ranks, *words, extra='', detached=True):
        job = self.job_file(name, f'name: {name}\nrun: {DRIVER} {self.out} {" ".join(map(str, words))}\nranks: {ranks}\n'
                                  f'resources: {{cpus: 1, oversubscribe: true}}\n{extra}')
        return self.gtrain('launch', *(['-d'] if detached else []), job)

    def processes(self):
        return {int(name[8:]) for name in os.listdir(self.out) if name.startswith('process.')}

    def effects(self):
        """Of each actor the numbers that it was told to add."""
        return {name[8:]: [int(line) for line in self.read(name).split()] for name in os.listdir(self.out) if name.startswith('effects.')}

    def log(self, name):
        return self.gtrain('logs', name).stdout

    def test_actors_live_on_all_ranks_and_the_job_ends_with_its_driver(self):
        self.launch('place', 4, 'place', 8)
        self.wait_for_state('place', 'SUCCEEDED')
        log = self.log('place')
        places = re.findall(r'process (\d+)', log)
        self.assertEqual(set(map(int, places)), self.processes(), log)
        self.assertEqual(sorted(collections.Counter(places).values()), [2, 2, 2, 2], log)
        self.assertIn('of 4', log)
        self.end_local_cluster()

    def test_calls_to_other_processes_run_once_and_in_order(self):
        self.launch('call', 3, 'call', 6, 200)
        self.wait_for_state('call', 'SUCCEEDED')
        self.assertEqual(re.findall(r'counted (\d+)', self.log('call')), ['200'] * 6)
        # SpawnGroup makes all of them of the same argument, so they append to one file.
        lines = self.effects()['call']
        self.assertEqual(collections.Counter(lines), {number: 6 for number in range(200)})
        self.end_local_cluster()

    def test_actors_spawn_actors_that_end_with_them(self):
        self.launch('nest', 3, 'nest', 9)
        self.wait_for_state('nest', 'SUCCEEDED')
        log = self.log('nest')
        self.assertIn('sum 19', log)
        self.assertEqual(collections.Counter(collections.Counter(re.findall(r'process (\d+)', log)).values()), {3: 3}, log)
        self.assertIn('left 0 ended 9', log)
        self.assertEqual(self.effects(), {'shared': [1], **{f'child-{i}': [7] for i in range(9)}})
        self.end_local_cluster()

    def test_a_driver_that_nobody_ends_any_more_ends_itself(self):
        """All that could end its job is killed, and its calls come to nothing. It tries again for ever."""
        self.launch('stubborn', 2, 'stubborn', extra='elastic: {mode: in-place}\n')
        wait_until('a first call', lambda: os.path.exists(os.path.join(self.out, 'begun')))
        for verb in ('head', 'agent', 'local-watch', 'keeper'):
            for pid in self.daemons(verb):
                os.kill(pid, signal.SIGKILL)
        wait_until('the ranks to end', lambda: not any(harness.alive(pid) for pid in self.processes()), 60)

    def test_an_object_is_one_memory_for_all_readers_of_a_machine(self):
        self.launch('object', 5, 'object', 64 << 20)
        self.wait_for_state('object', 'SUCCEEDED')
        log = self.log('object')
        self.assertIn('memories 1 first 0 after the end: NOT_FOUND: object 1 of rank 0', log)
        self.assertIn('is no more: its owner has let it go', log)
        self.end_local_cluster()

    def test_a_group_that_is_apart_is_whole_or_not_there(self):
        for count in (3, 4):
            self.launch(f'apart-{count}', 3, 'apart', count)
            self.wait_for_state(f'apart-{count}', 'SUCCEEDED')
        log = self.log('apart-3')
        self.assertEqual(len(set(re.findall(r'process (\d+)', log))), 3, log)
        self.assertIn('reduced well', log)
        self.assertIn('apart: FAILED_PRECONDITION: each process of the job has an actor of this group', self.log('apart-4'))
        self.end_local_cluster()

    def test_the_next_driver_finds_what_the_one_before_has_detached(self):
        """P4: the process that drives is killed again and again; what it was told is in the sum, once."""
        self.launch('survive', 4, 'survive', extra='elastic: {mode: in-place}\nrestart: {budget: 10000, before_first_step: 10000}\n')
        drivers = []
        for _ in range(3):
            driver = wait_until('another driver that adds', lambda: (lambda pid: pid if pid not in drivers and self.heard_by(pid) else None)(
                int(self.read('driver') or 0) if os.path.exists(os.path.join(self.out, 'driver')) else 0))
            drivers.append(driver)
            if len(drivers) < 3:
                wait_until('all hosts', lambda: len([pid for pid in self.processes() if harness.alive(pid)]) == 4)
                os.kill(driver, signal.SIGKILL)
        open(os.path.join(self.out, 'enough'), 'w').close()
        self.wait_for_state('survive', 'SUCCEEDED')
        sums = [self.heard_by(driver) for driver in drivers]
        for numbers in sums:
            self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))
        # One call of a driver that was killed may have been added without a word.
        for before, after in zip(sums, sums[1:]):
            self.assertIn(after[0] - before[-1], (1, 2))
        self.end_local_cluster()

    def heard_by(self, pid):
        """The sums that this driver has heard of, all of them numbers."""
        name = f'driver.{pid}'
        return [int(line) for line in self.read(name).splitlines()] if os.path.exists(os.path.join(self.out, name)) else []

    def test_a_failed_driver_fails_the_job_and_says_why(self):
        self.launch('fail', 2, 'fail', extra='restart: {budget: 0}\n')
        self.wait_for_state('fail', 'FAILED')
        self.assertIn('there is no rank 99 to spawn on: the job has 2 now', self.log('fail'))
        self.assertEqual(self.effects(), {'fails': [1]})
        self.end_local_cluster()

    def test_hosts_are_killed_and_each_effect_is_there_once_or_reported(self):
        """What must be shown 2: a random host each second or so. GTRAIN_SOAK=1: five minutes."""
        self.kill_hosts(shared_memory=True)

    def test_hosts_are_killed_that_call_each_other_over_the_network(self):
        self.kill_hosts(shared_memory=False)

    def has_links(self, process):
        with open(f'/proc/{process}/maps') as maps:
            return 'gtrain-link' in maps.read()

    def kill_hosts(self, shared_memory):
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        seconds = soak(300, 12)
        extra = 'elastic: {mode: in-place}\nrestart: {budget: 10000, before_first_step: 10000}\n'
        if not shared_memory:
            extra += 'env: {GTRAIN_ACTORS_SHM: "off"}\n'
        self.launch('count', 4, 'count', seconds, extra=extra)
        wait_until('effects of all', lambda: len(self.effects()) == 3 and all(self.effects().values()))
        self.assertEqual({self.has_links(process) for process in self.processes()}, {shared_memory})
        kills = 0
        while self.kill_one('count', rng):
            kills += 1
            before = self.effects()
            wait_until('more of all', lambda: all(len(now) > len(before[name]) for name, now in self.effects().items()) or self.over('count'))
        self.assertEqual(self.job('count')['state'], 'SUCCEEDED', f'seed {seed}')
        log = self.read('result')
        added, failed, longest = map(int, re.search(r'added (\d+) failed (\d+) longest (\d+) ms', log).groups())
        done = collections.Counter(number for numbers in self.effects().values() for number in numbers)
        reported = set(map(int, re.findall(r'failed (\d+):', log)))
        self.assertEqual(max(done.values()), 1, f'an effect twice, seed {seed}: {done.most_common(3)}')
        self.assertEqual(len(reported), failed)
        # Each number is an effect, or its failure was reported; a reported one may have happened.
        missing = set(range(1, added + failed + 1)) - set(done) - reported
        self.assertFalse(missing, f'neither done nor reported, seed {seed}: {sorted(missing)[:5]}')
        for actor, numbers in self.effects().items():
            self.assertEqual(numbers, sorted(numbers), f'{actor}, seed {seed}')
        self.assertGreater(kills, 1)
        print(f'\n{kills} kills, {added} calls, {failed} reported as failed, {longest} ms at most to the next, seed {seed}', flush=True)
        self.end_local_cluster()


    def over(self, name):
        return self.job(name)['state'] in harness.TERMINAL_STATES

    def kill_one(self, name, rng):
        """A host, when all three are there; False when the job is over."""
        driver = int(self.read('driver'))
        victims = wait_until('three hosts', lambda: self.over(name) or
                             (lambda found: found if len(found) == 3 else None)([pid for pid in self.processes() if pid != driver and harness.alive(pid)]))
        if victims is True:
            return False
        os.kill(rng.choice(victims), signal.SIGKILL)
        return True

    def test_what_is_kept_is_never_lost_nor_counted_twice(self):
        """P4, P1: hosts are killed all the time, and every call ends well. GTRAIN_SOAK=1: five minutes."""
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        self.launch('keep', 4, 'keep', soak(300, 10), extra='elastic: {mode: in-place}\nrestart: {budget: 10000, before_first_step: 10000}\n')
        wait_until('all sums', lambda: os.path.exists(os.path.join(self.out, 'begun')))
        kills = 0
        while self.kill_one('keep', rng):
            kills += 1
        self.assertEqual(self.job('keep')['state'], 'SUCCEEDED', f'seed {seed}')
        added, wrong, longest = map(int, re.search(r'added (\d+) wrong (\d+) longest (\d+) ms', self.read('result')).groups())
        self.assertEqual(wrong, 0, f'seed {seed}')
        self.assertGreater(kills, 5)
        print(f'\n{kills} kills, {added} numbers added to each, {longest} ms at most for 48 calls and three more, seed {seed}', flush=True)
        self.end_local_cluster()

    def listed(self, *words, expect=0):
        """A rank that has no processor time for 5 s is a gap in the list and exit code 1: on a busy machine asked again."""
        def ask():
            done = self.gtrain('actors', 'observe', '--json', *words, expect=None)
            return json.loads(done.stdout) if done.returncode == expect else None
        return wait_until(f'gtrain actors to exit {expect}', ask)

    def test_people_see_what_actors_do(self):
        """Names, states, the thread of one that blocks, a rank that is stopped (B1), and events of what threw or was lost."""
        go = os.path.join(self.out, 'go')
        os.mkfifo(go, 0o666)
        os.chmod(go, 0o666)
        self.launch('observe', 2, 'observe', extra='elastic: {mode: in-place}\n')
        wait_until('it has begun', lambda: os.path.exists(os.path.join(self.out, 'begun')))
        by_name = lambda document: {actor['name'] or actor['class']: actor for actor in document['actors']}
        blocked = lambda: by_name(self.listed()).get('blocker', {}).get('waiting') == 3 or None
        wait_until('the calls to be there', blocked)
        actors = by_name(self.listed())
        self.assertEqual(set(actors), {'blocker', 'frail', 'Waiter'})
        blocker, frail, waiter = actors['blocker'], actors['frail'], actors['Waiter']
        self.assertEqual((blocker['class'], blocker['rank'], blocker['state'], blocker['method'], blocker['owner']),
                         ('Blocker', 1, 'running', 'BlockHere', 0))
        self.assertGreater(blocker['for_seconds'], 0)
        self.assertEqual((frail['rank'], frail['state'], frail['restarts'], frail['answered'], frail['kept']), (0, 'idle', 1, 2, False))
        self.assertEqual((waiter['state'], waiter['method'], waiter['thread']), ('awaiting', 'AwaitIt', 0))
        self.assertEqual([actor['name'] for actor in self.listed('--class', 'Blocker', '--rank', '0')['actors']], ['frail'])
        self.assertRegex(self.gtrain('actors', 'observe', '--class', 'Nobody', expect=1).stderr, 'no actor of class .?Nobody')
        few = self.listed('--limit', '1')
        self.assertEqual(([actor['name'] for actor in few['actors']], few['left_out']), (['blocker'], 2))
        text = self.gtrain('actors', 'observe', '--limit', '1').stdout
        self.assertRegex(text, r'\n1/\d+ +blocker +Blocker .* running BlockHere for ')
        self.assertRegex(text, r'\nrank 0 on \S+: 2 actors \(Blocker 1, Waiter 1\), 0 run, 1 await, 0 calls wait; 2 are not listed\n')
        self.look_at_threads(f'1/{blocker["number"]}', waiter)
        why = wait_until('the throw', lambda: (lambda text: text if 'frail' in text else None)(self.gtrain('why', 'observe').stdout))
        self.assertRegex(why, r'actors: rank 0 on \S+: Blocker frail threw: .*on purpose; it was made anew \(1 of 3 restarts within 1h\)')
        driver = int(self.read('driver'))
        victim = next(pid for pid in self.processes() if pid != driver)
        os.kill(victim, signal.SIGSTOP)
        try:
            document = self.listed(expect=1)
        finally:
            os.kill(victim, signal.SIGCONT)
        self.assertEqual(document['ranks'][1]['error'], 'rank 1 does not answer within 5 s: its process is stopped, or has no processor time')
        self.assertEqual(set(by_name(document)), {'frail', 'Waiter'})
        os.kill(victim, signal.SIGKILL)
        lost = lambda: re.search(r'Blocker blocker was lost with rank 1 \(\S+\); it was made anew on rank 1 \(\S+\)', self.gtrain('why', 'observe').stdout)
        wait_until('the loss', lost)
        pipe = os.open(go, os.O_RDWR)
        self.addCleanup(os.close, pipe)
        self.wait_for_state('observe', 'SUCCEEDED')
        self.assertIn('is over', self.gtrain('actors', 'observe', expect=1).stderr)
        self.end_local_cluster()

    def look_at_threads(self, address, waiter):
        for word in ('blocker', address):
            stack = self.gtrain('stack', 'observe', '--actor', word).stdout
            self.assertRegex(stack.splitlines()[0], rf'^{address} \(Blocker blocker\) on \S+: running BlockHere for ')
            self.assertEqual(len(re.findall(r'\bthread \d+ \(', stack)), 1, stack)
            if shutil.which('gdb') or shutil.which('eu-stack'):
                # A debugger has 8 s, which on a busy machine it may need to read its symbols.
                wait_until('its native frames', lambda: re.search(r'#\d+ .*Blocker::BlockHere',
                                                                  self.gtrain('stack', 'observe', '--actor', word).stdout))
        idle = self.gtrain('stack', 'observe', '--actor', 'frail').stdout
        self.assertRegex(idle, r': idle\n  no thread runs it\n')
        awaits = self.gtrain('stack', 'observe', '--actor', f'0/{waiter["number"]}').stdout
        self.assertRegex(awaits, r': awaiting AwaitIt for \S+\n  it has left the thread')
        missing = self.gtrain('stack', 'observe', '--actor', 'nobody', expect=1).stderr
        self.assertIn("job observe", missing)
        self.assertIn("has no actor 'nobody' now", missing)

    def test_a_job_without_actors_says_so(self):
        job = self.job_file('plain', 'name: plain\nrun: sleep 600\nranks: 2\nresources: {cpus: 1, oversubscribe: true}\n')
        self.gtrain('launch', '-d', job)
        self.wait_for_state('plain', 'RUNNING')
        self.assertRegex(self.gtrain('actors', 'plain').stdout, r'^job plain\S* has no actors: ')
        document = json.loads(self.gtrain('actors', 'plain', '--json').stdout)
        self.assertEqual([rank['has_actors'] for rank in document['ranks']], [False, False])
        self.gtrain('stop', '--now', 'plain')
        self.end_local_cluster()

    def test_actors_of_python_outlive_their_processes(self):
        """P4: a sum in a kept actor of Python, to which workers on all ranks add while ranks are killed."""
        program = os.path.join(self.dir, 'program.py')
        with open(program, 'w') as out:
            out.write(PYTHON_PROGRAM)
        job = self.job_file('python', f'''
name: python
run: /usr/bin/python3 {program} {self.out}
ranks: 4
env: {{PYTHONPATH: {os.path.join(SOURCE, 'python')}, GTRAIN_LIBRARY: {LIBRARY}}}
elastic: {{mode: in-place}}
restart: {{budget: 10000, before_first_step: 10000}}
resources: {{cpus: 1, oversubscribe: true}}
''')
        self.gtrain('launch', '-d', job)
        for kill in range(3):
            wait_until('all ranks and more sums', lambda: len(self.living()) == 4 and self.added() > 200 * (kill + 1))
            driver = int(self.read('driver'))
            os.kill(sorted(self.living() - {driver})[kill], signal.SIGKILL)
            wait_until('it to be dead', lambda: len(self.living()) < 4)
        with open(os.path.join(self.out, 'enough'), 'w'):
            pass
        self.wait_for_state('python', 'SUCCEEDED')
        sums, asked = map(int, self.read('result').split())
        self.assertEqual(sums, asked)
        self.end_local_cluster()

    def added(self):
        return int(self.read('added')) if os.path.exists(os.path.join(self.out, 'added')) else 0

    def living(self):
        return {pid for pid in self.processes() if harness.alive(pid)}


PYTHON_PROGRAM = '''
import asyncio, os, sys
import gtrain
from gtrain import actors

out = sys.argv[1]
open(f'{out}/process.{os.getpid()}', 'w').close()


@actors.actor
class Sum:
    def __init__(self):
        self.sum = 0

    def add(self, by):
        self.sum += by
        return self.sum

    @actors.readonly
    def total(self):
        return self.sum

    def get_state(self):
        return self.sum

    def set_state(self, state):
        self.sum = state


@actors.actor
class Host:
    def process(self):
        return os.getpid()


async def drive(cluster):
    with open(f'{out}/driver', 'w') as file:
        file.write(str(os.getpid()))
    total = await cluster.spawn(Sum, name='total', keep=True, restarts=1000)
    hosts = [await cluster.spawn(Host, restarts=1000) for _ in range(cluster.processes)]
    asked = 0
    while not os.path.exists(f'{out}/enough'):
        answers = await asyncio.gather(*[total.add(1) for _ in range(50)], hosts[asked // 50 % len(hosts)].process(),
                                       return_exceptions=True)
        asked += 50
        for answer in answers[:50]:  # what is kept is never lost; a host may be
            if isinstance(answer, Exception):
                raise answer
        with open(f'{out}/added.new', 'w') as file:
            file.write(str(asked))
        os.rename(f'{out}/added.new', f'{out}/added')
    found = await cluster.find(Sum, 'total')
    with open(f'{out}/result', 'w') as file:
        file.write(f'{await found.total()} {asked}')


sys.exit(actors.main(drive))
'''


if __name__ == '__main__':
    harness.main()

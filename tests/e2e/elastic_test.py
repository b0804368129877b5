"""`elastic: {mode: in-place}`: who survives keeps its process, whoever else dies."""
import glob
import json
import os
import random
import re
import shutil
import signal
import statistics
import unittest

import harness
from ckpt_test import LIBRARY, sanitized
from harness import SOURCE, soak, wait_until

RANK = os.path.join(SOURCE, 'tests', 'e2e', 'elastic_rank.py')
# elastic_rank.py, whose process writes a numbered line every few milliseconds, whatever it does.
TALKS = f'''
import os, runpy, threading

def talk():
    number = 0
    while True:
        number += 1
        os.write(1, b'line %d %d\\n' % (os.getpid(), number))
        threading.Event().wait(0.02)

threading.Thread(target=talk, daemon=True).start()
runpy.run_path({RANK!r}, run_name='__main__')
'''


@unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
class ElasticTest(harness.GtrainTest):
    def launch(self, name, ranks='4', mode='in-place', pause=0.01, extra='', *words, program=RANK):
        job = self.job_file(name, f'name: {name}\nrun: /usr/bin/python3 {program} {self.out} {pause} {" ".join(words)}\nranks: {ranks}\n'
                                  f'elastic: {{mode: {mode}}}\nrestart: {{budget: 10000}}\n'
                                  f'resources: {{cpus: 1, oversubscribe: true}}\n{extra}')
        self.gtrain('launch', '-d', job, GTRAIN_LIBRARY=LIBRARY, PYTHONPATH=os.path.join(SOURCE, 'python'))

    def lives(self):
        """pid -> [(generation, rank, ranks, step before, step after, seconds)]."""
        lives = {}
        for name in os.listdir(self.out):
            if name.startswith('life.'):
                lines = self.read(name).splitlines()
                lives[int(name[5:])] = [tuple(map(float, line.split())) for line in lines]
        return lives

    def members(self):
        """rank -> pid of the newest generation that anybody joined."""
        lives = self.lives()
        newest = max((life[-1][0] for life in lives.values() if life), default=0)
        return {int(life[-1][1]): pid for pid, life in lives.items() if life and life[-1][0] == newest}

    def step(self):
        return max((int(self.read(name) or 0) for name in os.listdir(self.out) if name.startswith('step.')), default=0)

    def await_members(self, count, but=()):
        return wait_until(f'{count} ranks, none of {sorted(but)}; have {self.members()}',
                          lambda: (lambda found: found if len(found) == count and not set(found.values()) & set(but) else None)(self.members()))

    def await_steps(self, more):
        wanted = self.step() + more
        wait_until(f'step {wanted}', lambda: self.step() >= wanted)

    def finish(self, name):
        open(os.path.join(self.out, 'go'), 'w').close()
        return self.wait_for_state(name, 'SUCCEEDED')

    def arenas(self, pid):
        """The memory that the process shares with other ranks, by inode."""
        with open(f'/proc/{pid}/maps') as maps:
            return {line.split()[4] for line in maps if 'memfd:gtrain-arena' in line}

    def test_survivors_keep_their_processes(self):
        """P1: any rank, or two at once, killed again and again. GTRAIN_SOAK=1: 1,000 times."""
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        self.launch('stays')
        kills, waits, memory = soak(1000, 12), [], []
        for kill in range(kills):
            before = self.await_members(4)
            self.await_steps(2)
            step = self.step()
            victims = rng.sample(sorted(before), 2 if kill % 5 == 4 else 1)
            for rank in victims:
                os.kill(before[rank], signal.SIGKILL)
            after = self.await_members(4, but=[before[rank] for rank in victims])
            memory += self.arenas(min(pid for rank, pid in before.items() if rank not in victims))
            for rank in before:
                if rank not in victims:
                    self.assertEqual(after[rank], before[rank], f'rank {rank} at kill {kill} of {victims}, seed {seed}')
            lives = self.lives()
            survivors = [lives[pid][-1] for rank, pid in after.items() if rank not in victims]
            self.assertTrue(all(life[4] >= step for life in survivors), (step, survivors, seed))
            self.assertTrue(all(life[4] - life[3] <= 1 for life in survivors), f'a step at most is behind: {survivors}')
            waits += [life[5] for life in survivors]
        # Mostly it is one for all: the keeper has what a dead rank had by when the next generation asks.
        self.assertLess(len(set(memory)), len(memory) / 4, f'generations use memory again: {memory}, seed {seed}')
        print(f'\n{kills} kills, seed {seed}: survivors were in the next generation after {statistics.median(waits) * 1000:.0f} ms in the '
              f'median, {max(waits) * 1000:.0f} ms at most', flush=True)
        self.finish('stays')
        self.end_local_cluster()

    def launch_four(self, name, extra=''):
        """A job of two to four ranks, with four."""
        self.launch(name, '{min: 2, max: 4}', 'in-place', 0.01, extra, '--late')
        self.await_members(2)
        self.gtrain('scale', '-n', '4', name, '--now')
        self.let_come()
        self.await_members(4)
        os.unlink(os.path.join(self.out, 'come'))
        self.await_steps(5)
        wait_until('a step of all four', lambda: self.job(name)['step'] and self.job(name)['world_size'] == 4 and
                   all(rank['step'] for rank in self.job(name)['ranks']))

    def let_come(self, word=''):
        with open(os.path.join(self.out, 'new'), 'w') as out:
            out.write(word)
        os.rename(os.path.join(self.out, 'new'), os.path.join(self.out, 'come'))

    def newcomers(self, name):
        return [rank for rank in self.job(name)['ranks'] if rank['rank'] >= self.job(name)['world_size']]

    def test_survivors_go_on_alone_and_who_comes_up_joins(self):
        """P1: nobody waits for a process to start; one that is on its way waits on when another rank is lost."""
        self.launch_four('alone')
        before = self.await_members(4)
        os.kill(before[0], signal.SIGKILL)
        three = self.await_members(3, but=[before[0]])
        self.assertLess(set(three.values()), set(before.values()), 'the survivors')
        self.await_steps(10)
        one = wait_until('a process beside them', lambda: [rank['pid'] for rank in self.newcomers('alone') if rank['pid']])
        self.assertEqual(self.newcomers('alone')[0]['state'], 'starting')
        os.kill(three[1], signal.SIGKILL)
        self.await_members(2, but=[before[0], three[1]])
        self.await_steps(10)
        two = wait_until('two processes beside them', lambda: (lambda pids: len(pids) == 2 and pids)(
            [rank['pid'] for rank in self.newcomers('alone') if rank['pid']]))
        self.assertIn(one[0], two, 'the first one was not started anew')
        self.let_come()
        after = self.await_members(4)
        self.assertLess(set(two), set(after.values()))
        self.await_steps(10)
        self.assertEqual(self.newcomers('alone'), [])
        self.finish('alone')
        self.end_local_cluster()

    def test_who_does_not_come_up_holds_nobody_up(self):
        self.launch_four('broken')
        before = self.await_members(4)
        os.kill(before[2], signal.SIGKILL)
        self.await_members(3, but=[before[2]])
        generation = self.job('broken')['generation']
        first = wait_until('a process beside them', lambda: [rank['pid'] for rank in self.newcomers('broken') if rank['pid']])
        self.let_come('this process does not come up')
        wait_until('its end', lambda: [rank['state'] for rank in self.newcomers('broken')] == ['exited'])
        self.await_steps(20)
        job = self.job('broken')
        self.assertEqual((job['state'], job['generation'], job['restarts']), ('RUNNING', generation, 1))
        events = self.read(glob.glob(os.path.join(self.dir, 'gtrain-runs', '*', 'events.jsonl'))[0])
        self.assertRegex(events, 'rank 3 on .*exit code 1; it came up to join the others')
        os.unlink(os.path.join(self.out, 'come'))
        wait_until('another try', lambda: [rank['pid'] for rank in self.newcomers('broken') if rank['pid'] not in (None, first[0])])
        self.let_come()
        self.await_members(4)
        self.finish('broken')

    def test_a_spare_takes_the_place_at_once(self):
        """P1: as many ranks as before, although nobody may come up; the spare that is killed itself ends nothing."""
        self.launch('spare', '3', 'in-place, spares: 1')
        self.await_members(3)
        spare = wait_until('a spare', lambda: [rank['pid'] for rank in self.newcomers('spare') if rank['state'] == 'waiting'])[0]
        before = self.await_members(3)
        os.kill(before[0], signal.SIGKILL)
        after = self.await_members(3, but=[before[0]])
        self.assertEqual(set(after.values()), {*before.values(), spare} - {before[0]})
        self.await_steps(10)
        another = wait_until('another spare', lambda: [rank['pid'] for rank in self.newcomers('spare') if rank['pid'] not in (None, spare)])[0]
        generation = self.job('spare')['generation']
        os.kill(another, signal.SIGKILL)
        wait_until('its end', lambda: [rank['state'] for rank in self.newcomers('spare')] == ['exited'])
        self.assertRegex(self.gtrain('why', 'spare').stdout, 'newcomer: rank 3 on .*; it was a spare')
        self.await_steps(10)
        self.assertEqual(self.job('spare')['generation'], generation)
        self.assertEqual(self.await_members(3), after)
        wait_until('a third one', lambda: [rank['pid'] for rank in self.newcomers('spare') if rank['state'] != 'exited'])
        self.assertEqual(set(self.await_members(3).values()), set(after.values()), 'nobody but the spare is another one')
        logs = self.gtrain('logs', 'spare', '--generation', str(generation), '--rank', '3')
        self.assertRegex(logs.stdout + logs.stderr, '.', 'as the words on its end say')
        self.finish('spare')
        logs = self.gtrain('logs', 'spare', '--rank', '3')
        self.assertRegex(logs.stdout + logs.stderr, '.', 'of who waited beside a job that is over')
        self.assertIn('has ranks 0 to 3', self.gtrain('logs', 'spare', '--rank', '4', expect=1).stderr)
        self.end_local_cluster()

    def test_a_spare_that_does_not_answer_is_not_counted_on(self):
        """P1: it came up and was stopped then. Who goes on does not wait for it, and it is no crash."""
        self.launch('silent', '{min: 2, max: 3}', 'in-place, spares: 1')
        self.await_members(2)
        self.gtrain('scale', '-n', '3', 'silent', '--now')
        before = self.await_members(3)
        spare = wait_until('a spare', lambda: [rank['pid'] for rank in self.newcomers('silent') if rank['state'] == 'waiting'])[0]
        os.kill(spare, signal.SIGSTOP)
        wait_until('its stop', lambda: b') T' in harness.read_proc(spare, 'stat'))
        os.kill(before[0], signal.SIGKILL)
        two = self.await_members(2, but=[before[0], spare])
        self.assertLess(set(two.values()), set(before.values()), 'the survivors')
        wait_until('the end of the spare', lambda: not harness.alive(spare))
        after = self.await_members(3, but=[before[0], spare])
        self.assertLess(set(two.values()), set(after.values()))
        self.await_steps(10)
        self.assertEqual(self.job('silent')['restarts'], 1, 'the rank that was killed')
        events = self.read(glob.glob(os.path.join(self.dir, 'gtrain-runs', '*', 'events.jsonl'))[0])
        self.assertNotIn('its program hangs', events)
        self.assertRegex(self.gtrain('why', 'silent').stdout, r'newcomer: rank \d on \S+, .*, did not answer when generation \d+ ended \(it stood still')
        self.finish('silent')
        self.end_local_cluster()

    def test_a_rank_that_does_not_answer_is_not_replaced_in_silence(self):
        """P1: it was stopped beside another one that was killed. Its process is ended, and that is said."""
        self.launch('stopped', '{min: 1, max: 3}', 'in-place, spares: 1')
        self.await_members(2)
        self.gtrain('scale', '-n', '3', 'stopped', '--now')
        before = self.await_members(3)
        os.kill(before[1], signal.SIGSTOP)
        wait_until('its stop', lambda: b') T' in harness.read_proc(before[1], 'stat'))
        os.kill(before[0], signal.SIGKILL)
        self.await_members(3, but=[before[0], before[1]])
        self.assertRegex(self.gtrain('why', 'stopped').stdout, r'warning: rank 1 on \S+ did not answer when generation \d+ ended \(it stood still')
        self.finish('stopped')
        self.end_local_cluster()

    def test_who_follows_the_logs_misses_no_line(self):
        """P1: what ranks, and those that come up beside them, write until their generation is over and behind that."""
        program = os.path.join(self.dir, 'talks.py')
        with open(program, 'w') as out:
            out.write(TALKS)
        self.launch('talks', '3', 'in-place, spares: 1', program=program)
        self.await_members(3)
        spare = lambda: [rank['pid'] for rank in self.newcomers('talks') if rank['state'] == 'waiting']
        wait_until('a spare', spare)
        first = self.job('talks')['generation']
        followers = [self.start('logs', '-f', 'talks'), self.start('attach', 'talks')]
        for follower in followers:
            follower.wait_for(r'line \d+ \d+')
        for _ in range(3):
            before, waits = self.await_members(3), wait_until('a spare', spare)
            os.kill(before[0], signal.SIGKILL)
            after = self.await_members(3, but=[before[0]])
            self.assertIn(waits[0], after.values())
            self.await_steps(5)
        self.finish('talks')
        logs = lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', '*', 'logs', 'generation-*', 'rank-*.out'))
        for follower in followers:
            self.assertEqual(follower.wait(), 0)
            written = [line for path in logs() if int(re.search(r'generation-(\d+)', path)[1]) >= first
                       for line in re.findall(r'line \d+ \d+', self.read(path))]
            shown = re.findall(r'line \d+ \d+', follower.output())
            self.assertTrue(written)
            self.assertEqual(sorted(set(written) - set(shown)), [], f'lines that {follower.argv[1]} did not show')
            self.assertEqual(len(shown), len(written), f'lines that {follower.argv[1]} showed twice')
        for generation in range(first + 1, first + 4):
            self.assertIn(f'gtrain: generation {generation}\n', followers[0].output())
        self.end_local_cluster()

    def test_who_follows_the_logs_outlives_agent_and_head(self):
        """P1, H1: the next head does not remember where earlier generations ran; their logs lie here, and later ones are followed."""
        program = os.path.join(self.dir, 'talks.py')
        with open(program, 'w') as out:
            out.write(TALKS)
        self.launch('talks', '3', 'in-place, spares: 1', program=program)
        before = self.await_members(3)
        wait_until('a spare', lambda: [rank['pid'] for rank in self.newcomers('talks') if rank['state'] == 'waiting'])
        first = self.job('talks')['generation']
        follower = self.start('logs', '-f', 'talks')
        follower.wait_for(r'line \d+ \d+')
        os.kill(follower.popen.pid, signal.SIGSTOP)  # the newest generation that it knows will be a forgotten one, and the next as well
        os.kill(self.daemons('agent')[0], signal.SIGKILL)
        os.kill(before[0], signal.SIGKILL)
        between = self.await_members(3, but=[before[0]])
        os.kill(self.daemons('head')[0], signal.SIGKILL)
        os.kill(between[0], signal.SIGKILL)
        self.await_members(3, but=[before[0], between[0]])
        wait_until('the next head', lambda: (self.job('talks') or {}).get('generation', 0) >= first + 2)
        os.kill(follower.popen.pid, signal.SIGCONT)
        self.await_steps(10)
        self.finish('talks')
        self.assertEqual(follower.wait(), 0, follower.output()[-1000:])
        logs = glob.glob(os.path.join(self.dir, 'gtrain-runs', '*', 'logs', 'generation-*', 'rank-*.out'))
        written = [line for path in logs if int(re.search(r'generation-(\d+)', path)[1]) >= first
                   for line in re.findall(r'line \d+ \d+', self.read(path))]
        shown = re.findall(r'line \d+ \d+', follower.output())
        self.assertEqual(sorted(set(written) - set(shown)), [], 'lines that were not shown')
        self.assertEqual(len(shown), len(written), 'lines that were shown twice')
        self.assertNotIn('is not shown', follower.output())
        self.end_local_cluster()

    def test_spares_of_a_program_that_does_not_stay_disturb_nobody(self):
        self.launch('plain', '2', 'in-place, spares: 1', 0.01, '', '--restart')
        self.await_members(2)
        self.await_steps(50)
        self.assertEqual((self.job('plain')['generation'], self.newcomers('plain')), (1, []))
        self.finish('plain')

    def test_a_stop_does_not_wait_for_who_waits(self):
        self.launch_four('halted', 'stop_grace: 10m\n')
        before = self.await_members(4)
        os.kill(before[2], signal.SIGKILL)
        self.await_members(3, but=[before[2]])
        pids = wait_until('a process beside them', lambda: [rank['pid'] for rank in self.newcomers('halted') if rank['pid']])
        self.gtrain('stop', 'halted')
        self.wait_for_state('halted', 'CANCELLED')
        wait_until('nobody is left', lambda: not any(map(harness.alive, [*before.values(), *pids])))

    def test_a_job_that_restarts_keeps_nobody(self):
        self.launch('again', mode='restart')
        before = self.await_members(4)
        os.kill(before[1], signal.SIGKILL)
        self.await_members(4, but=before.values())
        self.finish('again')

    def test_who_did_not_say_that_it_stays_is_started_anew(self):
        self.launch('leaves', '4', 'in-place', 0.01, '', '--restart')
        before = self.await_members(4)
        os.kill(before[1], signal.SIGKILL)
        self.await_members(4, but=before.values())
        self.finish('leaves')

    def test_a_stop_ends_them(self):
        self.launch('ends')
        before = self.await_members(4)
        os.kill(before[3], signal.SIGKILL)
        after = self.await_members(4, but=[before[3]])
        self.gtrain('stop', 'ends')
        self.wait_for_state('ends', 'CANCELLED')
        self.end_local_cluster()
        self.assertFalse([pid for pid in after.values() if harness.alive(pid)])

    def test_the_other_ranks_of_a_keeper_that_died_are_started_anew(self):
        """P4: what the keeper kept is gone with it; the job goes on."""
        self.launch('keeperless')
        before = self.await_members(4)
        os.kill(self.daemons('keeper')[0], signal.SIGKILL)
        self.await_members(4, but=before.values())
        self.finish('keeperless')

    def test_an_agent_or_a_head_that_dies_costs_nobody_its_process(self):
        """H1, P4: killed beside a rank, before and after the head has heard of that."""
        self.launch('daemons')
        for turn, verb in enumerate(['agent', 'head', 'agent', 'head']):
            before = self.await_members(4)
            self.await_steps(2)
            daemon = self.daemons(verb)[0]
            if turn < 2:
                os.kill(daemon, signal.SIGKILL)
                os.kill(before[2], signal.SIGKILL)
            else:
                os.kill(before[2], signal.SIGKILL)
                os.kill(daemon, signal.SIGKILL)
            after = self.await_members(4, but=[before[2]])
            kept = [rank for rank in before if after[rank] == before[rank]]
            print(f'\n{verb} killed {"before" if turn < 2 else "after"} a rank: ranks {kept} kept their processes', flush=True)
            self.await_steps(2)
        self.finish('daemons')



LINEAR = os.path.join(os.path.dirname(harness.GTRAIN), '..', 'tests', 'e2e_elastic_linear')


@unittest.skipUnless(os.path.exists(LINEAR), 'e2e_elastic_linear is not built')
class ElasticRunTest(harness.GtrainTest):
    """A program of `gtrain::Main` and `Elastic::Train`, whose ranks die at any moment."""
    SAMPLES, BATCH, EPOCHS = soak(60000, 3000), 60, 2

    def launch(self, name, ranks='4', mode='in-place', pause=10, extra='', samples=SAMPLES, weights=1000):
        job = self.job_file(name, f'name: {name}\nrun: {LINEAR} {self.out} {samples} {self.BATCH} {pause} {weights}\nranks: {ranks}\n'
                                  f'elastic: {{mode: {mode}}}\nrestart: {{budget: 10000}}\n'
                                  f'resources: {{cpus: 1, oversubscribe: true}}\n{extra}')
        self.gtrain('launch', '-d', job)

    def trained(self):
        """pid -> [(generation, step, samples)]."""
        trained = {}
        for name in os.listdir(self.out):
            if name.startswith('trained.'):
                lines = [line.split() for line in self.read(name).splitlines()]
                trained[int(name[8:])] = [(int(line[0]), int(line[1]), list(map(int, line[3:]))) for line in lines]
        return trained

    def step(self):
        return max((lines[-1][1] for lines in self.trained().values() if lines), default=0)

    def living(self):
        return [pid for pid, lines in self.trained().items() if harness.alive(pid)]

    def weights(self):
        return [tuple(map(float, self.read(name).split())) for name in os.listdir(self.out) if name.startswith('weights.')]

    def check_ledger(self, killed, least=4):
        """Each sample of an epoch once; no process made a step twice, and who was there made every step up to its end."""
        by_step = {}
        for pid, lines in self.trained().items():
            steps = [step for _, step, _ in lines]
            generations = [generation for generation, _, _ in lines]
            self.assertEqual(generations, sorted(generations), f'process {pid}')
            self.assertEqual(steps, list(range(steps[0], steps[0] + len(steps))) if steps else [], f'process {pid}')
            for _, step, samples in lines:
                by_step.setdefault(step, []).extend(samples)
        steps = self.SAMPLES * self.EPOCHS // self.BATCH
        self.assertEqual(sorted(by_step), list(range(1, steps + 1)))
        a_epoch = steps // self.EPOCHS
        # A rank that died between the halves of a step, or while it wrote, may lack its line; nobody else does.
        missing = 0
        for epoch in range(self.EPOCHS):
            counts = {}
            for step in range(epoch * a_epoch + 1, (epoch + 1) * a_epoch + 1):
                for sample in by_step[step]:
                    counts[sample] = counts.get(sample, 0) + 1
            self.assertEqual(max(counts.values()), 1, f'a sample of epoch {epoch} was trained twice')
            missing += self.SAMPLES - len(counts)
        self.assertLessEqual(missing, killed * self.BATCH / least + killed)

    def run_with_kills(self, name, kills, scale=None, **options):
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        self.launch(name, **options)
        if scale:
            self.gtrain('scale', '-n', str(scale), name, '--now')
            wait_until(f'{scale} ranks that step', lambda: (lambda ranks: len(ranks) == scale and all(rank['step'] for rank in ranks))(
                self.job(name)['ranks']))
        killed = 0
        while killed < kills:
            at = self.step()
            wait_until(f'steps after {at}, seed {seed}', lambda: self.step() >= at + 2 or self.weights())
            if self.weights():
                break
            victim = rng.choice(sorted(self.living()))
            os.kill(victim, signal.SIGKILL)
            killed += 1
        self.wait_for_state(name, 'SUCCEEDED')
        return killed

    def test_no_step_and_no_sample_is_lost(self):
        """P1: ranks die between any two instructions of a step."""
        killed = self.run_with_kills('linear', soak(200, 10), **({'pause': 20} if harness.SOAK else {}))
        self.check_ledger(killed)
        weights = self.weights()
        self.assertEqual(len(weights), 4)
        self.assertEqual(len(set(weights)), 1, 'bit for bit the same on all ranks')
        self.assertAlmostEqual(weights[0][0], 3, 4)
        self.assertAlmostEqual(weights[0][1], -2, 4)
        status = self.job('linear')
        self.assertGreaterEqual(killed, 5)
        newest = {lines[-1][0] for pid, lines in self.trained().items() if f'weights.{pid}' in os.listdir(self.out)}
        self.assertEqual(newest, {status['generation']}, 'a process knows in which generation it is')
        print(f'\n{killed} kills; {status.get("restarts")} charged', flush=True)

    def test_compression_lives_through_the_loss_of_ranks(self):
        """P1, N7: gradients go as top-k, whose warm-up and residuals survivors keep and newcomers are told of."""
        self.launch('sparse', ranks='{min: 2, max: 4}', pause=20, weights=20000, samples=15000,
                    extra='comm: {compression: {codec: topk, density: 0.01, warmup: 10}}\n')
        self.gtrain('scale', '-n', '4', 'sparse', '--now')
        for _ in range(3):
            wait_until('4 ranks that step', lambda: (lambda ranks: len(ranks) == 4 and all(rank['step'] for rank in ranks))(
                self.job('sparse')['ranks']))
            os.kill(sorted(self.living())[0], signal.SIGKILL)
            wait_until('one that is new among those that were there',
                       lambda: self.job('sparse')['compression'].startswith('3 of 4 ranks go on with what was held back'))
        self.wait_for_state('sparse', 'SUCCEEDED')
        self.assertIn('given out once', self.gtrain('data', 'audit', 'sparse').stdout)
        weights = self.weights()
        self.assertGreaterEqual(len(weights), 3)
        self.assertEqual(len(set(weights)), 1, 'bit for bit the same on all ranks')
        self.assertAlmostEqual(weights[0][0], 3, 3)
        self.assertAlmostEqual(weights[0][1], -2, 3)

    def test_no_step_and_no_sample_is_lost_where_survivors_go_on_alone(self):
        """P1, N7: generations of two, three and four ranks, in which processes come up beside the others and join."""
        killed = self.run_with_kills('shrinks', soak(200, 10), scale=4, ranks='{min: 2, max: 4}', pause=20)
        self.check_ledger(killed, least=2)
        weights = self.weights()
        self.assertGreaterEqual(len(weights), 2)
        self.assertEqual(len(set(weights)), 1, 'bit for bit the same on all ranks')
        self.assertAlmostEqual(weights[0][0], 3, 4)
        self.assertAlmostEqual(weights[0][1], -2, 4)
        self.assertGreaterEqual(killed, 5)
        sizes = [len({tuple(line[2]) for lines in self.trained().values() for line in lines if line[1] == step})
                 for step in range(1, self.step() + 1)]
        self.assertIn(3, sizes, 'three went on alone')

    def test_a_rank_that_leaves_the_others_is_named(self):
        """L1: one ends with code 0 in the middle of training: nobody takes its place, and the others say so instead of waiting for it."""
        leave = os.path.join(self.out, 'leave')
        self.launch('leaves', ranks='3', pause=20, extra='', weights=2)
        wait_until('steps', lambda: self.step() >= 5)
        with open(leave, 'w') as out:
            out.write(str(min(self.living())))
        logs = os.path.join(self.dir, 'gtrain-runs', 'leaves-*', 'logs', 'generation-1', '*.err')
        wait_until('what the others say', lambda: re.search('training cannot go on, and no rank was lost: .*ended with exit code 0'
                                                            r'.*says so with run\.stop\(\) \(Python\)',
                                                            ''.join(self.read(path) for path in glob.glob(logs))))
        self.wait_for_state('leaves', 'SUCCEEDED')
        self.assertIn(self.job('leaves')['restarts'], (1, 2), 'the others end by themselves, on a busy machine one after the other')
        self.assertRegex(self.job('leaves')['first_fault']['message'], r'^rank \d on \S+: .*; rank \d had ended with exit code 0 while it still ran')

    def test_nobody_waits_for_a_program_that_loads(self):
        """P1: who comes up beside the others has its place when it is ready to train, and not when it has joined."""
        self.launch('loads', ranks='{min: 2, max: 3}', pause=20)
        self.gtrain('scale', '-n', '3', 'loads', '--now')
        wait_until('3 ranks that step', lambda: (lambda ranks: len(ranks) == 3 and all(rank['step'] for rank in ranks))(self.job('loads')['ranks']))
        hold = os.path.join(self.out, 'hold')
        open(hold, 'w').close()
        os.kill(self.living()[0], signal.SIGKILL)
        held = wait_until('one that loads', lambda: [name for name in os.listdir(self.out) if name.startswith('held.')])
        newcomer = int(held[0][5:])
        at = self.step()
        wait_until(f'20 steps after {at}', lambda: self.step() >= at + 20)
        job = self.job('loads')
        self.assertEqual(job['world_size'], 2)
        self.assertEqual([(rank['pid'], rank['state']) for rank in job['ranks'][2:]], [(newcomer, 'starting')])
        os.unlink(hold)
        wait_until('its steps', lambda: self.trained().get(newcomer))
        self.wait_for_state('loads', 'SUCCEEDED')
        self.check_ledger(1, least=2)
        self.assertEqual(len(set(self.weights())), 1, 'bit for bit the same on all ranks')

    def test_an_edited_program_does_not_end_the_others(self):
        """P1: what comes up in the place of a lost rank is another program now, and fails as soon as it is a member; the others finish alone."""
        edited = os.path.join(self.out, 'edited')
        program = os.path.join(self.dir, 'program.sh')
        with open(program, 'w') as out:
            out.write(f'batch={self.BATCH}\n[ -e {edited} ] && batch={2 * self.BATCH}\n'
                      f'exec {LINEAR} {self.out} 60000000 $batch 20 2\n')
        job = self.job_file('edited', f'name: edited\nrun: /bin/sh {program}\nranks: {{min: 2, max: 3}}\nelastic: {{mode: in-place}}\n'
                                      'resources: {cpus: 1, oversubscribe: true}\n')
        self.gtrain('launch', '-d', job)
        wait_until('two ranks that step', lambda: len(self.living()) >= 2)
        self.gtrain('scale', '-n', '3', 'edited', '--now')
        wait_until('3 ranks that step', lambda: (lambda ranks: len(ranks) == 3 and all(rank['step'] for rank in ranks))(self.job('edited')['ranks']))
        before = self.living()
        open(edited, 'w').close()
        os.kill(before[0], signal.SIGKILL)
        wait_until('to give it up', lambda: 'does not grow by itself for now: with 3 ranks it failed' in self.job('edited')['reason'])
        at = self.step()
        wait_until(f'20 steps after {at}', lambda: self.step() >= at + 20)
        self.assertEqual(sorted(pid for pid in self.living()), sorted(before[1:]), 'the others kept their processes')
        self.assertRegex(self.gtrain('why', 'edited').stdout,
                         r'why it does not grow: it goes back to 2 ranks: rank . on .*exit code 1\n(  .*\n)+  all that it wrote: gtrain logs edited-1 ')
        self.gtrain('stop', 'edited', '--now')

    def test_who_is_left_saves_before_the_job_fails(self):
        """P1: what comes up in the place of a lost rank fails, and the job needs it; what the others know is saved before they are ended."""
        edited = os.path.join(self.out, 'edited')
        program = os.path.join(self.dir, 'program.sh')
        with open(program, 'w') as out:
            out.write(f'[ -e {edited} ] && exit 7\nexec {LINEAR} {self.out} 60000000 {self.BATCH} 20 2\n')
        job = self.job_file('fails', f'name: fails\nrun: /bin/sh {program}\nranks: 3\nelastic: {{mode: in-place}}\n'
                                     f'resources: {{cpus: 1, oversubscribe: true}}\ncheckpoint: {{uri: {self.dir}/ckpt, every: 1h}}\n')
        self.gtrain('launch', '-d', job)
        wait_until('3 ranks that step', lambda: (lambda ranks: len(ranks) == 3 and all((rank['step'] or 0) > 20 for rank in ranks))(
            (self.job('fails') or {}).get('ranks', [])))
        open(edited, 'w').close()
        os.kill(self.living()[0], signal.SIGKILL)
        self.wait_for_state('fails', 'FAILED')
        last = self.step()
        self.assertIn('exit code 7', self.job('fails')['reason'])
        self.assertEqual(self.job('fails')['exit_code'], 7)
        self.assertRegex(self.gtrain('ckpt', 'ls', f'{self.dir}/ckpt').stdout, rf'\b{last}\b', 'all that was trained')
        wait_until('nobody is left', lambda: not self.living())

    def test_the_job_file_says_how_large_a_batch_is(self):
        self.BATCH = 0
        self.launch('batch', mode='in-place, global_batch: 60')
        self.wait_for_state('batch', 'SUCCEEDED')
        self.BATCH = 60
        self.check_ledger(0)

    def test_the_batch_of_the_program_holds_and_rank_0_says_so(self):
        self.launch('two', mode='in-place, global_batch: 30')
        self.wait_for_state('two', 'SUCCEEDED')
        self.check_ledger(0)
        said = [line for line in self.gtrain('logs', 'two').stdout.splitlines() if 'global_batch' in line]
        self.assertEqual(len(said), 1, said)
        self.assertIn('gtrain: samples: the job file says `elastic: {global_batch: 30}` and the program says 60: batches have 60 samples', said[0])

    def test_ranks_that_die_together_are_one_fault_that_names_them(self):
        """P1: the keeper finds both ends at once; whichever the head hears first, the other one is named with it."""
        self.launch('pair', samples=60 * 1000000)
        wait_until('steps of all four', lambda: (lambda ranks: len(ranks) == 4 and all(rank['step'] for rank in ranks))(
            self.job('pair')['ranks']))
        pids = {rank['rank']: rank['pid'] for rank in self.job('pair')['ranks']}
        keeper = self.daemons('keeper')[0]
        os.kill(keeper, signal.SIGSTOP)
        for rank in (1, 2):
            os.kill(pids[rank], signal.SIGKILL)
        # A process is a zombie when its first thread has ended, and its parent hears of it when the last one has.
        wait_until('the end of all their threads', lambda: all(
            not harness.alive(pids[rank]) and len(os.listdir(f'/proc/{pids[rank]}/task')) == 1 for rank in (1, 2)))
        os.kill(keeper, signal.SIGCONT)
        wait_until('the next generation', lambda: self.job('pair')['generation'] > 1 and self.job('pair')['state'] == 'RUNNING')
        why = json.loads(self.gtrain('why', 'pair', '--json').stdout)['first_fault']['message']
        self.assertRegex(why, r'^rank ([12]) on \S+: killed by signal 9 \(KILL\).*; 1 more rank ended with it: (?!\1)[12]$')
        self.assertIn(why, self.gtrain('why', 'pair').stdout)
        self.gtrain('stop', 'pair', '--now')

    def test_everybody_dies_and_the_checkpoint_goes_on(self):
        """In place as far as memory goes, then the newest checkpoint: with the keeper all processes of the machine are gone."""
        self.launch('saved', extra=f'checkpoint: {{uri: {self.dir}/ckpt, every: 10 steps}}\n')
        wait_until('step 30', lambda: self.step() >= 30)
        os.kill(self.living()[0], signal.SIGKILL)
        at = self.step()
        wait_until('to step on', lambda: self.step() >= at + 20)
        before = self.trained()
        os.kill(self.daemons('keeper')[0], signal.SIGKILL)
        self.wait_for_state('saved', 'SUCCEEDED')
        after = {pid: lines for pid, lines in self.trained().items() if pid not in before}
        self.assertEqual(len(after), 4)
        self.assertGreater(min(lines[0][1] for lines in after.values()), 10, 'not from the beginning')
        weights = self.weights()
        self.assertEqual(len(set(weights)), 1)
        self.assertAlmostEqual(weights[0][0], 3, 4)

    def test_a_directory_that_was_removed_and_is_made_again(self):
        """S7: saves go on within the generation, and are not begun in what gtrain itself would have made there."""
        uri = f'{self.dir}/ckpt'
        self.launch('again', ranks='3', samples=600000, extra=f'checkpoint: {{uri: {uri}, every: 20 steps}}\n')
        wait_until('a checkpoint', lambda: self.job('again')['last_checkpoint'])
        # What was being written while it went may have made folders there.
        wait_until('status to say how to go on', lambda: shutil.rmtree(uri, ignore_errors=True) or f'{uri} is gone' in self.job('again')['storage'])
        self.assertFalse(os.path.exists(uri))
        os.mkdir(uri)
        at = self.step()
        wait_until('a save', lambda: (self.job('again')['last_checkpoint'] or {'step': 0})['step'] > at, 100)
        status = wait_until('status to take it back', lambda: (lambda job: job if not job['saves'] + job['storage'] else None)(self.job('again')))
        self.assertEqual(status['generation'], 1)
        self.assertEqual(len(self.living()), 3)
        self.gtrain('stop', 'again')
        self.wait_for_state('again', 'CANCELLED')
        self.assertRegex(self.gtrain('ckpt', 'ls', uri).stdout, rf'\b{self.step()}\b')

    def test_an_end_that_cannot_be_saved_is_said(self):
        """S7: all steps are made and the directory is away: what is missing, for how long it is tried, what a stop costs."""
        uri = f'{self.dir}/ckpt'
        self.launch('end', ranks='3', samples=6000, pause=20, extra=f'checkpoint: {{uri: {uri}, every: 50 steps}}\n')
        wait_until('a checkpoint', lambda: self.job('end')['last_checkpoint'])
        last = 6000 * self.EPOCHS // self.BATCH
        said = rf'all {last} steps are made, and step {last} is not saved: the newest checkpoint is of step \d+; only the last save is missing and is tried for 3\dm more'
        wait_until(f'status to say: {said}', lambda: shutil.rmtree(uri, ignore_errors=True) or re.search(said, self.job('end')['saves']))
        for verb in ('status', 'why'):
            self.assertRegex(self.gtrain(verb, 'end').stdout, said)
        self.gtrain('stop', 'end')
        self.wait_for_state('end', 'CANCELLED')
        unsaved = rf'step {last} is not saved: the newest checkpoint is of step \d+; the save is tried until the grace of the stop is over'
        self.assertRegex(self.job('end')['saves'], unsaved)
        self.assertRegex(self.gtrain('logs', 'end', '--rank', '0').stdout, unsaved)
        self.assertFalse(os.path.exists(uri))

    def test_training_that_begins_anew_says_so(self):
        """P4: all processes are gone, and nothing was saved."""
        self.launch('anew', samples=600000)
        wait_until('step 10', lambda: self.step() >= 10)
        before = set(self.trained())
        os.kill(self.daemons('keeper')[0], signal.SIGKILL)
        after = wait_until('other processes that step', lambda: {pid: lines for pid, lines in self.trained().items() if pid not in before and lines})
        self.assertEqual({lines[0][1] for lines in after.values()}, {1})
        wait_until('status to say so', lambda: 'the job file has no `checkpoint:` that keeps it, so training begins anew' in self.job('anew')['restore'])
        self.assertIn('training begins anew', self.gtrain('status', 'anew').stdout)
        self.gtrain('stop', 'anew', '--now')

    def test_a_stop_is_the_same_step_for_all(self):
        self.launch('stopped', samples=600000)
        wait_until('step 10', lambda: self.step() >= 10)
        self.gtrain('stop', 'stopped')
        self.wait_for_state('stopped', 'CANCELLED')
        ends = {lines[-1][1] for lines in self.trained().values()}
        self.assertEqual(len(ends), 1, ends)

    def test_a_stop_beside_a_kill_saves_what_is_there(self):
        """The process in the place of the lost rank is not ended before it has joined: all are needed for a save."""
        self.launch('both', samples=600000, extra=f'checkpoint: {{uri: {self.dir}/ckpt, every: 500 steps}}\n')
        wait_until('step 30', lambda: self.step() >= 30)
        os.kill(self.living()[0], signal.SIGKILL)
        wait_until('the next generation', lambda: self.job('both')['generation'] == 2)  # between two, a stop saves nothing
        self.gtrain('stop', 'both')
        self.wait_for_state('both', 'CANCELLED')
        last = self.step()
        self.assertGreaterEqual(last, 30)
        saved = self.gtrain('ckpt', 'ls', f'{self.dir}/ckpt').stdout
        self.assertRegex(saved, rf'\b{last}\b', saved)

    def test_who_waits_for_room_outlives_agent_and_head(self):
        """H1, P4, N7: below `min` the processes that are left keep the state, whoever of gtrain dies meanwhile."""
        self.launch('waits', samples=600000)
        host = os.uname().nodename
        for verb in ('head', 'agent'):
            at = self.step()
            wait_until(f'steps after {at}', lambda: self.step() >= at + 20 and len(self.living()) == 4)
            before = self.living()
            self.gtrain('node', 'drain', host, '--deadline', '1s', '--reason', 'test')
            seen = self.wait_for_state('waits', 'WAITING')
            self.assertIn('keep its state', seen['reason'])
            os.kill(self.daemons(verb)[0], signal.SIGKILL)
            wait_until(f'another {verb}', lambda: len(self.daemons(verb)) == 1)
            self.assertTrue(all(harness.alive(pid) for pid in before), 'they wait')
            self.gtrain('node', 'undrain', host)
            at = self.step()
            wait_until(f'steps after {at}', lambda: self.step() >= at + 5)
            self.assertEqual(sorted(self.living()), sorted(before), f'the same processes after the death of the {verb}')
        self.gtrain('stop', 'waits', '--now')
        self.wait_for_state('waits', 'CANCELLED')
        wait_until('nobody is left', lambda: not self.living())

    def test_the_same_program_in_a_job_that_restarts(self):
        self.launch('restarts', mode='restart', extra=f'checkpoint: {{uri: {self.dir}/ckpt, every: 10 steps}}\n')
        wait_until('step 25', lambda: self.step() >= 25)
        os.kill(self.living()[0], signal.SIGKILL)
        self.wait_for_state('restarts', 'SUCCEEDED')
        weights = self.weights()
        self.assertEqual((len(weights), len(set(weights))), (4, 1))
        self.assertAlmostEqual(weights[0][0], 3, 4)


if __name__ == '__main__':
    harness.main()

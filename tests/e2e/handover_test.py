"""The notice of each cloud, to a machine of a job in place: the job has gone on without the machine before the machine goes.

With GTRAIN_SOAK=1 100 notices of each cloud, with the times that they really give. What takes the time is the notice itself: where a job has
no other machine it stays until shortly before the end. So there are several jobs beside each other, each with a machine of its own that leaves
and comes back, and two places on a machine that all share and that stays."""
import glob
import json
import os
import signal
import statistics
import time
import unittest

import clouds
import harness
from cluster import ClusterTest
from harness import soak, wait_until

LINEAR = os.path.join(harness.BUILD, 'tests', 'e2e_elastic_linear')
NOTICES = soak(100, 2)  # of each cloud
BATCH = 12
STAYS = 0               # the number of the machine that stays


class Trained:
    """What the processes of one job have written of their updates, read as it grows. Steps of a process: (generation, step, nanoseconds,
    samples). In a soak their numbers come around: then a file begins anew, and the process before has a number below zero."""

    def __init__(self, folder):
        self.folder, self.files, self.steps = folder, {}, {}
        os.makedirs(folder)

    def look(self):
        for name in os.listdir(self.folder):
            if name.startswith('trained.') and int(name[8:]) not in self.files:
                self.files[int(name[8:])] = open(os.path.join(self.folder, name), 'rb')
        for pid, file in self.files.items():
            if os.fstat(file.fileno()).st_size < file.tell():
                self.steps[-len(self.steps) - 1] = self.steps.pop(pid)
                file.seek(0)
            at, text = file.tell(), file.read()
            whole = text[:text.rfind(b'\n') + 1]
            file.seek(at + len(whole))
            lines = [line.split() for line in whole.decode().splitlines()]
            self.steps.setdefault(pid, []).extend((*map(int, line[:3]), tuple(line[3:])) for line in lines)
        return self.steps

    def close(self):
        for file in self.files.values():
            file.close()

    def generation(self):
        return max((steps[-1][0] for steps in self.steps.values() if steps), default=0)

    def members(self, least):
        """Processes with that many steps in the newest generation, if all that are in it have."""
        newest = self.generation()
        counts = {pid: sum(step[0] == newest for step in steps[-least:]) for pid, steps in self.steps.items()}
        there = {pid for pid, count in counts.items() if count}
        return there if all(counts[pid] >= least for pid in there) else set()


class Lane:
    """One job, its machine that leaves, and what became of each notice."""

    def __init__(self, cloud, number, machine, notices, folder):
        self.cloud, self.machine, self.notices = cloud, machine, notices
        self.name = f'{cloud.name}{number}'
        self.trained = Trained(os.path.join(folder, self.name))
        self.took, self.left, self.pauses, self.late, self.stayed, self.again = [], [], [], [], set(), 0


@unittest.skipUnless(os.path.exists(LINEAR), 'e2e_elastic_linear is not built')
class HandOverTest(ClusterTest):
    # So many jobs of each cloud that all clouds take about as long: a notice of AWS is used for 107 s.
    lanes_of = soak({'aws': 17, 'gcp': 2, 'azure': 5}, {'aws': 1, 'gcp': 1, 'azure': 1})
    agent_count = 1 + sum(lanes_of.values())

    def setUp(self):
        self.lanes = []
        super().setUp()

    def make_lanes(self):
        for name, count in self.lanes_of.items():
            for number in range(count):
                notices = NOTICES // count + (number < NOTICES % count)
                cloud = clouds.CLOUDS[name]()
                self.addCleanup(cloud.close)
                self.lanes.append(Lane(cloud, number, len(self.lanes) + 1, notices, self.out))
                self.addCleanup(self.lanes[-1].trained.close)
        if not harness.SOAK:
            self.lanes[0].cloud.notice = 24  # two minutes of AWS are for the soak

    def start_agent(self, index, *flags, **options):
        if not self.lanes:
            self.make_lanes()
        if index == STAYS:
            labels = [word for lane in self.lanes for word in ('--label', f'{lane.name}=yes')]
            return super().start_agent(index, '--cpus', str(2 * len(self.lanes)), *labels, *flags, **options)
        lane = self.lanes[index - 1]
        return super().start_agent(index, '--cpus', '2', '--label', f'{lane.name}=yes', *lane.cloud.agent_flags, *flags, **options)

    def start_job(self, lane):
        path = self.job_file(lane.name, f'name: {lane.name}\nrun: {LINEAR} {lane.trained.folder} 600000 {BATCH} {soak(100, 40)}\n'
                                        f'nodes: {{min: 1, max: 2}}\nranks_per_node: 2\nwhere: {{labels: {{{lane.name}: "yes"}}}}\n'
                                        'elastic: {mode: in-place}\nresources: {cpus: 1}\nrestart: {budget: 0}\n')
        self.submit(path)

    def of_machine(self, lane):
        """Everything that runs on the machine that leaves."""
        mark = self.node_home(lane.machine).encode() + b'/'
        return [pid for pid in self.marked() if mark in harness.read_proc(pid, 'environ')]

    def comes_back(self, lane, again):
        """The notice is taken back, or the machine goes, with all that runs there, and starts anew."""
        if not again:
            while pids := self.of_machine(lane):
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
        lane.cloud.stay()
        if not again:
            self.start_agent(lane.machine)

    def life(self, lane):
        """Generator of what is waited for: in words, the condition, for how long at most."""
        trained = lane.trained
        for turn in range(lane.notices):
            yield f'{lane.name}: four processes that step', lambda: len(trained.members(least=5)) == 4, 2 * harness.PATIENCE
            members, generation = trained.members(least=5), trained.generation()
            leave = {pid for pid in self.of_machine(lane) if pid in members}
            stay = members - leave
            self.assertEqual((len(stay), lane.stayed or stay), (2, stay), f'{lane.name}, notice {turn}: who stays keeps its process')
            lane.stayed = stay
            lane.cloud.leave()
            given, notice = time.monotonic(), lane.cloud.notice

            def first_steps():
                return [next((step for step in trained.steps[pid][-200:] if step[0] > generation), None) for pid in stay]
            yield f'{lane.name}: hand-over {turn}', lambda: all(first_steps()) and not any(map(harness.alive, leave)), notice + harness.PATIENCE
            ended, steps = time.monotonic(), first_steps()
            over = max(ended, *(step[2] / 1e9 for step in steps))
            before = [max(step[2] for step in trained.steps[pid] if step[0] <= generation) for pid in stay]
            lane.took.append(over - given)
            lane.left.append(notice - lane.took[-1])
            lane.pauses.append(max(step[2] - last for step, last in zip(steps, before)) / 1e9)
            if over > given + notice:
                lane.late.append(f'{lane.name}, notice {turn}: after {over - given:.1f} s of {notice}')
            self.comes_back(lane, again=turn % 2 == 0)
        yield f'{lane.name}: all four at the end', lambda: len(trained.members(least=5)) == 4, 2 * harness.PATIENCE

    def run_lanes(self):
        """All lanes beside each other, each as fast as it gets on."""
        lives = {lane: self.life(lane) for lane in self.lanes}
        waits = {lane: [*next(life), time.monotonic()] for lane, life in lives.items()}

        def step():
            for lane in list(waits):
                lane.trained.look()
                what, condition, seconds, since = waits[lane]
                if condition():
                    following = next(lives[lane], None)
                    if following is None:
                        del waits[lane]
                    else:
                        waits[lane] = [*following, time.monotonic()]
                elif time.monotonic() > since + seconds:
                    raise AssertionError(f'not within {seconds:.0f} s: {what}; {self.client("why", lane.name, expect=None).stdout}')
            return not waits
        wait_until('all notices', step, soak(3600, 600))

    def check(self, lane):
        """No step lost, none made twice, nobody charged."""
        events = [json.loads(line) for path in glob.glob(os.path.join(self.dir, '**', lane.name + '-*', 'events.jsonl'), recursive=True)
                  for line in self.read(path).splitlines()]
        faults = [event['text'] for event in events if event['kind'] in ('fault', 'resize')]
        left = [text for text in faults if text.startswith(f'node node{lane.machine} is leaving: {lane.cloud.name} ')]
        grown = [text for text in faults if text == 'it grows from 2 to 4 ranks']
        self.assertEqual((len(left), len(grown), len(faults)), (lane.notices, lane.notices, 2 * lane.notices),
                         f'{lane.name}: a generation ends for each notice and for each return: {faults}')
        job = self.job(lane.name)
        self.assertEqual((job['state'], job['restarts'], job['first_fault']), ('RUNNING', 0, None), lane.name)
        self.client('stop', lane.name)
        self.wait_for_state(lane.name, 'CANCELLED')
        stayed, by_step = {}, {}
        for pid, steps in lane.trained.look().items():
            numbers = [step[1] for step in steps]
            first = 1 if pid in lane.stayed else numbers[0] if numbers else 0
            self.assertEqual(numbers, list(range(first, first + len(numbers))), f'{lane.name}, process {pid}: each step once')
            for _, number, _, samples in steps:
                by_step.setdefault(number, []).extend(samples)
                if pid in lane.stayed:
                    stayed.setdefault(number, []).extend(samples)
        longest = {len(lane.trained.steps[pid]) for pid in lane.stayed}
        self.assertEqual(longest, {max(by_step)}, f'{lane.name}: who stayed made all steps')
        # Where nobody that stays has made the update it is computed again, and who left may have made it for himself, in memory that is gone.
        ends = {steps[-1][1] for pid, steps in lane.trained.steps.items() if steps and pid not in lane.stayed}
        alone = {number for number, samples in stayed.items() if len(set(samples)) == BATCH}
        trained = {number: stayed[number] if number in alone & ends else samples for number, samples in by_step.items()}
        again = sum(len(by_step[number]) > len(set(by_step[number])) for number in alone & ends)
        self.assertLessEqual(again, lane.notices, f'{lane.name}: one for each end of a generation at most')
        twice = [number for number, samples in trained.items() if len(samples) != len(set(samples))]
        self.assertEqual(twice, [], f'{lane.name}: samples of these steps were trained twice')
        lane.again = again
        short = [number for number, samples in trained.items() if len(samples) < BATCH]
        self.assertLessEqual(len(short), lane.notices, f'{lane.name}: only of a step that others ended may a rank that left lack its line')

    def report(self):
        for name in self.lanes_of:
            mine = [lane for lane in self.lanes if lane.cloud.name == name]
            took, left, pauses = ([value for lane in mine for value in getattr(lane, what)] for what in ('took', 'left', 'pauses'))
            late = [word for lane in mine for word in lane.late]
            print(f'\n{name}: {len(took) - len(late)} of {len(took)} hand-overs inside the notice of {mine[0].cloud.notice} s: over '
                  f'{statistics.median(took):.2f} s after it in the median, {max(took):.2f} s at most, {min(left):.1f} s before the end at '
                  f'least; who stayed made no step for {statistics.median(pauses) * 1000:.0f} ms in the median, '
                  f'{max(pauses) * 1000:.0f} ms at most', flush=True)

    def test_each_cloud_is_handed_over_inside_its_notice(self):
        """P1, P13: GTRAIN_SOAK=1: 100 of each cloud."""
        for lane in self.lanes:
            self.start_job(lane)
        self.run_lanes()
        self.report()
        for lane in self.lanes:
            self.check(lane)
        print(f'\n{sum(lane.again for lane in self.lanes)} steps were computed again by those who stayed, although one that left had made '
              'the update', flush=True)
        self.assertEqual([word for lane in self.lanes for word in lane.late], [], 'each is over before the machine goes')
        self.assertEqual([len([took for lane in self.lanes if lane.cloud.name == name for took in lane.took]) for name in self.lanes_of],
                         [NOTICES] * len(self.lanes_of))


if __name__ == '__main__':
    harness.main()

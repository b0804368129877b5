"""Programs that leave, multiply and shout: when the job is over nothing of them is left, and nobody had to wait (P row)."""
import json
import os
import signal
import subprocess
import time
import unittest

import harness
from cluster import ClusterTest
from harness import soak, wait_until


# Writes as fast as it can for a time, then one line of 100 MB; notes how long its longest write took.
FLOOD = """import os, sys, time
out, seconds = sys.argv[1], float(sys.argv[2])
block, end, told, longest = b'x' * 65535 + b'\\n', time.monotonic() + seconds, 0, 0
while time.monotonic() < end:
    before = time.monotonic()
    told += os.write(1, block)
    longest = max(longest, time.monotonic() - before)
line = b'y' * 100000000
while line:
    line = line[os.write(1, line[:1 << 20]):]
open(out + '/told', 'w').write(str(told))
open(out + '/longest', 'w').write(str(longest))
print('\\nthe last words', flush=True)
"""


class HostileBase(ClusterTest):
    agent_count = 1

    def script(self, name, text, ranks=1, extra=''):
        body = ''.join(f'  {line}\n' for line in text.strip().splitlines())
        return self.job_file(name, f'name: {name}\nscript: |\n{body}ranks: {ranks}\nresources: {{cpus: 1{extra}}}\nstop_grace: 1s\n')

    def run_to_end(self, path, seconds=harness.PATIENCE):
        job = self.submit(path)
        seen = self.wait_for_state(job, *harness.TERMINAL_STATES, seconds=seconds)
        wait_until('its keeper to end', lambda: not self.daemons('keeper'))
        self.assertEqual(self.of_jobs(), {}, 'no orphan')
        self.assertEqual(self.zombies(), [])
        return seen

    def of_jobs(self):
        """Everything that runs in the environment of a rank."""
        return {pid: argv for pid, argv in self.marked().items() if b'GTRAIN_JOB' in harness.read_proc(pid, 'environ')}

    def zombies(self):
        """Dead children that an agent or a keeper did not collect."""
        parents = {str(pid).encode() for pid in self.daemons('agent') + self.daemons('keeper')}
        found = []
        for name in os.listdir('/proc'):
            stat = harness.read_proc(name, 'stat') if name.isdigit() else b''
            words = stat.rsplit(b')', 1)[-1].split()
            if len(words) > 1 and words[0] == b'Z' and words[1] in parents:
                found.append(int(name))
        return found


class HostileTest(HostileBase):
    def test_leftovers(self):
        """P6, P7: background children, a session of their own, a double fork, all holding the rank's pipes."""
        seen = self.run_to_end(self.script('left', """
            sleep infinity &
            setsid sleep infinity &
            (setsid sh -c 'sleep infinity & sleep infinity' &)
            nohup sh -c "trap '' TERM HUP INT; while :; do sleep 1; done" &
            sleep 0.2
            echo done""", ranks=2))
        self.assertEqual(seen['state'], 'SUCCEEDED', seen)

    def test_many_short_children(self):
        """P11: thousands of orphans that end at once: each is reaped, by a keeper that stays small."""
        count = soak(10000, 2000)
        seen = self.run_to_end(self.script('storm', f"""
            for i in $(seq {count}); do (true &) ; done
            echo done"""), 180)
        self.assertEqual(seen['state'], 'SUCCEEDED', seen)

    @unittest.skipUnless(os.geteuid() == 0 and os.access('/sys/fs/cgroup/pids', os.W_OK),
                         'needs a pids control group it may write (root, or delegation)')
    def test_fork_bomb(self):
        """P12: the limit stops it; another job on the node runs meanwhile; the stop leaves nothing."""
        bomb = self.submit(self.script('bomb', f"""
            group=$(sed -n 's/^[0-9]*:.*pids.*://p' /proc/self/cgroup)
            [ "$(cat /sys/fs/cgroup/pids$group/pids.max)" = 300 ] || exit 9
            touch {self.out}/lit
            bomb() {{ bomb | bomb & }}
            bomb 2>/dev/null
            sleep infinity""", extra=', processes: 300'))
        wait_until('the bomb', lambda: os.path.exists(os.path.join(self.out, 'lit')))
        seen = []
        begin = time.monotonic()
        other = self.submit(self.script('other', 'echo fine'))
        while time.monotonic() < begin + soak(20, 3):
            seen.append(len(self.of_jobs()))
            time.sleep(0.2)
        self.assertEqual(self.wait_for_state(other, *harness.TERMINAL_STATES)['state'], 'SUCCEEDED')
        self.assertLessEqual(max(seen), 310)
        self.client('stop', '--now', bomb, expect=None)
        self.wait_for_state(bomb, 'CANCELLED')
        wait_until('nothing to be left', lambda: not self.of_jobs())

    def test_flood(self):
        """P8, P9: output as fast as it goes and one line of 100 MB: the rank is not held up, the disk holds a bounded part, the
        end of what it said is there."""
        seconds = soak(20, 4)
        program = os.path.join(self.dir, 'flood.py')
        with open(program, 'w') as out:
            out.write(FLOOD)
        path = self.job_file('flood', f'name: flood\nrun: /usr/bin/python3 {program} {self.out} {seconds}\nranks: 1\n')
        job = self.submit(path)
        seen = self.wait_for_state(job, *harness.TERMINAL_STATES, seconds=120 + seconds)
        self.assertEqual(seen['state'], 'SUCCEEDED', seen)
        log = os.path.join(seen['run_dir'], 'logs', 'generation-1', 'rank-0.out')
        used, told = os.stat(log).st_blocks * 512, int(self.read('told'))
        print(f'\n{told / 1e6:.0f} MB written in {seconds} s and a 100 MB line, {used / 1e6:.0f} MB on disk, longest write '
              f'{float(self.read("longest")) * 1000:.0f} ms', flush=True)
        self.assertLess(used, 300 << 20)
        with open(log, 'rb') as data:
            data.seek(-200, os.SEEK_END)
            self.assertIn(b'the last words', data.read())
        wait_until('its keeper to end', lambda: not self.daemons('keeper'))
        self.assertEqual(self.of_jobs(), {})


@unittest.skipUnless(harness.is_root(), 'only root can mount a file system and freeze it')
class HungFileSystemTest(HostileBase):
    def setUp(self):
        super().setUp()
        self.mount = os.path.join(self.dir, 'slow')
        os.mkdir(self.mount)
        image = os.path.join(self.dir, 'image')
        with open(image, 'wb') as out:
            out.truncate(64 << 20)
        subprocess.run(['mkfs.ext4', '-q', image], check=True)
        subprocess.run(['mount', '-o', 'loop', image, self.mount], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', self.mount])
        self.addCleanup(subprocess.run, ['fsfreeze', '-u', self.mount], stderr=subprocess.DEVNULL)

    def test_a_job_on_a_file_system_that_hangs_holds_up_no_other_P8(self):
        """The agent made the directories of a generation on its loop: the whole node fell silent with that disk."""
        slow = json.loads(self.client('launch', '-d', '--json', '--run-dir', self.mount, self.job_file(
            'slow', 'name: slow\nrun: sleep 600\nranks: 1\nresources: {cpus: 1, oversubscribe: true}\nstop_grace: 1s\n')).stdout)['job']
        rank, = self.wait_for_state(slow, 'RUNNING')['ranks']
        subprocess.run(['fsfreeze', '-f', self.mount], check=True)
        begin = time.monotonic()
        os.kill(rank['pid'], signal.SIGKILL)
        wait_until('the next generation to be granted', lambda: self.job(slow)['generation'] == 2)
        for turn in range(3):
            quick = self.submit(self.script(f'quick{turn}', 'true', extra=', oversubscribe: true'))
            self.wait_for_state(quick, 'SUCCEEDED')
        wait_until('as long as a silent node lives', lambda: time.monotonic() > begin + 12, 20)
        self.assertEqual(self.node('node0')['state'], 'alive')
        self.assertNotIn('is suspect', self.head.output())
        self.assertNotEqual(self.job(slow)['state'], 'RUNNING', 'its directories cannot be made')
        subprocess.run(['fsfreeze', '-u', self.mount], check=True)
        self.wait_for_state(slow, 'RUNNING')
        self.client('stop', '--now', slow)
        self.wait_for_state(slow, 'CANCELLED')
        wait_until('its keeper to end', lambda: not self.daemons('keeper'))


class CyclesTest(HostileBase):
    def test_nothing_accumulates(self):
        """P6, P11, P15: ranks are started and killed again and again; processes, descriptors, control groups and files
        that stay are counted."""
        cycles, each = soak(2000, 40), 8  # ranks of one job; each is one spawn and one kill
        first = None
        for turn in range(cycles // each):
            job = self.submit(self.script(f'cycle{turn}', f'sleep infinity & echo $$ >> {self.out}/up.{turn}; sleep infinity', ranks=each,
                                          extra=', oversubscribe: true'))
            wait_until('its ranks', lambda: os.path.exists(os.path.join(self.out, f'up.{turn}')) and
                       len(self.read(f'up.{turn}').split()) == each)
            self.client('stop', '--now', job)
            self.wait_for_state(job, 'CANCELLED')
            wait_until('its keeper to end', lambda: not self.daemons('keeper'))
            # The agent sees the end of a keeper, closes its descriptors and removes its folder a moment after that end.
            wait_until('the folder of its keeper to go', lambda: self.what_is_left()['keeper folders'] == 0)
            first = first or self.what_is_left()
        wait_until(f'no more to be left than after the first job, {first}', lambda: self.no_more_than(first))
        print(f'\n{cycles} spawn and kill cycles: left {self.what_is_left()}', flush=True)
        self.assertEqual(self.of_jobs(), {})
        self.assertEqual(self.zombies(), [])

    def no_more_than(self, first):
        return all(count <= first[what] for what, count in self.what_is_left().items())

    def what_is_left(self):
        agent = self.daemons('agent')[0]
        groups = sum(name.startswith('gtrain-') and not os.path.exists(f'/proc/{name.split("-")[1]}')
                     for folder in ('unified', 'memory', 'pids', 'freezer', '.')
                     if os.path.isdir(f'/sys/fs/cgroup/{folder}') for name in os.listdir(f'/sys/fs/cgroup/{folder}'))
        keepers = os.path.join(self.agent_state(0), 'keepers')
        return {'descriptors of the agent': len(os.listdir(f'/proc/{agent}/fd')), 'stale control groups': groups,
                'keeper folders': len(os.listdir(keepers)), 'processes': len(self.marked())}


if __name__ == '__main__':
    harness.main()

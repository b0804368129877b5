"""The operating system at its worst: closed descriptors, small limits, output without end, shared homes, state that is
removed, programs that are replaced, a loopback interface that is not as usual."""
import json
import os
import re
import shutil
import signal
import subprocess
import time
import unittest

import harness
from harness import wait_until

PATIENCE = 120
DAEMONS = ('head', 'agent', 'local-watch')


def namespaces():
    """None, or the reason why none can be made here."""
    if not harness.is_root() or not shutil.which('unshare') or not shutil.which('ip'):
        return 'needs root, unshare(1) and ip(8)'
    made = subprocess.run(['unshare', '--net', '--mount', '--pid', '--fork', 'true'], capture_output=True, text=True)
    return None if made.returncode == 0 else f'namespaces cannot be made here: {made.stderr.strip()}'


REASON = namespaces()


class OsTest(harness.GtrainTest):
    def launch_by(self, shell, expect=0):
        """`gtrain launch -n 1 -- true` by a shell that does something to the process first."""
        done = subprocess.run([*self.prefix, 'bash', '-c', shell, 'bash', self.program], env=self.env(), cwd=self.dir,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done

    def test_closed_standard_files(self):
        """A file of the store or a socket must not become descriptor 0, 1 or 2."""
        for closed in ('<&-', '>&-', '2>&-', '<&- >&- 2>&-'):
            with self.subTest(closed):
                self.launch_by(f'exec "$1" launch -n 1 -- true {closed}')
        self.end_local_cluster()

    def test_too_few_descriptors_are_said(self):
        """The head hung holding its lock, or libzmq ended the program."""
        for limit in (24, 100):
            with self.subTest(limit):
                done = self.launch_by(f'ulimit -n {limit}; exec "$1" launch -n 1 -- true', expect=1)
                self.assertRegex(done.stderr, rf'may have {limit} open files and needs \d+: raise `ulimit -n`')
        self.gtrain('launch', '-n', '1', '--', 'true')  # nothing holds the lock
        self.end_local_cluster()

    def shell(self, text, *args):
        """Of a shell in which "$0" is the program."""
        return subprocess.run([*self.prefix, 'bash', '-c', text, self.program, *args], env=self.env(), cwd=self.dir,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)

    def test_output_that_cannot_be_written_is_an_error(self):
        """`gtrain status > /dev/full` exited with 0: a script took what it had for the whole answer."""
        self.gtrain('launch', '-n', '1', '--', 'true')
        lost = r'gtrain: the output is not whole, it could not be written: No space left on device\. Free some space'
        for verb in ('status', 'status --json', 'why true-1', 'nodes --json', 'version', 'status --help', '--help'):
            with self.subTest(verb):
                done = self.shell(f'"$0" {verb} > /dev/full')
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, lost)
                done = self.shell(f'"$0" {verb} | :')
                self.assertNotIn('could not be written', done.stdout + done.stderr, 'nobody wanted to read the rest')
        done = self.shell('"$0" launch -d -n 1 -- true > /dev/full')
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, 'gtrain: job true-2 was submitted and goes on\ngtrain: the output is not whole')
        done = self.shell('"$0" launch -n 1 -- echo word > /dev/full')
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, lost)
        self.assertRegex(done.stderr, 'gtrain: (detached; echo-3 goes on|echo-3 SUCCEEDED)')  # whichever it knew by then
        done = self.shell('ulimit -f 100; "$0" launch -n 1 -- bash -c "yes | head -n 30000" > shown')
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, 'the output is not whole, it could not be written: File too large')
        self.end_local_cluster()

    def test_without_a_home_the_error_says_what_is_true(self):
        """`neither ... nor HOME is set: name the directory with --state-dir`: it was set, and there is no such flag."""
        for home, verb, said in [('relative/home', 'launch -- true', 'no directory for the state of gtrain: XDG_STATE_HOME is not set and '
                                                                     'HOME is "relative/home", which is not an absolute path. Set one of them'),
                                 ('', 'status', 'neither XDG_CONFIG_HOME nor HOME names one. Set one of them to an absolute path')]:
            with self.subTest(home):
                done = self.shell(f'unset XDG_STATE_HOME XDG_CONFIG_HOME; HOME={home} "$0" {verb}')
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(said, done.stderr)

    def test_a_directory_that_is_not_utf8_is_refused(self):
        """It was accepted with another name in its place, and the ranks did not start there."""
        folder = os.path.join(os.fsencode(self.dir), b'caf\xe9')
        os.mkdir(folder)
        for name, text in [('beside', 'run: sleep 0\nworkdir: .\n'), ('secret', 'run: sleep 0\nsecrets: {KEY: {file: key}}\n'),
                           ('elsewhere', 'run: sleep 0\n')]:
            with open(os.path.join(folder, name.encode() + b'.yaml'), 'w') as file:
                file.write(text)
        for words, said in [('cd "$1"; "$0" launch -n 1 -- true', r'the current directory is not UTF-8: /\S+/caf\\xe9\. Rename it'),
                            ('"$0" launch "$1/beside.yaml"', r'`workdir`: is taken from the folder of the job file, and '
                                                             r'/\S+/caf\\xe9 is not UTF-8; rename that folder'),
                            ('"$0" launch "$1/secret.yaml"', r'`secrets\.KEY\.file`: .* /\S+/caf\\xe9/key is not UTF-8'),
                            ('"$0" launch --run-dir "$1/runs" -- true', r'--run-dir is not UTF-8: caf\\xe9/runs\. Name another')]:
            with self.subTest(words):
                done = self.shell(words, b'caf\xe9')
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertRegex(done.stderr, said)
        self.assertEqual(self.marked(), {}, 'nothing was started for it')
        done = self.shell('"$0" launch "$1/elsewhere.yaml"', b'caf\xe9')
        self.assertEqual(done.returncode, 0, 'where the job file lies is not part of the job')
        self.end_local_cluster()

    def test_equal_lines_without_end(self):
        """Half a minute for 80 kB of them, before; and a signal was not looked at."""
        done = self.gtrain('launch', '-n', '2', '--', 'bash', '-c', 'yes | head -n 300000', timeout=PATIENCE)
        for rank in '01':
            shown = re.findall(rf'^[^:]+:(?:{rank}|0,1): y$', done.stdout, re.M)
            self.assertEqual(len(shown), 300000, 'each once, alone or together with the other')

    def test_all_is_shown(self):
        """Also what a rank wrote faster than anybody read when the job was over."""
        written = 50_000_000
        done = self.gtrain('launch', '-n', '1', '--', 'bash', '-c', f'head -c {written} /dev/zero | tr "\\0" x',
                           timeout=PATIENCE)
        self.assertEqual(done.stdout.count('x'), written)


class FloodTest(harness.GtrainTest):
    """Output that never stops: signals and the end of the job are looked at between its pieces. Before, Ctrl-C was ignored, and
    a client spun for minutes after its job was over."""
    SECONDS = 15  # for what is done within a few on a machine that does nothing else

    def flood(self, command='exec yes'):
        return ['-n', '1', '--', 'bash', '-c', command]

    def in_the_flood(self, *words):
        """A client that prints without end."""
        client = self.start(*words)
        wait_until('a flood of lines', lambda: client.size() > 200_000)
        return client

    def ends(self, what, client, *codes, seconds=SECONDS):
        at = time.monotonic()
        code = client.wait(seconds)
        print(f'\n{what}: ended {time.monotonic() - at:.1f} s later', flush=True)
        self.assertIn(code, codes, client.output()[-2000:])

    def test_ctrl_c_ends_launch(self):
        launch = self.in_the_flood('launch', *self.flood())
        launch.signal(signal.SIGINT)
        self.ends('launch at Ctrl-C', launch, 130)
        wait_until('the keeper to end with its job', lambda: not self.daemons('keeper'))
        self.assertEqual(self.jobs()[-1]['state'], 'CANCELLED')
        self.end_local_cluster()

    def test_logs_of_a_flood(self):
        """At Ctrl-C; and of a job that ends, whose lines are long here because all of them are shown."""
        job = json.loads(self.gtrain('launch', '-d', '--json', *self.flood('exec yes "$(printf %0999d 7)"')).stdout)['job']
        self.wait_for_state(job, 'RUNNING')  # logs of what has not started are an error
        logs = self.in_the_flood('logs', '-f', job)
        logs.signal(signal.SIGINT)
        self.ends('logs -f at Ctrl-C', logs, 0)
        self.assertEqual(self.job(job)['state'], 'RUNNING', 'it is not ended by those who look on')
        followers = [self.in_the_flood('logs', '-f', job), self.in_the_flood('attach', job)]
        self.gtrain('stop', '--now', job)
        for name, follower, codes in zip(('logs -f', 'attach'), followers, ((0,), (0, 1, 130, 143))):
            self.ends(f'{name} at the end of the job', follower, *codes, seconds=harness.PATIENCE)
        self.end_local_cluster()

    def test_logs_show_what_there_is(self):
        """Of a rank that writes faster than anybody reads: up to where it was when it was asked."""
        command = 'while :; do yes | head -c 3000000; sleep 0.2; done'
        job = json.loads(self.gtrain('launch', '-d', '--json', *self.flood(command)).stdout)['job']
        path = os.path.join(self.job(job)['run_dir'], 'logs', 'generation-1', 'rank-0.out')
        wait_until('a piece of it', lambda: os.path.exists(path) and os.path.getsize(path) >= 3_000_000)
        self.ends('logs of a job that goes on', self.start('logs', job), 0, seconds=harness.PATIENCE)
        self.assertEqual(self.job(job)['state'], 'RUNNING')
        self.gtrain('stop', '--now', job)
        self.end_local_cluster()

    def test_a_job_ends_in_the_middle_of_its_flood(self):
        launch = self.in_the_flood('launch', *self.flood('yes & sleep 3; kill $!'))
        wait_until('the job to end', lambda: self.jobs()[-1]['state'] == 'SUCCEEDED')
        self.ends('launch at the end of the job', launch, 0, seconds=harness.PATIENCE)
        self.end_local_cluster()


class LocalStateTest(harness.GtrainTest):
    """The directory of the local cluster, which others see, use and remove."""

    def setUp(self):
        super().setUp()
        self.state = os.path.join(self.home, 'state', 'gtrain', 'local')
        self.done = os.path.join(self.dir, 'go')

    def detached_job(self, name):
        self.gtrain('launch', '-d', self.stepper_job(name, '--until', self.done))
        self.wait_for_steps(3, ranks=2)
        wait_until('all three', lambda: all(self.daemons(verb) for verb in DAEMONS))

    def finish(self, name):
        open(self.done, 'w').close()
        self.wait_for_state(name, 'SUCCEEDED')
        self.end_local_cluster()

    def endpoint(self):
        path = os.path.join(self.state, 'endpoint.json')
        with open(path) as data:
            return os.stat(path).st_ino, data.read()

    def all_daemons(self):
        return [self.daemons(verb) for verb in DAEMONS]

    def kill(self, pids):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until('them to be dead', lambda: not any(map(harness.alive, pids)))

    @unittest.skipIf(REASON, REASON)
    def test_from_another_namespace_or_machine(self):
        """P14: `status` from another pid namespace or host removed the endpoint of the living cluster, and started another."""
        self.detached_job('shared')
        before = self.endpoint(), self.all_daemons(), self.rank_pids()
        pids = ['unshare', '--pid', '--fork', '--mount-proc']
        self.assertIn('RUNNING', self.gtrain('status', prefix=pids).stdout, 'the same network: it is reached')
        fake = os.path.join(self.dir, 'boot_id')
        with open(fake, 'w') as out:
            out.write('11111111-2222-3333-4444-555555555555\n')
        boot = ['unshare', '--mount', 'sh', '-c',
                f'mount --bind {fake} /proc/sys/kernel/random/boot_id && exec "$@"', 'sh']
        for place in (['unshare', '--net', 'sh', '-c', 'ip link set lo up && exec "$@"', 'sh'], boot):
            for command in (['status'], ['nodes'], ['stop', 'shared'], ['launch', '-n', '1', '--', 'true']):
                with self.subTest(place=place, command=command):
                    said = self.gtrain(*command, prefix=place, expect=1).stderr
                    self.assertRegex(said, rf'runs on {re.escape(os.uname().nodename)} \(process \d+\), another machine')
        self.assertEqual((self.endpoint(), self.all_daemons(), self.rank_pids()), before)
        self.finish('shared')

    @unittest.skipIf(REASON, REASON)
    def test_a_cluster_that_died_on_another_machine_is_taken_over(self):
        """H9: nobody holds its locks any more."""
        self.gtrain('launch', '-n', '1', '--', 'true')
        wait_until('the keeper to end', lambda: not self.daemons('keeper'))
        self.kill(sum(self.all_daemons(), []))
        path = os.path.join(self.state, 'endpoint.json')
        with open(path) as data:
            said = json.load(data)
        with open(path, 'w') as out:
            json.dump(dict(said, boot_id='elsewhere', host='elsewhere'), out)
        self.assertIn('elsewhere', self.gtrain('status', expect=1).stderr)
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.end_local_cluster()

    def test_pid_of_another_head(self):
        """P14: the pid in the endpoint is that of another cluster's head by now; it was taken for this one's."""
        other = os.path.join(self.dir, 'other')
        os.makedirs(other)
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.gtrain('launch', '-d', '-n', '1', '--set', 'name=other', '--', 'sleep', '600', home=other)
        with open(os.path.join(other, 'state', 'gtrain', 'local', 'endpoint.json')) as data:
            head = json.load(data)['pid']
        _, text = self.endpoint()
        self.kill([pid for verb in DAEMONS for pid, argv in self.marked().items() if verb in argv and self.state in argv])
        with open(os.path.join(self.state, 'endpoint.json'), 'w') as out:
            json.dump(dict(json.loads(text), pid=head), out)
        said = self.gtrain('status', expect=1).stderr
        self.assertIn('the local cluster was killed on', said)
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.gtrain('stop', 'other', '--now', home=other)
        self.end_local_cluster()

    @unittest.skipUnless(harness.is_root(), 'only root sees which program a daemon is: they hide from other processes')
    def test_the_program_is_replaced(self):
        """The daemons that are started next are the new program; before, "gtrain (deleted)" was not found."""
        self.program = self.install()
        self.detached_job('replaced')
        ranks = self.rank_pids()
        self.install()
        old = self.all_daemons()
        self.assertTrue(os.readlink(f'/proc/{old[0][0]}/exe').endswith(' (deleted)'))
        self.kill(old[0] + old[1])
        wait_until('the next ones', lambda: all(len(pids) == 1 for pids in self.all_daemons()[:2]))
        for pid in sum(self.all_daemons()[:2], []):
            self.assertEqual(os.readlink(f'/proc/{pid}/exe'), self.program)
        self.wait_for_state('replaced', 'RUNNING')
        self.assertEqual(self.rank_pids(), ranks)
        self.finish('replaced')

    def install(self):
        """The build, in a folder of this test; each file replaced as package managers do."""
        folder = os.path.join(self.dir, 'installed')
        os.makedirs(folder, exist_ok=True)
        for name in ('gtrain', 'gtrain-keeper', 'gtrain-writer'):
            shutil.copy(os.path.join(os.path.dirname(harness.GTRAIN), name), os.path.join(folder, name + '.new'))
            os.rename(os.path.join(folder, name + '.new'), os.path.join(folder, name))
        return os.path.join(folder, 'gtrain')

    def test_the_state_directory_is_removed(self):
        """The ranks are ended and nothing is left; the next launch begins anew."""
        self.detached_job('removed')
        ranks = self.rank_pids()
        wait_until('it to be gone', self.remove_state)
        wait_until('the ranks to end', lambda: not any(map(harness.alive, ranks.values())))
        self.wait_for_no_processes()
        self.assertEqual(self.rank_pids(2), {}, 'no rank was started again')
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.end_local_cluster()

    def remove_state(self):
        """Again where somebody wrote into it meanwhile."""
        shutil.rmtree(self.state, ignore_errors=True)
        return not os.path.exists(self.state)

    def test_the_sockets_of_a_keeper_are_removed(self):
        """P4: the next agent could not reach the keeper, and ended its ranks."""
        self.detached_job('sockets')
        ranks = self.rank_pids()
        keepers = os.path.join(self.state, 'agent', 'keepers')
        (keeper,) = os.listdir(keepers)
        sockets = [os.path.join(keepers, keeper, name) for name in ('agent.sock', 'rank.sock')]
        sockets = [path for path in sockets if os.path.exists(path)]
        for path in sockets:
            os.unlink(path)
        self.kill(self.daemons('agent'))
        wait_until('the sockets to be made anew', lambda: all(map(os.path.exists, sockets)))
        wait_until('the next agent', lambda: self.daemons('agent'))
        self.finish('sockets')
        self.assertEqual(self.rank_pids(), ranks, 'they were adopted')

    @unittest.skipIf(REASON, REASON)
    def test_only_ipv6(self):
        """W14: there was "no free loopback port"."""
        six = ['unshare', '--net', 'sh', '-c', 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"', 'sh']
        done = self.gtrain('launch', self.stepper_job('six', '--steps', '3'), prefix=six)
        self.assertIn('six-1 SUCCEEDED', done.stderr)
        self.end_local_cluster()

    @unittest.skipIf(REASON, REASON)
    def test_no_loopback(self):
        """It is said in 3 s more than the program needs to start, and nothing is started."""
        without = ['unshare', '--net', 'sh', '-c', 'exec "$@"', 'sh']
        begin = time.monotonic()
        self.gtrain('launch', '--help', prefix=without)
        started = time.monotonic()
        said = self.gtrain('launch', '-n', '1', '--', 'true', prefix=without, expect=1).stderr
        took, start_up = time.monotonic() - started, started - begin
        print(f'\nno loopback: said after {took:.2f} s, start-up {start_up:.2f} s', flush=True)
        self.assertLess(took, 3 + start_up)
        self.assertRegex(said, r'^gtrain: the loopback interface .* does not work .* ip link set lo up\n$')
        self.assertEqual(self.marked(), {})


class RunDirectoryTest(harness.GtrainTest):
    """Whose files a job writes, and that nobody leads them elsewhere."""

    def launch(self, base, expect=None):
        return self.gtrain('launch', '--run-dir', base, '-n', '1', '--', 'sh', '-c', 'echo ran', expect=expect)

    def run_dir(self, base):
        """Of job 1: those of the next differ in the number alone."""
        done = self.launch(base, expect=0)
        return re.search(r'logs: (\S+)/logs', done.stdout + done.stderr).group(1)

    @unittest.skipUnless(harness.is_root(), 'only root can make what belongs to another user')
    def test_what_another_user_prepared_is_refused(self):
        """X20: root's launch in a folder of another user wrote to whatever file a link there led to."""
        base, victim, target = (os.path.join(self.dir, name) for name in ('runs', 'victim', 'target'))
        os.mkdir(target)
        first, number = self.run_dir(base), 1
        self.assertIn('/sh-1', first)

        def expect_refusal(prepare, sentence):
            nonlocal number
            number += 1
            with open(victim, 'w') as out:
                out.write('precious')
            prepare(first.replace('/sh-1', f'/sh-{number}'))
            done = self.launch(base)
            with open(victim) as data:
                self.assertEqual(data.read(), 'precious')
            self.assertEqual(os.listdir(target), [])
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertRegex(done.stdout + done.stderr, sentence)

        def make(run_dir, owner):
            folder = os.path.join(run_dir, 'ranks', 'generation-1')
            os.makedirs(folder)
            os.symlink(victim, os.path.join(folder, 'members-0.json.tmp'))
            for path in (run_dir, os.path.dirname(folder), folder):
                os.chown(path, owner, owner)

        def link(run_dir):
            os.symlink(target, run_dir)
            os.lchown(run_dir, harness.NOBODY, harness.NOBODY)

        def link_inside(run_dir):
            os.mkdir(run_dir)
            os.symlink(target, os.path.join(run_dir, 'logs'))

        with self.subTest('a directory of another user'):
            expect_refusal(lambda path: make(path, harness.NOBODY), r'belongs to another user \(uid 65534\).*use a folder of your own')
        with self.subTest('a link of another user'):
            expect_refusal(link, r'the symbolic link \S+ in \S+ belongs to another user')
        with self.subTest('a link inside, whoever made it'):
            expect_refusal(link_inside, 'logs of logs/generation-1 is a symbolic link')
        with self.subTest('a link where a temporary file goes'):
            number += 1
            make(first.replace('/sh-1', f'/sh-{number}'), 0)
            done = self.launch(base)
            self.assertIn('ran', done.stdout, done.stderr)
            with open(victim) as data:
                self.assertEqual(data.read(), 'precious')
        self.end_local_cluster()

    def test_what_another_job_left_is_neither_continued_nor_shown(self):
        """The number and the first letters of the cluster are the same: another cluster's, or a folder that a person made."""
        base = os.path.join(self.dir, 'runs')
        first = self.run_dir(base)
        with open(os.path.join(first, '.gtrain-job')) as data:
            owner = data.read()
        self.assertRegex(owner, r'^gtrain run directory\ncluster [0-9a-f]{32}\njob sh-1\nrequest \S+\n$')
        name = os.path.join('logs', 'generation-1', 'rank-0.out')

        def prepare(number, text):
            run_dir = first.replace('/sh-1', f'/sh-{number}')
            os.makedirs(os.path.join(run_dir, os.path.dirname(name)))
            for file, content in ((name, 'of before\n'), ('.gtrain-job', text)):
                if content:
                    with open(os.path.join(run_dir, file), 'w') as out:
                        out.write(content)
            return run_dir

        cluster = re.search(r'cluster (\S+)', owner).group(1)
        for number, text, sentence in (
                (2, owner.replace(cluster, cluster[:8] + 24 * 'f').replace('sh-1', 'sh-2'),
                 r'sh-2-\w+ is the run directory of another job \(sh-2 of cluster \w{8}f{24}, as \.gtrain-job in it says\), whose logs '
                 r'and this job\'s would be mixed: remove it, or launch with another --run-dir'),
                (3, '', r'rank-0\.out was there before this job, whose output would be appended to it: remove \S+, or launch with '
                        r'another --run-dir')):
            with self.subTest(owner=text):
                run_dir = prepare(number, text)
                done = self.launch(base)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertRegex(done.stdout + done.stderr, sentence)
                shown = done.stdout + self.gtrain('logs', f'sh-{number}', expect=None).stdout
                if text:
                    self.assertNotIn('of before', shown)
                    self.assertEqual(sorted(os.listdir(run_dir)), ['.gtrain-job', 'logs'], 'the head writes nothing there either')
                with open(os.path.join(run_dir, name)) as data:
                    self.assertEqual(data.read(), 'of before\n')
        self.assertIn('ran', self.launch(base, expect=0).stdout, 'the next one has a folder of its own')
        self.end_local_cluster()

    def test_links_above_the_run_directory_are_followed(self):
        """A home, or /scratch, is often a link: of root or of the user."""
        real, link = os.path.join(self.dir, 'real'), os.path.join(self.dir, 'scratch')
        os.mkdir(real)
        os.symlink(real, link)
        run_dir = self.run_dir(os.path.join(link, 'runs'))
        self.assertTrue(run_dir.startswith(link), run_dir)
        self.assertTrue(os.path.isdir(os.path.join(real, 'runs', os.path.basename(run_dir), 'logs', 'generation-1')))
        self.end_local_cluster()

    def test_two_clusters_in_one_folder(self):
        """Both begin with job 1: the second wrote into the directory of the first, and showed its lines once more."""
        folders = set()
        for name in ('one', 'two', 'three'):
            home = os.path.join(self.dir, name)
            done = self.gtrain('launch', '-n', '2', '--', 'sh', '-c', 'seq 6', home=home)
            self.assertEqual(len(re.findall(r'^\S+: \d$', done.stdout, re.M)), 6 if '0,1' in done.stdout else 12, done.stdout)
            folders.add(re.search(r'logs: (\S+)/logs', done.stdout + done.stderr).group(1))
        self.assertEqual(len(folders), 3, folders)
        for folder in folders:
            with open(os.path.join(folder, 'logs', 'generation-1', 'rank-0.out')) as data:
                self.assertEqual(data.read().split(), list('123456'))
        self.end_local_cluster()


class LimitsTest(harness.GtrainTest):
    """More than the machine, or the user, may have is refused in words, before anything is started."""

    ordinary_user = True  # root has no limit of processes

    def test_more_ranks_than_the_machine_holds(self):
        """65,536 ranks were accepted; most of them could not be started, and agent and keeper outlived `stop --now`."""
        refused = self.gtrain('launch', '-n', '65536', '--', 'true', expect=None)
        self.assertNotEqual(refused.returncode, 0)
        self.assertRegex(refused.stderr, r'65536 ranks are more than \S+ can hold, which is \d+: .*Start fewer')
        self.assertEqual(self.marked(), {}, 'nothing was started for it')

    def test_too_few_processes_are_said(self):
        """libzmq and RocksDB end a program that may not start a thread; `ulimit -n` had its sentence, `ulimit -u` had none."""
        for limit in (3, 14):
            with self.subTest(limit):
                done = subprocess.run([*self.prefix, 'bash', '-c', f'ulimit -u {limit}; exec "$1" launch -n 1 -- true', 'bash',
                                       self.program], env=self.env(), cwd=self.dir, stdin=subprocess.DEVNULL,
                                      capture_output=True, text=True, timeout=PATIENCE)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertRegex(done.stderr, r'this user may start \d+ more processes and threads, and this program needs \d+: '
                                              r'raise `ulimit -u`')
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.end_local_cluster()

    def test_the_soft_limit_of_files_is_the_ranks_alone(self):
        """A keeper needs several for each rank; the ranks keep the limit that the user has."""
        done = subprocess.run([*self.prefix, 'bash', '-c', 'ulimit -Sn 256; exec "$1" launch -n 100 -- bash -c "ulimit -Sn"',
                               'bash', self.program], env=self.env(), cwd=self.dir, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(set(re.findall(r'^\S+: (\S+)$', done.stdout, re.M)), {'256'})
        self.end_local_cluster()

    def test_a_log_beyond_the_limit_of_a_file_ends_nothing(self):
        """The keeper died of SIGXFSZ when a log reached `ulimit -f`, and the job with it."""
        def until(name):
            return f'while [ ! -e {self.out}/{name} ]; do sleep 0.05; done; '

        rank = f'grep SigIgn /proc/self/status; {until("shown")}head -c 300000 /dev/zero | tr "\\0" y; echo; {until("go")}'
        launch = self.start('-c', 'ulimit -f 100; exec "$@"', 'bash', self.program, 'launch', '-n', '1', '--', 'bash', '-c', rank,
                            program='bash')
        launch.wait_for(r'SigIgn:\s*[0-9a-f]+')  # or it is among what is dropped
        with open(os.path.join(self.out, 'shown'), 'w'):
            pass
        launch.wait_for(r'rank 0 on \S+: what ranks write is dropped, \S+/logs cannot be written: File too large. .* raise `ulimit -f`')
        job = self.jobs()[-1]
        self.assertIn('logs: what ranks write is dropped', self.gtrain('status', job['id']).stdout)
        with open(os.path.join(self.out, 'go'), 'w'):
            pass
        self.assertEqual(launch.wait(), 0, launch.output())
        ignored = int(re.search(r'SigIgn:\s*([0-9a-f]+)', launch.output()).group(1), 16)
        self.assertEqual(ignored >> (signal.SIGXFSZ - 1) & 1, 0, 'a rank has the signal as it comes')
        seen = self.job(job['id'])
        self.assertEqual((seen['state'], seen['restarts']), ('SUCCEEDED', 0))
        self.end_local_cluster()

    def test_ranks_beyond_the_limit_of_processes(self):
        """Of those that only this user is allowed."""
        refused = subprocess.run([*self.prefix, 'bash', '-c', 'ulimit -u 200; exec "$1" launch -n 1000 -- true', 'bash',
                                  self.program], env=self.env(), cwd=self.dir, stdin=subprocess.DEVNULL,
                                 capture_output=True, text=True, timeout=PATIENCE)
        self.assertNotEqual(refused.returncode, 0)
        self.assertRegex(refused.stderr, r'1000 ranks are more than \S+ can hold, which is \d+: this user may start \d+ more')


@unittest.skipUnless(harness.is_root(), 'only root can mount a file system and freeze it')
class SlowDiskTest(harness.GtrainTest):
    def test_the_end_of_a_log_that_is_written_late_is_shown(self):
        """P8: the job was over before its log was written, and `launch` and `logs -f` had shown what there was."""
        mount, image = (os.path.join(self.dir, name) for name in ('slow', 'image'))
        os.mkdir(mount)
        with open(image, 'wb') as out:
            out.truncate(64 << 20)
        subprocess.run(['mkfs.ext4', '-q', image], check=True)
        subprocess.run(['mount', '-o', 'loop', image, mount], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', mount])
        self.addCleanup(subprocess.run, ['fsfreeze', '-u', mount], stderr=subprocess.DEVNULL)
        owner = os.stat(self.out)
        os.chown(mount, owner.st_uid, owner.st_gid)
        go = os.path.join(self.out, 'go')
        launch = self.start('launch', '--run-dir', mount, '-n', '1', '--', 'sh', '-c',
                            f'echo begin; while [ ! -e {go} ]; do sleep 0.05; done; echo last words')
        wait_until('its first word', lambda: 'begin' in launch.output())
        (job,) = self.jobs()
        logs = self.start('logs', '-f', job['id'])
        wait_until('its first word again', lambda: 'begin' in logs.output())
        subprocess.run(['fsfreeze', '-f', mount], check=True)
        with open(go, 'w'):
            pass
        wait_until('the job to be over', lambda: self.job(job['id'])['state'] == 'SUCCEEDED')
        subprocess.run(['fsfreeze', '-u', mount], check=True)
        for reader in (launch, logs):
            self.assertEqual(reader.wait(), 0, reader.output())
            self.assertIn('last words', reader.output())
        self.end_local_cluster()


@unittest.skipUnless(harness.is_root(), 'a file system of its own needs root')
class FullDiskTest(harness.GtrainTest):
    def mount(self, path, size):
        os.makedirs(path, exist_ok=True)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'gtrain-test', path], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', path], check=False)  # lazily: it is in use until clean_up, which comes later
        self.filler = os.path.join(path, 'filler')

    def fill(self):
        with open(self.filler, 'ab', buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while file.write(b'x' * size):
                        pass
                except OSError:
                    pass

    def launch_writer(self, *flags):
        """A rank that says `begin`, then after the file `say` a block that cannot be overlooked, and ends after `go`."""
        script = (f'echo begin; while [ ! -e {self.out}/say ]; do sleep 0.05; done; head -c 5000 /dev/zero | tr "\\0" y; echo; '
                  f'while [ ! -e {self.out}/go ]; do sleep 0.05; done; echo end')
        return self.start('launch', *flags, '-n', '1', '--', 'sh', '-c', script)

    def touch(self, name):
        with open(os.path.join(self.out, name), 'w'):
            pass

    def train_on_a_full_disk(self):
        self.mount(os.path.join(self.home, 'state'), '300m')
        path = self.stepper_job('train', '--steps', '100000', ranks='1')
        job = json.loads(self.gtrain('launch', '-d', '--json', path).stdout)['job']
        self.wait_for_steps(2, 1)
        self.fill()
        return job

    def kill_head(self):
        (head,) = self.daemons('head')
        os.kill(head, 9)
        wait_until('the head to be gone', lambda: not harness.alive(head))

    def test_a_stop_that_cannot_be_stored_says_so_and_holds(self):
        """H3: the head ended, the stop was forgotten and the job ran again, charged; `status` could not even ask."""
        job = self.train_on_a_full_disk()
        for verb in (['status'], ['status', job], ['why', job], ['nodes'], ['logs', job]):
            self.gtrain(*verb)
        stop = self.gtrain('stop', job, expect=None)
        self.assertEqual(stop.returncode, 1, stop.stdout)
        self.assertRegex(stop.stderr, r'it is done, but not stored: the disk of \S+ has \S+ free of \S+; the head needs .* to write '
                                      r'anything: free some space there')
        self.wait_for_state(job, 'CANCELLED')
        os.unlink(self.filler)
        # Taken again, and answered when all before it is stored.
        wait_until('jobs to be taken', lambda: self.gtrain('launch', '-d', '-n', '1', '--', 'true', expect=None).returncode == 0)
        self.kill_head()
        seen = wait_until('what the store says', lambda: self.job(job))
        self.assertEqual((seen['state'], seen['restarts'], seen['generation']), ('CANCELLED', 0, 1))
        # Those that were taken and not stored may only have started when the head died: their keepers wait for an agent.
        wait_until('the others to end', lambda: {one['state'] for one in self.jobs()} in ({'CANCELLED', 'SUCCEEDED'}, {'CANCELLED'}))
        self.end_local_cluster()

    def test_a_stop_outlives_the_head_that_could_not_store_it(self):
        """H3, H1: its ranks were told, and their agent knows."""
        job = self.train_on_a_full_disk()
        self.gtrain('stop', job, expect=1)
        self.kill_head()
        os.unlink(self.filler)
        seen = self.wait_for_state(job, 'CANCELLED')
        self.assertEqual((seen['restarts'], seen['generation']), (0, 1))
        self.end_local_cluster()

    def test_a_disk_that_takes_no_more_files(self):
        """H3: with room for bytes and none for another file, the head ended when its store began the next one."""
        state = os.path.join(self.home, 'state')
        self.mount(state, '300m,nr_inodes=400')
        job = json.loads(self.gtrain('launch', '-d', '--json', '-n', '1', '--', 'sleep', '600').stdout)['job']
        self.wait_for_state(job, 'RUNNING')
        others = os.path.join(state, 'others')
        os.makedirs(others)
        with self.assertRaises(OSError):
            for i in range(500):
                open(os.path.join(others, str(i)), 'w').close()
        refused = wait_until('a refusal', lambda: (lambda done: done.returncode != 0 and done)(
            self.gtrain('launch', '-d', '-n', '1', '--', 'true', expect=None)))
        self.assertRegex(refused.stderr, r'takes \d+ more files of 400 \(inodes, `df -i`\); the head needs \d+ to .*: remove some files there')
        (head,) = self.daemons('head')
        self.assertIn('RUNNING', self.gtrain('status', job).stdout)
        shutil.rmtree(others)
        wait_until('jobs to be taken', lambda: self.gtrain('launch', '-d', '-n', '1', '--', 'true', expect=None).returncode == 0)
        self.assertEqual(self.daemons('head'), [head], 'it never ended')
        self.gtrain('stop', '--now', job)
        self.wait_for_state(job, 'CANCELLED')
        self.end_local_cluster()

    def test_a_full_run_directory_is_said(self):
        """P8: what ranks wrote was lost without a word in the output, in `status`, or in the file."""
        runs = os.path.join(self.dir, 'runs')
        self.mount(runs, '1m')
        launch = self.launch_writer('--run-dir', runs)
        launch.wait_for('begin')
        self.fill()
        self.touch('say')
        launch.wait_for(r'rank 0 on \S+: what ranks write is dropped, \S+/logs cannot be written: No space left on device')
        job = self.jobs()[-1]
        self.assertIn('logs: what ranks write is dropped', self.gtrain('status', job['id']).stdout)
        log = os.path.join(job['run_dir'], 'logs', 'generation-1', 'rank-0.out')
        with open(log) as data:
            self.assertEqual(data.read(), 'begin\n\n[gtrain: what follows could not be written: No space left on device]\n')
        os.unlink(self.filler)
        launch.wait_for(r'rank 0 on \S+: logs are written again')
        self.assertNotIn('logs: what ranks', self.gtrain('status', job['id']).stdout)
        self.touch('go')
        self.assertEqual(launch.wait(), 0, launch.output())
        with open(log) as data:
            self.assertRegex(data.read(), r'written: No space left on device\]\n(begin\n)?y{5000}\nend\n$')
        self.end_local_cluster()

    def test_the_report_is_named_if_it_is_there(self):
        runs = os.path.join(self.dir, 'runs')
        self.mount(runs, '1m')
        path = self.job_file('fails', 'name: fails\nrun: sh -c "echo why; exit 93"\nranks: 1\n')
        self.fill()
        without = self.gtrain('launch', '--run-dir', runs, path, expect=None)
        self.assertEqual(without.returncode, 93, without.stderr)
        self.assertNotIn('report: ', without.stderr)
        self.assertRegex(without.stderr, r'no report could be found in \S+: gtrain why fails-1 says what the head knows')
        self.assertIn('No space left on device', self.gtrain('status', 'fails-1').stdout)
        os.unlink(self.filler)
        done = self.gtrain('launch', '--run-dir', runs, path, expect=None)
        report = re.search(r'report: (\S+)', done.stderr).group(1)
        with open(report) as data:
            self.assertEqual(json.load(data)['state'], 'FAILED')
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

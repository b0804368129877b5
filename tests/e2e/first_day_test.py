"""What a stranger meets on the first day, typed as a user would: in a terminal of 100 x 30 and through pipes, without root.
One class for each habit; their order is that of a day."""
import glob
import json
import os
import shutil
import signal
import socket

import cluster
import harness
from harness import wait_until


class FirstDayTest(harness.GtrainTest):
    ordinary_user = True


# ---- live output
# ---- exec and interactive programs
# ---- stalls and stacks
# ---- a second launch of the same job


class SecondLaunchTest(FirstDayTest):
    def test_it_is_refused_by_name_and_starts_nothing(self):
        go = os.path.join(self.dir, 'go')
        job = self.stepper_job('train', '--until', go, extra='checkpoint: {uri: ./ckpt}\n')
        self.gtrain('launch', '-d', job)
        self.wait_for_steps(2, ranks=2)
        pids = self.rank_pids()
        for flags in ((), ('-d',), ('--fresh',), ('-d', '--json')):
            refused = self.gtrain('launch', *flags, job, expect=2)
            self.assertRegex(refused.stderr, r'job train-1 of \S+ saves its checkpoints to \S+/ckpt and is not over \(RUNNING, started \S+ ago\)')
            for way in ('gtrain attach train-1', 'gtrain stop train-1', '--takeover'):
                self.assertIn(way, refused.stderr)
            self.assertEqual(refused.stdout, '')
        self.assertEqual([job['id'] for job in self.jobs()], ['train-1'])
        self.assertEqual(self.rank_pids(), pids)
        self.assertFalse(os.path.exists(os.path.join(self.dir, 'ckpt')), 'nor is a folder made')
        self.gtrain('stop', 'train-1', '--now')
        self.wait_for_state('train-1', 'CANCELLED')
        self.end_local_cluster()

    def test_a_program_that_chooses_its_folder_itself(self):
        """No checkpoint.uri: the second launch would save where the first does."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            out.write('a line of text that is learned by heart\n' * 500)
        os.chmod(text, 0o644)
        char_lm = shutil.copy(os.path.join(harness.BUILD, 'examples', 'char_lm'), self.dir)
        words = (f'{char_lm} --text {text} --steps 1000000').split()
        first = self.start('launch', '--name', 'lm', '-n', '1', '--', *words)
        manifests = os.path.join(self.dir, 'ckpt', 'char_lm', 'manifests')
        wait_until('a checkpoint', lambda: os.path.isdir(manifests) and os.listdir(manifests))
        wait_until('the head to know', lambda: (self.job('lm') or {}).get('last_checkpoint'))
        refused = self.gtrain('launch', '--name', 'lm', '-n', '1', '--', *words, expect=2)
        self.assertRegex(refused.stderr, r'job lm-1 of \S+ saves its checkpoints to a folder that its program chose.* started \S+ ago')
        self.assertIn('gtrain stop lm-1', refused.stderr)
        # Another name is another job for the head; the folder knows better.
        other = self.gtrain('launch', '--name', 'other', '-n', '1', '--', *words, expect=None)
        self.assertNotEqual(other.returncode, 0)
        self.assertRegex(other.stdout + other.stderr, r'in use: it belongs to job .?lm-1.*which is not over')
        self.gtrain('stop', 'lm-1', '--now')
        first.wait()
        self.end_local_cluster()


# ---- nothing vanishes


class NothingVanishesTest(FirstDayTest):
    def state(self, *names):
        return os.path.join(self.home, 'state', 'gtrain', 'local', *names)

    def listed(self):
        """The ids in the index."""
        try:
            with open(self.state('runs.json')) as index:
                return [job['id'] for job in json.load(index)['jobs']]
        except FileNotFoundError:
            return []

    def read_result(self, path):
        with open(path) as result:
            return json.load(result)

    def result_of(self, job):
        """The result in the run directory, once it is there."""
        found = lambda: glob.glob(os.path.join(self.dir, 'gtrain-runs', job + '-*', 'result.json'))
        return wait_until(f'the result of {job}', found)[0]

    def test_what_a_cluster_leaves_when_it_has_ended(self):
        good = self.stepper_job('good', '--steps', '3', extra='progress: {step: "step (\\\\d+)"}\n')
        self.assertEqual(self.gtrain('launch', good).returncode, 0)
        self.gtrain('launch', '-n', '2', '--', 'sh', '-c', 'echo before the end; echo what went wrong >&2; exit 93', expect=93)
        self.end_local_cluster()
        listed = self.gtrain('status')
        self.assertEqual(listed.stderr, 'gtrain: no cluster runs; this is what it left\n')
        self.assertRegex(listed.stdout, r'(?s)JOB.*\nsh-2 +FAILED .*\ngood-1 +SUCCEEDED ')
        document = json.loads(self.gtrain('status', '--json').stdout)
        self.assertEqual([(job['id'], job['state'], job['exit_code']) for job in document['jobs']],
                         [('good-1', 'SUCCEEDED', 0), ('sh-2', 'FAILED', 93)])
        self.assertIs(document['head'], False)
        one = self.gtrain('status', 'sh')
        self.assertRegex(one.stdout, r'(?s)sh-2 -- FAILED.*ended [0-9:]+, ran .*first fault: .*exit code 93.*logs: /')
        why = self.gtrain('why').stdout
        self.assertRegex(why, r'(?s)sh-2 is FAILED.*\n  [0-9:]{8}  state: QUEUED.*\n  [0-9:]{8}  fault: ')
        self.assertIn('before the end', self.gtrain('logs', 'sh-2').stdout)
        self.assertIn('what went wrong', self.gtrain('logs', 'sh-2', '--err', '--rank', '1').stdout)
        self.assertIn('nothing that it left is called nosuch', self.gtrain('why', 'nosuch', expect=1).stderr)
        result = self.read_result(self.result_of('good'))
        for key in ('submitted', 'started', 'ended', 'run_seconds', 'restarts', 'events', 'exit_code', 'user', 'cluster'):
            self.assertIsNotNone(result[key], key)
        self.assertLessEqual(result['submitted'], result['started'])
        self.assertLessEqual(result['started'], result['ended'])
        self.assertEqual(result['events'][-1]['text'][:9], 'SUCCEEDED')

    def test_a_run_directory_says_it_without_any_cluster(self):
        self.gtrain('launch', '-n', '1', '--', 'sh', '-c', 'echo to be kept')
        run_dir = os.path.dirname(self.result_of('sh'))
        self.end_local_cluster()
        shutil.rmtree(self.state())
        self.assertIn('no local cluster runs', self.gtrain('status', expect=1).stderr)
        self.assertIn('SUCCEEDED', self.gtrain('status', run_dir).stdout)
        self.assertIn('SUCCEEDED', self.gtrain('status', 'sh-1').stdout)
        self.assertIn('what happened', self.gtrain('why', os.path.relpath(run_dir, self.dir)).stdout)
        self.assertEqual(self.gtrain('logs', run_dir).stdout, 'to be kept\n')

    def test_a_head_that_died_before_it_wrote(self):
        """The next one writes what is missing; the folder of who removed his run is not made again."""
        for name in ('one', 'two'):
            self.gtrain('launch', '--name', name, '-n', '1', '--', 'true')
        results = [self.result_of(name) for name in ('one', 'two')]
        wait_until('the index', lambda: self.listed() == ['one-1', 'two-2'])
        self.end_local_cluster()
        os.remove(self.state('runs.json'))
        os.remove(results[0])
        shutil.rmtree(os.path.dirname(results[1]))
        self.gtrain('launch', '--name', 'three', '-n', '1', '--', 'true')
        wait_until('all three in the index', lambda: self.listed() == ['one-1', 'two-2', 'three-3'])
        wait_until('the result of the first', lambda: os.path.exists(results[0]))
        self.assertEqual(self.read_result(results[0])['state'], 'SUCCEEDED')
        self.assertFalse(os.path.exists(os.path.dirname(results[1])))
        self.end_local_cluster()

    def test_a_killed_cluster_is_no_cluster_that_ended(self):
        """What is over can be read all the same; that something may run is said, and is an error for a list."""
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.result_of('true')
        wait_until('the index', self.listed)
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        self.wait_for_no_processes()
        listed = self.gtrain('status', expect=1)
        self.assertIn('was killed', listed.stderr)
        self.assertIn('true-1', listed.stdout)
        self.assertIn('SUCCEEDED', self.gtrain('status', 'true-1').stdout)


# ---- times and owners


class TimesTest(FirstDayTest):
    def test_times_and_owners_newest_first(self):
        for name in ('one', 'two'):
            self.gtrain('launch', '--name', name, '-n', '1', '--', 'true')
        job = self.stepper_job('long', '--until', os.path.join(self.dir, 'go'))
        self.gtrain('launch', '-d', job)
        self.wait_for_steps(2, ranks=2)
        self.assertRegex(self.gtrain('status').stdout,
                         r'(?s)^JOB +STATE +RANKS +STARTED +TIME .*\nlong-3 +RUNNING +2 +[0-9:]{8} +\d+s .*\ntwo-2 .*\none-1 ')
        self.assertRegex(self.gtrain('status', 'long').stdout, r'user \S+, submitted [0-9:]{8}, started [0-9:]{8}, running for \d+s')
        jobs = json.loads(self.gtrain('status', '--json').stdout)['jobs']
        self.assertEqual([job['id'] for job in jobs], ['one-1', 'two-2', 'long-3'], 'as submitted')
        self.assertRegex(jobs[2]['started'], r'^\d{4}-\d\d-\d\dT[0-9:.]+Z$')
        self.assertTrue(jobs[2]['user'])
        self.assertIsNone(jobs[2]['ended'])
        self.assertGreater(jobs[2]['run_seconds'], 0)
        self.assertRegex(self.gtrain('why', 'long').stdout, r'\n  [0-9:]{8}  grant: generation 1')
        self.assertRegex(json.loads(self.gtrain('why', 'long', '--json').stdout)['events'][0]['time'], r'^\d{4}-.*Z$')
        newest = self.gtrain('status', '--limit', '1').stdout
        self.assertRegex(newest, r'(?s)long-3.*\nand 2 older; --all')
        self.assertNotIn('one-1', newest)
        self.assertEqual([job['id'] for job in json.loads(self.gtrain('status', '--limit', '2', '--json').stdout)['jobs']],
                         ['two-2', 'long-3'])
        self.assertIn('one-1', self.gtrain('status', '--all').stdout)
        self.assertIn('do not go together', self.gtrain('status', '--all', '--limit', '1', expect=2).stderr)
        self.gtrain('stop', 'long', '--now')
        self.wait_for_state('long', 'CANCELLED')
        self.end_local_cluster()

    def test_watch(self):
        self.assertIn('draws on a terminal', self.gtrain('status', '--watch', expect=2).stderr)
        job = self.stepper_job('seen', '--until', os.path.join(self.dir, 'go'))
        self.gtrain('launch', '-d', job)
        self.wait_for_steps(2, ranks=2)
        watch = self.start('status', '--watch', terminal=True)
        watch.wait_for(r'(?s)seen-1 +RUNNING.*\x1b\[\d+A\r\x1b\[J.*seen-1 +RUNNING')  # it is drawn in its own place
        watch.type(b'\x03')
        self.assertEqual(watch.wait(), 0, watch.output())
        one = self.start('status', '-w', 'seen', terminal=True)
        one.wait_for('running for')
        open(os.path.join(self.dir, 'go'), 'w').close()
        self.assertEqual(one.wait(), 0, one.output())
        self.assertIn('SUCCEEDED', one.output())
        self.end_local_cluster()


# ---- a head that restarts or moves


class HeadThatMovesTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 1

    def endpoint(self):
        with open(os.path.join(self.home, 'state', 'gtrain', 'lab', 'endpoint.json')) as endpoint:
            return json.load(endpoint)['endpoint']

    def end_head(self):
        self.head.signal(signal.SIGTERM)
        self.assertEqual(self.head.wait(), 0, self.head.output())

    def move_head(self):
        port = cluster.free_port()  # while the head has its own
        self.end_head()
        self.port = port
        self.start_head()

    def wait_for_node(self):
        wait_until('the node to be back', lambda: self.nodes_in('alive') == 1)

    def test_without_listen_it_serves_where_it_did(self):
        for end in (self.end_head, self.kill_head):
            end()
            self.head = self.start('head', '--context', 'lab', '--allow-root')
            self.wait_for_node()
            self.assertEqual(self.endpoint(), f'127.0.0.1:{self.port}')
        self.end_head()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(('127.0.0.1', self.port))
            taken.listen()
            said = self.gtrain('head', '--context', 'lab', '--allow-root', expect=1).stderr
        self.assertRegex(said, r'It served there before, says .*/lab/served.json; --listen ADDRESS:PORT')

    def test_a_dead_head_is_named(self):
        credential = os.path.join(self.dir, 'ann.credential')
        with open(credential, 'w') as out:
            out.write(self.gtrain('user', 'add', 'ann').stdout)
        os.chmod(credential, 0o644)
        far = os.path.join(self.dir, 'far')
        os.makedirs(far)
        os.chmod(far, 0o777)
        self.gtrain('context', 'add', 'lab', '--credential', credential, home=far)
        self.gtrain('status', home=far)
        self.kill_head()
        for verb in ('status', 'why', 'nodes', 'logs'):
            self.assertRegex(self.gtrain(verb, expect=1).stderr,
                             r'the head of context lab \(process \d+, at \S+\) has died.*gtrain head --context lab')
            self.assertRegex(self.gtrain(verb, expect=1, home=far).stderr,
                             r'the head of context lab does not answer: nothing listens at \S+\. .*gtrain head --context lab')
        self.start_head()
        self.wait_for_node()

    def test_an_agent_finds_a_head_that_moved(self):
        """By what a person wrote into its file while it ran; it remembers that; and by a flag."""
        self.move_head()
        path = os.path.join(self.agent_state(0), 'cluster.json')
        with open(path) as file:
            membership = json.load(file)
        first = membership['endpoints'][0]
        membership['endpoints'] = [first, 'localhost:1', f'127.0.0.1:{self.port}']
        with open(path, 'w') as file:
            json.dump(membership, file)
        self.wait_for_node()

        def remembered():
            with open(path) as file:
                return json.load(file)
        self.assertEqual(remembered()['endpoint'], f'127.0.0.1:{self.port}')
        self.assertIn(first, remembered()['endpoints'])
        self.agents[0].signal(signal.SIGTERM)
        self.agents[0].wait()
        self.move_head()
        self.agents[0] = self.start_agent(0, '--head', f'127.0.0.1:{self.port}')
        self.wait_for_node()
        self.assertEqual(remembered()['endpoint'], f'127.0.0.1:{self.port}')


# ---- secrets
# ---- attach
# ---- ranks between min and max
# ---- terminals and colours
# ---- errors once
# ---- plan and logs
# ---- JSON and completion
# ---- a million lines
# ---- the end

if __name__ == '__main__':
    harness.main()

"""Files that a person or a crash has damaged, and names that nobody would choose: what gtrain reads is looked at before
it is believed, and what it shows cannot drive a terminal."""
import json
import os
import re
import signal

import cluster
import harness
from harness import wait_until

CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]')
STEALS = '\x1b]52;c;ZXZpbA==\a'  # puts a text into the clipboard of whoever looks at it


# ---- where the head is
class AddressesTest(cluster.ClusterTest):
    ordinary_user = True
    agent_count = 1

    def membership(self):
        with open(self.path()) as file:
            return json.load(file)

    def path(self):
        return os.path.join(self.agent_state(0), 'cluster.json')

    def write(self, **changes):
        with open(self.path(), 'w') as file:
            json.dump(dict(self.membership_before, **changes), file)

    def wait_for_node(self):
        wait_until('the node to be back', lambda: self.nodes_in('alive') == 1)

    def end_agent(self):
        self.agents[0].signal(signal.SIGTERM)
        self.assertEqual(self.agents[0].wait(), 0)

    def setUp(self):
        super().setUp()
        self.membership_before = self.membership()
        self.good = f'127.0.0.1:{self.port}'

    def test_what_is_no_address_is_passed_over(self):
        """Such a line was taken for where the head is, saved as that, and the agent did not start any more."""
        self.write(endpoints=[self.good, 'nonsense'])
        self.kill_head()
        self.agents[0].wait_for(r'cluster\.json names what is no address of a head.*passed over: "nonsense"')
        self.start_head()
        self.wait_for_node()
        self.assertEqual(self.membership()['endpoint'], self.good)
        self.assertNotIn('the head is at nonsense', self.agents[0].output())
        self.end_agent()
        self.write(endpoint='nonsense', endpoints=['nonsense', self.good])
        self.agents[0] = self.start_agent(0)
        self.agents[0].wait_for(r'passed over: "nonsense"')  # the node may be alive for the head since before
        self.wait_for_node()
        self.assertEqual(self.agents[0].output().count('passed over: "nonsense"'), 1)
        self.end_agent()
        self.write(endpoint='nonsense', endpoints=['nonsense'])
        said = self.gtrain('agent', '--notices', 'off', '--allow-root', expect=1, home=self.node_home(0)).stderr
        self.assertRegex(said, r'no address in \S+cluster\.json could be one of a head; say where it is with --head HOST:PORT')
        self.agents[0] = self.start_agent(0, '--head', self.good)
        self.wait_for_node()

    def test_a_bad_address_of_a_flag_is_not_kept(self):
        self.end_agent()
        for bad in ('10.0.0.2', 'h:7170 ', 'http://x:1', '*:7170'):
            with self.subTest(bad):
                said = self.gtrain('agent', '--notices', 'off', '--allow-root', '--head', self.good, '--head', bad, expect=2,
                                   home=self.node_home(0)).stderr
                self.assertIn(f'--head "{bad}" is not HOST:PORT, as in 10.0.0.2:7070', said)
                self.assertEqual(self.membership(), self.membership_before)
        self.agents[0] = self.start_agent(0)
        self.wait_for_node()

    def test_what_a_person_added_is_kept_when_the_head_is_back(self):
        added = ['127.0.0.1:1', 'spare.example:7070']
        self.kill_head()
        self.write(endpoint=added[0], endpoints=added)
        self.start_head()
        self.wait_for_node()
        wait_until('where the head is to be kept', lambda: self.membership()['endpoint'] == self.good)
        self.assertEqual(self.membership()['endpoints'], [self.good, *added])

    def test_the_name_of_a_machine_cannot_drive_a_terminal(self):
        self.end_agent()
        self.agents[0] = self.start('agent', '--hostname', STEALS, '--allow-root', '--notices', 'off', home=self.node_home(0))
        wait_until('the node to have its new name', lambda: self.node(re.sub('[\x1b\a]', '?', STEALS)) and self.nodes_in('alive') == 1)
        for words in (('nodes',), ('node', 'drain', STEALS), ('nodes',), ('node', 'undrain', STEALS)):
            with self.subTest(words):
                done = self.client(*words)
                self.assertFalse(CONTROLS.search(done.stdout + done.stderr), repr(done.stdout + done.stderr))
                if 'drain' in words[1:]:
                    self.assertIn('\\x1b]52;c;ZXZpbA==\\x07', done.stdout, 'what was typed')
        self.assertFalse(CONTROLS.search(self.head.output()), repr(self.head.output()))

    def test_a_head_that_does_not_know_where_it_served_must_be_told(self):
        """It served at a random port of the loopback interface, and wrote that over the file."""
        path = os.path.join(self.home, 'state', 'gtrain', 'lab', 'served.json')
        self.kill_head()
        for damage in ('{}', 'garbage', '', '[' * 60000, json.dumps({'listen': [self.good]}), json.dumps({'listen': [], 'advertise': ''})):
            with self.subTest(damage[:40]):
                with open(path, 'w') as file:
                    file.write(damage)
                said = self.gtrain('head', '--context', 'lab', '--allow-root', expect=1).stderr
                self.assertRegex(said, r'served\.json does not say where the head served last, .*: say where with --listen ADDRESS:PORT')
                with open(path) as file:
                    self.assertEqual(file.read(), damage)
        said = self.gtrain('head', '--context', 'lab', '--allow-root', '--listen', self.good, '--advertise', 'head', expect=2).stderr
        self.assertIn('--advertise "head" is not HOST:PORT', said)
        self.start_head()
        self.wait_for_node()
        with open(path) as file:
            self.assertEqual(json.load(file)['listen'], [self.good])


# ---- what is shown
class ShownTest(harness.GtrainTest):
    ordinary_user = True

    def assert_harmless(self, done):
        for text in (done.stdout, done.stderr):
            self.assertFalse(CONTROLS.search(text), repr(text))

    def test_what_another_user_left_cannot_drive_a_terminal(self):
        folder = os.path.join(self.dir, 'left')
        os.makedirs(folder)
        job = {'id': f'a{STEALS}-1', 'name': 'a', 'state': 'FAILED', 'reason': STEALS + '\u202e', 'run_dir': folder + STEALS,
               'user': STEALS, 'generation': 1, 'ranks': [{'rank': 0, 'hostname': STEALS, 'state': '\x9b2J'}]}
        with open(os.path.join(folder, 'result.json'), 'w') as file:
            json.dump(job, file)
        for words in (('status', folder + '/'), ('why', folder + '/'), ('logs', folder + '/')):
            with self.subTest(words[0]):
                done = self.gtrain(*words, expect=None)
                self.assert_harmless(done)
                if words[0] != 'logs':
                    self.assertIn('\\x1b]52;c;ZXZpbA==\\x07', done.stdout)
        with open(os.path.join(folder, 'result.json'), 'w') as file:
            json.dump(dict(job, state=f'FAILED{STEALS}'), file)
        done = self.gtrain('status', folder + '/', expect=1)
        self.assert_harmless(done)
        self.assertIn('is damaged: it calls its job FAILED\\x1b', done.stderr)

    def test_a_run_directory_that_cannot_be_shown_is_refused(self):
        for bad in (STEALS, 'a\nb', 'a\u202eb'):
            with self.subTest(bad):
                done = self.gtrain('launch', '-n', '1', '--run-dir', os.path.join(self.dir, bad), '--', 'true', expect=2)
                self.assert_harmless(done)
                self.assertIn('--run-dir has a control character or a line end in it', done.stderr)
        self.assertFalse(self.daemons('head'))

    def test_what_was_typed_is_not_echoed_raw(self):
        for words in (('node', 'drain', STEALS), ('status', STEALS), ('stop', STEALS), ('context', 'use', STEALS), (STEALS,)):
            with self.subTest(words[0]):
                self.assert_harmless(self.gtrain(*words, expect=None))

    def test_exec_passes_on_all_bytes_of_stderr(self):
        job = json.loads(self.gtrain('launch', '-d', '--json', '-n', '1', '--', 'sleep', '600').stdout)['job']
        self.wait_for_state(job, 'RUNNING')
        done = self.gtrain('exec', job, '--', 'sh', '-c', r'printf "out\000put\n"; printf "err\000or\n" >&2')
        self.assertEqual((done.stdout, done.stderr), ('out\0put\n', 'err\0or\n'))
        self.gtrain('stop', '--now', job)
        self.end_local_cluster()


# ---- what is read
class DeepJsonTest(harness.GtrainTest):
    ordinary_user = True

    def test_a_result_that_is_nested_without_end_is_damage(self):
        folder = os.path.join(self.dir, 'left')
        os.makedirs(folder)
        for text in ('[' * 70000, '[' * 70000 + ']' * 70000, '{"id": "a-1", "x": ' + '[' * 70000 + ']' * 70000 + '}'):
            with open(os.path.join(folder, 'result.json'), 'w') as file:
                file.write(text)
            for verb in ('status', 'why', 'logs'):
                done = self.gtrain(verb, folder + '/', expect=1)
                self.assertRegex(done.stderr, r'left/+result\.json is damaged')

    def test_an_index_that_is_nested_without_end_is_begun_anew(self):
        self.gtrain('launch', '-n', '1', '--', 'true')
        self.end_local_cluster()
        path = os.path.join(self.home, 'state', 'gtrain', 'local', 'runs.json')
        with open(path) as file:
            whole = json.load(file)
        self.assertEqual([job['id'] for job in whole['jobs']], ['true-1'])
        for value in ('[' * 200000 + ']' * 200000, '{"a":' * 200000 + '1' + '}' * 200000):
            with open(path, 'w') as file:
                file.write('{"cluster": "%s", "local": true, "jobs": [{"id": "true-1", "x": %s}]}' % (whole['cluster'], value))
            self.gtrain('status', expect=None)
            self.gtrain('status', 'nothing', expect=1)
            self.gtrain('launch', '-n', '1', '--', 'true')
            self.end_local_cluster()
            with open(path) as file:
                jobs = json.load(file)['jobs']
            self.assertEqual([job for job in jobs if 'x' in job], [])
            self.assertTrue(jobs, 'the launch that came after the damage')


# ---- secrets of the local cluster
class LocalSecretsTest(harness.GtrainTest):
    ordinary_user = True
    JOB = 'name: secret\nrun: [python3, -c, "import os; print(repr(os.environ[\'KEY\']))"]\nranks: 1\nsecrets: {KEY: {env: MY_KEY}}\n'

    def kept(self):
        return [os.path.join(folder, name) for folder, _, names in os.walk(os.path.join(self.home, 'state', 'gtrain', 'local', 'secrets'))
                for name in names]

    def test_they_end_with_the_cluster_and_with_a_refused_launch(self):
        job = self.job_file('secret', self.JOB)
        value = 'two lines\n \n\n'
        self.assertIn(repr(value), self.gtrain('launch', job, MY_KEY=value).stdout)
        before = self.kept()
        self.assertTrue(before)
        long = os.path.join(self.dir, *['d' * 100] * 40)
        refused = self.gtrain('launch', '--run-dir', long, job, MY_KEY='another', expect=2)
        self.assertIn('run directory', refused.stderr)
        self.assertEqual(self.kept(), before, 'those of the refused launch are gone')
        self.wait_for_no_processes()
        self.assertEqual(self.kept(), [])

    def test_one_that_is_too_long_is_refused_at_its_launch(self):
        job = self.job_file('secret', self.JOB)
        done = self.gtrain('launch', job, MY_KEY='s' * 65537, expect=2)
        self.assertIn('secret KEY: the variable MY_KEY has 65537 bytes, and a secret has at most 65536', done.stderr)
        self.assertFalse(self.daemons('head'))
        job = self.job_file('secret', self.JOB.replace("repr(os.environ[\'KEY\'])", "len(os.environ[\'KEY\'])"))
        self.assertIn('65536', self.gtrain('launch', job, MY_KEY='s' * 65536).stdout)
        self.end_local_cluster()


if __name__ == '__main__':
    harness.main()

"""Who may do what, from outside: tokens, revoked nodes, users, impostors, typos, and what a rank can reach."""
import json
import os
import re
import shutil
import signal
import unittest

import cluster
import harness
from harness import alive, wait_until

WORKER = '''
import ctypes, json, os, socket, sys
found = {'env': dict(os.environ), 'fds': {}}
for fd in os.listdir('/proc/self/fd'):
    try:
        found['fds'][fd] = os.readlink('/proc/self/fd/' + fd)
    except OSError:
        pass  # of the listing itself
with open('/proc/self/status') as status:
    found['status'] = dict(line.rstrip().split(':', 1) for line in status if ':' in line)
libc = ctypes.CDLL(None, use_errno=True)
found['reached'] = []
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        with open(f'/proc/{pid}/cmdline', 'rb') as data:
            words = data.read().split(b'\\0')
    except OSError:
        continue
    base = os.path.basename(words[0])
    if not (base == b'gtrain-keeper' or base == b'gtrain' and words[1:2] in ([b'agent'], [b'head'])):
        continue
    if sys.argv[2].encode() not in b' '.join(words):
        continue  # somebody else's
    name = base.decode() if base != b'gtrain' else words[1].decode()
    found.setdefault('seen', []).append(name)
    for secret in ('environ', 'mem', 'maps'):
        try:
            with open(f'/proc/{pid}/{secret}', 'rb') as data:
                if secret != 'mem':
                    data.read(1)
            found['reached'].append(f'{name} {secret}')
        except OSError:
            pass
    if libc.ptrace(16, int(pid), None, None) == 0:  # PTRACE_ATTACH
        libc.ptrace(17, int(pid), None, None)
        found['reached'].append(f'{name} ptrace')
found['keepers'] = 0
for folder, _, files in os.walk(sys.argv[2]):
    if 'agent.sock' not in files:
        continue
    os.chdir(folder)  # a path in an address is short
    found['keepers'] += 1
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(10)
        try:
            agent.connect('agent.sock')
            heard = agent.recv(1)  # a keeper that takes us for an agent waits for our first word
        except ConnectionError:
            continue
        except TimeoutError:
            heard = b'?'
        if heard:
            found['reached'].append('agent.sock of a keeper')
with open(sys.argv[1], 'w') as out:
    json.dump(found, out)
'''


class WorkerTest(harness.GtrainTest):
    """X5, X6: everything runs as one ordinary user; what can be kept from a rank is."""
    ordinary_user = True

    def test_rank_reaches_neither_daemon_nor_key(self):
        worker = os.path.join(self.dir, 'worker.py')
        with open(worker, 'w') as out:
            out.write(WORKER)
        os.chmod(worker, 0o644)
        report = os.path.join(self.out, 'found.json')
        job = self.job_file('curious', f'name: curious\nrun: /usr/bin/python3 {worker} {report} {self.dir}\n')
        launch = self.start('launch', job)
        self.assertEqual(launch.wait(), 0, launch.output())
        with open(report) as data:
            found = json.load(data)
        self.assertEqual(sorted(set(found['seen'])), ['agent', 'gtrain-keeper', 'head'])
        self.assertEqual(found['reached'], [], 'a rank must not look into a daemon')
        self.assertGreaterEqual(found['keepers'], 1)
        self.assertEqual(found['status']['NoNewPrivs'].strip(), '1')
        self.assertLessEqual(set(found['fds']), {'0', '1', '2', '3'}, found['fds'])
        self.assertFalse([link for link in found['fds'].values() if 'socket' in link or 'keeper' in link], found['fds'])
        secrets = []
        for folder, _, files in os.walk(self.home):
            for name in files:
                if name.endswith('.key'):
                    with open(os.path.join(folder, name)) as data:
                        secrets += re.findall(r'^secret (\S+)', data.read(), re.M)
        self.assertGreaterEqual(len(secrets), 3)
        for name, value in found['env'].items():
            self.assertFalse('.key' in value or any(secret in value for secret in secrets), name)
        self.end_local_cluster()


class ClusterSecurityTest(cluster.ClusterTest):
    def as_user(self, name, role='user'):
        """Another person on another machine: a home of its own with a context made from a credential."""
        home = os.path.join(self.dir, 'home-' + name)
        os.makedirs(home)
        credential = os.path.join(home, 'credential')
        with open(credential, 'w') as out:
            out.write(self.client('user', 'add', name, '--role', role).stdout)
        self.gtrain('context', 'add', 'lab', '--credential', credential, home=home)
        self.gtrain('context', 'use', 'lab', home=home)
        return home

    def stolen(self, name, key_file):
        """A home whose context uses somebody's key file."""
        home = os.path.join(self.dir, 'home-' + name)
        os.makedirs(os.path.join(home, 'config', 'gtrain'))
        with open(self.head_file('endpoint.json')) as data:
            endpoint = json.load(data)
        with open(os.path.join(home, 'config', 'gtrain', 'contexts.json'), 'w') as out:
            json.dump({'current': 'lab', 'contexts': {'lab': {
                'endpoint': endpoint['endpoint'], 'head_public_key': endpoint['head_public_key'],
                'key_file': key_file}}}, out)
        return home

    def head_file(self, name):
        return os.path.join(self.home, 'state', 'gtrain', 'lab', name)

    def audit(self):
        self.assertIn('hold together', self.client('audit', '--verify').stdout)
        return [json.loads(line) for line in self.client('audit').stdout.splitlines()]

    def stop_and_wait(self, job):
        self.client('stop', '--now', job)
        self.wait_for_state(job, 'CANCELLED')
        wait_until('the keepers to leave', lambda: not [
            words for words in self.marked().values() if 'gtrain-keeper' in words[0]])

    def long_job(self, name, nodes='{min: 1, max: 2}'):
        return self.job_file(name, f'name: {name}\nrun: /usr/bin/python3 {self.stepper} --out {self.out} --steps 100000\n'
                                   f'nodes: {nodes}\nranks_per_node: 1\nresources: {{cpus: 1}}\n')


class RevokeTest(ClusterSecurityTest):
    def test_revoked_node_is_gone_at_once_and_stays_out(self):
        job = self.submit(self.long_job('hardy'))
        wait_until('two ranks', lambda: len(self.rank_pids()) == 2)
        status = self.wait_for_state('hardy', 'RUNNING')
        node1 = self.node('node1')['id']
        pid = next(rank['pid'] for rank in status['ranks'] if rank['node'] == node1)
        self.client('node', 'revoke', 'node1', '--reason', 'stolen')
        self.assertEqual(self.agents[1].wait(), 1)
        self.assertIn('this node was revoked by', self.agents[1].output())
        self.assertIn('stolen', self.agents[1].output())
        wait_until('its rank to be gone', lambda: not alive(pid))
        self.assertEqual(self.nodes_in('alive', 'suspect', 'dead'), 1)

        def goes_on():
            now = self.job('hardy')
            return now['state'] == 'RUNNING' and now['generation'] > status['generation'] and len(now['ranks']) == 1
        wait_until('the job to go on without the node', goes_on)
        self.assertIn('revoked by', self.job('hardy')['last_fault']['message'])

        again = self.start_agent(1)
        self.assertEqual(again.wait(), 1, again.output())
        self.assertIn('it was revoked, or never joined', again.output())
        with_token = self.join_agent(1)  # a new token does not help the old key
        self.assertEqual(with_token.wait(), 1, with_token.output())
        self.kill_head()
        self.start_head()
        wait_until('the head to be back', lambda: self.nodes_in('alive') == 1)
        lines = self.audit()
        self.assertTrue([line for line in lines if line['action'] == 'node revoke' and line['outcome'] == 'ok' and
                         line.get('reason', '').endswith(': stolen')], lines)
        self.stop_and_wait(job)

    def test_revoked_while_away(self):
        self.agents[1].signal(signal.SIGTERM)
        self.agents[1].wait()
        self.client('node', 'revoke', self.node('node1')['id'])
        again = self.start_agent(1)
        self.assertEqual(again.wait(), 1, again.output())
        self.assertIn('has refused the key of this node', again.output())


class TokenTest(ClusterSecurityTest):
    agent_count = 1

    def test_tokens_outlive_the_head_and_serve_once_X4(self):
        token = self.client('token', 'create').stdout.strip()
        listed = json.loads(self.client('token', 'ls', '--json').stdout)['tokens']
        self.kill_head()
        self.start_head()
        wait_until('the head to be back', lambda: self.nodes_in('alive') == 1)
        os.makedirs(self.node_home(1))
        os.makedirs(self.node_home(2))
        argv = self.start_agent(1, '--join', token)
        self.assertEqual(argv.wait(), 2, argv.output())
        self.assertIn('can be read by every user', argv.output())
        path = os.path.join(self.node_home(1), 'token')
        with open(path, 'w') as file:
            file.write(token + '\n')
        self.start_agent(1, '--join', path)
        wait_until('the second node', lambda: self.nodes_in('alive') == 2)
        replay = self.start_agent(2, '--join', path)  # it is nobody's key any more
        self.assertEqual(replay.wait(), 1, replay.output())
        self.assertIn('refuses this join token: it is used', replay.output())
        joins = [line for line in self.audit() if line['action'] == 'join']
        self.assertEqual(joins[-1]['key'], listed[-1]['id'])
        self.assertEqual([line['outcome'] for line in joins], ['ok'] * 2)

        self.client('token', 'revoke', listed[-1]['id'])
        several = self.client('token', 'create', '--uses', '2', '--life', '1h').stdout.strip()
        listed = json.loads(self.client('token', 'ls', '--json').stdout)['tokens']
        self.assertEqual(listed[-1]['uses_left'], 2)
        self.start_agent(2, GTRAIN_JOIN_TOKEN=several)
        wait_until('the third node', lambda: self.nodes_in('alive') == 3)
        self.assertIn('create, ls or revoke', self.client('token', 'revok', expect=2).stderr)


class JoinTest(ClusterSecurityTest):
    """How an agent is let in: whose ranks it would run, and where its token comes from."""
    agent_count = 0

    def setUp(self):
        super().setUp()
        self.head.wait_for('serving cluster')

    def agent(self, name, *words, expect, **options):
        """`gtrain agent` with a state folder of its own, of which it is expected to make nothing."""
        state = os.path.join(self.dir, 'state-' + name)
        done = self.gtrain('agent', '--dir', state, '--notices', 'off', *words, expect=expect, **options)
        self.assertFalse(os.path.exists(state), 'it made a key before it refused')
        self.assertEqual(self.nodes(), [])
        return done

    def outside_containers(self):
        """The prefix of a command that sees all folders of this machine and none of the files by which a container is known."""
        root = os.path.join(self.dir, 'root')
        os.mkdir(root)
        script = ('for each in /*; do case "$each" in /run) mkdir "$0/run" ;; *) if [ -L "$each" ]; then cp -d "$each" "$0/"; elif [ -d '
                  '"$each" ]; then mkdir "$0$each" && mount --rbind "$each" "$0$each" || exit 99; fi ;; esac; done; '
                  'cd / && exec chroot "$0" "$@"')
        return ['unshare', '--mount', 'sh', '-c', script, root]

    @unittest.skipUnless(harness.is_root() and shutil.which('unshare'), 'needs root, whose agent alone is refused, and unshare(1)')
    def test_an_agent_of_root_runs_nothing_unless_told_X7(self):
        path = self.token_file()
        refused = self.agent('root', '--join', path, expect=1, prefix=self.outside_containers())
        self.assertRegex(refused.stderr, r'^gtrain: an agent of root runs what users submit as root\. Start it as a user of its own '
                                         r'\(docs/security\.md\), or in a container, or say --allow-root\n$')
        self.assertEqual(self.tokens()[-1]['uses_left'], 1)
        os.makedirs(self.node_home(0))
        self.start_agent(0, '--join', path)  # with --allow-root
        wait_until('the node', lambda: self.nodes_in('alive') == 1)

    def test_a_token_on_the_command_line_is_refused_with_what_to_do(self):
        """Item 2 of issue 16: every user of the machine reads the words of every process."""
        token = self.client('token', 'create').stdout.strip()
        refused = self.agent('argv', '--join', token, '--allow-root', expect=2)
        for words in ('can be read by every user of this machine', 'gtrain token revoke ID', 'Write it to a file that only you can '
                      'read, --join FILE', 'or pipe it: --join -', 'or set GTRAIN_JOIN_TOKEN'):
            self.assertIn(words, refused.stderr)
        self.assertNotIn(token, refused.stderr, 'and is not written once more, into a log')
        ident = self.tokens()[-1]['id']
        self.client('token', 'revoke', ident)
        self.assertNotIn(ident, [each['id'] for each in self.tokens()], 'the advice can be followed')

    def test_a_token_comes_from_a_file_or_a_pipe_or_the_environment(self):
        """Item 2 of issue 16; in no case is it in the words of the process."""
        ways = {0: (['--join', self.token_file()], {}), 1: (['--join', '-'], {}), 2: ([], {'GTRAIN_JOIN_TOKEN': self.token()})}
        self.piped = self.token_file()
        for index, (words, environment) in ways.items():
            with self.subTest(words or environment.keys()):
                os.makedirs(self.node_home(index))
                self.start_agent(index, *words, **environment)
                wait_until('the node', lambda: self.nodes_in('alive') == index + 1)
                (pid,) = [pid for pid in self.daemons('agent') if f'node{index}' in self.marked()[pid]]
                self.assertFalse([word for word in self.marked()[pid] if word.count(',') == 2], 'no token')
        self.assertEqual([each['uses_left'] for each in self.tokens()], [0, 0, 0])

    def test_where_there_is_no_token_is_said(self):
        for name, text in (('empty', ''), ('other', 'no token\n')):
            path = os.path.join(self.dir, name)
            with open(path, 'w') as out:
                out.write(text)
            self.assertIn(f'{path} holds no join token; `gtrain token create` prints one',
                          self.agent(name, '--join', path, expect=2).stderr)
        self.assertIn('standard input holds no join token', self.agent('none', '--join', '-', expect=2).stderr)

    def agent_inside(self, index):
        """Node 1 reads what comes out of a pipe."""
        if index != 1:
            return super().agent_inside(index)
        return ['bash', '-c', f'exec "$@" < <(cat {self.piped})', 'bash', *super().agent_inside(index)]

    def token_file(self):
        path = os.path.join(self.dir, f'token-{len(os.listdir(self.dir))}')
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), 'w') as out:
            out.write(self.token() + '\n')
        return path

    def tokens(self):
        return json.loads(self.client('token', 'ls', '--json').stdout)['tokens']


class RolesTest(ClusterSecurityTest):
    agent_count = 1

    def test_users_reach_their_own_jobs_only(self):
        ann, bob, screen = self.as_user('ann'), self.as_user('bob'), self.as_user('screen', 'readonly')
        job = json.loads(self.gtrain('launch', '-d', '--json', self.long_job('anns', nodes='1'), home=ann).stdout)['job']
        self.wait_for_state('anns', 'RUNNING')
        for words in (['stop', job], ['logs', job], ['why', job], ['exec', job, '--', 'id']):
            refused = self.gtrain(*words, home=bob, expect=1)
            self.assertIn('belongs to ann', refused.stderr, words)
        self.assertIn(job, self.gtrain('status', home=bob).stdout, 'the list is for everyone')
        self.gtrain('why', job, home=screen)
        self.assertIn('may only read', self.gtrain('stop', job, home=screen, expect=1).stderr)
        refused = self.gtrain('launch', '-d', self.long_job('more', nodes='1'), home=screen, expect=2)
        self.assertIn('may only read', refused.stderr, 'exit code 2: nothing was started')
        for words in (['token', 'create'], ['user', 'add', 'eve'], ['node', 'revoke', 'node0'], ['user', 'ls']):
            self.assertIn('needs the admin key', self.gtrain(*words, home=ann, expect=1).stderr, words)
        # X5: what a rank could take from its agent is the key of a node, which asks for nothing.
        node = self.stolen('node', os.path.join(self.agent_state(0), 'node.key'))
        for words in (['status'], ['stop', job], ['logs', job], ['launch', '-d', self.long_job('more', nodes='1')]):
            self.assertIn('gtrain: ', self.gtrain(*words, home=node, expect=None, timeout=120).stderr, words)
        self.assertEqual([j['id'] for j in self.jobs()], [job], 'nothing was submitted')

        self.client('user', 'revoke', 'ann')
        self.assertIn('does not know our key', self.gtrain('status', home=ann, expect=1, timeout=90).stderr)
        self.assertEqual(self.job('anns')['state'], 'RUNNING', 'the job of a revoked user goes on')
        self.stop_and_wait(job)
        denied = [line for line in self.audit() if line['outcome'].startswith('denied')]
        self.assertIn(('bob', 'stop', job), [(line['name'], line['action'], line['target']) for line in denied])

    def test_no_typo_opens_the_door_X1_X15(self):
        """Whatever is misspelt, in the environment or a file: a stranger stays one, or there is no head at all."""
        stranger_key = os.path.join(self.dir, 'stranger.key')
        other = self.stolen('other', stranger_key)
        self.gtrain('head', '--init', '--dir', os.path.join(self.dir, 'elsewhere'))
        with open(os.path.join(self.dir, 'elsewhere', 'admin.key')) as data:
            text = data.read()
        with open(os.open(stranger_key, os.O_CREAT | os.O_WRONLY, 0o600), 'w') as out:
            out.write(text)
        for name, value in (('GTRAIN_INSECURE', '1'), ('GTRAIN_AUTH', 'none'), ('RAY_AUTH_MODE', 'disabled')):
            self.kill_head()
            self.head = self.start('head', '--context', 'lab', '--listen', f'127.0.0.1:{self.port}', **{name: value})
            wait_until('the head to be back', lambda: self.nodes_in('alive') == 1)
            self.assertIn('does not know our key', self.gtrain('status', home=other, expect=1, timeout=90).stderr)
        job = self.job_file('crime', 'name: crime\nrun: /bin/true\n')
        self.assertIn('does not know our key', self.gtrain('launch', '-d', job, home=other, expect=1, timeout=90).stderr)
        self.assertEqual(self.jobs(prefix=self.inside(0)), [], 'a stranger submits nothing')
        wait_until('an audit line of it', lambda: [line for line in self.audit() if line['action'] == 'connect'])
        self.kill_head()
        for flags in (['--insecure'], ['--no-auth'], ['--auth', 'none'], ['--lsten', '127.0.0.1:1']):
            self.gtrain('head', '--context', 'lab', *flags, expect=2)
        authorized = self.head_file('authorized')
        with open(authorized) as data:
            good = data.read()
        for bad in ('', None, good.replace('admin', 'amdin'), '* anyone\n', good.replace('node ', 'node')):
            with open(authorized, 'w') as out:
                out.write(bad if bad is not None else '')
            if bad is None:
                os.unlink(authorized)
            head = self.start('head', '--context', 'lab', '--listen', f'127.0.0.1:{self.port}')
            if bad == '':  # nobody may connect: a head that serves nobody
                head.wait_for('serving cluster')
                self.assertIn('does not know our key', self.gtrain('status', home=other, expect=1, timeout=90).stderr)
                head.signal(signal.SIGTERM)
                head.wait()
            else:
                self.assertIn(head.wait(), (1, 2), f'{bad!r}: {head.output()}')
        with open(os.open(authorized, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), 'w') as out:
            out.write(good)
        for path, mode in ((authorized, 0o666), (self.head_file('head.key'), 0o644)):
            os.chmod(path, mode)
            self.assertIn('has mode', self.gtrain('head', '--context', 'lab', expect=1).stderr)
            os.chmod(path, 0o600)
        self.start_head()
        wait_until('the head to be back', lambda: self.nodes_in('alive') == 1)

    def test_impostor_head_is_no_head_X14(self):
        """Another head at the address of ours: the agent says nothing to it and comes back to ours."""
        self.kill_head()
        self.gtrain('head', '--init', '--context', 'evil')
        evil = self.start('head', '--context', 'evil', '--listen', f'127.0.0.1:{self.port}')
        self.agents[0].wait_for('is not the head we know')
        listed = self.gtrain('nodes', '--json', '--context', 'evil')
        self.assertEqual(json.loads(listed.stdout)['nodes'], [])
        self.assertTrue(alive(self.agents[0].pid))
        evil.signal(signal.SIGKILL)
        evil.wait()
        self.gtrain('context', 'use', 'lab')
        self.start_head()
        wait_until('the agent at its own head again', lambda: self.nodes_in('alive') == 1)


if __name__ == '__main__':
    harness.main()

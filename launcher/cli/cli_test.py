"""build/bin/gtrain from outside: hostile input ends with the right exit code, a place in the message, quickly, and
leaves no process behind (faults J1-J13, J15). Nothing here needs a cluster."""
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import unittest

SOURCE = os.environ.get('GTRAIN_SOURCE_DIR') or os.path.abspath(os.path.join(os.path.dirname(__file__), '../..'))
BUILD = os.environ.get('GTRAIN_BUILD_DIR') or os.path.join(SOURCE, 'build')
GTRAIN = os.path.join(BUILD, 'bin', 'gtrain')
PATIENCE = 60  # a deadline that passes is a hang


class CliTest(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix='gt-cli-')
        self.addCleanup(shutil.rmtree, self.dir)
        self.mark = f'gtrain-cli-{os.getpid()}-{os.path.basename(self.dir)}'

    def tearDown(self):
        self.assertEqual(self.left_over(), [], 'processes left behind')

    def left_over(self):
        """Command lines of processes that carry this test's mark."""
        found = []
        for name in os.listdir('/proc'):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                with open(f'/proc/{name}/environ', 'rb') as environ, open(f'/proc/{name}/cmdline', 'rb') as cmdline:
                    if self.mark.encode() in environ.read():
                        found.append(cmdline.read())
            except OSError:
                pass
        return found

    def run_gtrain(self, *args, expect=2, stdin=subprocess.DEVNULL, **env):
        environ = {key: value for key, value in os.environ.items() if not key.startswith(('GTRAIN_', 'XDG_'))}
        environ.update(HOME=self.dir, XDG_STATE_HOME=self.dir + '/state', XDG_CONFIG_HOME=self.dir + '/config',
                       GTRAIN_CLI_MARK=self.mark, **env)
        for key in ('ASAN_OPTIONS', 'UBSAN_OPTIONS', 'LSAN_OPTIONS', 'TSAN_OPTIONS'):
            if key in os.environ:
                environ[key] = os.environ[key]
        done = subprocess.run([GTRAIN, *args], env=environ, cwd=self.dir, stdin=stdin, capture_output=True,
                              timeout=PATIENCE)
        done.out, done.err = done.stdout.decode(errors='replace'), done.stderr.decode(errors='replace')
        if expect is not None:
            self.assertEqual(done.returncode, expect, f'gtrain {args}\n{done.out}\n{done.err}')
        return done

    def job(self, text, name='job.yaml'):
        path = os.path.join(self.dir, name)
        with open(path, 'wb') as out:
            out.write(text if isinstance(text, bytes) else text.encode())
        return name


class HostileJobs(CliTest):
    def test_every_error_with_its_place_and_nothing_started(self):
        """J4 J5 J7 J10: launch exits 2 with every error, and starts no cluster."""
        self.job('name: bad\nrun: echo a | cat\nranks: 010\nrnaks: 4\nname: again\n')
        for verb in ('validate', 'plan', 'launch'):
            done = self.run_gtrain(verb, 'job.yaml')
            for part in ('job.yaml:2:6: ', 'job.yaml:3:8: ', "job.yaml:4:1: unknown key 'rnaks'; did you mean `ranks`?",
                         'job.yaml:5:1: key `name` is already on line 1', '4 errors; nothing was started'):
                self.assertIn(part, done.err)
        self.assertFalse(os.path.exists(self.dir + '/state'))

    def test_hostile_files(self):
        """J1 J2 J3 J6: refused with a place."""
        bomb = 'run: a\nenv:\n  A0: &a0 x\n' + ''.join(f'  A{i}: &a{i} [*a{i-1}, *a{i-1}]\n' for i in range(1, 30))
        for text in (bomb, '&x [*x]', 'run: ' + '[' * 500_000, 'run: ' + '{a: ' * 200_000, 'run: !!python/object:os.system x\n',
                     'run: a\n---\nrun: b\n', b'\xef\xbb\xbfrun: a\n', 'run: a\r\n', 'run:\ta\n', b'run: a\0\n', b'run: \xff\n'):
            done = self.run_gtrain('validate', self.job(text))
            self.assertRegex(done.err, r'(?m)^job\.yaml:\d+:\d+: ', text[:40])

    def test_files_that_are_no_files(self):
        """J13: missing, directory, FIFO, device, huge, unreadable: an answer at once."""
        os.mkdir(self.dir + '/folder')
        os.mkfifo(self.dir + '/fifo')
        with open(self.dir + '/huge', 'wb') as huge:
            huge.truncate(10 << 30)
        os.symlink('loop', self.dir + '/loop')
        for path in ('missing.yaml', 'folder', 'fifo', '/dev/zero', '/dev/stdin', 'huge', 'loop', '', 'x' * 5000, 'a\nb\x1b[31m'):
            for verb in ('validate', 'launch'):
                done = self.run_gtrain(verb, path, expect=None)
                self.assertEqual(done.returncode, 2, (path, done.err))
                self.assertTrue(done.err.startswith('gtrain: '), (path, done.err))
                self.assertNotIn('\x1b', done.err)
        if os.geteuid() != 0:
            self.job('run: a\n', 'secret')
            os.chmod(self.dir + '/secret', 0)
            self.assertIn('ermission', self.run_gtrain('validate', 'secret', expect=None).err)

    def test_ranks_flag(self):
        """J8: a wrong -n is an error before any cluster is looked for."""
        for n in ('0', '-1', '2147483648', '1000000000', 'four', '1e3', '', '4.5', '0x4'):
            done = self.run_gtrain('launch', '-n', n, '--', 'true')
            self.assertIn('-n', done.err, n)
        self.job('run: /bin/true\nranks: {min: 2, max: 8}\n')
        self.assertIn('outside', self.run_gtrain('launch', '-n', '32', 'job.yaml').err)
        self.assertFalse(os.path.exists(self.dir + '/state'))

    def test_names_and_environment(self):
        """J9 J10 J15."""
        for name in ('../../etc', 'a/b', 'x' * 10_000, '\U0001f682', '-rf', ''):
            self.run_gtrain('validate', '--name', name, '--', 'true')
        for env in ('LD_PRELOAD=x', '1A=b', 'RANK=0', 'novalue', '=x'):
            self.run_gtrain('validate', '--env', env, '--', 'true')
        self.assertIn('`${NOT_SET_HERE}` is not set', self.run_gtrain('validate', self.job('run: a\nenv: {A: "${NOT_SET_HERE}"}\n')).err)

    def test_what_to_write_on_the_command_line(self):
        done = self.run_gtrain('validate', '--set', 'env.LR=0.1', '--', 'true')
        self.assertIn('for a string write "0.1", or: --env LR=VALUE', done.err)
        self.assertIn('--set per=node', self.run_gtrain('validate', '--', 'torchrun', 't.py').err)

    def test_secrets_are_never_echoed(self):
        """J11."""
        secret = 'AKIAABCDEFGHIJKLMNOP'
        for args in (['--env', f'KEY={secret}', '--', 'true'], ['--', 'true', secret], ['--set', f'labels.a={secret}', '--', 'true']):
            done = self.run_gtrain('validate', *args)
            self.assertIn('looks like an AWS access key id', done.err)
            self.assertNotIn(secret, done.err + done.out)

    def test_missing_program_is_found_before_the_launch(self):
        self.assertIn('does not exist', self.run_gtrain('launch', '--', './not-there').err)
        self.job('#!/bin/sh\n', 'script')
        self.assertIn('chmod +x', self.run_gtrain('launch', '--', './script').err)
        self.assertIn('not a directory', self.run_gtrain('launch', '--set', 'workdir=/not/there', '--', 'true').err)
        self.assertFalse(os.path.exists(self.dir + '/state'))


class LeftJobs(CliTest):
    """What jobs that are over left in their run directories."""

    def left(self, generation, events=()):
        run_dir = os.path.join(self.dir, 'gtrain-runs', 'train-1-abc')
        os.makedirs(run_dir)
        result = dict(id='train-1', name='train', cluster='abc', state='CANCELLED', reason='stopped', generation=generation,
                      world_size=1, run_dir=run_dir, events=list(events), ranks=[dict(rank=0, hostname='h', state='exited')])
        with open(os.path.join(run_dir, 'result.json'), 'w') as out:
            json.dump(result, out)
        return run_dir

    def test_logs_of_a_silent_generation_name_the_one_that_wrote(self):
        """In place a process writes to the logs of the generation in which it was started, not to those of the newest."""
        run_dir = self.left(4)
        for generation, text in ((1, ''), (2, 'hello\n'), (3, ''), (4, '')):
            logs = os.path.join(run_dir, 'logs', f'generation-{generation}')
            os.makedirs(logs)
            with open(os.path.join(logs, 'rank-0.out'), 'w') as out:
                out.write(text)
        said = self.run_gtrain('logs', run_dir, expect=0).err
        self.assertIn('generation 4 has written nothing; what an earlier one wrote: --generation 2\n', said)
        self.assertEqual(self.run_gtrain('logs', '--generation', '2', run_dir, expect=0).out, 'hello\n')
        os.truncate(os.path.join(run_dir, 'logs/generation-2/rank-0.out'), 0)
        self.assertIn('generation 4 has written nothing, and no earlier one has\n', self.run_gtrain('logs', run_dir, expect=0).err)

    def test_logs_of_earlier_generations_are_named_and_whole(self):
        """In place each generation has logs of its own, and may have had other ranks than the newest."""
        run_dir = self.left(3)
        for generation, ranks in ((1, 2), (2, 3), (3, 1)):
            logs = os.path.join(run_dir, 'logs', f'generation-{generation}')
            os.makedirs(logs)
            for rank in range(ranks):
                with open(os.path.join(logs, f'rank-{rank}.out'), 'w') as out:
                    out.write(f'{generation} {rank}\n')
        newest = self.run_gtrain('logs', run_dir, expect=0)
        self.assertEqual(newest.out, '3 0\n')
        self.assertIn('this is generation 3; earlier ones wrote, too: --generation 1 to 2\n', newest.err)
        earlier = self.run_gtrain('logs', '--generation', '2', run_dir, expect=0)
        self.assertEqual([line.split(': ')[1] for line in earlier.out.splitlines()], ['2 0', '2 1', '2 2'])
        self.assertNotIn('earlier', earlier.err)

    def test_logs_of_who_waited_and_wrote_nothing_are_empty(self):
        """A spare that ended in its first moment has no file, and what was said of its end names its logs."""
        run_dir = self.left(4)
        logs = os.path.join(run_dir, 'logs', 'generation-4')
        os.makedirs(logs)
        with open(os.path.join(logs, 'rank-0.out'), 'w') as out:
            out.write('hello\n')
        done = self.run_gtrain('logs', '--generation', '4', '--rank', '4', run_dir, expect=0)
        self.assertEqual(done.out, '')
        self.assertIn('rank 4 has written nothing in generation 4\n', done.err)
        self.assertIn('no logs of generation 2 are left', self.run_gtrain('logs', '--generation', '2', '--rank', '4', run_dir, expect=1).err)

    def test_an_audit_within_the_first_epoch_counts_no_epochs(self):
        def said(step, sample):
            return dict(kind='samples', generation=1, text=f'rank 0 on h: train: step {step}, epoch 0 of 3, sample {sample} of 60, batches of 6, '
                        'seed 1, shuffled, short last batch, 2 ranks, saved with the state')
        run_dir = self.left(1, [said(0, 0)])
        self.assertIn('train: no contradiction so far; no epoch of 60 samples is known to be over\n', self.run_gtrain('data', 'audit', run_dir, expect=0).out)
        shutil.rmtree(run_dir)
        run_dir = self.left(1, [said(0, 0), said(2, 12)])
        self.assertIn('train: exact so far; 12 of the first epoch of 60 samples, each given out once\n', self.run_gtrain('data', 'audit', run_dir, expect=0).out)

    @staticmethod
    def event(sequence, step=None, last=None):
        """As the head writes it: a record of samples at `step`, or an end at which `last` steps were reported."""
        event = dict(sequence=sequence, time=f'2026-11-27T10:{sequence // 60:02}:{sequence % 60:02}.000Z', generation=1, kind='note', text='h: nothing')
        if step is not None:
            event.update(kind='samples', text=f'rank 0 on h: train: step {step}, epoch {step // 10} of 3, sample {step % 10 * 6} of 60, batches of 6, '
                                              'seed 1, shuffled, short last batch, 1 rank, saved with the state')
        if last is not None:
            event.update(kind='state', text='SUCCEEDED', goodput=dict(wanted=1, seconds=dict(step=last), steps=dict(first=1, last=last, applied=last)))
        return event

    def left_with_file(self, events, newest):
        """A run directory with all events in a file and the newest in the result, which the test may change before it is written."""
        run_dir = self.left(1, newest)
        with open(os.path.join(run_dir, 'events.jsonl'), 'w') as out:
            out.writelines(json.dumps(event) + '\n' for event in events)
        return run_dir

    def test_an_audit_reads_the_events_beside_the_result(self):
        """Also where the run directory was moved, or copied, and the first is another's by now."""
        events = [self.event(1, step=0), *(self.event(n) for n in range(2, 300)), self.event(300, step=30), self.event(301, last=30)]
        run_dir = self.left_with_file(events, events[-200:])
        moved = os.path.join(self.dir, 'elsewhere')
        shutil.copytree(run_dir, moved)
        exact = 'train: exact; 3 epochs of 60 samples, each given out once, and that is all of them\n'
        self.assertIn(exact, self.run_gtrain('data', 'audit', run_dir, expect=0).out)
        with open(os.path.join(run_dir, 'events.jsonl'), 'w') as out:
            out.write(json.dumps(self.event(1, step=3)) + '\n')
        for word in (moved, moved + '/', './elsewhere'):
            self.assertIn(exact, self.run_gtrain('data', 'audit', word, expect=0).out)
        shutil.rmtree(run_dir)
        self.assertIn(exact, self.run_gtrain('data', 'audit', moved, expect=0).out)
        whole = json.loads(self.run_gtrain('why', '--json', moved, expect=0).out)
        self.assertEqual([event['sequence'] for event in whole['events']], list(range(1, 302)))
        self.assertEqual(whole['run_dir'], moved)
        self.assertIn(f'logs: {moved}/logs', self.run_gtrain('status', moved, expect=0).out)
        shutil.move(moved, os.path.join(self.dir, 'gtrain-runs', 'train-1-xyz'))
        self.assertIn(exact, self.run_gtrain('data', 'audit', 'train-1', expect=0).out, 'found by its id')

    def test_an_audit_of_files_that_contradict_each_other_proves_nothing(self):
        events = [self.event(1, step=0), self.event(2), self.event(3, step=30), self.event(4, last=30)]
        for changed, said in (([events[0], events[1], self.event(3, step=29), events[3]], 'event 3 is "rank 0 on h: train: step 29, '),
                              ([events[0], events[2], events[3]], 'event 2 is missing, and in '),
                              ([*events[:3], dict(events[3], generation=2)], 'event 4 is "SUCCEEDED", and in ')):
            run_dir = self.left_with_file(events, changed)
            done = self.run_gtrain('data', 'audit', run_dir, expect=1)
            self.assertIn('train: NOT exact\n  ' + said, done.out)
            self.assertIn('was changed after the head wrote it, so nothing is proven', done.out)
            document = json.loads(self.run_gtrain('data', 'audit', '--json', run_dir, expect=1).out)
            self.assertEqual((document['exact'], document['data'][0]['exact']), (False, False))
            shutil.rmtree(run_dir)

    def test_an_audit_compares_records_with_the_steps_that_were_reported(self):
        def audited(step, last, expect):
            events = [self.event(1, step=0), self.event(2, step=step), self.event(3, last=last)]
            run_dir = self.left_with_file(events, events)
            done = self.run_gtrain('data', 'audit', run_dir, expect=expect)
            shutil.rmtree(run_dir)
            return done.out
        self.assertIn('  ranks reported all these steps to the head, too\n', audited(30, 30, 0))
        self.assertIn('  ranks reported these steps to the head, too, but for 2 steps at the end of 1 range: that they were trained only these '
                      'records say\n', audited(30, 28, 0))
        self.assertIn('train: NOT exact\n  generation 1 was done at step 30, epoch 3, sample 0: before that its job had reported step 9 at most',
                      audited(30, 9, 1))
        self.assertIn('how far each generation trained only these records say', audited(30, None, 0))


class Usage(CliTest):
    def test_unknown_words_name_the_nearest(self):
        self.assertIn('did you mean status?', self.run_gtrain('statsu').err)
        self.assertIn('did you mean --ranks?', self.run_gtrain('launch', '--rank', '4').err)
        self.assertIn('did you mean -n?', self.run_gtrain('launch', '-np', '4').err)
        self.assertIn('after --', self.run_gtrain('launch', 'a.yaml', 'b').err)
        self.run_gtrain()
        self.run_gtrain('launch')
        self.run_gtrain('completion', 'tcsh')

    def test_every_verb_helps(self):
        overview = self.run_gtrain('--help', expect=0).out
        verbs = [line.split()[0] for line in overview.split('verbs:\n')[1].splitlines() if line.startswith('  ')]
        for verb in 'launch attach validate plan status why report logs stop exec nodes doctor head agent version completion'.split():
            self.assertIn(verb, verbs)
            text = self.run_gtrain(verb, '--help', expect=0).out
            self.assertIn(f'usage: gtrain {verb}', text)
            self.assertRegex(text, rf'(?m)^  (source <\()?gtrain {verb}', 'an example')

    def test_completion_names_every_verb_and_is_valid(self):
        script = self.run_gtrain('completion', 'bash', expect=0).out
        self.assertIn('validate', script)
        subprocess.run(['bash', '-n'], input=script.encode(), check=True, timeout=PATIENCE)
        for shell in ('zsh', 'fish'):
            self.assertIn('gtrain', self.run_gtrain('completion', shell, expect=0).out)

    TOPOLOGIES = os.path.join(SOURCE, 'tests/topo')

    def test_a_plan_on_a_topology_is_kept_when_a_machine_is_lost(self):
        topology = os.path.join(self.TOPOLOGIES, 'aws-p5.json')
        self.job('run: python train.py\nranks: {min: 8, max: 48}\nmesh: {dp: "*", tp: 8}\n')
        plan = ('plan', 'job.yaml', '--topology', topology)
        first = self.run_gtrain(*plan, '--rankfile-out', 'ranks.txt', expect=0).out
        self.assertIn('placed: 48 ranks of mesh {dp: 6, tp: 8}', first)
        self.assertRegex(first, r'predicted communication of a step: .*; no placement is below ')
        self.assertIn('rejected: spread', first)
        lost = json.loads(self.run_gtrain(*plan, '--json', expect=0).out)['ranks'][0]['machine']
        again = json.loads(self.run_gtrain(*plan, '--json', '--rankfile', 'ranks.txt', '--set', f'where.exclude=[{lost}]',
                                           expect=0).out)
        self.assertEqual(len(again['moves']), 8)
        with open(os.path.join(self.dir, 'ranks.txt')) as file:
            before = {int(line.split('=')[0][5:]): line.split()[1].split('=')[1] for line in file}
        for rank in again['ranks']:
            if before[rank['rank']] == lost:
                self.assertNotEqual(rank['machine'], lost)
            else:
                self.assertEqual(rank['machine'], before[rank['rank']], 'only ranks of the lost machine move')
        refused = self.run_gtrain(*plan, '--set', 'ranks=72', expect=1).out
        self.assertIn('not placed: needs 72 places for mesh {dp: 9, tp: 8}; the topology has 64', refused)
        self.assertIn('would unblock it: dp: 8 instead of 9', refused)

    def test_hosts_are_named_by_hostlists(self):
        self.job('run: a\nranks: 2\nwhere:\n  exclude: ["tux[1-2]", tux5]\n')
        nodes = ','.join(f'tux{i}:1' for i in range(6))
        def hosts(*flags):
            plan = json.loads(self.run_gtrain('plan', 'job.yaml', '--nodes', nodes, '--json', *flags, expect=0).out)
            return [rank['node'] for rank in plan['ranks']]
        self.assertEqual(hosts(), ['tux0', 'tux3'])
        self.assertEqual(hosts('--exclude', 'tux[0-3]'), ['tux4', 'tux5'], 'in the place of what the file says')
        self.assertEqual(hosts('--exclude', 'tux0', '--exclude', 'tux[1,3-4]'), ['tux2', 'tux5'])
        self.assertEqual(hosts('--hosts', 'tux[1-4]'), ['tux3', 'tux4'])
        self.assertEqual(hosts('--rank0-host', 'tux[3-5]'), ['tux3', 'tux0'])
        self.assertIn('tux4 takes 0 (not in where.hosts)', self.run_gtrain(
            'plan', 'job.yaml', '--nodes', nodes, '--hosts', 'tux[0-1]', expect=1).out)
        self.assertIn('--exclude tux[9-1]: `where.exclude`: hostlist "tux[9-1]": the range 9-1 runs backwards',
                      self.run_gtrain('validate', 'job.yaml', '--exclude', 'tux[9-1]').err)
        self.job('run: a\nwhere:\n  hosts: tux[0-\n')
        self.assertIn('job.yaml:3:10: `where.hosts`: hostlist "tux[0-": a [ without a ]', self.run_gtrain('validate', 'job.yaml').err)

    def test_a_rankfile_goes_out_and_in(self):
        self.job('run: a\nranks: 4\nresources: {gpus: 1}\n')
        plan = ('plan', 'job.yaml', '--nodes', 'a:8:2,b:8:2', '--json')
        self.run_gtrain(*plan, '--rankfile-out', 'ranks.txt', expect=0)
        path = os.path.join(self.dir, 'ranks.txt')
        with open(path) as file:
            self.assertEqual(file.read(), 'rank 0=a slot=0\nrank 1=a slot=1\nrank 2=b slot=0\nrank 3=b slot=1\n')
        with open(path, 'w') as file:
            file.write('rank 0=b slot=1\nrank 1=a slot=0   # as Open MPI has it\nrank 2=b slot=0\n')
        self.assertIn('the host of rank 3 is missing, of 4', self.run_gtrain(*plan, '--rankfile', 'ranks.txt').err)
        ranks = json.loads(self.run_gtrain(*plan, '-n', '3', '--rankfile', 'ranks.txt', expect=0).out)['ranks']
        self.assertEqual([(rank['node'], rank['gpus']) for rank in ranks], [('b', [1]), ('a', [0]), ('b', [0])])
        self.assertIn('"0,2": "b slot=1,0"', self.run_gtrain('validate', 'job.yaml', '-n', '3', '--rankfile', 'ranks.txt', '--print', expect=0).out)
        with open(path, 'w') as file:
            file.write('rank 0=a slot=0\nrank 1=c slot=0:1\n')
        self.assertIn('ranks.txt:2: slot=0:1 names sockets or several cores', self.run_gtrain('launch', 'job.yaml', '--rankfile', 'ranks.txt').err)
        with open(path, 'w') as file:
            file.write('rank 0=c slot=0\n')
        self.assertIn('rank 0 goes on c by where.ranks, and no node that is up is called so',
                      self.run_gtrain(*plan[:-1], '-n', '1', '--rankfile', 'ranks.txt', expect=1).out)
        # 65,536 ranks, no two neighbours of which are on one of 512 hosts.
        with open(path, 'w') as file:
            file.writelines(f'rank {rank}=h{rank % 512} slot={rank // 512}\n' for rank in range(65536))
        self.job('run: a\n')
        self.assertIn('ranks: 65536', self.run_gtrain('validate', 'job.yaml', '--rankfile', 'ranks.txt', '--print', expect=0).out)
        # Without a cluster, on a topology.
        topology = os.path.join(self.TOPOLOGIES, 'aws-p5.json')
        self.job('run: a\nranks: 2\nwhere:\n  ranks: {0: nowhere, 1: nowhere}\n')
        self.assertIn('not placed: rank 0 goes on nowhere by where.ranks',
                      self.run_gtrain('plan', 'job.yaml', '--topology', topology, expect=1).out)
        machine = json.loads(self.run_gtrain('plan', '--topology', topology, '--json', '--', 'a', expect=0).out)['ranks'][0]['machine']
        self.job(f'run: a\nranks: 2\nwhere:\n  ranks: {{0: "{machine} slot=5", 1: "{machine}"}}\n')
        ranks = json.loads(self.run_gtrain('plan', 'job.yaml', '--topology', topology, '--json', expect=0).out)['ranks']
        self.assertEqual([(rank['machine'], rank['slot']) for rank in ranks], [(machine, 5), (machine, 0)])

    def test_a_plan_on_a_topology_has_as_many_ranks_a_machine_as_the_job_says(self):
        topology = os.path.join(self.TOPOLOGIES, 'aws-p5.json')
        self.job('run: a\nnodes: 4\nranks_per_node: 2\nmesh: {dp: 4, tp: 2}\n')
        plan = ('plan', 'job.yaml', '--topology', topology, '--json')
        ranks = json.loads(self.run_gtrain(*plan, '--rankfile-out', 'ranks.txt', expect=0).out)['ranks']
        machines = [rank['machine'] for rank in ranks]
        self.assertEqual([machines.count(name) for name in sorted(set(machines))], [2, 2, 2, 2])
        lost = machines[0]
        again = json.loads(self.run_gtrain(*plan, '--rankfile', 'ranks.txt', '--exclude', lost, expect=0).out)
        moved = [rank['machine'] for rank in again['ranks']]
        self.assertEqual([moved.count(name) for name in sorted(set(moved))], [2, 2, 2, 2])
        self.assertNotIn(lost, moved)
        self.assertIn('needs 99 machines with 2 places for ranks; the topology has 8 that may be taken', self.run_gtrain(
            'plan', '--topology', topology, '--set', 'nodes=99', '--set', 'ranks_per_node=2', '--', 'a', expect=1).out)

    def test_names_of_machines_are_on_a_line_of_their_own(self):
        self.job('run: a\n')
        out = self.run_gtrain('plan', 'job.yaml', '--nodes', 'a\nplaced\x1b[31m:8', expect=0).out
        self.assertIn('a\\nplaced\\x1b[31m', out)
        self.assertNotIn('\x1b', out)
        with open(os.path.join(self.dir, 't.json'), 'w') as file:
            file.write('{"gtrain_topology": 1, "shapes": [{"name": "s"}], "machines": ['
                       '{"names": "x", "shape": "s", "unusable": "no\\nplaced: 1 rank\\u009b"}]}')
        out = self.run_gtrain('plan', 'job.yaml', '--topology', 't.json', expect=1).out
        self.assertIn('unusable: no\\nplaced: 1 rank\\xc2\\x9b', out)

    def test_a_part_of_a_gpu(self):
        self.job('run: a\nranks: 4\nresources: {gpus: 0.5}\n')
        ranks = json.loads(self.run_gtrain('plan', 'job.yaml', '--nodes', 'a:8:3', '--json', expect=0).out)['ranks']
        self.assertEqual([rank['gpus'] for rank in ranks], [[0], [0], [1], [1]])
        self.assertIn('is no part of a GPU', self.run_gtrain('validate', 'job.yaml', '--set', 'resources.gpus=1.5').err)
        self.assertIn('several share one', self.run_gtrain(
            'plan', 'job.yaml', '--topology', os.path.join(self.TOPOLOGIES, 'aws-p5.json')).err)

    def test_wrong_words_about_topologies_are_named(self):
        topology = os.path.join(self.TOPOLOGIES, 'aws-p5.json')
        with open(os.path.join(self.dir, 'bad.json'), 'w') as file:
            file.write('{"gtrain_topology": 1,\n "machines": [{"names": "a", "shape": "x"}]}\n')
        self.assertIn('bad.json:2: machines/0/shape: no shape is called "x"',
                      self.run_gtrain('topology', 'show', 'bad.json').err)
        self.job('run: python train.py\nranks: 8\nmesh: {dp: 1, tp: 8}\n')
        plan = ('plan', 'job.yaml', '--topology', topology)
        self.assertIn("the job's mesh has no such axis", self.run_gtrain(*plan, '--traffic', 'pp=1GB').err)
        self.assertIn('a whole number and a unit', self.run_gtrain(*plan, '--traffic', 'tp=4').err)
        self.assertIn('is for the head that serves', self.run_gtrain('head', '--init', '--context', 'x', '--topology', topology).err)
        self.assertIn('must be AXIS=SIZE', self.run_gtrain(*plan, '--traffic', 'tp=much').err)
        self.assertIn('exclude each other', self.run_gtrain(*plan, '--nodes', 'a:1').err)
        self.assertIn('--rankfile: ', self.run_gtrain('plan', 'job.yaml', '--rankfile', 'x').err)
        self.assertIn('rank 0 goes on nowhere by where.rank0', self.run_gtrain(*plan, '--rank0-host', 'nowhere', expect=1).out)
        self.assertIn('per: node', self.run_gtrain(*plan, '--set', 'per=node', '--set', 'ranks=1', '--set', 'mesh={}').err)
        self.assertIn('there are capture, measure and show', self.run_gtrain('topology', 'draw').err)
        for words, wanted in ((('measure', '--slurm', 'x'), '--slurm goes with `gtrain topology capture`'),
                              (('capture', '--pairs', 'x'), '--pairs goes with `gtrain topology measure`'),
                              (('show', '--nodes', '3'), '--nodes goes with `gtrain topology measure`'),
                              (('measure', '--nodes', '1'), '--nodes'), (('measure', 'file'), 'takes no file')):
            self.assertIn(wanted, self.run_gtrain('topology', *words, expect=2).err)
        with open(os.path.join(self.dir, 'pairs.json'), 'w') as file:
            file.write('{"gtrain_pairs": 1, "pairs": [{"a": "x"}]}')
        self.assertIn('pairs.json: pairs/0 needs a, b, gb_s', self.run_gtrain('topology', 'measure', '--pairs', 'pairs.json', expect=2).err)
        with open(os.path.join(self.dir, 'pairs.json'), 'w') as file:
            file.write('{"gtrain_topology": 1}')
        self.assertIn('is no file of pairs', self.run_gtrain('topology', 'measure', '--pairs', 'pairs.json', expect=2).err)
        self.assertIn('one source at a time', self.run_gtrain('topology', 'capture', '--ib', 'a', '--aws', 'b').err)

    def test_a_topology_replaces_no_pipe_and_no_link(self):
        pipe, link, target = (os.path.join(self.dir, name) for name in ('pipe', 'link.json', 'target.json'))
        os.mkfifo(pipe)
        os.symlink(target, link)
        refused = self.run_gtrain('topology', 'capture', '--out', pipe, expect=2)
        self.assertIn('is no regular file, and is left as it is: name another', refused.err)
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))
        self.assertIn('gtrain_topology', refused.out, 'what was found out is not lost')
        self.run_gtrain('topology', 'capture', '--out', link, expect=0)
        self.assertTrue(os.path.islink(link) and os.path.isfile(target))
        # What cannot be written is said before machines are measured.
        for words, wanted in ((('--out', 'nowhere/x'), 'no file can be made in'), (('--pairs', 'nowhere/x'), 'no file can be made in'),
                              (('--out', 'x', '--pairs', 'x'), 'are the same file')):
            self.assertIn(wanted, self.run_gtrain('topology', 'measure', *words, expect=2).err)

    def test_a_topology_is_captured_shown_and_drawn(self):
        self.run_gtrain('topology', 'capture', '--out', 'this.json', expect=0)
        self.assertIn('1 machines', self.run_gtrain('topology', 'show', 'this.json', expect=0).out)
        with open(os.path.join(self.dir, 'topology.conf'), 'w') as file:
            file.write('SwitchName=s0 Nodes=tux[0-3]\nSwitchName=s1 Nodes=tux[4-7]\nSwitchName=s2 Switches=s[0-1]\n')
        self.run_gtrain('topology', 'capture', '--slurm', 'topology.conf', '--like', os.path.join(self.TOPOLOGIES, 'mi300x.json'),
                        '--out', 'cluster.json', expect=0)
        self.assertIn('is the topology file itself', self.run_gtrain('topology', 'show', 'cluster.json', '--svg', './cluster.json').err)
        shown = self.run_gtrain('topology', 'show', 'cluster.json', '--svg', 'cluster.svg', expect=0).out
        self.assertRegex(shown, r'placement sees \d+ of ')
        self.assertIn('machines: tux[0-7]', shown)
        self.assertIn('AMD Instinct MI300X', shown)
        with open(os.path.join(self.dir, 'cluster.svg')) as file:
            self.assertEqual(file.read().count('>tux'), 8)

    def test_validate_and_plan_need_no_cluster(self):
        self.job('run: python train.py\nranks: 4\ncheckpoint: {uri: ckpt}\n', 'Train_Me.yaml')
        self.assertIn('Train_Me.yaml: ok (train-me, ', self.run_gtrain('validate', 'Train_Me.yaml', expect=0).out)
        document = json.loads(self.run_gtrain('validate', '--json', 'Train_Me.yaml', expect=0).out)
        self.assertIn(f'uri: "{self.dir}/ckpt"', document['canonical'])
        self.assertIn('every: 30s', document['canonical'])
        again = self.run_gtrain('validate', '--print', self.job(document['canonical'], 'again.yaml'), expect=0).out
        self.assertEqual(again, document['canonical'], 'the canonical form is a fixed point')
        plan = json.loads(self.run_gtrain('plan', '--json', '--nodes', 'a:2,b:2', 'Train_Me.yaml', expect=0).out)
        self.assertTrue(plan['placed'])
        self.assertEqual([rank['node'] for rank in plan['ranks']], ['a', 'a', 'b', 'b'])
        self.assertEqual(self.run_gtrain('plan', '--nodes', 'a:1', 'Train_Me.yaml', expect=1).returncode, 1)
        self.run_gtrain('plan', '--nodes', 'a:x', 'Train_Me.yaml')
        refused = self.run_gtrain('plan', '-n', '65536', '--', 'true', expect=1).out
        self.assertRegex(refused, r'not placed: 65536 ranks are more than \S+ can hold, which is \d+: ', 'as launch says it')
        self.assertFalse(os.path.exists(self.dir + '/state'))

    def test_words_of_other_tools_are_answered_with_ours(self):
        with open(self.dir + '/train.py', 'w') as out:
            out.write('import os\nprint(os.environ["RANK"])\n')
        self.assertIn('a program goes behind --, as in gtrain launch -n 2 -- python3 train.py',
                      self.run_gtrain('launch', '-n', '2', 'train.py', expect=2).err)
        self.assertIn("unknown flag '--nproc_per_node'; here it is -n",
                      self.run_gtrain('launch', '--nproc_per_node=2', '--', 'true', expect=2).err)
        for verb, ours in (('squeue', 'status'), ('cancel', 'stop'), ('run', 'launch')):
            self.assertIn(f"unknown verb '{verb}'; did you mean {ours}?", self.run_gtrain(verb, expect=2).err)

    def test_without_a_cluster(self):
        for verb in (['status'], ['why'], ['report'], ['logs'], ['stop'], ['nodes'], ['attach'], ['exec', '--', 'true']):
            done = self.run_gtrain(*verb, expect=1)
            self.assertIn('no local cluster runs', done.err)
        self.assertEqual(json.loads(self.run_gtrain('status', '--json', expect=0).out), {'jobs': []})
        self.assertIn('no context', self.run_gtrain('status', '--context', 'lab').err)
        self.assertFalse(os.path.exists(self.dir + '/state'))

    def test_a_word_that_is_no_id_is_said_at_once(self):
        """Before any head is asked: one that runs would drop it, and the answer was 20 s away."""
        for verb in ('logs', 'status', 'why', 'report', 'stop', 'attach', 'stack', 'actors', 'scale', 'exec'):
            for word in ('.', '..', 'a b'):
                done = self.run_gtrain(verb, word, *(['--', 'true'] if verb == 'exec' else []))
                self.assertIn(f"'{word}' is not a job id", done.err)
                self.assertIn('`gtrain status --all` lists them', done.err)
        self.assertIn("'a b' is not a token id", self.run_gtrain('token', 'revoke', 'a b').err)

    def test_how_long_a_machine_may_be_silent_is_checked(self):
        """B1: --node-timeout, before a head starts."""
        self.run_gtrain('head', '--init', '--context', 'lab', expect=0)
        for words, said in ((['100ms'], '--node-timeout must be 300ms to 1m'), (['2m'], '--node-timeout must be 300ms to 1m'),
                            (['soon'], 'soon'), (['30s', '--lease', '20s'], '--lease is shorter than --node-timeout')):
            self.assertIn(said, self.run_gtrain('head', '--context', 'lab', '--node-timeout', *words, expect=2).err)

    def test_a_head_that_does_not_run(self):
        for words in (['head', '--context', 'lab'], ['head', '--context', 'lab', '--token']):
            self.assertIn('make one with: gtrain head --init --context lab\n', self.run_gtrain(*words, expect=1).err)
        self.run_gtrain('head', '--init', '--context', 'lab', expect=0)
        said = self.run_gtrain('head', '--context', 'lab', '--token', expect=1).err
        self.assertEqual(said, 'gtrain: the head does not run; start it with: gtrain head --context lab\n')

    def test_bench_takes_the_examples_of_its_help(self):
        examples = re.findall(r'(?m)^  gtrain bench (.*?)(?:   .*)?$', self.run_gtrain('bench', '--help', expect=0).out)
        self.assertIn('link --nodes 4 -n 4 --context prod', examples)
        for example in examples:
            words = example.replace('--peers', '').replace('--context prod', '').split()
            self.assertIn("no context 'prod'", self.run_gtrain('bench', *words, '--context', 'prod').err)

    def test_contexts(self):
        self.run_gtrain('head', '--init')
        self.run_gtrain('head', '--init', '--context', '../x')
        done = self.run_gtrain('head', '--init', '--context', 'lab', expect=0)
        self.assertIn('cluster ', done.out)
        for folder, _, files in os.walk(self.dir + '/state'):
            self.assertEqual(os.stat(folder).st_mode & 0o077 if folder.endswith('lab') else 0, 0, folder)
            for name in files:
                if name.endswith('.key'):
                    self.assertEqual(os.stat(os.path.join(folder, name)).st_mode & 0o777, 0o600, name)
        with open(self.dir + '/config/gtrain/contexts.json') as text:
            contexts = json.load(text)
        self.assertEqual(contexts['current'], 'lab')
        self.assertIn('gtrain head --context lab', self.run_gtrain('status', expect=1).err)
        self.assertIn('did you mean lab?', self.run_gtrain('status', '--context', 'lba').err)
        with open(self.dir + '/config/gtrain/contexts.json', 'w') as broken:
            broken.write('[')
        self.assertIn('contexts.json', self.run_gtrain('status', expect=1).err)

    def test_a_context_is_not_replaced_unasked(self):
        """A guest's credential under the name of the admin's own cluster took that away, and nothing said so."""
        self.run_gtrain('head', '--init', '--context', 'lab', expect=0)
        path = self.dir + '/config/gtrain/contexts.json'
        with open(path) as text:
            before = text.read()
        for name, secret in (('one', '11' * 32), ('two', '12' * 32)):
            self.job(f'127.0.0.1:7070,{"22" * 32},{secret}\n', name)
        said = self.run_gtrain('context', 'add', 'lab', '--credential', 'one').err
        self.assertIn('context lab exists, with another credential: ', said)
        self.assertIn('--replace to replace it, or another name', said)
        with open(path) as text:
            self.assertEqual(text.read(), before)
        self.run_gtrain('context', 'add', 'far', '--credential', 'one', expect=0)
        self.run_gtrain('context', 'add', 'far', '--credential', 'one', expect=0)  # the same again
        with open(self.dir + '/config/gtrain/far.key') as text:
            key = text.read()
        self.assertIn('context far exists', self.run_gtrain('context', 'add', 'far', '--credential', 'two').err)
        with open(self.dir + '/config/gtrain/far.key') as text:
            self.assertEqual(text.read(), key)
        self.run_gtrain('context', 'add', 'far', '--credential', 'two', '--replace', expect=0)
        with open(self.dir + '/config/gtrain/far.key') as text:
            self.assertNotEqual(text.read(), key)

    def test_json_is_one_document(self):
        """Also where there is nothing to say but an error."""
        self.assertIn('--json needs -d', json.loads(self.run_gtrain('launch', '--json', '--', 'true').out)['error'])
        for words in (['bogus', '--json'], ['ckpt', 'verify', '--json', 'nowhere'], ['ckpt', 'bogus', '--json'],
                      ['ckpt', 'rm', 'nowhere', '1', '--json']):
            done = self.run_gtrain(*words, expect=None)
            self.assertIn(done.returncode, (1, 2), words)
            self.assertIn(json.loads(done.out)['error'].split('\n')[0], done.err)
        self.assertEqual(self.run_gtrain('bogus', '--', '--json').out, '')
        self.assertIn("unknown verb 'qqqqqq'; `gtrain --help` lists them", self.run_gtrain('qqqqqq').err)
        self.assertFalse(os.path.exists(self.dir + '/state'))

    def test_closed_output(self):
        """J14: nobody reads: an error, not a signal or a hang."""
        read, write = os.pipe()
        os.close(read)
        environ = dict(os.environ, HOME=self.dir, GTRAIN_CLI_MARK=self.mark)
        done = subprocess.run([GTRAIN, '--help'], stdout=write, stderr=subprocess.DEVNULL, env=environ, timeout=PATIENCE)
        os.close(write)
        self.assertEqual(done.returncode, 1)

    def test_doctor(self):
        findings = json.loads(self.run_gtrain('doctor', '--json', expect=None).out)
        checks = {finding['check']: finding['result'] for finding in findings}
        self.assertEqual(checks['state'], 'ok', findings)
        self.assertEqual(checks['keys'], 'ok', findings)


if __name__ == '__main__':
    unittest.main()

"""The examples as a user starts them: `gtrain launch` of a job file, with a rank killed on the way."""
import glob
import os
import random
import re
import signal
import subprocess
import time
import unittest

import harness
from harness import SOURCE, wait_until

CHAR_LM = os.path.join(harness.BUILD, 'examples', 'char_lm')
SOFTMAX = os.path.join(harness.BUILD, 'examples', 'fashion_softmax')
SERVER = os.path.join(harness.BUILD, 'examples', 'parameter_server')
ROLLOUT = os.path.join(harness.BUILD, 'examples', 'rollout')
FASHION = os.path.join(harness.BUILD, 'examples', 'fashion_mnist')
LIBRARY = os.path.join(harness.BUILD, 'lib', 'libgtrain.so')
DATA = '/usr/share/datasets/fashion-mnist'
PYTHON = '/usr/bin/python3'
TRAINING = 240  # seconds for a whole training on a busy machine


class ExamplesTest(harness.GtrainTest):
    def ranks_of(self, program):
        """rank -> pid of the living processes that run `program`."""
        found = {}
        for pid, argv in self.marked().items():
            rank = re.search(rb'(?:^|\0)RANK=(\d+)\0', harness.read_proc(pid, 'environ'))
            if rank and any(word.endswith(program) for word in argv[:2]):
                found[int(rank.group(1))] = pid
        return found

    def step(self, name):
        job = self.job(name) or {}
        return int(job.get('step') or 0)

    def committed(self, folder):
        """Manifests under a checkpoint directory."""
        return [path for path in glob.glob(os.path.join(folder, '**'), recursive=True)
                if 'manifest' in os.path.basename(path) or os.path.basename(os.path.dirname(path)) == 'manifests']

    def wait_while(self, launch, what, condition):
        """wait_until, but a job that has already ended is an error at once."""
        def look():
            value = condition()
            if not value and launch.popen.poll() is not None:
                self.fail(f'the job ended before: {what}\n{launch.output()}')
            return value
        return wait_until(what, look, TRAINING)

    def kill(self, launch, program, rank, ranks):
        pids = self.wait_while(launch, f'{ranks} ranks of {program}',
                               lambda: (lambda p: p if len(p) == ranks else None)(self.ranks_of(program)))
        os.kill(pids[rank], signal.SIGKILL)

    @unittest.skipUnless(os.path.exists(SOFTMAX) and os.path.exists(DATA), 'needs zlib and dataset-fashion-mnist')
    def test_fashion_softmax_loses_ranks_and_nothing_else(self):
        """P1, N7: survivors keep their processes, each sample is trained once, and the model is what it would have been.
        GTRAIN_SOAK=1: a kill every five seconds for five minutes."""
        epochs, kills = (2500, 60) if harness.SOAK else (12, 3)
        alone = subprocess.run([SOFTMAX, str(epochs)], capture_output=True, text=True, check=True)
        self.gtrain('launch', '-d', self.job_file('softmax', f'''
name: softmax
run: {SOFTMAX} {epochs}
ranks: {{min: 2, max: 4}}
elastic: {{mode: in-place}}
restart: {{budget: 10000}}
resources: {{cpus: 1, oversubscribe: true}}
'''))
        self.gtrain('scale', '-n', '4', 'softmax', '--now')
        lost, pids = 0, {}
        for kill in range(kills):
            def all_step():
                job = self.job('softmax')
                return job['state'] == 'SUCCEEDED' or (job['world_size'] == 4 and all(rank['step'] for rank in job['ranks']) and job)
            job = wait_until('four ranks that step', all_step, TRAINING)
            if job is True:
                break
            due = time.monotonic() + (5 if harness.SOAK else 0)
            wait_until('the next kill', lambda: time.monotonic() >= due)
            pids = {rank['pid'] for rank in self.job('softmax')['ranks']}
            victim = self.job('softmax')['ranks'][kill % 4]['pid']
            os.kill(victim, signal.SIGKILL)
            lost += 1
            wait_until('the others', lambda: (lambda job: job['generation'] and victim not in {rank['pid'] for rank in job['ranks']})(self.job('softmax')))
            # A status of the moment in which a generation is granted has no pids yet.
            wait_until('the survivors in their processes', lambda: pids - {victim, None} <= {rank['pid'] for rank in self.job('softmax')['ranks']})
        self.assertGreaterEqual(lost, 2)
        self.wait_for_state('softmax', 'SUCCEEDED', seconds=TRAINING)
        self.gtrain('data', 'audit', 'softmax')
        said = [re.search(r'test accuracy ([0-9.]+)', text) for text in (alone.stdout, self.gtrain('logs', 'softmax').stdout)]
        self.assertTrue(all(said), said)
        self.assertAlmostEqual(float(said[0].group(1)), float(said[1].group(1)), delta=0.003)
        print(f'\n{lost} kills; accuracy {said[0].group(1)} undisturbed, {said[1].group(1)} with them', flush=True)

    @unittest.skipUnless(os.path.exists(SERVER) and os.path.exists(DATA), 'needs zlib and dataset-fashion-mnist')
    def test_a_parameter_server_outlives_its_processes(self):
        """P4: any rank but the driver's is killed; the weights have every push that was answered, and workers are made anew."""
        batches = 20000
        self.gtrain('launch', '-d', self.job_file('server', f'''
name: server
run: {SERVER} {batches}
ranks: 4
elastic: {{mode: in-place}}
restart: {{budget: 10000}}
resources: {{cpus: 1, oversubscribe: true}}
'''))
        for kill in range(3):
            ranks = wait_until('four ranks', lambda: (lambda found: found if len(found) == 4 else None)(self.ranks_of('parameter_server')), TRAINING)
            heard = self.step('server')
            wait_until('more answers', lambda: self.step('server') > heard)
            os.kill(ranks[1 + kill], signal.SIGKILL)
        self.wait_for_state('server', 'SUCCEEDED', seconds=TRAINING)
        text = ''.join(self.gtrain('logs', 'server', '--generation', str(generation)).stdout for generation in range(1, 5))
        pushes, accuracy = re.search(r'pushes (\d+)', text), re.search(r'test accuracy ([0-9.]+)', text)
        self.assertTrue(pushes and accuracy, text)
        self.assertGreaterEqual(int(pushes.group(1)), batches)
        self.assertGreater(float(accuracy.group(1)), 0.80)

    def test_a_learner_waits_for_no_slow_worker(self):
        """P4: rollouts of four workers, of which one is slow; ranks are killed, and what was learned goes on."""
        self.gtrain('launch', '-d', self.job_file('rollout', f'''
name: rollout
run: {ROLLOUT} 3000 100
ranks: 4
elastic: {{mode: in-place}}
restart: {{budget: 10000, before_first_step: 10000}}
resources: {{cpus: 1, oversubscribe: true}}
'''))
        for kill in range(2):
            ranks = wait_until('four ranks', lambda: (lambda found: found if len(found) == 4 else None)(self.ranks_of('rollout')), TRAINING)
            heard = self.step('rollout')
            wait_until('more answers', lambda: self.step('rollout') > heard)
            os.kill(ranks[1 + kill], signal.SIGKILL)
        self.wait_for_state('rollout', 'SUCCEEDED', seconds=TRAINING)
        text = ''.join(self.gtrain('logs', 'rollout', '--generation', str(generation)).stdout for generation in range(1, 4))
        rollouts = {int(worker): int(count) for worker, count in re.findall(r'worker (\d): (\d+) rollouts', text)}
        self.assertEqual(len(rollouts), 4, text[-2000:])
        self.assertEqual(sum(rollouts.values()), 3000 * 60)
        self.assertLess(10 * rollouts[0], min(rollouts[1], rollouts[2], rollouts[3]), rollouts)
        self.assertGreater(float(re.findall(r'^.*mean return ([0-9.]+)', text, re.M)[-1]), 400)

    @unittest.skipUnless(os.path.exists(FASHION) and os.path.exists(DATA), 'needs libtorch and dataset-fashion-mnist')
    def test_fashion_mnist_resumes_after_a_killed_rank_and_learns(self):
        """P1, C1: four ranks train; one is killed after a commit; the job resumes from it and reaches the accuracy."""
        ckpt = os.path.join(self.dir, 'ckpt')
        job = self.job_file('fashion', f'''
name: fashion
run: {FASHION} --epochs 1 --batch 128 --lr 0.05 --min-accuracy 0.84
ranks: 4
checkpoint: {{uri: {ckpt}, every: 50 steps}}
''')
        launch = self.start('launch', job)
        self.wait_while(launch, 'a committed checkpoint', lambda: self.committed(ckpt))
        self.kill(launch, 'fashion_mnist', 2, 4)
        self.assertEqual(launch.wait(TRAINING), 0, launch.output())
        output = launch.output()
        resumed = re.search(r'resumed at step (\d+)', output)
        self.assertTrue(resumed, output)
        self.assertGreaterEqual(int(resumed.group(1)), 50, 'a committed step, not the beginning')
        accuracy = re.search(r'test accuracy ([0-9.]+) after 1 epoch\(s\) on 4 rank', output)
        self.assertTrue(accuracy, output)
        self.assertGreaterEqual(float(accuracy.group(1)), 0.84)
        self.assertRegex(output, r'(?i)rank 2\b.*(SIGKILL|signal 9|killed)')
        self.wait_for_no_processes()

    @unittest.skipUnless(os.path.exists(FASHION) and os.path.exists(DATA), 'needs libtorch and dataset-fashion-mnist')
    def test_fashion_mnist_in_place_is_what_it_would_have_been(self):
        """P1: a rank is killed, the others keep their processes, and the model is the same as without that."""
        words = f'{FASHION} --epochs 1 --batch 256 --trace {self.out}'

        def launch(name, mode):
            self.gtrain('launch', '-d', self.job_file(name, f'name: {name}\nrun: {words}\nranks: 4\nelastic: {{mode: {mode}}}\n'
                                                            'resources: {cpus: 1, oversubscribe: true}\n'
                                                            f'checkpoint: {{uri: {self.dir}/{name}-ckpt}}\n'))

        def accuracy(name):
            self.wait_for_state(name, 'SUCCEEDED', seconds=TRAINING)
            said = re.search(r'test accuracy ([0-9.]+) after 1 epoch\(s\) on 4 rank', self.gtrain('logs', name).stdout)
            self.assertTrue(said)
            return float(said.group(1))

        launch('alone', 'restart')
        undisturbed = accuracy('alone')
        launch('kept', 'in-place')
        wait_until('step 60', lambda: self.step('kept') >= 60, TRAINING)
        ranks = {rank['rank']: rank['pid'] for rank in self.job('kept')['ranks']}
        os.kill(ranks.pop(1), signal.SIGKILL)
        self.assertAlmostEqual(accuracy('kept'), undisturbed, delta=0.003)
        job = self.job('kept')
        self.assertEqual((job['generation'], job['restarts']), (2, 1))
        for pid in ranks.values():
            trained = [tuple(map(int, line.split())) for line in self.read(f'trained.{pid}').splitlines()]
            self.assertEqual([step for _, step, _, _ in trained], list(range(1, 236)), 'each step once, in one process')
            self.assertLessEqual(max(tries for *_, tries in trained), 2, 'the step in flight at most is computed again')
        self.gtrain('data', 'audit', 'kept')

    def assert_selected(self, output):
        """Every step behind the first few of top-k sent within 10 % of what its density asks for."""
        said = re.search(r'top-k sent ([0-9.]+) to ([0-9.]+) of the elements it should, in the median ([0-9.]+), in \d+ steps', output)
        self.assertTrue(said, output)
        least, most, median = (float(share) for share in said.groups())
        self.assertTrue(0.9 <= least <= median <= most <= 1.1, said.group(0))

    @unittest.skipUnless(os.path.exists(FASHION) and os.path.exists(DATA), 'needs libtorch and dataset-fashion-mnist')
    def test_fashion_mnist_goes_on_with_what_compression_carried_over(self):
        """C1: run by hand, one that begins again at step 200 ends with the bits of one that did not, residuals and top-k's
        threshold included. What it sends of real gradients is what its density asks for."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith('GTRAIN_')}

        def run():
            done = subprocess.run([FASHION, '--epochs', '1', '--batch', '256', '--compress', 'topk:0.01'], cwd=self.dir,
                                  env=dict(clean, OMP_NUM_THREADS='1'), timeout=TRAINING, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

        def last():
            """The newest shard file of the end, step 235."""
            with open(sorted(glob.glob(self.dir + '/ckpt/fashion_mnist/step-*235.*/*.safetensors'))[-1], 'rb') as shard:
                return shard.read()

        self.assert_selected(run())
        whole = last()
        self.assertTrue(b'reducer/topk-any-ranks-' in whole, 'what compression carries over is saved')
        for manifest in glob.glob(self.dir + '/ckpt/fashion_mnist/manifests/step-*235.*'):
            os.remove(manifest)
        self.assertIn('resumed at step 200', run())
        self.assertTrue(last() == whole, 'the state at the end differs')

    @unittest.skipUnless(os.path.exists(CHAR_LM), 'needs libhwy-dev')
    def test_char_lm_resumes_after_a_killed_rank_and_learns_from_compressed_gradients(self):
        """P1: a model without a framework on the reducer; one gradient in a hundred travels."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            for n in range(2000):
                out.write(f'{n} sheep and {n + 1} goats went up the hill, {2 * n + 1} came down. ')
        ckpt = os.path.join(self.dir, 'ckpt')
        job = self.job_file('lm', f'''
name: lm
run: {CHAR_LM} --text {text} --steps 1000 --batch 96 --max-loss 1.2
ranks: 3
checkpoint: {{uri: {ckpt}, every: 50 steps}}
comm: {{compression: {{codec: topk, density: 1%, warmup: 20}}}}
''')
        launch = self.start('launch', job)
        self.wait_while(launch, 'a committed checkpoint', lambda: self.committed(ckpt))
        self.kill(launch, 'char_lm', 1, 3)
        self.assertEqual(launch.wait(TRAINING), 0, launch.output())
        output = launch.output()
        resumed = re.search(r'resumed at step (\d+)', output)
        self.assertTrue(resumed, output)
        self.assertGreaterEqual(int(resumed.group(1)), 50, 'a committed step, not the beginning')
        self.assertRegex(output, r'validation loss [0-9.]+ after 1000 steps on 3 rank')
        if int(resumed.group(1)) <= 900:  # else too few steps were left to say
            self.assert_selected(output)
        self.wait_for_no_processes()

    @unittest.skipUnless(os.path.exists(CHAR_LM), 'needs libhwy-dev')
    def test_char_lm_goes_from_four_ranks_to_three_and_back_with_what_it_held_back(self):
        """P1, N7: top-k 1 % in place. What a rank held back of its gradients goes on with it, what the lost one took along is
        counted, nothing warms up again, and the model is as good as one that nobody disturbed."""
        steps, warmup, first_few = 600, 20, 5
        text = os.path.join(self.dir, 'text')
        rng = random.Random(1)  # words in no order: the loss that is left says how good the model is, and not how long it learned
        words = [''.join(rng.choices('aeioutnshrdl', k=rng.randint(2, 7))) for _ in range(300)]
        with open(text, 'w') as out:
            out.write(' '.join(rng.choices(words, k=60000)))

        def launch(name, ranks):
            self.gtrain('launch', '-d', self.job_file(name, f'''
name: {name}
run: {CHAR_LM} --text {text} --steps {steps} --batch 96 --show-residual yes
ranks: {ranks}
elastic: {{mode: in-place}}
restart: {{budget: 100}}
resources: {{cpus: 1, oversubscribe: true}}
checkpoint: {{uri: {self.dir}/{name}-ckpt, every: 500 steps}}
comm: {{compression: {{codec: topk, density: 1%, warmup: {warmup}}}}}
'''))

        def ended(name):
            self.wait_for_state(name, 'SUCCEEDED', seconds=TRAINING)
            said = ''.join(self.read(path) for path in sorted(glob.glob(f'{self.dir}/gtrain-runs/{name}-*/logs/*/*')))
            loss = re.search(rf'validation loss (\S+) after {steps} steps on 4 rank', said)
            self.assertTrue(loss, said)
            return said, float(loss.group(1))

        def four_step(but=0):
            def look():
                job = self.job('lm')
                self.assertNotEqual(job['state'], 'SUCCEEDED', 'too soon')
                members = [rank for rank in job['ranks'] if rank['rank'] < job['world_size']]
                return len(members) == 4 and all(rank['step'] and rank['pid'] != but for rank in members) and members
            return wait_until('four ranks that step', look, TRAINING)

        launch('alone', 4)
        undisturbed = ended('alone')[1]
        launch('lm', '{min: 3, max: 4}')
        self.gtrain('scale', '-n', '4', 'lm', '--now')
        four_step()
        wait_until('steps behind the warm-up', lambda: self.step('lm') > 100)
        victim = next(rank['pid'] for rank in four_step() if rank['rank'] == 2)
        os.kill(victim, signal.SIGKILL)
        four_step(but=victim)
        said, loss = ended('lm')
        self.gtrain('data', 'audit', 'lm')

        went_on = {}  # generation -> [(ranks, now, before, lost)]
        for line in re.finditer(r'step (\d+), generation (\d+) of (\d) rank\(s\): (\S+) of (\S+) held back goes on here, (\d+) rank', said):
            if int(line[1]) > warmup:  # the fourth may join in its first steps, when nothing is held back yet
                went_on.setdefault(int(line[2]), []).append((int(line[3]), float(line[4]), float(line[5]), int(line[6])))
        of_three = [lines for lines in went_on.values() if lines[0][0] == 3]
        self.assertEqual([len(lines) for lines in of_three], [3], f'once, on each of the three: {went_on}')
        self.assertEqual(went_on[max(went_on)][0][0], 4, 'and then there were four again')
        for generation, lines in went_on.items():
            for ranks, now, before, lost in lines:
                self.assertGreater(before, 0)
                self.assertAlmostEqual(now, before, delta=1e-4 * before, msg=f'{generation}: {went_on}')
                self.assertEqual(lost, 1 if ranks == 3 or generation == max(went_on) else 0, went_on)
        self.assert_selected(said)
        self.assertIn(f'in {steps - warmup - first_few} steps', said, 'nothing warms up again')
        print(f'\nvalidation loss {undisturbed} undisturbed, {loss} with four, three and four ranks', flush=True)
        self.assertAlmostEqual(loss, undisturbed, delta=0.01 * undisturbed)

    @unittest.skipUnless(os.path.exists(CHAR_LM), 'needs libhwy-dev')
    def test_char_lm_learns_by_one_bit_adam(self):
        """1-bit Adam goes on learning behind its warm-up, in which some parameters had no gradient: divided by their variance of
        nothing, the compression error of others made the loss NaN before step 200."""
        text = os.path.join(self.dir, 'text')
        with open(text, 'w') as out:
            for n in range(2000):
                out.write(f'{n} sheep and {n + 1} goats went up the hill, {2 * n + 1} came down. ')

        def loss_after(name, steps):
            job = self.job_file(name, f'''
name: {name}
run: [{CHAR_LM}, --text, {text}, --steps, '{steps}', --batch, '96', --optimizer, adam, --compress, 'onebit warmup=40']
ranks: 3
checkpoint: {{uri: {self.dir}/{name}}}
''')
            launch = self.start('launch', job)
            self.assertEqual(launch.wait(TRAINING), 0, launch.output())
            said = re.search(r'validation loss (\S+) after (\d+) steps on 3 rank', launch.output())
            self.assertTrue(said, launch.output())
            self.assertEqual(int(said.group(2)), steps)
            return float(said.group(1))

        warm, trained = loss_after('warm', 40), loss_after('trained', 200)
        self.assertLess(trained, 0.9 * warm)  # which NaN is not
        self.wait_for_no_processes()

    def test_torch_ddp_unchanged_resumes_its_own_checkpoint(self):
        """P1: an ordinary DDP script; its steps are seen through `progress:`; killed, it resumes its own file."""
        if not self.can_import('torch'):
            self.skipTest('needs python3-torch')
        script = os.path.join(SOURCE, 'examples', 'torch_ddp', 'train.py')
        job = self.job_file('ddp', f'''
name: ddp
run: {PYTHON} {script} --steps 150 --step-seconds 0.05 --checkpoint {self.dir}/ddp.pt
ranks: 2
progress: {{step: 'step (\\d+)', loss: 'loss ([0-9.]+)'}}
''')
        launch = self.start('launch', job)
        self.wait_while(launch, 'steps in `gtrain status --json`', lambda: self.step('ddp') >= 25)
        self.wait_while(launch, 'its own checkpoint', lambda: os.path.exists(self.dir + '/ddp.pt'))
        self.kill(launch, 'torch_ddp/train.py', 0, 2)
        self.assertEqual(launch.wait(TRAINING), 0, launch.output())
        output = launch.output()
        self.assertRegex(output, r'resumed at step [2-9]\d|resumed at step 1\d\d')
        self.assertRegex(output, r'finished: accuracy 0\.9\d+ on 2 rank|finished: accuracy 1\.0+ on 2 rank')
        self.wait_for_no_processes()

    def test_python_sgd_resumes_after_a_killed_rank(self):
        """P1: the Python package on two ranks: joins, all-reduces, reports, saves, restores."""
        if not (os.path.exists(LIBRARY) and self.can_import('numpy')):
            self.skipTest('needs libgtrain.so and python3-numpy')
        script = os.path.join(SOURCE, 'examples', 'python_sgd', 'train.py')
        ckpt = os.path.join(self.dir, 'ckpt')
        job = self.job_file('sgd', f'''
name: sgd
run: {PYTHON} {script} --steps 300 --step-seconds 0.02
ranks: 2
checkpoint: {{uri: {ckpt}, every: 25 steps}}
''')
        launch = self.start('launch', job, GTRAIN_LIBRARY=LIBRARY)
        self.wait_while(launch, 'steps in `gtrain status --json`', lambda: self.step('sgd') >= 30)
        self.wait_while(launch, 'a committed checkpoint', lambda: self.committed(ckpt))
        self.kill(launch, 'python_sgd/train.py', 1, 2)
        self.assertEqual(launch.wait(TRAINING), 0, launch.output())
        self.assertRegex(launch.output(), r'resumed at step \d+')
        self.assertRegex(launch.output(), r'finished: accuracy 0\.9\d+ on 2 rank')
        self.wait_for_no_processes()

    def test_python_collectives_of_three_ranks(self):
        if not (os.path.exists(LIBRARY) and self.can_import('numpy')):
            self.skipTest('needs libgtrain.so and python3-numpy')
        script = os.path.join(SOURCE, 'tests', 'e2e', 'collectives_rank.py')
        done = self.gtrain('launch', '-n', '3', '--', PYTHON, script, timeout=TRAINING, GTRAIN_LIBRARY=LIBRARY,
                           PYTHONPATH=os.path.join(SOURCE, 'python'))
        for rank in range(3):
            self.assertIn(f'rank {rank} is done', done.stdout)

    def test_a_launch_that_is_refused_resumes_nothing(self):
        """`resumes step ...` was said before the head was asked."""
        if not (os.path.exists(LIBRARY) and self.can_import('numpy')):
            self.skipTest('needs libgtrain.so and python3-numpy')
        ckpt = os.path.join(self.dir, 'ckpt')
        save = (f'import gtrain, numpy as np\nwith gtrain.Session() as s, gtrain.Checkpointer(s, uri="{ckpt}") as c:\n'
                '    c.replicated(w=np.ones(3))\n    c.save(7)\n    c.wait()\n')
        subprocess.run([PYTHON, '-c', save], check=True, timeout=TRAINING,
                       env=self.env(GTRAIN_LIBRARY=LIBRARY, PYTHONPATH=os.path.join(SOURCE, 'python')))
        job = self.job_file('twice', f'name: twice\nrun: sleep 600\ncheckpoint: {{uri: {ckpt}}}\n')
        self.assertIn('gtrain: resumes step 7 of job ', self.gtrain('launch', '-d', job).stderr)
        refused = self.gtrain('launch', '-d', job, expect=2)
        self.assertIn('is not over', refused.stderr)
        self.assertNotIn('resumes', refused.stderr)
        self.gtrain('stop', '--now', 'twice')
        self.wait_for_state('twice', 'CANCELLED')
        self.end_local_cluster()

    def test_the_others_hear_the_exception_that_ended_a_session(self):
        """They heard `rank 1 has closed its communicator` and not why."""
        if not (os.path.exists(LIBRARY) and self.can_import('numpy')):
            self.skipTest('needs libgtrain.so and python3-numpy')
        for raised, said in [('raise ValueError("boom")', 'gave up: ValueError: boom'),
                             ('sys.exit(93)', '(has closed its communicator|ended with exit code 93)')]:
            script = os.path.join(self.dir, 'raises.py')
            with open(script, 'w') as file:
                file.write(f"""
import sys
import gtrain, numpy as np
with gtrain.Session() as session:
    session.barrier()
    if session.rank == 1:
        {raised}
    try:
        session.all_reduce(np.ones(3))
    except gtrain.Unavailable as error:
        print('heard', error, flush=True)
        raise
""")
            done = self.gtrain('launch', '-n', '3', '--', PYTHON, script, timeout=TRAINING, expect=None,
                               GTRAIN_LIBRARY=LIBRARY, PYTHONPATH=os.path.join(SOURCE, 'python'))
            self.assertNotEqual(done.returncode, 0)
            heard = re.findall(r'^\S+:([\d,]+): heard (.*)$', done.stdout, re.M)
            self.assertEqual({rank for ranks, _ in heard for rank in ranks.split(',')}, {'0', '2'}, done.stdout)
            for _, words in heard:
                self.assertRegex(words, f': rank 1 {said}')

    def test_a_rank_that_ends_is_named_by_those_that_wait_for_it(self):
        if not (os.path.exists(LIBRARY) and self.can_import('numpy')):
            self.skipTest('needs libgtrain.so and python3-numpy')
        for when, what in [('before', 'has no part in exchange'), ('after', 'all-reduce')]:
            script = os.path.join(self.dir, f'{when}.py')
            with open(script, 'w') as file:
                file.write(f"""
import os
import gtrain, numpy as np
session = gtrain.Session()
if '{when}' == 'after':
    session.barrier()
if session.rank == 1:
    os._exit(0)
session.all_reduce(np.ones(3))
""")
            done = self.gtrain('launch', '-n', '3', '--', PYTHON, script, timeout=TRAINING, expect=None,
                               GTRAIN_LIBRARY=LIBRARY, PYTHONPATH=os.path.join(SOURCE, 'python'))
            self.assertNotEqual(done.returncode, 0)
            said = done.stdout + done.stderr
            self.assertRegex(said, f'Unavailable: .*rank 1 ended with exit code 0|rank 1 ended with exit code 0.*{what}')

    def test_resume_rule(self):
        """Checkpoints of the same job are resumed and that is said; of another job they are neither resumed nor
        overwritten until the user says which."""
        if not (os.path.exists(LIBRARY) and self.can_import('numpy')):
            self.skipTest('needs libgtrain.so and python3-numpy')
        script = os.path.join(SOURCE, 'examples', 'python_sgd', 'train.py')
        ckpt = os.path.join(self.dir, 'ckpt')

        def launch(rate, *flags, expect=0):
            job = self.job_file('rule', f'''
name: rule
run: {PYTHON} {script} --steps 40 --lr {rate}
ranks: 2
checkpoint: {{uri: {ckpt}, every: 25 steps}}
''')
            done = self.gtrain('launch', job, *flags, expect=expect, timeout=TRAINING, GTRAIN_LIBRARY=LIBRARY)
            return done.stdout + done.stderr

        first = launch(0.1)
        self.assertNotIn('resume', first)
        self.assertIn('finished: ', first)
        files = self.committed(ckpt)
        self.assertTrue(files)
        refused = launch(0.2, expect=2)
        self.assertRegex(refused, rf'newest checkpoint is step 40 of job rule-1 in {ckpt}')
        hashes = re.search(r"its hash .* is ([0-9a-f]{12}), this one's ([0-9a-f]{12})\b", refused)
        self.assertTrue(hashes, refused)
        self.assertNotEqual(hashes.group(1), hashes.group(2))
        self.assertIn('--resume latest', refused)
        self.assertIn('--fresh', refused)
        self.assertEqual(self.committed(ckpt), files)
        self.assertLessEqual(len(self.jobs()), 1, 'nothing was started')
        again = launch(0.1)
        self.assertIn(f'gtrain: resumes step 40 of job rule-1 in {ckpt}', again)
        self.assertIn('resumed at step 40', again)
        fresh = launch(0.2, '--fresh')
        self.assertNotIn('resumed at step', fresh)
        self.assertIn('finished: ', fresh)
        forced = launch(0.3, '--resume', 'latest')
        self.assertIn('resumed at step 40', forced)
        self.end_local_cluster()

    def test_job_files_of_the_examples_are_valid(self):
        files = glob.glob(os.path.join(SOURCE, 'examples', '*', 'job.yaml'))
        programs = glob.glob(os.path.join(SOURCE, 'examples', '*', 'CMakeLists.txt'))
        self.assertGreater(len(programs), 0)
        # Each example that is built has a job file, and so have those in Python.
        for path in programs:
            self.assertIn(os.path.join(os.path.dirname(path), 'job.yaml'), files)
        for path in files:
            self.gtrain('validate', path)

    def can_import(self, module):
        import importlib.util
        return importlib.util.find_spec(module) is not None


if __name__ == '__main__':
    harness.main()

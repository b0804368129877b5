"""`gtrain ckpt` on checkpoints that a job wrote and on a file of another program."""
import glob
import json
import math
import os
import re
import shutil
import struct
import time
import unittest

import harness
from harness import SOURCE

TRAIN = os.path.join(SOURCE, 'examples', 'python_sgd', 'train.py')
RESHARD = os.path.join(SOURCE, 'tests', 'e2e', 'reshard_rank.py')
WHOLE = 4 * (3 * 1501 * 2003 + 2003)  # bytes of the state of reshard_rank.py
LIBRARY = os.path.join(harness.BUILD, 'lib', 'libgtrain.so')


def sanitized():
    """Python cannot load a library that wants a sanitizer's run time."""
    with open(LIBRARY, 'rb') as library:
        data = library.read()
    return b'__asan_init' in data or b'__tsan_init' in data


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes). By hand from the published layout, so that our writer is not its own witness."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as out:
        out.write(struct.pack('<Q', len(text)) + text + b''.join(data for _, _, data in tensors.values()))


def read_safetensors(path):
    with open(path, 'rb') as data:
        header = json.loads(data.read(struct.unpack('<Q', data.read(8))[0]))
        rest = data.read()
    return {name: (e['dtype'], e['shape'], rest[slice(*e['data_offsets'])])
            for name, e in header.items() if name != '__metadata__'}


def floats(*values):
    return struct.pack(f'<{len(values)}f', *values)


class CkptTest(harness.GtrainTest):
    def ckpt(self, *args, **options):
        return self.gtrain('ckpt', *args, **options).stdout

    def listed(self, folder):
        return json.loads(self.ckpt('ls', folder, '--json'))

    def write(self, name, tensors):
        path = os.path.join(self.dir, name)
        write_safetensors(path, tensors)
        return path

    def test_a_file_goes_in_and_comes_out_the_same(self):
        tensors = {'layer.weight': ('F32', [600, 1000], os.urandom(2_400_000)), 'step': ('I64', [], struct.pack('<q', 7)),
                   'layer.bias': ('BF16', [3], b'\x00\x3f' * 3), 'empty': ('F16', [0, 4], b'')}
        store, out = os.path.join(self.dir, 'store'), os.path.join(self.dir, 'out.safetensors')
        self.ckpt('import', self.write('in.safetensors', tensors), store)
        self.assertIn('layer.weight  F32[600,1000]', self.ckpt('show', store))
        self.assertIn('intact', self.ckpt('verify', store))
        self.ckpt('export', store, out)
        self.assertEqual(read_safetensors(out), tensors)
        again = self.gtrain('ckpt', 'export', store, out, expect=1)
        self.assertIn('exists', again.stderr)
        self.assertEqual(os.listdir(self.dir).count('out.safetensors.unfinished'), 0)

    def test_the_public_package_reads_shards_and_exports(self):
        """Names, shapes and bytes, as the Python package safetensors of others sees them."""
        try:
            from safetensors.numpy import load_file
        except ImportError:
            self.skipTest('the Python package safetensors is not installed')
        tensors = {'layer.weight': ('F32', [30, 20], os.urandom(2400)), 'ids': ('I64', [2], struct.pack('<qq', 7, -1)),
                   'mask': ('U8', [5], b'12345')}
        store, out = os.path.join(self.dir, 'store'), os.path.join(self.dir, 'out.safetensors')
        self.ckpt('import', self.write('in.safetensors', tensors), store)
        self.ckpt('export', store, out)
        attempt = self.listed(store)[0]['attempt']
        for path in (os.path.join(store, attempt, 'rank-00000-of-00001.safetensors'), out):
            arrays = load_file(path)
            self.assertEqual(set(arrays), set(tensors))
            for name, (_, shape, data) in tensors.items():
                self.assertEqual((list(arrays[name].shape), arrays[name].tobytes()), (shape, data), name)

    def test_diff_names_what_changed(self):
        a, b = os.path.join(self.dir, 'a'), os.path.join(self.dir, 'b')
        self.ckpt('import', self.write('a.st', {'w': ('F32', [3], floats(1, 2, 3)), 'old': ('U8', [1], b'x'),
                                                'same': ('F32', [1], floats(5))}), a)
        self.ckpt('import', self.write('b.st', {'w': ('F32', [3], floats(1, 2.5, 3)), 'new': ('U8', [1], b'x'),
                                                'same': ('F32', [1], floats(5))}), b)
        self.assertEqual(self.ckpt('diff', a, 'latest', b, 'latest').splitlines(),
                         ['new  only in the second', 'old  only in the first',
                          'w  differs in 1 of 3 elements, at most by 0.5'])
        self.assertEqual(self.ckpt('diff', a, '0', '0'), 'no tensor differs\n')

    def test_damage_is_found_and_named_C9(self):
        store = os.path.join(self.dir, 'store')
        self.ckpt('import', self.write('in.st', {'w': ('F32', [2], floats(1, 2))}), store)
        attempt = self.listed(store)[0]['attempt']
        shard = os.path.join(store, attempt, 'rank-00000-of-00001.safetensors')
        with open(shard, 'rb') as file:
            data = bytearray(file.read())
        data[-1] ^= 1
        os.chmod(shard, 0o644)
        with open(shard, 'wb') as out:
            out.write(data)
        found = self.gtrain('ckpt', 'verify', store, expect=1)
        self.assertIn('DAMAGED', found.stdout)
        self.assertIn('rank-00000-of-00001.safetensors', found.stdout)
        for verb in (['export', store, os.path.join(self.dir, 'x')], ['cp', store, os.path.join(self.dir, 'copy')]):
            self.gtrain('ckpt', *verb, expect=1)
        self.assertFalse(os.path.exists(os.path.join(self.dir, 'x')))
        self.assertEqual(self.listed(os.path.join(self.dir, 'copy')), [])

    def test_wrong_words(self):
        self.assertIn('ls, show', self.gtrain('ckpt', 'list', 'x', expect=2).stderr)
        self.assertIn('usage: gtrain ckpt cp', self.gtrain('ckpt', 'cp', 'x', expect=2).stderr)
        self.assertIn('s3://bucket', self.gtrain('ckpt', 'ls', 'gs://x', expect=2).stderr)
        self.assertIn('two slashes', self.gtrain('ckpt', 'ls', 's3:/x', expect=2).stderr)
        # A mistyped path is no run without checkpoints, and looking makes nothing.
        absent, file = os.path.join(self.dir, 'absent'), self.write('in.st', {'w': ('F32', [1], floats(1))})
        out = os.path.join(self.dir, 'target')
        for words in (['ls'], ['ls', '--json'], ['show'], ['verify'], ['gc'], ['gc', '--dry-run'], ['pin', '1'], ['rm', '1'],
                      ['unpin', 'step-000000000001.e0001.t0001.g0001.a01'], ['diff', '1', '2'], ['export', out], ['cp', out]):
            said = self.gtrain('ckpt', words[0], absent, *words[1:], expect=1)
            self.assertIn(f'{absent} does not exist', said.stderr, words)
            self.assertEqual(said.stdout != '', '--json' in words, words)  # an error is a document, too
        self.assertFalse(os.path.exists(absent) or os.path.exists(out))
        self.assertIn('is not a directory', self.gtrain('ckpt', 'ls', file, expect=1).stderr)
        empty = os.path.join(self.dir, 'empty')
        os.mkdir(empty)
        self.assertIn('no checkpoints', self.ckpt('ls', empty))
        self.assertIn('no committed checkpoint', self.gtrain('ckpt', 'show', empty, expect=1).stderr)
        nothing = self.gtrain('ckpt', 'verify', empty, expect=1)
        self.assertEqual((nothing.stdout, f'no checkpoints in {empty}' in nothing.stderr), ('', True))
        self.assertEqual(os.listdir(empty), [])

    def test_what_is_not_finite_is_said_C14(self):
        store, other, out = (os.path.join(self.dir, name) for name in ('store', 'other', 'out.st'))
        self.ckpt('import', self.write('nan.st', {'w': ('F32', [2], floats(1, math.nan))}), store)
        said = self.gtrain('ckpt', 'export', store, out)
        self.assertIn('step 0 holds NaN or infinity; none that is there is finite', said.stderr)
        said = self.gtrain('ckpt', 'verify', store)
        self.assertIn('step 0 holds NaN or infinity; none that is there is finite', said.stderr)
        self.assertRegex(said.stdout, r'intact, .*, NOT FINITE\n')
        self.ckpt('import', self.write('one.st', {'w': ('F32', [2], floats(1, 2))}), other)
        self.assertNotIn('NaN', self.gtrain('ckpt', 'verify', other).stderr)

    @unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
    def refuse_to_replace(self, store):
        """C3: resuming from elsewhere says nothing of what is in the job's own folder, and retention deleted it."""
        other = self.job_file('other', f'name: other\nrun: /usr/bin/python3 {TRAIN} --steps 200 --other\nranks: 2\n'
                                       f'checkpoint: {{uri: {store}, every: 25 steps, keep: 1}}\n')
        elsewhere = os.path.join(self.dir, 'elsewhere')
        shutil.copytree(store, elsewhere)
        said = self.gtrain('launch', other, '--resume', elsewhere, expect=2).stderr
        self.assertRegex(said, r"this job's own checkpoint\.uri is step 50 of job sgd-1 .* another job: its checkpoints would be deleted")
        for place, why in ((os.path.join(self.dir, 'nope'), 'there is no such directory'), (self.out, 'no committed checkpoint is there')):
            free = self.job_file('free', f'name: free\nrun: "true"\nranks: 1\ncheckpoint: {{uri: {self.dir}/free}}\n')
            self.assertIn(f'--resume {place}: {why}', self.gtrain('launch', free, '--resume', place, expect=2).stderr)
        # The library itself, for who sets the variable: nothing of the other job is touched.
        direct = self.gtrain('launch', '-n', '1', '--name', 'direct', '--set', f'checkpoint.uri={store}', '--resume', elsewhere,
                             '--', '/usr/bin/python3', TRAIN, '--steps', '60', expect=2)
        self.assertIn('another job', direct.stderr)
        fresh = self.start('launch', '--fresh', '--name', 'fresh', '-n', '1', '--set', f'checkpoint.uri={store}', '--', 'sleep', '600')
        fresh.wait_for(r'starts anew; the checkpoints that are there, the newest step 50 of job sgd-1 in \S+, are deleted as newer '
                       r'ones are committed\. `gtrain ckpt pin \S+ STEP` keeps one')
        self.gtrain('stop', '--now', 'fresh')
        fresh.wait()
        self.assertEqual([c['step'] for c in self.listed(store)], [50, 25])

    def test_of_a_job(self):
        """pin outlives retention, rm asks before the newest, gc frees what was never committed, cp is verified (C2)."""
        store, copy = os.path.join(self.dir, 'ckpt'), os.path.join(self.dir, 'copy')

        def train(steps):
            job = self.job_file('sgd', f'name: sgd\nrun: /usr/bin/python3 {TRAIN} --steps {steps}\nranks: 2\n'
                                       f'checkpoint: {{uri: {store}, every: 25 steps, keep: 2}}\n')
            self.gtrain('launch', job, '--resume', 'latest')

        train(50)
        self.assertEqual([c['step'] for c in self.listed(store)], [50, 25])
        self.refuse_to_replace(store)
        self.ckpt('pin', store, '25')
        train(100)
        kept = {c['step']: c['pinned'] for c in self.listed(store)}
        self.assertEqual(kept, {100: False, 75: False, 25: True})
        self.assertIn('weights', self.ckpt('diff', store, '25', '100'))
        self.assertIn('newest', self.gtrain('ckpt', 'rm', store, '100', expect=1).stderr)
        self.assertIn('pinned', self.gtrain('ckpt', 'rm', store, '25', expect=1).stderr)
        self.assertIn('pinned', self.ckpt('cp', store, copy, '25'))
        self.assertEqual([c['step'] for c in self.listed(copy)], [25])
        self.ckpt('unpin', store, '25')
        self.ckpt('rm', store, '25')
        self.assertEqual([c['step'] for c in self.listed(store)], [100, 75])

        orphan = os.path.join(store, 'step-000000000060.e0001.t0001.g0001.a09')
        os.mkdir(orphan)
        with open(os.path.join(orphan, 'rank-00000-of-00002.safetensors'), 'wb') as out:
            out.write(b'x' * 1000)
        # Of a lower epoch: its writer may be alive until nothing changed for a day (C2).
        self.assertIn(os.path.basename(orphan) + '  not committed yet', self.ckpt('gc', store))
        self.assertTrue(os.path.exists(orphan))
        old = time.time() - 25 * 3600
        os.utime(os.path.join(orphan, 'rank-00000-of-00002.safetensors'), (old, old))
        os.utime(orphan, (old, old))
        self.assertIn('would free 1000', self.ckpt('gc', store, '--dry-run'))
        self.assertTrue(os.path.exists(orphan))
        self.ckpt('gc', store)
        self.assertFalse(os.path.exists(orphan))
        self.assertEqual(self.ckpt('verify', store).count('intact'), 2)
        self.end_local_cluster()

    @unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
    def test_any_world_size_and_layout_C6(self):
        """8 -> 6 -> 3 -> 8 ranks and dp4 x tp2 -> dp2 x tp4, each rank checking every bit; what people see is whole."""
        store = os.path.join(self.dir, 'ckpt')
        for step, mesh in enumerate(['dp=4,tp=2', 'dp=3,tp=2', 'dp=3', 'dp=4,tp=2', 'dp=2,tp=4'], 1):
            self.run_world(store, step, mesh)
        self.end_local_cluster()
        self.assertEqual(self.ckpt('verify', store).count('intact'), 3)
        self.assertIn('m  F32[1501,2003] split 1:tp 0:dp on dp=2 x tp=4', self.ckpt('show', store))
        self.assertEqual(self.ckpt('diff', store, '3', '5'), 'no tensor differs\n')

        out = os.path.join(self.dir, 'merged.safetensors')
        self.ckpt('export', store, out)
        exported = read_safetensors(out)
        merged = self.merge_as_documented()(store, self.listed(store)[0]['attempt'])
        self.assertEqual(set(merged), {'w', 'm', 'v', 'bias', 'table', 'mask'})
        for name, array in merged.items():
            dtype = 'BOOL' if name == 'mask' else 'F32'
            self.assertEqual(exported[name], (dtype, list(array.shape), array.tobytes()), name)
        self.assertIn('mask  BOOL[10] split 0:dp:chunk on dp=2 x tp=4', self.ckpt('show', store))
        self.assertIn('table  F32[100,7] in 7 boxes', self.ckpt('show', store))

    def run_world(self, store, step, mesh):
        ranks = math.prod(int(axis.split('=')[1]) for axis in mesh.split(','))
        job = self.job_file('reshard', f'name: reshard\nrun: /usr/bin/python3 {RESHARD} --mesh {mesh} --step {step}\n'
                                       f'ranks: {ranks}\ncheckpoint: {{uri: {store}, keep: 3}}\n')
        output = self.gtrain('launch', job, '--resume', 'latest').stdout
        found = [tuple(map(int, line)) for line in re.findall(r'bytes (\d+), read (\d+), peak (\d+)', output)]
        self.assertEqual(len(found), 0 if step == 1 else ranks, output)
        for needed, read, peak in found:
            # docs/formats/checkpoint.md: the buffer of the save to come (at most as much as the rank's state), four
            # chunks, those that the ranks of the machine share and small things.
            self.assertLessEqual(peak, needed + (4 + min(8 * ranks, 64)) * (4 << 20) + (8 << 20))
        if found:
            # Each chunk is read once, by one of the ranks, which are all on this machine.
            shards = glob.glob(f'{store}/step-{step - 1:012}.*/*.safetensors')
            self.assertLessEqual(sum(read for _, read, _ in found), sum(map(os.path.getsize, shards)))
            self.assertGreaterEqual(sum(read for _, read, _ in found), WHOLE)
            most = max(found, key=lambda f: f[2])
            print(f'{mesh}: a rank holds {most[0]} bytes, its restore reads {most[1]} and takes {most[2]} at most')

    def merge_as_documented(self):
        with open(os.path.join(SOURCE, 'docs', 'formats', 'checkpoint.md')) as page:
            code = next(c for c in re.findall(r'```python\n(.*?)```', page.read(), re.S) if 'def merge' in c)
        names = {}
        exec(code, names)  # what the page tells people to run
        return names['merge']


if __name__ == '__main__':
    unittest.main(verbosity=2)

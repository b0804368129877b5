"""Checkpoints in the object store people run: Ceph's S3 gateway, started by the test. `make test-s3` installs it."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
import harness  # noqa: E402
import rgw  # noqa: E402
from ckpt_test import LIBRARY, sanitized  # noqa: E402
from harness import SOURCE, wait_until  # noqa: E402

CONFORMANCE = os.path.join(harness.BUILD, 'tests', 'checkpoint_s3_test')
SAVE_RANK = os.path.join(SOURCE, 'tests', 'e2e', 'save_rank.py')
TRAIN = os.path.join(SOURCE, 'examples', 'python_sgd', 'train.py')


def setUpModule():
    if rgw.missing():
        raise unittest.SkipTest(f'{", ".join(rgw.missing())} not installed: run `make test-s3`')
    global folder, server
    folder = tempfile.mkdtemp(prefix='gt-rgw-')
    unittest.addModuleCleanup(shutil.rmtree, folder, ignore_errors=True)
    server = rgw.Rgw(folder)
    unittest.addModuleCleanup(server.stop)
    server.start()


class RgwTest(harness.GtrainTest):
    @unittest.skipUnless(os.path.exists(CONFORMANCE), 'checkpoint_s3_test is not built')
    def test_conformance(self):
        """The suite every blob store passes, and multipart uploads, against the real server."""
        self.conforms(**server.env)

    @unittest.skipUnless(os.path.exists(CONFORMANCE), 'checkpoint_s3_test is not built')
    def test_conformance_over_tls(self):
        """There uploads carry a checksum and no signed hash."""
        self.conforms(**server.tls_env)

    @unittest.skipUnless(os.path.exists(CONFORMANCE), 'checkpoint_s3_test is not built')
    def test_a_gateway_that_compares_no_checksums_gets_signed_uploads(self):
        """S11: this version of Ceph ignores them, so over plain HTTP they would protect nothing."""
        self.conforms(**server.env, GTRAIN_S3_PAYLOAD='checksum')

    def conforms(self, **env):
        done = subprocess.run([CONFORMANCE, '--gtest_filter=*Real*'], capture_output=True, text=True, timeout=300,
                              env=dict(os.environ, **env, GTRAIN_TEST_S3_URI='s3://bucket/conformance'))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r'\[  PASSED  \] 14 tests')

    def sgd(self, name, steps, endpoint=None):
        return self.job_file(name, f'''
name: {name}
run: /usr/bin/python3 {TRAIN} --steps {steps} --step-seconds 0.02
ranks: 2
env: {{AWS_ENDPOINT_URL: "{endpoint or server.env['AWS_ENDPOINT_URL']}"}}
secrets: {{AWS_ACCESS_KEY_ID: {{env: AWS_ACCESS_KEY_ID}}, AWS_SECRET_ACCESS_KEY: {{env: AWS_SECRET_ACCESS_KEY}}}}
checkpoint: {{uri: "s3://bucket/{name}", every: 25 steps}}
''')

    def test_a_killed_rank_resumes_from_the_object_store(self):
        """P1, C1: the job resumes from its last commit in the bucket; a later launch sees it and asks."""
        launch = self.start('launch', self.sgd('killed', 300), **server.env)
        wait_until('a commit', lambda: ((self.job('killed') or {}).get('last_checkpoint') or {}).get('step', 0) >= 25)
        victim = next(pid for pid, argv in self.marked().items()
                      if TRAIN in argv[:2] and b'\0RANK=1\0' in harness.read_proc(pid, 'environ'))
        os.kill(victim, signal.SIGKILL)
        launch.wait_for(r'resumed at step (25|50|75|[1-9]\d\d)\b')
        self.assertEqual(launch.wait(), 0, launch.output())
        other = self.gtrain('launch', self.sgd('killed', 310), expect=2, **server.env)
        self.assertIn('step 300 of job killed-1 in s3://bucket/killed', other.stderr)
        self.end_local_cluster()

    @unittest.skipUnless(os.path.exists(LIBRARY) and not sanitized(), 'libgtrain.so is not built, or with a sanitizer')
    def test_a_rank_gets_SIGSEGV_10_ms_after_its_save(self):
        """C1: the writers outside the ranks put that step into the bucket all the same, and it is resumed from."""
        for victim in ('0', '1'):
            name = f'lost{victim}'
            out = os.path.join(self.out, name)
            os.mkdir(out)
            launch = self.start('launch', self.job_file(name, f'''
name: {name}
run: /usr/bin/python3 {SAVE_RANK} --out {out} --die {victim}
ranks: 2
env: {{AWS_ENDPOINT_URL: "{server.env['AWS_ENDPOINT_URL']}"}}
secrets: {{AWS_ACCESS_KEY_ID: {{env: AWS_ACCESS_KEY_ID}}, AWS_SECRET_ACCESS_KEY: {{env: AWS_SECRET_ACCESS_KEY}}}}
checkpoint: {{uri: "s3://bucket/{name}"}}
'''), **server.env)
            self.assertEqual(launch.wait(), 0, launch.output())
            resumed = sorted(re.findall(r'rank (\d+): resumed (\d+)', launch.output()))
            self.assertEqual(resumed, [('0', '2'), ('1', '2')], launch.output())
            self.assertNotIn('writes its saves itself', launch.output())
            verified = self.gtrain('ckpt', 'verify', f's3://bucket/{name}', **server.env)
            self.assertEqual(verified.stdout.count('intact'), 2, verified.stdout)
        self.end_local_cluster()

    def test_a_wrong_key_is_the_stores_own_word(self):
        """S10: refused before anything starts."""
        env = dict(server.env, AWS_SECRET_ACCESS_KEY='guessed')
        refused = self.gtrain('launch', self.sgd('wrong', 10), expect=None, **env)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn('SignatureDoesNotMatch', refused.stderr)
        self.assertEqual(self.jobs(), [])


if __name__ == '__main__':
    unittest.main(verbosity=2)

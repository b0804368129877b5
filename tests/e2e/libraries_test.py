"""What a rank pulls in before main(): 256 starts cost 0.15 s with these few and seconds with everything linked."""
import os
import subprocess
import unittest

import harness

SYSTEM = {'linux-vdso.so.1', 'ld-linux-x86-64.so.2', 'libc.so.6', 'libm.so.6', 'libgcc_s.so.1', 'libstdc++.so.6'}
CHECKSUMS = {'libxxhash.so.0'}


def libraries(program):
    """Every shared library the loader would map, the indirect ones too."""
    done = subprocess.run(['ldd', program], capture_output=True, text=True)
    if 'not a dynamic executable' in done.stdout + done.stderr or 'statically linked' in done.stdout:
        return set()
    if done.returncode != 0:
        raise AssertionError(f'ldd {program}: {done.stdout}{done.stderr}')
    return {os.path.basename(line.split()[0]) for line in done.stdout.splitlines()}


class LibrariesTest(unittest.TestCase):
    def check(self, relative, allowed, prefix=None):
        path = os.path.join(harness.BUILD, relative)
        if not os.path.exists(path):
            self.skipTest(f'{relative} is not built')
        extra = {name for name in libraries(path) - allowed if not (prefix and name.startswith(prefix))}
        self.assertEqual(extra, set(), f'{relative} pulls in more than a rank may: load it on demand (base/module.h)')

    def test_a_program_with_the_sdk(self):
        self.check('tests/e2e_sdk_stepper', SYSTEM | CHECKSUMS)

    def test_the_c_library(self):
        self.check('lib/libgtrain.so', SYSTEM | CHECKSUMS, prefix='libabsl_')

    def test_the_keeper_is_libc_only(self):
        self.check('bin/gtrain-keeper', {'linux-vdso.so.1', 'ld-linux-x86-64.so.2', 'libc.so.6'})


if __name__ == '__main__':
    unittest.main(verbosity=2)

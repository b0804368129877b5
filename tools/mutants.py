#!/usr/bin/env python3
"""Plants the mutants of tests/mutants/*.txt one after another and says by which gate each is caught.

usage: mutants.py [--list | --check] [--only ID[,ID]] [--gate "KIND ARGS"] [--all-gates] [--trust]
  --list        the mutants and their gates
  --check       only that every mutant still fits the sources and every gate names a test that exists (`make check`)
  --only        these mutants; a trailing * stands for anything
  --gate        this gate instead of the mutants' own, e.g. --gate "sim --seeds 1..200": what does it catch alone?
  --all-gates   every gate of a mutant, not only up to the first that catches it
  --trust       without the first part, the proof that the unmutated tree passes every gate

Works on a copy of the tracked and new files in build/mutants/tree, with a build directory beside it. First the copy as it
is must pass every gate. Then each mutant is written into its file, the gates' targets are built, the gates run in the
order of the list until one fails, and the file is put back. Exits 1 if a mutant survives, does not compile or no longer
fits. The table is in build/mutants/report.txt too, what each build and gate printed in build/mutants/logs/ID.log.
The format of the list is described in tests/mutants/README.md.
"""
import argparse
import ctypes
import filecmp
import fnmatch
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..'))
WORK = os.path.join(ROOT, 'build', 'mutants')
TREE, BUILD, LOGS = (os.path.join(WORK, name) for name in ('tree', 'tree/build', 'logs'))
BUILD_SECONDS = 1800
PR_SET_CHILD_SUBREAPER = 36


class Bad(Exception):
    """The list or a gate is wrong; the message is for people."""


class Gate:
    """One line `gate KIND ARGS`: how to build it, how to run it and where its tests are written."""
    SECONDS = {'unit': 180, 'golden': 120, 'sim': 600, 'e2e': 300}

    def __init__(self, text):
        self.text = text
        self.kind, *self.args = text.split()
        wanted = {'unit': len(self.args) == 2, 'golden': len(self.args) == 0, 'sim': len(self.args) > 0,
                  'e2e': len(self.args) == 1 and self.args[0].count('.') == 2}
        if not wanted.get(self.kind):
            raise Bad(f'"gate {text}": it is one of: unit PROGRAM SUITE.TEST, golden, sim ARGS, e2e FILE.CLASS.TEST')

    def targets(self):
        return {'unit': self.args[:1], 'golden': ['golden_test'], 'sim': ['gtrain-sim'],
                'e2e': ['gtrain', 'gtrain-keeper', 'e2e_allreduce']}[self.kind]

    def command(self):
        if self.kind == 'unit':
            return [f'{BUILD}/tests/{self.args[0]}', '--gtest_filter=' + self.args[1], '--gtest_brief=1']
        if self.kind == 'golden':
            return [f'{BUILD}/tests/golden_test', '--gtest_brief=1']
        if self.kind == 'sim':
            return [f'{BUILD}/bin/gtrain-sim'] + self.args
        file, klass, test = self.args[0].split('.')
        return ['/usr/bin/python3', '-B', f'tests/e2e/{file}.py', f'{klass}.{test}']

    def seconds(self):
        return self.SECONDS[self.kind]

    def check(self):
        """Does the test that it names exist?"""
        if self.kind == 'unit':
            suite, test = re.fullmatch(r'(?:\w+/)?(\w+)\.(\w+)(?:/\w+|/\*)?', self.args[1]).groups() \
                if re.fullmatch(r'(?:\w+/)?\w+\.\w+(?:/\w+|/\*)?', self.args[1]) else ('', '')
            if not suite:
                raise Bad(f'"gate {self.text}": name one test, SUITE.TEST')
            # A filter that fits nothing passes, so the test must be one of this program.
            defined = r'TEST(_F|_P)?\(%s,\s*%s\)' % (suite, test)
            sources = [os.path.basename(path) for path in holding(defined, '*.cc')]
            program = re.compile(r'gtrain_test\(%s\b[^)]*' % self.args[0])
            listed = [program.search(read(os.path.join(ROOT, path)))[0] for path in holding(program, 'CMakeLists.txt')]
            shared = holding(defined, '*.h')  # by several programs
            if not listed or not (shared or any(source in words for words in listed for source in sources)):
                raise Bad(f'"gate {self.text}": there is no such test')
        elif self.kind == 'e2e':
            file, klass, test = self.args[0].split('.')
            text = read(f'{ROOT}/tests/e2e/{file}.py')
            if f'def {test}(' not in text or not re.search(rf'^class {klass}\b', text, re.MULTILINE):
                raise Bad(f'"gate {self.text}": there is no such test')


class Mutant:
    """One record of the list."""

    def __init__(self, name):
        self.name, self.says, self.file, self.gates, self.old, self.new = name, '', '', [], '', ''

    def check(self, root):
        text = read(os.path.join(root, self.file))
        if not self.old or self.old == self.new or not self.says or not self.gates:
            raise Bad('it needs a sentence, a gate, an old and another new text')
        if text.count(self.old) != 1:
            raise Bad(f'its old text is found {text.count(self.old)} times in {self.file}, not once: bring the mutant up to date')
        for gate in self.gates:
            gate.check()
        return text


def read(path):
    with open(path, encoding='utf-8') as file:
        return file.read()


def write(path, text):
    with open(path, 'w', encoding='utf-8') as file:
        file.write(text)


_sources = {}


def holding(pattern, *names):
    """The tracked or new files with such a name that have the pattern."""
    found = []
    for path in tracked():
        if any(fnmatch.fnmatch(os.path.basename(path), name) for name in names):
            if path not in _sources:
                _sources[path] = read(os.path.join(ROOT, path))
            if re.search(pattern, _sources[path]):
                found.append(path)
    return found


_tracked = []


def tracked():
    if not _tracked:
        listed = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard', '-z'], cwd=ROOT, check=True, capture_output=True)
        _tracked.extend(p for p in listed.stdout.decode().split('\0') if p and os.path.isfile(os.path.join(ROOT, p)))
    return _tracked


def parse(path):
    """The records of one file, see tests/mutants/README.md."""
    mutants, block = [], None
    for number, line in enumerate(read(path).splitlines(keepends=True), 1):
        where, word = f'{os.path.relpath(path, ROOT)}:{number}', line.strip()
        if block and re.match(r'mutant [-a-z0-9]+$', line.rstrip()):
            raise Bad(f'{where}: {mutants[-1].name} has no `end`')
        if block and word not in ('new', 'end'):
            setattr(mutants[-1], block, getattr(mutants[-1], block) + line)
        elif word in ('old', 'new', 'end'):
            block = None if word == 'end' else word
        elif not word or word.startswith('#'):
            continue
        elif line.startswith('mutant '):
            mutants.append(Mutant(word.split()[1]))
        elif line.startswith(' ') and mutants:
            mutants[-1].says = f'{mutants[-1].says} {word}'.strip()
        elif line.startswith('file ') and mutants:
            mutants[-1].file = word.split()[1]
        elif line.startswith('gate ') and mutants:
            mutants[-1].gates.append(Gate(word[5:]))
        else:
            raise Bad(f'{where}: not a line of a mutant: {word}')
    return mutants


def load():
    mutants = []
    for path in sorted(glob.glob(f'{ROOT}/tests/mutants/*.txt')):
        mutants += parse(path)
    names = [m.name for m in mutants]
    if len(set(names)) != len(names):
        raise Bad('two mutants have one name: ' + ', '.join(sorted({n for n in names if names.count(n) > 1})))
    return mutants


def check(mutants):
    """Every mutant against the sources as they are."""
    bad = 0
    for mutant in mutants:
        try:
            mutant.check(ROOT)
        except (Bad, OSError) as error:
            bad += 1
            print(f'mutant {mutant.name}: {error}')
    print(f'mutants: {len(mutants)}, {bad} of them no longer fit' if bad else f'mutants: all {len(mutants)} fit the sources')
    return 1 if bad else 0


# ---------------------------------------------------------------- the copy

def copy_tree():
    """Tracked and new files, only what differs, so that a second run builds little."""
    wanted = set(tracked())
    for folder, folders, files in os.walk(TREE):
        if folder == TREE and 'build' in folders:
            folders.remove('build')
        for name in files:
            path = os.path.relpath(os.path.join(folder, name), TREE)
            if path not in wanted:
                os.unlink(os.path.join(TREE, path))
    for path in wanted:
        source, copy = os.path.join(ROOT, path), os.path.join(TREE, path)
        if os.path.isfile(copy) and filecmp.cmp(source, copy, shallow=False):
            continue
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(source, copy)
        shutil.copymode(source, copy)


# What a mutant leaves out may leave names unused.
WARNINGS = ['-Wno-unused-variable', '-Wno-unused-parameter', '-Wno-unused-but-set-variable', '-Wno-unused-function']


def configure():
    # As what ships, but without batches, so that a mutant compiles one file; after the first run ccache has all that no mutant
    # touches (run() tells it that the warnings do not matter).
    return ['cmake', '--preset', 'release', '-S', TREE, '-B', BUILD, '-DGTRAIN_UNITY=0', f'-DCMAKE_CXX_FLAGS={" ".join(WARNINGS)}']


def build(targets, log):
    if not os.path.isfile(f'{BUILD}/build.ninja') and run(configure(), 300, log) != 0:
        return 1
    jobs = subprocess.run([f'{ROOT}/tools/jobs.sh'], capture_output=True, text=True, check=True).stdout.strip()
    return run(['ninja', '-C', BUILD, '-j', jobs] + sorted(targets), BUILD_SECONDS, log)


# ---------------------------------------------------------------- running

def descendants():
    """Pids below this process; daemons that left their parent are below us too, we are their subreaper."""
    children = {}
    for entry in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{entry}/stat') as stat:
                parent = int(stat.read().rpartition(')')[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def sweep():
    """A broken program leaves processes behind; none of them may outlive its gate."""
    for _ in range(100):
        for pid in descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.05)


def run(command, seconds, log):
    """Exit status, or None when its time was up. Its output is appended to the log."""
    env = dict(os.environ, GTRAIN_BUILD_DIR=BUILD, GTRAIN_SOURCE_DIR=TREE, CCACHE_BASEDIR=WORK, CCACHE_NOHASHDIR='1',
               CCACHE_IGNOREOPTIONS=' '.join(WARNINGS))
    with tempfile.TemporaryDirectory(prefix='gtm-', ignore_cleanup_errors=True) as tmp:
        os.chmod(tmp, 0o755)  # some tests run programs as another user
        env['TMPDIR'] = env['TEST_TMPDIR'] = tmp
        with open(log, 'a', encoding='utf-8') as out:
            out.write(f'\n$ {shlex.join(command)}\n')
            out.flush()
            process = subprocess.Popen(command, cwd=TREE, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None
            finally:
                sweep()


def tail(log, lines=15):
    return ''.join('    ' + line + '\n' for line in read(log).splitlines()[-lines:])


def ran_nothing(gate, log):
    """A gate whose test was skipped or filtered away proves nothing."""
    text = read(log).rpartition('\n$ ')[2]
    if gate.kind in ('unit', 'golden'):
        return 'SKIPPED' in text or re.search(r'\[  PASSED  \] [1-9]', text) is None
    return gate.kind == 'e2e' and ('skipped=' in text or 'Ran 0 tests' in text)


class Report:
    def __init__(self):
        self.file = open(f'{WORK}/report.txt', 'w', encoding='utf-8')

    def say(self, text):
        print(text, flush=True)
        self.file.write(text + '\n')
        self.file.flush()


def prove_unmutated(gates, report):
    """True when the copy builds and passes every gate."""
    log = f'{LOGS}/unmutated.log'
    write(log, '')
    began = time.monotonic()
    if run(configure(), 300, log) != 0 or build({t for gate in gates for t in gate.targets()}, log) != 0:
        report.say('the unmutated tree does not build:\n' + tail(log))
        return False
    built, bad = time.monotonic(), []
    for gate in gates:
        status = run(gate.command(), gate.seconds(), log)
        if status != 0:
            bad.append(f'{gate.text}: ' + ('its time was up' if status is None else f'exit code {status}') + '\n' + tail(log))
        elif ran_nothing(gate, log):
            bad.append(f'{gate.text}: no test ran (skipped here, or the name is wrong)\n' + tail(log))
    if bad:
        report.say('the unmutated tree does not pass:\n' + '\n'.join(bad))
        return False
    report.say(f'unmutated: passes all {len(gates)} gates (build {built - began:.0f} s, gates {time.monotonic() - built:.0f} s)')
    return True


def try_mutant(mutant, all_gates, report):
    """One mutant from planting to removal. True when it was caught."""
    log, path = f'{LOGS}/{mutant.name}.log', f'{TREE}/{mutant.file}'
    began = time.monotonic()
    write(log, f'{mutant.name}: {mutant.says}\n')
    text = mutant.check(TREE)
    write(path, text.replace(mutant.old, mutant.new))
    try:
        caught, building = [], 0.0
        for gate in mutant.gates:
            before = time.monotonic()
            if build(gate.targets(), log) != 0:
                report.say(f'NOT BUILT  {mutant.name:<34} see build/mutants/logs/{mutant.name}.log\n{tail(log)}')
                return False
            building += time.monotonic() - before
            status = run(gate.command(), gate.seconds(), log)
            if status != 0:
                caught.append(gate.text + (' (hung)' if status is None else ''))
                if not all_gates:
                    break
        times = f'build {building:.0f} s, gates {time.monotonic() - began - building:.0f} s'
        if caught:
            report.say(f'caught     {mutant.name:<34} {"; ".join(caught)}  [{times}]')
        else:
            report.say(f'SURVIVED   {mutant.name:<34} {"; ".join(g.text for g in mutant.gates)}  [{times}]\n    {mutant.says}')
        return bool(caught)
    finally:
        write(path, text)


def main():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=True)
    for flag in ('--list', '--check', '--all-gates', '--trust'):
        parser.add_argument(flag, action='store_true')
    parser.add_argument('--only', default='*')
    parser.add_argument('--gate')
    args = parser.parse_args()
    try:
        mutants = [m for m in load() if any(fnmatch.fnmatch(m.name, only) for only in args.only.split(','))]
        if not mutants:
            raise Bad(f'no mutant is called {args.only}; --list names them')
        if args.gate:
            for mutant in mutants:
                mutant.gates = [Gate(args.gate)]
        if args.list:
            for mutant in mutants:
                print(f'{mutant.name}: {mutant.says}\n' + ''.join(f'    {gate.text}\n' for gate in mutant.gates), end='')
            return 0
        if args.check or check(mutants) != 0:
            return check(mutants) if args.check else 1
    except Bad as error:
        print(f'mutants: {error}')
        return 1
    os.makedirs(LOGS, exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    report, began = Report(), time.monotonic()
    copy_tree()
    gates = {gate.text: gate for mutant in mutants for gate in mutant.gates}
    if not args.trust and not prove_unmutated(list(gates.values()), report):
        return 1
    missed = [m.name for m in mutants if not try_mutant(m, args.all_gates, report)]
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    report.say(f'{len(mutants)} mutants, {len(mutants) - len(missed)} caught, {len(missed)} not'
               + (f' ({", ".join(missed)})' if missed else '') + f', in {minutes} min {seconds} s')
    return 1 if missed else 0


if __name__ == '__main__':
    sys.exit(main())

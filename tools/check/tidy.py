#!/usr/bin/env python3
"""clang-tidy on the sources of a build directory, only where something changed since it last passed.

usage: tidy.py [BUILD_DIR] [--all | FILE ...]
A file is skipped when it, every header of ours that it includes and .clang-tidy are what they were when it last
passed (stamps in BUILD_DIR/tidy). Tests, examples and generated code are left out: tests fail by themselves.
What changed since the merge base with main is always looked at. The rest of the tree takes longer than `make check`
should on two cores, so no more of it is begun after BUDGET_S; the next run goes on where this one ended. --all and
FILEs have no budget.
"""
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '../..'))
BUDGET_S = 240
FOLDERS = ('base/', 'runtime/', 'launcher/', 'comm/', 'checkpoint/', 'sharding/', 'topology/', 'elastic/', 'actors/', 'net/shm/', 'include/', 'bench/')


def wanted(path):
    return path.startswith(FOLDERS) and '_test' not in path and path.endswith('.cc')


def git(*args):
    result = subprocess.run(['git', *args], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.splitlines() if result.returncode == 0 else []


def changed():
    """What this branch and working tree changed since main, as absolute paths."""
    base = git('merge-base', 'HEAD', 'main') or git('merge-base', 'HEAD', 'origin/main') or ['HEAD']
    names = git('diff', '--name-only', base[0]) + git('ls-files', '--others', '--exclude-standard')
    return {os.path.join(ROOT, name) for name in names}


def read(path):
    with open(path, encoding='utf-8') as file:
        return file.read()


def commands(build):
    """The build's compile commands with each file of a batch (GTRAIN_UNITY) by itself: a batch hides what a file does not include."""
    entries = []
    for entry in json.loads(read(os.path.join(build, 'compile_commands.json'))):
        batch = entry['file']
        sources = re.findall(r'^#include "(.*)"', read(batch), re.M) if '/Unity/unity_' in batch else [batch]
        entries += [dict(entry, file=source, command=entry['command'].replace(batch, source)) for source in sources]
    return entries


@functools.cache
def includes(path):
    """The files of ours that this one names."""
    names = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', read(path), re.M)
    paths = [os.path.join(ROOT, folder, name) for name in names for folder in ('', 'include')]
    return [path for path in paths if os.path.isfile(path)]


def headers(source):
    """All files of ours that a compiler reads for this one."""
    seen, todo = set(), [source]
    while todo:
        for path in includes(todo.pop()):
            if path not in seen:
                seen.add(path)
                todo.append(path)
    return sorted(seen)


def fingerprint(source, files):
    digest = hashlib.sha256()
    for name in [os.path.join(ROOT, '.clang-tidy'), source] + files:
        if os.path.exists(name):
            with open(name, 'rb') as data:
                digest.update(hashlib.sha256(data.read()).digest())
    return digest.hexdigest()


def run(stamps, source, stamp):
    # The commands are gcc's: some of its warnings and parameters clang does not know.
    gcc = ['--extra-arg=-Wno-unknown-warning-option', '--extra-arg=-Wno-unused-command-line-argument']
    result = subprocess.run(['clang-tidy', '-p', stamps, '--quiet', *gcc, source],
                            capture_output=True, text=True)
    if result.returncode == 0:
        open(stamp, 'w').close()
        return ''
    return '\n'.join(line for line in (result.stdout + result.stderr).splitlines()
                     if not re.match(r'^\d+ warnings? (generated|treated)|^Suppressed|^Use -header', line))


def run_all(stamps, todo, until):
    """Looks at todo, pairs of source and stamp, until time is up; how many had findings, how many were left."""
    def one(item):
        return None if until is not None and time.monotonic() > until else run(stamps, *item)

    bad = left = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for text in pool.map(one, todo):
            left += text is None
            if text:
                bad += 1
                print(text, flush=True)
    return bad, left


def main():
    began = time.monotonic()
    args = sys.argv[1:]
    build = os.path.abspath(args.pop(0) if args and not args[0].startswith('-') and os.path.isdir(args[0])
                            else os.path.join(ROOT, 'build'))
    everything = '--all' in args
    only = [os.path.abspath(a) for a in args if not a.startswith('-')]
    entries, stamps = commands(build), os.path.join(build, 'tidy')
    os.makedirs(stamps, exist_ok=True)
    with open(os.path.join(stamps, 'compile_commands.json'), 'w', encoding='utf-8') as data:
        json.dump(entries, data)
    sources = sorted({os.path.normpath(entry['file']) for entry in entries})
    sources = [s for s in sources if s.startswith(ROOT + '/') and not s.startswith(build + '/')
               and wanted(os.path.relpath(s, ROOT)) and (not only or s in only)]
    todo = []
    for source in sources:
        name = os.path.relpath(source, ROOT).replace('/', '__')
        stamp = os.path.join(stamps, name + '.' + fingerprint(source, headers(source))[:24])
        if everything or not os.path.exists(stamp):
            todo.append((source, stamp))
    ours = changed()
    first = [item for item in todo if everything or only or item[0] in ours]
    rest = [item for item in todo if item not in first]
    bad, _ = run_all(stamps, first, None)
    bad_rest, left = run_all(stamps, rest, began + BUDGET_S)
    bad += bad_rest
    print(f'tidy: {len(sources)} sources, {len(sources) - len(todo)} unchanged since they passed, '
          f'{len(todo) - left} looked at, {bad} with findings'
          + (f'; {left} left for the next run: tools/check/tidy.py --all' if left else ''))
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())

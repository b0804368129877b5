#!/usr/bin/env python3
"""Checks include direction against tools/layers.txt.

usage: layers.py [ROOT]
Prints one line a wrong include with what would be right; exit status 1 if there is one.
"""
import fnmatch
import os
import re
import subprocess
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
SOURCES = ('.h', '.cc', '.c', '.cu', '.cuh')


def load(path):
    edges, test_edges, third = {}, {}, {}
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            line = line.split('#')[0].strip()
            if not line:
                continue
            left, colon, right = line.partition(':')
            if not colon:
                sys.exit(f'{path}:{number}: no ":" in {line!r}')
            words, allowed = left.split(), right.split()
            if words[0] == 'third':
                for name in words[1:]:
                    third[name] = allowed
            elif len(words) == 2 and words[1] == '+test':
                test_edges[words[0]] = allowed
            else:
                edges[words[0]] = allowed
    return edges, test_edges, third


def tracked(root):
    out = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'], cwd=root,
                         check=True, capture_output=True, text=True).stdout
    return [f for f in out.splitlines() if f.endswith(SOURCES) and os.path.exists(os.path.join(root, f))]


def folder_of(path, edges):
    """The longest listed folder that holds path; the top-level name if none does."""
    parts = path.split('/')
    for length in range(len(parts) - 1, 0, -1):
        folder = '/'.join(parts[:length])
        if folder in edges:
            return folder
    return parts[0] if len(parts) == 1 else '/'.join(parts[:2])


def is_test(path):
    name = path.rsplit('/', 1)[-1]
    return '_test' in name or '_fake' in name or name.startswith('test_') or path.startswith('tests/')


def third_allowed(allowed, path, folder):
    for place in allowed:
        if place == '*' or place in (folder, path) or folder.startswith(place + '/'):
            return True
        if place == '+test' and is_test(path):
            return True
        if place.endswith('+test') and place[:-5] == folder and is_test(path):
            return True
        if place.startswith('*.') and fnmatch.fnmatch(path, place):
            return True
    return False


def check_file(root, path, tables, wrong):
    edges, test_edges, third = tables
    folder = folder_of(path, edges)
    if folder not in edges:
        wrong.append(f'{path}: folder {folder} is not in tools/layers.txt: add it with what it may include')
        return
    allowed = set(edges[folder]) | {folder, 'base'}
    if is_test(path):
        allowed |= set(test_edges.get(folder, []))
    with open(os.path.join(root, path), errors='replace') as lines:
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            name = match.group(2)
            first = re.split(r'[/.]', name)[0]
            where = f'{path}:{number}'
            if first == 'gtrain' or os.path.exists(os.path.join(root, name)):
                target = 'include' if first == 'gtrain' else folder_of(name, edges)
                if '*' not in allowed and target not in allowed:
                    wrong.append(f'{where}: {folder} may not include {target} ("{name}"); '
                                 f'allowed: {" ".join(sorted(allowed))}')
            elif first in third and not third_allowed(third[first], path, folder):
                wrong.append(f'{where}: <{name}> belongs to {" ".join(third[first])} only')


def main():
    root = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), '../..'))
    tables = load(os.path.join(root, 'tools/layers.txt'))
    wrong = []
    files = tracked(root)
    for path in files:
        check_file(root, path, tables, wrong)
    for line in wrong:
        print(line)
    print(f'layers: {len(files)} files, {len(wrong)} wrong includes')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""Looks for banned calls (tools/banned.txt), unfinished-work marks, overlong files and missing READMEs.

usage: banned.py [ROOT]
"""
import fnmatch
import os
import re
import subprocess
import sys

CODE = ('.h', '.cc', '.c', '.cu', '.cuh')
LINES_MAX = {'.h': 600, '.cc': 1000, '.c': 1000, '.cu': 1000, '.py': 1000}
# Literals and comments become blanks of the same shape, so line numbers stay true.
NOISE = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.S)
UNFINISHED = re.compile('\\b(TO' + 'DO|FIX' + 'ME|XX' + 'X)\\b')


def rules(path):
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.startswith('#') or not line.strip():
                continue
            cells = line.rstrip('\n').rsplit(' | ', 3)
            if len(cells) != 4:
                sys.exit(f'{path}:{number}: want four cells separated by " | "')
            pattern, where, allowed, instead = cells
            yield re.compile(pattern), where.split(), [] if allowed.strip() == '-' else allowed.split(), instead


def matches(path, globs):
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def blank(match):
    return re.sub(r'[^\n]', ' ', match.group(0))


def tracked(root):
    out = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'], cwd=root,
                         check=True, capture_output=True, text=True).stdout
    return [f for f in out.splitlines() if os.path.isfile(os.path.join(root, f))]


def check_calls(path, text, table, wrong):
    code = NOISE.sub(blank, text)
    for pattern, where, allowed, instead in table:
        if not matches(path, where) or matches(path, allowed):
            continue
        for match in pattern.finditer(code):
            number = code.count('\n', 0, match.start()) + 1
            wrong.append(f'{path}:{number}: {match.group(0).strip()} is banned here: {instead}')


def main():
    root = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), '../..'))
    table = list(rules(os.path.join(root, 'tools/banned.txt')))
    wrong, tops = [], set()
    files = tracked(root)
    for path in files:
        if '/' in path and not path.startswith('.'):
            tops.add(path.split('/')[0])
        extension = os.path.splitext(path)[1]
        if extension not in CODE + ('.py', '.sh'):
            continue
        with open(os.path.join(root, path), errors='replace') as source:
            text = source.read()
        lines = text.count('\n')
        if lines > LINES_MAX.get(extension, lines):
            wrong.append(f'{path}: {lines} lines; split it (at most {LINES_MAX[extension]})')
        for match in UNFINISHED.finditer(text):
            number = text.count('\n', 0, match.start()) + 1
            wrong.append(f'{path}:{number}: {match.group(0)}: finish it, or open an issue and remove the mark')
        if extension in CODE:
            check_calls(path, text, table, wrong)
    for top in sorted(tops):
        if not os.path.isfile(os.path.join(root, top, 'README.md')):
            wrong.append(f'{top}/README.md is missing: every top-level folder says what it is')
    for line in wrong:
        print(line)
    print(f'banned: {len(files)} files, {len(wrong)} findings')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

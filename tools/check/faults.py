#!/usr/bin/env python3
"""Every fault id that the tree cites is in docs/faults.md, and every id there is cited; likewise INV-n and
docs/protocols/invariants.md; and nothing points to papers that are not in the repository.  tools/check/faults.py [ROOT]"""
import os
import re
import subprocess
import sys

PAGE, INVARIANTS = 'docs/faults.md', 'docs/protocols/invariants.md'
# A letter of the page and its number, as a word or behind the underscore of a test's name.
CITED = re.compile(r'(?<![A-Za-z0-9])([BCHJLNPSWX][1-9][0-9]?)(?![A-Za-z0-9])')
INVARIANT = re.compile(r'\bINV-[0-9]+\b')
# Words of others that look like one: instruction sets, standards of C, a dtype of safetensors.
OTHER = {'X86', 'C11', 'C17', 'C64'}
# Papers that are not in the repository.
ELSEWHERE = re.compile(r'\bblueprint\b|\bpain [0-9]+|\bpeers\.md\b', re.IGNORECASE)


def main():
    os.chdir(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), '..', '..'))
    tracked = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], check=True, capture_output=True).stdout
    with open(PAGE) as page:
        listed = re.findall(r'(?m)^\| ([A-Z][0-9]+) \|', page.read())
    with open(INVARIANTS) as page:
        invariants = set(INVARIANT.findall(page.read()))
    wrong = [f'{PAGE}: {each} is there twice' for each in sorted(set(listed)) if listed.count(each) > 1]
    cited = set()
    for path in tracked.decode().split('\0'):
        if path in ('', PAGE, 'tools/check/faults.py') or '/corpus/' in path or not os.path.isfile(path):
            continue
        with open(path, encoding='utf-8', errors='ignore') as file:
            for number, line in enumerate(file, 1):
                found = set(CITED.findall(line.replace('_', ' '))) - OTHER
                cited |= found
                wrong += [f'{path}:{number}: fault {each} is not in {PAGE}' for each in sorted(found - set(listed))]
                wrong += [f'{path}:{number}: {each} is not in the repository' for each in ELSEWHERE.findall(line)]
                wrong += [f'{path}:{number}: {each} is not in {INVARIANTS}' for each in sorted(set(INVARIANT.findall(line)) - invariants)]
    wrong += [f'{PAGE}: nobody cites {each}' for each in listed if each not in cited]
    print('\n'.join(wrong[:50] + [f'faults: {len(listed)} ids, {len(invariants)} invariants, {len(wrong)} findings']))
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

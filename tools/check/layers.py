#!/usr/bin/env python3
"""Checks include direction against tools/layers.txt, and that file itself.

usage: layers.py [ROOT]
Prints a line for each wrong include with what would be right, for each grant that nothing uses, for each folder that does
not exist or stands twice, and for each circle of folders; exit status 1 if there is one.
"""
import fnmatch
import os
import re
import subprocess
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
SOURCES = ('.h', '.cc', '.c', '.cu', '.cuh')


class Grants:
    """The lines of tools/layers.txt, and which of their words were needed."""

    def __init__(self, path):
        self.edges, self.test_edges, self.third, self.wrong = load(path)
        self.used, self.third_used, self.includes = set(), set(), {}

    def allows(self, folder, target, test):
        if not test:
            self.includes.setdefault(folder, set()).add(target)
        if target in (folder, 'base'):
            return True
        for table, name in ((self.edges, folder), (self.test_edges, folder + ' +test')):
            if name.endswith('+test') and not test:
                continue
            for word in ('*', target):
                if word in table.get(folder, ()):
                    self.used.add((name, word))
                    return True
        return False

    def allows_third(self, first, path, folder):
        place = third_place(self.third[first], path, folder)
        self.third_used.add((first, place))
        return place is not None

    def unused(self):
        for table, suffix in ((self.edges, ''), (self.test_edges, ' +test')):
            for folder, words in table.items():
                name = folder + suffix
                for word in words:
                    if (name, word) not in self.used:
                        yield f'tools/layers.txt: nothing of "{name}" includes {word}: take it away'
        for first, places in self.third.items():
            for place in places:
                if (first, place) not in self.third_used:
                    yield f'tools/layers.txt: nothing in {place} includes <{first}...>: take it away'

    def circles(self):
        """Each as the folders on the way round, the smallest name first."""
        found = set()

        def walk(folder, way):
            for target in sorted(self.includes.get(folder, ())):
                if target in way:
                    circle = way[way.index(target):]
                    first = circle.index(min(circle))
                    found.add(tuple(circle[first:] + circle[:first]))
                elif len(way) < 8:
                    walk(target, way + [target])

        for folder in sorted(self.includes):
            self.includes[folder].discard(folder)
        for folder in sorted(self.includes):
            walk(folder, [folder])
        return sorted(found)


def load(path):
    edges, test_edges, third, wrong = {}, {}, {}, []
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            line = line.split('#')[0].strip()
            if not line:
                continue
            left, colon, right = line.partition(':')
            if not colon:
                sys.exit(f'{path}:{number}: no ":" in {line!r}')
            words, allowed = left.split(), right.split()
            table = third if words[0] == 'third' else test_edges if words[1:] == ['+test'] else edges
            for name in words[1:] if table is third else words[:1]:
                if name in table:
                    wrong.append(f'{path}:{number}: {name} stands here a second time')
            for name in [] if table is third else words[:1] + [word for word in allowed if word != '*']:
                if not os.path.isdir(os.path.join(os.path.dirname(path), '..', name)):
                    wrong.append(f'{path}:{number}: there is no folder {name}')
            if words[0] == 'third':
                for name in words[1:]:
                    third[name] = allowed
            elif len(words) == 2 and words[1] == '+test':
                test_edges[words[0]] = allowed
            else:
                edges[words[0]] = allowed
    return edges, test_edges, third, wrong


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


def third_place(allowed, path, folder):
    """Which of `allowed` lets the file include it; None: none does."""
    for place in allowed:
        if (place == '*' or place in (folder, path) or folder.startswith(place + '/') or
                (place == '+test' and is_test(path)) or
                (place.endswith('+test') and place[:-5] == folder and is_test(path)) or
                (place.startswith('*.') and fnmatch.fnmatch(path, place))):
            return place
    return None


def check_file(root, path, grants, wrong):
    folder = folder_of(path, grants.edges)
    if folder not in grants.edges:
        wrong.append(f'{path}: folder {folder} is not in tools/layers.txt: add it with what it may include')
        return
    with open(os.path.join(root, path), errors='replace') as lines:
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            name = match.group(2)
            first = re.split(r'[/.]', name)[0]
            where = f'{path}:{number}'
            if first == 'gtrain' or os.path.exists(os.path.join(root, name)):
                target = 'include' if first == 'gtrain' else folder_of(name, grants.edges)
                if not grants.allows(folder, target, is_test(path)):
                    wrong.append(f'{where}: {folder} may not include {target} ("{name}"); '
                                 f'allowed: {" ".join(sorted(grants.edges[folder]))}')
            elif first in grants.third and not grants.allows_third(first, path, folder):
                wrong.append(f'{where}: <{name}> belongs to {" ".join(grants.third[first])} only')


def main():
    root = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), '../..'))
    grants = Grants(os.path.join(root, 'tools/layers.txt'))
    wrong = list(grants.wrong)
    files = tracked(root)
    for path in files:
        check_file(root, path, grants, wrong)
    unused, circles = list(grants.unused()), grants.circles()
    wrong += unused + ['folders include each other in a circle: ' + ' -> '.join(circle + circle[:1]) for circle in circles]
    for line in wrong:
        print(line)
    print(f'layers: {len(files)} files, {len(circles)} circles of folders, {len(unused)} unused grants, '
          f'{len(wrong) - len(unused) - len(circles)} wrong includes and lines')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

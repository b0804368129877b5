#!/usr/bin/env python3
"""Compares the two builds: base and every PURE target of CMake must be in bazel/gtrain.BUILD with the same sources and deps.

usage: parity.py
Both files are read as text: CMakeLists.txt calls as words, the BUILD file as Python's syntax tree.
"""
import ast
import os
import re
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..'))
KEYWORDS = {'SRCS', 'DEPS', 'LIBS', 'LABELS', 'TIMEOUT', 'PURE', 'SERIAL', 'BATCH', 'FOLDER'}
CALL = re.compile(r'^\s*(gtrain_library|gtrain_test)\(([^)]*)\)', re.M)


def cmake_targets():
    targets = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [d for d in folders if not d.startswith(('.', 'build'))]
        if 'CMakeLists.txt' not in files or folder == ROOT:
            continue
        with open(os.path.join(folder, 'CMakeLists.txt')) as source:
            text = re.sub(r'#[^\n]*', '', source.read())
        here = os.path.relpath(folder, ROOT)
        for match in CALL.finditer(text):
            words = match.group(2).split()
            lists, key = {'': []}, ''
            for word in words:
                if word in KEYWORDS:
                    key = word
                    lists.setdefault(key, [])
                else:
                    lists[key].append(word)
            name = lists[''][0]
            if 'PURE' in lists or name in ('gtrain_base', 'base_test'):
                sources = {os.path.normpath(os.path.join(here, s)) for s in lists.get('SRCS', [])}
                targets[name] = (sources, set(lists.get('DEPS', [])))
    return targets


def bazel_targets():
    with open(os.path.join(ROOT, 'bazel/gtrain.BUILD')) as source:
        tree = ast.parse(source.read())
    targets = {}
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or call.func.id not in ('gtrain_library', 'gtrain_test'):
            continue
        fields = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in ('name', 'folder', 'srcs', 'deps')}
        sources = {os.path.normpath(os.path.join(fields['folder'], s)) for s in fields.get('srcs', [])}
        deps = {d.lstrip(':') for d in fields.get('deps', []) if d.startswith(':')}
        targets[fields['name']] = (sources, deps)
    return targets


def main():
    cmake, bazel, wrong = cmake_targets(), bazel_targets(), []
    for name in sorted(cmake.keys() | bazel.keys()):
        if name not in bazel:
            wrong.append(f'{name}: in CMake, not in bazel/gtrain.BUILD')
        elif name not in cmake:
            wrong.append(f'{name}: in bazel/gtrain.BUILD, but CMake has no such base or PURE target')
        else:
            for what, left, right in zip(('sources', 'deps'), cmake[name], bazel[name]):
                for extra in sorted(left - right):
                    wrong.append(f'{name}: {what}: {extra} is in CMake only')
                for extra in sorted(right - left):
                    wrong.append(f'{name}: {what}: {extra} is in Bazel only')
    for line in wrong:
        print(line)
    print(f'parity: {len(cmake)} targets in CMake, {len(bazel)} in Bazel, {len(wrong)} differences')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

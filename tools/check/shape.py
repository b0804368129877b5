#!/usr/bin/env python3
"""Prints the shape of the product's C++ and holds it: how long and how branched functions are, how many methods a class has.

usage: shape.py [--all] [ROOT]
  --all   every function above a limit, not only those that are new or worse than tools/shape.txt allows

Complexity is McCabe's ("A Complexity Measure", 1976): one, and one for each if, for, while, case, catch, ?, && and ||;
what lambdas of a function decide counts for it. Counted on the text, without a compiler: macros are not looked into.
tools/shape.txt has what is above the limits today, one a line, so that it can only get better: exit status 1 when something is
above a limit and not there, above its number there, or there and no longer above.
"""
import os
import re
import subprocess
import sys

LINES_MAX, COMPLEXITY_MAX, METHODS_MAX = 60, 20, 60
PRODUCT = ('base/', 'job/', 'net/', 'runtime/', 'comm/', 'checkpoint/', 'sharding/', 'elastic/', 'topology/', 'launcher/', 'include/')
NOT_PRODUCT = re.compile(r'_test|_fake|/fake/|/test_')
TOKEN = re.compile(r'[A-Za-z_]\w*|::|&&|\|\||->|[{}()\[\]<>;:=?,~]|\S')
BRANCH = {'if', 'for', 'while', 'case', 'catch', '?', '&&', '||'}
AFTER_PARAMETERS = {')', 'const', 'noexcept', 'override', 'final', 'try', '&&', '&', 'mutable'}


def blank(text):
    """The text without comments, literals and preprocessor lines; line breaks stay."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'|'
        r'^[ \t]*#(?:[^\n\\]|\\\n|\\.)*', re.S | re.M)
    return pattern.sub(lambda m: '\n' * m.group(0).count('\n') + (' ' if m.group(0)[0] in '/#' else ' "" '), text)


class Scope:
    def __init__(self, kind, name, line):
        self.kind, self.name, self.line, self.branches, self.methods = kind, name, line, 0, 0


def without_templates(head):
    """The tokens of a declaration without `template <...>` in front and without requires clauses."""
    while head and head[0] == 'template':
        depth, at = 0, 1
        for at in range(1, len(head)):
            depth += (head[at] == '<') - (head[at] == '>')
            if depth == 0:
                break
        head = head[at + 1:]
    return head


def name_of(head):
    """Of a function: what stands before its parameters; None: it is none."""
    if '(' not in head:
        return None
    at = head.index('(')
    if at > 0 and head[at - 1] == 'operator':  # operator()
        at = head.index('(', at + 1) if '(' in head[at + 1:] else at
    if '=' in head[:at] and 'operator' not in head[:at]:
        return None
    if at == 0:
        return None
    begin = at - 1
    while begin > 0 and head[begin - 1] == '~' or begin > 1 and head[begin - 1] == '::':
        begin -= 1 if head[begin - 1] == '~' else 2
    return ''.join(head[begin:at])


class File:
    def __init__(self, path, text):
        self.path, self.functions, self.classes = path, [], []
        self.scan(blank(text))

    def scan(self, text):
        stack, head, skip, line = [], [], 0, 1
        position = 0
        for match in TOKEN.finditer(text):
            line += text.count('\n', position, match.start())
            position = match.start()
            token = match.group(0)
            function = next((s for s in stack if s.kind == 'function'), None)
            if function is not None:
                function.branches += token in BRANCH
                if token == '{':
                    stack.append(Scope('block', '', line))
                elif token == '}':
                    self.close(stack, line)
                    head = []
                continue
            if skip:
                skip += (token == '{') - (token == '}')
                continue
            if token == '{':
                kind, name = self.kind_of(without_templates(head), stack)
                if kind == 'initializer':
                    skip = 1
                    continue
                if kind == 'function' and stack and stack[-1].kind == 'class':
                    stack[-1].methods += 1
                stack.append(Scope(kind, name, line))
                head = []
            elif token == '}':
                self.close(stack, line)
                head = []
            elif token == ';':
                if stack and stack[-1].kind == 'class' and self.declares_method(without_templates(head)):
                    stack[-1].methods += 1
                head = []
            elif token == ':' and head and head[-1] in ('public', 'private', 'protected'):
                head = []
            else:
                head.append(token)

    @staticmethod
    def declares_method(head):
        if not head or head[0] in ('using', 'friend', 'typedef', 'static_assert') or '(' not in head:
            return False
        before = head[head.index('(') - 1]
        return not before.startswith('ABSL_') and not ('=' in head[:head.index('(')] and 'operator' not in head)

    @staticmethod
    def kind_of(head, stack):
        if 'namespace' in head or head[:1] == ['extern']:
            return 'namespace', ''
        words = [t for t in head if t not in ('alignas',)]
        for kind in ('enum', 'class', 'struct', 'union'):
            if kind in words and (name_of(head) is None or words[0] == kind):
                names = [t for t in words[words.index(kind) + 1:words.index(':') if ':' in words else None]
                         if re.match(r'[A-Za-z_]\w*$', t) and t not in ('final', 'class')]
                return ('other' if kind == 'enum' else 'class'), names[-1] if names else ''
        name = name_of(head)
        if name is None:
            return ('other', '') if not head or '=' in head else ('initializer', '')
        # A brace of an initializer of a constructor's member is no body.
        if ':' in head and head[-1] not in AFTER_PARAMETERS and '->' not in head and head[-1] != '}':
            return 'initializer', ''
        prefix = '::'.join(s.name for s in stack if s.kind == 'class' and s.name)
        return 'function', f'{prefix}::{name}' if prefix else name

    def close(self, stack, line):
        if not stack:
            return
        scope = stack.pop()
        if scope.kind == 'function':
            self.functions.append((scope.name, line - scope.line + 1, scope.branches + 1))
        elif scope.kind == 'class':
            self.classes.append((scope.name, scope.methods))


def load(path):
    allowed = {}
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            words = line.split('#')[0].split()
            if not words:
                continue
            if len(words) != 4:
                sys.exit(f'{path}:{number}: it says: lines|complexity|methods NUMBER FILE NAME')
            allowed[(words[0], words[2], words[3])] = int(words[1])
    return allowed


def main():
    everything = '--all' in sys.argv
    places = [a for a in sys.argv[1:] if not a.startswith('--')]
    root = os.path.abspath(places[0] if places else os.path.join(os.path.dirname(__file__), '../..'))
    listed = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard', '*.cc', '*.h'], cwd=root,
                            check=True, capture_output=True, text=True).stdout.splitlines()
    files = []
    for path in listed:
        if path.startswith(PRODUCT) and not NOT_PRODUCT.search(path) and os.path.exists(os.path.join(root, path)):
            with open(os.path.join(root, path), errors='replace') as text:
                files.append(File(path, text.read()))
    found = {}
    functions = [(lines, complexity, file.path, name) for file in files for name, lines, complexity in file.functions]
    for lines, complexity, path, name in functions:
        for what, number, most in (('lines', lines, LINES_MAX), ('complexity', complexity, COMPLEXITY_MAX)):
            if number > most:
                key = (what, path, name)
                found[key] = max(number, found.get(key, 0))
    methods = [(count, file.path, name) for file in files for name, count in file.classes]
    for count, path, name in methods:
        if count > METHODS_MAX:
            found[('methods', path, name)] = count
    allowed = load(os.path.join(root, 'tools/shape.txt'))
    wrong = [f'{key[1]}: {key[2]}: {key[0]} {number}, at most {allowed.get(key, {"lines": LINES_MAX, "complexity": COMPLEXITY_MAX}.get(key[0], METHODS_MAX))}'
             for key, number in found.items() if number > allowed.get(key, 0)]
    wrong += [f'tools/shape.txt: {key[2]} of {key[1]} is not above the limit of {key[0]} any more: take it away'
              for key in allowed if key not in found]
    for line in sorted(f'{k[0]} {n} {k[1]} {k[2]}' for k, n in found.items()) if everything else []:
        print(line)
    for line in wrong:
        print(line)
    longest, most = max(functions), max(functions, key=lambda f: f[1])
    print(f'shape: {len(files)} files, {len(functions)} functions; longest {longest[3]} ({longest[2]}), {longest[0]} lines; '
          f'{sum(k[0] == "lines" for k in found)} above {LINES_MAX} lines; most branched {most[3]} ({most[2]}), {most[1]}; '
          f'{sum(k[0] == "complexity" for k in found)} above {COMPLEXITY_MAX}; most methods {max(methods)[2]}, {max(methods)[0]}; '
          f'{sum(k[0] == "methods" for k in found)} above {METHODS_MAX}; {len(wrong)} new')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

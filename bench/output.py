"""What a million lines cost on their way from a rank to a file: `gtrain launch -n 1 -- WRITER > FILE` beside
`WRITER | cat > FILE`, the best of a few runs each, with a local cluster that runs already.

  bench/output.py [--lines N] [--runs N] [--build DIR] [--json FILE]

Writers: a C program with stdio as it is (a pipe: blocks of 4 KiB), the same a line at a time, and Python with
PYTHONUNBUFFERED=1, which is two system calls a line.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

C_WRITER = r'''
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  const int lines = atoi(argv[1]);
  if (argc > 2) setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 0; i < lines; ++i) printf("step %d loss 0.123456\n", i);
}
'''
PYTHON_WRITER = 'import sys\nfor i in range(int(sys.argv[1])): print("step", i, "loss 0.123456")\n'


def seconds(words, out, env, through_cat):
    """From the start of the command to its last byte in the file."""
    with open(out, 'wb') as file:
        begin = time.monotonic()
        if through_cat:
            writer = subprocess.Popen(words, stdout=subprocess.PIPE, env=env)
            cat = subprocess.Popen(['cat'], stdin=writer.stdout, stdout=file)
            writer.stdout.close()
            codes = writer.wait(), cat.wait()
        else:
            codes = (subprocess.run(words, stdout=file, stderr=subprocess.DEVNULL, env=env).returncode,)
        took = time.monotonic() - begin
    if any(codes):
        sys.exit(f'{words}: {codes}')
    return took


def check(out, lines):
    with open(out, 'rb') as file:
        found = sum(1 for _ in file)
    if found != lines:
        sys.exit(f'{out} holds {found} of {lines} lines')


def measure(name, writer, args, folder, env):
    gtrain = os.path.join(args.build, 'bin', 'gtrain')
    out = os.path.join(folder, 'out')
    best = {}
    for _ in range(args.runs):  # in turns: what else the machine does meets both
        for way, words in (('pipe', writer), ('launch', [gtrain, 'launch', '-n', '1', '--', *writer])):
            took = seconds(words, out, env, way == 'pipe')
            check(out, args.lines)
            best[way] = min(took, best.get(way, took))
    ratio = best['launch'] / best['pipe']
    print(f'{name:24} pipe {best["pipe"]:6.2f} s   launch {best["launch"]:6.2f} s   {ratio:5.2f} x', flush=True)
    return {'name': name, 'lines': args.lines, **best, 'ratio': ratio}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lines', type=int, default=1_000_000)
    parser.add_argument('--runs', type=int, default=3)
    parser.add_argument('--build', default=os.path.join(here, '..', 'build'))
    parser.add_argument('--json')
    args = parser.parse_args()
    args.build = os.path.abspath(args.build)
    folder = tempfile.mkdtemp(prefix='gtrain-output-')
    env = dict(os.environ, HOME=folder, XDG_STATE_HOME=folder + '/state', XDG_CONFIG_HOME=folder + '/config',
               XDG_RUNTIME_DIR=folder, PYTHONUNBUFFERED='1', LC_ALL='C.UTF-8')
    os.chdir(folder)
    try:
        program = os.path.join(folder, 'writer')
        subprocess.run(['cc', '-O2', '-x', 'c', '-o', program, '-'], input=C_WRITER.encode(), check=True)
        holder = subprocess.run([os.path.join(args.build, 'bin', 'gtrain'), 'launch', '-d', '-n', '1', '--name', 'holder',
                                 '--', 'sleep', '3600'], env=env, check=True, capture_output=True, text=True)
        count = str(args.lines)
        results = [measure('C, blocks', [program, count], args, folder, env),
                   measure('C, lines', [program, count, 'lines'], args, folder, env),
                   measure('Python, unbuffered', ['/usr/bin/python3', '-c', PYTHON_WRITER, count], args, folder, env)]
        subprocess.run([os.path.join(args.build, 'bin', 'gtrain'), 'stop', '--now', holder.stdout.strip()], env=env,
                       check=True, capture_output=True)
        if args.json:
            with open(args.json, 'w') as file:
                json.dump(results, file, indent=1)
    finally:
        for daemon in ('head', 'agent'):  # the local cluster of this folder would end by itself, a little later
            for pid in filter(str.isdigit, os.listdir('/proc')):
                try:
                    with open(f'/proc/{pid}/cmdline', 'rb') as file:
                        if file.read().split(b'\0')[1:2] != [daemon.encode()]:
                            continue
                    with open(f'/proc/{pid}/environ', 'rb') as file:
                        if f'HOME={folder}'.encode() in file.read().split(b'\0'):
                            os.kill(int(pid), signal.SIGTERM)
                except OSError:
                    pass
        time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
    main()

"""Runs the DDP script by hand, as two processes, kills it and resumes it."""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(world, arguments):
    env = dict(os.environ, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
               OMP_NUM_THREADS="1")
    return [subprocess.Popen([sys.executable, SCRIPT, *arguments], env=dict(env, RANK=str(rank)), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(world)]


def finish(test, ranks):
    output = []
    try:
        for rank in ranks:
            output.append(rank.communicate(timeout=90)[0])
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, output):
        test.assertEqual(rank.returncode, 0, text)
    return output[0]


class TorchDdpTest(unittest.TestCase):
    def test_trains_and_resumes_after_kill(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--steps", "60", "--checkpoint", os.path.join(folder, "sub", "ddp.pt")]
            ranks = start(2, arguments + ["--step-seconds", "0.02"])
            try:
                for line in ranks[0].stdout:
                    if line.startswith("step 45 "):
                        break
            finally:
                for rank in ranks:
                    rank.send_signal(signal.SIGKILL)
                for rank in ranks:
                    rank.communicate(timeout=30)

            output = finish(self, start(2, arguments))
            self.assertIn("resumed at step 40 ", output)
            steps = [int(n) for n in re.findall(r"^step (\d+) loss", output, re.M)]
            self.assertEqual(steps, list(range(41, 61)))
            accuracy = float(re.search(r"finished: accuracy ([0-9.]+) on 2", output).group(1))
            self.assertGreater(accuracy, 0.9)
            self.assertEqual(os.listdir(os.path.join(folder, "sub")), ["ddp.pt"])


if __name__ == "__main__":
    unittest.main()

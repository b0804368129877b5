"""A rank of bench_elastic under torchrun: the linear model of e2e_elastic_linear, saved every 20 steps, read again after a restart.

elastic_torchrun.py DIR PAUSE_MS   DIR/trained.PID: generation, step, nanoseconds of the monotonic clock"""
import os
import sys
import time

import torch
import torch.distributed as dist

folder, pause = sys.argv[1], float(sys.argv[2]) / 1000
dist.init_process_group("gloo")
path = os.path.join(folder, "state.pt")
w, step = torch.zeros(1000), 0
if os.path.exists(path):
    saved = torch.load(path)
    w, step = saved["w"], saved["step"]
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
with open(os.path.join(folder, f"trained.{os.getpid()}"), "w") as out:
    while True:
        gradient = torch.ones(1000) * (w[0] - 1)
        time.sleep(pause)
        dist.all_reduce(gradient)
        w -= 0.01 * gradient
        step += 1
        out.write(f"{generation} {step} {time.monotonic_ns()}\n")
        out.flush()
        if step % 20 == 0 and dist.get_rank() == 0:
            torch.save({"w": w, "step": step}, path + ".new")
            os.replace(path + ".new", path)

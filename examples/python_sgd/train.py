#!/usr/bin/python3
"""Logistic regression in numpy, data-parallel with the gtrain package: session, all-reduce, checkpoint, report.

By hand (one rank):  PYTHONPATH=python /usr/bin/python3 examples/python_sgd/train.py
On two ranks:        gtrain launch examples/python_sgd/job.yaml
"""
import argparse
import os
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
import gtrain  # noqa: E402


def make_data(samples, features, seed):
    random = np.random.default_rng(seed)
    truth = random.standard_normal(features)
    x = random.standard_normal((samples, features))
    y = (x @ truth + 0.3 * random.standard_normal(samples) > 0).astype(np.float64)
    return x, y


def gradient(weights, x, y):
    """Sum of losses and of gradients over these samples, in one array: one all-reduce carries both."""
    z = x @ weights
    loss = np.sum(np.logaddexp(0, z) - y * z)
    return np.concatenate([x.T @ (1 / (1 + np.exp(-z)) - y), [loss, 0.0]])


def train(args, session):
    x, y = make_data(args.samples, 20, args.seed)
    weights = np.zeros(20)
    momentum = np.zeros(20)
    with gtrain.Checkpointer(session, uri=args.checkpoint, every_steps=25) as checkpointer:
        data = gtrain.Samples(session, samples=len(y), epochs=1 + args.steps * args.batch // len(y), global_batch=args.batch,
                              seed=args.seed)
        checkpointer.replicated({"weights": weights, "optimizer/momentum": momentum})
        checkpointer.add_samples(data)
        step = saved = checkpointer.restore() or 0
        if step and session.rank == 0:
            print(f"resumed at step {step}", flush=True)
        while step < args.steps:
            began = time.monotonic()
            mine = data.next()  # this rank's share
            total = gradient(weights, x[mine], y[mine])
            total[-1] = session.stop_requested
            session.all_reduce(total)
            momentum[:] = 0.9 * momentum + total[:-2] / data.total
            weights -= args.lr * momentum
            step += 1
            session.report(step, loss=total[-2] / data.total, samples=len(mine))
            if session.rank == 0 and step % 25 == 0:
                print(f"step {step} loss {total[-2] / data.total:.4f}", flush=True)
            if total[-1] > 0:  # some rank saw the wish to stop: all stop after this step
                break
            if checkpointer.save_if_due(step):
                saved = step
            time.sleep(max(0.0, args.step_seconds - (time.monotonic() - began)))
        checkpointer.wait()  # an earlier save that is still being written would make this one skip
        if saved != step:
            checkpointer.save(step)
            checkpointer.wait()
    if step == args.steps and session.rank == 0:
        accuracy = np.mean((x @ weights > 0) == (y > 0.5))
        print(f"finished: accuracy {accuracy:.3f} on {session.world_size} rank(s)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256, help="samples a step, over all ranks")
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", default="ckpt/python_sgd", help="used when the job file names none")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend that a step takes at least this long")
    args = parser.parse_args()
    try:
        with gtrain.Session() as session:
            train(args, session)
    except gtrain.Unavailable as error:
        print(f"python_sgd: {error}", file=sys.stderr)
        sys.exit(gtrain.EXIT_RUN_ME_AGAIN)


if __name__ == "__main__":
    main()

"""Hugging Face Accelerate. It knows nothing of gtrain."""
import argparse
import glob
import os
import re
import time

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import toy


def newest(folder):
    found = [re.search(r"step-(\d+)$", path) for path in glob.glob(os.path.join(folder, "step-*"))]
    return max((int(match.group(1)) for match in found if match), default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", default="ckpt/accelerate")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend that a step takes longer")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = toy.network()
    samples = toy.clusters(args.steps * toy.BATCH * accelerator.num_processes)  # once through them
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3),
                                                   DataLoader(samples, batch_size=toy.BATCH))
    first = newest(args.folder)
    if first > 0:
        accelerator.load_state(f"{args.folder}/step-{first}")
        loader = accelerator.skip_first_batches(loader, first)
        accelerator.print(f"resumed at step {first}")
    accelerator.wait_for_everyone()  # nobody looks for the newest one after another rank may have begun the next

    for step, (inputs, labels) in enumerate(loader, first + 1):
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"step {step} loss {loss.item():.4f}")
        if step % args.save_every == 0 or step == args.steps:
            aside = f"{args.folder}/saving"  # gets its name when it is whole, so a crash never leaves half a checkpoint
            accelerator.save_state(aside)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                os.rename(aside, f"{args.folder}/step-{step}")
            accelerator.wait_for_everyone()
        time.sleep(args.step_seconds)
    accelerator.print(f"finished: {args.steps} steps on {accelerator.num_processes} rank(s)")
    accelerator.end_training()


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""An ordinary PyTorch DistributedDataParallel script. It knows nothing of gtrain.

Start it with torchrun or gtrain: both set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
It saves its own checkpoint file (written aside, then renamed, so a crash never leaves half a
file) and resumes from it when started again.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_data(samples, seed):
    """Ten noisy clusters in 64 dimensions: learnable within seconds on one core."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, 64, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(samples, 64, generator=generator), labels


def save(path, model, optimizer, step):
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "wb") as f:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="samples a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", default="torch_ddp.pt")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend that a step takes at least this long")
    args = parser.parse_args()

    dist.init_process_group("gloo", init_method="env://")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    images, labels = make_data(8192, args.seed)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()

    first = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        if rank == 0:
            print(f"resumed at step {first} from {args.checkpoint}", flush=True)
    elif rank == 0:
        os.makedirs(os.path.dirname(os.path.abspath(args.checkpoint)), exist_ok=True)
    dist.barrier()  # nobody looks for the file after rank 0 may have begun to write it

    share = max(1, args.batch // world)
    for step in range(first + 1, args.steps + 1):
        began = time.monotonic()
        order = torch.randint(0, len(labels), (share * world,), generator=torch.Generator().manual_seed(args.seed + step))
        mine = order[rank * share:(rank + 1) * share]
        optimizer.zero_grad()
        loss = loss_function(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                save(args.checkpoint, network, optimizer, step)
        time.sleep(max(0.0, args.step_seconds - (time.monotonic() - began)))

    dist.barrier()
    if rank == 0:
        with torch.no_grad():
            accuracy = (network(images).argmax(1) == labels).float().mean().item()
        print(f"finished: accuracy {accuracy:.3f} on {world} rank(s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

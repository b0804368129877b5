"""FSDP2 (`fully_shard`) with sharded checkpoints, by torch.distributed.checkpoint. It knows nothing of gtrain."""
import argparse
import glob
import os
import re
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import toy


def newest(folder):
    """The step of the newest checkpoint that was written to its end: its metadata comes last."""
    found = glob.glob(os.path.join(folder, "step-*", ".metadata"))
    return max((int(re.search(r"step-(\d+)/", path).group(1)) for path in found), default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", default="ckpt/fsdp2")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend that a step takes longer")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    mesh = dist.init_device_mesh(device.type, (world,))
    model = toy.network().to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    first = newest(args.folder)
    if first > 0:
        saved = state()
        dcp.load(saved, checkpoint_id=f"{args.folder}/step-{first}")
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        if rank == 0:
            print(f"resumed at step {first}")
    dist.barrier()  # nobody looks for the newest one after another rank may have begun the next

    samples, labels = toy.clusters(8192).tensors
    for step in range(first + 1, args.steps + 1):
        order = torch.randint(0, len(labels), (world, toy.BATCH), generator=torch.Generator().manual_seed(step))
        loss = cross_entropy(model(samples[order[rank]].to(device)), labels[order[rank]].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step % args.save_every == 0 or step == args.steps:
            dcp.save(state(), checkpoint_id=f"{args.folder}/step-{step}")
        time.sleep(args.step_seconds)
    if rank == 0:
        print(f"finished: {args.steps} steps on {world} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

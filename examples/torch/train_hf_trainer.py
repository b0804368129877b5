"""The Trainer of Hugging Face's transformers, on a GPT-2 of a few thousand weights made here. It knows nothing of gtrain."""
import argparse
import glob
import os
import re
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Counting(Dataset):
    """Sequences that count upwards from anywhere: what comes next can be learned."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class Progress(TrainerCallback):
    def __init__(self, step_seconds):
        self.step_seconds = step_seconds

    def on_step_end(self, *_, **__):
        time.sleep(self.step_seconds)

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


def step_of(checkpoint):
    return int(re.search(r"(\d+)$", checkpoint).group(1))


def newest(folder):
    """The newest checkpoint that was written to its end, or None: the trainer's own state comes last."""
    found = glob.glob(os.path.join(folder, "checkpoint-*", "trainer_state.json"))
    return max(map(os.path.dirname, found), key=step_of, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", default="ckpt/hf_trainer")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend that a step takes longer")
    args = parser.parse_args()

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                                       bos_token_id=0, eos_token_id=0))
    trainer = Trainer(
        model=model, train_dataset=Counting(), callbacks=[Progress(args.step_seconds)],
        args=TrainingArguments(output_dir=args.folder, max_steps=args.steps, per_device_train_batch_size=16, learning_rate=1e-3,
                               save_steps=args.save_every, save_total_limit=3, logging_steps=1, disable_tqdm=True,
                               report_to=[], use_cpu=not torch.cuda.is_available(),
                               ddp_find_unused_parameters=False))
    last = newest(args.folder)
    first = step_of(last) if last else 0
    if first > 0 and trainer.is_world_process_zero():
        print(f"resumed at step {first}")
    if first < args.steps:  # the trainer would make one step more
        trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        print(f"finished: {args.steps} steps on {trainer.args.world_size} rank(s)")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # the trainer leaves it, and its threads may end the interpreter by SIGABRT


if __name__ == "__main__":
    main()

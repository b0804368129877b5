"""Lightning. It knows nothing of gtrain, but must be told how many processes somebody else has started."""
import argparse
import os
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import toy


class Classifier(lightning.LightningModule):
    def __init__(self, step_seconds):
        super().__init__()
        self.network = toy.network()
        self.step_seconds = step_seconds

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self):
        if self.global_step > 0:
            self.print(f"resumed at step {self.global_step}")

    def training_step(self, batch, _):
        inputs, labels = batch
        return cross_entropy(self.network(inputs), labels)

    def on_train_batch_end(self, outputs, *_):
        self.print(f"step {self.global_step} loss {outputs['loss'].item():.4f}")
        time.sleep(self.step_seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", default="ckpt/lightning")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend that a step takes longer")
    args = parser.parse_args()

    trainer = lightning.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_steps=args.steps, callbacks=[ModelCheckpoint(args.folder, every_n_train_steps=args.save_every, save_last=True)],
        logger=False, enable_progress_bar=False)
    loader = DataLoader(toy.clusters(args.steps * toy.BATCH * trainer.world_size), batch_size=toy.BATCH)
    trainer.fit(Classifier(args.step_seconds), loader, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"finished: {trainer.global_step} steps on {trainer.world_size} rank(s)")


if __name__ == "__main__":
    main()

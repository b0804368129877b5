"""What these examples train: ten noisy clusters in 64 dimensions, learnable within seconds on one core."""
import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH = 64  # samples a rank and step


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def clusters(samples):
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 64, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return TensorDataset(centres[labels] + 1.5 * torch.randn(samples, 64, generator=generator), labels)

"""The peers of bench_codec: what a torch user writes today, on one thread.

usage: codec_torch.py FILE KERNEL COUNT TURNS   (writes the median seconds of TURNS to FILE)
"""
import statistics
import sys
import time

import torch

DENSITY = 0.001


def topk(gradient, residual):
    """Error feedback with torch.topk: the k largest leave, the rest is carried over."""
    residual.add_(gradient)
    k = int(DENSITY * gradient.numel())
    _, index = torch.topk(residual.abs(), k, sorted=False)
    values = residual[index]
    residual[index] = 0
    return index, values


def sampled(gradient, residual):
    """Error feedback with a threshold from a sample of 1 %, as DGC does."""
    residual.add_(gradient)
    sample = residual[torch.randint(0, residual.numel(), (residual.numel() // 100,))].abs()
    threshold = torch.topk(sample, int(DENSITY * sample.numel()), sorted=False)[0].min()
    index = torch.nonzero(residual.abs() >= threshold).view(-1)
    values = residual[index]
    residual[index] = 0
    return index, values


def sign(gradient, residual):
    """1-bit with error feedback and one scale; the signs are not even packed."""
    residual.add_(gradient)
    scale = residual.abs().mean()
    signs = residual >= 0
    residual.sub_(torch.where(signs, scale, -scale))
    return signs, scale


def half(gradient, residual):
    return gradient.half()


def main():
    path, kernel, count, turns = sys.argv[1], globals()[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gradient = torch.randn(count) * torch.randn(count).abs() * 1e-2
    residual = torch.zeros(count)
    samples = []
    for turn in range(-1, turns):
        start = time.perf_counter()
        kernel(gradient, residual)
        if turn >= 0:
            samples.append(time.perf_counter() - start)
    with open(path, "w") as out:
        out.write("%.9f\n" % statistics.median(samples))


if __name__ == "__main__":
    main()

"""The peers of bench_checkpoint: what a torch user writes today.

usage: checkpoint_peers.py FILE torch-save|torch-load PATH BYTES TURNS
       checkpoint_peers.py FILE boto3 ENDPOINT BYTES TURNS      (writes the median seconds of TURNS to FILE)
"""
import os
import statistics
import sys
import time

TENSOR_BYTES = 64 << 20


def state(size):
    import torch
    return {"w%d" % i: torch.full((TENSOR_BYTES // 4096, 1024), float(i)) for i in range(size // TENSOR_BYTES)}


def torch_save(path, size):
    """torch.save into a file, and fsync: what it takes until a power cut does no harm."""
    import torch
    tensors = state(size)

    def once():
        with open(path, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
    return once


def torch_load(path, size):
    import torch

    def once():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        torch.load(path)
    return once


def boto3(endpoint, size):
    import io

    import boto3 as library
    client = library.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a",
                            aws_secret_access_key="b")
    data = bytes(size)  # BytesIO shares it

    def once():
        client.upload_fileobj(io.BytesIO(data), "bucket", "key")
    return once


def main():
    path, kernel, where, size, turns = sys.argv[1:6]
    once = {"torch-save": torch_save, "torch-load": torch_load, "boto3": boto3}[kernel](where, int(size))
    samples = []
    for _ in range(int(turns)):
        start = time.perf_counter()
        once()
        samples.append(time.perf_counter() - start)
    with open(path, "w") as out:
        out.write("%.9f\n" % statistics.median(samples))


if __name__ == "__main__":
    main()

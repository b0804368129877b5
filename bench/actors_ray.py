"""A peer of bench_actors: actors of Ray (PyPI, tools/bench_ray.sh) on this machine, called as by `ray microbenchmark`.

actors_ray.py FOLDER   has its sessions there. Orders (bench/orders.h) on standard input, each answered with the seconds that COUNT
                       of them took:
  sync    "1:1 actor calls sync": each call is made when the one before has been answered
  batch   "1:1 actor calls async": 1,000 calls are made, then all of them are awaited, and so on
  pairs   "n:n actor calls async": two actors call two others, each of which gets COUNT / 2 calls, in batches of 1,000
  put     "single client put calls": a number into the object store
  get     "single client get calls": a number out of it

A call has an integer as its argument and as its result, where the microbenchmark has none and two bytes."""
import logging
import os
import sys
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray  # noqa: E402  (it reads the environment)

BATCH = 1000


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.value = 0

    def add(self, by):
        self.value += by
        return self.value


def call_in_batches(counters, count):
    for begin in range(0, count, BATCH):
        ray.get([counters[i % len(counters)].add.remote(1) for i in range(begin, min(begin + BATCH, count))])


@ray.remote(num_cpus=0)
class Caller:
    def call_all(self, counters, count):
        call_in_batches(counters, count)


def main():
    ray.init(_temp_dir=sys.argv[1], include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    counters = [Counter.remote() for _ in range(2)]
    callers = [Caller.remote() for _ in counters]
    number = ray.put(0)

    def sync(count):
        for _ in range(count):
            ray.get(counters[0].add.remote(1))

    def put(count):
        for _ in range(count):
            ray.put(0)

    def get(count):
        for _ in range(count):
            ray.get(number)

    orders = {"sync": sync, "put": put, "get": get, "batch": lambda count: call_in_batches(counters[:1], count),
              "pairs": lambda count: ray.get([caller.call_all.remote(counters, count // len(callers)) for caller in callers])}
    for line in sys.stdin:
        kind, count = line.split()
        begin = time.monotonic()
        orders[kind](int(count))
        print(time.monotonic() - begin, flush=True)
    ray.shutdown()


main()

"""A job of torchft (PyPI) as a peer of bench_elastic: four replica groups of one rank each, the linear model of elastic_torchrun.py.

elastic_torchft.py DIR PAUSE_MS TIMEOUT_MS HEARTBEAT_MS JOIN_MS   serves as lighthouse with the latter two, starts four replicas, and
                                                                 another one for each that dies, until it gets SIGTERM
elastic_torchft.py DIR PAUSE_MS TIMEOUT_MS --replica N            is one of them: its collectives and the manager have the timeout

DIR/trained.PID: number of the quorum, step, nanoseconds of the monotonic clock. A replica does what torchft's documentation says of
a step: start_quorum, allreduce, and the update only if should_commit."""
import os
import signal
import subprocess
import sys
import time

REPLICAS, LEAST = 4, 3
folder, pause, timeout = sys.argv[1], float(sys.argv[2]) / 1000, float(sys.argv[3]) / 1000


def replica(number):
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    w = torch.zeros(1000)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout)), state_dict=lambda: {"w": w},
                      load_state_dict=lambda state: w.copy_(state["w"]), min_replica_size=LEAST, rank=0, world_size=1,
                      store_addr="127.0.0.1", store_port=store.port, replica_id=f"replica{number}",
                      timeout=timedelta(seconds=timeout), quorum_timeout=timedelta(seconds=120))
    with open(os.path.join(folder, f"trained.{os.getpid()}"), "w") as out:
        while True:
            manager.start_quorum()
            gradient = torch.ones(1000) * (w[0] - 1)
            time.sleep(pause)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                w -= 0.01 * gradient
                out.write(f"{manager._quorum_id} {manager.current_step()} {time.monotonic_ns()}\n")  # nothing public says it
                out.flush()


def serve(heartbeat_ms, join_ms):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=LEAST, heartbeat_timeout_ms=heartbeat_ms, join_timeout_ms=join_ms)
    replicas = {}

    def start(number):
        env = dict(os.environ, TORCHFT_LIGHTHOUSE=lighthouse.address(), OMP_NUM_THREADS="1")
        with open(os.path.join(folder, f"replica{number}.log"), "a") as log:
            replicas[subprocess.Popen([sys.executable, __file__, *sys.argv[1:4], "--replica", str(number)], env=env, stdout=log, stderr=log).pid] = number

    def end(*_):
        for pid in replicas:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for number in range(REPLICAS):
        start(number)
    while True:
        pid, _ = os.wait()
        start(replicas.pop(pid))


if sys.argv[4] == "--replica":
    replica(int(sys.argv[5]))
serve(int(sys.argv[4]), int(sys.argv[5]))

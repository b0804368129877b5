"""One rank of examples_test.py: everything of the Python communicator among three ranks."""
import time

import numpy as np

import gtrain

with gtrain.Session() as session:
    comm, rank, size = session.communicator, session.rank, session.world_size
    mine = np.arange(2 * size) + 100 * rank
    everybody = [np.arange(2 * size) + 100 * r for r in range(size)]
    total = sum(everybody)

    data = mine.copy()
    comm.reduce(data, root=1)
    np.testing.assert_array_equal(data, total if rank == 1 else mine)
    np.testing.assert_array_equal(comm.reduce_scatter(mine, np.zeros(2, dtype=mine.dtype)), total[2 * rank:2 * rank + 2])
    np.testing.assert_array_equal(comm.all_to_all(mine, np.zeros_like(mine)),
                                  np.concatenate([other[2 * rank:2 * rank + 2] for other in everybody]))

    # Hand on what the rank before has, with handles and without.
    got = np.zeros_like(mine)
    if rank == 0:
        comm.send(mine, to=1)
        comm.receive(got, source=size - 1, wait=False).wait(timeout=60)
    else:
        comm.receive(got, source=rank - 1)
        comm.send(mine, to=(rank + 1) % size, wait=False).wait(timeout=60)
    np.testing.assert_array_equal(got, everybody[rank - 1])

    # Ranks 2 and 0, in this order; rank 1 is in none.
    part = comm.split(-1 if rank == 1 else 0, key=-rank)
    if rank == 1:
        assert part is None
    else:
        assert (part.rank, part.size) == (0 if rank == 2 else 1, 2)
        np.testing.assert_array_equal(part.all_gather(np.array([rank])), [[2], [0]])

    # What rank 1 gives cannot be reduced: it takes no part, and the others hear that at once.
    everyone = comm.split(0)
    started = time.monotonic()
    try:
        everyone.all_reduce(np.zeros((4, 4))[:, ::2] if rank == 1 else np.zeros(8))
    except gtrain.InvalidArgument as error:
        assert rank == 1, error
    except gtrain.Unavailable as error:
        assert rank != 1 and "rank 1 gave up: " in str(error) and "contiguous" in str(error), error
    else:
        raise AssertionError("a rank took no part, and nobody noticed")
    assert time.monotonic() - started < 60, "by its deadline"

    try:
        session.all_reduce(np.zeros(3 if rank == 2 else 4))
    except gtrain.FailedPrecondition as error:
        assert "rank 2 calls all-reduce" in str(error), error
    else:
        raise AssertionError("a difference was not noticed")
    print(f"rank {rank} is done")

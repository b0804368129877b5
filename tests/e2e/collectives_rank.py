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

    # Everybody sends before it receives; tags choose, and a group says what came.
    big = np.full(200_000, rank, dtype=np.float32)
    comm.send(big, to=(rank + 1) % size, tag=1)
    comm.send(mine, to=(rank + 1) % size, tag=2)
    comm.receive(got, source=rank - 1 if rank else size - 1, tag=2)
    np.testing.assert_array_equal(got, everybody[rank - 1])
    assert comm.receive(np.zeros_like(big), tag=1)[-1] == (rank - 1) % size
    sends = [gtrain.Send(np.full(rank + 1, r), to=r, tag=rank) for r in range(size)]
    receives = [gtrain.Receive(np.zeros(size, dtype=int), source=r, tag=gtrain.ANY_TAG) for r in range(size)]
    comm.exchange(sends + receives, wait=False).wait(timeout=60)
    assert [(r.source, r.tag, r.count) for r in receives] == [(r, r, r + 1) for r in range(size)]

    # Parts that differ.
    counts = [1, 5, 2]
    own = np.arange(counts[rank]) + 10 * rank
    parts = [np.arange(count) + 10 * r for r, count in enumerate(counts)]
    np.testing.assert_array_equal(comm.all_gather(own, counts=counts), np.concatenate(parts))
    summed = comm.reduce_scatter(np.concatenate(parts), np.zeros_like(own), counts=counts)
    np.testing.assert_array_equal(summed, size * own)
    out = np.zeros(3 * counts[rank], dtype=own.dtype)
    comm.all_to_all(np.concatenate(parts), out, send_counts=counts, receive_counts=3 * [counts[rank]])
    np.testing.assert_array_equal(out, np.concatenate(3 * [own]))
    gathered = comm.gather(mine, root=2)
    assert (gathered is None) == (rank != 2)
    back = comm.scatter(gathered, np.zeros_like(mine), root=2)
    np.testing.assert_array_equal(back, mine)

    # Gradients that leave while backward runs, and a mean of one's own.
    reducer = gtrain.Reducer(comm, [("weight", (50, 20)), ("bias", (20,))], compression="fp16", compress_from=1)
    for step in range(3):
        for index in (1, 0):
            reducer.gradients[index][...] = rank + step
            reducer.ready(index)
        assert reducer.finish().unused == []
        for gradient in reducer.gradients:
            np.testing.assert_allclose(gradient, 1 + step)
    reducer.close()
    mean = gtrain.CompressedMean(comm, "int8", 3000)
    np.testing.assert_allclose(mean.all_reduce(np.full(3000, rank, dtype=np.float32)), 1, atol=0.02)
    assert mean.bytes_sent > 0
    mean.close()

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

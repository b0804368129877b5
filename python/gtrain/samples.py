"""Samples: which samples a step trains, and which of them this rank does."""
import array
import ctypes
from ctypes import byref, c_int64, c_void_p

from . import _library
from ._errors import FailedPrecondition, InvalidArgument


class Samples:
    """The sample ledger: each sample of an epoch is trained once, at any sequence of world sizes and batch sizes.

    Samples are numbers below `samples`: rows, files, whatever the program makes of them. Ranks agree on them without a
    message. The order of an epoch follows from (seed, epoch) and is computed: memory depends on this rank's share alone.

        data = gtrain.Samples(session, samples=60_000, epochs=3, global_batch=48)
        checkpointer.add_samples(data)
        checkpointer.restore()
        for batch in data:                         # this rank's share: numbers, as a numpy array of int64
            loss = train(x[batch], y[batch]) / data.total   # samples of all ranks: what a mean divides by
            checkpointer.save_if_due(data.step)
        checkpointer.save(data.step)

    A batch counts as trained once the loop, or `next()`, gave it: a save after its update contains it. For a torch
    DataLoader that reads ahead: `DataLoader(dataset, batch_sampler=data.batches(), num_workers=2)`, with
    `data.batch` as the samples of all ranks, and then `data.advance()` for each batch before the save. Where a batch may
    have fewer samples than there are ranks a share is empty: give the loader a `collate_fn` that takes an empty list.

    Without `global_batch` a batch has as many samples as the job file says (`elastic: {global_batch: N}`).
    `share` of `shares`: this rank's coordinate along the data-parallel axis of a mesh, and the axis' size; without them
    the rank and the world size. `drop_last` leaves the short batch at the end of each epoch out.
    """

    def __init__(self, session, samples, global_batch=0, epochs=1, seed=0, shuffle=True, drop_last=False, name="train",
                 share=None, shares=None):
        if (share is None) != (shares is None):
            raise InvalidArgument("`share` and `shares` go together")
        if shares is not None and shares < 1:
            raise InvalidArgument(f"`shares` is {shares}; it is at least 1")
        if "\0" in str(name):
            raise InvalidArgument("the name of data has a NUL byte")
        self._handle = c_void_p()
        self.total = 0  # samples of the batch that the loop has, of all ranks
        options = _library.SamplesOptions(size=ctypes.sizeof(_library.SamplesOptions), name=str(name).encode(),
                                          in_order=int(not shuffle), drop_last=int(bool(drop_last)))
        for field, value in (("samples", samples), ("epochs", epochs), ("global_batch", global_batch), ("seed", seed),
                             ("share", share or 0), ("shares", shares or 0)):
            _library.set_integer(options, field, value)
        _library.call("gtrain_samples_open", session.handle, byref(options), byref(self._handle))

    def __del__(self):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.load().gtrain_samples_free(handle)

    @property
    def handle(self):
        if not self._handle:
            raise FailedPrecondition("these samples are closed")
        return self._handle

    def _where(self):
        place = _library.SamplesPlace(size=ctypes.sizeof(_library.SamplesPlace))
        _library.call("gtrain_samples_where", self.handle, byref(place))
        return place

    @property
    def step(self):
        """Batches that are behind."""
        return self._where().step

    @property
    def steps(self):
        """Batches from the first to the last, those behind included."""
        return self._where().steps

    @property
    def epoch(self):
        """Of the next batch, from 0; the number of epochs when all are trained."""
        return self._where().epoch

    @property
    def offset(self):
        """Samples of that epoch that are behind."""
        return self._where().offset

    @property
    def done(self):
        """Whether all epochs are trained."""
        return self.batch == 0

    @property
    def batch(self):
        """Samples of the next batch, of all ranks; 0 when all epochs are trained. A loop over `batches` divides by it
        before it calls `advance`; `total` is for loops over the object itself."""
        return self._where().batch

    def advance(self):
        """The next batch is trained: for loops over `batches`, before the save that contains it."""
        _library.call("gtrain_samples_advance", self.handle)

    def peek(self, ahead=0):
        """This rank's share of the next batch, or of the one `ahead` batches later. Empty where there are more ranks than
        samples, and when all is trained. Moves nothing."""
        count = c_int64()
        _library.call("gtrain_samples_share", self.handle, ahead, None, 0, byref(count))
        numbers, address = _room(count.value)
        _library.call("gtrain_samples_share", self.handle, ahead, address, count.value, byref(count))
        return numbers

    def batches(self):
        """The shares of all batches that are left, for what reads ahead: moves nothing, `advance` does."""
        begin, steps = self.step, self.steps
        for step in range(begin, steps):
            yield self.peek(step - self.step)

    def __len__(self):
        """Batches that are left."""
        place = self._where()
        return place.steps - place.step

    def next(self):
        """This rank's share of the next batch, which is trained from now on. FailedPrecondition when all is trained."""
        self.total = self.batch
        if self.total == 0:
            raise FailedPrecondition("all epochs of the data are trained")
        share = self.peek()
        self.advance()
        return share

    def __iter__(self):
        while not self.done:
            yield self.next()


def _room(count):
    """(numbers, their address): numpy where it is installed."""
    try:
        import numpy
    except ImportError:
        numbers = array.array("q", bytes(8 * count))
        return numbers, ctypes.cast(numbers.buffer_info()[0], ctypes.POINTER(c_int64))
    numbers = numpy.empty(count, dtype=numpy.int64)
    return numbers, numbers.ctypes.data_as(ctypes.POINTER(c_int64))

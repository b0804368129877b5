"""Elastic: a training loop that its ranks may die in."""
import array
import collections
import ctypes
import math
import operator
import warnings
from ctypes import byref, c_double, c_int, c_int64, c_void_p

from . import _library
from ._buffers import Buffer
from ._errors import FailedPrecondition, InvalidArgument, Unavailable
from .gradients import parse_compression, reduced_step
from .mesh import Mesh
from .session import Communicator

# What Elastic.residual returns: the norm of what error feedback holds back on this rank, as its part of the mean; ranks that
# took theirs along since this process trains.
Residual = collections.namedtuple("Residual", "norm lost")


class Elastic:
    """A loop that is right by hand, in a job that restarts, and in a job with `elastic: {mode: in-place}`, where processes live
    through the loss of other ranks: at most the step in flight is computed again.

        with gtrain.Session(place_later=True) as session:
            run = gtrain.Elastic(session, samples=60_000, epochs=3, global_batch=48)
            w = run.state("w", np.zeros(10, dtype=np.float32))
            g = run.gradient(np.zeros(10, dtype=np.float32))
            for step in run:
                g += my_gradient(w, x[step.samples], y[step.samples])     # the sum over this rank's share
                step.apply(loss, lambda: np.subtract(w, 0.1 * g, out=w))    # g is the mean over the batch now

    What the loop's body computes may come again for the same step, on another share: it changes no state. The function given
    to `apply` does, by the gradients alone, in the same way on all ranks, on all of them or on none; what it raises ends the
    rank. Checkpoints (where the job says so), stops, reports and the hand-over of state to new ranks are the loop's. Where the
    job file says nothing, `compression`, words as of Reducer, says how gradients travel, and `uri`, `keep`, `every_steps` and
    `every_seconds`, as of Checkpointer, where checkpoints go and when.
    Arrays are numpy's, torch's on the CPU, or any writable buffer; gradients are float32.
    """

    def __init__(self, session, samples, global_batch=0, epochs=1, seed=0, shuffle=True, drop_last=False, name="train",
                 *, compression=None, uri=None, keep=0, every_steps=0, every_seconds=0.0):
        if "\0" in str(name):
            raise InvalidArgument("the name of data has a NUL byte")
        self._handle = c_void_p()
        self._share = None  # of each batch, and how many there are; known from the first step on
        self._buffers = []  # keeps what is registered
        self._states, self._sums = [], []  # of those, until the first update has been looked at
        self._gradients = 0
        options = _library.SamplesOptions(size=ctypes.sizeof(_library.SamplesOptions), name=str(name).encode(),
                                          in_order=int(not shuffle), drop_last=int(bool(drop_last)))
        for field, value in (("samples", samples), ("epochs", epochs), ("global_batch", global_batch), ("seed", seed)):
            _library.set_integer(options, field, value)
        self._session = session
        self.stopped = False  # somebody asked to stop before the last sample
        self._ended = False
        _library.call("gtrain_elastic_open", session.handle, byref(options), byref(self._handle))
        if compression is not None:
            parsed = parse_compression(compression)
            _library.call("gtrain_elastic_set_reducer", self._handle, byref(_library.ReducerOptions(
                size=ctypes.sizeof(_library.ReducerOptions), compression=ctypes.pointer(parsed))))
        if uri is not None:
            _library.call("gtrain_elastic_set_checkpoints", self._handle, byref(_library.CheckpointOptions(
                size=ctypes.sizeof(_library.CheckpointOptions), uri=str(uri).encode(), keep=keep, every_steps=every_steps,
                every_seconds=every_seconds)))

    def __del__(self):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.load().gtrain_elastic_free(handle)

    def state(self, name, data):
        """Registers state that is equal on all ranks, before the first step, and returns it. Only `apply` changes it."""
        if "\0" in str(name):
            raise InvalidArgument("the name of a state has a NUL byte")
        buffer = Buffer(data)
        shape = tuple(buffer.shape) or (1,)
        _library.call("gtrain_elastic_add_state_of_shape", self._handle, str(name).encode(), buffer.address,
                      (c_int64 * len(shape))(*shape), len(shape), buffer.dtype)
        self._buffers.append(buffer)
        self._states.append(buffer)
        return data

    def part(self, shape, split=(), only=None):
        """This rank's part of a tensor in a job with a `mesh`, as a tuple of slices, None where it has none: the same as long
        as its process lives. `split` and `only` as in Mesh.box, of any axes but dp; an axis that the job has not is of size 1."""
        begin, local, holds = (c_int64 * len(shape))(), (c_int64 * len(shape))(), c_int()
        _library.call("gtrain_elastic_local_part", self._session.handle, (c_int64 * len(shape))(*shape), len(shape),
                      byref(Mesh().sharding(split, only)), begin, local, byref(holds))
        return tuple(slice(b, b + n) for b, n in zip(begin, local)) if holds.value else None

    def sharded(self, name, data, shape, split=(), only=None):
        """Registers state of which this rank has its `part`, `data`, before the first step, and returns it. Ranks along dp have
        equal copies, from which a lost one comes; where none is left all go back to the newest checkpoint."""
        if "\0" in str(name):
            raise InvalidArgument("the name of a state has a NUL byte")
        buffer = Buffer(data)
        _library.call("gtrain_elastic_add_sharded", self._handle, str(name).encode(), buffer.address, buffer.count,
                      buffer.dtype, (c_int64 * len(shape))(*shape), len(shape), byref(Mesh().sharding(split, only)))
        self._buffers.append(buffer)
        self._states.append(buffer)
        return data

    def gradient(self, data):
        """Registers a gradient of float32, before the first step, and returns it: zeros when a step begins."""
        buffer = Buffer(data, "float32")
        shape = tuple(buffer.shape) or (1,)
        _library.call("gtrain_elastic_add_gradient_of_shape", self._handle, buffer.address, (c_int64 * len(shape))(*shape),
                      len(shape))
        self._buffers.append(buffer)
        self._sums.append(buffer)
        self._gradients += 1
        return data

    def ready(self, index):
        """Gradient `index`, in the order in which they were registered, is this rank's whole sum: with `comm.compression` in
        the job file it leaves while others are computed. `apply` raises an error if it was ready before, and takes those that
        nobody said to be ready."""
        index = operator.index(index)
        if not 0 <= index < self._gradients:
            raise InvalidArgument(f"there is no gradient {index}: {self._gradients} are registered, from 0 on")
        _library.load().gtrain_elastic_ready(self._handle, index)

    def along(self, axis):
        """A Communicator of the ranks that differ from this one along `axis` of the job's mesh alone, in the order of their
        coordinates, for what a step or `part` of evaluate computes with them: take it anew in each. Use it under `train`, which
        repeats the step when a rank is lost in it."""
        handle = c_void_p()
        _library.call("gtrain_elastic_along", self._handle, str(axis).encode(), byref(handle))
        session = self._session
        return Communicator._adopt(handle, session._collective_timeout, session._communicators)

    def train(self, body):
        """`for step in self: body(step)`, for a body that uses `along`: where a rank is lost in the middle of it, the step is
        given again."""
        for step in self:
            try:
                body(step)
            except Unavailable:
                self._await_loss()

    def stop(self):
        """In the loop, on any rank: all end behind the next step that they make, as when the user asks to stop."""
        _library.call("gtrain_elastic_stop", self._handle)

    def evaluate(self, count, part):
        """The sum over all ranks of what `part(begin, end)`, a number, says of this rank's part of `count` items, as a validation
        does: behind the loop, or in it behind `apply`, by all ranks of a step. Behind the loop `part` is called again, for another
        part, when a rank was lost. In the loop the result is None then, perhaps not on all ranks: no state may depend on it."""
        while True:
            if self._share is None:
                raise FailedPrecondition("there is no step yet: evaluate is for the loop and behind it")
            share, shares = self._share
            value, all_have = c_double(), c_int()
            try:
                value.value = part(count * share // shares, count * (share + 1) // shares)
            except Unavailable:
                self._await_loss()
            else:
                _library.call("gtrain_elastic_sum", self._handle, byref(value), 1, byref(all_have))
            if all_have.value:
                return value.value
            if not self._ended:
                return None
            self._begin()

    def residual(self):
        """A Residual, between steps or before the first gradient of one is ready. It costs a copy of the gradients."""
        norm, lost = c_double(), c_int64()
        _library.call("gtrain_elastic_residual", self._handle, byref(norm), byref(lost))
        return Residual(norm.value, lost.value)

    def _update(self, update):
        """Calls it. Behind the first one rank 0 warns where no state has changed although a gradient was not all zeros."""
        states, sums, self._states, self._sums = self._states, self._sums, [], []
        if not states or self._session.rank != 0:
            return update()
        pull = any(_look(gradient).translate(None, b"\0\x80") for gradient in sums)  # -0.0 is zero, too
        before = [_look(state) for state in states] if pull else []
        update()
        if pull and all(_look(state) == was for state, was in zip(states, before)):
            warnings.warn("the first update has changed none of the registered state, and its gradients are not all zeros. Where it "
                          "binds the name anew (w = w - ...) write to the array (w -= ..., w[...] = ..., out=w), else nothing is "
                          "trained and nothing saved; with a learning rate of 0 in this step all is well", RuntimeWarning,
                          stacklevel=3)

    def _await_loss(self):
        """While Unavailable is handled: raises it where it was no rank's loss."""
        lost = c_int()
        _library.call("gtrain_elastic_await_loss", self._handle, byref(lost))
        if not lost.value:
            raise

    def _begin(self):
        place = _library.ElasticStep(size=ctypes.sizeof(_library.ElasticStep))
        _library.call("gtrain_elastic_begin", self._handle, byref(place))
        self._session._read_place()
        self._share = place.share, max(1, place.shares)
        return place

    def __iter__(self):
        while True:
            place = self._begin()
            if place.done:
                self.stopped, self._ended = bool(place.stopped), True
                return
            yield Step(self, place)


def _look(buffer):
    """Its bytes; of more than 1 MiB as many, from 16 places all over it."""
    if buffer.bytes <= 1 << 20:
        return ctypes.string_at(buffer.address, buffer.bytes) if buffer.bytes else b""
    block = 1 << 16
    return b"".join(ctypes.string_at(buffer.address + (buffer.bytes - block) * i // 15, block) for i in range(16))


class Step:
    """One step on this rank: `number` (the first is 1), `steps` (the number of the last one), `epoch` (from 0), `batch` (samples of
    all ranks together), `samples` (the numbers of this rank's share, perhaps none)."""

    def __init__(self, run, place):
        self._run = run
        self._used = False
        self.number, self.steps, self.epoch, self.batch = place.step, place.steps, place.epoch, place.batch
        self.samples = _numbers(place.samples, place.sample_count)

    def parts(self):
        """Gives the parts of this rank, for one loop over all of them. A rank has one part, its share, or, with
        `elastic: {determinism: bitwise}` in the job file, several, whose number and samples do not depend on how many ranks
        there are; gradients are zeros when each begins. A program that takes parts leaves `step.samples` alone and sets each
        part's `loss`. With `determinism: bitwise` `apply` raises FailedPrecondition after anything else."""
        loss = 0.0
        while True:
            place = _library.ElasticPart(size=ctypes.sizeof(_library.ElasticPart))
            _library.call("gtrain_elastic_next_part", self._run._handle, loss, byref(place))
            if place.done:
                return
            part = MicroBatch(place)
            yield part
            loss = float(part.loss)

    def apply(self, loss, update=None):
        """Waits until all ranks have the mean of the gradients, calls `update()` and returns True; or returns False when a
        rank was lost before that: the loop gives the step again. `loss`: the sum over this rank's samples; where the parts had
        theirs it is left out: `apply(update)`."""
        if update is None:
            loss, update = 0.0, loss
        if self._used:
            raise FailedPrecondition("this step was applied, or is over")
        self._used = True
        all_hold = c_int()
        _library.call("gtrain_elastic_reduce", self._run._handle, float(loss), byref(all_hold))
        if not all_hold.value:
            return False
        self._run._update(update)
        _library.call("gtrain_elastic_applied", self._run._handle)
        return True


    @property
    def reduced(self):
        """In the update and behind it: what compression says of this rank's gradients, a ReducedStep. `momentum_travelled` is
        equal on all ranks, so the update may depend on it."""
        step = _library.ReducedStep(size=ctypes.sizeof(_library.ReducedStep))
        _library.call("gtrain_elastic_reduced", self._run._handle, byref(step), None)
        return reduced_step(step)

    @property
    def loss(self):
        """In the update and behind it: the mean over the samples of the batch; None where a rank was lost before all had said
        theirs."""
        loss = c_double()
        _library.call("gtrain_elastic_reduced", self._run._handle, None, byref(loss))
        return None if math.isnan(loss.value) else loss.value


class MicroBatch:
    """One part of a step: `samples` (their numbers, at least one), `virtual_rank` (in this step, from 0), `seed` (for what this
    part draws: of the data's seed, the step and the virtual rank). `loss`, the sum over its samples, is the program's to set."""

    def __init__(self, place):
        self.virtual_rank, self.seed = place.virtual_rank, place.seed
        self.samples = _numbers(place.samples, place.sample_count)
        self.loss = 0.0


def _numbers(address, count):
    try:
        import numpy
        numbers = numpy.empty(count, dtype=numpy.int64)
        target = numbers.ctypes.data
    except ImportError:
        numbers = array.array("q", bytes(8 * count))
        target = numbers.buffer_info()[0]
    if count:
        ctypes.memmove(target, address, count * ctypes.sizeof(c_int64))
    return numbers

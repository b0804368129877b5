"""Session and Communicator: this process as one rank, and what it does together with the others."""
import ctypes
import functools
import weakref
from ctypes import byref, c_double, c_int, c_void_p

from . import _library
from ._buffers import OPS, Buffer
from ._errors import FailedPrecondition, GtrainError, InvalidArgument
from .mesh import Mesh

ANY_SOURCE = ANY_TAG = -1  # of receives
EXIT_RUN_ME_AGAIN = 75  # exit with it after Unavailable: the job goes on in its next generation (docs/cli.md: the price)


def milliseconds(seconds):
    if not 0 <= seconds < 1e15:
        raise InvalidArgument(f"a timeout of {seconds} s: no wait is without an end")
    return int(seconds * 1000)


def _why_given_up(error):
    """What the other ranks are told of the exception that ends a session, or None where it ends as it should.

    Who exits does so by intent, often all ranks together behind a collective that agreed on it. To be told would end that
    collective on those that have not quite completed it, and their error would be taken for the cause.
    """
    if isinstance(error, (GeneratorExit, SystemExit)):
        return None
    try:
        text = str(error)
    except BaseException:  # its own fault, and no reason to say nothing of it
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name


class Session:
    """Joins the job this process was started for and waits for all its ranks. Use it in a `with` statement.

    Outside gtrain it has one rank and reports nowhere. Thread-safe, except the collectives, which are those of one
    communicator (`session.communicator`, made at the first use) and want one thread at a time.
    """

    def __init__(self, join_timeout=600.0, collective_timeout=600.0, stay=False, place_later=False):
        """`stay`: the process will rejoin when its generation is over, in a job with `elastic: {mode: in-place}`.

        `place_later`: it stays, and its steps are those of a gtrain.Elastic. Where it was started beside a running
        generation it waits for its place in its first step and not here, so what it loads before holds up nobody; its
        rank is a number behind those of the others until then. With a `mesh` of more than dp it waits here."""
        self._handle = c_void_p()
        self._communicator = None
        self._communicators = weakref.WeakSet()  # all that were made from this session, and their parts
        self._collective_timeout = collective_timeout
        _library.log_to_stderr()
        join = "gtrain_session_join_to_stay" if stay else "gtrain_session_join"
        if place_later:
            join = "gtrain_session_join_place_later"
        _library.call(join, milliseconds(join_timeout), byref(self._handle))
        library = _library.load()
        self.managed = bool(library.gtrain_session_managed(self._handle))
        self.job = library.gtrain_session_job(self._handle).decode()
        self._read_place()

    def _read_place(self):
        library = _library.load()
        self.rank = library.gtrain_session_rank(self._handle)
        self.local_rank = library.gtrain_session_local_rank(self._handle)
        self.world_size = library.gtrain_session_world_size(self._handle)
        self.generation = library.gtrain_session_generation(self._handle)
        self.timeline = library.gtrain_session_timeline(self._handle)

    @property
    def mesh(self):
        """`mesh` of the job file with the sizes of this generation; without one all ranks lie along dp."""
        axes, count = (_library.MeshAxis * 16)(), c_int()
        _library.call("gtrain_session_mesh", self.handle, axes, len(axes), byref(count))
        return Mesh(**{axis.name.decode(): axis.size for axis in axes[:count.value]})

    def rejoin(self, timeout=600.0):
        """After Unavailable, in a session made with stay=True: waits for the next generation of the job. Then rank,
        world_size and communicator are new ones, and what was made from the old communicator is of no more use.
        Raises Unavailable where there is no other generation for this process: end it with EXIT_RUN_ME_AGAIN."""
        _library.call("gtrain_session_rejoin", self.handle, milliseconds(timeout))
        self._read_place()
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        # The others wait for this rank in their next collective: they hear why it does not come.
        why = None if error is None else _why_given_up(error)
        if why is not None:
            for communicator in list(self._communicators):
                communicator._give_up(why)
        self.close()

    def __del__(self):
        self.close()

    def close(self):
        """Leaves the session. In a forked child it does nothing to the parent's."""
        if getattr(self, "_communicator", None) is not None:
            self._communicator.close()
            self._communicator = None
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.load().gtrain_session_free(handle)

    @property
    def handle(self):
        if not self._handle:
            raise FailedPrecondition("the session is closed")
        return self._handle

    @property
    def communicator(self):
        """The communicator of the methods below; made when first used, by all ranks in the same order."""
        if self._communicator is None:
            self._communicator = Communicator(self, self._collective_timeout)
        return self._communicator

    def report(self, step, loss=None, samples=0):
        """What `gtrain status` shows. Never blocks. `samples` counts since the previous report, of this rank."""
        value = None if loss is None else byref(c_double(loss))
        _library.call("gtrain_session_report", self.handle, int(step), value, int(samples))

    def check_alive(self):
        """Raises Unavailable with the reason once this generation is over."""
        _library.call("gtrain_session_alive", self.handle)

    @property
    def stop_requested(self):
        """True once the user asked to stop. Ranks see it at different steps: Checkpointer.stop_agreed and stop_agreed() say the
        same on all."""
        out = c_int()
        _library.call("gtrain_session_stop_requested", self.handle, byref(out))
        return bool(out.value)

    def stop_agreed(self):
        """Collective: True on all ranks or none, once the user asked to stop. Behind save_if_due, which agrees anyway,
        Checkpointer.stop_agreed costs nothing."""
        return self.communicator.stop_agreed()

    @property
    def preemption_notice(self):
        """Seconds left after a preemption notice, or None."""
        out = c_double()
        _library.call("gtrain_session_notice", self.handle, byref(out))
        return None if out.value < 0 else out.value

    def all_reduce(self, data, op="sum", dtype=None, wait=True):
        return self.communicator.all_reduce(data, op, dtype, wait)

    def broadcast(self, data, root=0, dtype=None, wait=True):
        return self.communicator.broadcast(data, root, dtype, wait)

    def all_gather(self, data, out=None, dtype=None, counts=None):
        return self.communicator.all_gather(data, out, dtype, counts)

    def barrier(self):
        self.communicator.barrier()


def _op(name):
    if name not in OPS:
        raise InvalidArgument(f"no such operation: {name}; there are " + ", ".join(OPS))
    return OPS[name]


def _takes_part(operation):
    """A rank whose arguments cannot be takes no part in the operation, and the others hear it at once."""

    @functools.wraps(operation)
    def guarded(self, *arguments, **named):
        try:
            return operation(self, *arguments, **named)
        except GtrainError as error:
            if isinstance(error, InvalidArgument) and self._handle:
                _library.call("gtrain_communicator_abort", self._handle, str(error).encode())
            raise
        except Exception as error:  # whatever a tensor of another package raises
            if self._handle:
                _library.call("gtrain_communicator_abort", self._handle, str(error).encode())
            raise

    return guarded


class Communicator:
    """Collectives. Every rank calls the same ones in the same order with equal sizes, dtypes and operations."""

    def __init__(self, session, timeout=600.0):
        self._handle = c_void_p()
        _library.call("gtrain_communicator_create", session.handle, milliseconds(timeout), byref(self._handle))
        self.rank, self.size = session.rank, session.world_size
        self._timeout = timeout
        self._family = session._communicators
        self._family.add(self)

    def __del__(self):
        self.close()

    def close(self):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.load().gtrain_communicator_free(handle)

    def _give_up(self, why):
        """The others' running or next call says `why`. Raises nothing: an exception is under way already."""
        if self._handle:
            _library.load().gtrain_communicator_abort(self._handle, why.encode(errors="backslashreplace"), None)
            self.close()  # which waits until it is said: the process may end at once

    @property
    def handle(self):
        if not self._handle:
            raise FailedPrecondition("the communicator is closed")
        return self._handle

    @_takes_part
    def all_reduce(self, data, op="sum", dtype=None, wait=True):
        """Reduces `data` in place over all ranks: op is sum, mean, min, max, product, bit_and, bit_or or bit_xor.

        Of bool there is no mean, of complex64 no min and max; operations on bits take integers and bool.
        Returns `data`; with wait=False a Request, and `data` must stay untouched until its wait() returned.
        `dtype` ("float32", "bfloat16", ...) is for buffers that do not know it, such as a bytearray.
        """
        buffer = Buffer(data, dtype)
        return self._start("gtrain_all_reduce", wait, buffer, buffer.address, buffer.count, buffer.dtype, _op(op),
                           None)

    @_takes_part
    def reduce(self, data, root=0, op="sum", dtype=None, wait=True):
        """`data` of rank `root` becomes the reduction of all ranks'; elsewhere it stays. Returns like all_reduce."""
        buffer = Buffer(data, dtype)
        return self._start("gtrain_reduce", wait, buffer, buffer.address, buffer.count, buffer.dtype, _op(op), root,
                           None)

    @_takes_part
    def reduce_scatter(self, data, out, op="sum", dtype=None, counts=None):
        """`data` holds `size` blocks; block `rank` of everybody's, reduced, goes into `out`, which is returned.

        `counts`: elements of each block, the same list on all ranks; without it all are of the same size.
        """
        source, target = Buffer(data, dtype, writable=False), Buffer(out, dtype)
        if counts is not None:
            parts = self._parts("counts", counts, "data", source)
            self._check_part("out", target, parts[self.rank], source)
            _library.call("gtrain_reduce_scatter_v", self.handle, source.address, target.address, parts, target.dtype,
                          _op(op), None, None)
            return out
        self._check_sizes("data", source, "out", target)
        _library.call("gtrain_reduce_scatter", self.handle, source.address, target.address, target.count, target.dtype,
                      _op(op), None, None)
        return out

    @_takes_part
    def all_to_all(self, data, out, dtype=None, send_counts=None, receive_counts=None):
        """Block i of the `size` blocks of `data` goes to rank i; `out` gets the blocks in the order of their ranks.

        `send_counts` and `receive_counts`: elements of each block of `data` and of `out`; without them all are of the
        same size.
        """
        source, target = Buffer(data, dtype, writable=False), Buffer(out, dtype)
        if send_counts is not None or receive_counts is not None:
            if send_counts is None or receive_counts is None or source.dtype != target.dtype:
                raise InvalidArgument("uneven blocks need send_counts and receive_counts, and one dtype")
            sends = self._parts("send_counts", send_counts, "data", source)
            receives = self._parts("receive_counts", receive_counts, "out", target)
            _library.call("gtrain_all_to_all_v", self.handle, source.address, sends, target.address, receives,
                          source.dtype, None, None)
            return out
        if target.dtype != source.dtype or target.count != source.count or source.count % self.size:
            raise InvalidArgument(f"`data` and `out` must hold {self.size} blocks of the same size and dtype")
        _library.call("gtrain_all_to_all", self.handle, source.address, target.address, source.count // self.size,
                      source.dtype, None, None)
        return out

    @_takes_part
    def gather(self, data, root=0, out=None, dtype=None):
        """`data` of every rank, in rank order, on rank `root`: in `out`, or a new numpy array [size, *shape]. None elsewhere."""
        source = Buffer(data, dtype, writable=False)
        if self.rank != root:
            _library.call("gtrain_gather", self.handle, source.address, None, source.count, source.dtype, root, None, None)
            return None
        out = self._room_for_all(data) if out is None else out
        target = Buffer(out, dtype)
        self._check_sizes("out", target, "data", source)
        _library.call("gtrain_gather", self.handle, source.address, target.address, source.count, source.dtype, root,
                      None, None)
        return out

    @_takes_part
    def scatter(self, data, out, root=0, dtype=None):
        """Block i of the `size` blocks of `data` of rank `root` goes into `out` of rank i, which is returned.

        Elsewhere `data` is not looked at and may be None.
        """
        target, source = Buffer(out, dtype), None
        if self.rank == root:
            source = Buffer(data, dtype, writable=False)
            self._check_sizes("data", source, "out", target)
        _library.call("gtrain_scatter", self.handle, source and source.address, target.address, target.count,
                      target.dtype, root, None, None)
        return out

    @_takes_part
    def send(self, data, to, dtype=None, wait=True, tag=0):
        """`data` to rank `to`, which receives as much with the same tag. Not collective.

        Returns when `data` may be changed again, which is mostly before it is received: every rank may send before it
        receives. With wait=False a Request, as of all_reduce.
        """
        buffer = Buffer(data, dtype, writable=False)
        return self._start("gtrain_send", wait, buffer, buffer.address, buffer.count, buffer.dtype, to, tag, None)

    @_takes_part
    def receive(self, data, source=ANY_SOURCE, dtype=None, wait=True, tag=0):
        """Fills `data` with what rank `source`, or any, sends to this one with `tag` (or ANY_TAG). Not collective.

        Returns like all_reduce. Who sent it, and how much where that may be less, `exchange` tells.
        """
        buffer = Buffer(data, dtype)
        return self._start("gtrain_receive", wait, buffer, buffer.address, buffer.count, buffer.dtype, source, tag, None)

    @_takes_part
    def exchange(self, messages, wait=True):
        """Sends and receives that begin together, so that none waits for another: a list of Send and Receive.

        Returns the list, whose receives then say `source`, `tag` and `count` of what came; with wait=False a Request.
        """
        array = (_library.Message * len(messages))()
        for place, message in zip(array, messages):
            place.kind, place.data, place.count = message.kind, message.buffer.address, message.buffer.count
            place.dtype, place.peer, place.tag = message.buffer.dtype, message.peer, message.tag
        group = _Exchanged(messages, array)
        if wait:
            _library.call("gtrain_exchange", self.handle, array, len(messages), None, None)
            return group.owner
        request = c_void_p()
        _library.call("gtrain_exchange", self.handle, array, len(messages), None, byref(request))
        return Request(request, self, group)

    def allocate(self, nbytes):
        """Zeroed memory that collectives of one machine reach fastest, writable: numpy.frombuffer(it, dtype=...).

        It belongs to the communicator: use it no longer than that, or until free(it).
        """
        address = c_void_p()
        _library.call("gtrain_allocate", self.handle, nbytes, byref(address))
        return memoryview((ctypes.c_char * nbytes).from_address(address.value)).cast("B")

    def free(self, memory):
        """Gives memory of `allocate` back. Nobody may look at it any more."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else None
        _library.call("gtrain_deallocate", self.handle, address)

    def set_timeout(self, seconds):
        """The longest that an operation, or a wait for a message, may take from the next one on; of this rank alone."""
        _library.call("gtrain_communicator_set_timeout", self.handle, milliseconds(seconds))
        self._timeout = seconds

    def abort(self, why):
        """From any thread: this rank cannot go on. Its running operation ends, and that of all others, with `why`."""
        _library.call("gtrain_communicator_abort", self.handle, why.encode(errors="backslashreplace"))

    @_takes_part
    def stop_agreed(self):
        """Collective: whether rank 0 has heard that the user asked to stop."""
        out = c_int()
        _library.call("gtrain_communicator_stop_agreed", self.handle, byref(out))
        return bool(out.value)

    @_takes_part
    def split(self, color, key=0):
        """Collective: a communicator of the ranks with the same color, in the order of (key, rank); None if color < 0."""
        handle = c_void_p()
        _library.call("gtrain_communicator_split", self.handle, color, key, byref(handle))
        return self._adopt(handle, self._timeout, self._family) if handle else None

    @classmethod
    def _adopt(cls, handle, timeout, family):
        part = cls.__new__(cls)
        part._handle, part._timeout, part._family = handle, timeout, family
        part._family.add(part)
        part.rank = _library.load().gtrain_communicator_rank(handle)
        part.size = _library.load().gtrain_communicator_size(handle)
        return part

    @_takes_part
    def broadcast(self, data, root=0, dtype=None, wait=True):
        """`data` of rank `root` overwrites `data` everywhere. Returns like all_reduce."""
        buffer = Buffer(data, dtype)
        return self._start("gtrain_broadcast", wait, buffer, buffer.address, buffer.count, buffer.dtype, root, None)

    @_takes_part
    def all_gather(self, data, out=None, dtype=None, counts=None):
        """`data` of every rank, in rank order. Without `out` the result is a new numpy array [size, *shape].

        `counts`: elements of each rank, the same list on all; `out`, or a new array of one dimension, has their sum.
        """
        source = Buffer(data, dtype, writable=False)
        if counts is not None:
            if out is None:
                import numpy
                out = numpy.empty(sum(counts), dtype=numpy.asarray(data).dtype)
            target = Buffer(out, dtype)
            parts = self._parts("counts", counts, "out", target)
            self._check_part("data", source, parts[self.rank], target)
            _library.call("gtrain_all_gather_v", self.handle, source.address, target.address, parts, source.dtype, None,
                          None)
            return out
        out = self._room_for_all(data) if out is None else out
        target = Buffer(out, dtype)
        self._check_sizes("out", target, "data", source)
        _library.call("gtrain_all_gather", self.handle, source.address, target.address, source.count, source.dtype,
                      None, None)
        return out

    def barrier(self):
        """Returns when every rank has called it."""
        _library.call("gtrain_barrier", self.handle, None, None)

    def _room_for_all(self, data):
        import numpy
        array = numpy.asarray(data)
        return numpy.empty((self.size, *array.shape), dtype=array.dtype)

    def _parts(self, name, counts, whole_name, whole):
        """`counts` as the library takes them: as many as ranks, and together what `whole` holds."""
        counts = [int(count) for count in counts]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != whole.count:
            raise InvalidArgument(f"`{name}` must have {self.size} numbers whose sum is the {whole.count} elements of "
                                  f"`{whole_name}`")
        return (ctypes.c_size_t * self.size)(*counts)

    def _check_part(self, name, part, count, whole):
        if part.count != count or part.dtype != whole.dtype:
            raise InvalidArgument(f"`{name}` must hold the {count} elements that `counts` says of rank {self.rank}, of one "
                                  "dtype")

    def _check_sizes(self, large_name, large, small_name, small):
        if large.dtype != small.dtype or large.count != small.count * self.size:
            raise InvalidArgument(f"`{large_name}` must hold {self.size} times the {small.count} elements of "
                                  f"`{small_name}`, of the same dtype")

    def _start(self, name, wait, buffer, *arguments):
        if wait:
            _library.call(name, self.handle, *arguments, None)
            return buffer.owner
        request = c_void_p()
        _library.call(name, self.handle, *arguments, byref(request))
        return Request(request, self, buffer)


class Send:
    """One message of Communicator.exchange, to rank `to`."""
    kind = 0

    def __init__(self, data, to, tag=0, dtype=None):
        self.buffer, self.peer, self.tag = Buffer(data, dtype, writable=False), to, tag


class Receive:
    """One message of Communicator.exchange, from rank `source` or any: at most as much as `data` holds.

    Once it is over, `source`, `tag` and `count` (elements) are what came.
    """
    kind = 1

    def __init__(self, data, source=ANY_SOURCE, tag=0, dtype=None):
        self.buffer, self.peer, self.tag = Buffer(data, dtype), source, tag
        self.source, self.count = None, None


class _Exchanged:
    """Stands for the buffer of a Request: holds what the library still writes to."""

    def __init__(self, messages, array):
        self._messages, self._array = messages, array

    @property
    def owner(self):
        for message, place in zip(self._messages, self._array):
            if message.kind == Receive.kind:
                message.source, message.tag, message.count = place.source, place.source_tag, place.received
        return self._messages


class Request:
    """A collective under way. Holds its communicator and its buffer until it ended."""

    def __init__(self, handle, communicator, buffer):
        self._handle = handle
        self._communicator = communicator
        self._buffer = buffer
        self._ended = False

    def __del__(self):
        if getattr(self, "_handle", None):
            if not self._ended:
                # The library still uses the buffer: it may only go when the communicator has gone.
                vars(self._communicator).setdefault("_abandoned", []).append(self._buffer)
            _library.load().gtrain_request_free(self._handle)
            self._handle = None

    def wait(self, timeout=600.0):
        """The buffer, once the operation ended. DeadlineExceeded while it goes on: wait again."""
        done = c_int()
        try:
            _library.call("gtrain_request_wait", self._handle, milliseconds(timeout), byref(done))
        finally:
            self._ended = self._ended or bool(done.value)
        return self._buffer.owner

    def done(self):
        """True when the operation ended, well or not."""
        done = c_int()
        _library.load().gtrain_request_wait(self._handle, 0, ctypes.byref(done), None)
        self._ended = self._ended or bool(done.value)
        return self._ended

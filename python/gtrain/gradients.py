"""Means of gradients that leave while backward runs, compressed on their way; and compressed means of any floats."""
import collections
import ctypes
from ctypes import byref, c_float, c_int64, c_size_t, c_uint64, c_void_p

from . import _library
from ._buffers import NAMES, Buffer
from ._errors import FailedPrecondition, InvalidArgument

# What Reducer.finish returns: bytes this rank has sent; elements that top-k sent and should send; elements that codecs
# clipped; buckets that were means before finish was called; whether what came back is momentum (docs/python.md);
# gradients that nobody called ready for.
ReducedStep = collections.namedtuple("ReducedStep", "bytes_sent selected wanted clipped early momentum_travelled unused")


def parse_compression(words):
    options = _library.Compression(size=ctypes.sizeof(_library.Compression))
    _library.call("gtrain_compression_parse", words.encode(), byref(options))
    return options


def _gradients(named_shapes):
    """`named_shapes` as the library takes them: names, sizes and shapes."""
    array = (_library.Gradient * len(named_shapes))()
    for place, (name, shape) in zip(array, named_shapes):
        shape = tuple(int(size) for size in shape)
        place.name, place.dimensions = name.encode(), len(shape)
        place.shape = (c_int64 * len(shape))(*shape)
        place.count = 1
        for size in shape:
            place.count *= size
    return array


def reduced_step(step):
    """What the library says of a step, as a ReducedStep."""
    return ReducedStep(step.bytes_sent, step.selected, step.wanted, step.clipped, step.early, bool(step.momentum_travelled),
                       [step.unused[i] for i in range(step.unused_count)])


class _Gradients(tuple):
    """Assignment would put another array where the reducer does not look."""

    def __setitem__(self, index, value):
        raise InvalidArgument(f"the memory of gradients is the reducer's: copy into it, reducer.gradients[{index}][...] = "
                              "gradient")


class Reducer:
    """Averages the gradients of a model, in buckets that leave as they fill. Collective.

    `gradients`: (name, shape) of each, in the order of the forward pass, equal on all ranks. Their memory is the
    reducer's: `reducer.gradients[i]`, a numpy array of float32, zeros at first, to be filled by the program, which calls
    ready(i), in the order of backward if it can, and finish() for the means. torch: `p.grad = torch.from_numpy(...)`.
    `compression`: the words of a job file for one codec, such as "topk density=0.01" or "powersgd rank=4"; what the job
    file says wins over it.
    """

    def __init__(self, communicator, gradients, compression=None, bucket_bytes=0, compress_from=0):
        import numpy
        gradients = [(name, tuple(shape)) for name, shape in gradients]
        options = _library.ReducerOptions(size=ctypes.sizeof(_library.ReducerOptions), bucket_bytes=bucket_bytes,
                                          compress_from=compress_from)
        if compression is not None:
            parsed = parse_compression(compression)
            options.compression = ctypes.pointer(parsed)
        self._handle = c_void_p()
        self._communicator = communicator
        _library.call("gtrain_reducer_create", communicator.handle, _gradients(gradients), len(gradients), byref(options),
                      byref(self._handle))
        arrays = []
        for index, (_, shape) in enumerate(gradients):
            data, count = ctypes.POINTER(c_float)(), c_size_t()
            _library.call("gtrain_reducer_gradient", self._handle, index, byref(data), byref(count))
            memory = (c_float * count.value).from_address(ctypes.addressof(data.contents)) if count.value else ()
            arrays.append(numpy.ctypeslib.as_array(memory).reshape(shape) if count.value else
                          numpy.zeros(shape, dtype=numpy.float32))
        self.gradients = _Gradients(arrays)

    def __del__(self):
        self.close()

    def close(self):
        """Waits for a running collective. The arrays of `gradients` must not be looked at any more."""
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self.gradients = ()
            _library.load().gtrain_reducer_free(handle)

    @property
    def handle(self):
        if not self._handle:
            raise FailedPrecondition("the reducer is closed")
        return self._handle

    def ready(self, index):
        """Gradient `index` is complete. From any thread; never blocks."""
        _library.call("gtrain_reducer_ready", self.handle, index)

    def finish(self):
        """Blocks until every gradient is the mean over the ranks. Returns a ReducedStep."""
        step = _library.ReducedStep(size=ctypes.sizeof(_library.ReducedStep))
        _library.call("gtrain_reducer_finish", self.handle, byref(step))
        return reduced_step(step)

    def drop(self):
        """After finish, on all ranks or none: the step is not applied, nothing of it is carried over."""
        _library.call("gtrain_reducer_drop", self.handle)

    def abort(self, why):
        """This rank cannot go on with its step; the others hear `why`. From any thread; never blocks."""
        _library.call("gtrain_reducer_abort", self.handle, why.encode(errors="backslashreplace"))


class CompressedMean:
    """The mean of `count` float32 among the ranks, compressed on its way, with error feedback from call to call. Collective.

    `compression` as of Reducer; `shapes`: (name, shape) of the tensors that lie in the data one behind the other, which
    PowerSGD wants.
    """

    def __init__(self, communicator, compression, count, shapes=()):
        shapes = list(shapes)
        self._handle = c_void_p()
        self._communicator = communicator
        parsed = parse_compression(compression)
        _library.call("gtrain_compressed_mean_create", communicator.handle, byref(parsed), count,
                      _gradients(shapes) if shapes else None, len(shapes), byref(self._handle))

    def __del__(self):
        self.close()

    def close(self):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.load().gtrain_compressed_mean_free(handle)

    @property
    def handle(self):
        if not self._handle:
            raise FailedPrecondition("the compressed mean is closed")
        return self._handle

    def all_reduce(self, data):
        """`data` (float32) becomes the mean, in place, and is returned. The next call applies what this one carries over."""
        buffer = Buffer(data)
        if buffer.dtype != NAMES["float32"]:
            raise InvalidArgument("a compressed mean is of float32")
        _library.call("gtrain_compressed_mean_all_reduce", self.handle, buffer.address, buffer.count)
        return data

    def drop(self):
        """What came is not applied, on all ranks or none: nothing of it is carried over."""
        _library.call("gtrain_compressed_mean_drop", self.handle)

    @property
    def bytes_sent(self):
        """That this rank gave to collectives so far."""
        out = c_uint64()
        _library.call("gtrain_compressed_mean_bytes_sent", self.handle, byref(out))
        return out.value

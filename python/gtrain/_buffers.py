"""What a collective or a checkpoint can work on: numpy arrays and anything else with a writable, contiguous buffer."""
import ctypes

from ._errors import InvalidArgument

FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64, UINT8 = range(7)
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3}
SIZES = {FLOAT32: 4, FLOAT64: 8, FLOAT16: 2, BFLOAT16: 2, INT32: 4, INT64: 8, UINT8: 1}
NAMES = {"float32": FLOAT32, "float64": FLOAT64, "float16": FLOAT16, "bfloat16": BFLOAT16, "int32": INT32,
         "int64": INT64, "uint8": UINT8}
_FORMATS = {"f": FLOAT32, "d": FLOAT64, "e": FLOAT16, "i": INT32, "q": INT64, "B": UINT8,
            "l": INT64 if ctypes.sizeof(ctypes.c_long) == 8 else INT32}


class Buffer:
    """Address, count, shape and dtype of somebody's memory; holds a reference while it lives."""

    def __init__(self, data, dtype=None, writable=True):
        try:
            view = memoryview(data)
        except TypeError:
            raise InvalidArgument(f"{type(data).__name__} has no buffer: pass a numpy array, array.array or "
                                  "bytearray (for a torch tensor on the CPU: tensor.numpy())") from None
        if not view.c_contiguous:
            raise InvalidArgument("the array is not contiguous: pass numpy.ascontiguousarray(...) of it")
        if writable and view.readonly:
            raise InvalidArgument("the buffer is read-only")
        self.dtype = _dtype(view, dtype)
        if view.nbytes % SIZES[self.dtype]:
            raise InvalidArgument(f"{view.nbytes} bytes are no whole number of elements")
        self.bytes = view.nbytes
        self.count = view.nbytes // SIZES[self.dtype]
        self.shape = tuple(view.shape) if dtype is None else (self.count,)
        self.owner = data
        self._view = view
        self.address = _address(view)


def _dtype(view, dtype):
    if dtype is not None:
        if dtype not in NAMES:
            raise InvalidArgument(f"no such dtype: {dtype}; there are " + ", ".join(NAMES))
        return NAMES[dtype]
    code = _FORMATS.get(view.format.lstrip("@=<"))
    if code is None or SIZES[code] != view.itemsize:
        raise InvalidArgument(f"elements of format {view.format!r} are not supported; there are " + ", ".join(NAMES))
    return code


def _address(view):
    if view.nbytes == 0:
        return None
    if view.readonly:
        numpy = _numpy_or_none()
        if numpy is None:
            raise InvalidArgument("a read-only buffer needs numpy")
        return numpy.frombuffer(view.cast("B"), dtype="uint8").ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))


def _numpy_or_none():
    try:
        import numpy
    except ImportError:
        return None
    return numpy

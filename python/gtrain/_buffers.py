"""What a collective or a checkpoint can work on: numpy and ml_dtypes arrays, CPU torch tensors, any writable, contiguous buffer."""
import ctypes

from ._errors import InvalidArgument

# The numbers are those of gtrain_c.h; names as numpy, ml_dtypes and torch have them.
NAMES = {name: code for code, name in enumerate(
    ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool", "int8", "int16", "uint16", "uint32",
     "uint64", "float8_e4m3fn", "float8_e5m2", "complex64"))}
OPS = {name: code for code, name in enumerate(
    ("sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor"))}
SIZES = dict(enumerate((4, 8, 2, 2, 4, 8, 1, 1, 1, 2, 2, 4, 8, 1, 1, 8)))
_LONG = "int64" if ctypes.sizeof(ctypes.c_long) == 8 else "int32"
_FORMATS = {"f": "float32", "d": "float64", "e": "float16", "i": "int32", "q": "int64", "B": "uint8", "?": "bool",
            "b": "int8", "h": "int16", "H": "uint16", "I": "uint32", "Q": "uint64", "Zf": "complex64", "l": _LONG,
            "L": "u" + _LONG}


class Buffer:
    """Address, count, shape and dtype of somebody's memory; holds a reference while it lives.

    With a `dtype` by name elements of a type that is not known here, or bits (uint8, and int8, uint16, int16 where it has
    their size), are taken for that; elements of its size keep their shape, others become one dimension.
    """

    def __init__(self, data, dtype=None, writable=True):
        if hasattr(data, "data_ptr"):
            self._of_torch(data)
        elif hasattr(data, "__array_interface__"):
            self._of_numpy(data, writable)
        else:
            self._of_buffer(data, writable)
        if dtype is not None:
            self._take_for(code_of(dtype))
        if self.dtype is None:
            raise InvalidArgument(f"elements of type {self._name!r} are not supported; there are " + ", ".join(NAMES))
        self.count = self.bytes // SIZES[self.dtype]
        self.owner = data
        if self.bytes == 0:
            self.address = None

    def _of_torch(self, tensor):
        if tensor.device.type != "cpu":
            raise InvalidArgument(f"the tensor lies on {tensor.device}: today only those on the CPU are taken")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise InvalidArgument("the tensor is a view that is not contiguous: pass copy = tensor.contiguous(), and "
                                  "tensor.copy_(copy) behind the call if it writes there")
        self._describe(str(tensor.dtype).split(".")[-1], tensor.shape, tensor.element_size())
        self.address = tensor.data_ptr()

    def _of_numpy(self, array, writable):
        # Not by memoryview, which knows no bfloat16.
        if not array.flags.c_contiguous:
            raise InvalidArgument("the array is not contiguous: pass copy = numpy.ascontiguousarray(array), and "
                                  "array[...] = copy behind the call if it writes there")
        if writable and not array.flags.writeable:
            if not hasattr(array, "__setitem__"):
                raise InvalidArgument("a number of numpy is read-only and no array: pass "
                                      f"numpy.zeros(1, dtype='{array.dtype.name}'), and the number in its element 0")
            raise InvalidArgument("the array is read-only: pass copy = numpy.array(array), which is yours to write, and use "
                                  "that from then on")
        if not array.dtype.isnative:
            raise InvalidArgument(f"elements of {array.dtype} are not supported: the byte order is not that of this machine")
        self._describe(array.dtype.name, array.shape, array.dtype.itemsize)
        self.address = array.ctypes.data

    def _of_buffer(self, data, writable):
        try:
            view = memoryview(data)
        except TypeError:
            raise InvalidArgument(f"{type(data).__name__} has no buffer: pass a numpy array, a torch tensor on the CPU, "
                                  "array.array or bytearray") from None
        if not view.c_contiguous:
            raise InvalidArgument("the buffer is not contiguous")
        if writable and view.readonly:
            raise InvalidArgument("the buffer is read-only: pass bytearray(data) or a numpy array, and use that from then on")
        self._describe(_FORMATS.get(view.format.lstrip("@=<"), view.format), view.shape, view.itemsize)
        self._view = view
        self.address = _address(view)

    def _describe(self, name, shape, itemsize):
        self._name = name
        self._itemsize = itemsize
        self.dtype = NAMES.get(name)
        if self.dtype is not None and SIZES[self.dtype] != itemsize:
            self.dtype = None
        self.shape = tuple(shape)
        self.bytes = itemsize
        for n in self.shape:
            self.bytes *= n

    def _take_for(self, code):
        bits = self._name == "uint8" or (self._name in ("int8", "uint16", "int16") and SIZES[code] == self._itemsize)
        if self.dtype not in (None, code) and not bits:
            wanted = next(name for name, number in NAMES.items() if number == code)
            raise InvalidArgument(f"the elements are {self._name}, not {wanted}: nothing is converted here, so make them "
                                  f"{wanted} first (numpy: .astype('{wanted}'))")
        if self.bytes % SIZES[code]:
            raise InvalidArgument(f"{self.bytes} bytes are no whole number of elements")
        if SIZES[code] != self._itemsize:
            self.shape = (self.bytes // SIZES[code],)
        self.dtype = code


def code_of(dtype):
    """The number of a dtype by name."""
    if dtype not in NAMES:
        raise InvalidArgument(f"no such dtype: {dtype}; there are " + ", ".join(NAMES))
    return NAMES[dtype]


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

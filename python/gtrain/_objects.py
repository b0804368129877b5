"""Objects of actors as arrays of numpy (include/gtrain/object_c.h)."""
import ctypes
import weakref

from . import _library
from ._buffers import NAMES
from ._errors import InvalidArgument
from ._values import dtype_of

NAME_OF = {code: name for name, code in NAMES.items()}
_REFERENCE_BYTES = 40


def fill(handle, buffer):
    """Makes a draft the object that has these bytes. Its reference. With an error it is released."""
    try:
        if buffer.bytes:
            _library.call("gtrain_object_write", handle, 0, buffer.address, buffer.bytes)
        reference = ctypes.create_string_buffer(_REFERENCE_BYTES)
        _library.call("gtrain_object_seal", handle, reference)
        return reference.raw
    except BaseException:
        _release(handle)
        raise


def view(handle, dtype, shape):
    """The array that an object is, which has the handle for as long as it lives."""
    import numpy
    library = _library.load()
    size = library.gtrain_object_size(handle)
    memory = (ctypes.c_uint8 * size).from_address(library.gtrain_object_data(handle))
    weakref.finalize(memory, _release, handle).atexit = False  # the memory ends with the process
    if dtype not in NAMES:
        raise InvalidArgument(f"an object of {dtype!r}, which is no type of elements")
    return numpy.frombuffer(memoryview(memory).toreadonly(), dtype=dtype_of(dtype)).reshape(shape)


def _release(handle):
    _library.load().gtrain_object_release(handle, 0)

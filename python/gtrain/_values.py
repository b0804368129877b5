"""Values of actors: what MessagePack has, and arrays of numpy, packed and unpacked by the library (include/gtrain/actor_c.h)."""
import ctypes
from ctypes import byref, c_size_t, c_void_p

from . import _library
from ._buffers import NAMES, Buffer
from ._errors import InvalidArgument

_NIL, _BOOL, _INT, _UINT, _FLOAT, _STRING, _BYTES, _NUMBERS, _ARRAY, _MAP = range(10)
_DTYPES = {code: name for name, code in NAMES.items()}
_SHAPE, _DATA = "gtrain.shape", "gtrain.data"  # of an array of several dimensions
_DEPTH_MAX = 64


def pack(value, of_other=None):
    """The bytes of None, bool, int, float, str, bytes, lists, tuples (which arrive as lists), dicts, arrays of numpy and tensors of
    torch on the CPU (which arrive as arrays of numpy), and what is in them. `of_other(value)`: a value in place of one that is none
    of these, or None."""
    library = _library.load()
    packer = library.gtrain_packer_new()
    if not packer:
        raise MemoryError("a packer")
    try:
        _pack(library, packer, value, of_other, 0)
        data, size = c_void_p(), c_size_t()
        _library.call("gtrain_packer_data", packer, byref(data), byref(size))
        return ctypes.string_at(data, size.value)
    finally:
        library.gtrain_packer_free(packer)


def _pack(library, packer, value, of_other, depth):
    if depth > _DEPTH_MAX:
        raise InvalidArgument(f"a value of an actor has more than {_DEPTH_MAX} levels, or contains itself")
    if value is None:
        library.gtrain_pack_nil(packer)
    elif value is True or value is False:
        library.gtrain_pack_bool(packer, value)
    elif isinstance(value, int):
        _pack_int(library, packer, value)
    elif isinstance(value, float):
        library.gtrain_pack_float(packer, value)
    elif isinstance(value, str):
        text = value.encode()
        library.gtrain_pack_string(packer, text, len(text))
    elif isinstance(value, (bytes, bytearray)):
        library.gtrain_pack_bytes(packer, bytes(value), len(value))
    elif isinstance(value, (list, tuple)):
        library.gtrain_pack_array(packer, len(value))
        for one in value:
            _pack(library, packer, one, of_other, depth + 1)
    elif isinstance(value, dict):
        library.gtrain_pack_map(packer, len(value))
        for key, one in value.items():
            if not (key is None or isinstance(key, (bool, int, float, str, bytes))):
                raise InvalidArgument(f"a {type(key).__name__} is no key of a dict that travels: those are None, bool, int, float, str "
                                      "and bytes")
            _pack(library, packer, key, of_other, depth + 1)
            _pack(library, packer, one, of_other, depth + 1)
    elif hasattr(value, "__array_interface__") or hasattr(value, "data_ptr"):
        value = plain(value)
        if isinstance(value, (bool, int, float)):
            _pack(library, packer, value, None, depth)
        else:
            _pack_array(library, packer, value)
    else:
        other = None if of_other is None else of_other(value)
        if other is None:
            raise InvalidArgument(f"a {type(value).__name__} is no value of an actor: those are None, bool, int, float, str, bytes, "
                                  "list, tuple, dict, arrays of numpy, tensors on the CPU, and references to actors")
        _pack(library, packer, other, None, depth + 1)


def _pack_int(library, packer, value):
    if -1 << 63 <= value < 1 << 63:
        library.gtrain_pack_int(packer, value)
    elif 0 <= value < 1 << 64:
        library.gtrain_pack_uint(packer, value)
    else:
        raise InvalidArgument(f"{value} has more than 64 bits")


def plain(value):
    """The same elements as they travel: contiguous, in the byte order of this machine; one of numpy's numbers as Python's."""
    if hasattr(value, "data_ptr"):
        return value.contiguous()
    if not hasattr(value, "__array_interface__"):
        return value
    import numpy
    if not isinstance(value, numpy.ndarray):
        number = value.item()
        return number if isinstance(number, (bool, int, float)) else numpy.asarray(value)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return value if value.flags.c_contiguous else value.copy()


def _pack_array(library, packer, value):
    buffer = Buffer(value, writable=False)
    shape = list(value.shape)
    if len(shape) != 1:
        library.gtrain_pack_map(packer, 2)
        _pack(library, packer, _SHAPE, None, 0)
        _pack(library, packer, shape, None, 0)
        _pack(library, packer, _DATA, None, 0)
    library.gtrain_pack_numbers(packer, buffer.dtype, buffer.address, buffer.count)


def unpack(address, size, of_map=None):
    """The value that these bytes are. `of_map(dict)`: what a map becomes, itself mostly. InvalidArgument, DATA_LOSS: they are none."""
    unpacker = _library.Unpacker(size=ctypes.sizeof(_library.Unpacker), data=address, left=size)
    value = _unpack(unpacker, of_map or (lambda found: found), 0)
    if unpacker.left:
        raise InvalidArgument("there is something behind the value")
    return value


def _unpack(unpacker, of_map, depth):
    if depth > _DEPTH_MAX:
        raise InvalidArgument(f"a value of an actor has more than {_DEPTH_MAX} levels")
    token = _library.Value(size=ctypes.sizeof(_library.Value))
    _library.call("gtrain_unpack", byref(unpacker), byref(token))
    kind = token.kind
    if kind == _NIL:
        return None
    if kind == _BOOL:
        return bool(token.integer)
    if kind == _INT:
        return token.integer
    if kind == _UINT:
        return token.unsigned_integer
    if kind == _FLOAT:
        return token.number
    if kind == _STRING:
        return ctypes.string_at(token.data, token.count).decode()
    if kind == _BYTES:
        return ctypes.string_at(token.data, token.count) if token.count else b""
    if kind == _NUMBERS:
        return _numbers(token)
    if kind == _ARRAY:
        return [_unpack(unpacker, of_map, depth + 1) for _ in range(token.count)]
    found = {}
    for _ in range(token.count):
        key = _unpack(unpacker, of_map, depth + 1)
        found[key] = _unpack(unpacker, of_map, depth + 1)
    if found.keys() == {_SHAPE, _DATA}:
        return found[_DATA].reshape(found[_SHAPE])
    return of_map(found)


def dtype_of(name):
    """That of numpy, or of ml_dtypes, with this name."""
    import numpy
    try:
        return numpy.dtype(name)
    except TypeError:
        import ml_dtypes
        return numpy.dtype(getattr(ml_dtypes, name))


def _numbers(token):
    import numpy
    numbers = numpy.empty(token.count, dtype=dtype_of(_DTYPES[token.dtype]))
    if token.count:
        ctypes.memmove(numbers.ctypes.data, token.data, numbers.nbytes)
    return numbers

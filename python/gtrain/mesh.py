"""Mesh: the ranks of a job as a grid of named axes, and which part of a tensor each of them holds."""
import ctypes
from ctypes import byref, c_int, c_int64

from . import _library
from ._errors import InvalidArgument


_RULES = {"balanced": 0, "chunk": 1}


def _rule(split):
    rule = split[2] if len(split) > 2 else "balanced"
    if rule not in _RULES:
        raise InvalidArgument(f"no such rule of a split: {rule}; there are " + ", ".join(_RULES))
    return _RULES[rule]


class Mesh:
    """Ranks row by row, the last axis fastest: in Mesh(dp=4, tp=2) rank 5 is dp 2, tp 1.

        mesh = gtrain.Mesh(dp=4, tp=2)
        box = mesh.box((1024, 4096), rank, split=[(1, "tp")])    # slices: weights[box] is this rank's part

    `split` lists (dimension, axis) in order, or (dimension, axis, "chunk") for a dimension that is cut as torch.chunk and
    DTensor do, 10 over 4 to 3, 3, 3, 1 and not to 3, 3, 2, 2 ("balanced"); `only` names coordinates outside of which a tensor does not exist. Over all
    other axes it is replicated.
    """

    def __init__(self, **axes):
        self.axes = dict(axes)

    @property
    def size(self):
        ranks = 1
        for size in self.axes.values():
            ranks *= size
        return ranks

    def coordinates(self, rank):
        """{"dp": 2, "tp": 1}"""
        found = {}
        for name, size in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def box(self, shape, rank, split=(), only=None):
        """What `rank` holds of a tensor, as a tuple of slices; None where it holds none."""
        begin, local, holds = (c_int64 * len(shape))(), (c_int64 * len(shape))(), c_int()
        _library.call("gtrain_local_box", (c_int64 * len(shape))(*shape), len(shape), byref(self.sharding(split, only)),
                      rank, begin, local, byref(holds))
        return tuple(slice(b, b + n) for b, n in zip(begin, local)) if holds.value else None

    def sharding(self, split, only):
        """The structure of the C interface; it keeps what it points to."""
        def array(kind, items):
            return (kind * len(items))(*[kind(*item) for item in items])

        if isinstance(split, str) or not all(isinstance(item, (tuple, list)) and len(item) in (2, 3) for item in split):
            raise InvalidArgument(f'`split` lists pairs of a dimension and an axis, as [(1, "tp")], and is {split!r}')
        mesh = array(_library.MeshAxis, [(name.encode(), size) for name, size in self.axes.items()])
        splits = array(_library.Split, [(item[0], item[1].encode(), _rule(item)) for item in split])
        pins = array(_library.Only, [(axis.encode(), index) for axis, index in (only or {}).items()])
        return _library.Sharding(ctypes.sizeof(_library.Sharding), mesh, len(mesh), splits, len(splits), pins, len(pins))

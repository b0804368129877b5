"""Checkpointer: named arrays, saved beside training, committed whole or not at all."""
import ctypes
from ctypes import byref, c_int, c_int64, c_uint64, c_void_p

from . import _library
from ._buffers import NAMES, Buffer
from ._errors import FailedPrecondition, InvalidArgument
from .session import milliseconds


class Checkpointer:
    """Register state, restore, then save. Arrays are read and written in place: change them with `array[...] =`.

        checkpointer = gtrain.Checkpointer(session, every_steps=50)
        checkpointer.replicated(weights=w, cursor=step)         # equal on all ranks, saved once
        checkpointer.per_rank("rng", state)                     # this rank's own
        step = checkpointer.restore() or 0                      # None when there is no checkpoint
        ...
        checkpointer.save_if_due(step)
        checkpointer.wait()

    With lazy=True a save returns at once and the arrays are copied while the step computes with them; call fence() in
    each step before the optimiser changes them.

    Without `uri` the job file's `checkpoint:` says where ($GTRAIN_CHECKPOINT_URI); its numbers win over those here.
    """

    def __init__(self, session, uri=None, keep=0, every_steps=0, every_seconds=0.0, commit_timeout=600.0, lazy=False):
        self._handle = c_void_p()
        self._session = session
        self._buffers = {}
        options = _library.CheckpointOptions(
            size=ctypes.sizeof(_library.CheckpointOptions), uri=None if uri is None else str(uri).encode(),
            keep=keep, every_steps=every_steps, every_seconds=every_seconds,
            commit_timeout_ms=milliseconds(commit_timeout), lazy=int(lazy))
        _library.call("gtrain_checkpointer_open", session.handle, byref(options), byref(self._handle))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()

    def close(self):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            _library.load().gtrain_checkpointer_free(handle)
        self._buffers = {}  # after the library let go of them

    @property
    def handle(self):
        if not self._handle:
            raise FailedPrecondition("the checkpointer is closed")
        return self._handle

    def replicated(self, arrays=None, /, **more):
        """Registers arrays that are equal on all ranks, by name: a dict, keywords, or both."""
        for name, array in {**(arrays or {}), **more}.items():
            buffer = self._claim(name, array)
            shape = (c_int64 * len(buffer.shape))(*buffer.shape)
            _library.call("gtrain_checkpointer_add_replicated", self.handle, name.encode(), buffer.address, shape,
                          len(buffer.shape), buffer.dtype)
            self._buffers[name] = buffer

    def sharded(self, name, array, shape, mesh, split=(), only=None, dtype=None):
        """Registers this rank's part of a tensor of the global `shape`: array.shape is that of mesh.box(...).

        `array` is None, with its dtype by name, where this rank holds nothing. Every rank registers every tensor. It is
        restored at any other world size and under any other layout.
        """
        buffer = None if array is None else self._claim(name, array)
        box = mesh.box(shape, self._session.rank, split, only)
        mine = None if box is None else tuple(s.stop - s.start for s in box)
        if buffer is not None and buffer.shape != mine:
            raise InvalidArgument(f"{name}: the array has the shape {buffer.shape}, this rank holds {mine or 'nothing'}")
        code = buffer.dtype if buffer is not None else NAMES.get(dtype)
        if code is None:
            raise InvalidArgument(f"{name}: without an array, dtype is one of " + ", ".join(NAMES))
        _library.call("gtrain_checkpointer_add_sharded", self.handle, name.encode(), buffer and buffer.address,
                      (c_int64 * len(shape))(*shape), len(shape), byref(mesh.sharding(split, only)), code)
        self._buffers[name] = buffer

    def per_rank(self, name, data):
        """Registers state of this rank alone; the same rank number gets it back."""
        buffer = self._claim(name, data)
        _library.call("gtrain_checkpointer_add_per_rank", self.handle, name.encode(), buffer.address, buffer.bytes)
        self._buffers[name] = buffer

    def restore(self):
        """Collective. Loads the newest intact checkpoint into the registered arrays; its step, or None."""
        step = c_int64()
        _library.call("gtrain_checkpointer_restore", self.handle, byref(step))
        return None if step.value < 0 else step.value

    @property
    def restored_bytes(self):
        """(bytes of this rank's state, bytes read from storage for them) of the last restore."""
        needed, read = c_uint64(), c_uint64()
        _library.call("gtrain_checkpointer_restored_bytes", self.handle, byref(needed), byref(read))
        return needed.value, read.value

    def save(self, step):
        """Collective. Copies the state and returns; False when skipped because the last save is still being written."""
        saved = c_int()
        _library.call("gtrain_checkpointer_save", self.handle, int(step), byref(saved))
        return bool(saved.value)

    def save_if_due(self, step):
        """Collective. Saves when the policy says so, and once when a machine of the job is about to be taken away; call it
        after every step. True when it saved."""
        saved = c_int()
        _library.call("gtrain_checkpointer_save_if_due", self.handle, int(step), self._session.communicator.handle,
                      byref(saved))
        return bool(saved.value)

    def fence(self):
        """With lazy=True: waits until the last save's copy is complete. Without it the next save gives that one up."""
        _library.call("gtrain_checkpointer_fence", self.handle)

    def wait(self, timeout=600.0):
        """Until the last save is committed; raises its error."""
        _library.call("gtrain_checkpointer_wait", self.handle, milliseconds(timeout))

    @property
    def last_committed(self):
        """Step of the newest commit this process knows of, or None."""
        step = c_int64()
        _library.call("gtrain_checkpointer_last_committed", self.handle, byref(step))
        return None if step.value < 0 else step.value

    def _claim(self, name, data):
        if name in self._buffers:
            raise InvalidArgument(f"{name} is registered twice")
        return Buffer(data)

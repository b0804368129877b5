"""Checkpointer: named arrays, saved beside training, committed whole or not at all."""
import ctypes
from ctypes import byref, c_int, c_int64, c_uint64, c_void_p

from . import _library
from ._buffers import Buffer, code_of
from ._errors import FailedPrecondition, GtrainError, InvalidArgument
from .session import milliseconds


_RULES = {"drop": 0, "keep": 1, "merge": 2}


def _rule(name):
    if name not in _RULES:
        raise InvalidArgument(f"no such rule: {name}; there are " + ", ".join(_RULES))
    return _RULES[name]


def _int64s(numbers):
    return (c_int64 * len(numbers))(*numbers)


class Checkpointer:
    """Register state, restore, then save. Arrays are read and written in place: change them with `array[...] =`.

        checkpointer = gtrain.Checkpointer(session, every_steps=50)
        checkpointer.replicated(weights=w, cursor=step)         # equal on all ranks, saved once
        checkpointer.per_rank("cursor", state)                  # this rank's own
        checkpointer.bytes("loader", save=lambda: pickle.dumps(loader.state()), load=lambda b: loader.set(pickle.loads(b)))
        step = checkpointer.restore() or 0                      # None when there is no checkpoint
        ...
        checkpointer.save_if_due(step)
        checkpointer.wait()

    With lazy=True a save returns at once and the arrays are copied while the step computes with them; call fence() in
    each step before the optimiser changes them.

    read_only=True opens to look, beside a program that saves there: restore() works, saves raise FailedPrecondition,
    nothing is written. takeover=True takes the directory from another program that is alive, whose next save fails.
    restore() passes over at most `max_rollback` damaged checkpoints. `verify_replicas`, "off", "first" or "every N"
    (without it every 100): in which saves ranks compare what they hold alike.

    Without `uri` the job file's `checkpoint:` says where ($GTRAIN_CHECKPOINT_URI); its numbers win over those here.
    """

    def __init__(self, session, uri=None, keep=0, every_steps=0, every_seconds=0.0, commit_timeout=600.0, lazy=False,
                 read_only=False, takeover=False, max_rollback=1, verify_replicas=None):
        self._handle = c_void_p()
        self._session = session
        self._buffers = {}
        self._raised = None  # by a function of the program that the library called
        options = _library.CheckpointOptions(
            size=ctypes.sizeof(_library.CheckpointOptions), uri=None if uri is None else str(uri).encode(),
            keep=keep, every_steps=every_steps, every_seconds=every_seconds,
            commit_timeout_ms=milliseconds(commit_timeout), lazy=int(lazy),
            verify_replicas=None if verify_replicas is None else str(verify_replicas).encode(),
            max_rollback=max_rollback if max_rollback != 0 else -1, read_only=int(read_only), takeover=int(takeover))
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
        """Registers arrays that are equal on all ranks, by name: a dict, keywords, or both.

        (array, "bfloat16") says what the elements of an array are that does not know it.
        """
        for name, array in {**(arrays or {}), **more}.items():
            buffer = self._claim(name, *array) if isinstance(array, tuple) else self._claim(name, array)
            _library.call("gtrain_checkpointer_add_replicated", self.handle, name.encode(), buffer.address, buffer.bytes,
                          _int64s(buffer.shape), len(buffer.shape), buffer.dtype)
            self._buffers[name] = buffer

    def sharded(self, name, array, shape, mesh, split=(), only=None, dtype=None):
        """Registers this rank's part of a tensor of the global `shape`: array.shape is that of mesh.box(...).

        `array` is None, with its dtype by name, where this rank holds nothing. Every rank registers every tensor. It is
        restored at any other world size and under any other layout.
        """
        buffer = None if array is None else self._claim(name, array, dtype)
        box = mesh.box(shape, self._session.rank, split, only)
        mine = None if box is None else tuple(s.stop - s.start for s in box)
        if buffer is not None and buffer.shape != mine:
            raise InvalidArgument(f"{name}: the array has the shape {buffer.shape}, this rank holds {mine or 'nothing'}")
        _library.call("gtrain_checkpointer_add_sharded", self.handle, name.encode(), *self._memory(buffer),
                      _int64s(shape), len(shape), byref(mesh.sharding(split, only)),
                      code_of(dtype) if buffer is None else buffer.dtype)
        self._buffers[name] = buffer

    def boxed(self, name, array, shape, begin, dtype=None):
        """Registers this rank's box of a tensor of the global `shape`: its corner is `begin`, its shape array.shape.

        For cuts that no mesh describes. `array` is None, with its dtype by name, where this rank holds nothing. Boxes of
        two ranks are equal or have nothing in common, and together they are the whole tensor; the first restore or save
        says which ranks break that. It is restored under any other layout.
        """
        buffer = None if array is None else self._claim(name, array, dtype)
        local = (0,) * len(shape) if buffer is None else buffer.shape
        begin = (0,) * len(shape) if buffer is None else begin
        if len(local) != len(shape) or len(begin) != len(shape):
            raise InvalidArgument(f"{name}: the tensor has {len(shape)} dimensions, the array {len(local)} and begin "
                                  f"{len(begin)}")
        _library.call("gtrain_checkpointer_add_box", self.handle, name.encode(), *self._memory(buffer), _int64s(shape),
                      _int64s(begin), _int64s(local), len(shape), code_of(dtype) if buffer is None else buffer.dtype)
        self._buffers[name] = buffer

    def per_rank(self, name, data, rule="drop"):
        """Registers state of this rank alone; the same rank number gets it back.

        `rule` says what becomes of that of ranks which a smaller world has not: "drop", or "keep", carried along until
        there are so many ranks again.
        """
        buffer = self._claim(name, data)
        _library.call("gtrain_checkpointer_add_per_rank", self.handle, name.encode(), buffer.address, buffer.bytes,
                      _rule(rule))
        self._buffers[name] = buffer

    def bytes(self, name, save, load, rule="drop"):
        """Registers bytes of this rank alone whose number may change: `save()` gives them at each save, `load(bytes)`
        takes them at a restore. 64 MiB a rank at most; what they raise comes out of save and restore.

        With the rule "merge", `load` is called again with those of ranks that a smaller world has not.
        """
        if name in self._buffers:
            raise InvalidArgument(f"{name} is registered twice")
        saved = [b""]  # alive until the library has copied it

        def give(_, data, count):
            try:
                saved[0] = bytes(save())
            except BaseException as error:  # it must not cross the library
                return self._note(error)
            data[0] = ctypes.cast(ctypes.c_char_p(saved[0]), c_void_p).value
            count[0] = len(saved[0])
            return 0

        def take(_, data, count):
            try:
                load(ctypes.string_at(data, count) if count else b"")
            except BaseException as error:
                return self._note(error)
            return 0

        functions = (_library.BYTES_SAVE(give), _library.BYTES_LOAD(take))
        _library.call("gtrain_checkpointer_add_bytes", self.handle, name.encode(), *functions, None, _rule(rule))
        self._buffers[name] = functions

    def add_reducer(self, reducer):
        """What its compression carries over from step to step is saved and restored with the rest. Before both."""
        _library.call("gtrain_checkpointer_add_reducer", self.handle, reducer.handle)

    def add_samples(self, samples):
        """Where training is in its data (Samples) is saved and restored with the rest. Before both. Once for each name.

        restore() raises InvalidArgument where the checkpoint was trained with other samples, seed, shuffle or drop_last;
        epochs and global_batch may be others.
        """
        _library.call("gtrain_checkpointer_add_samples", self.handle, samples.handle)

    def restore(self, may_be_missing=()):
        """Collective. Loads the newest intact checkpoint into the registered arrays; its step, or None.

        Registered tensors that it lacks are an error, but for those whose name matches one of `may_be_missing`
        ("lora_*"), which are left as they are.
        """
        step = c_int64()
        names = [name.encode() for name in may_be_missing]
        options = _library.RestoreOptions(ctypes.sizeof(_library.RestoreOptions), (ctypes.c_char_p * len(names))(*names),
                                          len(names))
        self._call("gtrain_checkpointer_restore", byref(options), byref(step))
        return None if step.value < 0 else step.value

    @property
    def restored_bytes(self):
        """(bytes of this rank's state, bytes read from storage for them) of the last restore."""
        needed, read = c_uint64(), c_uint64()
        _library.call("gtrain_checkpointer_restored_bytes", self.handle, byref(needed), byref(read))
        return needed.value, read.value

    def save(self, step):
        """Collective. Copies the state and returns; False when skipped because the last save is still being written. Nothing
        is saved a second time where save_if_due saved this step last: one step is one commit."""
        saved = c_int()
        self._call("gtrain_checkpointer_save", int(step), byref(saved))
        return bool(saved.value)

    def save_if_due(self, step):
        """Collective. Saves when the policy says so, and once when a machine of the job is about to be taken away; call it
        after every step. True when it saved."""
        saved = c_int()
        self._call("gtrain_checkpointer_save_if_due", int(step), self._session.communicator.handle, byref(saved))
        return bool(saved.value)

    @property
    def stop_agreed(self):
        """Whether the last save_if_due found that the user asked to stop, equal on all ranks: it has saved the state, so
        leave the loop, wait, save the same step and exit with 0."""
        out = c_int()
        _library.call("gtrain_checkpointer_stop_agreed", self.handle, byref(out))
        return bool(out.value)

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

    def _claim(self, name, data, dtype=None):
        if name in self._buffers:
            raise InvalidArgument(f"{name} is registered twice")
        return Buffer(data, dtype)

    @staticmethod
    def _memory(buffer):
        return (None, 0) if buffer is None else (buffer.address, buffer.bytes)

    def _note(self, error):
        self._raised = error
        return 2  # GTRAIN_UNKNOWN

    def _call(self, name, *arguments):
        """What a function of the program raised meanwhile is raised as it is."""
        self._raised = None
        try:
            _library.call(name, self.handle, *arguments)
        except GtrainError as error:
            raised, self._raised = self._raised, None
            if raised is None:
                raise
            raise raised from error

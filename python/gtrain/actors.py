"""Actors: objects of Python classes that live in any rank of a job, to which calls come one at a time.

    import sys
    from gtrain import actors

    @actors.actor
    class Counter:
        def __init__(self, start):
            self.count = start

        def add(self, by):
            self.count += by
            return self.count

    async def drive(cluster):
        counter = await cluster.spawn(Counter, 40)
        print(await counter.add(2))

    sys.exit(actors.main(drive))

By hand all actors are in the one process; `gtrain launch -n 8 -- python3 program.py` has them on eight ranks, of which rank 0 drives.
What one can rely on is what docs/actors.md says of C++: deadlines, order, exactly once, supervision, kept state.

Arguments and results are values and are copied: None, bool, int, float, str, bytes, lists, dicts, arrays of numpy, tensors on the CPU
(which arrive as arrays) and references to actors. No code and no pickle ever travels.
"""
import asyncio
import concurrent.futures
import contextvars
import ctypes
import inspect
import sys
import threading
import time
import traceback
from ctypes import byref, c_int, c_void_p

from . import _library, _objects, _values
from ._buffers import Buffer
from ._errors import FailedPrecondition, GtrainError, InvalidArgument, Unavailable, error_for
from .session import EXIT_RUN_ME_AGAIN, Session

_SPREADS = {"processes": 0, "nodes": 1, "pack": 2, "here": 3}
_STATUS_OK, _STATUS_UNKNOWN = 0, 2
_REF_CLASS, _REF = "gtrain.actor", "gtrain.reference"
_OBJECT_KEYS = dict.fromkeys(("gtrain.object", "gtrain.dtype", "gtrain.shape")).keys()

_deadline = contextvars.ContextVar("gtrain_deadline", default=None)  # of the call that this code runs for
_classes = {}  # those of this program, by name
_engine = None  # of this process
_statuses = {}  # numbers by name


def readonly(method):
    """A method that changes nothing: a kept actor is not saved for it."""
    method._gtrain_readonly = True
    return method


def actor(cls):
    """Makes a class one of actors. Its public methods may be called, plain ones or coroutines. What a method raises is its caller's
    error: a GtrainError (gtrain.InvalidArgument, ...) alone, anything else makes the actor anew from the arguments of its spawn.
    A class with `get_state(self)` and `set_state(self, state)` can be kept (spawn(keep=True))."""
    if not inspect.isclass(cls):
        raise InvalidArgument(f"{cls!r} is no class")
    methods = [name for name, method in inspect.getmembers(cls, inspect.isfunction)
               if not name.startswith("_") and name not in ("get_state", "set_state")]
    if not methods:
        raise InvalidArgument(f"{cls.__name__} has no public methods: what would one call?")
    clashing = sorted(set(methods) & {"within", "close", "reference"})
    if clashing:
        raise InvalidArgument(f"{cls.__name__}.{clashing[0]}: references to actors have that name themselves")
    cls._gtrain_methods = methods
    _classes[cls.__name__] = cls
    return cls


def _signature(cls):
    parts = [str(inspect.signature(cls.__init__)) if cls.__init__ is not object.__init__ else "(self)"]
    parts += [name + str(inspect.signature(getattr(cls, name))) for name in cls._gtrain_methods]
    return "python: " + "; ".join(parts)


def _class_of(cls):
    if inspect.isclass(cls) and _classes.get(cls.__name__) is cls:
        return cls
    raise InvalidArgument(f"{getattr(cls, '__name__', cls)!r} is no class of actors here: @actors.actor stands above one, and two of "
                          "one name are one too many")


# ---- values


def _pack(value):
    def of_other(other):
        if isinstance(other, Ref):
            return {_REF_CLASS: other._name, _REF: other._bytes}
        return other._value() if isinstance(other, Object) else None
    return _values.pack(value, of_other)


def _unpack(address, size):
    def of_map(found):
        if found.keys() == {_REF_CLASS, _REF}:
            return Ref(found[_REF_CLASS], found[_REF])
        if found.keys() == _OBJECT_KEYS:
            return Object(*(found[key] for key in _OBJECT_KEYS))
        return found
    return _values.unpack(address, size, of_map)


# ---- calls


class Call:
    """What a call will come to: `await` it, or `.result(timeout)` in a thread that runs no actor and no coroutine. An error is raised
    there. asyncio.wait and the like take `asyncio.ensure_future(call)`. One that is dropped leaves the call to itself."""

    def __init__(self):
        self._future = concurrent.futures.Future()

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout):
        if _library.load().gtrain_actors_inside() or _on_loop():
            raise FailedPrecondition("an actor and a coroutine do not wait in result(): `async def` the method, and await the call")
        return self._future.result(timeout)

    def done(self):
        return self._future.done()


_waiting = {}  # number of a call: it, and what its answer becomes
_waiting_lock = threading.Lock()
_numbers = iter(range(1, 1 << 62))


def _begin(call, become):
    with _waiting_lock:
        number = next(_numbers)
        _waiting[number] = call, become
    return number


@_library.REPLY
def _reply(user, status, message, data, size):
    with _waiting_lock:
        call, become = _waiting.pop(user)
    try:
        if status != _STATUS_OK:
            name = _library.load().gtrain_status_name(status).decode()
            call._future.set_exception(error_for(name, (message or b"").decode(errors="replace")))
        else:
            call._future.set_result(become(data, size))
    except concurrent.futures.InvalidStateError:
        pass  # its caller has cancelled it
    except Exception as error:  # pylint: disable=broad-except
        call._future.set_exception(error)


@_library.OBJECT_REPLY
def _object_reply(user, status, message, handle):
    _reply(user, status, message, handle, 0)


@_library.REPLY
def _reply_to_nobody(user, status, message, data, size):
    if status != _STATUS_OK:
        print(f"gtrain: a call whose result nobody awaits failed: {(message or b'').decode(errors='replace')}", file=sys.stderr)


def _milliseconds(timeout):
    if not 0 < timeout < 1e9:
        raise InvalidArgument(f"a timeout of {timeout} s: a call has one above 0, and an end")
    deadline = _deadline.get()
    if deadline is not None:
        timeout = min(timeout, deadline - time.monotonic())
    return max(1, int(timeout * 1000))


class _Method:
    def __init__(self, ref, name):
        self._ref, self._name = ref, name

    def __call__(self, *args, **kwargs):
        return self._ref._call(self._name, args, kwargs, tell=False)

    def tell(self, *args, **kwargs):
        """A call of which nobody hears what it came to; that it failed is said on stderr."""
        self._ref._call(self._name, args, kwargs, tell=True)


class Ref:
    """Whom to call: `await ref.method(...)`. It owns nothing, and is a value: it travels in arguments and results."""

    def __init__(self, name, reference, timeout=60.0):
        self._name, self._bytes, self._timeout = name, reference, timeout

    def within(self, timeout):
        """The same, whose calls have so many seconds; 60 unless it is said, and within a call never more than that one has left."""
        return Ref(self._name, self._bytes, timeout)

    @property
    def reference(self):
        return Ref(self._name, self._bytes, self._timeout)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        cls = _classes.get(self._name)
        if cls is None:
            raise InvalidArgument(f"{self._name} is no class of actors in this program")
        if name not in cls._gtrain_methods:
            raise AttributeError(f"actors of class {self._name} have no method {name}; they have {', '.join(cls._gtrain_methods)}")
        return _Method(self, name)

    def __copy__(self):
        return self.reference  # also of an Owner: there is one of each

    def __deepcopy__(self, memo):
        return self.reference

    def __reduce__(self):
        raise TypeError("a reference to an actor travels in arguments and results, and is not pickled")

    def __eq__(self, other):
        return isinstance(other, Ref) and (self._name, self._bytes) == (other._name, other._bytes)

    def __hash__(self):
        return hash((self._name, self._bytes))

    def __repr__(self):
        return f"<reference to a {self._name}>"

    def _call(self, name, args, kwargs, tell):
        index = _classes[self._name]._gtrain_methods.index(name)
        data = _pack([list(args), kwargs])
        timeout, engine = _milliseconds(self._timeout), _running()
        call = None if tell else Call()
        _library.load().gtrain_actors_call(engine, self._bytes, len(self._bytes), index, data, len(data), timeout,
                                           _reply_to_nobody if tell else _reply, None if tell else _begin(call, _unpack))
        return call


class Owner(Ref):
    """Owns an actor, which ends with it: calls that have not begun are CANCELLED then. `close()` ends it sooner."""

    def close(self):
        if self._bytes and _engine:
            _library.load().gtrain_actors_end(_engine, self._bytes, len(self._bytes), b"its owner let it go")
        self._bytes = b""

    def __del__(self):
        self.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()


# ---- objects


class Object:
    """Names an array that stays where it was made: `await it.read()` gives it, without a copy on the same machine. It owns nothing, and
    is a value: it travels in arguments and results."""

    def __init__(self, reference, dtype, shape):
        self._bytes, self.dtype, self.shape = reference, dtype, tuple(shape)

    def _value(self):
        return dict(zip(_OBJECT_KEYS, (self._bytes, self.dtype, list(self.shape))))

    def read(self, timeout=60.0):
        """`await` it for an array of numpy that is read-only. It keeps the memory for as long as it lives, also when the owner has let
        it go. NOT_FOUND: it has. UNAVAILABLE: its process is gone."""
        call, engine, milliseconds = Call(), _running(), _milliseconds(timeout)
        _library.load().gtrain_object_read(engine, self._bytes, len(self._bytes), milliseconds, _object_reply,
                                           _begin(call, lambda handle, _: _objects.view(handle, self.dtype, self.shape)))
        return call

    def __copy__(self):
        return Object(self._bytes, self.dtype, self.shape)  # also of an owner: there is one of each

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        raise TypeError("an object travels in arguments and results, and is not pickled")

    def __repr__(self):
        return f"<object of {self.dtype} {list(self.shape)}>"


class ObjectOwner(Object):
    """Owns an object, which is no more when this is closed, or gone. `let_go(after=60)`: it is there for that long without an owner, as
    a result whose reader is still to come."""

    def __init__(self, handle, *names):
        super().__init__(*names)
        self._handle = handle

    def let_go(self, after=0.0):
        handle, self._handle = self._handle, None
        if handle:
            _library.load().gtrain_object_release(handle, int(after * 1000))
        return Object(self._bytes, self.dtype, self.shape)

    def close(self):
        self.let_go()

    def __del__(self):
        self.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()


class Cluster:
    """The actors of a job, as one of its processes sees them."""

    @property
    def processes(self):
        """Those that may have actors, this one counted."""
        return _library.load().gtrain_actors_processes(_running())

    def spawn(self, cls, *args, on="processes", rank=None, name=None, restarts=3, keep=False, concurrency=1, detached=False,
              timeout=60.0, **kwargs):
        """`await` it for the Owner. Where: `on` is "processes" (that with the fewest of this owner's), "nodes", "pack", "here"; or
        `rank`. `name`: all ranks find it by that. `restarts`: so often it is made anew within an hour. `keep`: its state outlives
        its process, and is with its owner before anybody hears what a call came to. `concurrency`: so many of its calls run at a
        time, on as many threads. `detached`: it is nobody's and ends with the job, or by `end`; `await` it for a Ref then."""
        cls = _class_of(cls)
        if on not in _SPREADS:
            raise InvalidArgument(f"on={on!r}: it is one of {', '.join(_SPREADS)}")
        if restarts < 0 or concurrency < 1:
            raise InvalidArgument(f"restarts={restarts}, concurrency={concurrency}: restarts are 0 or more (a large number for any), and an "
                                  "actor runs one call at a time at least")
        if rank is not None and rank < 0:
            raise InvalidArgument(f"rank={rank}: ranks are numbered from 0")
        options = _library.SpawnOptions(size=ctypes.sizeof(_library.SpawnOptions), restarts=restarts, spread=_SPREADS[on],
                                        rank=-1 if rank is None else rank, keep=int(keep), concurrency=concurrency,
                                        detached=int(detached), apart=0,
                                        name=None if name is None else name.encode())
        data = _pack([list(args), kwargs])
        call, engine, milliseconds = Call(), _running(), _milliseconds(timeout)
        _library.load().gtrain_actors_spawn(engine, cls.__name__.encode(), byref(options), data, len(data), milliseconds, _reply,
                                            _begin(call, lambda at, size: (Ref if detached else Owner)(
                                                cls.__name__, ctypes.string_at(at, size))))
        return call

    def end(self, ref, timeout=60.0):
        """Ends a detached actor; `await` it. INVALID_ARGUMENT: it is not detached. NOT_FOUND: it is no more."""
        call, engine, milliseconds = Call(), _running(), _milliseconds(timeout)
        _library.load().gtrain_actors_end_detached(engine, ref._bytes, len(ref._bytes), milliseconds, _reply,
                                                   _begin(call, lambda at, size: None))
        return call

    def put(self, array, timeout=60.0):
        """`await` it for the ObjectOwner of an array of numpy, a tensor of torch on the CPU, or a buffer: one copy, into memory that all
        processes of this machine read. RESOURCE_EXHAUSTED: there was no room until then (`main(object_bytes=...)`)."""
        array = _values.plain(array)
        if isinstance(array, (bool, int, float)):
            raise InvalidArgument(f"{array!r} is no array: numbers travel in calls")
        buffer = Buffer(array, writable=False)
        call, engine, milliseconds = Call(), _running(), _milliseconds(timeout)

        def become(handle, _):
            reference = _objects.fill(handle, buffer)
            return ObjectOwner(handle, reference, _objects.NAME_OF[buffer.dtype], buffer.shape)
        _library.load().gtrain_object_create(engine, buffer.bytes, milliseconds, _object_reply, _begin(call, become))
        return call

    def find(self, cls, name, timeout=60.0):
        """`await` it for a Ref of the actor that some rank has spawned with this name. GtrainError NOT_FOUND: there is none now."""
        cls = _class_of(cls)
        call, engine, milliseconds = Call(), _running(), _milliseconds(timeout)
        _library.load().gtrain_actors_find(engine, name.encode(), cls.__name__.encode(), milliseconds, _reply,
                                           _begin(call, lambda at, size: Ref(cls.__name__, ctypes.string_at(at, size))))
        return call


def cluster():
    """That of this process, for the methods of actors: what they spawn ends with their Owners."""
    _running()
    return Cluster()


def _running():
    if not _engine:
        raise FailedPrecondition("there is no cluster: gtrain.actors.main makes it")
    return _engine


# ---- the classes behind the C interface


def _number_of(error):
    """The status of what was raised."""
    if not _statuses:
        _statuses.update({_library.load().gtrain_status_name(number).decode(): number for number in range(17)})
    return _statuses.get(error.status, _STATUS_UNKNOWN)


def _said(error):
    return f"{type(error).__name__}: {error}"


class _Hosted:
    """A class as the library calls it. Nothing here raises: the library's threads know no exceptions."""

    def __init__(self, cls):
        self._cls = cls
        self._objects = {}
        self._last = 0
        self._lock = threading.Lock()
        keeps = callable(getattr(cls, "get_state", None)) and callable(getattr(cls, "set_state", None))
        constant = [getattr(getattr(cls, name), "_gtrain_readonly", False) for name in cls._gtrain_methods]
        self._constant = (ctypes.c_uint8 * len(constant))(*constant)
        self.type = _library.ActorClass(
            size=ctypes.sizeof(_library.ActorClass), name=cls.__name__.encode(), signature=_signature(cls).encode(),
            methods=len(cls._gtrain_methods), user=None, create=_library.ACTOR_CREATE(self._create),
            destroy=_library.ACTOR_DESTROY(self._destroy), call=_library.ACTOR_CALL(self._call),
            save=_library.ACTOR_SAVE(self._save) if keeps else _library.ACTOR_SAVE(),
            load=_library.ACTOR_LOAD(self._load) if keeps else _library.ACTOR_LOAD(),
            constant=ctypes.cast(self._constant, ctypes.POINTER(ctypes.c_uint8)))

    def _fail(self, error, out):
        out.contents.message = _said(error).encode(errors="replace")[:1000]
        return _number_of(error) if isinstance(error, GtrainError) else _STATUS_UNKNOWN

    def _create(self, user, data, size, out, error):
        try:
            args, kwargs = _unpack(data, size)
            made = self._cls(*args, **kwargs)
            with self._lock:
                self._last += 1
                self._objects[self._last] = made
                out[0] = self._last
            return _STATUS_OK
        except BaseException as raised:  # pylint: disable=broad-except
            return self._fail(raised, error)

    def _destroy(self, user, number):
        try:
            with self._lock:
                made = self._objects.pop(number, None)
            del made  # its owners let go what they have
        except BaseException:  # pylint: disable=broad-except
            traceback.print_exc()

    def _save(self, user, number, packer, error):
        try:
            data = _pack(self._objects[number].get_state())
            _library.load().gtrain_pack_bytes(packer, data, len(data))
            return _STATUS_OK
        except BaseException as raised:  # pylint: disable=broad-except
            return self._fail(raised, error)

    def _load(self, user, number, data, size, error):
        try:
            state = _values.unpack(data, size)
            buffer = ctypes.create_string_buffer(state, len(state))
            self._objects[number].set_state(_unpack(ctypes.addressof(buffer), len(state)))
            return _STATUS_OK
        except BaseException as raised:  # pylint: disable=broad-except
            return self._fail(raised, error)

    def _call(self, user, number, index, data, size, call):
        name = self._cls._gtrain_methods[index]
        try:
            library = _library.load()
            deadline = time.monotonic() + library.gtrain_call_left_ms(call) / 1000
            try:
                args, kwargs = _unpack(data, size)
            except Exception as error:  # pylint: disable=broad-except
                raise InvalidArgument(f"an argument of {self._cls.__name__}.{name} is wrong: {_said(error)}") from error
            method = getattr(self._objects[number], name)
            if inspect.iscoroutinefunction(method):
                asyncio.run_coroutine_threadsafe(self._run(method, args, kwargs, deadline, call, name), _loop())
                return
            before = _deadline.set(deadline)
            try:
                result = method(*args, **kwargs)
            finally:
                _deadline.reset(before)
            self._answer(call, result)
        except BaseException as raised:  # pylint: disable=broad-except
            self._refuse(call, name, raised)

    async def _run(self, method, args, kwargs, deadline, call, name):
        _deadline.set(deadline)
        try:
            self._answer(call, await method(*args, **kwargs))
        except BaseException as raised:  # pylint: disable=broad-except
            self._refuse(call, name, raised, crashes=False)

    def _answer(self, call, result):
        try:
            data = _pack(result)
        except Exception as error:  # pylint: disable=broad-except
            if isinstance(error, GtrainError):
                raise
            raise InvalidArgument(f"the result is no value of an actor: {_said(error)}") from error
        _library.load().gtrain_call_reply(call, _STATUS_OK, b"", 0, data, len(data))

    def _refuse(self, call, name, raised, crashes=True):
        if isinstance(raised, GtrainError):
            status, text, crashed = _number_of(raised), str(raised), 0
        else:
            status, text, crashed = _STATUS_UNKNOWN, f"{self._cls.__name__}.{name} raised {_said(raised)}", int(crashes)
            print("gtrain: " + "".join(traceback.format_exception(type(raised), raised, raised.__traceback__)), end="", file=sys.stderr)
        _library.load().gtrain_call_reply(call, status, text.encode(errors="replace")[:4000], crashed, None, 0)


# ---- one event loop a process, for the driver and for methods that are coroutines

_the_loop = None
_loop_lock = threading.Lock()


def _loop():
    global _the_loop
    with _loop_lock:
        if _the_loop is None:
            _the_loop = asyncio.new_event_loop()
            threading.Thread(target=_the_loop.run_forever, name="gtrain-actors", daemon=True).start()
        return _the_loop


def _on_loop():
    try:
        asyncio.get_running_loop()
        return True
    except RuntimeError:
        return False


def _await_over(driving):
    """Until the driver has ended; one that nobody can end any more is given 10 s, and then Unavailable is raised."""
    while not concurrent.futures.wait([driving], 0.2).done:
        try:
            _library.call("gtrain_actors_await_over", _engine, 1)
        except Unavailable:
            if not concurrent.futures.wait([driving], 10).done:
                driving.cancel()
                raise
        except GtrainError:
            pass  # the generation goes on


def main(drive, threads=0, mailbox_calls=0, mailbox_bytes=0, object_bytes=0, join_timeout=600.0):
    """Runs a program of actors: `drive(cluster)`, a coroutine, in one rank, and hosts in all. Returns the exit code that gtrain
    understands: 0, when the driver has ended well; 75 to be run again; 1 with what the driver raised on stderr."""
    if not inspect.iscoroutinefunction(drive):
        raise InvalidArgument("the driver is `async def drive(cluster)`")
    try:
        with Session(join_timeout=join_timeout, stay=True) as session:
            return _main(session, drive, _library.ActorsOptions(
                size=ctypes.sizeof(_library.ActorsOptions), threads=threads, mailbox_calls=mailbox_calls,
                mailbox_bytes=mailbox_bytes, object_bytes=object_bytes))
    except Unavailable as error:
        print(f"gtrain: {error}", file=sys.stderr)
        return EXIT_RUN_ME_AGAIN


def _main(session, drive, options):
    global _engine
    engine = c_void_p()
    _library.call("gtrain_actors_open", session.handle, byref(options), byref(engine))
    hosted = [_Hosted(cls) for cls in _classes.values()]  # as long as the library may call them
    try:
        for one in hosted:
            _library.call("gtrain_actors_register", engine, byref(one.type))
        _engine = engine
        _library.call("gtrain_actors_join", engine)
        drives = c_int()
        _library.call("gtrain_actors_await_turn", engine, byref(drives))
        if not drives.value:
            return 0
        driving = asyncio.run_coroutine_threadsafe(drive(Cluster()), _loop())
        _await_over(driving)
        try:
            driving.result()
        except Unavailable:
            raise
        except Exception:  # pylint: disable=broad-except
            traceback.print_exc()
            return 1
        _library.call_plain("gtrain_actors_finish", engine)
        return 0
    finally:
        _library.call_plain("gtrain_actors_free", engine)
        _engine = None
        hosted.clear()

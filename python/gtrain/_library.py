"""Finds libgtrain.so and declares its functions: the one place that knows include/gtrain/gtrain_c.h."""
import atexit
import ctypes
import os
import sys
import threading
from ctypes import (POINTER, byref, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32,
                    c_uint64, c_void_p)

from ._errors import InvalidArgument, LibraryNotFound, error_for

ABI = 3  # GTRAIN_C_ABI of the header this file was written from


class Error(ctypes.Structure):
    _fields_ = [("message", c_char * 1024)]


class CheckpointOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("uri", c_char_p), ("keep", c_int), ("every_steps", c_int64),
                ("every_seconds", c_double), ("commit_timeout_ms", c_int64), ("lazy", c_int),
                ("verify_replicas", c_char_p), ("max_rollback", c_int), ("read_only", c_int), ("takeover", c_int)]


class MeshAxis(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("size", c_int64)]


class Split(ctypes.Structure):
    _fields_ = [("dimension", c_int32), ("axis", c_char_p), ("rule", c_int32)]


class Only(ctypes.Structure):
    _fields_ = [("axis", c_char_p), ("index", c_int64)]


class Sharding(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("mesh", POINTER(MeshAxis)), ("axes", c_int), ("splits", POINTER(Split)),
                ("split_count", c_int), ("only", POINTER(Only)), ("only_count", c_int)]


class RestoreOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("may_be_missing", POINTER(c_char_p)), ("may_be_missing_count", c_int)]


class Compression(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("codec", c_int32), ("error_feedback", c_int32), ("residual_bfloat16", c_int32),
                ("rounding_seed", c_uint32), ("density", c_double), ("exact", c_int32), ("momentum", c_float),
                ("matrix_rank", c_int32), ("optimizer_momentum", c_float), ("warmup_steps", c_int32)]


class Gradient(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("count", c_size_t), ("shape", POINTER(c_int64)), ("dimensions", c_int)]


class ReducerOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("bucket_bytes", c_size_t), ("compress_from", c_size_t),
                ("compression", POINTER(Compression))]


class SamplesOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("samples", c_int64), ("epochs", c_int64),
                ("global_batch", c_int64), ("seed", c_uint64), ("in_order", c_int), ("drop_last", c_int),
                ("share", c_int), ("shares", c_int)]


class ElasticStep(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("done", c_int32), ("stopped", c_int32), ("step", c_int64), ("epoch", c_int64),
                ("batch", c_int64), ("samples", POINTER(c_int64)), ("sample_count", c_int64), ("steps", c_int64),
                ("share", c_int32), ("shares", c_int32)]


class ElasticPart(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("done", c_int32), ("virtual_rank", c_int64), ("seed", c_uint64),
                ("samples", POINTER(c_int64)), ("sample_count", c_int64)]


class SamplesPlace(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("step", c_int64), ("epoch", c_int64), ("offset", c_int64), ("batch", c_int64),
                ("steps", c_int64)]


class ReducedStep(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("bytes_sent", c_uint64), ("selected", c_size_t), ("wanted", c_size_t),
                ("clipped", c_size_t), ("early", c_size_t), ("momentum_travelled", c_int32),
                ("unused", POINTER(c_size_t)), ("unused_count", c_size_t)]


class Message(ctypes.Structure):
    _fields_ = [("kind", c_int), ("data", c_void_p), ("count", c_size_t), ("dtype", c_int), ("peer", c_int),
                ("tag", c_int), ("source", c_int), ("source_tag", c_int), ("received", c_size_t)]


class Value(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("kind", c_int32), ("dtype", c_int32), ("integer", c_int64), ("unsigned_integer", c_uint64),
                ("number", c_double), ("data", c_void_p), ("count", c_size_t)]


class Unpacker(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("data", c_void_p), ("left", c_size_t)]


class ActorsOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("threads", c_int32), ("mailbox_calls", c_int64), ("mailbox_bytes", c_int64),
                ("object_bytes", c_int64)]


class SpawnOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("restarts", c_int32), ("spread", c_int32), ("rank", c_int32), ("keep", c_int32),
                ("concurrency", c_int32), ("detached", c_int32), ("apart", c_uint64), ("name", c_char_p)]


_ERROR = POINTER(Error)
ACTOR_CREATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, POINTER(c_void_p), _ERROR)
ACTOR_DESTROY = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
ACTOR_CALL = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int32, c_void_p, c_size_t, c_void_p)
ACTOR_SAVE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, _ERROR)
ACTOR_LOAD = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t, _ERROR)
ACTOR_TASK = ctypes.CFUNCTYPE(None, c_void_p)
REPLY = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_void_p, c_size_t)
OBJECT_REPLY = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_void_p)


class ActorClass(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("signature", c_char_p), ("methods", c_int32), ("user", c_void_p),
                ("create", ACTOR_CREATE), ("destroy", ACTOR_DESTROY), ("call", ACTOR_CALL), ("save", ACTOR_SAVE),
                ("load", ACTOR_LOAD), ("constant", POINTER(ctypes.c_uint8))]


BYTES_SAVE = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(c_size_t))
BYTES_LOAD = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
LOG_FUNCTION = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

_HANDLE_OUT = POINTER(c_void_p)

# name: (result, arguments). Functions that return a gtrain_status end with the error buffer.
_FUNCTIONS = {
    "gtrain_abi": (c_int, []),
    "gtrain_version": (c_char_p, []),
    "gtrain_status_name": (c_char_p, [c_int]),
    "gtrain_set_log": (None, [LOG_FUNCTION, c_void_p]),
    "gtrain_session_join": (c_int, [c_int64, _HANDLE_OUT, _ERROR]),
    "gtrain_session_join_to_stay": (c_int, [c_int64, _HANDLE_OUT, _ERROR]),
    "gtrain_session_join_place_later": (c_int, [c_int64, _HANDLE_OUT, _ERROR]),
    "gtrain_session_rejoin": (c_int, [c_void_p, c_int64, _ERROR]),
    "gtrain_session_free": (None, [c_void_p]),
    "gtrain_session_rank": (c_int, [c_void_p]),
    "gtrain_session_local_rank": (c_int, [c_void_p]),
    "gtrain_session_world_size": (c_int, [c_void_p]),
    "gtrain_session_generation": (c_uint64, [c_void_p]),
    "gtrain_session_timeline": (c_uint64, [c_void_p]),
    "gtrain_session_mesh": (c_int, [c_void_p, POINTER(MeshAxis), c_int, POINTER(c_int), _ERROR]),
    "gtrain_session_managed": (c_int, [c_void_p]),
    "gtrain_session_job": (c_char_p, [c_void_p]),
    "gtrain_session_report": (c_int, [c_void_p, c_int64, POINTER(c_double), c_int64, _ERROR]),
    "gtrain_session_alive": (c_int, [c_void_p, _ERROR]),
    "gtrain_session_stop_requested": (c_int, [c_void_p, POINTER(c_int), _ERROR]),
    "gtrain_session_notice": (c_int, [c_void_p, POINTER(c_double), _ERROR]),
    "gtrain_communicator_create": (c_int, [c_void_p, c_int64, _HANDLE_OUT, _ERROR]),
    "gtrain_communicator_split": (c_int, [c_void_p, c_int, c_int, _HANDLE_OUT, _ERROR]),
    "gtrain_communicator_rank": (c_int, [c_void_p]),
    "gtrain_communicator_size": (c_int, [c_void_p]),
    "gtrain_communicator_stop_agreed": (c_int, [c_void_p, POINTER(c_int), _ERROR]),
    "gtrain_communicator_free": (None, [c_void_p]),
    "gtrain_communicator_abort": (c_int, [c_void_p, c_char_p, _ERROR]),
    "gtrain_all_reduce": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_broadcast": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_all_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_reduce_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, _HANDLE_OUT,
                                      _ERROR]),
    "gtrain_reduce": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_all_to_all": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_send": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_receive": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_exchange": (c_int, [c_void_p, POINTER(Message), c_size_t, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_all_gather_v": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t), c_int, c_void_p, _HANDLE_OUT,
                                    _ERROR]),
    "gtrain_reduce_scatter_v": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t), c_int, c_int, c_void_p,
                                        _HANDLE_OUT, _ERROR]),
    "gtrain_all_to_all_v": (c_int, [c_void_p, c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int,
                                    c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_allocate": (c_int, [c_void_p, c_size_t, _HANDLE_OUT, _ERROR]),
    "gtrain_deallocate": (c_int, [c_void_p, c_void_p, _ERROR]),
    "gtrain_communicator_set_timeout": (c_int, [c_void_p, c_int64, _ERROR]),
    "gtrain_barrier": (c_int, [c_void_p, c_void_p, _HANDLE_OUT, _ERROR]),
    "gtrain_compression_parse": (c_int, [c_char_p, POINTER(Compression), _ERROR]),
    "gtrain_reducer_create": (c_int, [c_void_p, POINTER(Gradient), c_size_t, POINTER(ReducerOptions), _HANDLE_OUT,
                                      _ERROR]),
    "gtrain_reducer_free": (None, [c_void_p]),
    "gtrain_reducer_gradient": (c_int, [c_void_p, c_size_t, POINTER(POINTER(c_float)), POINTER(c_size_t), _ERROR]),
    "gtrain_reducer_ready": (c_int, [c_void_p, c_size_t, _ERROR]),
    "gtrain_reducer_finish": (c_int, [c_void_p, POINTER(ReducedStep), _ERROR]),
    "gtrain_reducer_abort": (c_int, [c_void_p, c_char_p, _ERROR]),
    "gtrain_reducer_drop": (c_int, [c_void_p, _ERROR]),
    "gtrain_checkpointer_add_reducer": (c_int, [c_void_p, c_void_p, _ERROR]),
    "gtrain_elastic_open": (c_int, [c_void_p, POINTER(SamplesOptions), _HANDLE_OUT, _ERROR]),
    "gtrain_elastic_free": (None, [c_void_p]),
    "gtrain_elastic_add_state": (c_int, [c_void_p, c_char_p, c_void_p, c_size_t, c_int, _ERROR]),
    "gtrain_elastic_add_state_of_shape": (c_int, [c_void_p, c_char_p, c_void_p, POINTER(c_int64), c_int, c_int, _ERROR]),
    "gtrain_elastic_add_gradient": (c_int, [c_void_p, c_void_p, c_size_t, _ERROR]),
    "gtrain_elastic_add_gradient_of_shape": (c_int, [c_void_p, c_void_p, POINTER(c_int64), c_int, _ERROR]),
    "gtrain_state_allocate": (c_void_p, [c_size_t]),
    "gtrain_state_free": (None, [c_void_p, c_size_t]),
    "gtrain_state_set_writable": (None, [c_void_p, c_size_t, c_int]),
    "gtrain_elastic_local_part": (c_int, [c_void_p, POINTER(c_int64), c_int, POINTER(Sharding), POINTER(c_int64),
                                          POINTER(c_int64), POINTER(c_int), _ERROR]),
    "gtrain_elastic_add_sharded": (c_int, [c_void_p, c_char_p, c_void_p, c_size_t, c_int, POINTER(c_int64), c_int,
                                           POINTER(Sharding), _ERROR]),
    "gtrain_elastic_along": (c_int, [c_void_p, c_char_p, _HANDLE_OUT, _ERROR]),
    "gtrain_elastic_await_loss": (c_int, [c_void_p, POINTER(c_int), _ERROR]),
    "gtrain_elastic_next_part": (c_int, [c_void_p, c_double, POINTER(ElasticPart), _ERROR]),
    "gtrain_elastic_ready": (None, [c_void_p, c_size_t]),
    "gtrain_elastic_begin": (c_int, [c_void_p, POINTER(ElasticStep), _ERROR]),
    "gtrain_elastic_reduce": (c_int, [c_void_p, c_double, POINTER(c_int), _ERROR]),
    "gtrain_elastic_applied": (c_int, [c_void_p, _ERROR]),
    "gtrain_elastic_set_checkpoints": (c_int, [c_void_p, POINTER(CheckpointOptions), _ERROR]),
    "gtrain_elastic_set_reducer": (c_int, [c_void_p, POINTER(ReducerOptions), _ERROR]),
    "gtrain_elastic_reduced": (c_int, [c_void_p, POINTER(ReducedStep), POINTER(c_double), _ERROR]),
    "gtrain_elastic_stop": (c_int, [c_void_p, _ERROR]),
    "gtrain_elastic_sum": (c_int, [c_void_p, POINTER(c_double), c_size_t, POINTER(c_int), _ERROR]),
    "gtrain_elastic_residual": (c_int, [c_void_p, POINTER(c_double), POINTER(c_int64), _ERROR]),
    "gtrain_samples_open": (c_int, [c_void_p, POINTER(SamplesOptions), _HANDLE_OUT, _ERROR]),
    "gtrain_samples_free": (None, [c_void_p]),
    "gtrain_samples_where": (c_int, [c_void_p, POINTER(SamplesPlace), _ERROR]),
    "gtrain_samples_share": (c_int, [c_void_p, c_int64, POINTER(c_int64), c_int64, POINTER(c_int64), _ERROR]),
    "gtrain_samples_advance": (c_int, [c_void_p, _ERROR]),
    "gtrain_checkpointer_add_samples": (c_int, [c_void_p, c_void_p, _ERROR]),
    "gtrain_compressed_mean_create": (c_int, [c_void_p, POINTER(Compression), c_size_t, POINTER(Gradient), c_size_t,
                                              _HANDLE_OUT, _ERROR]),
    "gtrain_compressed_mean_free": (None, [c_void_p]),
    "gtrain_compressed_mean_all_reduce": (c_int, [c_void_p, c_void_p, c_size_t, _ERROR]),
    "gtrain_compressed_mean_drop": (c_int, [c_void_p, _ERROR]),
    "gtrain_compressed_mean_bytes_sent": (c_int, [c_void_p, POINTER(c_uint64), _ERROR]),
    "gtrain_request_wait": (c_int, [c_void_p, c_int64, POINTER(c_int), _ERROR]),
    "gtrain_request_free": (None, [c_void_p]),
    "gtrain_checkpointer_open": (c_int, [c_void_p, POINTER(CheckpointOptions), _HANDLE_OUT, _ERROR]),
    "gtrain_checkpointer_free": (None, [c_void_p]),
    "gtrain_checkpointer_add_replicated": (c_int, [c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_int64), c_int,
                                                   c_int, _ERROR]),
    "gtrain_checkpointer_add_sharded": (c_int, [c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_int64), c_int,
                                                POINTER(Sharding), c_int, _ERROR]),
    "gtrain_checkpointer_add_box": (c_int, [c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_int64), POINTER(c_int64),
                                            POINTER(c_int64), c_int, c_int, _ERROR]),
    "gtrain_checkpointer_add_bytes": (c_int, [c_void_p, c_char_p, BYTES_SAVE, BYTES_LOAD, c_void_p, c_int, _ERROR]),
    "gtrain_local_box": (c_int, [POINTER(c_int64), c_int, POINTER(Sharding), c_int, POINTER(c_int64),
                                 POINTER(c_int64), POINTER(c_int), _ERROR]),
    "gtrain_checkpointer_restored_bytes": (c_int, [c_void_p, POINTER(c_uint64), POINTER(c_uint64), _ERROR]),
    "gtrain_checkpointer_add_per_rank": (c_int, [c_void_p, c_char_p, c_void_p, c_size_t, c_int, _ERROR]),
    "gtrain_checkpointer_stop_agreed": (c_int, [c_void_p, POINTER(c_int), _ERROR]),
    "gtrain_checkpointer_fence": (c_int, [c_void_p, _ERROR]),
    "gtrain_checkpointer_restore": (c_int, [c_void_p, POINTER(RestoreOptions), POINTER(c_int64), _ERROR]),
    "gtrain_checkpointer_save": (c_int, [c_void_p, c_int64, POINTER(c_int), _ERROR]),
    "gtrain_checkpointer_save_if_due": (c_int, [c_void_p, c_int64, c_void_p, POINTER(c_int), _ERROR]),
    "gtrain_checkpointer_wait": (c_int, [c_void_p, c_int64, _ERROR]),
    "gtrain_checkpointer_last_committed": (c_int, [c_void_p, POINTER(c_int64), _ERROR]),
    "gtrain_packer_new": (c_void_p, []),
    "gtrain_packer_free": (None, [c_void_p]),
    "gtrain_packer_clear": (None, [c_void_p]),
    "gtrain_packer_data": (c_int, [c_void_p, POINTER(c_void_p), POINTER(c_size_t), _ERROR]),
    "gtrain_pack_nil": (None, [c_void_p]),
    "gtrain_pack_bool": (None, [c_void_p, c_int]),
    "gtrain_pack_int": (None, [c_void_p, c_int64]),
    "gtrain_pack_uint": (None, [c_void_p, c_uint64]),
    "gtrain_pack_float": (None, [c_void_p, c_double]),
    "gtrain_pack_string": (None, [c_void_p, c_char_p, c_size_t]),
    "gtrain_pack_bytes": (None, [c_void_p, c_char_p, c_size_t]),
    "gtrain_pack_numbers": (None, [c_void_p, c_int32, c_void_p, c_size_t]),
    "gtrain_pack_array": (None, [c_void_p, c_size_t]),
    "gtrain_pack_map": (None, [c_void_p, c_size_t]),
    "gtrain_unpack": (c_int, [POINTER(Unpacker), POINTER(Value), _ERROR]),
    "gtrain_actors_open": (c_int, [c_void_p, POINTER(ActorsOptions), _HANDLE_OUT, _ERROR]),
    "gtrain_actors_join": (c_int, [c_void_p, _ERROR]),
    "gtrain_actors_await_turn": (c_int, [c_void_p, POINTER(c_int), _ERROR]),
    "gtrain_actors_await_over": (c_int, [c_void_p, c_int64, _ERROR]),
    "gtrain_actors_finish": (None, [c_void_p]),
    "gtrain_actors_processes": (c_int, [c_void_p]),
    "gtrain_actors_free": (None, [c_void_p]),
    "gtrain_actors_register": (c_int, [c_void_p, POINTER(ActorClass), _ERROR]),
    "gtrain_actors_post": (c_int, [c_void_p, ACTOR_TASK, c_void_p, _ERROR]),
    "gtrain_actors_spawn": (None, [c_void_p, c_char_p, POINTER(SpawnOptions), c_char_p, c_size_t, c_int64, REPLY, c_void_p]),
    "gtrain_actors_find": (None, [c_void_p, c_char_p, c_char_p, c_int64, REPLY, c_void_p]),
    "gtrain_actors_call": (None, [c_void_p, c_char_p, c_size_t, c_int32, c_char_p, c_size_t, c_int64, REPLY, c_void_p]),
    "gtrain_actors_call_packed": (None, [c_void_p, c_char_p, c_size_t, c_int32, c_void_p, c_int64, REPLY, c_void_p]),
    "gtrain_actors_end": (None, [c_void_p, c_char_p, c_size_t, c_char_p]),
    "gtrain_actors_end_detached": (None, [c_void_p, c_char_p, c_size_t, c_int64, REPLY, c_void_p]),
    "gtrain_actors_await_end": (None, [c_void_p, c_char_p, c_size_t, REPLY, c_void_p]),
    "gtrain_object_create": (None, [c_void_p, c_uint64, c_int64, OBJECT_REPLY, c_void_p]),
    "gtrain_object_read": (None, [c_void_p, c_char_p, c_size_t, c_int64, OBJECT_REPLY, c_void_p]),
    "gtrain_object_data": (c_void_p, [c_void_p]),
    "gtrain_object_size": (c_uint64, [c_void_p]),
    "gtrain_object_write": (c_int, [c_void_p, c_uint64, c_void_p, c_size_t, _ERROR]),
    "gtrain_object_seal": (c_int, [c_void_p, c_void_p, _ERROR]),
    "gtrain_object_release": (None, [c_void_p, c_int64]),
    "gtrain_call_reply": (None, [c_void_p, c_int, c_char_p, c_int, c_char_p, c_size_t]),
    "gtrain_call_left_ms": (c_int64, [c_void_p]),
    "gtrain_actors_inside": (c_int, []),
}

_INTEGERS = (c_int, c_int32, c_int64, c_size_t, c_uint64)

_lock = threading.Lock()
_loaded = None
_path = None
_log_callback = None  # kept alive as long as the library may call it
_log_is_set = False


def _candidates():
    """(where, path) in the order of preference. A GTRAIN_LIBRARY that is set is the only candidate."""
    wanted = os.environ.get("GTRAIN_LIBRARY")
    if wanted:
        return [("$GTRAIN_LIBRARY", wanted)]
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    return [("next to the package", os.path.join(here, "libgtrain.so")),
            ("the build directory", os.path.join(root, "build", "lib", "libgtrain.so")),
            ("where pip puts it", os.path.join(os.path.dirname(os.path.dirname(root)), "lib", "libgtrain.so")),
            ("the system", "libgtrain.so.0")]


def _open():
    tried = []
    for where, path in _candidates():
        if "/" in path and not os.path.exists(path):
            tried.append(f"{where}: {path} does not exist")
            continue
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            tried.append(f"{where}: {error}")
    raise LibraryNotFound("libgtrain.so was not found; build gtrain (`make build`) or set GTRAIN_LIBRARY to its path. "
                          "Tried: " + "; ".join(tried))


def load():
    """The library, loaded once."""
    global _loaded, _path
    with _lock:
        if _loaded is None:
            library, path = _open()
            try:
                for name, (result, arguments) in _FUNCTIONS.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
            except AttributeError as error:
                raise LibraryNotFound(f"{path} is not a libgtrain.so of this package: {error}") from None
            if library.gtrain_abi() != ABI:
                raise LibraryNotFound(f"{path} has C interface {library.gtrain_abi()}, this package needs {ABI}: "
                                      "use the Python package and the library of one release")
            _loaded, _path = library, path
        return _loaded


def _check_integer(name, value, kind):
    """ctypes cuts off the upper bits of an int without a word."""
    if not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name}: {value!r} is no integer")
    bits = 8 * ctypes.sizeof(kind)
    least, most = (-1 << (bits - 1), (1 << (bits - 1)) - 1) if kind(-1).value < 0 else (0, (1 << bits) - 1)
    if not least <= value.__index__() <= most:
        raise InvalidArgument(f"{name}: {value} is not from {least} to {most}")


def _check(name, arguments):
    for value, kind in zip(arguments, _FUNCTIONS[name][1]):
        if kind in _INTEGERS and value is not None:
            _check_integer(name, value, kind)


def set_integer(structure, field, value):
    """A field of a structure of the library, by the user's word."""
    _check_integer(field, value, dict(structure._fields_)[field])
    setattr(structure, field, value.__index__())


def call(name, *arguments):
    """Calls a function that returns a status; raises what it says."""
    _check(name, arguments)
    library = load()
    error = Error()
    status = getattr(library, name)(*arguments, byref(error))
    if status != 0:
        raise error_for(library.gtrain_status_name(status).decode(), error.message.decode(errors="replace"))


def call_plain(name, *arguments):
    """Calls a function that returns nothing."""
    getattr(load(), name)(*arguments)


def library_path():
    """Where libgtrain.so was loaded from."""
    load()
    return _path


def version():
    return load().gtrain_version().decode()


def set_log(function):
    """`function(level, text)` gets gtrain's log lines, level 0 info, 1 warning, 2 error; None is silence.

    Without a call warnings and errors go to stderr once there is a Session. It runs on threads of the library and must
    not call gtrain.
    """
    global _log_callback, _log_is_set
    _log_is_set = True
    if function is None:
        callback = LOG_FUNCTION()
    else:
        callback = LOG_FUNCTION(lambda level, text, _: function(level, text.decode(errors="replace")))
    load().gtrain_set_log(callback, None)
    _log_callback = callback


def log_to_stderr():
    """What a program must not miss, e.g. a save that came to nothing, unless it said by set_log what it wants."""
    if not _log_is_set:
        atexit.register(set_log, None)  # threads of the library may outlive the interpreter
        set_log(lambda level, text: level > 0 and print(f"gtrain: {text}", file=sys.stderr, flush=True))

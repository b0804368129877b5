"""gtrain for Python: the session, collectives and checkpoints of a rank. Pure Python over libgtrain.so.

    import numpy as np, gtrain

    with gtrain.Session() as session:
        gradient = np.ones(4, dtype=np.float32)
        session.all_reduce(gradient)                 # in place: the sum over all ranks
        session.report(step=1, loss=0.5, samples=32)

Outside gtrain a session has one rank, so the same program runs by hand. docs/python.md has the rest.
"""
from ._errors import (DeadlineExceeded, FailedPrecondition, GtrainError, InvalidArgument, LibraryNotFound,
                      Unavailable)
from ._library import library_path, set_log, version
from .checkpoint import Checkpointer
from .elastic import Elastic
from .gradients import CompressedMean, ReducedStep, Reducer
from .mesh import Mesh
from .samples import Samples
from .session import (ANY_SOURCE, ANY_TAG, EXIT_RUN_ME_AGAIN, Communicator, Receive, Request, Send,
                      Session)

__all__ = ["ANY_SOURCE", "ANY_TAG", "Checkpointer", "Communicator", "CompressedMean", "DeadlineExceeded", "EXIT_RUN_ME_AGAIN", "Elastic", "FailedPrecondition",
           "GtrainError", "InvalidArgument", "LibraryNotFound", "Mesh", "Receive", "ReducedStep", "Reducer", "Request", "Samples", "Send", "Session",
           "Unavailable", "library_path", "set_log", "version"]

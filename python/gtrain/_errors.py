"""Exceptions: one class a status that programs tell apart, the base class for the others."""


class GtrainError(Exception):
    """A call failed. `status` is the name of the status, for instance "UNAVAILABLE"."""

    status = "UNKNOWN"

    def __init__(self, message, status=None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InvalidArgument(GtrainError, ValueError):
    status = "INVALID_ARGUMENT"


class FailedPrecondition(GtrainError):
    """Wrong order of calls, ranks that call different collectives, or a call in a forked child."""

    status = "FAILED_PRECONDITION"


class DeadlineExceeded(GtrainError, TimeoutError):
    status = "DEADLINE_EXCEEDED"


class Unavailable(GtrainError):
    """Another rank was lost or the generation is over: end the step and exit with EXIT_RUN_ME_AGAIN."""

    status = "UNAVAILABLE"


class LibraryNotFound(GtrainError, ImportError):
    status = "NOT_FOUND"


_BY_STATUS = {c.status: c for c in (InvalidArgument, FailedPrecondition, DeadlineExceeded, Unavailable)}


def error_for(status_name, message):
    return _BY_STATUS.get(status_name, GtrainError)(message or status_name, status_name)

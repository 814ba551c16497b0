"""Everything shmsched raises, in one tree rooted in :class:`ShmschedError`.

Each message names the step, session, engine or limit, its value, and what to do about it.
"""

from __future__ import annotations

from enum import IntEnum


class ShmschedError(Exception):
    """The root of every error that shmsched raises."""


class InvalidRequest(ShmschedError, ValueError):
    """A request that can never run as it stands: no tokens, a value out of range, a chunk over the limit, a repeated id."""


class WrongLoop(InvalidRequest, RuntimeError):
    """An AsyncClient, or what came from one, was used elsewhere than in the event loop that it was connected in."""


class Unsupported(ShmschedError):
    """The engine of this model does not offer the operation (rewinding, say)."""


class Full(ShmschedError):
    """There is no room now and the caller did not want to wait, or waited long enough. Nothing was submitted."""


class StepError(ShmschedError):
    """A step that entered the scheduler and did not complete."""


class StepFailed(StepError):
    """The engine failed this one step; its session goes on from the position before it."""


class StepCancelled(StepError):
    """The step was cancelled with an earlier one of its session. (A future that is cancelled itself raises CancelledError.)"""


class DeadlineExceeded(StepError):
    """The step was not handed to an engine by its deadline; it has left its queue and never runs."""


class EngineError(StepError):
    """The engine raised while it ran the batch that held this step."""


class EngineTimeout(StepError):
    """The engine did not finish the batch that held this step within the step time-out."""


class EngineDied(StepError):
    """The engine's process ended while it held this step."""


class SessionLost(StepError):
    """The session's state in its engine is gone; open another session and prefill again."""


class SessionClosed(StepError):
    """The session was closed, by its client or with it."""


class NoEngine(ShmschedError):
    """No engine serves the model asked for."""


class UnknownModel(NoEngine):
    """The daemon serves models, and none of this name: the message says which there are."""


class SchedulerUnreachable(ShmschedError):
    """No daemon answers on the socket."""


class SchedulerDied(StepError):
    """The connection to the daemon ended without a word from it."""


class SchedulerStopped(StepError):
    """The daemon is stopping, or has stopped; it takes no new sessions and did not finish this step."""


class ClientClosed(ShmschedError):
    """The client was closed in this process."""


class UsedAfterFork(ShmschedError):
    """A client made before fork() was used in the child; make a new one there."""


class ProtocolError(ShmschedError):
    """A peer sent something that the protocol does not allow, or speaks another major version of it."""


class SharedMemoryError(ShmschedError):
    """Shared memory could not be made or mapped: /dev/shm is too small, or the limit on its total is reached."""


class SystemLimit(ShmschedError):
    """The system allows a process too little of something: descriptors, address space, the size of a file, processes and threads."""


class SharedMemoryLimit(SharedMemoryError, SystemLimit):
    """Shared memory could not be made, passed on or mapped because of what the system allows a process."""


class DaemonRunning(ShmschedError):
    """Another daemon has the socket."""


class SocketPathError(ShmschedError):
    """The socket's path is too long, or its directory is not a private directory of this user."""


class EngineSpecError(ShmschedError, ValueError):
    """An engine specification that names no engine, or an option that its engine does not take."""


class EngineStartError(ShmschedError):
    """An engine could not be started. ``said``: the last words of its process and its daemon, which end the message too."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(f"{message}\n{said}" if said else message)
        self.reason = message
        self.said = said


class EngineOptionError(EngineStartError, InvalidRequest):
    """An option of an engine has a value that it cannot have."""


class EngineFaulty(ShmschedError):
    """An engine wrote where it must not, and is not used any more."""


class ErrorCode(IntEnum):
    """How an error travels in a frame. Numbers are part of the protocol and are never reused."""

    INVALID_REQUEST = 1
    UNSUPPORTED = 2
    FULL = 3
    STEP_FAILED = 4
    ENGINE_ERROR = 5
    ENGINE_TIMEOUT = 6
    ENGINE_DIED = 7
    SESSION_LOST = 8
    SESSION_CLOSED = 9
    NO_ENGINE = 10
    SCHEDULER_STOPPED = 11
    PROTOCOL = 12
    SHARED_MEMORY = 13
    CANCELLED = 14
    DEADLINE_EXCEEDED = 15
    SYSTEM_LIMIT = 16
    SHARED_MEMORY_LIMIT = 17
    UNKNOWN_MODEL = 18

    @classmethod
    def of(cls, error: ShmschedError) -> ErrorCode:
        """The code that brings back an error of this type on the other side."""
        return next((code for code, kind in _ERRORS.items() if kind is type(error)), cls.PROTOCOL)


_ERRORS: dict[ErrorCode, type[ShmschedError]] = {
    ErrorCode.INVALID_REQUEST: InvalidRequest,
    ErrorCode.UNSUPPORTED: Unsupported,
    ErrorCode.FULL: Full,
    ErrorCode.STEP_FAILED: StepFailed,
    ErrorCode.ENGINE_ERROR: EngineError,
    ErrorCode.ENGINE_TIMEOUT: EngineTimeout,
    ErrorCode.ENGINE_DIED: EngineDied,
    ErrorCode.SESSION_LOST: SessionLost,
    ErrorCode.SESSION_CLOSED: SessionClosed,
    ErrorCode.NO_ENGINE: NoEngine,
    ErrorCode.SCHEDULER_STOPPED: SchedulerStopped,
    ErrorCode.PROTOCOL: ProtocolError,
    ErrorCode.SHARED_MEMORY: SharedMemoryError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.SYSTEM_LIMIT: SystemLimit,
    ErrorCode.SHARED_MEMORY_LIMIT: SharedMemoryLimit,
    ErrorCode.UNKNOWN_MODEL: UnknownModel,
}


def error_of(code: int, message: str) -> ShmschedError:
    """The error that a frame carries. A code of a newer minor version, which this side does not know, is a StepError."""
    kind = next((kind for known, kind in _ERRORS.items() if known == code), StepError)
    return kind(message)

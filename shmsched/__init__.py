"""shmsched: a continuous-batching scheduler for LLM serving, in its own process, over shared memory."""

import os as _os
from typing import TYPE_CHECKING

from shmsched import client as _client
from shmsched.client import (
    Client,
    Cluster,
    Control,
    EngineDraft,
    FinishReason,
    Generation,
    Model,
    PromptLookup,
    Session,
    StepFuture,
    launch,
)
from shmsched.engine import BatchView, Engine, EngineInfo, Limits
from shmsched.errors import (
    ClientClosed,
    DaemonRunning,
    DeadlineExceeded,
    EngineDied,
    EngineError,
    EngineFaulty,
    EngineSpecError,
    EngineStartError,
    EngineTimeout,
    Full,
    InvalidRequest,
    NoEngine,
    ProtocolError,
    SchedulerDied,
    SchedulerStopped,
    SchedulerUnreachable,
    SessionClosed,
    SessionLost,
    SharedMemoryError,
    ShmschedError,
    SocketPathError,
    StepCancelled,
    StepError,
    StepFailed,
    SystemLimit,
    Unsupported,
    UsedAfterFork,
)
from shmsched.scheduling import Batch, Scheduler, SchedulerParams
from shmsched.steps import LogitsBlock, OutputRows, Request, RequestParams, Response, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "AsyncSession",
    "Batch",
    "BatchView",
    "Client",
    "ClientClosed",
    "Cluster",
    "Control",
    "DaemonRunning",
    "DeadlineExceeded",
    "Engine",
    "EngineDied",
    "EngineDraft",
    "EngineError",
    "EngineFaulty",
    "EngineInfo",
    "EngineSpecError",
    "EngineStartError",
    "EngineTimeout",
    "FinishReason",
    "Full",
    "Generation",
    "InvalidRequest",
    "Limits",
    "LogitsBlock",
    "Model",
    "NoEngine",
    "OutputRows",
    "PromptLookup",
    "ProtocolError",
    "Request",
    "RequestParams",
    "Response",
    "SamplingParams",
    "Scheduler",
    "SchedulerDied",
    "SchedulerParams",
    "SchedulerStopped",
    "SchedulerUnreachable",
    "Session",
    "SessionClosed",
    "SessionLost",
    "SharedMemoryError",
    "ShmschedError",
    "SocketPathError",
    "StepCancelled",
    "StepError",
    "StepFailed",
    "StepFuture",
    "SystemLimit",
    "Unsupported",
    "UsedAfterFork",
    "launch",
]

if TYPE_CHECKING:
    from shmsched.client import AsyncClient, AsyncGeneration, AsyncSession


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "AsyncGeneration", "AsyncSession"):
        return getattr(_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "SHMSCHED_DIE_AT" in _os.environ:
    # Tests only: this process is to die at a certain point.
    from shmsched import death_points as _death_points

    _death_points.arm(_os.environ["SHMSCHED_DIE_AT"])

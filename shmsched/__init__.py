"""shmsched: a continuous-batching scheduler for LLM serving, in its own process, over shared memory."""

import os as _os
from typing import TYPE_CHECKING

from shmsched.errors import (
    ClientClosed,
    DaemonRunning,
    DeadlineExceeded,
    EngineDied,
    EngineError,
    EngineFaulty,
    EngineOptionError,
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
    SharedMemoryLimit,
    ShmschedError,
    SocketPathError,
    StepCancelled,
    StepError,
    StepFailed,
    SystemLimit,
    UnknownModel,
    Unsupported,
    UsedAfterFork,
    WrongLoop,
)
from shmsched.lazy_names import names_from as _names_from

if TYPE_CHECKING:
    from shmsched.client import (
        AsyncClient,
        AsyncGeneration,
        AsyncSession,
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
    from shmsched.params import OutputRows, RequestParams, SamplingParams
    from shmsched.scheduling import Batch, Scheduler, SchedulerParams
    from shmsched.steps import LogitsBlock, Request, Response

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
    "EngineOptionError",
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
    "SharedMemoryLimit",
    "ShmschedError",
    "SocketPathError",
    "StepCancelled",
    "StepError",
    "StepFailed",
    "StepFuture",
    "SystemLimit",
    "UnknownModel",
    "Unsupported",
    "UsedAfterFork",
    "WrongLoop",
    "launch",
]

__getattr__, __dir__ = _names_from(
    __name__,
    {
        "shmsched.client": (
            "AsyncClient",
            "AsyncGeneration",
            "AsyncSession",
            "Client",
            "Cluster",
            "Control",
            "EngineDraft",
            "FinishReason",
            "Generation",
            "Model",
            "PromptLookup",
            "Session",
            "StepFuture",
            "launch",
        ),
        "shmsched.engine": ("BatchView", "Engine", "EngineInfo", "Limits"),
        "shmsched.scheduling": ("Batch", "Scheduler", "SchedulerParams"),
        "shmsched.params": ("OutputRows", "RequestParams", "SamplingParams"),
        "shmsched.steps": ("LogitsBlock", "Request", "Response"),
    },
)

if "SHMSCHED_DIE_AT" in _os.environ:
    # Tests only: this process is to die at a certain point.
    from shmsched import death_points as _death_points

    _death_points.arm(_os.environ["SHMSCHED_DIE_AT"])

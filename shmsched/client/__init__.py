"""The client library."""

import importlib
from typing import TYPE_CHECKING

from shmsched.client.client import Client
from shmsched.client.control import Control
from shmsched.client.futures import StepFuture
from shmsched.client.generation import EngineDraft, FinishReason, Generation, PromptLookup
from shmsched.client.launch import Cluster, launch
from shmsched.client.models import Model, Tokenizer
from shmsched.client.session import Session

if TYPE_CHECKING:
    from shmsched.client.async_client import AsyncClient
    from shmsched.client.async_session import AsyncSession
    from shmsched.client.generation.async_generation import AsyncGeneration

__all__ = [
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
    "Tokenizer",
    "launch",
]

_ASYNC = {
    "AsyncClient": "shmsched.client.async_client",
    "AsyncGeneration": "shmsched.client.generation.async_generation",
    "AsyncSession": "shmsched.client.async_session",
}


def __getattr__(name: str) -> object:
    """Imported when asked for: asyncio takes 20 ms, which daemons, engines and synchronous clients need not wait for."""
    if name not in _ASYNC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ASYNC[name]), name)

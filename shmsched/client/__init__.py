"""The client library."""

from typing import TYPE_CHECKING

from shmsched.lazy_names import names_from

if TYPE_CHECKING:
    from shmsched.client.async_client import AsyncClient
    from shmsched.client.async_session import AsyncSession
    from shmsched.client.client import Client
    from shmsched.client.cluster import Cluster, launch
    from shmsched.client.control import Control
    from shmsched.client.futures import StepFuture
    from shmsched.client.generation import EngineDraft, FinishReason, Generation, PromptLookup
    from shmsched.client.generation.async_generation import AsyncGeneration
    from shmsched.client.models import Model, Tokenizer
    from shmsched.client.session import Session

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

__getattr__, __dir__ = names_from(
    __name__,
    {
        "shmsched.client.async_client": ("AsyncClient",),
        "shmsched.client.async_session": ("AsyncSession",),
        "shmsched.client.client": ("Client",),
        "shmsched.client.control": ("Control",),
        "shmsched.client.futures": ("StepFuture",),
        "shmsched.client.generation": ("EngineDraft", "FinishReason", "Generation", "PromptLookup"),
        "shmsched.client.generation.async_generation": ("AsyncGeneration",),
        "shmsched.client.cluster": ("Cluster", "launch"),
        "shmsched.client.models": ("Model", "Tokenizer"),
        "shmsched.client.session": ("Session",),
    },
)

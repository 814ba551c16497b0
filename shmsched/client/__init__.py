"""The client library."""

from shmsched.client.async_client import AsyncClient
from shmsched.client.async_session import AsyncSession
from shmsched.client.client import Client
from shmsched.client.control import Control
from shmsched.client.futures import StepFuture
from shmsched.client.generation import AsyncGeneration, EngineDraft, FinishReason, Generation, PromptLookup
from shmsched.client.launch import Cluster, launch
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

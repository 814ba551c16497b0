"""Generation, built on steps: streaming, drafts verified, constraints kept, lost engines replaced."""

from shmsched.client.generation.course import FinishReason
from shmsched.client.generation.drafting import Draft, Drafter, EngineDraft, PromptLookup
from shmsched.client.generation.generation import Generation
from shmsched.client.generation.stepping import LogitsProcessor
from shmsched.client.generation.text_stream import TextStream
from shmsched.client.generation.timings import Timings

__all__ = [
    "Draft",
    "Drafter",
    "EngineDraft",
    "FinishReason",
    "Generation",
    "LogitsProcessor",
    "PromptLookup",
    "TextStream",
    "Timings",
]

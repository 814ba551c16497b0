"""What a plan asks of whoever runs it.

A plan is a generator that yields effects and is sent what they came to; a failure is thrown into it. It knows no thread and
no event loop, so that every way of generating is written once and runs under both.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shmsched.params import OutputRows, SamplingParams
from shmsched.steps import Tokens

T = TypeVar("T")
Handle: TypeAlias = Any
"""A step on its way, or a stream of tokens: whatever the one who runs the plan has for it."""


class Begin(NamedTuple):
    """Have the session to oneself from here on, standing at ``position`` with ``unfed`` as it did at the call."""

    position: int
    unfed: int | None


class Submit(NamedTuple):
    """Put a step on its way; sent back its handle."""

    tokens: Tokens
    position: int
    sampling: SamplingParams | None
    output_rows: OutputRows = OutputRows.LAST
    session: Any = None
    """None: the session that generates."""


class Await(NamedTuple):
    """Wait for a step; sent back its ``Response``."""

    step: Handle


class Continue(NamedTuple):
    """Put a generation on its way that the scheduler goes on with by itself, where the session stands; sent back its stream."""

    tokens: Tokens
    sampling: SamplingParams
    further: int
    """How many decodes may follow the first."""
    stop_tokens: tuple[int, ...]


class Next(NamedTuple):
    """Wait for the next token of a stream; sent back the ``SampledToken``. EOFError is thrown in after the last."""

    stream: Handle


class Emit(NamedTuple):
    """Give a token to the caller. The plan goes on when the caller wants another one."""

    token: int


class Cancel(NamedTuple):
    """Cancel a step or a stream; sent back whether it is cancelled, which it is not once its answer has come."""

    handle: Handle


class Halt(NamedTuple):
    """Let the step of a stream that is queued or runs be its last."""

    stream: Handle


class Rest(NamedTuple):
    """Let the session go on at ``position``, at most where it stands, with ``unfed`` sampled and not yet fed, and ``held`` back of
    the text up to there (None: nothing of it goes on)."""

    position: int
    unfed: int | None
    held: str | None = None


class Reopen(NamedTuple):
    """Open a new session on a living engine in place of the lost one, at position 0."""


Effect = Begin | Submit | Await | Continue | Next | Emit | Cancel | Halt | Rest | Reopen
Plan: TypeAlias = Generator[Effect, Any, T]


class Left(Exception):
    """Thrown into a plan whose caller wants no more tokens."""


TokenArray = npt.NDArray[np.int32]

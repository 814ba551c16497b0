"""What a stress run is asked to do, and what each of its client processes is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MODEL = "echo"
"""The only model whose answers can be checked."""
LEAST_SESSION_TOKENS = 256


class Mode(StrEnum):
    """What the sessions do most."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    RAW = "raw"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options. ``socket`` None: a daemon of one's own with ``engines`` copies of ``engine``."""

    clients: int
    sessions: int
    seconds: float
    mode: Mode
    engine: str
    engines: int
    socket: Path | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """What one client process is told, as JSON."""

    index: int
    socket: str
    sessions: int
    mode: str
    seed: int
    give_up_s: float
    """It ends by itself after this long, should nobody tell it to."""
    drain_s: float
    """How long it waits, once stopped, for the futures that are outstanding."""

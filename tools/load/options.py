"""What a stress run is asked to do, and what each of its client processes is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shmsched.tools.load.chaos import Chaos

MODEL = "echo"
"""The only model whose answers can be checked."""
LEAST_SESSION_TOKENS = 256
ASYNCIO_EVERY = 4
"""One client in so many generates on asyncio."""
QUIET_MODEL = "quiet"
"""Served by an engine that no fault hits, for the quiet neighbour."""
QUIET_STEP_S = 0.002
GENERATING_EVERY = 4
"""One session in so many generates, in mixed mode."""


class Mode(StrEnum):
    """What the sessions do most."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    RAW = "raw"
    VERIFY = "verify"
    GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class Soak:
    """How much a long-life run gets through before it ends."""

    steps: int

    @property
    def connects(self) -> int:
        return self.steps // 100

    @property
    def session_opens(self) -> int:
        return self.steps // 100


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
    chaos: Chaos | None = None
    soak: Soak | None = None
    """Instead of ``seconds``."""


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
    cancel: float | None = None
    """The share of submissions that are cancelled; None for its own habit."""
    peers_fall: bool = False
    """Engines and connections may end, and things run short: their parent judges whether it explains the steps that failed."""
    interrupt_every_s: float = 0.0
    """How often the client that is interrupted is (the others are not)."""
    life_steps: int = 0
    """After so many steps it makes a new connection; 0 for one connection all along."""

    @property
    def generating(self) -> int:
        """How many of its sessions generate."""
        if self.mode == Mode.GENERATE:
            return self.sessions
        return (self.sessions + self.index % GENERATING_EVERY) // GENERATING_EVERY if self.mode == Mode.MIXED else 0

    @property
    def on_asyncio(self) -> bool:
        """Whether those run on asyncio, and not in threads."""
        return self.index % ASYNCIO_EVERY == 1

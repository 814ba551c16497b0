"""What a stress run is asked to do, and what each of its processes is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shmsched.tools.load.chaos import Chaos, Fault

MODEL = "echo"
"""The only model whose answers can be checked."""
LEAST_SESSION_TOKENS = 256
QUIET_MODEL = "quiet"
"""Served by an engine that no fault hits, for the quiet neighbour."""
QUIET_STEP_S = 0.002
DRAIN_S = 8.0
FINAL_S = 3.0


class Mode(StrEnum):
    """What the sessions do most."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    RAW = "raw"
    VERIFY = "verify"
    GENERATE = "generate"


class Part(StrEnum):
    """What a process of a run does: the name of its module."""

    BUSY = "client"
    QUIET = "neighbour"
    INTERRUPTED = "interrupted"
    HOSTILE = "hostile"


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
    chaos: Chaos
    soak: int | None
    """Instead of ``seconds``: this many steps, and a connection and an opened session for every hundred of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one process is told."""

    index: int
    part: Part
    socket: Path
    options: Options
    give_up_s: float
    """It ends by itself after this long, should nobody tell it to."""

    @property
    def peers_fall(self) -> bool:
        """Engines and connections may end, and things run short: the parent judges whether it explains the steps that failed."""
        return self.options.chaos.hits_processes

    @property
    def cancel(self) -> float | None:
        """The share of submissions that are cancelled; None for its own habit."""
        return self.options.chaos.shares.get(Fault.CANCEL)

    @property
    def seed(self) -> tuple[int, int]:
        return self.options.seed, self.index

    @property
    def life_steps(self) -> int:
        """After so many steps it makes a new connection; 0 for one connection all along."""
        # What is under way when a life is over adds about as much again.
        return 0 if self.options.soak is None else 50

    @property
    def generating(self) -> int:
        """How many of its sessions generate; in mixed mode one in four."""
        sessions = self.options.sessions
        match self.options.mode:
            case Mode.GENERATE:
                return sessions
            case Mode.MIXED:
                return (sessions + self.index % 4) // 4
            case _:
                return 0

    @property
    def on_asyncio(self) -> bool:
        """Whether those run on asyncio, and not in threads: in one client of four."""
        return self.index % 4 == 1

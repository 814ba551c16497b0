"""What a contestant is told to do, and what its clients tell of a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Transport(StrEnum):
    """What carries the steps."""

    SHMSCHED = "shmsched"
    ZMQ = "zmq"
    MPQUEUE = "mpqueue"
    INPROC = "inproc"
    LIMIT = "limit"
    MODEL = "shmsched_model"
    """shmsched with a real model."""
    LLAMA = "llama"
    """That model in a bare loop."""


RACING = (Transport.SHMSCHED, Transport.ZMQ, Transport.MPQUEUE, Transport.INPROC, Transport.LIMIT)
"""Those that answer as echo does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A load: ``clients`` processes with ``sessions`` sessions each, in closed loop, one token a step."""

    transport: Transport
    clients: int
    sessions: int
    batch: int
    """The most decodes in one batch."""
    vocab: int = 32_000
    raw: bool = False
    """Whether each step asks for a row of logits, float32 (vocab,), in place of a token."""
    streamed: bool = False
    """Whether the scheduler goes on by itself with what was sampled, as only ours can."""
    step_us: float = 0.0
    """What the engine's forward pass costs, slept."""
    engine: str = "echo"
    """Ours, where it tells more than echo does."""
    max_sessions: int = 1024
    model: str = ""
    """A GGUF file, for those that run a real model."""
    threads: int = 0
    """What the model computes with."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Plan:
        return cls(**{**document, "transport": Transport(document["transport"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """When to measure, in seconds of ``time.monotonic()``, which all processes of a machine share."""

    start: float
    """The load runs before it, to warm up; nothing is counted."""
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one client saw in a round."""

    steps: int
    seconds: float
    wrong: int
    """Answers that are not echo's."""
    p50_us: float
    """The median time from submit to result, where there is only one session; else 0."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a contestant's clients saw together."""

    steps_per_s: float
    wrong: int
    p50_us: float
    cpu_us: dict[str, float] = field(default_factory=dict)
    """Of each step, by the role of the processes."""

    @classmethod
    def of(cls, tallies: list[Tally]) -> RoundResult:
        return cls(
            steps_per_s=sum(t.steps / t.seconds for t in tallies),
            wrong=sum(t.wrong for t in tallies),
            p50_us=sorted(t.p50_us for t in tallies)[len(tallies) // 2],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

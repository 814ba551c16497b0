"""What a contestant is told to do, and what its clients tell of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median


class Transport(StrEnum):
    """What carries the steps. ``LLAMA`` is a real model in a bare loop."""

    SHMSCHED = "shmsched"
    ZMQ = "zmq"
    MPQUEUE = "mpqueue"
    INPROC = "inproc"
    LIMIT = "limit"
    LLAMA = "llama"


class Way(StrEnum):
    """How clients use their sessions."""

    RESULTS = "wait for the oldest answer, and submit that session's next step"
    CALLBACKS = "a done-callback feeds a queue; who takes from it submits the next step"
    ASYNCIO = "a task for each session"
    STREAM = "the scheduler goes on by itself with what was sampled, as only ours can"
    STORM = "the first client streams in long prompts; the others wait for results"


class Gauge(StrEnum):
    """What clients conclude from the times of their steps, and from what the engine told."""

    NONE = "nothing"
    LATENCY = "the median time from submit to result, us"
    BUSY = "how much of its time the engine was busy by its own clock, %"
    TOGETHER = "in how many of the batches all of the client's sessions had a step, %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A load: ``clients`` processes with ``sessions`` sessions each, in closed loop, one token a step."""

    transport: Transport = Transport.SHMSCHED
    clients: int
    sessions: int
    batch: int
    """The most decodes in one batch."""
    vocab: int = 32_000
    raw: bool = False
    """Whether each step asks for a row of logits, float32 (vocab,), in place of a token."""
    way: Way = Way.RESULTS
    gauge: Gauge = Gauge.NONE
    engine: str = "echo"
    """Ours, with options, where it does more than echo."""
    max_sessions: int = 1024
    model: str = ""
    """A GGUF file, for those that run a real model, and the threads it computes with."""
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """When to measure, in seconds of ``time.monotonic()``, which all processes of a machine share. The load runs before it, too."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Tally:
    """What one client saw in a round. Wrong are answers that are not echo's."""

    steps: int
    seconds: float
    wrong: int
    gauged: float | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a contestant's clients saw together; the median of what they gauged."""

    steps_per_s: float
    wrong: int
    gauged: float
    cpu_us: dict[str, float] = field(default_factory=dict)
    """Of each step, by the role of the processes."""
    engine: dict[str, float] = field(default_factory=dict)
    """What the daemon counted of its engine, each a second: ``steps``, ``tokens``, ``batches``."""

    @classmethod
    def of(cls, tallies: list[Tally]) -> RoundResult:
        gauged = [t.gauged for t in tallies if t.gauged is not None]
        return cls(sum(t.steps / t.seconds for t in tallies), sum(t.wrong for t in tallies), median(gauged or [0.0]))

"""What the demo follows and measures: texts as they grow, batches as they form, tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmsched.cli.printable import printable


@dataclass(slots=True)
class Stream:
    """One session of one client process."""

    client: int
    session: int
    prompt: str
    text: str = ""
    times: list[float] = field(default_factory=list)
    """When each token came (CLOCK_MONOTONIC, which all processes share)."""
    ended: bool = False

    def take(self, event: dict[str, Any]) -> None:
        self.text += printable(event["text"])
        self.ended = event["ended"]
        if "time" in event:
            self.times.append(event["time"])


class BatchSeen(NamedTuple):
    """A batch that an engine has run."""

    number: int
    decodes: int
    prefill_chunks: int
    tokens: int
    seconds: float

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.decodes


class Batches:
    """All batches of a phase, in the order in which they were seen."""

    def __init__(self) -> None:
        self.seen: list[BatchSeen] = []
        self._last: dict[int, int] = {}

    def take(self, status: dict[str, Any]) -> None:
        for engine in status["engines"]:
            last = self._last.get(engine["engine"], 0)
            for batch in engine["recent_batches"]:
                if batch["number"] > last:
                    self._last[engine["engine"]] = batch["number"]
                    self.seen.append(BatchSeen(*(batch[name] for name in BatchSeen._fields)))

    def begin(self, status: dict[str, Any]) -> None:
        """Forget what was before."""
        self.take(status)
        self.seen.clear()


class Rate(NamedTuple):
    """Tokens in a time."""

    tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def rate_while_all_decode(streams: Sequence[Stream]) -> Rate | None:
    """Tokens that came while every session decoded: after the last one's first token, up to the first one's last.

    None if there was no such time.
    """
    if not all(stream.times for stream in streams):
        return None
    begin = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    if end <= begin:
        return None
    return Rate(sum(begin < t <= end for stream in streams for t in stream.times), end - begin)


def rate_lately(streams: Sequence[Stream], now: float, seconds: float = 2.0) -> float:
    """Tokens a second over the last ``seconds``, or since the first token if that is less."""
    began = min((stream.times[0] for stream in streams if stream.times), default=now)
    since = max(now - seconds, began)
    n = sum(t > since for stream in streams for t in stream.times[-4096:])
    return n / (now - since) if now - since > 0.2 else 0.0


class Result(NamedTuple):
    """What the demo found."""

    alone: Rate
    together: Rate | None
    batches: list[BatchSeen]

    def lines(self, model: str, n_clients: int, n_sessions: int) -> list[tuple[str, str]]:
        """Label and value of each line of the summary."""
        together = self.together
        lines = [
            ("model", model),
            ("one at a time", f"{self.alone.per_second:.1f} tokens/s"),
        ]
        if together is None:
            lines.append(("batched", "not measured: the sessions never all decoded at once; raise --max-new-tokens"))
        else:
            lines += [
                (
                    "batched",
                    f"{together.per_second:.1f} tokens/s, while all {n_clients * n_sessions} sessions"
                    f" of {n_clients} client processes decode",
                ),
                ("ratio", f"{together.per_second / self.alone.per_second:.2f}"),
            ]
        if self.batches:
            steps = sum(batch.decodes + batch.prefill_chunks for batch in self.batches)
            lines.append(("mean batch", f"{steps / len(self.batches):.1f} steps, over {len(self.batches)} batches"))
        return lines

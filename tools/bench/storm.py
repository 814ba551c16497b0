"""Scenario ``storm``: eight sessions decode while prompts of 100,000 tokens stream in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise

from shmsched import Client, Cluster, Response, launch
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.load import ANSWER_S
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate, ratios
from shmsched.workers.echo import advance, answer

NAME = "storm"
VOCAB = 32_000
DECODING = 8
ENGINE = f"shmsched.tools.bench.numbered:Numbered?vocab={VOCAB}&step_us=2000&token_us=10&max_session_tokens=100000000"
"""A full batch, 512 tokens of prompts and eight decodes, takes 7.2 ms."""
LEAST_S = 1.5


def run(effort: Effort) -> Finding:
    """Gaps are counted in batches: a decode may miss the batch that runs as it arrives, and is in the one after that."""
    gaps: list[float] = []
    late: list[int] = []
    seconds = max(LEAST_S, effort.seconds)
    with launch(ENGINE) as cluster, Client(socket=cluster.socket) as client:

        def prefill_only() -> float:
            with _prompts_streaming(cluster):
                return _prefill_rate(cluster, 0, seconds)

        def storm() -> float:
            with _prompts_streaming(cluster):
                decodes = Decodes(client, time.monotonic() + seconds)
                decodes.start()
                rate = _prefill_rate(cluster, DECODING, seconds)
                found = decodes.gaps()
            gaps.append(max(found) - 1)
            late.append(sum(gap > 2 for gap in found))
            return rate

        values = alternate({"prefill alone": prefill_only, "prefill in the storm": storm}, effort)
    finding = Finding(scenario=NAME)
    finding.series = [Series(name=name, unit="tokens/s", values=got) for name, got in values.items()]
    share = ratios(values["prefill in the storm"], values["prefill alone"])
    finding.verdicts = [
        Verdict(
            what="longest wait of a decode, beyond its own batch",
            unit="batches",
            values=[max(gaps)],
            bar=Bar(limit=1, at_least=False),
        ),
        Verdict(what="prefill in the storm / alone", unit="x", values=share, bar=Bar(limit=0.9)),
    ]
    finding.notes.append(f"the longest wait of each round: {gaps}; decodes that waited longer than one batch: {late}")
    return finding


class Decodes(threading.Thread):
    """Sessions that decode in closed loop until a moment, and note in which batch each step ran."""

    def __init__(self, client: Client, until: float) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._until = until
        self._batches: list[list[int]] = [[] for _ in range(DECODING)]
        self._fault: BaseException | None = None

    def run(self) -> None:
        try:
            self._decode()
        except BaseException as e:
            self._fault = e

    def gaps(self) -> list[int]:
        """Wait for the end. From each decode's batch to that of the session's next, in batches."""
        self.join(ANSWER_S + max(0.0, self._until - time.monotonic()))
        if self._fault is not None:
            raise BenchFault(f"decoding failed: {self._fault}") from self._fault
        return [b - a for batches in self._batches for a, b in pairwise(batches)]

    def _decode(self) -> None:
        sessions = [self._client.open_session() for _ in range(DECODING)]
        hashes = [advance(0, [1])] * DECODING
        futures = [session.submit([1]) for session in sessions]
        while time.monotonic() < self._until:
            for i, session in enumerate(sessions):
                token = self._take(i, futures[i], hashes[i])
                futures[i] = session.submit([token])
                hashes[i] = advance(hashes[i], [token])
        for i, session in enumerate(sessions):
            self._take(i, futures[i], hashes[i])
            session.close()

    def _take(self, i: int, future: Future[Response], expected: int) -> int:
        response = future.result(ANSWER_S)
        token = int(response.tokens[0])
        assert response.logprobs is not None
        self._batches[i].append(int(response.logprobs[0]))
        if token != answer(expected, VOCAB):
            raise BenchFault(f"storm: session {i} got token {token}, not echo's {answer(expected, VOCAB)}")
        return token


@contextmanager
def _prompts_streaming(cluster: Cluster) -> Iterator[None]:
    """From a process of their own: making a prompt must not hold up those who decode. Raises BenchFault for a wrong answer."""
    line = [sys.executable, "-P", "-m", "shmsched.tools.bench.prompts", str(cluster.socket)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdout.readline()
            yield
            process.stdin.close()
            said = process.stdout.readline()
        finally:
            process.kill()
    if said != b"right\n":
        raise BenchFault(
            f"storm: the prompts were not answered as echo does: {said.decode().strip() or 'they ended early'}"
        )


def _prefill_rate(cluster: Cluster, decoding: int, seconds: float) -> float:
    """Tokens of prompts that the engine ran a second."""
    time.sleep(0.1)
    before, began = cluster.status()["engines"][0], time.monotonic()
    time.sleep(seconds - 0.2)
    after, ended = cluster.status()["engines"][0], time.monotonic()
    tokens = after["tokens"] - before["tokens"]
    decodes = 0
    if decoding:
        recent = cluster.status(batches=256)["engines"][0]["recent_batches"]
        inside = [b for b in recent if before["batches"] < b["number"] <= after["batches"]]
        decodes = round(
            sum(b["decodes"] for b in inside) / max(1, len(inside)) * (after["batches"] - before["batches"])
        )
    return float((tokens - decodes) / (ended - began))

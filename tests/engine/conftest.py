"""Hosts whose scheduler is played by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.played import Start

from shmsched.engine import Engine

from support.peers.scheduler import Scheduler


@pytest.fixture
def start() -> Iterator[Start]:
    schedulers: list[Scheduler] = []

    def begin(engine: Engine) -> Scheduler:
        schedulers.append(Scheduler(engine))
        schedulers[-1].start()
        return schedulers[-1]

    yield begin
    for scheduler in schedulers:
        scheduler.end()

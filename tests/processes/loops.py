"""Running a test's coroutine under asyncio and under uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

DEADLINE = 60.0
Run = Callable[[Coroutine[Any, Any, None]], None]


def runner_of(kind: str) -> Run:
    """What runs a coroutine, for at most DEADLINE seconds, on a loop of this kind."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE):
                await main

        with asyncio.Runner(loop_factory=uvloop.new_event_loop if kind == "uvloop" else None) as runner:
            runner.run(bounded())

    return run

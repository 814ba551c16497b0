"""What the tests of this directory share."""

from __future__ import annotations

import pytest

from processes.loops import Run, runner_of


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine to its end, or until the deadline."""
    return runner_of(request.param)

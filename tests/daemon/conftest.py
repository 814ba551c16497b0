"""A daemon in the test's own process, for those who look at its parts as it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fuzz.world import LIMITS, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World(replace(LIMITS, streamed_tokens=64))
    yield world
    world.everybody_leaves()
    world.close()

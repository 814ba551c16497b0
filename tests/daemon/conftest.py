"""A daemon in the test's own process, for those who look at its parts as it goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.world import World, of_settings


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Parametrized with settings of the daemon."""
    with of_settings(**getattr(request, "param", {})) as world:
        yield world

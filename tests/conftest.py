"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from processes.leftovers import mark_this_run, nothing_left
from processes.unannounced import unannounced

PROCESSES_START_IN = {"processes", "faults", "cli", "tools"}
"""Directories whose every test is held to leave nothing, and to print nothing that nobody knows. Elsewhere:
``pytestmark = pytest.mark.usefixtures("no_leftovers")``."""

MOST_SHOWN = 2000

# Other work on the machine must not decide whether a test passes; what a wait may take, each says itself.
settings.register_profile("shmsched", deadline=None, print_blob=True)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("SHMSCHED_HYPOTHESIS", "shmsched"))


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # One of several: a process group of its own, since who shares it counts as started here.
        os.setpgid(0, 0)
    mark_this_run()
    # `timeout pytest ...` sends it: what tests have started must end with them, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """After the test, wait until no process that it started lives and /dev/shm lists nothing of ours."""
    with nothing_left():
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Without hypothesis' look at each garbage collection: an interrupt that comes in there is lost, and counted as a fault."""
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = callbacks


@pytest.fixture(autouse=True)
def _no_leftovers_where_processes_start(request: pytest.FixtureRequest) -> None:
    if _starts_processes(request.node):
        request.getfixturevalue("no_leftovers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Once all is torn down: whoever printed to this process's standard error printed known lines. (With ``-s`` nobody looks.)"""
    report = yield
    if report.when == "teardown" and report.passed and _starts_processes(item):
        announced = [pattern for mark in item.iter_markers("prints") for pattern in mark.args]
        said = "".join(text for title, text in report.sections if title.startswith("Captured stderr"))
        if lines := unannounced(said, announced):
            report.outcome = "failed"
            report.longrepr = "printed, though nobody knows or announced it:\n" + "\n".join(
                line[:MOST_SHOWN] for line in lines
            )
    return report


def _starts_processes(item: pytest.Item) -> bool:
    directory = item.path.relative_to(Path(__file__).parent).parts[0]
    return directory in PROCESSES_START_IN or "no_leftovers" in getattr(item, "fixturenames", ())

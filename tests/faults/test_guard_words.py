"""An engine that writes beyond its rows is found out and marked down; the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from processes.engines import Overrunning
from processes.leftovers import wait_until

DEADLINE = 30.0
SPEC = f"{Path(__file__).parent.parent / 'processes' / 'engines.py'}:Overrunning"


@pytest.mark.parametrize("how", [Overrunning.BEHIND, Overrunning.BEFORE, Overrunning.AND_RAISE])
def test_an_engine_that_writes_beyond_its_rows_is_marked_down(how: int, capfd: pytest.CaptureFixture[str]) -> None:
    with shmsched.launch(f"{SPEC}?model=bad", f"{SPEC}?model=good") as cluster, cluster.client() as client:
        good, bad, bystander = (client.open_session(model=m) for m in ("good", "bad", "bad"))
        # A sampled step has no rows in the arena, and one that keeps to its rows is nobody's business.
        assert bad.submit([7], sampling=None).result(DEADLINE).logits is not None
        with pytest.raises(shmsched.EngineError, match="wrote beyond the rows of the step at position 1"):
            bad.submit([how], sampling=None).result(DEADLINE)
        for session in (bad, bystander):
            with pytest.raises(shmsched.SessionLost, match="is marked down"):
                session.submit([1])
        wait_until(lambda: cluster.status()["workers"][0]["state"] == "given up", "the engine to be given up")
        assert "wrote beyond the rows" in cluster.status()["workers"][0]["reason"]
        with pytest.raises(shmsched.NoEngine):
            client.open_session(model="bad")
        tokens = good.submit([3], sampling=None).result(DEADLINE).logits
        assert tokens is not None
        assert int(tokens.data[0].argmax()) == answer(advance(0, [3]), 1000)
        # Its rows came back with its death.
        arena = client._channel.arena
        assert arena is not None
        wait_until(lambda: arena._allocator.held <= 2, "the rows to come back")
    assert "is marked down: it wrote beyond the rows" in capfd.readouterr().err

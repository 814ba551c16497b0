"""Fuzzed frames and connections against a real daemon, beside a client that checks every answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shmsched

from faults import flood
from faults.decoding import VOCAB, Decoding
from processes.leftovers import wait_until

MOST_GROWTH = 64 << 20


def resident(pid: int) -> int:
    """Bytes of the process's own memory: what it shares with its clients is bounded elsewhere."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize(
    ("n_frames", "n_connections"),
    [
        (20_000, 500),
        pytest.param(1_000_000, 20_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_the_daemon_lives_and_an_honest_client_stays_right(
    n_frames: int, n_connections: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
        honest = Decoding(client)
        honest.go_on(10)
        before = resident(cluster.pid)
        command = [sys.executable, flood.__file__, str(cluster.socket), str(n_frames), str(n_connections), "4"]
        rounds = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hostile:
            try:
                while hostile.poll() is None:
                    honest.go_on(10)
                    rounds += 1
            finally:
                hostile.kill()
            assert hostile.returncode == 0
            assert hostile.stdout is not None
            sent, made = map(int, hostile.stdout.read().split())
        assert hostile.returncode == 0
        assert (sent >= n_frames, made >= n_connections) == (True, True)
        assert rounds > 10
        wait_until(
            lambda: len(cluster.status()["clients"]) == 1, "the daemon to see that the hostile connections are gone"
        )
        wait_until(lambda: len(cluster.status()["engines"]) == 1, "the hostile engines to be gone")
        status = cluster.status()
        honest.go_on(10)
        ledger = status["ledger"]
        assert ledger["balanced"]
        assert (ledger["queued"], ledger["in_flight"], status["waiting_sessions"]) == (0, 0, 0)
        grown = resident(cluster.pid) - before
        assert grown < MOST_GROWTH
    assert "Traceback" not in capfd.readouterr().err
    with capfd.disabled():
        print(f"{sent} frames, {made} connections, {rounds * 10} honest steps beside them, {grown >> 10} KiB grown")

"""Running the real commands, with a deadline for each wait."""

from __future__ import annotations

import os
import select
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from processes.unannounced import unannounced

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "shmsched")
DEADLINE_S = 60.0


def environment(home: Path, **more: str) -> dict[str, str]:
    """Ours, with the default socket in ``home``."""
    kept = {name: value for name, value in os.environ.items() if name != "SHMSCHED_SOCKET"}
    return {**kept, "XDG_RUNTIME_DIR": str(home), "COLUMNS": "100", **more}


def shmsched(
    home: Path, *arguments: str, cwd: Path | None = None, traces: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. What it may say in an error is each test's; a traceback is none, unless with ``traces``."""
    ended = subprocess.run(
        [SCRIPT, *arguments],
        env=environment(home, **env),
        cwd=cwd or home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert traces or no_traceback(ended.stderr), ended.stderr
    return ended


class Running:
    """A command that runs on, its output in files."""

    def __init__(self, home: Path, arguments: Sequence[str], env: dict[str, str]) -> None:
        self.arguments = arguments
        self._err = home / f"{arguments[0]}-{time.monotonic_ns()}.err"
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [SCRIPT, *arguments],
                env=environment(home, **env),
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                start_new_session=True,
            )
        self.out = b""

    @property
    def err(self) -> str:
        return self._err.read_text()

    def read_until(self, wanted: bytes) -> None:
        """Read standard output until ``wanted`` is in it."""
        deadline = time.monotonic() + DEADLINE_S
        while wanted not in self.out:
            if not self._read(deadline):
                raise AssertionError(f"{self.arguments} ended before {wanted!r}: {self.out!r}, {self.err}")

    def read_something(self) -> None:
        """Read standard output until there is some."""
        if not self._read(time.monotonic() + DEADLINE_S):
            raise AssertionError(f"{self.arguments} ended without a word: {self.err}")

    def wait(self) -> int:
        """Read standard output to its end. Returns the exit status."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        assert self.process.stdout is not None
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self.process.stdout], [], [], left)[0]:
            raise AssertionError(
                f"waited {DEADLINE_S:g} s for {self.arguments} to say more than {self.out!r}: {self.err}"
            )
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.out += data
        return bool(data)


@contextmanager
def running(home: Path, *arguments: str, **env: str) -> Iterator[Running]:
    """A command that runs until the end of the block, at the latest."""
    command = Running(home, arguments, env)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        assert command.process.stdout is not None
        command.process.stdout.close()


@contextmanager
def daemon(home: Path, *options: str, prints: Sequence[str] = (), **env: str) -> Iterator[Running]:
    """``shmsched up``, ready. Stopped at the end; neither it nor its engines may have printed what nobody knows, but for lines that
    match one of ``prints``."""
    with running(home, "up", *options, **env) as up:
        up.read_until(b"\n")
        assert up.out.startswith(b"ready "), up.out
        yield up
        if up.process.poll() is None:
            up.process.terminate()
            assert up.wait() == 0, up.err
    said = unannounced(up.err, prints)
    assert not said, said


def no_traceback(text: str) -> bool:
    return "Traceback" not in text

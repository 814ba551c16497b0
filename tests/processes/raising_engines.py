"""Engines whose methods raise what they are told to, and engines with processes of their own that are cared for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing.shared_memory import SharedMemory

from shmsched.engine import BatchView
from shmsched.workers.echo import Echo


class Panic(BaseException):
    """As libraries in Rust raise: no Exception."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Raising(Echo):
    """Echo, whose method ``at`` raises ``what``, at the token RAISE if it is forward."""

    RAISE = 900

    def __init__(self, *, at: str, what: str) -> None:
        super().__init__(vocab=1000)
        self._at = at
        self._error = {"panic": Panic("index 7 of 3"), "unspeakable": Unspeakable(), "silent": ValueError()}.get(
            what, ValueError("x" * 10_000)
        )
        self._pass("__init__")

    def _pass(self, method: str) -> None:
        if method == self._at:
            raise self._error

    def start(self, limits: object) -> None:
        self._pass("start")

    def open_session(self, slot: int, options: bytes) -> None:
        if options:
            self._pass("open_session")
        super().open_session(slot, options)

    def rewind(self, slot: int, length: int) -> None:
        self._pass("rewind")
        super().rewind(slot, length)

    def fork_session(self, parent: int, slot: int, length: int) -> None:
        self._pass("fork_session")
        super().fork_session(parent, slot, length)

    def close_session(self, slot: int) -> None:
        self._pass("close_session")
        super().close_session(slot)

    def forward(self, batch: BatchView) -> None:
        if self.RAISE in batch.tokens:
            self._pass("forward")
        super().forward(batch)


class Sharing(Echo):
    """Echo, with a named segment that it does not remove, and whose name it writes to the file ``named``."""

    def __init__(self, *, named: str) -> None:
        super().__init__(vocab=1000)
        self._named = named

    def start(self, limits: object) -> None:
        self._segment = SharedMemory(create=True, size=100)
        # What holds on to the tracker's pipe, and does not end when it is asked to.
        self._helper = multiprocessing.get_context("fork").Process(target=_deaf, daemon=True)
        self._helper.start()
        with open(self._named, "a") as file:
            file.write(f"{self._segment.name}\n")


def _deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _sleep(begins: int) -> None:
    os.write(begins, b"b")
    time.sleep(60)


class Asking(Echo):
    """Echo, that answers with how many of two processes of its own a signal has ended, whose number it is given."""

    def __init__(self) -> None:
        super().__init__(vocab=1000)

    def forward(self, batch: BatchView) -> None:
        number = int(batch.tokens[-1])
        begun, begins = os.pipe()
        forked = multiprocessing.get_context("fork").Process(target=_sleep, args=(begins,))
        forked.start()
        # What a signal raises while a process is being forked may be lost in a callback, here as anywhere.
        os.read(begun, 1)
        os.close(begun)
        os.close(begins)
        program = subprocess.Popen(["sleep", "60"])
        assert forked.pid is not None
        os.kill(forked.pid, number)
        program.send_signal(number)
        forked.join(5)
        ended = (forked.exitcode in (1, -number)) + (program.wait(5) == -number)
        forked.kill()
        batch.set_tokens(0, [ended])
        self._hashes[batch.steps[0].slot].append(0)

"""Engines that do what engines are allowed to do, on command: a token or an option says which."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np

from shmsched.engine import BatchView, Engine, EngineInfo
from shmsched.errors import Unsupported
from shmsched.workers.echo import Echo

RAISE, FAIL, DIE, HANG, DEFER_ONCE, DEFER_ALWAYS, NO_RESULT, BAD_TOKEN, HANG_A_MOMENT = range(100, 109)


class Moody(Echo):
    """Echo, until it meets one of the tokens above."""

    def __init__(self, *, max_sessions: int = 8, step_us: float = 0.0, vocab: int = 1000, model: str = "echo") -> None:
        super().__init__(vocab=vocab, max_sessions=max_sessions, step_us=step_us, model=model)
        self._deferred: set[int] = set()
        self._options: dict[int, bytes] = {}

    def open_session(self, slot: int, options: bytes) -> None:
        if options == b"refuse":
            raise ValueError("these options are refused")
        if options == b"hang":
            time.sleep(3600)
        self._options[slot] = options
        super().open_session(slot, options)

    def close_session(self, slot: int) -> None:
        super().close_session(slot)
        if self._options[slot] == b"raise on close":
            raise RuntimeError("the engine was told to raise")

    def forward(self, batch: BatchView) -> None:
        tokens = batch.tokens.tolist()
        if RAISE in tokens:
            raise RuntimeError("the engine was told to raise")
        if DIE in tokens:
            os._exit(9)
        if HANG in tokens:
            time.sleep(3600)
        super().forward(batch)
        for i, (slot, start, length) in enumerate(batch.steps):
            mine = tokens[start : start + length]
            position = int(batch.positions[start])
            if FAIL in mine:
                batch.fail(i, "the engine was told to fail this step")
                self.rewind(slot, position)
            elif DEFER_ALWAYS in mine or (DEFER_ONCE in mine and slot not in self._deferred):
                self._deferred.add(slot)
                batch.defer(i)
                self.rewind(slot, position)
            elif BAD_TOKEN in mine:
                batch.token_ids[:] = self.info.vocab_size


class Forgetful(Engine):
    """Gives no result at all, and cannot rewind."""

    def __init__(self) -> None:
        self.info = EngineInfo(model="forgetful", vocab_size=1000, max_sessions=2, max_session_tokens=100)

    def forward(self, batch: BatchView) -> None:
        if HANG_A_MOMENT in batch.tokens:
            time.sleep(1.0)
        for k in range(len(batch.outputs)):
            if batch.tokens[batch.outputs[k]] != NO_RESULT:
                batch.rows[k][:] = np.arange(1000, dtype=np.float32)


class Stateful(Echo):
    """It can rewind to the beginning only."""

    def __init__(self, *, step_us: float = 0.0) -> None:
        super().__init__(vocab=1000, step_us=step_us)
        self.info = replace(self.info, rewinds_anywhere=False)

    def rewind(self, slot: int, length: int) -> None:
        if length:
            raise Unsupported("it keeps a state that cannot go back, except to the beginning")
        super().rewind(slot, length)


class Mute(Stateful):
    """It gives nothing where it meets the token for that, and has taken it all the same."""

    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        for k, output in enumerate(batch.outputs.tolist()):
            if batch.tokens[output] == NO_RESULT:
                batch.token_ids[k] = self.info.vocab_size


class Unstartable(Engine):
    def __init__(self) -> None:
        self.info = EngineInfo(model="unstartable", vocab_size=10, max_sessions=1, max_session_tokens=10)

    def start(self, limits: object) -> None:
        raise RuntimeError("no weights here")

    def forward(self, batch: BatchView) -> None:
        raise AssertionError("it never starts")


class Unforkable(Echo):
    """Echo, but for forking."""

    fork_session = Engine.fork_session


class Overrunning(Echo):
    """Writes beyond its raw rows, as a kernel with a wrong size does, where the first token of a batch says so."""

    BEHIND, BEFORE, AND_RAISE = 500, 501, 502

    def __init__(self, *, vocab: int = 1000, max_sessions: int = 8, model: str = "echo") -> None:
        super().__init__(vocab=vocab, max_sessions=max_sessions, model=model)

    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        told = int(batch.tokens[0])
        if told in (self.BEHIND, self.BEFORE, self.AND_RAISE):
            row = batch.rows[0]
            beyond = -4 if told == self.BEFORE else row.nbytes
            ctypes.memmove(row.ctypes.data + beyond, b"oops", 4)
        if told == self.AND_RAISE:
            raise RuntimeError("the engine was told to raise")


class Rigid(Echo):
    """Echo, but it cannot rewind."""

    rewind = Engine.rewind


class Sized(Echo):
    """Takes sessions of ``tokens`` tokens, in chunks of ``chunk``."""

    def __init__(self, *, tokens: int, chunk: int) -> None:
        super().__init__(vocab=1000, max_sessions=4, max_session_tokens=tokens, model="sized")
        self.info = replace(self.info, max_prefill_chunk_size=chunk)


class SizedAndRigid(Sized):
    """It can neither rewind nor fork."""

    rewind = Engine.rewind
    fork_session = Engine.fork_session


class Letters(Echo):
    """Echo with a text: a token is a byte below 128. It can rewind anywhere, and fork."""

    def __init__(self, *, step_us: float = 0.0, max_session_tokens: int = 3000) -> None:
        super().__init__(vocab=128, step_us=step_us, max_session_tokens=max_session_tokens, model=type(self).__name__)
        self.info = replace(self.info, tokenizer="bytes")


class UnforkableLetters(Letters):
    fork_session = Engine.fork_session


class StatefulLetters(Letters):
    """It can rewind to the beginning only."""

    def __init__(self, *, step_us: float = 0.0) -> None:
        super().__init__(step_us=step_us)
        self.info = replace(self.info, rewinds_anywhere=False)

    def rewind(self, slot: int, length: int) -> None:
        if length:
            raise Unsupported("it keeps a state that cannot go back, except to the beginning")
        super().rewind(slot, length)


class RigidLetters(Letters):
    """It cannot rewind."""

    rewind = Engine.rewind


class Nearly(Echo):
    """Says what echo says, but for one token in three."""

    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        for k, token in enumerate(batch.token_ids.tolist()):
            if token % 3 == 0:
                batch.token_ids[k] = (token + 1) % self.info.vocab_size


class Reciter(Engine):
    """Says its text over and over, byte by byte: where a session holds n bytes, byte n of the text comes next. 256 is its stop
    token, which comes once the whole text was said ``times`` times."""

    TEXT = "naïve 日本 🙂 END of it. "

    def __init__(self, *, times: int = 1000, step_us: float = 0.0) -> None:
        self.info = EngineInfo(
            model="reciter",
            vocab_size=257,
            max_sessions=8,
            max_session_tokens=10_000,
            tokenizer="bytes",
            stop_tokens=(256,),
        )
        self._said = self.TEXT.encode() * times
        self._step_s = step_us / 1e6

    def rewind(self, slot: int, length: int) -> None:
        """It keeps nothing."""

    def forward(self, batch: BatchView) -> None:
        time.sleep(self._step_s)
        for k, output in enumerate(batch.outputs.tolist()):
            n = int(batch.positions[output]) + 1
            batch.rows[k][:] = 0.0
            batch.rows[k][self._said[n] if n < len(self._said) else 256] = 100.0


class Flat(Engine):
    """A small vocabulary, of which any token may come next: its logits depend on the last token and little."""

    def __init__(self) -> None:
        self.info = EngineInfo(model="flat", vocab_size=40, max_sessions=8, max_session_tokens=1000)

    def rewind(self, slot: int, length: int) -> None:
        """It keeps nothing."""

    def forward(self, batch: BatchView) -> None:
        for k, output in enumerate(batch.outputs.tolist()):
            batch.rows[k][:] = np.sin(np.arange(40, dtype=np.float32) * (int(batch.tokens[output]) + 1))


class Spoiled(Engine):
    """After token t comes (t + 1) % 30. The tokens from 30 on stand for logits that are out of the ordinary, and so does ``sick``."""

    NAN, INF, NOTHING, MASKED, HUGE = range(30, 35)
    MASKED_GIVES, HUGE_GIVES = 5, 9

    def __init__(self, *, put: bool = False, sick: int = NAN, step_us: float = 0.0, model: str = "spoiled") -> None:
        self.info = EngineInfo(model=model, vocab_size=40, max_sessions=16, max_session_tokens=1000, stop_tokens=(39,))
        self._put = put
        self._sick = sick
        self._step_s = step_us / 1e6

    def rewind(self, slot: int, length: int) -> None:
        """It keeps nothing."""

    @classmethod
    def logits(cls, token: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        row = np.arange(40, dtype=np.float32) / 100
        if token < 30:
            row[(token + 1) % 30] = 50.0
        elif token == cls.NAN:
            row[3] = np.nan
        elif token == cls.INF:
            row[[7, 8]] = np.inf
        elif token == cls.NOTHING:
            row[:] = -np.inf
        elif token == cls.MASKED:
            row[:], row[cls.MASKED_GIVES] = -np.inf, -1000.0
        elif token == cls.HUGE:
            row[:], row[cls.HUGE_GIVES] = -3e38, 3e38
        return row

    def forward(self, batch: BatchView) -> None:
        time.sleep(self._step_s)
        tokens = batch.tokens[batch.outputs].tolist()
        rows = [self.logits(self.NAN if token == self._sick else token) for token in tokens]
        if self._put and rows:
            batch.put_logits(0, np.stack(rows))
        else:
            for k, row in enumerate(rows):
                batch.rows[k][:] = row


class SpoiledForGood(Spoiled):
    """It cannot rewind."""

    rewind = Engine.rewind


class Parent(Echo):
    """Echo, with processes of its own, in the ways in which programs start them. Their numbers go to the file ``pids``."""

    HANG = 900

    def __init__(self, *, pids: str, crash: bool = False) -> None:
        super().__init__(vocab=1000)
        self._pids = pids
        self._crash = crash

    def start(self, limits: object) -> None:
        began = [
            subprocess.Popen(["sleep", "600"]).pid,
            subprocess.Popen(["sleep", "600"], start_new_session=True, env={"PATH": os.environ["PATH"]}).pid,
            subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 600"], process_group=0).pid,
            self._forked(),
            self._daemon(),
        ]
        with open(self._pids, "a") as file:
            file.write(" ".join(map(str, began)) + "\n")
        if self._crash:
            raise RuntimeError("no weights here")

    def _forked(self) -> int:
        """It shares the engine's memory, and holds its socket open."""
        if pid := os.fork():
            return pid
        time.sleep(600)
        os._exit(0)

    def _daemon(self) -> int:
        """Detached as the textbook says: a session of its own, an orphan, nothing left of the environment."""
        ours, theirs = os.pipe()
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.write(theirs, b"%d" % os.getpid())
                os.execve("/bin/sleep", ["sleep", "600"], {})
            os._exit(0)
        os.wait()
        return int(os.read(ours, 20))

    def forward(self, batch: BatchView) -> None:
        if self.HANG in batch.tokens:
            time.sleep(3600)
        super().forward(batch)


class Ending(Echo):
    """Echo, until it meets a token that has its process end in one way or another."""

    WAYS = SEGFAULT, KILL, EXIT, SYSTEM_EXIT, INTERRUPT = tuple(range(900, 905))

    def __init__(self) -> None:
        super().__init__(vocab=1000)

    def forward(self, batch: BatchView) -> None:
        tokens = batch.tokens.tolist()
        if self.SEGFAULT in tokens:
            ctypes.string_at(0)
        if self.KILL in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.EXIT in tokens:
            os._exit(7)
        if self.SYSTEM_EXIT in tokens:
            sys.exit(3)
        if self.INTERRUPT in tokens:
            raise KeyboardInterrupt
        super().forward(batch)

"""A hostile peer: ``python -m shmsched.tools.load.hostile``. It attacks the socket again and again, as its seed says."""

from __future__ import annotations

import array
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from shmsched import ProtocolError
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.lies import lie
from shmsched.tools.load.part import Parent, run
from shmsched.tools.load.tally import Tally
from shmsched.wire import frames
from shmsched.wire.codec import pack, unpack
from shmsched.wire.framing import FrameSplitter, framed

ANSWER_S = 0.5
HELD = 8
FLOOD = 200
FAULT = "was answered with a fault"
HELLO = frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, frames.Role.CLIENT)
GREETING = framed(pack(HELLO))


class FaultFound(Exception):
    """The daemon did what it must not."""


class Hostile:
    """One attack after the other, each over within a second or two."""

    def __init__(self, path: Path, seed: str) -> None:
        self._path = str(path)
        self._random = random.Random(seed)
        self._silent: deque[socket.socket] = deque()
        self._attacks: dict[str, Callable[[], str]] = {
            "random bytes": lambda: self._send(self._random.randbytes(self._random.choice((1, 7, 100, 5000, 200_000)))),
            "half a frame": lambda: self._send(GREETING[: self._random.randrange(1, len(GREETING))]),
            "a giant length": self._giant_length,
            "a hello that is none": self._bad_hello,
            "frames of random bytes": self._random_frames,
            "frames that lie": lambda: self._send(GREETING + self._lies()),
            "mutated frames": self._mutated_frames,
            "an engine that is none": self._bad_engine,
            "descriptors": self._descriptors,
            "a trickle": self._trickle,
            "connections": self._flood,
            "silence": self._silence,
        }

    def attack(self, tally: Tally) -> None:
        """Count what came of it."""
        name = self._random.choice(list(self._attacks))
        try:
            came = self._attacks[name]()
        except BlockingIOError:
            came = "found the backlog full"
        except (ConnectionRefusedError, FileNotFoundError, FaultFound) as e:
            came = FAULT
            tally.say_wrong(f"after an attack with {name}: {e}")
        except OSError:
            came = "was cut off"
        tally.attacks[came] += 1

    # --- the attacks ----------------------------------------------------------------------------------------------------

    def _giant_length(self) -> str:
        length = self._random.choice((2**31 - 1, -1, -(2**31), 0, (1 << 20) + 1))
        greeted = GREETING if self._random.random() < 0.5 else b""
        return self._send(greeted + struct.pack("!i", length) + self._random.randbytes(1000))

    def _bad_hello(self) -> str:
        hello = HELLO._replace(
            **self._random.choice(({"magic": 1}, {"major": 99}, {"role": 77}, {"magic": frames.MAGIC ^ 1, "major": 0}))
        )
        return self._send(framed(pack(hello)))

    def _random_frames(self) -> str:
        junk = [framed(self._random.randbytes(self._random.randint(1, 300))) for _ in range(20)]
        return self._send(GREETING + b"".join(junk))

    def _lies(self) -> bytes:
        return b"".join(framed(pack(message)) for message in lie(self._random))

    def _mutated_frames(self) -> str:
        data = bytearray(self._lies())
        for _ in range(self._random.randint(1, 8)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return self._send(GREETING + bytes(data))

    def _bad_engine(self) -> str:
        hello = framed(pack(HELLO._replace(role=frames.Role.ENGINE)))
        offer = frames.Offer(0, 2**31, 2**31, 0, 0, 0, 1, 1, "", "", (), "none")
        said = self._random.choice(
            (offer, frames.Done(7, ()), frames.Ready(0.0), frames.SlotOpened(1, 1), frames.BatchFailed(1, "no"))
        )
        return self._send(hello + framed(pack(said)) + self._random.randbytes(50))

    def _descriptors(self) -> str:
        with closing(self._connect()) as sock, open(os.devnull, "rb") as null:
            fds = array.array("i", [null.fileno()] * self._random.randint(1, 8))
            for data in (GREETING, framed(pack(frames.OpenArena(0)))):
                sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            return self._answer(sock)

    def _trickle(self) -> str:
        with closing(self._connect()) as sock:
            for byte in GREETING + framed(pack(frames.CloseSession(1))):
                sock.send(bytes([byte]))
                time.sleep(0.01)
            return self._answer(sock)

    def _flood(self) -> str:
        with ExitStack() as opened:
            for _ in range(FLOOD):
                sock = opened.enter_context(closing(self._connect()))
                if self._random.random() < 0.3:
                    sock.send(b"\0")
        return "was left open"

    def _silence(self) -> str:
        self._silent.append(self._connect())
        if len(self._silent) > HELD:
            with closing(self._silent.popleft()) as sock:
                return self._answer(sock)
        return "was left open"

    # --- what it takes --------------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(ANSWER_S)
        return sock

    def _send(self, data: bytes) -> str:
        with closing(self._connect()) as sock:
            try:
                sock.sendall(data)
            except TimeoutError:
                return "was not read"
            except OSError:
                # It was cut off in the middle; why, is there to be read.
                pass
            return self._answer(sock)

    def _answer(self, sock: socket.socket) -> str:
        """What the daemon said, as far as it says it within ANSWER_S. Raises FaultFound."""
        splitter, poll = FrameSplitter(), select.poll()
        poll.register(sock, select.POLLIN)
        said = "was left open"
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
            data = sock.recv(1 << 16)
            if not data:
                return said if said.startswith("was refused") else "was cut off"
            try:
                arrived = [unpack(payload) for payload in splitter.feed(data)]
            except ProtocolError as e:
                raise FaultFound(f"the daemon sent what is no frame: {e}") from e
            for message in arrived:
                if isinstance(message, frames.Refused):
                    if "the scheduler failed" in message.message:
                        raise FaultFound(message.message)
                    said = "was refused in words"
                elif isinstance(message, frames.Failed | frames.SessionRefused | frames.ArenaRefused):
                    said = "was answered"
        return said


def work(parent: Parent) -> None:
    plan = parent.plan
    every_s = plan.options.chaos.every_s[Fault.GARBAGE]
    hostile, pace = Hostile(plan.socket, str(plan.seed)), random.Random(f"{plan.seed} pace")
    parent.ready()
    while not parent.over.wait(every_s * pace.uniform(0.5, 1.5)):
        hostile.attack(parent.tally)


if __name__ == "__main__":
    sys.exit(run(work))

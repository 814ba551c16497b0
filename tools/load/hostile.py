"""A hostile peer: ``python -m shmsched.tools.load.hostile SOCKET SEED``.

For each line on its standard input it attacks once, as its seed says, and writes a line: the attack's name, a tab, and what
the daemon did about it.
"""

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
from contextlib import closing

from shmsched import ProtocolError
from shmsched.tools.load.lies import lie
from shmsched.wire import frames
from shmsched.wire.codec import pack, unpack
from shmsched.wire.framing import FrameSplitter, framed

ANSWER_S = 0.5
HELD = 8
FLOOD = 200
FAULT = "FAULT"
"""Begins what the daemon did if it is a fault of its own."""
HELLO = frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, frames.Role.CLIENT)


class Hostile:
    """One attack after the other, each over within a second or two."""

    def __init__(self, path: str, seed: str) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._silent: deque[socket.socket] = deque()
        self._attacks: dict[str, Callable[[], str]] = {
            "random bytes": self._random_bytes,
            "half a frame": self._half_a_frame,
            "a giant length": self._giant_length,
            "a hello that is none": self._bad_hello,
            "frames of random bytes": self._random_frames,
            "frames that lie": self._lying_frames,
            "mutated frames": self._mutated_frames,
            "an engine that is none": self._bad_engine,
            "descriptors": self._descriptors,
            "a trickle": self._trickle,
            "connections": self._flood,
            "silence": self._silence,
        }

    def attack(self) -> tuple[str, str]:
        """The name of what was done, and what came of it."""
        name = self._random.choice(list(self._attacks))
        try:
            return name, self._attacks[name]()
        except BlockingIOError:
            return name, "found the backlog full"
        except (ConnectionRefusedError, FileNotFoundError) as e:
            return name, f"{FAULT}: nobody listens: {e}"
        except OSError:
            return name, "was cut off"

    # --- the attacks ----------------------------------------------------------------------------------------------------

    def _random_bytes(self) -> str:
        return self._send(self._random.randbytes(self._random.choice((1, 7, 100, 5000, 200_000))))

    def _half_a_frame(self) -> str:
        whole = framed(pack(HELLO))
        return self._send(whole[: self._random.randrange(1, len(whole))])

    def _giant_length(self) -> str:
        length = self._random.choice((2**31 - 1, -1, -(2**31), 0, (1 << 20) + 1))
        greeted = framed(pack(HELLO)) if self._random.random() < 0.5 else b""
        return self._send(greeted + struct.pack("!i", length) + self._random.randbytes(1000))

    def _bad_hello(self) -> str:
        hello = HELLO._replace(
            **self._random.choice(({"magic": 1}, {"major": 99}, {"role": 77}, {"magic": frames.MAGIC ^ 1, "major": 0}))
        )
        return self._send(framed(pack(hello)))

    def _random_frames(self) -> str:
        junk = [framed(self._random.randbytes(self._random.randint(1, 300))) for _ in range(20)]
        return self._send(framed(pack(HELLO)) + b"".join(junk))

    def _lying_frames(self) -> str:
        return self._send(framed(pack(HELLO)) + b"".join(framed(pack(m)) for m in lie(self._random)))

    def _mutated_frames(self) -> str:
        data = bytearray(b"".join(framed(pack(m)) for m in lie(self._random)))
        for _ in range(self._random.randint(1, 8)):
            if data:
                data[self._random.randrange(len(data))] = self._random.randrange(256)
        return self._send(framed(pack(HELLO)) + bytes(data))

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
            sock.sendmsg([framed(pack(HELLO))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            sock.sendmsg([framed(pack(frames.OpenArena(0)))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            return self._answer(sock)

    def _trickle(self) -> str:
        with closing(self._connect()) as sock:
            for byte in framed(pack(HELLO)) + framed(pack(frames.CloseSession(1))):
                sock.send(bytes([byte]))
                time.sleep(0.01)
            return self._answer(sock)

    def _flood(self) -> str:
        opened = []
        try:
            for _ in range(FLOOD):
                opened.append(self._connect())
                if self._random.random() < 0.3:
                    opened[-1].send(b"\0")
        finally:
            for sock in opened:
                sock.close()
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
        """What the daemon said, as far as it says it within ANSWER_S."""
        splitter = FrameSplitter()
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        said = "was left open"
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
            try:
                data = sock.recv(1 << 16)
            except OSError:
                return "was cut off"
            if not data:
                return said if said.startswith(("was refused", FAULT)) else "was cut off"
            try:
                arrived = [unpack(payload) for payload in splitter.feed(data)]
            except ProtocolError as e:
                return f"{FAULT}: the daemon sent what is no frame: {e}"
            for message in arrived:
                if isinstance(message, frames.Refused):
                    ours = "the scheduler failed" in message.message
                    said = f"{FAULT}: {message.message}" if ours else "was refused in words"
                elif isinstance(message, frames.Failed | frames.SessionRefused | frames.ArenaRefused):
                    said = "was answered"
        return said


def main() -> int:
    path, seed = sys.argv[1:]
    hostile = Hostile(path, seed)
    while sys.stdin.readline():
        name, outcome = hostile.attack()
        print(f"{name}\t{outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

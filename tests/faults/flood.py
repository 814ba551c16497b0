"""A hostile process: ``flood.py SOCKET FRAMES CONNECTIONS SEED``. It says all it can over as many connections as it is told."""

from __future__ import annotations

import random
import re
import socket
import sys
from typing import Any, get_type_hints

from shmsched.dataplane.layouts import SAMPLING
from shmsched.wire import codec, frames
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed

NUMBERS = {"B": 8, "H": 16, "I": 32, "Q": 64}
EDGES = (0, 1, 2, 3, 7, 100, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
SAID_BY = {
    frames.Role.CLIENT: range(32, 48),
    # An engine that says that it is faulty is killed: that is the end of this process.
    frames.Role.ENGINE: range(48, 55),
    # Whoever says Stop ends the daemon, and may.
    frames.Role.CONTROL: range(80, 81),
}


def hello(role: int) -> bytes:
    return framed(pack(frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, role)))


def any_value(rng: random.Random, annotation: Any) -> Any:
    mark = annotation.__metadata__[0]
    if isinstance(mark, str):
        return any_number(rng, mark)
    if annotation == codec.Text:
        return rng.choice(("", "x", "hostile", "ä" * 1000))
    if annotation == codec.Blob:
        return bytes(rng.choice((0, 1, 1000)))
    if annotation == codec.Texts:
        return ("why",) * rng.randrange(4)
    if annotation == frames.StepDescriptors:
        formats = re.findall(r"\d*\D", frames.STEP_DESCRIPTOR.format.removeprefix("<"))
        return [tuple(any_number(rng, f) for f in formats) for _ in range(rng.randrange(3))]
    return tuple(rng.choice(EDGES) % 2**32 for _ in range(rng.randrange(4)))


def any_number(rng: random.Random, code: str) -> Any:
    if code.endswith("s"):
        return SAMPLING.pack(rng.choice(EDGES) % 2**32, rng.choice(FLOATS), rng.choice(FLOATS), rng.choice(EDGES))
    return rng.choice(FLOATS) if code in "fd" else rng.choice(EDGES) % 2 ** NUMBERS[code]


def any_frame(rng: random.Random, role: int) -> bytes:
    cls = codec._by_kind[rng.choice([kind for kind in codec._by_kind if kind in SAID_BY[frames.Role(role)]])].make
    hints = get_type_hints(cls, vars(sys.modules[cls.__module__]), include_extras=True)
    return pack(cls(*[any_value(rng, annotation) for annotation in hints.values()]))


def harmless(rng: random.Random, request: int) -> bytes:
    """What a client may say, though it means nothing: the connection goes on."""
    session = rng.randrange(20)
    message = rng.choice(
        (
            frames.OpenSession(request, rng.randrange(2), rng.choice(("echo", "nobody's")), b"x" * rng.randrange(100)),
            frames.CloseSession(session),
            frames.Cancel(session, rng.choice(EDGES), 0),
            frames.Halt(session, rng.choice(EDGES)),
            frames.Consumed(0, 0, 0),
            frames.ForkSession(request, session, rng.randrange(9)),
            frames.Submit(0, 0, 0, 0, []),
        )
    )
    return pack(message)


def connection(rng: random.Random, path: str, most: int) -> int:
    """One connection, until it is closed. Returns how many frames were sent."""
    sent = 0
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.settimeout(10)
            sock.connect(path)
            if rng.random() < 0.02:
                sock.send(rng.randbytes(rng.randrange(1, 100)))
                return 1
            role = rng.choice((1, 1, 1, 1, 2, 3))
            sock.send(hello(role))
            while sent < most:
                data = b""
                for _ in range(min(most - sent, rng.randrange(1, 20))):
                    sent += 1
                    payload = harmless(rng, sent) if role == 1 and rng.random() < 0.95 else any_frame(rng, role)
                    if rng.random() < 0.01:
                        at = rng.randrange(2, len(payload) + 1)
                        payload = payload[:at] + rng.randbytes(rng.randrange(4)) + payload[at:]
                    data += framed(payload)
                if rng.random() < 0.01:
                    data = data[: rng.randrange(len(data))]
                if rng.random() < 0.005:
                    data += rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
                sock.sendall(data)
        except OSError:
            # Closed by the daemon, as it should be.
            pass
    return sent


def main() -> None:
    path, n_frames, n_connections, seed = sys.argv[1], *map(int, sys.argv[2:])
    rng = random.Random(seed)
    frames_sent = connections_made = 0
    while frames_sent < n_frames or connections_made < n_connections:
        frames_sent += connection(rng, path, rng.choice((1, 10, 100, 1000)))
        connections_made += 1
    print(frames_sent, connections_made, flush=True)


if __name__ == "__main__":
    main()

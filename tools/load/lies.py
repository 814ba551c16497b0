"""Valid frames with contents that are not so."""

from __future__ import annotations

import random
from typing import Any

from shmsched.dataplane.layouts import SAMPLING
from shmsched.tools.load.options import MODEL
from shmsched.wire import frames
from shmsched.wire.frames import StepDescriptor

MOST = 6


def lie(choose: random.Random) -> list[Any]:
    """A few frames of a client that opens a session and says what is not so of it, or says what no client may."""
    numbers = (0, 1, 2, 3, choose.randrange(1 << 16), 2**31, 2**32 - 1)

    def number() -> int:
        return choose.choice(numbers)

    def step() -> StepDescriptor:
        return StepDescriptor(
            request=choose.choice((0, 1, 1, 2, 2**63)),
            session=choose.choice((0, 1, 1, 1, 5, 2**40)),
            n_tokens=number(),
            position=number(),
            output_rows=choose.randrange(256),
            flags=choose.randrange(256),
            sampling=SAMPLING.pack(
                number(),
                choose.choice((0.0, -1.0, float("nan"), float("inf"), 1e30)),
                choose.choice((0.0, -1.0, float("nan"), 2.0)),
                2**64 - 1,
            ),
            rows_offset=choose.choice((0, 4, 2**62)),
            further=choose.choice((0, 0, 1, 2**32 - 1)),
            n_stop_tokens=choose.choice((0, 0, 1, 255)),
            deadline=choose.choice((0.0, 0.0, 1e-9, -1.0, float("nan"))),
        )

    def submit() -> frames.Submit:
        steps = [step() for _ in range(choose.randint(0, 3))]
        honest = sum(s.n_tokens for s in steps)
        written = choose.choice((honest, honest, number(), 2**64 - 1))
        records, results, stream = (choose.choice((0, 0, 0, number(), 2**64 - 1)) for _ in range(3))
        n_stops = sum(s.n_stop_tokens for s in steps)
        stops = choose.choice(((0,) * n_stops, (2**32 - 1,) * n_stops, (1, 2)))
        return frames.Submit(written, records, results, stream, steps, stops)

    def wrong_way() -> Any:
        return choose.choice(
            (
                frames.Completions(1, 1, 1, 1), frames.Done(1, ()), frames.Work(1, 0), frames.SlotOpened(0, 1),
                frames.Ready(1.0), frames.Welcome(1, 1, 1, 1, 1, 1, 1), frames.Failed(1, 0, "no", (1,)),
            )
        )  # fmt: skip

    makers = (
        submit,
        submit,
        submit,
        lambda: frames.Cancel(choose.choice((1, number())), number(), number()),
        lambda: frames.CloseSession(number()),
        lambda: frames.ForkSession(number(), choose.choice((1, number())), number()),
        lambda: frames.Halt(choose.choice((1, number())), number()),
        lambda: frames.Consumed(number(), number(), number()),
        lambda: frames.OpenArena(choose.choice((0, 1, 4096, 2**63))),
        lambda: frames.OpenSession(number(), choose.randrange(256), choose.choice((MODEL, "", "none")), b"x"),
        wrong_way,
    )
    opening = [frames.OpenSession(1, 1, MODEL, b"")] if choose.random() < 0.7 else []
    return [*opening, *(choose.choice(makers)() for _ in range(choose.randint(1, MOST)))]

"""``python -m shmsched.tools.bench.prompts SOCKET``: prompts of 100,000 tokens without end, until standard input ends."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future

import numpy as np

from shmsched import Client, Response, Session
from shmsched.workers.echo import advance, answer

SESSIONS = 2
PROMPT = np.arange(100_000, dtype=np.int32) % 30_000


def main() -> None:
    """Each session has a prompt under way, and begins anew when it is answered. Says ``right`` if all answers were echo's."""
    over = threading.Event()
    wrong: list[str] = []
    with Client(socket=sys.argv[1]) as client:
        (model,) = client.models.values()
        expected = answer(advance(0, PROMPT.tolist()), model.vocab_size)

        def again(session: Session) -> None:
            future = session.submit(PROMPT, position=0, block=False)
            future.add_done_callback(lambda done: answered(session, done))

        def answered(session: Session, future: Future[Response]) -> None:
            if over.is_set():
                return
            if future.cancelled() or future.exception() is not None or future.result().tokens[0] != expected:
                wrong.append(repr(future))
            again(session)

        for _ in range(SESSIONS):
            again(client.open_session())
        print("streaming", flush=True)
        sys.stdin.read()
        over.set()
    print(f"{len(wrong)} wrong, the first: {wrong[0]}" if wrong else "right", flush=True)


if __name__ == "__main__":
    main()

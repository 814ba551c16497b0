"""Every public argument with wrong types and extreme values: refused in words, or it works; and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import shmsched
from shmsched.engine.spec import EngineSpec
from shmsched.scheduling.settings import SETTINGS

VOCAB = 1000
DEADLINE = 30.0
Call = Callable[..., object]


class Hostile:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __len__(self) -> int:
        raise RuntimeError("no len")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no iter")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no eq")

    __hash__ = None  # type: ignore[assignment]


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**5000, 0.0, 0.5, -0.5, 1e300, -1e300,
    math.nan, math.inf, -math.inf, 1j, "", "x", "echo", "\udc80", "a\0b", "x" * 100_000, b"", b"x", bytearray(b"xy"),
    [], [1], [[1]], [1.5], [True], [None], ["1"], [10**30], [10**5000], (), (1, 2), {}, {1}, {1: 2}, object(), object, len,
    Hostile(), np.int64(3), np.int32(-1), np.uint64(2**64 - 1), np.float32(0.5), np.float64("nan"), np.bool_(True),
    np.array(3), np.array([3]), np.array([[3]]), np.array([1.5]), np.array(["x"]), np.array([None]), np.empty(0), Decimal(1),
    Fraction(1, 2), iter([1]), range(3), memoryview(b"abc"), np.datetime64("2020"), slice(3), NotImplemented, ...,
]  # fmt: skip
WRONG = st.sampled_from(range(len(VALUES))) | st.one_of(
    st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers()), st.complex_numbers()
).map(lambda value: (value,))
REFUSED = (shmsched.InvalidRequest, shmsched.Unsupported)
PLACE = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)

LONG_WAITS = (2_000_000, 2_147_484, 7_195_024, 1e300)
"""From the longest that is waited for on; of some the milliseconds are more than ``poll`` takes."""


def with_long_waits(test: Any) -> Any:
    for wait in LONG_WAITS:
        test = example(drawn=(wait,))(test)
    return test


def value_of(drawn: Any) -> Any:
    return VALUES[drawn] if isinstance(drawn, int) else drawn[0]


def fed(call: Call, name: str, value: object, expected: tuple[type[BaseException], ...] = ()) -> None:
    """Refused in words that name the argument and are short, or it works."""
    said = ""
    try:
        call(value)
    except REFUSED as e:
        said = str(e)
    except expected:
        pass
    in_words(name, said)


def in_words(name: str, said: str) -> None:
    """``said``: why it was refused; empty where it works."""
    assert len(said) < 1000, f"{name}: a message of {len(said)} characters"
    known = (name, name.removesuffix("s"), name.replace("_", " "), "would hold", "no tokenizer")
    assert not said or any(word in said for word in known), f"{name}: {said}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=4&max_session_tokens=100000") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


def end(value: Any) -> None:
    """Whatever it is that worked."""
    if isinstance(value, shmsched.Session | shmsched.Generation | shmsched.Client):
        value.close()
    elif isinstance(value, shmsched.StepFuture):
        value.exception(DEADLINE)
    elif hasattr(value, "cancel"):
        value.cancel()


def ended(call: Call) -> Call:
    return lambda value: end(call(value))


GENERATE = (
    "prompt_tokens", "max_new_tokens", "sampling", "stop_tokens", "stop", "logits_processor", "draft", "on_session_lost",
    "deadline", "continuation",
)  # fmt: skip


@given(drawn=WRONG, name=st.sampled_from(GENERATE))
@settings(PLACE, max_examples=62)
def test_generate(client: shmsched.Client, drawn: Any, name: str) -> None:
    with client.open_session() as session:
        for before in (0, 2):
            if before:
                # One that leaves a token that is not fed.
                list(session.generate([1, 2], max_new_tokens=before))
            rest: dict[str, Any] = {"prompt_tokens": [1], "max_new_tokens": 2}
            call = ended(lambda value, rest=rest: session.generate(**{**rest, name: value}))
            fed(call, name, value_of(drawn), (shmsched.DeadlineExceeded,))
        session.submit([1]).result(DEADLINE)


@example(drawn=(np.float32(0.5),), name="deadline")
@given(drawn=WRONG, name=st.sampled_from(("tokens", "position", "sampling", "output_rows", "deadline")))
@settings(PLACE, max_examples=37)
def test_submit_and_stream(client: shmsched.Client, drawn: Any, name: str) -> None:
    value = value_of(drawn)
    with client.open_session() as session:
        fed(ended(lambda v: session.submit(**{"tokens": [1], name: v})), name, value)
        if name in ("tokens", "sampling", "deadline"):
            fed(ended(lambda v: session.stream(**{"tokens": [1], "further": 1, name: v})), name, value)
        for own in ("further", "stop_tokens"):
            with client.open_session() as other:
                fed(ended(lambda v, o=other, n=own: o.stream([1], **{"further": 1, n: v})), own, value)
        fed(ended(lambda v: session.submit([1] * 4, block=v)), "block", value)
        fed(ended(lambda v: session.submit([1] * 4, block_timeout=v)), "block_timeout", value)


@with_long_waits
@given(drawn=WRONG)
@settings(PLACE, max_examples=20)
def test_sessions(client: shmsched.Client, drawn: Any) -> None:
    value = value_of(drawn)
    for name in ("options", "seed", "block", "timeout"):
        fed(ended(lambda v, n=name: client.open_session(**{n: v})), name, value, (shmsched.Full,))
    fed(ended(lambda v: client.open_session(model=v, timeout=0.0)), "model", value, (shmsched.Full, shmsched.NoEngine))
    with client.open_session() as session:
        session.submit([1, 2, 3]).result(DEADLINE)
        for name in ("upto", "seed", "block", "timeout"):
            fed(ended(lambda v, n=name: session.fork(**{n: v})), name, value, (shmsched.Full,))
        session.close()
        fed(session.reopen, "timeout", value, (shmsched.Full,))


@with_long_waits
@given(drawn=WRONG)
@settings(PLACE, max_examples=20)
def test_waiting(client: shmsched.Client, drawn: Any) -> None:
    value = value_of(drawn)
    with client.open_session() as session:
        for wait in ("result", "exception"):
            fed(lambda v, w=wait: getattr(session.submit([1]), w)(v), "timeout", value, (TimeoutError,))
        stream = session.stream([1], further=3)
        fed(stream.next, "timeout", value, (TimeoutError,))
        fed(stream.wait_until_ended, "timeout", value, (TimeoutError,))
        stream.cancel()


@given(drawn=WRONG)
@settings(PLACE, max_examples=20)
def test_requests(client: shmsched.Client, drawn: Any) -> None:
    value = value_of(drawn)
    with client.open_session() as session:
        fed(ended(client.submit), "request", value)
        for name in ("request_id", "session_id", "tokens", "params"):
            whole = {"request_id": 1, "session_id": session.session_id, "tokens": [1], name: value}
            call = ended(lambda v, w=whole: client.submit(shmsched.Request(**w)))
            fed(call, name, value, (shmsched.SessionClosed,))
        for name in ("position", "sampling", "output_rows"):
            params = shmsched.RequestParams(**{name: value})
            fed(ended(lambda v, p=params: client.submit(shmsched.Request(2, session.session_id, [1], p))), name, value)


@with_long_waits
@given(drawn=WRONG)
@settings(PLACE, max_examples=20)
def test_an_async_client(cluster: shmsched.Cluster, drawn: Any) -> None:
    value = value_of(drawn)

    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:

            async def feed(call: Call, name: str, expected: tuple[type[BaseException], ...] = ()) -> None:
                said = ""
                try:
                    async with asyncio.timeout(DEADLINE):
                        came = await call(value)  # type: ignore[misc]
                        if isinstance(came, shmsched.AsyncSession):
                            await came.close()
                except REFUSED as e:
                    said = str(e)
                except expected:
                    pass
                in_words(name, said)

            for name in ("tokens", "position", "sampling", "output_rows", "deadline"):
                await feed(
                    lambda v, n=name: session.submit(**{"tokens": [1], n: v}), name, (shmsched.DeadlineExceeded,)
                )
            for name in ("options", "seed", "block", "timeout"):
                await feed(lambda v, n=name: client.open_session(**{n: v}), name, (shmsched.Full,))
            for name in GENERATE:

                async def run(v: object, name: str = name) -> None:
                    generation = session.generate(**{"prompt_tokens": [1], "max_new_tokens": 2, name: v})
                    async for _ in generation:
                        if len(generation.tokens) > 3:
                            break

                await feed(run, name, (shmsched.DeadlineExceeded,))

            async def text(v: Any) -> None:
                async for _ in client.generate_text(v):
                    pass

            await feed(text, "prompt")

    asyncio.run(main())


@with_long_waits
@given(drawn=WRONG)
@settings(PLACE, max_examples=20)
def test_clients_and_control(cluster: shmsched.Cluster, drawn: Any) -> None:
    value = value_of(drawn)
    expected = (shmsched.SchedulerUnreachable, shmsched.SocketPathError)
    if not isinstance(value, str | None):
        fed(ended(lambda v: shmsched.Client(socket=v)), "socket", value, expected)
        fed(lambda v: shmsched.AsyncClient(socket=v), "socket", value, expected)
        fed(lambda v: shmsched.Control(v).close(), "socket", value, expected)
    for name in ("wait", "arena_bytes"):
        fed(ended(lambda v, n=name: shmsched.Client(socket=cluster.socket, **{n: v})), name, value, expected)
        fed(lambda v, n=name: shmsched.AsyncClient(socket=cluster.socket, **{n: v}), name, value, expected)
    fed(lambda v: cluster.status(batches=v), "batches", value)
    with shmsched.Control(cluster.socket) as control:
        for wrong in ("x", [], math.nan, -1.0, 10**5000, True):
            with pytest.raises(shmsched.InvalidRequest, match="drain_s"):
                control.stop(drain_s=wrong)  # type: ignore[arg-type]


FIELDS: dict[type, dict[str, Any]] = {
    shmsched.SamplingParams: {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None},
    shmsched.SchedulerParams: {"max_decode_sequences": 1, "max_prefill_chunk_size": 1},
    shmsched.EngineInfo: {
        "model": "m", "vocab_size": 10, "max_sessions": 1, "max_session_tokens": 5, "max_batch_size": None,
        "max_decode_sequences": None, "max_prefill_chunk_size": None, "tokenizer": None, "rewinds_anywhere": True,
        "stop_tokens": (),
    },
    shmsched.PromptLookup: {"max_ngram": 1, "n_draft": 1},
    shmsched.LogitsBlock: {"data": np.zeros((1, 1), np.float32)},
    shmsched.EngineDraft: {"session": None},
    shmsched.Scheduler: {"params": shmsched.SchedulerParams()},
}  # fmt: skip


@given(drawn=WRONG)
@settings(PLACE, max_examples=50)
def test_what_is_made_of_fields(drawn: Any) -> None:
    value = value_of(drawn)
    for kind, fields in FIELDS.items():
        for name in fields:
            said = "logits" if name == "data" else name
            fed(lambda v, k=kind, f=fields, n=name: k(**{**f, n: v}), said, value)


def test_the_scheduler_in_process() -> None:
    scheduler = shmsched.Scheduler()
    for value in VALUES:
        with pytest.raises(shmsched.InvalidRequest, match="request is"):
            scheduler.submit(value).result(0)
    assert scheduler.counts.balanced


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("echo?step_us=-5", "echo: step_us is -5.0; it must be a number"),
        ("echo?token_us=nan", "echo: token_us is nan"),
        ("echo?step_us=inf", "echo: step_us is inf"),
        ("echo?vocab=0", "echo: vocab is 0; it must be a whole number from 1"),
        ("echo?vocab=2147483647", "echo: vocab is 2147483647"),
        ("echo?max_sessions=0", "echo: max_sessions is 0"),
        ("echo?max_session_tokens=-1", "echo: max_session_tokens is -1"),
        ("echo?model=", "EngineInfo.model is ''"),
        ("gemma?threads=0", "gemma: threads is 0; it must be a whole number from 1"),
        ("gemma?kv_tokens=0", "gemma: kv_tokens is 0"),
        ("gemma?max_sessions=-3", "gemma: max_sessions is -3"),
    ],
)
def test_options_of_engines(spec: str, said: str) -> None:
    with pytest.raises(shmsched.InvalidRequest) as caught:
        EngineSpec.parse(spec).load()()
    assert said in str(caught.value)


@pytest.mark.parametrize("spec", ["echo?step_us=-5", "echo?vocab=0"])
def test_a_wrong_option_is_said_where_the_engine_is_started(spec: str) -> None:
    with pytest.raises(shmsched.EngineStartError):
        shmsched.launch(spec)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"step_timeout": 3.0}, "no setting is called step_timeout; there are max_decode_sequences, .*step_timeout_s"),
        ({"client": 3}, "no setting is called client"),
        *(
            ({name: value}, f"{name} is {re.escape(repr(value))}; it must be a (whole )?number from {least:g} to ")
            for name, (_, least, _) in SETTINGS.items()
            for value in (-1, "1", None, math.nan, math.inf, True)
        ),
        ({"max_clients": 0}, re.escape("max_clients is 0; it must be a whole number from 1 to 2**63 - 1")),
        ({"max_prefill_chunk_size": 2**31 - 1}, re.escape("2 * max_prefill_chunk_size + max_decode_sequences is")),
    ],
    ids=str,
)
def test_a_setting_that_a_daemon_cannot_have_is_refused_at_the_call(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=f"^{said}"):
        shmsched.launch("echo", **setting)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": 0}, {"engines": "x"}, {"engines": 1.5}, {"max_decode_sequences": 0}, {"max_prefill_chunk_size": "x"},
        {"max_decode_sequences": 10**5000}, {"start_timeout": math.nan}, {"start_timeout": -1}, {"step_timeout_s": "x"},
        {"max_clients": None}, {"step_timeout_s": math.nan},
    ],
)  # fmt: skip
def test_launch(wrong: dict[str, Any]) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=next(iter(wrong))):
        shmsched.launch("echo", **wrong)
    with pytest.raises(shmsched.InvalidRequest, match="spec is 5"):
        shmsched.launch(5)  # type: ignore[arg-type]


def test_the_longest_waits_of_a_daemon_and_of_its_launcher() -> None:
    longest = LONG_WAITS[0]
    waits = ("start_timeout", "step_timeout_s", "drain_timeout_s")
    with (
        shmsched.launch("echo", **dict.fromkeys(waits, longest)) as cluster,
        shmsched.Control(cluster.socket) as control,
    ):
        with cluster.client() as client, client.open_session() as session:
            session.submit([1]).result(longest)
        with pytest.raises(shmsched.InvalidRequest, match=f"drain_s .* from 0 to {longest}"):
            control.stop(drain_s=longest + 1)
        assert control.stop(drain_s=longest) == longest
        assert control.wait_closed(1e300)
    for name in waits:
        with pytest.raises((shmsched.InvalidRequest, shmsched.EngineStartError), match=f"{name} .* to {longest}"):
            shmsched.launch("echo", **{name: longest + 1})


def test_what_is_named(client: shmsched.Client) -> None:
    with client.open_session() as session:
        list(session.generate([1], max_new_tokens=2))
        for call, said in (
            (lambda: session.generate(None, max_new_tokens=1), "prompt_tokens: tokens are None"),  # type: ignore[arg-type]
            (lambda: session.generate([1], max_new_tokens=1, stop_tokens=[5000]), "stop_tokens: token 5000 is outside"),
            (
                lambda: session.generate([1], max_new_tokens=1, stop=["a\ud800"]),
                "stop has a lone surrogate, '\\ud800', at character 1",
            ),
            (lambda: session.stream([1], further=1, stop_tokens=(-1,)), "stop_tokens: token -1 is outside"),
            (lambda: client.open_session(model=5), "model is 5; a text"),  # type: ignore[arg-type]
            (lambda: client.open_session(timeout=math.nan), "timeout is nan"),
            (lambda: client.open_session(timeout=-1), "timeout is -1"),
            (lambda: client.generate_text("a\udc80"), "prompt has a lone surrogate, '\\udc80', at character 1"),
        ):
            with pytest.raises(REFUSED) as caught:
                call()  # type: ignore[no-untyped-call]
            assert said in str(caught.value)
    client.open_session(timeout=math.inf).close()
    client.open_session(timeout=1e300).close()


@pytest.mark.parametrize("kind", [shmsched.Client, shmsched.AsyncClient])
@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("model", 5), ("max_new_tokens", 0), ("max_new_tokens", "x"), ("sampling", 0.7), ("stop", [""]), ("stop", 5),
        ("seed", -1), ("options", "x"), ("deadline", math.nan), ("deadline", 0),
    ],
)  # fmt: skip
def test_a_text_is_refused_at_the_call(cluster: shmsched.Cluster, kind: type[Any], argument: str, wrong: Any) -> None:
    """And not as the first of it is asked for, elsewhere perhaps."""

    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            refused(client)

    def refused(client: Any) -> None:
        with pytest.raises(shmsched.InvalidRequest, match=rf"{argument} (is|are) .*; .*(must be|wanted)"):
            client.generate_text("x", **{argument: wrong})

    if kind is shmsched.AsyncClient:
        asyncio.run(main())
    else:
        with cluster.client() as client:
            refused(client)
        with pytest.raises(shmsched.ClientClosed):
            client.generate_text("x")


@pytest.mark.parametrize("wrong", [0.0, "a", -1, 3, True])
def test_a_place_in_a_session_says_what_is_wanted(client: shmsched.Client, wrong: Any) -> None:
    with client.open_session() as session:
        session.submit([1, 2]).result(DEADLINE)
        at = f"position is {wrong!r}; it must be a whole number from 0 to 2 (session {session.session_id} goes on at 2"
        with pytest.raises(shmsched.InvalidRequest, match=re.escape(at)):
            session.submit([1], position=wrong)
        holds = f"from 0 to 2 (what session {session.session_id} holds), or None"
        with pytest.raises(
            shmsched.InvalidRequest, match=re.escape(f"upto is {wrong!r}; it must be a whole number {holds}")
        ):
            session.fork(wrong)
        request = shmsched.Request(1, session.session_id, [1], shmsched.RequestParams(position=wrong))
        with pytest.raises(
            shmsched.InvalidRequest, match=f"position is {wrong!r}; it must be a whole number from 0 to 2"
        ):
            client.submit(request)


def test_nothing_is_held_afterwards(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    """The last of this file."""
    deadline = time.monotonic() + DEADLINE
    while (status := cluster.status())["engines"][0]["sessions"] or status["waiting_sessions"]:
        assert time.monotonic() < deadline, status
    assert status["ledger"]["balanced"]
    assert status["ledger"]["queued"] == status["ledger"]["in_flight"] == 0
    with client.open_session() as session:
        session.submit([1]).result(DEADLINE)

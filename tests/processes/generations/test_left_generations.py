"""However a generation ends, and whatever its engine can take back: the session goes on right behind what it holds."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import shmsched
from shmsched.client import AsyncGeneration, AsyncSession
from shmsched.client.generation import FinishReason, Generation, PromptLookup
from shmsched.client.generation.effects import Await, Next
from shmsched.client.replies import TokenStream
from shmsched.wire.frames import Rewinds

from processes.expected import echoes
from processes.leftovers import wait_until
from processes.loops import runner_of
from processes.ways import DEADLINE, ENGINES

LETTERS = 128
PROMPT = [5, 6]
MOST = 60
ABILITIES = ("Letters", "UnforkableLetters", "StatefulLetters", "RigidLetters")
WAYS: dict[str, dict[str, Any]] = {
    "continuation": {},
    "client-driven": {"continuation": False},
    "processed": {"logits_processor": lambda tokens, row: row},
}
ability_of = pytest.mark.parametrize("ability", ABILITIES)
way_of = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
EXPECTED = echoes(PROMPT, MOST, LETTERS)
STOP_TEXT = bytes(EXPECTED[10:13]).decode()


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(*(f"{ENGINES}:{name}?step_us=1000" for name in ABILITIES)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


# --- the ways of ending, each for a generation from PROMPT ---------------------------------------------------------------


def to_the_end(generation: Generation) -> None:
    list(generation)


def break_off(generation: Generation) -> None:
    for _ in itertools.islice(generation, 3):
        pass


def close_at_once(generation: Generation) -> None:
    generation.close()


def raise_in_the_loop(generation: Generation) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in generation:
            1 / 0  # noqa: B018


def be_interrupted(generation: Generation) -> None:
    next(generation)
    timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        list(generation)
        wait_until(lambda: False, "the interrupt")


def break_off_late(generation: Generation) -> None:
    """When all that may come has come."""
    next(generation)
    time.sleep(0.2)
    generation.close()


def stop_in_a_text(generation: Generation) -> None:
    "".join(generation.increments())


ENDS: dict[str, tuple[Callable[[Generation], None], dict[str, Any]]] = {
    "all its tokens": (to_the_end, {}),
    "a stop token": (to_the_end, {"stop_tokens": [EXPECTED[12]]}),
    "a stop text": (stop_in_a_text, {"stop": [STOP_TEXT]}),
    "leaving the loop": (break_off, {}),
    "leaving the loop before a stop text": (break_off, {"stop": [STOP_TEXT]}),
    "close at once": (close_at_once, {}),
    "an exception": (raise_in_the_loop, {}),
    "an interrupt": (be_interrupted, {"max_new_tokens": 2000}),
    "close at the end": (break_off_late, {"max_new_tokens": 5}),
}
end_of = pytest.mark.parametrize("end", ENDS)


def check_tokens(session: Any, generation: Generation | AsyncGeneration) -> None:
    """What it gave is right, and the session holds just that."""
    expected = echoes(PROMPT, len(generation.tokens) + 1, LETTERS)
    assert generation.tokens == expected[:-1]
    stands = [*session.history.tolist(), *([] if session.unfed is None else [session.unfed])]
    known = [*PROMPT, *echoes(PROMPT, max(MOST, len(stands)), LETTERS)]
    assert stands == known[: len(stands)]
    assert session.position == len(session.history)
    if generation.finish_reason is not FinishReason.STOP:
        assert stands == [*PROMPT, *generation.tokens] or not generation.tokens


def go_on(session: shmsched.Session) -> None:
    """It goes on by another generation, by a third that is left, and by a step; as echo would, had it only been fed what it holds."""
    fed = session.history.tolist()
    prompt = [7] if session.unfed is None else []
    fed += prompt if session.unfed is None else [session.unfed]
    more = list(session.generate(prompt, max_new_tokens=5))
    assert more == echoes(fed, 5, LETTERS)
    fed += more
    for token in session.generate([3], max_new_tokens=500):
        assert token == echoes([*fed, 3], 1, LETTERS)[0]
        break
    fed = session.history.tolist()
    assert session.submit([9]).result(DEADLINE).tokens.tolist() == echoes([*fed, 9], 1, LETTERS)
    assert session.position == len(fed) + 1


@ability_of
@way_of
@end_of
@pytest.mark.usefixtures("interruptible")
def test_the_session_goes_on_right_behind_it(
    client: shmsched.Client, ability: str, way: dict[str, Any], end: str
) -> None:
    leave, how = ENDS[end]
    with client.open_session(model=ability) as session:
        generation = session.generate(PROMPT, **{"max_new_tokens": MOST, **way, **how})
        leave(generation)
        check_tokens(session, generation)
        go_on(session)


@ability_of
@way_of
@pytest.mark.parametrize("seconds", [0.0, 0.004, 0.02])
def test_it_goes_on_behind_a_deadline(
    client: shmsched.Client, ability: str, way: dict[str, Any], seconds: float
) -> None:
    with client.open_session(model=ability) as session:
        generation = session.generate(PROMPT, max_new_tokens=2000, deadline=time.monotonic() + seconds, **way)
        with pytest.raises(shmsched.DeadlineExceeded):
            list(generation)
        check_tokens(session, generation)
        go_on(session)


@ability_of
def test_it_goes_on_behind_a_processor_that_raises(client: shmsched.Client, ability: str) -> None:
    def processor(tokens: Any, row: Any) -> Any:
        return row if len(tokens) < 4 else row[:3]

    with client.open_session(model=ability) as session:
        generation = session.generate(PROMPT, max_new_tokens=MOST, logits_processor=processor)
        with pytest.raises(shmsched.InvalidRequest, match="a row of floats"):
            list(generation)
        check_tokens(session, generation)
        go_on(session)


@ability_of
def test_a_draft_is_refused_where_rejecting_it_cannot_be_undone(client: shmsched.Client, ability: str) -> None:
    with client.open_session(model=ability) as session:
        if session.rewinds is Rewinds.ANYWHERE:
            for _ in itertools.islice(session.generate(PROMPT, max_new_tokens=MOST, draft=PromptLookup()), 3):
                pass
        else:
            with pytest.raises(shmsched.Unsupported, match=r"rejecting a drafted token takes rewinding anywhere"):
                session.generate(PROMPT, max_new_tokens=MOST, draft=PromptLookup())
            with pytest.raises(shmsched.Unsupported, match="so it cannot draft"):
                shmsched.EngineDraft(session)
            session.submit(PROMPT).result(DEADLINE)
        go_on(session)


def test_what_cannot_be_gone_back_to_is_refused_at_the_call(client: shmsched.Client) -> None:
    with client.open_session(model="StatefulLetters") as session:
        session.submit(PROMPT).result(DEADLINE)
        with pytest.raises(shmsched.Unsupported, match="can rewind to the beginning only, position 0"):
            session.submit([1], position=1)
        assert session.submit([1], position=0).result(DEADLINE).tokens.tolist() == echoes([1], 1, LETTERS)
        go_on(session)
    with client.open_session(model="RigidLetters") as session:
        session.submit(PROMPT).result(DEADLINE)
        for position in (0, 1):
            with pytest.raises(shmsched.Unsupported, match="cannot rewind"):
                session.submit([1], position=position)
        go_on(session)


@pytest.mark.parametrize("ability", ["StatefulLetters", "RigidLetters"])
@way_of
def test_what_was_under_way_is_kept_and_goes_on_without_a_prompt(
    client: shmsched.Client, ability: str, way: dict[str, Any]
) -> None:
    """Where the client samples, too: the answer that nobody waited for any more is sampled from as any other."""
    with client.open_session(model=ability) as session:
        generation = session.generate(PROMPT, max_new_tokens=MOST, **way)
        break_off(generation)
        assert session.unfed == generation.tokens[-1]
        more = list(session.generate([], max_new_tokens=4, **way))
        assert [*generation.tokens, *more] == EXPECTED[: len(generation.tokens) + 4]


def test_cancelling_a_step_where_a_session_can_only_begin_again() -> None:
    with (
        shmsched.launch(f"{ENGINES}:StatefulLetters?step_us=50000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):

        def running(tokens: list[int]) -> shmsched.StepFuture:
            future = session.submit(tokens)
            wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "the step to run")
            return future

        assert running([1, 2]).cancel()
        assert session.position == 0
        assert session.submit([3]).result(DEADLINE).tokens.tolist() == echoes([3], 1, LETTERS)
        before = running([4])
        # It is queued behind the one that runs, and no engine has seen it.
        assert session.submit([5]).cancel()
        assert before.result(DEADLINE).tokens.tolist() == echoes([3, 4], 1, LETTERS)
        assert session.submit([6]).result(DEADLINE).tokens.tolist() == echoes([3, 4, 6], 1, LETTERS)
        assert running([7]).cancel()
        wait_until(lambda: session.ended is not None, "the session to be lost")
        with pytest.raises(shmsched.SessionLost, match="can rewind to the beginning only"):
            session.submit([8])


@ability_of
def test_forks_of_what_was_left(client: shmsched.Client, ability: str) -> None:
    with client.open_session(model=ability) as session:
        break_off(session.generate(PROMPT, max_new_tokens=MOST))
        with session.fork() as fork, session.fork(1) as other:
            assert (fork.position, fork.unfed) == (session.position, session.unfed)
            assert (other.position, other.unfed) == (1, None)
            for one in (fork, other, session):
                go_on(one)


def test_a_prompt_that_did_not_run_to_its_end_is_undone_where_that_can_be(client: shmsched.Client) -> None:
    """In chunks, of which the deadline meets a later one."""
    for ability in ABILITIES:
        with client.open_session(model=ability) as session:
            prompt = [i % LETTERS for i in range(2000)]
            deadline = time.monotonic() + 0.0025
            with pytest.raises(shmsched.DeadlineExceeded):
                list(session.generate(prompt, max_new_tokens=5, deadline=deadline))
            assert session.history.tolist() == prompt[: session.position]
            if ability != "RigidLetters":
                assert session.position == 0
            go_on(session)


# --- the same for tasks --------------------------------------------------------------------------------------------------


async def leave_by_break(session: AsyncSession, how: dict[str, Any]) -> AsyncGeneration:
    generation = session.generate(PROMPT, **how)
    n = 0
    async for _ in generation:
        n += 1
        if n == 3:
            break
    return generation


async def leave_by_closing(session: AsyncSession, how: dict[str, Any]) -> AsyncGeneration:
    async with session.generate(PROMPT, **how) as generation:
        await anext(generation)
    return generation


async def leave_by_cancelling(session: AsyncSession, how: dict[str, Any]) -> AsyncGeneration:
    generation = session.generate(PROMPT, **{**how, "max_new_tokens": 2000})

    async def read() -> None:
        async for _ in generation:
            pass

    task = asyncio.create_task(read())
    while not generation.tokens:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return generation


async def leave_by_a_stop_text(session: AsyncSession, how: dict[str, Any]) -> AsyncGeneration:
    generation = session.generate(PROMPT, stop=[STOP_TEXT], **how)
    assert "".join([text async for text in generation.increments()]) == bytes(EXPECTED[:10]).decode()
    return generation


async def leave_by_a_deadline(session: AsyncSession, how: dict[str, Any]) -> AsyncGeneration:
    how = {**how, "max_new_tokens": 2000, "deadline": time.monotonic() + 0.01}
    generation = session.generate(PROMPT, **how)
    with pytest.raises(shmsched.DeadlineExceeded):
        async for _ in generation:
            pass
    return generation


@ability_of
@way_of
@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_closing, leave_by_cancelling, leave_by_a_stop_text, leave_by_a_deadline]
)
def test_the_session_of_a_task_goes_on_right_behind_it(
    cluster: shmsched.Cluster, ability: str, way: dict[str, Any], leave: Any
) -> None:
    async def main() -> None:
        async with (
            shmsched.AsyncClient(socket=cluster.socket) as client,
            client.open_session(model=ability) as session,
        ):
            generation = await leave(session, {"max_new_tokens": MOST, **way})
            while generation.finish_reason is None:
                await asyncio.sleep(0.001)
            check_tokens(session, generation)
            fed = session.history.tolist()
            prompt = [7] if session.unfed is None else []
            fed += prompt if session.unfed is None else [session.unfed]
            more = [token async for token in session.generate(prompt, max_new_tokens=5)]
            assert more == echoes(fed, 5, LETTERS)
            response = await session.submit([9])
            assert response.tokens.tolist() == echoes([*fed, *more[:-1], 9], 1, LETTERS)

    runner_of("asyncio")(main())


class Struck(BaseException):
    """What a signal's handler raises."""


@way_of
def test_a_generation_that_an_interrupt_keeps_from_its_caller_is_over_while_its_trace_is_looked_at(
    client: shmsched.Client, way: dict[str, Any]
) -> None:
    """As the first step has gone out, and before there is a generation to close."""

    def trace(frame: Any, event: str, arg: object) -> Any:
        within = frame.f_code is Generation.__init__.__code__ and event == "line"
        if within and isinstance(getattr(frame.f_locals["self"], "_effect", None), Await | Next):
            sys.settrace(None)
            raise Struck
        return trace

    with client.open_session(model="Letters") as session:
        sys.settrace(trace)
        try:
            session.generate(PROMPT, max_new_tokens=MOST, **way)
        except Struck:
            # Its trace, and all that is on it, is alive here.
            session.submit([1]).result(DEADLINE)
        else:
            pytest.fail("nothing was struck")
        finally:
            sys.settrace(None)


def test_a_session_is_free_once_its_last_token_is_here_though_its_stream_has_not_been_told(
    cluster: shmsched.Cluster,
) -> None:
    """The thread that receives has taken in the last token, and is about to tell the stream, as its caller leaves."""
    told, goes_on = threading.Event(), threading.Event()

    def hold(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is TokenStream.settle.__code__ and not told.is_set():
            told.set()
            assert goes_on.wait(DEADLINE), "the caller never came to its next step"

    threading.setprofile(hold)
    try:
        client = cluster.client()
    finally:
        threading.setprofile(None)
    with client, client.open_session(model="Letters") as session:
        generation = session.generate(PROMPT, max_new_tokens=4)
        assert told.wait(DEADLINE), "the last token never came"
        generation.close()
        step = session.submit(PROMPT)
        goes_on.set()
        assert step.result(DEADLINE).tokens.tolist() == EXPECTED[:1]

"""Faults of scheduling: who waits for whom, and where every step ends."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path
from typing import Any

import pytest

import shmsched
from shmsched.daemon.config import DaemonConfig
from shmsched.errors import ErrorCode
from shmsched.wire import frames
from shmsched.workers.echo import advance, answer

from faults.watched import Record
from processes.leftovers import wait_until
from support.peers.by_hand import EngineByHand

VOCAB = 1000
DEADLINE = 30.0


def test_f4_a_long_prompt_delays_no_decode_by_more_than_one_batch(tmp_path: Path) -> None:
    """A decode submitted while batch n runs goes with n + 1, or with n + 2 where n + 1 was formed before it was heard of."""
    record = Record(tmp_path)
    with (
        shmsched.launch(f"{record.spec}?step_us=1000", max_prefill_chunk_size=128) as cluster,
        cluster.client() as client,
    ):
        # Slots are given out in order: session i is in slot i, the prompt's in slot 8.
        sessions = [client.open_session() for _ in range(8)]
        prompt = client.open_session().submit([7] * 100_000)
        wait_until(lambda: record.started() >= 1, "the prompt to stream in")
        running: dict[Future[shmsched.Response], int] = {}
        hashes = [0] * 8
        asked: list[tuple[int, int, int]] = []

        def decode(i: int, token: int) -> None:
            hashes[i] = advance(hashes[i], [token])
            position = sessions[i].position
            running[sessions[i].submit([token])] = i
            asked.append((i, position, record.started()))

        for i in range(8):
            decode(i, i)
        while not prompt.done():
            done, _ = wait(running, DEADLINE, FIRST_COMPLETED)
            assert done, f"waited {DEADLINE:g} s in vain for a decode"
            for future in done:
                i = running.pop(future)
                assert future.result().tokens.tolist() == [answer(hashes[i], VOCAB)]
                decode(i, int(future.result().tokens[0]))
        assert not wait(running, DEADLINE).not_done, "the last decodes did not end"
        assert prompt.result().tokens.tolist() == [answer(advance(0, [7] * 100_000), VOCAB)]
    batches = record.batches()
    went_with = {(slot, position): n for n, rows in enumerate(batches, 1) for slot, position, _ in rows}
    assert len(asked) >= 80, "too few decodes ran beside the prompt to tell anything"
    assert max(went_with[i, position] - n for i, position, n in asked) <= 2
    # Nor do the decodes starve the prompt: from its first chunk to its last no batch goes without one.
    with_chunks = [n for n, rows in enumerate(batches) if any(slot == 8 for slot, _, _ in rows)]
    assert with_chunks == list(range(with_chunks[0], with_chunks[-1] + 1))


def batches_without_the_decode(directory: Path, linger_share: float, rounds: int) -> int:
    """How many prefill-only batches slip in while one session decodes ``rounds`` times beside a long prompt."""
    directory.mkdir()
    record = Record(directory)
    with (
        shmsched.launch(
            f"{record.spec}?step_us=50000",
            max_decode_sequences=1,
            max_prefill_chunk_size=4,
            linger_share=linger_share,
        ) as cluster,
        cluster.client() as client,
    ):
        decoding, prefilling = client.open_session(), client.open_session()
        token = 1
        prompt = prefilling.submit([7] * 64 * rounds)
        for _ in range(rounds):
            token = int(decoding.submit([token]).result(DEADLINE).tokens[0])
        assert not prompt.done(), "the prompt ended too early to tell anything"
        prompt.cancel()
    has_decode = [any(slot == 0 for slot, _, _ in rows) for rows in record.batches()]
    last = len(has_decode) - 1 - has_decode[::-1].index(True)
    return has_decode[has_decode.index(True) : last].count(False)


def test_f5_a_session_that_decodes_again_is_waited_for_before_a_prefill_only_batch(tmp_path: Path) -> None:
    rounds = 40
    waiting = batches_without_the_decode(tmp_path / "waiting", DaemonConfig().linger_share, rounds)
    not_waiting = batches_without_the_decode(tmp_path / "not_waiting", 0.0, rounds)
    assert not_waiting >= rounds * 3 // 4
    assert waiting <= rounds // 4


def test_f7_stale_duplicate_and_unknown_completions_are_counted_and_ignored() -> None:
    with shmsched.launch() as cluster, EngineByHand(cluster.socket) as engine, cluster.client() as client:
        wait_until(lambda: "echo" in client.models, "the client to hear of the model")
        session = client.open_session()

        def stale_answers() -> int:
            count: int = cluster.status()["engines"][0]["stale_answers"]
            return count

        # For batches that never were, and for sessions and slots that are not being opened.
        engine.send(frames.Done(1, ()))
        engine.send(frames.Done(2**64 - 1, ("no such step",)))
        engine.send(frames.BatchFailed(77, "no such batch"))
        for slot, number in ((0, 999), (6, 1), (2**32 - 1, 2**64 - 1)):
            engine.send(frames.SlotOpened(slot, number))
            engine.send(frames.SlotRefused(slot, number, ErrorCode.ENGINE_ERROR, "no such opening"))
        wait_until(lambda: stale_answers() == 3, "three stale answers to be counted")

        # Twice for the same batch, and the batch after it is not settled by that.
        first = session.submit([1])
        batch = engine.work()
        engine.answer(batch, 11)
        engine.send(frames.Done(batch, ()))
        assert first.result(DEADLINE).tokens.tolist() == [11]
        second = session.submit([2])
        after = engine.work()
        engine.send(frames.Done(batch, ()))
        engine.send(frames.BatchFailed(batch, "too late"))
        wait_until(lambda: stale_answers() == 6, "three more stale answers to be counted")
        assert not second.done()
        engine.answer(after, 22)
        assert second.result(DEADLINE).tokens.tolist() == [22]

        # For steps that were cancelled, whose session was closed, whose client is gone.
        ignored = cluster.status()["ledger"]["ignored"]
        with cluster.client() as aborting:
            for abort in (
                lambda future, _: future.cancel(),
                lambda _, closing: closing.close(),
                lambda *_: aborting.close(),
            ):
                closing = aborting.open_session()
                future = closing.submit([3])
                batch = engine.work()
                abort(future, closing)
                wait_until(lambda: not cluster.status()["ledger"]["in_flight"], "the step to be settled")
                engine.answer(batch, 33)
                wait_until(lambda: not cluster.status()["engines"][0]["in_flight"], "the batch to end")
                with pytest.raises((CancelledError, shmsched.SessionClosed, shmsched.ClientClosed)):
                    future.result(DEADLINE)
        ledger = cluster.status()["ledger"]
        assert ledger["ignored"] - ignored == 3
        assert (ledger["completed"], ledger["cancelled"], ledger["failed"]) == (2, 3, 0)
        third = session.submit([4])
        engine.answer(engine.work(), 44)
        assert third.result(DEADLINE).tokens.tolist() == [44]


STATES = ("queued", "in_flight", "completed", "failed", "cancelled")


def test_f8_the_ledger_balances_at_every_moment_and_every_future_settles(tmp_path: Path) -> None:
    """Under load, with cancels, rewinds, closed sessions and an engine that is killed."""
    futures: list[Future[shmsched.Response]] = []
    broken: list[BaseException] = []

    def load(client: shmsched.Client, seed: int, rounds: int) -> None:
        rng = random.Random(seed)
        session = client.open_session(timeout=DEADLINE)
        for _ in range(rounds):
            try:
                mine = [session.submit([rng.randrange(VOCAB)] * rng.choice([1, 1, 1, 30])) for _ in range(4)]
                futures.extend(mine)
                if rng.random() < 0.3:
                    rng.choice(mine).cancel()
                elif rng.random() < 0.1:
                    session.close()
                    session = client.open_session(timeout=DEADLINE)
                else:
                    wait(mine, DEADLINE)
                if rng.random() < 0.1:
                    futures.append(session.submit([1], position=session.position // 2))
            except (shmsched.SessionLost, shmsched.EngineDied):
                session = client.open_session(timeout=DEADLINE)

    def guarded(*arguments: Any) -> None:
        try:
            load(*arguments)
        except BaseException as e:
            broken.append(e)

    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=200", engines=2, max_prefill_chunk_size=16) as cluster,
        cluster.client() as one,
        cluster.client() as two,
        shmsched.Control(cluster.socket) as control,
    ):
        threads = [threading.Thread(target=guarded, args=(c, seed, 150)) for seed, c in enumerate([one, two] * 4)]
        for thread in threads:
            thread.start()
        polls = 0
        killed = False
        while any(thread.is_alive() for thread in threads):
            status = control.status()
            ledger = status["ledger"]
            assert ledger["submitted"] == sum(ledger[state] for state in STATES), ledger
            assert min(ledger[state] for state in STATES) >= 0, ledger
            polls += 1
            if not killed and ledger["completed"] > 500:
                os.kill(status["engines"][0]["pid"], signal.SIGKILL)
                killed = True
        assert broken == []
        assert polls >= 20
        assert killed
        not_settled = wait(futures, DEADLINE).not_done
        assert not not_settled, f"{len(not_settled)} of {len(futures)} futures did not settle within {DEADLINE:g} s"
        wait_until(lambda: control.status()["ledger"]["in_flight"] == 0, "what was cancelled in flight to end")
        ledger = control.status()["ledger"]
        assert ledger["submitted"] == ledger["completed"] + ledger["failed"] + ledger["cancelled"]
        assert min(ledger["completed"], ledger["failed"], ledger["cancelled"]) > 0

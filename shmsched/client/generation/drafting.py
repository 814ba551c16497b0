"""Guesses at what comes next, for a model to verify many at a time."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shmsched.arguments import shown, whole
from shmsched.client.generation.distribution import draw, probabilities
from shmsched.client.generation.effects import Await, Plan, Submit, TokenArray
from shmsched.dataplane.session_core import SessionCore
from shmsched.dataplane.tokens import as_tokens
from shmsched.engine.sampling import UnusableLogits, uniform
from shmsched.errors import InvalidRequest, ShmschedError, StepFailed, Unsupported
from shmsched.not_copied import NotCopied
from shmsched.params import GREEDY, SamplingParams
from shmsched.saying import counted
from shmsched.steps import Tokens
from shmsched.wire.frames import Rewinds

SUM_TOLERANCE = 0.01
"""By which what should be 1 may differ: rounding in half precision makes as much of a large vocabulary."""
_DRAWING = 0xD4AF7
"""Mixed into the seed, so that what is drafted is independent of what it is judged by."""


class Draft(NamedTuple):
    """What might come next."""

    tokens: list[int]
    distributions: list[npt.NDArray[np.float64]] | None = None
    """What each token was drawn from: the probabilities of the whole vocabulary. None: the tokens were not drawn at all."""


def checked(draft: Any, n: int, vocab_size: int) -> Draft:
    """The first ``n`` tokens of what a drafter gave, with what they were drawn from. Raises InvalidRequest, naming what is wrong."""
    drafted: Any = getattr(draft, "tokens", None)
    given: Any = getattr(draft, "distributions", None)
    if not hasattr(drafted, "__len__") or not (given is None or hasattr(given, "__len__")):
        raise InvalidRequest(
            f"the drafter returned {shown(draft)}; a Draft of tokens and distributions (or None) is wanted"
        )
    try:
        tokens = as_tokens(drafted[:n], vocab_size).tolist() if len(drafted) else []
    except (TypeError, InvalidRequest) as e:
        raise InvalidRequest(f"the drafter gave the tokens {str(drafted)[:80]}: {e}") from None
    if given is None:
        return Draft(tokens)
    if len(given) != len(drafted):
        raise InvalidRequest(
            f"the drafter gave {counted(len(drafted), 'token')} and {counted(len(given), 'distribution')}; one for each is wanted"
        )
    return Draft(tokens, [_distribution(given[i], i, token, vocab_size) for i, token in enumerate(tokens)])


def _distribution(given: Any, i: int, token: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """What drafted token ``i`` was drawn from, if it can have been."""
    what = f"distribution {i} of the draft, of token {token},"
    try:
        q = np.asarray(given, np.float64)
    except (TypeError, ValueError) as e:
        raise InvalidRequest(f"{what} is no row of numbers: {e}") from None
    if q.shape != (vocab_size,):
        raise InvalidRequest(f"{what} has shape {q.shape}; ({vocab_size},) is wanted, a probability for each token")
    least, total = float(q.min()), float(q.sum())
    if not (least >= 0.0 and abs(total - 1.0) <= SUM_TOLERANCE):
        raise InvalidRequest(f"{what} adds up to {total:g}, its least value is {least:g}; probabilities are wanted")
    if not q[token] > 0.0:
        raise InvalidRequest(f"{what} gives that token no probability, so it was not drawn from there")
    return q


class Drafter(Protocol):
    """Anything that guesses. It may be wrong: what is generated does not depend on it, only how many steps that takes.

    What it raises ends the generation, as does a ``Draft`` that is none: InvalidRequest names what is wrong with it.
    """

    def draft(self, tokens: TokenArray, n: int) -> Draft:
        """At most ``n`` tokens, or none, to follow ``tokens``: the prompt and all that was generated, int32."""
        ...


class PromptLookup:
    """Guesses that what followed the last few tokens before will follow them again (Saxena 2023).

    max_ngram: how many of the last tokens are looked for at most; fewer are, if those are found nowhere.
    n_draft: how many tokens to draft at most.
    """

    def __init__(self, max_ngram: int = 3, n_draft: int = 8) -> None:
        try:
            self.max_ngram = whole("max_ngram", max_ngram, 1, 2**31 - 1)
            self.n_draft = whole("n_draft", n_draft, 1, 2**31 - 1)
        except InvalidRequest as e:
            raise InvalidRequest(
                f"max_ngram is {shown(max_ngram)} and n_draft is {shown(n_draft)}; both must be 1 or more ({e})"
            ) from None

    def draft(self, tokens: TokenArray, n: int) -> Draft:
        n = min(n, self.n_draft)
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            ends = _ends_of(tokens, size)
            if len(ends):
                # The latest place that is followed by as many tokens as are wanted, or else by the most.
                enough = ends[ends + n <= len(tokens)]
                end = int(enough[-1] if len(enough) else ends[0])
                return Draft(tokens[end : end + n].tolist())
        return Draft([])


def _ends_of(tokens: TokenArray, size: int) -> npt.NDArray[np.intp]:
    """Where the last ``size`` tokens were before: the index behind each such place, ascending."""
    n_places = len(tokens) - size
    found = np.ones(n_places, bool)
    for i in range(size):
        found &= tokens[i : i + n_places] == tokens[len(tokens) - size + i]
    return np.flatnonzero(found) + size


class EngineDraft(NotCopied):
    """Lets a smaller model of the same vocabulary guess, in a session of its own on the same daemon.

    The session is the drafter's: it follows the text by itself, by rewinding. What goes wrong with it costs the generation nothing
    but drafts: it goes on without them, token by token, and ``error`` says why, at once and for as long as no other generation
    begins with this draft, which tries again. ``generation.draft_error`` keeps it.
    """

    def __init__(self, session: Any, n_draft: int = 4) -> None:
        n_draft = whole("n_draft", n_draft, 1, 2**31 - 1)
        if not isinstance(session, SessionCore):
            raise InvalidRequest(f"session is {shown(session)}; a session to draft in is wanted")
        if session.rewinds is not Rewinds.ANYWHERE:
            raise Unsupported(f"model {session.model.name!r} {session.rewinds.in_words}, so it cannot draft")
        self.session = session
        self.n_draft = n_draft
        self.error: ShmschedError | None = None
        """Why the last generation got no more drafts; None while all is well."""

    def drafting(self, tokens: Tokens, n: int, sampling: SamplingParams) -> Plan[Draft]:
        """At most ``n`` tokens to follow ``tokens``, drawn as ``sampling`` says."""
        n = min(n, self.n_draft, self.session.most_tokens - len(tokens) + 1)
        if n < 1 or self.error is not None:
            return Draft([])
        try:
            return (yield from self._draft([int(t) for t in tokens], n, sampling))
        except ShmschedError as error:
            # A lost session, a full queue, a connection of its own that ended: what ends the generation too, its own steps meet.
            self.error = error
        except UnusableLogits as e:
            self.error = StepFailed(
                f"a step of session {self.session.session_id}, which drafts, failed: row 0 of its logits, for position"
                f" {self.session.position - 1}, has {e}"
            )
        return Draft([])

    def _draft(self, tokens: list[int], n: int, sampling: SamplingParams) -> Plan[Draft]:
        start = _common(self.session.history.tolist(), tokens[:-1])
        feed = tokens[start:]
        drafted: list[int] = []
        distributions: list[npt.NDArray[np.float64]] = []
        greedy = sampling.temperature == 0.0
        while True:
            step = yield Submit(feed, start, GREEDY if greedy else None, session=self.session)
            response = yield Await(step)
            if greedy:
                drafted.append(int(response.tokens[0]))
            else:
                distributions.append(probabilities(response.logits.data[0], sampling))
                u = uniform((sampling.seed or 0) ^ _DRAWING, start + len(feed) - 1)
                drafted.append(draw(distributions[-1], u))
            if len(drafted) == n:
                return Draft(drafted, None if greedy else distributions)
            start, feed = start + len(feed), drafted[-1:]


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])

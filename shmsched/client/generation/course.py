"""How a generation stands: what it was asked for, what was sampled, what the caller was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from enum import Enum

import numpy as np

from shmsched.client.generation.effects import Await, Emit, Handle, Plan, TokenArray
from shmsched.client.generation.stop_text import Piece, TextGate
from shmsched.errors import ShmschedError
from shmsched.params import SamplingParams
from shmsched.steps import Response, Tokens


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token, or a stop text."""
    LENGTH = "length"
    """``max_new_tokens``, or the session is full."""
    CANCELLED = "cancelled"
    """Its caller left early."""
    FAILED = "failed"
    """An error, which the caller was given."""


class Course:
    """The tokens of one generation. Every way of generating takes each token that it samples through here.

    The session holds the prompt and what was sampled but for the last token: that one is *unfed*, and what is fed next.
    """

    def __init__(
        self,
        prompt: TokenArray,
        position: int,
        *,
        sampling: SamplingParams,
        most: int,
        stop_tokens: Collection[int] = (),
        unfed: int | None = None,
        before: TokenArray | None = None,
        is_last: bool = False,
        held: str | None = None,
        goes_on_with: str | None = None,
        gate: TextGate | None = None,
        session_id: int = 0,
    ) -> None:
        """prompt: what is fed first, at ``position``; it begins with ``unfed`` if the session has one.

        most: how many tokens to sample. is_last: nothing can follow them. before: what the session holds up to
        ``position``, if it is known. held: what it holds back of its text; goes_on_with: the same, if this generation's text goes on
        there. session_id: for errors.
        """
        self.session_id = session_id
        self.sampling = sampling
        self.stop_tokens = frozenset(stop_tokens)
        self.gate = gate
        self.sampled: list[int] = []
        self.given: list[int] = []
        self.pieces: list[Piece] = []
        """Of ``given``, where there is a gate."""
        self.rest_of_text = ""
        """What comes behind the text of the last token, up to a stop text within a token, say."""
        self.goes_on_with = goes_on_with
        self.is_last = is_last
        """Nothing follows what it samples, however it ends."""
        self.reads: Callable[[Course, Response], int] = _sampled
        """The token that a step gave."""
        self.finish_reason: FinishReason | None = None
        self.draft_error: ShmschedError | None = None
        """Why it goes on without drafts, if it does."""
        self.step: Handle | None = None
        """What is on its way."""
        self._released: deque[int | Piece] = deque()
        self._prompt = prompt
        self._start = position
        self._most = most
        self._held_before = held
        self._unfed_before = unfed
        self._before = np.empty(0, np.int32) if before is None else before

    @property
    def left(self) -> int:
        """How many tokens may still be sampled."""
        return self._most - len(self.sampled)

    @property
    def position(self) -> int:
        """Where the next feed starts."""
        return self._start + (len(self._prompt) + len(self.sampled) - 1 if self.sampled else 0)

    @property
    def feed(self) -> Tokens:
        """What is fed next: the prompt, then the token that was sampled last."""
        return self.sampled[-1:] or self._prompt

    @property
    def last_position(self) -> int:
        """The position of the last token of ``feed``: what its row is sampled with."""
        return self._start + len(self._prompt) + len(self.sampled) - 1

    @property
    def unfed(self) -> int | None:
        """What a later generation of the session is to feed first, were this one to end now."""
        return self.sampled[-1] if self.sampled else self._unfed_before

    def context(self) -> TokenArray:
        """All tokens up to the end of ``feed`` that are known: int32."""
        return np.concatenate([self._before, self._prompt, np.array(self.sampled, np.int32)])

    def fed(self) -> TokenArray:
        """The tokens at positions 0 to ``position``: int32. They are known from the beginning only with ``before``."""
        return self.context()[: self.position]

    @property
    def complete(self) -> bool:
        """Whether all has come and was given, so that nothing is left to do but to say where the session stands."""
        return self.finish_reason is not None and not self._released and (self.step is None or self.step.done())

    def answer(self) -> Plan[Response]:
        """Wait for the step that is on its way."""
        response: Response = yield Await(self.step)
        self.step = None
        return response

    def token_of(self, response: Response) -> int:
        """The token that a step gave."""
        return self.reads(self, response)

    def take(self, token: int) -> None:
        """A token was sampled: find out what can be given to the caller now, and whether the generation ends."""
        self.sampled.append(token)
        if self.finish_reason is not None:
            return
        gate = self.gate
        if token in self.stop_tokens:
            self.finish_reason = FinishReason.STOP
        elif gate is None:
            self._released.append(token)
        else:
            self._released += gate.push(token)
            if gate.stopped:
                self.finish_reason = FinishReason.STOP
        if self.finish_reason is None and self.left <= 0:
            self.finish_reason = FinishReason.LENGTH
        if gate is not None and self.finish_reason is not None and not gate.stopped:
            self._released += gate.finish() if self.text_ended else gate.cut()
        if gate is not None and self.text_ended:
            self.rest_of_text = gate.rest

    @property
    def text_ended(self) -> bool:
        """Nothing can follow what was sampled that its text would go on with."""
        reason = self.finish_reason
        return reason is FinishReason.STOP or (reason is FinishReason.LENGTH and self.is_last)

    @property
    def text(self) -> str:
        """What comes with the tokens that were given, where there is a gate; and all, once that was all."""
        all_given = self.finish_reason is not None and not self._released
        return "".join([piece.text for piece in self.pieces]) + (self.rest_of_text if all_given else "")

    @property
    def held(self) -> str | None:
        """What a later generation's text begins with, were this one to end now; None if nothing of it goes on."""
        if self.text_ended:
            return None
        return "".join([piece.held for piece in self.pieces]) if self.given else self._held_before

    def giving(self) -> Plan[None]:
        """Give the caller what can be given."""
        while self._released:
            yield Emit(self._give())

    def _give(self) -> int:
        released = self._released.popleft()
        if isinstance(released, Piece):
            self.pieces.append(released)
            released = released.token
        self.given.append(released)
        return released

    def undo(self) -> None:
        """What the caller was not given was never sampled."""
        self._released.clear()
        if len(self.given) < len(self.sampled):
            del self.sampled[len(self.given) :]
            self.finish_reason = None

    def keep(self) -> None:
        """What was sampled stands, and counts as given."""
        if self.gate is not None and self.finish_reason is None:
            self._released += self.gate.cut()
        while self._released:
            self._give()


def _sampled(course: Course, response: Response) -> int:
    return int(response.tokens[0])

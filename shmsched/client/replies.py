"""What the client's channel answers a submission through, whoever waits for it and however."""

from __future__ import annotations

from abc import abstractmethod

from shmsched.dataplane.submission import PendingResult
from shmsched.errors import ShmschedError, StepCancelled
from shmsched.not_copied import NotCopied
from shmsched.steps import Response, SampledToken

_NO_LIMIT = 1 << 62


class TokenStream(NotCopied, PendingResult):
    """The tokens of a generation that the scheduler drives, as they come.

    ``taken`` counts those that its consumer has taken. The session holds the prompt and all tokens but the last that came:
    that one is sampled, and not fed yet.

    One receives and one takes, without a lock between them: ``came`` and ``taken`` only grow, each by one store of its own side.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = True
        self._tokens: list[SampledToken | None] = []
        """All that have come. Those that were taken leave their places."""
        self.came = 0
        """How many there are to take, or were."""
        self.taken = 0
        self._limit = _NO_LIMIT
        """How many may be taken: where it is being cancelled, no more than were then."""
        self._n_in_all: int | None = None
        """How many tokens it has, once the last has come."""
        self.ended = False
        self.cancelled = False
        self.error: ShmschedError | None = None
        """Why it ended, if not because all tokens had come."""
        self.start = 0
        """The position of the prompt's first token."""
        self.prompt_end = 0
        """The position behind the prompt: where the first token goes."""
        self.step_position = 0
        """Where the outstanding step starts. All three are guarded by the channel's lock."""

    @abstractmethod
    def wake(self) -> None:
        """Somebody may wait for what has just come."""

    @abstractmethod
    def cancel(self) -> bool:
        """Want no more of it. False if its last token has come."""

    @abstractmethod
    def halt(self) -> None:
        """Have the step that is queued or runs be the last."""

    def begins(self, start: int, prompt_end: int, step_position: int) -> None:
        self.start, self.prompt_end, self.step_position = start, prompt_end, step_position

    def done(self) -> bool:
        return self.ended

    @property
    def ready(self) -> bool:
        """Whether ``take`` has something to say."""
        return self.taken < self.came or self.ended

    @property
    def last(self) -> bool:
        """Whether the token taken last is the last one."""
        return self.ended and self.taken >= self.came and self.error is None and not self.cancelled

    def take(self) -> SampledToken | None:
        """The next token, if it is here. Raises why there will not be one: StepError, or EOFError after the last."""
        # Before the tokens: the last one may come, and the end with it, right after a look that has found none.
        ended, n = self.ended, self.taken
        if n < self.came and n < self._limit:
            token = self._tokens[n]
            if n:
                self._tokens[n - 1] = None
            self.taken = n + 1
            return token
        if self.error is not None:
            raise type(self.error)(str(self.error))
        if ended:
            raise EOFError("the generation has ended")
        return None

    @property
    def resume_at(self) -> int:
        """Where the session stands for one who has taken ``taken`` tokens and none of what came after."""
        return self.prompt_end + self.taken - 1 if self.taken else self.start

    # --- under the channel's lock; each may be called again --------------------------------------------------------------

    def hold(self) -> None:
        """No more is to be taken, while it is decided whether to cancel it."""
        self._limit = self.taken

    def go_on(self) -> None:
        """It was not."""
        if not self.withdrawn:
            self._limit = _NO_LIMIT

    @property
    def held(self) -> bool:
        return self._limit != _NO_LIMIT

    def withdraw(self) -> None:
        """What came and was not taken does not count."""
        self.withdrawn = self.cancelled = True
        self.ended = True

    def put(self, n: int, tokens: list[SampledToken]) -> None:
        """They came after the first ``n``, and more will."""
        self._tokens[n:] = tokens
        self.came = n + len(tokens)

    # ---------------------------------------------------------------------------------------------------------------------

    def settle(self, response: Response) -> None:
        if not self.ended:
            assert response.logprobs is not None
            if self._n_in_all is None:
                n = self.came
                self._tokens[n:] = [SampledToken(int(response.tokens[0]), float(response.logprobs[0]), self.arrived)]
                self._n_in_all = n + 1
            self.came = self._n_in_all
            self.ended = True
        self.wake()

    def settle_failed(self, error: ShmschedError) -> None:
        if not self.ended:
            self.error = error
            self.ended = True
        self.wake()

    def settle_cancelled(self) -> None:
        # Its own cancelling has ended it.
        if not self.withdrawn:
            self.settle_failed(
                StepCancelled("an earlier step of the session was cancelled, and this generation with it")
            )

"""A session as an asynchronous client holds it."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shmsched.client.async_replies import AsyncStream
from shmsched.client.async_submitted import Submitted
from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.generation import Drafter, EngineDraft, LogitsProcessor
from shmsched.client.generation.async_generation import AsyncGeneration
from shmsched.client.generation.start import OnSessionLost, start
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import checked_deadline
from shmsched.not_copied import NotCopied
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.steps import Response, Tokens

if TYPE_CHECKING:
    from shmsched.client.async_client import AsyncClient
    from shmsched.client.models import Model


class AsyncSession(SessionCore):
    """One sequence's state in one engine. Made by ``AsyncClient.open_session``; use it in an ``async with`` block."""

    def __init__(
        self, client: AsyncClient, session_id: int, model: Model, engine: int, seed: int, options: bytes = b""
    ) -> None:
        super().__init__(session_id, model, engine, seed, options)
        self._client = client

    def __del__(self) -> None:
        client = getattr(self, "_client", None)
        if client is not None and self.ended is None:
            client._session_collected(self)

    def submit(
        self,
        tokens: Tokens,
        *,
        position: int | None = None,
        sampling: SamplingParams | None = GREEDY,
        output_rows: OutputRows = OutputRows.LAST,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> Submitted[Response]:
        """Append ``tokens`` to the session; ``await`` what this returns for the :class:`Response` of the last of them.

        They are submitted by the call, or stand in line for room from then on: steps run in the order of the calls, whichever is
        awaited first, and also if none is. Arguments and errors are those of ``Session.submit``; what can be refused at once is
        raised by the call. Cancelling a task that waits for it cancels the step, and the session goes on from where it started.
        """
        client = self._client
        reply, place = client._put_step(self, tokens, position, sampling, output_rows, deadline, block, block_timeout)
        return Submitted(client, reply, place, reply.wait)

    def stream(
        self,
        tokens: Tokens,
        *,
        further: int,
        stop_tokens: tuple[int, ...] = (),
        sampling: SamplingParams = GREEDY,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> Submitted[AsyncStream]:
        """Append ``tokens``, then let the scheduler go on by itself, as ``Session.stream`` does. It is submitted by the call, as
        by ``submit``; ``await`` what this returns for the stream."""
        client = self._client
        stream, place = client._put_stream(self, tokens, sampling, further, stop_tokens, deadline, block, block_timeout)
        return Submitted(client, stream, place, stream.itself)

    def generate(
        self,
        prompt_tokens: Tokens,
        *,
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_tokens: Collection[int] | None = None,
        stop: Sequence[str] = (),
        logits_processor: LogitsProcessor | None = None,
        draft: Drafter | EngineDraft | None = None,
        on_session_lost: OnSessionLost = "raise",
        deadline: float | None = None,
        continuation: bool = True,
    ) -> AsyncGeneration:
        """Feed the prompt and give the tokens that follow it, as they come: ``async for token in session.generate(...)``.

        Arguments and errors are those of ``Session.generate``. It begins with the first token asked for.
        """
        self._client._check_here()
        if deadline is not None:
            deadline = checked_deadline(deadline)
        self._client._settle(self)
        begun = start(
            self, prompt_tokens, max_new_tokens, sampling, stop_tokens, stop, logits_processor, draft, on_session_lost, continuation
        )  # fmt: skip
        return AsyncGeneration(self, *begun, deadline)

    def fork(
        self, upto: int | None = None, *, seed: int | None = None, block: bool = True, timeout: float | None = None
    ) -> OpeningSession:
        """Another session that begins with this one's first ``upto`` tokens, as ``Session.fork`` gives: ``await`` it, or enter it
        with ``async with``."""
        self._client._check_here()
        return OpeningSession(self._client, self._client._fork(self, upto, seed, block, timeout))

    async def close(self) -> None:
        """End the session. What is outstanding fails with SessionClosed. Idempotent."""
        if self.ended is None and not self._client._inherited:
            self._client._check_here()
        self._client._close_session(self)

    async def reopen(self, timeout: float | None = None) -> None:
        """After SessionLost: stand for a new, empty session on a living engine, as ``Session.reopen`` does."""
        await self._client._reopen(self, timeout)

    async def __aenter__(self) -> AsyncSession:
        self._client._check_here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class OpeningSession(NotCopied, Coroutine[Any, Any, AsyncSession]):
    """A session to come: ``await`` it, make it a task, or enter it with ``async with``, which closes it at the end."""

    def __init__(self, client: AsyncClient, opening: Coroutine[Any, Any, AsyncSession]) -> None:
        self._client = client
        self._opening = opening
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        self._client._check_here()
        return self._opening.__await__()

    def send(self, value: Any, /) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

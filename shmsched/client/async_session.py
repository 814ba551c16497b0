"""A session as an asynchronous client holds it."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

from shmsched.client.async_replies import AsyncStream
from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.generation import Drafter, EngineDraft, LogitsProcessor
from shmsched.client.generation.async_generation import AsyncGeneration
from shmsched.client.generation.start import OnSessionLost, start
from shmsched.client.session_core import SessionCore
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

    async def submit(
        self,
        tokens: Tokens,
        *,
        position: int | None = None,
        sampling: SamplingParams | None = GREEDY,
        output_rows: OutputRows = OutputRows.LAST,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> Response:
        """Append ``tokens`` to the session and wait for the :class:`Response` of the last of them.

        Arguments and errors are those of ``Session.submit``. Cancelling the task cancels the step, and the session goes on from
        where it started. Several tasks may submit to one session: their steps run in the order in which the tasks got here.
        """
        return await self._client._submit(self, tokens, position, sampling, output_rows, deadline, block, block_timeout)

    async def stream(
        self,
        tokens: Tokens,
        *,
        further: int,
        stop_tokens: tuple[int, ...] = (),
        sampling: SamplingParams = GREEDY,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> AsyncStream:
        """Append ``tokens``, then let the scheduler go on by itself, as ``Session.stream`` does."""
        return await self._client._stream(self, tokens, sampling, further, stop_tokens, deadline, block, block_timeout)

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
        return OpeningSession(self._client._fork(self, upto, seed, block, timeout))

    async def close(self) -> None:
        """End the session. What is outstanding fails with SessionClosed. Idempotent."""
        self._client._close_session(self)

    async def reopen(self, timeout: float | None = None) -> None:
        """After SessionLost: stand for a new, empty session on a living engine, as ``Session.reopen`` does."""
        await self._client._reopen(self, timeout)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class OpeningSession(Awaitable[AsyncSession]):
    """A session to come: ``await`` it, or enter it with ``async with``, which closes it at the end."""

    def __init__(self, opening: Awaitable[AsyncSession]) -> None:
        self._opening = opening
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[None, None, AsyncSession]:
        return cast("Generator[None, None, AsyncSession]", self._opening.__await__())

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opening
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

"""One session after the other: opened, used up, closed; and what came of it counted."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from shmsched import (
    AsyncClient,
    Client,
    ClientClosed,
    Full,
    Model,
    SchedulerDied,
    SchedulerStopped,
    SessionClosed,
    ShmschedError,
    StepError,
)
from shmsched.tools.load.mirror import I32, Mirror
from shmsched.tools.load.part import RETRY_AFTER_FAILURE_S, RETRY_S, Parent
from shmsched.tools.load.tally import Tally

OPEN_S = 0.5


class Spoilt(Exception):
    """The session cannot be checked any further; why is counted."""


class Worker(ABC):
    """Its coroutines wait as the client does: on asyncio, or in the thread that runs them."""

    patience_s = 30.0
    """What has not come by then is lost."""

    def __init__(
        self, client: Client | AsyncClient, model: Model, parent: Parent, over: threading.Event, index: int = 0
    ) -> None:
        self.tally = Tally()
        self.outstanding = 0
        """Steps of which the answer has not come."""
        self.vocab, self.max_chunk = model.info.vocab_size, model.max_prefill_chunk_size
        self.max_tokens = model.info.max_session_tokens
        self.over = over
        """The connection is to end."""
        self.parent = parent
        self.client = client
        self._model = model.name
        self._leaves_open = index % 2 == 1
        """Its last session is left to the end of the connection, which must do as well."""
        self.session: Any = None
        self.at_end = False

    @abstractmethod
    async def use(self, session: Any) -> None:
        """Until it is used up, or the connection is to end. Raises Spoilt, and what the client does."""

    def in_thread(self) -> None:
        """Run in this one, which it never gives back before its end."""
        try:
            self.run().send(None)
        except StopIteration:
            pass

    async def run(self) -> None:
        while not self.over.is_set():
            try:
                self.session = await self.call(self.client.open_session, model=self._model, timeout=OPEN_S)
            except Full:
                self.tally.full += 1
                await self.pause(RETRY_S)
            except ShmschedError as e:
                self.failed(e, 1, "opening a session")
                await self.pause(RETRY_AFTER_FAILURE_S)
            else:
                self.tally.sessions_opened += 1
                await self._use_up(self.session)
        self.at_end = True

    async def _use_up(self, session: Any) -> None:
        try:
            await self.use(session)
        except Spoilt:
            pass
        except ShmschedError as e:
            # Of a session that is gone, why it is gone says more than that it is.
            error = session.ended if isinstance(e, SessionClosed) and session.ended is not None else e
            self.failed(error, 1, f"session {session.session_id}, a call")
            await self.pause(RETRY_AFTER_FAILURE_S)
        if not (self._leaves_open and self.over.is_set()):
            await self.call(session.close)
            self.tally.sessions_closed += 1

    async def pause(self, seconds: float) -> None:
        if isinstance(self.client, AsyncClient):
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the client, and wait for what comes of it. Raises TimeoutError after ``patience_s``."""
        if isinstance(self.client, Client):
            return self.called(function, *args, **kwargs)
        async with asyncio.timeout(self.patience_s):
            return await function(*args, **kwargs)

    def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made.result(self.patience_s) if isinstance(made, Future) else made

    async def step(self, session: Any, mirror: Mirror, tokens: I32, start: int) -> None:
        """One step that is waited for and checked."""
        (wanted,) = mirror.answers(start, tokens)[-1:].tolist()
        where = f"session {session.session_id}, a step at {start}"
        self.outstanding = 1
        try:
            response = await self.call(session.submit, tokens, position=start if start < len(mirror) else None)
        except StepError as e:
            self.failed(e, 1, where)
            raise Spoilt from None
        except TimeoutError:
            self.tally.sent += 1
            self.tally.say_lost(1, where)
            raise Spoilt from None
        finally:
            self.outstanding = 0
        self.tally.rewinds += start < len(mirror)
        self.answered(1, len(tokens))
        if response.tokens.tolist() != [wanted]:
            self.spoilt(session, f"a step at {start} answered {response.tokens.tolist()}, not [{wanted}]")
        mirror.feed(start, tokens)
        mirror.unfed = wanted

    def answered(self, steps: int, n_tokens: int) -> None:
        """Steps were sent and completed, with a row checked of each."""
        self.parent.answered()
        self.tally.sent += steps
        self.tally.completed += steps
        self.tally.rows_checked += steps
        self.tally.tokens += n_tokens

    def compare(self, session: Any, mirror: Mirror) -> None:
        if session.ended is None and (fault := mirror.fault(session)):
            self.spoilt(session, fault)

    def spoilt(self, session: Any, what: str) -> NoReturn:
        self.wrong(f"session {session.session_id}: {what}")
        raise Spoilt

    def wrong(self, what: str) -> None:
        self.tally.say_wrong(what)
        self.parent.alarm.set()

    def failed(self, error: BaseException, steps: int, where: str) -> None:
        self.tally.say_failed(error, steps, where, peers_fall=self.parent.plan.peers_fall)
        self.parent.alarm.set()
        if isinstance(error, SchedulerDied | SchedulerStopped | ClientClosed):
            self.over.set()

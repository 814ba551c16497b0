"""Which engine a new session goes to, and who waits for a slot."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.holders import by_process, in_words
from shmsched.dataplane.session import Session, SessionState
from shmsched.errors import ErrorCode

NO_ENGINE = (ErrorCode.NO_ENGINE, ErrorCode.UNKNOWN_MODEL)
"""What somebody who attaches an engine changes."""


class NoPlace(Exception):
    """The session cannot be opened now, and waiting was not asked for or would not help."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Placement:
    """New sessions go to the least loaded engine of their model; without a free slot they wait in order of arrival.

    Engines of one model are interchangeable for a new session. Once open, a session stays with its engine.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[EngineLink]],
        expected: Callable[[], Collection[str]],
        down: Callable[[], Iterable[tuple[str, str]]],
    ) -> None:
        """``engines``: those attached. ``expected``: the models of those being started, empty where it is not known yet.
        ``down``: models, likewise, and what became of their engines that will not be started again."""
        self._engines = engines
        self._expected = expected
        self._down = down
        self._waiting: dict[str, OrderedDict[int, Session]] = defaultdict(OrderedDict)
        """By the model asked for, empty where any will do, and there in order of arrival."""

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def waiting_for(self) -> dict[str, dict[ClientLink, int]]:
        """How many sessions of which clients wait, by the model asked for (empty: any)."""
        return {model: Counter(session.client for session in queue.values()) for model, queue in self._waiting.items()}

    def place(self, session: Session, block: bool) -> None:
        """Open the session, or let it wait. Raises NoPlace."""
        engine = self._choose(session)
        if engine is not None:
            engine.open(session)
        elif not block:
            raise NoPlace(ErrorCode.FULL, self.full(session.model))
        else:
            self._waiting[session.model][session.number] = session

    def serve_waiting(self) -> tuple[list[Session], list[tuple[Session, NoPlace]]]:
        """Open what can be opened now, in order of arrival, whatever model was asked for.

        Returns those opened, and those that do not wait any longer because no engine is left to come. Whoever waits up to a
        time of its own goes on waiting: somebody may attach an engine by then.
        """
        opened: list[Session] = []
        hopeless: list[tuple[Session, NoPlace]] = []
        heads = [(next(iter(queue)), model) for model, queue in self._waiting.items() if queue]
        heapify(heads)
        while heads:
            number, model = heappop(heads)
            queue = self._waiting[model]
            try:
                engine = self._choose(queue[number])
            except NoPlace as e:
                # True of everybody in the queue, who all ask for the same.
                leaving = [s for s in queue.values() if e.code not in NO_ENGINE or not s.patient]
                hopeless += [(queue.pop(s.number), e) for s in leaving]
                if queue:
                    continue
            else:
                if engine is None:
                    # Nobody behind it in its queue finds a slot either.
                    continue
                session = queue.pop(number)
                try:
                    engine.open(session)
                except Exception as e:
                    engine.blame(e)
                    hopeless.append((session, NoPlace(ErrorCode.ENGINE_ERROR, f"the scheduler failed to open it: {e}")))
                else:
                    opened.append(session)
            if queue:
                heappush(heads, (next(iter(queue)), model))
            else:
                del self._waiting[model]
        return opened, hopeless

    def forget(self, session: Session) -> None:
        queue = self._waiting.get(session.model)
        if queue is not None and queue.pop(session.number, None) is not None and not queue:
            # A client may name any number of models.
            del self._waiting[session.model]

    def take_waiting(self) -> list[Session]:
        """Everybody who waits, who from now on does not."""
        sessions = [session for queue in self._waiting.values() for session in queue.values()]
        self._waiting.clear()
        return sessions

    def _choose(self, session: Session) -> EngineLink | None:
        """The engine for the session, or None if one may have room later. Raises NoPlace."""
        assert session.state is SessionState.WAITING
        alive = [e for e in self._engines() if e.state is not EngineState.DEAD]
        expected = self._expected()
        # A model whose engine is being restarted counts, or what no name means would depend on the moment.
        names = {e.offer.model for e in alive} | {name for name in expected if name}
        if not session.model and len(names) > 1:
            raise NoPlace(
                ErrorCode.INVALID_REQUEST, f"this daemon serves several models; name one of {', '.join(sorted(names))}"
            )
        able = [e for e in alive if session.model in ("", e.offer.model)]
        if not able and not any(name in ("", session.model) or not session.model for name in expected):
            raise self._none(session.model, names)
        free = [e for e in able if e.has_slot]
        return min(free, key=lambda e: (len(e.sessions), len(e.queues)), default=None)

    def _label(self, model: str) -> str:
        return f"model {model!r}" if model else "this daemon"

    def _none(self, model: str, names: Collection[str]) -> NoPlace:
        """Why there is no engine, and none to come."""
        reasons = list(dict.fromkeys(why for of, why in self._down() if not model or of in ("", model)))
        served = ", ".join(sorted(names))
        if model and served and not reasons:
            return NoPlace(ErrorCode.UNKNOWN_MODEL, f"unknown model {model!r}; models served: {served}")
        said = ". ".join(reasons) or "none was started with it, or `shmsched status` says what became of them"
        also = f"; models served: {served}" if served else ""
        what = f"no engine is up for {self._label(model)}{also}"
        return NoPlace(ErrorCode.NO_ENGINE, f"{what}. {said}. `shmsched engine` attaches another one")

    def full(self, model: str) -> str:
        """Why there is no slot now, and who has them."""
        ready = [e for e in self._engines() if e.state is EngineState.READY and model in ("", e.offer.model)]
        if not ready:
            return f"no engine of {self._label(model)} is ready yet; one is being started"
        used, most = sum(len(e.sessions) for e in ready), sum(e.offer.max_sessions for e in ready)
        held = in_words(by_process(e.holders for e in ready))
        return (
            f"every session slot of {self._label(model)} is taken: {used} of {most} in use, held by {held or 'nobody'}"
        )

"""Where batches form: the queued steps, and which of them go next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from shmsched.scheduling.lanes import Lane, QueuedStep
from shmsched.scheduling.params import SchedulerParams
from shmsched.scheduling.rotation import NEVER, NOTHING, Rotation

__all__ = ["QueuedStep", "StepQueues"]

S = TypeVar("S", bound=QueuedStep)
B = TypeVar("B")


class StepQueues(Generic[S]):
    """Queued steps: decodes by arrival, prefill chunks in rotation over the sessions.

    Keeps rules G1 to G9 and X1 to X4 of spec/scheduling.md. A step costs O(log n) at most, whatever is queued.
    Chunks are at most ``max_prefill_chunk_size``: whoever pushes has checked it. Not thread-safe.

    With exclusive sessions a session has one lane for all its steps, and only the one at the head may go. Else it has
    a lane of decodes, any of which may go, and a lane of chunks. A decode that is alone where its lane would be needs none:
    that is nearly every one, and saves half of what a step costs here.
    """

    def __init__(self, params: SchedulerParams, exclusive_sessions: bool = False) -> None:
        self._params = params
        self._exclusive = exclusive_sessions
        self._first_rank = self._last_rank = 0
        self.queued = self._queued_chunks = 0
        self._ready: dict[int, S] = {}  # the decodes that may go, by rank
        self._order: deque[int] = deque()  # their ranks in order, and stale ones, which _ready does not have
        self._late: list[int] = []  # more of both, in a heap: of those that could go later than others behind them
        self._alone: dict[Hashable, S] = {}  # by session: decodes without a lane
        self._chunk_lanes: dict[Hashable, Lane[S]] = {}  # by session; an empty lane only while it keeps its turn
        self._decode_lanes: dict[Hashable, Lane[S]] = self._chunk_lanes if exclusive_sessions else {}
        self._rotation: Rotation[Lane[S]] = Rotation()  # the lanes that hold chunks, and the vacant ones
        self._vacancies = 0  # how many of these: lanes without chunks that keep their turn, see remove()

    def __len__(self) -> int:
        return self.queued

    @property
    def ready_decodes(self) -> int:
        """How many decodes could go now, were the batch large enough."""
        return len(self._ready)

    @property
    def queued_chunks(self) -> int:
        """How many prefill chunks are queued."""
        return self._queued_chunks

    def push(self, step: S) -> None:
        """Queue a step behind all others."""
        self.extend((step,))

    def extend(self, steps: Iterable[S]) -> None:
        """Queue steps one behind the other, and behind all others."""
        alone, lanes, ready, order = self._alone, self._decode_lanes, self._ready, self._order
        rank = self._last_rank
        for step in steps:
            session = step.session
            if step.n_tokens > 1 or session in alone or session in lanes:
                self._push_into_lane(step)
                rank = self._last_rank
                continue
            self._last_rank = rank = rank + 1
            step.rank, step.lane = rank, None
            alone[session] = ready[rank] = step
            order.append(rank)
            self.queued += 1

    def _push_into_lane(self, step: S) -> None:
        rank = step.rank = self._last_rank = self._last_rank + 1
        lane = self._lane_for(step)
        lane.append(step)
        self.queued += 1
        if step.n_tokens > 1:
            self._queued_chunks += 1
            if lane.n_chunks == 1:
                self._vacancies -= lane.place >= 0
                self._rotation.offer(lane, _offer_of(lane))
        elif lane.head is step or not self._exclusive:
            self._ready[rank] = step
            self._order.append(rank)

    def push_front(self, step: S) -> None:
        """Queue a step before all others of its session; a decode before all other decodes too."""
        step.rank = self._first_rank = self._first_rank - 1
        lane = self._lane_for(step)
        if self._exclusive and lane.head is not None:
            self._unready(lane.head)  # only the head of a session may go, and that is another one now
        lane.prepend(step)
        self.queued += 1
        if step.n_tokens > 1:
            self._queued_chunks += 1
            self._vacancies -= lane.n_chunks == 1 and lane.place >= 0
            self._rotation.offer(lane, _offer_of(lane))
        self._show_head(lane)

    def remove(self, step: S) -> bool:
        """Take one step out, from the middle too. False if it is not queued here.

        A session that loses its last chunk this way keeps its turn until a pass comes to it and finds nothing: who submits a
        chunk in place of one that failed does not go to the back for it. (The recorded traces hold us to this.)
        """
        if self._alone.get(step.session) is step:
            del self._alone[step.session]
            self.queued -= 1
            self._unready(step)
            self._sweep_vacancies()
            return True
        lanes = self._decode_lanes if step.n_tokens == 1 else self._chunk_lanes
        lane = lanes.get(step.session)
        if lane is None or lane is not step.lane:
            return False
        lane.unlink(step)
        self.queued -= 1
        if step.n_tokens == 1:
            self._unready(step)
        else:
            self._queued_chunks -= 1
            lane.vacated |= lane.n_chunks == 0 or step.rank == lane.last_chunk
            if lane.n_chunks == 0:
                self._vacancies += 1
        if self._exclusive or step.n_tokens > 1:
            self._show_head(lane)
        if lane.head is None and lane.place < 0:
            del lanes[lane.session]
        self._sweep_vacancies()
        return True

    def drop_session(self, session: Hashable) -> list[S]:
        """Take out all queued steps of a session, and its turn. Returns them in the order they would have gone in."""
        steps: list[S] = []
        if session in self._alone:
            alone = self._alone.pop(session)
            steps.append(alone)
            self.queued -= 1
            self._unready(alone)
        for lane in (self._decode_lanes.pop(session, None), self._chunk_lanes.pop(session, None)):
            was_vacant = lane is not None and lane.place >= 0 and lane.n_chunks == 0
            while lane is not None and lane.head is not None:
                step = lane.head
                lane.unlink(step)
                steps.append(step)
                self.queued -= 1
                if step.n_tokens == 1:
                    self._unready(step)
                else:
                    self._queued_chunks -= 1
            if lane is not None and lane.place >= 0:
                self._vacancies -= was_vacant
                self._rotation.leave(lane)
        steps.sort(key=attrgetter("rank"))
        return steps

    def clear(self) -> list[S]:
        """Take out everything. Returns it in order of arrival, after what was put back at the front."""
        sessions = [*self._alone, *self._decode_lanes, *self._chunk_lanes]
        return sorted((step for session in sessions for step in self.drop_session(session)), key=attrgetter("rank"))

    @overload
    def take(self) -> list[S]: ...
    @overload
    def take(self, build: Callable[[list[S]], B]) -> B: ...
    def take(self, build: Callable[[list[S]], Any] = list) -> Any:
        """Form the next batch, decodes first, and hand it over. Returns what ``build`` makes of the list of its steps.

        If ``build`` raises, or anything before it, every step is still queued, in the same order: nothing has left by
        then but ranks of decodes, and they are put back. What comes after touches only the queues' own structures.
        """
        decodes: list[S] = []
        chunks: list[S] = []
        found_vacant: list[Lane[S]] = []
        asked = 0
        try:
            self._pop_decodes(decodes)
            if self._queued_chunks or self._vacancies:
                asked = self._select_chunks(self._params.max_batch_size - len(decodes), chunks, found_vacant)
            batch = build(decodes + chunks)
        except BaseException:
            for step in decodes:
                self._ready[step.rank] = step
                heappush(self._late, step.rank)
            raise
        # Not before the batch is closed does a session show its next step: that one must not join the one before it.
        self.queued -= len(decodes) + len(chunks)
        self._queued_chunks -= len(chunks)
        alone = self._alone
        for step in decodes:
            if alone.pop(step.session, None) is not None:
                continue
            lane: Lane[S] = step.lane
            lane.unlink(step)
            if lane.head is None and lane.place < 0:
                del self._decode_lanes[lane.session]
            elif self._exclusive:
                self._show_head(lane)
        for lane in found_vacant:
            self._end_vacancy(lane)
        for i, step in enumerate(chunks):
            lane = step.lane
            lane.unlink(step)
            if lane.n_chunks:
                self._rotation.to_back(lane)
            elif lane.vacated and i >= asked:  # the batch was full before this session was asked again
                self._rotation.to_back(lane)
                self._vacancies += 1
            else:
                self._rotation.leave(lane)
            self._show_head(lane)
            if lane.head is None and lane.place < 0:
                del self._chunk_lanes[lane.session]
        return batch

    def _pop_decodes(self, decodes: list[S]) -> None:
        """Move the first decodes that may go into the list, as many as a batch may hold."""
        order, late, ready, most = self._order, self._late, self._ready, self._params.max_decode_sequences
        if not late:  # 0.1 us a step instead of 0.3
            decodes += [ready[rank] for rank in islice(order, most) if rank in ready]
            for taken in decodes:
                del ready[taken.rank]
                order.popleft()  # its rank, or a stale one before it: what is left of these is stale now
            if not order:
                return
        while (order or late) and len(decodes) < most:
            from_order = not late or (len(order) > 0 and order[0] < late[0])
            rank = order[0] if from_order else late[0]
            step = ready.get(rank)
            if step is not None:
                decodes.append(step)  # before it is out of the line: take() puts back what is in the list
                del ready[rank]
            if from_order:
                order.popleft()
            else:
                heappop(late)

    def _select_chunks(self, room: int, chunks: list[S], found_vacant: list[Lane[S]]) -> int:
        """The chunks to go, pass after pass over the sessions; the turns that were found to be vacant; and returns how many
        of the chunks had their session asked for a following one. The first pass ends where the room is spent: who stands
        further back has not been asked. Changes nothing of the queues.
        """
        lane = self._rotation.first(room)
        while lane is not None:
            step = lane.head
            if lane.n_chunks == 0:
                found_vacant.append(lane)
            else:
                assert step is not None
                chunks.append(step)
                room -= step.n_tokens
                if room == 0:
                    break
            lane = self._rotation.first(room, lane.place + 1)
        # The room only shrinks, so who was passed over once would be again: later passes ask only those that took.
        asked = 0
        while room > 0 and asked < len(chunks):
            following = chunks[asked].after
            asked += 1
            if following is not None and 1 < following.n_tokens <= room:
                chunks.append(following)
                room -= following.n_tokens
        return asked

    def _lane_for(self, step: S) -> Lane[S]:
        lanes = self._decode_lanes if step.n_tokens == 1 else self._chunk_lanes
        lane = lanes.get(step.session)
        if lane is None:
            lane = lanes[step.session] = Lane()
            lane.session = step.session
            if lanes is self._decode_lanes and step.session in self._alone:
                lane.append(self._alone.pop(step.session))
        return lane

    def _show_head(self, lane: Lane[S]) -> None:
        """The step at the head of a lane may go from now on; a chunk, when it is its session's turn."""
        head = lane.head
        if head is not None and head.n_tokens == 1 and head.rank not in self._ready:
            self._make_ready(head)
        if lane.place >= 0:
            self._rotation.offer(lane, _offer_of(lane))

    def _make_ready(self, step: S) -> None:
        rank, order = step.rank, self._order
        self._ready[rank] = step
        if not order or rank > order[-1]:
            order.append(rank)
        elif rank < order[0]:
            order.appendleft(rank)
        else:
            heappush(self._late, rank)

    def _unready(self, step: S) -> None:
        """The step may not go, if it could. Its rank is stale then; stale ranks are swept out in bulk."""
        self._ready.pop(step.rank, None)
        if len(self._order) + len(self._late) > 2 * len(self._ready) + 64:
            self._order = deque(sorted(self._ready))
            self._late.clear()

    def _sweep_vacancies(self) -> None:
        """Turns kept for sessions that do not come back must not pile up."""
        if self._vacancies > 2 * self.queued + 64:
            while (lane := self._rotation.first(NOTHING)) is not None:
                self._end_vacancy(lane)

    def _end_vacancy(self, lane: Lane[S]) -> None:
        self._vacancies -= 1
        self._rotation.leave(lane)
        if lane.head is None:
            del self._chunk_lanes[lane.session]


def _offer_of(lane: Lane[S]) -> int:
    head = lane.head
    if head is None or lane.n_chunks == 0:
        return NOTHING
    return NEVER if head.n_tokens == 1 else head.n_tokens

"""Where batches form: the queued steps, and which of them go next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

from shmsched.dataplane import marks
from shmsched.dataplane.line import Line
from shmsched.dataplane.rotation import Rotation
from shmsched.dataplane.step import Lane, QueuedStep
from shmsched.not_copied import not_copied

B = TypeVar("B")
FEWEST_VACANCIES = 1024
_rank = attrgetter("rank")


class StepQueues:
    """Queued steps: decodes by arrival, prefill chunks in rotation over the sessions.

    Keeps rules G1 to G9 and X1 to X4 of spec/scheduling.md. A step costs O(log n) at most, whatever is queued. A batch holds at most
    ``max_decodes`` decodes and ``max_tokens`` tokens, and a chunk has at most half of what is left of these: whoever pushes has
    checked it. Not thread-safe.

    With exclusive sessions a session has one lane for all its steps, and only the one at the head may go. Else it has
    a lane of decodes, any of which may go, and a lane of chunks. A decode that is alone where its lane would be needs none:
    that is nearly every one, and saves half of what a step costs here.
    """

    __slots__ = (
        "alone", "chunk_lanes", "decode_lanes", "exclusive", "first_rank", "last_rank", "line", "max_decodes", "max_tokens", "queued",
        "queued_chunks", "rotation", "vacancies",
    )  # fmt: skip
    __reduce__ = not_copied

    def __init__(self, max_decodes: int, max_tokens: int, exclusive_sessions: bool = False) -> None:
        self.max_decodes = max_decodes
        self.max_tokens = max_tokens
        self.exclusive = exclusive_sessions
        self.first_rank = 0
        self.last_rank = 0
        self.queued = 0
        """How many steps are queued, and how many of these are prefill chunks."""
        self.queued_chunks = 0
        self.line = Line()  # the decodes that may go
        self.alone: dict[Hashable, QueuedStep] = {}  # by session: decodes without a lane
        self.chunk_lanes: dict[Hashable, Lane] = {}  # by session; an empty lane only while it keeps its turn
        self.decode_lanes: dict[Hashable, Lane] = self.chunk_lanes if exclusive_sessions else {}
        self.rotation = Rotation()  # the lanes that hold chunks, and the vacant ones
        self.vacancies = 0  # how many of these: lanes without chunks that keep their turn, see remove()

    def __len__(self) -> int:
        return self.queued

    @property
    def ready_decodes(self) -> int:
        """How many decodes could go now, were the batch large enough."""
        return self.line.n

    def push(self, step: QueuedStep) -> None:
        """Queue a step behind all others."""
        self.extend((step,))

    def extend(self, steps: Iterable[QueuedStep]) -> None:
        """Queue steps one behind the other, and behind all others."""
        alone = self.alone
        lanes = self.decode_lanes
        line = self.line
        for step in steps:
            session = step.session
            if step.n_tokens > 1 or session in alone or session in lanes:
                self._push_into_lane(step)
                continue
            alone[session] = step
            rank = self.last_rank + 1
            self.last_rank = rank
            step.rank = rank
            step.lane = None
            line.append(step)
            self.queued += 1

    def push_front(self, step: QueuedStep) -> None:
        """Queue a step before all others of its session; a decode before all other decodes too."""
        lane = self._lane_for(step)
        self.first_rank -= 1
        step.rank = self.first_rank
        step.spot = marks.NOWHERE
        if self.exclusive and lane.head is not None:
            self.line.remove(lane.head)  # only the head of a session may go, and that is another one now
        lane.prepend(step)
        self.queued += 1
        if step.n_tokens > 1:
            self._count_chunk(lane)
        self._show_head(lane)

    def remove(self, step: QueuedStep) -> bool:
        """Take one step out, from the middle too. False if it is not queued here.

        A session that loses its last chunk this way keeps its turn until a pass comes to it and finds nothing: who submits a
        chunk in place of one that failed does not go to the back for it. (The recorded traces hold us to this.)
        """
        if self.alone.get(step.session) is step:
            del self.alone[step.session]
            self.queued -= 1
            self.line.remove(step)
            return True
        lanes = self.decode_lanes if step.n_tokens == 1 else self.chunk_lanes
        lane = lanes.get(step.session)
        if lane is None or lane is not step.lane:
            return False
        self.line.remove(step)
        lane.unlink(step)
        self.queued -= 1
        if step.n_tokens > 1:
            self.queued_chunks -= 1
            if lane.n_chunks == 0:
                lane.vacated = True
                self.vacancies += 1
            elif step.rank == lane.last_chunk:
                lane.vacated = True
        if self.exclusive or step.n_tokens > 1:
            self._show_head(lane)
        if lane.head is None and lane.place < 0:
            del lanes[lane.session]
        if self.vacancies > 2 * self.queued + FEWEST_VACANCIES:
            self._end_vacancies()
        return True

    def drop_session(self, session: Hashable) -> list[Any]:
        """Take out all queued steps of a session, and its turn. Returns them in the order they would have gone in."""
        steps: list[Any] = []
        alone = self.alone.pop(session, None)
        if alone is not None:
            self.line.remove(alone)
            steps.append(alone)
        lane = self.decode_lanes.pop(session, None)
        if lane is not None:
            self._drain(lane, steps)
        lane = self.chunk_lanes.pop(session, None)
        if lane is not None:
            self._drain(lane, steps)
        self.queued -= len(steps)
        steps.sort(key=_rank)
        return steps

    def clear(self) -> list[Any]:
        """Take out everything. Returns it in order of arrival, after what was put back at the front."""
        steps: list[Any] = []
        for session in [*self.alone, *self.decode_lanes, *self.chunk_lanes]:
            steps += self.drop_session(session)
        steps.sort(key=_rank)
        return steps

    def take(self) -> list[Any]:
        """Form the next batch, decodes first."""
        return self.hand_over(_as_it_is)

    def hand_over(self, build: Callable[[list[Any]], B]) -> B:
        """Form the next batch, decodes first, and hand it over. Returns what ``build`` makes of the list of its steps.

        If ``build`` raises, or anything before it, every step is still queued, in the same order: nothing has left by
        then. What comes after touches only the queues' own structures.
        """
        decodes = self.line.head(self.max_decodes)
        chunks: list[QueuedStep] = []
        found_vacant: list[Lane] = []
        asked = 0
        if self.queued_chunks > 0 or self.vacancies > 0:
            asked = self._select_chunks(self.max_tokens - len(decodes), chunks, found_vacant)
        batch = build(decodes + chunks)
        # Not before the batch is closed does a session show its next step: that one must not join the one before it.
        self.line.cut(decodes)
        self.queued -= len(decodes) + len(chunks)
        self.queued_chunks -= len(chunks)
        self._take_decodes(decodes)
        for lane in found_vacant:
            self._end_vacancy(lane)
        self._take_chunks(chunks, asked)
        return batch

    def _take_decodes(self, decodes: list[QueuedStep]) -> None:
        alone = self.alone
        for step in decodes:
            lane = step.lane
            if lane is None:
                del alone[step.session]
                continue
            lane.unlink(step)
            if lane.head is None and lane.place < 0:
                del self.decode_lanes[lane.session]
            elif self.exclusive:
                self._show_head(lane)

    def _take_chunks(self, chunks: list[QueuedStep], asked: int) -> None:
        for step in chunks:
            lane = step.lane
            assert lane is not None
            lane.unlink(step)
            asked -= 1
            if lane.n_chunks > 0:
                self.rotation.to_back(lane)
            elif lane.vacated and asked < 0:  # the batch was full before this session was asked again
                self.rotation.to_back(lane)
                self.vacancies += 1
            else:
                self.rotation.leave(lane)
            self._show_head(lane)
            if lane.head is None and lane.place < 0:
                del self.chunk_lanes[lane.session]

    def _select_chunks(self, room: int, chunks: list[QueuedStep], found_vacant: list[Lane]) -> int:
        """The chunks to go, pass after pass over the sessions; the turns that were found to be vacant; and returns how many
        of the chunks had their session asked for a following one. The first pass ends where the room is spent: who stands
        further back has not been asked. Changes nothing of the queues.
        """
        lane = self.rotation.first_from(0, room)
        while lane is not None:
            step = lane.head
            if step is None or lane.n_chunks == 0:
                found_vacant.append(lane)
            else:
                chunks.append(step)
                room -= step.n_tokens
                if room == 0:
                    break
            lane = self.rotation.first_from(lane.place + 1, room)
        # The room only shrinks, so who was passed over once would be again: later passes ask only those that took.
        asked = 0
        while room > 0 and asked < len(chunks):
            step = chunks[asked]
            following = step.after
            asked += 1
            if following is not None and following.n_tokens > 1 and following.n_tokens <= room:
                chunks.append(following)
                room -= following.n_tokens
        return asked

    def _push_into_lane(self, step: QueuedStep) -> None:
        lane = self._lane_for(step)
        self.last_rank += 1
        step.rank = self.last_rank
        step.spot = marks.NOWHERE
        lane.append(step)
        self.queued += 1
        if step.n_tokens > 1:
            self._count_chunk(lane)
        elif lane.head is step or not self.exclusive:
            self.line.append(step)

    def _count_chunk(self, lane: Lane) -> None:
        """The lane has got a chunk."""
        self.queued_chunks += 1
        if lane.n_chunks == 1:
            if lane.place >= 0:
                self.vacancies -= 1
            self.rotation.offer(lane, lane.offer())

    def _lane_for(self, step: QueuedStep) -> Lane:
        session = step.session
        lanes = self.decode_lanes if step.n_tokens == 1 else self.chunk_lanes
        lane = lanes.get(session)
        if lane is None:
            lane = Lane(session)
            lanes[session] = lane
            if lanes is self.decode_lanes:
                alone = self.alone.pop(session, None)
                if alone is not None:
                    lane.append(alone)
        return lane

    def _show_head(self, lane: Lane) -> None:
        """The step at the head of a lane may go from now on; a chunk, when it is its session's turn."""
        head = lane.head
        if head is not None and head.n_tokens == 1 and head.spot == marks.NOWHERE:
            self.line.add(head)
        if lane.place >= 0:
            self.rotation.offer(lane, lane.offer())

    def _drain(self, lane: Lane, steps: list[Any]) -> None:
        """Take everything out of a lane that nobody finds any more, and give up its turn."""
        if lane.place >= 0:
            if lane.n_chunks == 0:
                self.vacancies -= 1
            self.queued_chunks -= lane.n_chunks
            self.rotation.leave(lane)
        step = lane.head
        while step is not None:
            self.line.remove(step)
            lane.unlink(step)
            steps.append(step)
            step = lane.head

    def _end_vacancy(self, lane: Lane) -> None:
        self.vacancies -= 1
        self.rotation.leave(lane)
        if lane.head is None:
            del self.chunk_lanes[lane.session]

    def _end_vacancies(self) -> None:
        """Turns kept for sessions that do not come back must not pile up."""
        lane = self.rotation.first_from(0, marks.NOTHING)
        while lane is not None:
            self._end_vacancy(lane)
            lane = self.rotation.first_from(0, marks.NOTHING)


def _as_it_is(steps: list[Any]) -> list[Any]:
    return steps

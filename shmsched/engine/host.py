"""The process around an engine: it pulls batches from the engine's segment, runs them, and puts the results back."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from shmsched import failpoints
from shmsched.dataplane.forward import Batch, EngineSlot, Outcome, Pass
from shmsched.dataplane.layouts import BatchSlotLayout, StepStatus
from shmsched.engine.contract import Engine, Limits, check_complete
from shmsched.engine.guards import Guards, WroteBeyondRows
from shmsched.engine.pass_view import PassView, StepRows
from shmsched.engine.stop_requests import INTERRUPTS, LEAVING, StopRequests
from shmsched.engine.traces import in_one_line, in_words, say_own
from shmsched.errors import (
    EngineFaulty,
    EngineStartError,
    ErrorCode,
    ProtocolError,
    SharedMemoryError,
    Unsupported,
    error_of,
)
from shmsched.memory.segment import Segment
from shmsched.saying import say_trace
from shmsched.wire import frames
from shmsched.wire.engine_frames import pack_done
from shmsched.wire.link import Link
from shmsched.wire.socket_path import default_socket


def serve(
    engine: Engine,
    socket: str | os.PathLike[str] | None = None,
    *,
    spec: str = "",
    wait: float = 0.0,
    requests: StopRequests | None = None,
) -> None:
    """Attach ``engine`` to the daemon on ``socket`` and run it until the daemon ends. Blocks.

    ``wait``: seconds to keep trying while the daemon is still starting. ``requests``: what may ask it to end before; without it,
    signals are the calling program's own. Raises SchedulerUnreachable, or EngineStartError if the engine does not start or is refused.
    """
    check_complete(engine)
    link = Link.connect(socket or default_socket(), frames.Role.ENGINE, wait)
    try:
        EngineHost(engine, link, spec or type(engine).__name__, requests).run()
    finally:
        link.close()


class EngineHost:
    """Runs one engine. Everything happens on the calling thread, in the order in which frames arrive."""

    def __init__(self, engine: Engine, link: Link, spec: str, requests: StopRequests | None = None) -> None:
        self._engine = engine
        self._requests = requests or StopRequests()
        self._link = link
        self._spec = spec
        self._slots: list[EngineSlot] = []
        self._arenas: dict[int, mmap.mmap] = {}
        self._unmapped: dict[int, str] = {}
        """Clients whose arena could not be mapped, and why: what they want in it cannot be run, and the others' can."""
        self._lengths: dict[int, int] = {}
        self._rows = StepRows()
        self._answered: tuple[int, bytes] = (0, b"")
        """The last batch, if each of its steps was done, and the tokens sampled in it: what a batch that follows it goes on with."""

    def run(self) -> None:
        limits = self._attach()
        began = time.monotonic()
        try:
            self._engine.start(limits)
        except INTERRUPTS:
            raise
        except BaseException as e:
            message = in_one_line(e)
            self._link.send(frames.StartFailed(message))
            say_own(f"shmsched engine {self._spec} (pid {os.getpid()}) did not start:", e)
            raise EngineStartError(f"engine {self._spec} did not start: {message}") from e
        try:
            # What the engine has loaded stays: no collection needs to look at it again.
            gc.collect()
            gc.freeze()
            self._requests.serving(self._link)
            failpoints.hit("engine.started")
            self._link.send(frames.Ready(time.monotonic() - began))
            failpoints.hit("engine.ready.sent")
            requests = self._requests
            while not requests.number and (arrived := self._link.receive()) is not None:
                for message in arrived:
                    if requests.number:
                        break
                    self._handle(message)
        except WroteBeyondRows as e:
            self._link.send(frames.Faulty(str(e)))
            raise EngineFaulty(f"engine {self._spec} is faulty: {e}") from e
        finally:
            self._engine.close()

    def _attach(self) -> Limits:
        info = self._engine.info
        offer = frames.Offer(
            info.vocab_size,
            info.max_sessions,
            info.max_session_tokens,
            info.max_batch_size or 0,
            info.max_decode_sequences or 0,
            info.max_prefill_chunk_size or 0,
            self._rewinds(),
            type(self._engine).fork_session is not Engine.fork_session,
            info.model,
            info.tokenizer or "",
            info.stop_tokens,
            self._spec,
        )
        failpoints.hit("engine.offer.half_sent", self._link.send_half, offer)
        self._link.send(offer)
        failpoints.hit("engine.offer.sent")
        while (arrived := self._link.receive()) is not None:
            for message in arrived:
                if isinstance(message, frames.Refused):
                    raise EngineStartError(message.message) from error_of(message.code, message.message)
                if isinstance(message, frames.Attached):
                    limits = Limits(message.max_decode_sequences, message.max_prefill_chunk_size)
                    layout = BatchSlotLayout(limits.max_batch_size)
                    try:
                        segment = Segment(self._link.descriptor(), layout.size * message.slots)
                    except SharedMemoryError as e:
                        self._link.send(frames.StartFailed(str(e)))
                        raise EngineStartError(f"engine {self._spec} did not start: {e}") from e
                    segment.close_descriptor()
                    view = memoryview(segment.buffer)
                    self._slots = [
                        EngineSlot(view[i * layout.size : (i + 1) * layout.size], layout) for i in range(message.slots)
                    ]
                    failpoints.hit("engine.attached")
                    return limits
        raise EngineStartError("the scheduler closed the connection before it attached this engine")

    def _rewinds(self) -> frames.Rewinds:
        if type(self._engine).rewind is Engine.rewind:
            return frames.Rewinds.NOWHERE
        anywhere = self._engine.info.rewinds_anywhere
        return frames.Rewinds.ANYWHERE if anywhere else frames.Rewinds.TO_THE_BEGINNING

    def _handle(self, message: Any) -> None:
        if type(message) is frames.Work:
            holds = self._slots[message.slot]
            batch = holds.pull(message.batch)
            self._work(message.batch, batch, holds)
            return
        if type(message) is frames.Follow:
            self._follow(message)
            return
        match message:
            case frames.OpenSlot(slot, session, options):
                self._link.send(self._open(slot, session, 0, lambda: self._engine.open_session(slot, options)))
            case frames.ForkSlot(slot, session, parent, length):
                fork = lambda: self._engine.fork_session(parent, slot, length)  # noqa: E731
                self._link.send(self._open(slot, session, length, fork))
            case frames.CloseSlot(slot):
                failpoints.hit("engine.close_session.received")
                if self._lengths.pop(slot, None) is not None:
                    self._close(slot)
            case frames.AttachArena(client, size):
                failpoints.hit("engine.arena.received")
                self._attach_arena(client, size)
            case frames.DetachArena(client):
                self._arenas.pop(client, None)
                self._unmapped.pop(client, None)
            case _:
                raise ProtocolError(f"an engine got a {type(message).__name__} frame")

    def _attach_arena(self, client: int, size: int) -> None:
        self._unmapped.pop(client, None)
        if not size:
            self._unmapped[client] = "the scheduler could not pass on the client's arena"
            return
        try:
            segment = Segment(self._link.descriptor(), size)
        except SharedMemoryError as e:
            self._unmapped[client] = f"it cannot map the client's arena of {size:,} bytes: {e}"
        else:
            segment.close_descriptor()
            self._arenas[client] = segment.buffer

    def _open(
        self, slot: int, session: int, length: int, make: Callable[[], None]
    ) -> frames.SlotOpened | frames.SlotRefused:
        failpoints.hit("engine.open_session.received")
        try:
            make()
        except LEAVING:
            raise
        except BaseException as e:
            code = ErrorCode.UNSUPPORTED if isinstance(e, Unsupported) else ErrorCode.ENGINE_ERROR
            return frames.SlotRefused(slot, session, code, in_words(e))
        self._lengths[slot] = length
        failpoints.hit("engine.session.opened")
        return frames.SlotOpened(slot, session)

    def _close(self, slot: int) -> None:
        try:
            self._engine.close_session(slot)
        except LEAVING:
            raise
        except BaseException:
            # The session is over whatever its engine says; the others' are not.
            say_trace()

    def _follow(self, message: frames.Follow) -> None:
        """Go on from the last batch, as was arranged while that one ran."""
        failpoints.hit("engine.follow.received")
        number, ids = self._answered
        slot = self._slots[message.slot]
        batch = slot.pull(message.batch)
        if number != message.follows:
            self._link.send(frames.Skipped(message.batch))
            return
        batch.follow(ids)
        self._work(message.batch, batch, slot)

    def _work(self, number: int, batch: Batch, slot: EngineSlot) -> None:
        """Run the batch that lay in ``slot``, put there what became of it, and say so."""
        self._answered = 0, b""
        guards = Guards(batch, self._arenas, self._engine.info.vocab_size) if batch.raw else None
        outcome = Outcome(batch)
        try:
            self._run(batch, outcome)
        except LEAVING:
            raise
        except BaseException as e:
            say_trace()
            if guards is not None:
                guards.check()
            self._link.send(frames.BatchFailed(number, in_words(e)))
            return
        if guards is not None:
            guards.check()
        failpoints.hit("engine.logits.written")
        slot.put(outcome)
        if outcome.all_done():
            self._answered = number, outcome.ids
        done = pack_done(number, outcome.said())
        failpoints.hit("engine.results.written")
        failpoints.hit("engine.done.half_sent", self._link.send_half, done)
        self._link.send_packed(done)
        failpoints.hit("engine.done.sent")

    def _run(self, batch: Batch, outcome: Outcome) -> None:
        if batch.is_one_pass(self._lengths) and not self._unmapped:
            self._run_pass(Pass(batch, None), outcome)
            return
        for rows in batch.passes(self._fail_unmapped(batch, outcome)):
            if placed := [row for row in rows if self._place(batch, row, outcome)]:
                self._run_pass(Pass(batch, placed), outcome)

    def _fail_unmapped(self, batch: Batch, outcome: Outcome) -> set[int]:
        """Fail the steps whose rows lie where the host cannot write, and what comes after each in its session."""
        ended: dict[int, str] = {}
        failed = set()
        for i, slot in enumerate(batch.slots):
            why = ended.get(slot)
            if why is None and i in batch.raw:
                why = self._unmapped.get(batch.places[i][0])
            if why is not None:
                ended[slot] = why
                outcome.settle(i, StepStatus.NO_ARENA, why)
                failed.add(i)
        return failed

    def _place(self, batch: Batch, row: list[int], outcome: Outcome) -> bool:
        """Bring the session to where the row starts. False if it cannot run in this pass."""
        slot, position = batch.slots[row[0]], batch.positions[row[0]]
        if (before := outcome.stopped.get(slot)) is not None:
            # An earlier row of this session did not run, so this one has nothing to stand on.
            outcome.stop(slot, row, outcome.statuses[before], outcome.messages.get(before))
            return False
        length = self._lengths.get(slot)
        if length is None or position > length:
            why = f"the step starts at position {position}; slot {slot} holds {length or 0} tokens"
            outcome.stop(slot, row, StepStatus.FAILED, why)
            return False
        if position < length:
            try:
                self._engine.rewind(slot, position)
            except LEAVING:
                raise
            except BaseException as e:
                why = f"cannot rewind from {length} to {position}: {in_words(e)}"
                why = f"{why}. If it never can, open another session and prefill again"
                outcome.stop(slot, row, StepStatus.FAILED, why)
                return False
            self._lengths[slot] = position
        return True

    def _run_pass(self, this: Pass, outcome: Outcome) -> None:
        view = PassView(this, self._rows.of(this), self._arenas, self._engine.info.vocab_size)
        self._engine.forward(view)
        ids, logprobs, wrong = view.results()
        this.advance(self._lengths)
        outcome.done(this, ids, logprobs)
        if wrong or view.failed or view.deferred:
            self._take_back(this, view, wrong, outcome)

    def _take_back(self, this: Pass, view: PassView, wrong: dict[int, str], outcome: Outcome) -> None:
        """Not all of it is done: rows were deferred or failed, or outputs have no result."""
        for row in sorted(view.failed.keys() | view.deferred):
            slot, message = this.slots[row], view.failed.get(row)
            self._lengths[slot] = this.positions[row]
            status = StepStatus.DEFERRED if message is None else StepStatus.FAILED
            outcome.stop(slot, this.steps_of(row), status, message)
        _, owners, _ = this.outputs()
        for k, why in wrong.items():
            i = owners[k]
            if outcome.statuses[i] == StepStatus.DONE:
                # The engine has taken its tokens.
                lost = not self._rewinds().reach(this.batch.positions[i])
                outcome.settle(i, StepStatus.SPOILT if lost else StepStatus.FAILED, why)

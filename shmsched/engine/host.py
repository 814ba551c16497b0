"""The process around an engine: it pulls batches from the engine's segment, runs them, and puts the results back."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched import failpoints
from shmsched.dataplane.dtypes import LOGIT
from shmsched.dataplane.layouts import LOGIT_SIZE, BatchSlotLayout, StepEntry, StepStatus
from shmsched.engine.batch_slot import BatchSlot, Pulled, Results
from shmsched.engine.batch_view import BatchView, StepRow
from shmsched.engine.contract import Engine, Limits, check_complete
from shmsched.engine.guards import Guards, WroteBeyondRows
from shmsched.engine.outcome import BatchOutcome
from shmsched.engine.plan import Row, gather, passes, wanted
from shmsched.engine.stop_requests import INTERRUPTS, LEAVING, StopRequests
from shmsched.engine.straight_view import StraightView, sampling_params
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
from shmsched.params import SamplingParams
from shmsched.saying import say_trace
from shmsched.wire import frames
from shmsched.wire.engine_frames import pack_done
from shmsched.wire.link import Link
from shmsched.wire.socket_path import default_socket

Floats = npt.NDArray[np.float32]


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
        self._slots: list[BatchSlot] = []
        self._arenas: dict[int, mmap.mmap] = {}
        self._unmapped: dict[int, str] = {}
        """Clients whose arena could not be mapped, and why: what they want in it cannot be run, and the others' can."""
        self._lengths: dict[int, int] = {}
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
                        BatchSlot(view[i * layout.size : (i + 1) * layout.size], layout) for i in range(message.slots)
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
            of_work = self._slots[message.slot]
            self._work(message.batch, of_work.pull(message.batch), of_work)
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
        number, answers = self._answered
        slot = self._slots[message.slot]
        batch = slot.pull(message.batch)
        if number != message.follows:
            self._link.send(frames.Skipped(message.batch))
            return
        batch.follow(answers)
        self._work(message.batch, batch, slot)

    def _work(self, number: int, batch: Pulled, slot: BatchSlot) -> None:
        """Run the batch that lay in ``slot``, put the results there, and say so."""
        self._answered = 0, b""
        guards: Guards | None = None
        vocab_size = self._engine.info.vocab_size
        try:
            straight = not self._unmapped
            view = StraightView.of(batch, self._lengths, self._arenas, vocab_size) if straight else None
            if view is None or view.wants_raw:
                guards = Guards(batch, self._arenas, vocab_size)
            results = self._run_passes(batch) if view is None else self._run_straight(view, batch)
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
        slot.write(results)
        if results.all_done:
            self._answered = number, results.ids
        done = pack_done(number, results.messages)
        failpoints.hit("engine.results.written")
        failpoints.hit("engine.done.half_sent", self._link.send_half, done)
        self._link.send_packed(done)
        failpoints.hit("engine.done.sent")

    def _run_straight(self, view: StraightView, batch: Pulled) -> Results:
        """What ``_run_passes`` does, for a batch that is one pass as it stands, as most are: at 32 decodes, with a chunk of a prompt
        or without, in a tenth of the time."""
        self._engine.forward(view)
        results = view.results()
        if results is None:
            entries = batch.entries()
            outcome = BatchOutcome(entries)
            rows = [Row(entry.slot, entry.position, [i], entry.length) for i, entry in enumerate(entries)]
            self._settle(view, rows, view.owners, [0] * len(view.owners), entries, outcome)
            return outcome.results()
        # Each session stood where its step begins.
        self._lengths.update(zip(batch.slots, map(add, batch.positions, batch.lengths), strict=True))
        return results

    def _run_passes(self, batch: Pulled) -> Results:
        entries = batch.entries()
        outcome = BatchOutcome(entries)
        left_out = self._fail_unmapped(entries, outcome) if self._unmapped else ()
        for rows in passes(entries, left_out):
            self._run_pass(rows, entries, batch.tokens, outcome)
        return outcome.results()

    def _fail_unmapped(self, entries: list[StepEntry], outcome: BatchOutcome) -> set[int]:
        """Fail the steps whose rows lie where the host cannot write, and what comes after each in its session."""
        ended: dict[int, str] = {}
        failed = set()
        for i, entry in enumerate(entries):
            why = ended.get(entry.slot)
            if why is None and entry.n_rows and not entry.sampled:
                why = self._unmapped.get(entry.client)
            if why is not None:
                ended[entry.slot] = why
                outcome.fail_step(i, why, StepStatus.NO_ARENA)
                failed.add(i)
        return failed

    def _run_pass(
        self, rows: list[Row], entries: list[StepEntry], tokens: npt.NDArray[np.int32], outcome: BatchOutcome
    ) -> None:
        rows = [row for row in rows if self._place(row, outcome)]
        if not rows:
            return
        flat, positions = gather(rows, entries, tokens)
        outputs, owners, within = wanted(rows, entries)
        starts = accumulate((row.length for row in rows), initial=0)
        view = BatchView(
            flat,
            positions,
            [StepRow(row.slot, start, row.length) for row, start in zip(rows, starts, strict=False)],
            np.array(outputs, np.int32),
            [_sampling(entries[i]) for i in owners],
            [self._raw_row(entries[i], r) for i, r in zip(owners, within, strict=True)],
            self._engine.info.vocab_size,
        )
        self._engine.forward(view)
        self._settle(view, rows, owners, within, entries, outcome)

    def _settle(
        self,
        view: BatchView,
        rows: list[Row],
        owners: Sequence[int],
        within: Sequence[int],
        entries: list[StepEntry],
        outcome: BatchOutcome,
    ) -> None:
        """Note what the engine made of each row, and of each output: row ``within[k]`` of step ``owners[k]``."""
        missing = set(view.finish())
        for i, row in enumerate(rows):
            if i in view.failed:
                outcome.fail(row, view.failed[i])
            elif i in view.deferred:
                outcome.defer(row)
            else:
                self._lengths[row.slot] = row.end
                outcome.done(row)
        for k, (i, r) in enumerate(zip(owners, within, strict=True)):
            if outcome.statuses[i] != StepStatus.DONE:
                continue
            if k in missing:
                self._spoil(entries, outcome, i, f"the engine gave no result for row {r} of this step")
            elif k in view.unusable:
                at = entries[i].position + entries[i].length - entries[i].n_rows + r
                self._spoil(entries, outcome, i, f"row {r} of its logits, for position {at}, has {view.unusable[k]}")
            elif entries[i].sampled:
                token = int(view.token_ids[k])
                if not 0 <= token < self._engine.info.vocab_size:
                    vocab_size = self._engine.info.vocab_size
                    self._spoil(entries, outcome, i, f"the engine gave token {token}; the vocabulary has {vocab_size}")
                    continue
                outcome.set_token(i, r, token, float(view.logprobs[k]))

    def _spoil(self, entries: list[StepEntry], outcome: BatchOutcome, i: int, message: str) -> None:
        """Step ``i`` fails, of which the engine has taken the tokens."""
        lost = not self._rewinds().reach(entries[i].position)
        outcome.fail_step(i, message, StepStatus.SPOILT if lost else StepStatus.FAILED)

    def _place(self, row: Row, outcome: BatchOutcome) -> bool:
        """Bring the session to where the row starts. False if it cannot run in this pass."""
        if (before := outcome.stopped.get(row.slot)) is not None:
            # An earlier row of this session did not run, so this one has nothing to stand on.
            outcome.like(row, before)
            return False
        length = self._lengths.get(row.slot)
        if length is None or row.position > length:
            outcome.fail(row, f"the step starts at position {row.position}; slot {row.slot} holds {length or 0} tokens")
            return False
        if row.position < length:
            try:
                self._engine.rewind(row.slot, row.position)
            except LEAVING:
                raise
            except BaseException as e:
                what = f"cannot rewind from {length} to {row.position}: {in_words(e)}"
                outcome.fail(row, f"{what}. If it never can, open another session and prefill again")
                return False
            self._lengths[row.slot] = row.position
        return True

    def _raw_row(self, entry: StepEntry, r: int) -> Floats | None:
        if entry.sampled:
            return None
        vocab = self._engine.info.vocab_size
        at = entry.rows_offset + r * vocab * LOGIT_SIZE
        return np.frombuffer(self._arenas[entry.client], LOGIT, vocab, at)


def _sampling(entry: StepEntry) -> SamplingParams | None:
    return sampling_params(entry.sampling) if entry.sampled else None

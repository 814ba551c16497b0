"""The two ends of a connection, over real sockets: Peer (the scheduler's, never blocks) and Link (everybody else's)."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmsched.errors import ErrorCode, ProtocolError, SchedulerDied, SchedulerUnreachable, SocketPathError
from shmsched.wire import frames
from shmsched.wire.credentials import credentials, refuse_other_users
from shmsched.wire.framing import FrameSplitter, framed
from shmsched.wire.link import Link
from shmsched.wire.listener import Listener
from shmsched.wire.peer import Peer

from processes.leftovers import wait_until

DEADLINE_S = 10.0


def pair(**options: int) -> tuple[Peer, Link]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Peer(ours, **options), Link(Connection(theirs.detach()))


@pytest.fixture
def ends() -> Iterator[tuple[Peer, Link]]:
    peer, link = pair()
    yield peer, link
    link.close()
    peer.close()


def arrived(link: Link, n: int, between: Callable[[], object] = lambda: None) -> list[Any]:
    """The next ``n`` frames, or a failure after 10 s without any."""
    found: list[Any] = []
    while len(found) < n:
        between()
        some = link.receive(DEADLINE_S)
        assert some is not None, "the stream ended"
        found += some
    return found


def is_closed(read_end: int) -> bool:
    """No write end of the pipe is open any more, anywhere."""
    ready = select.select([read_end], [], [], DEADLINE_S)[0]
    return bool(ready) and os.read(read_end, 1) == b""


def document(n: int) -> frames.Status:
    return frames.Status(bytes(n))


# --- frames ---------------------------------------------------------------------------------------------------------------


def test_frames_arrive_whole_and_in_order_both_ways(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    sent = [frames.Work(i, i % 2) for i in range(500)]
    for message in sent:
        peer.send(message)
    assert peer.flush()
    assert peer.outbound_bytes == 0
    assert arrived(link, 500) == sent
    for message in sent[:20]:
        link.send(message)
    found: list[Any] = []
    wait_until(lambda: found.extend(peer.read() or []) or len(found) == 20, "20 frames")
    assert found == sent[:20]


def test_reading_does_not_block_and_end_of_stream_is_none(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    assert peer.read() == []
    assert link.receive(0) == []
    link.send(frames.Work(1, 2))
    link.close()
    assert peer.read() == [frames.Work(1, 2)]
    assert peer.read() is None
    assert peer.read() is None


def test_end_of_stream_for_a_link(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    peer.send(frames.Work(1, 2))
    peer.flush()
    peer.close()
    assert link.receive(DEADLINE_S) == [frames.Work(1, 2)]
    assert link.receive(DEADLINE_S) is None
    with pytest.raises(SchedulerDied, match=f"pid {os.getpid()}"):
        link.send(frames.Work(1, 2))


def test_half_a_frame_and_then_the_end(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    os.write(link.fileno(), framed(bytes(100))[:50])
    assert peer.read() == []
    link.close()
    assert peer.read() is None


def test_what_a_peer_may_not_send_is_a_protocol_error(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    os.write(link.fileno(), b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="a frame of -1 bytes"):
        peer.read()


def test_writes_that_the_socket_takes_in_part_go_on_where_they_stopped() -> None:
    peer, link = pair()
    with ExitStack() as stack:
        stack.callback(link.close)
        stack.callback(peer.close)
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sent = [document(n) for n in (1, 30_000, 5, 200_000, 7)]
        for message in sent:
            peer.send(message)
        total = peer.outbound_bytes
        assert not peer.flush()
        assert 0 < peer.outbound_bytes < total
        assert arrived(link, len(sent), peer.flush) == sent
        assert peer.outbound_bytes == 0


def test_a_peer_that_does_not_read_is_seen_and_costs_bounded_memory() -> None:
    peer, link = pair(max_outbound=100_000)
    with ExitStack() as stack:
        stack.callback(link.close)
        stack.callback(peer.close)
        while peer.flush():
            peer.send(document(10_000))
        assert not peer.overfull
        for _ in range(10):
            peer.send(document(10_000))
        assert peer.overfull
        wait_until(lambda: link.receive(0) is not None and peer.flush(), "the peer to have read everything")
        assert not peer.overfull


def test_the_loop_is_told_once_that_there_is_something_to_write(ends: tuple[Peer, Link]) -> None:
    peer, _ = ends
    told: list[int] = []
    peer.on_pending = lambda: told.append(1)
    peer.send(frames.Work(1, 1))
    peer.send(frames.Work(2, 1))
    assert len(told) == 1
    peer.flush()
    peer.send(frames.Work(3, 1))
    assert len(told) == 2


def test_frames_of_many_threads_do_not_mix(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    sizes = [10, 20_000, 60_000, 3]

    def send(i: int) -> None:
        for n in sizes:
            link.send(frames.Status(bytes([i]) * n))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    found: list[Any] = []
    wait_until(lambda: found.extend(peer.read() or []) or len(found) == 16, "16 frames")
    for thread in threads:
        thread.join(DEADLINE_S)
    for i in range(4):
        assert [len(f.document) for f in found if f.document[0] == i] == sizes
    assert all(len(set(f.document)) == 1 for f in found)


def in_time(call: Callable[[], None]) -> None:
    """Fails, rather than hangs, if the call waits."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a send waits for the scheduler"


def test_a_send_does_not_wait_for_a_scheduler_that_is_behind(ends: tuple[Peer, Link]) -> None:
    """It may hold the client's lock, which the thread that settles futures needs."""
    peer, link = ends
    sent = [document(n % 7 * 20_000 + n) for n in range(1, 60)]
    in_time(lambda: [link.send(message) for message in sent])  # type: ignore[func-returns-value]
    found: list[Any] = []
    wait_until(lambda: found.extend(peer.read() or []) or len(found) == len(sent), "all frames")
    assert found == sent
    link.send(frames.Work(1, 1))
    wait_until(lambda: peer.read() == [frames.Work(1, 1)], "the frame after them")


def test_a_scheduler_that_ends_while_frames_wait_for_it(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    in_time(lambda: [link.send(document(100_000)) for _ in range(20)])  # type: ignore[func-returns-value]
    peer.close()

    def refused() -> bool:
        try:
            link.send(frames.Work(1, 1))
        except SchedulerDied:
            return True
        return False

    wait_until(refused, "a send to say that the scheduler is gone")
    assert link.receive(DEADLINE_S) is None


def test_shutdown_wakes_the_thread_that_receives(ends: tuple[Peer, Link]) -> None:
    _, link = ends
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(link.receive()))
    thread.start()
    link.shutdown()
    thread.join(DEADLINE_S)
    assert results == [None]


# --- descriptors ----------------------------------------------------------------------------------------------------------


def memfd(i: int) -> int:
    fd = os.memfd_create("test")
    os.write(fd, b"%d" % i)
    return fd


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([1, 50, 3000, 20_000, 90_000])), min_size=1, max_size=12),
    st.sampled_from([1, 20_000, 0]),
)
def test_a_descriptor_rides_on_its_own_frame_and_on_no_other(plan: list[tuple[bool, int]], buffer: int) -> None:
    """Whatever the socket takes at a time: it comes with the first byte of its frame, and once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if buffer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    theirs.setblocking(False)
    peer = Peer(ours)
    with ExitStack() as stack:
        stack.callback(theirs.close)
        stack.callback(peer.close)
        starts: dict[int, int] = {}
        at = 0
        for i, (with_fd, n) in enumerate(plan):
            fd = memfd(i) if with_fd else -1
            peer.send(document(n), fd)
            if with_fd:
                os.close(fd)  # it was duplicated
                starts[at] = i
            at += len(framed(b"")) + 8 + n
        found: dict[int, int] = {}
        received, whole, splitter = 0, 0, FrameSplitter()
        while received < at:
            peer.flush()
            assert select.select([theirs], [], [], DEADLINE_S)[0]
            data, ancillary, flags, _ = theirs.recvmsg(1 << 18, socket.CMSG_SPACE(4 * 8))
            assert not flags & socket.MSG_CTRUNC
            fds = array.array("i")
            for _, _, content in ancillary:
                fds.frombytes(content)
            # The kernel gives earlier bytes together with those that a descriptor came with, but nothing after them.
            beginnings = [start for start in starts if received <= start < received + len(data)]
            assert len(beginnings) == len(fds) <= 1
            for fd, start in zip(fds, beginnings, strict=True):
                found[start] = int(os.pread(fd, 10, 0))
                os.close(fd)
            received += len(data)
            whole += len(splitter.feed(data))
        assert found == starts
        assert whole == len(plan)


def test_descriptors_come_with_their_frames_and_are_closed_on_exec(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    for i in range(3):
        fd = memfd(i)
        peer.send(frames.Arena(i), fd)
        peer.send(frames.Work(i, 0))
        os.close(fd)
    peer.flush()
    for message in arrived(link, 6):
        if isinstance(message, frames.Arena):
            fd = link.descriptor()
            assert not os.get_inheritable(fd)
            assert int(os.pread(fd, 10, 0)) == message.size
            os.close(fd)
    with pytest.raises(ProtocolError, match="without the descriptor"):
        link.descriptor()


def send_descriptors(sock_fd: int, data: bytes, fds: list[int]) -> None:
    with socket.socket(fileno=os.dup(sock_fd)) as sock:
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_the_scheduler_keeps_no_descriptor_that_a_peer_sends(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    read, write = os.pipe()
    send_descriptors(link.fileno(), framed(b"\x45\0\0\0" + bytes(12)), [write] * 3)
    os.close(write)
    assert peer.read() == [frames.Work(0, 0)]
    assert is_closed(read)
    os.close(read)


def test_descriptors_that_nobody_takes_are_bounded_and_closed_with_the_link(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    read, write = os.pipe()
    with pytest.raises(ProtocolError, match="descriptors came that no frame asked for"):
        while True:
            send_descriptors(peer.sock.fileno(), framed(b"\x45\0\0\0" + bytes(12)), [write] * 8)
            assert link.receive(DEADLINE_S)
    os.close(write)
    link.close()
    assert is_closed(read)
    os.close(read)


def test_the_scheduler_keeps_no_copy_of_a_descriptor_that_it_has_sent(ends: tuple[Peer, Link]) -> None:
    peer, link = ends
    read, write = os.pipe()
    peer.send(frames.Arena(1), write)
    os.close(write)
    assert peer.flush()
    assert arrived(link, 1) == [frames.Arena(1)]
    os.close(link.descriptor())
    assert is_closed(read)
    os.close(read)


@pytest.mark.parametrize("gone", [False, True], ids=["never flushed", "the other end is gone"])
def test_descriptors_that_were_not_sent_are_closed_with_the_peer(gone: bool) -> None:
    """Else a client that leaves at the wrong moment would keep its arena's memory in the scheduler for ever."""
    peer, link = pair()
    read, write = os.pipe()
    peer.send(frames.Work(0, 0))
    peer.send(frames.Arena(1), write)
    peer.send(frames.Arena(2), write)
    os.close(write)
    link.close()
    if gone:
        with pytest.raises(OSError, match="Broken pipe"):
            while True:
                peer.flush()
        with pytest.raises(OSError, match="Broken pipe"):
            peer.flush()
    peer.close()
    assert is_closed(read)
    os.close(read)


# --- connecting -----------------------------------------------------------------------------------------------------------


def test_the_first_frame_is_a_hello(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "s")
    link = Link.connect(tmp_path / "s", frames.Role.ENGINE)
    sock = listener.accept()
    assert sock is not None
    peer = Peer(sock)
    assert peer.read() == [frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, frames.Role.ENGINE)]
    assert (peer.pid, peer.uid, link.peer_pid) == (os.getpid(), os.geteuid(), os.getpid())
    assert listener.accept() is None
    for end in (link, peer, listener):
        end.close()


def test_no_daemon_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnreachable, match=r"there is no such socket.*shmsched up"):
        Link.connect(tmp_path / "s", frames.Role.CLIENT)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    with pytest.raises(SchedulerUnreachable, match=r"no daemon answers at .*refused.*shmsched up"):
        Link.connect(tmp_path / "s", frames.Role.CLIENT)
    with pytest.raises(SocketPathError, match="at most 107"):
        Link.connect(tmp_path / ("x" * 120), frames.Role.CLIENT)


def test_a_daemon_that_is_still_starting_is_waited_for(tmp_path: Path) -> None:
    links: list[Link] = []
    thread = threading.Thread(
        target=lambda: links.append(Link.connect(tmp_path / "s", frames.Role.CLIENT, wait=DEADLINE_S))
    )
    thread.start()
    listener = Listener(tmp_path / "s")
    thread.join(DEADLINE_S)
    assert len(links) == 1
    links[0].close()
    listener.close()


def test_waiting_ends(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnreachable):
        Link.connect(tmp_path / "s", frames.Role.CLIENT, wait=0.05)


def test_a_refusal_that_comes_before_the_hello_is_read(tmp_path: Path) -> None:
    refusal = frames.Refused(ErrorCode.FULL, "9 connections are open")
    listener = Listener(tmp_path / "s")
    listener.sock.setblocking(True)
    n = 50

    def refuse() -> None:
        for _ in range(n):
            sock = listener.accept()
            assert sock is not None
            peer = Peer(sock)
            peer.send(refusal)
            peer.flush()
            peer.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    for _ in range(n):
        link = Link.connect(tmp_path / "s", frames.Role.CLIENT)
        assert link.receive(DEADLINE_S) == [refusal]
        link.close()
    thread.join(DEADLINE_S)
    listener.close()


def test_peers_of_another_user_are_refused() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert credentials(here) == (os.getpid(), os.geteuid(), os.getegid())
    refuse_other_users(os.geteuid())
    with pytest.raises(ProtocolError, match=f"runs as user {os.geteuid() + 1}; this socket serves user {os.geteuid()}"):
        refuse_other_users(os.geteuid() + 1)

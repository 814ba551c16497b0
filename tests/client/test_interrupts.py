"""An interrupt waits until what must not be left half done is done."""

from __future__ import annotations

import signal
import threading

import pytest

from shmsched.client.interrupts import Deferred


def test_it_comes_when_all_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Deferred():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Deferred():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_are_called_with_what_they_are_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with Deferred():
            signal.raise_signal(signal.SIGTERM)
            assert called == []
        assert called == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_of_its_own_is_not_lost() -> None:
    with pytest.raises(ValueError, match="of its own"), Deferred():
        raise ValueError("of its own")


def test_other_threads_have_nothing_to_defer() -> None:
    handlers: list[object] = []

    def look() -> None:
        with Deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]

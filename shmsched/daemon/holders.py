"""Who holds the slots of engines, and who waits for one: told by the processes, which is what people know clients by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shmsched.daemon.client_link import ClientLink

MOST_NAMED = 6
"""Processes in a message; the others are counted."""


def by_process(counts: Iterable[Mapping[ClientLink, int]]) -> list[tuple[int, int]]:
    """The pid of each process whose clients have any, and how many: those with the most first."""
    pids: Counter[int] = Counter()
    for of_clients in counts:
        for link, n in of_clients.items():
            pids[link.peer.pid] += n
    return sorted(pids.items(), key=lambda item: (-item[1], item[0]))


def in_words(held: list[tuple[int, int]]) -> str:
    """``client pid 12 (3), client pid 15 (1)``; empty for nobody."""
    named = [f"client pid {pid} ({n})" for pid, n in held[:MOST_NAMED]]
    others = held[MOST_NAMED:]
    if others:
        named.append(f"{len(others)} other processes ({sum(n for _, n in others)})")
    return ", ".join(named)

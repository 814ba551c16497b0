"""What a daemon is told at its start, and the TOML file that can say it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmsched.arguments import shown, text
from shmsched.errors import InvalidRequest
from shmsched.scheduling import SchedulerParams
from shmsched.scheduling.settings import SETTINGS, check
from shmsched.wire.socket_path import default_socket


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engines to spawn: ``copies`` of ``spec``. ``env`` is empty, or one for all, or one for each copy."""

    spec: str
    copies: int = 1
    env: tuple[Mapping[str, str], ...] = ()
    python: str | None = None

    def __post_init__(self) -> None:
        text("engine: spec", self.spec)
        if not isinstance(self.copies, int) or self.copies < 1:
            raise InvalidRequest(f"engine {self.spec!r}: copies is {shown(self.copies)}; it must be 1 or more")
        if len(self.env) not in (0, 1, self.copies):
            raise InvalidRequest(
                f"engine {self.spec!r}: env lists {len(self.env)} tables for {self.copies} copies; give none, one for all, or one each"
            )

    def env_of(self, copy: int) -> Mapping[str, str]:
        if not self.env:
            return {}
        return self.env[copy if len(self.env) > 1 else 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may hold. Room for every answer is reserved when its step is admitted."""

    ring_tokens: int = 1 << 18
    """Tokens on their way to the scheduler."""
    outstanding_steps: int = 8192
    """Steps submitted and not yet answered."""
    outstanding_results: int = 1 << 16
    """Sampled tokens asked for and not yet read."""
    streamed_tokens: int = 1 << 15
    """Tokens of generations that go on, not yet read. A generation that finds no room waits until its client has read."""
    arena_bytes: int = 1 << 30
    """Raw logits, asked for or held."""
    sessions: int = 16384
    """Sessions, open or waiting to be."""
    option_bytes: int = 16 << 20
    """Options of sessions that are not open yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Everything a daemon is told."""

    socket: Path = field(default_factory=default_socket)
    engines: tuple[EngineConfig, ...] = ()
    params: SchedulerParams = field(default_factory=SchedulerParams)
    drain_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    """How long an engine may take from being spawned until it is ready."""
    step_timeout_s: float = 300.0
    """How long a batch may take before its engine counts as hanging and is killed."""
    linger_share: float = 0.3
    """The most that waiting for expected sessions may take of an engine's mean step time (where prompts wait, no more than
    ``linger.PROMPTS_SHARE``). It is rarely taken: the wait ends with the last of them, and slower ones are not expected. Below the
    turnaround of a busy machine, though, sessions once split over two batches never merge again: with 24 ms steps and 8 sessions,
    0.05 gave 4.4 steps a batch and 0.2 gave 7.7; with 10 ms steps and 32 sessions of 4 clients on two cores, 0.2 gave 25 and 0.3
    gave 30, and 14 % more steps a second."""
    ahead_share: float = 0.6
    """How much of a step must be over before an engine that runs generations is given the batch that comes after. What comes in
    earlier is in that batch; the rest of the step is for the scheduler to be there in time. With 1 or more it hardly ever is."""
    max_queued_steps: int = 1 << 18
    """Of all clients together. Beyond it those with more than their share are not read until a quarter of it has gone: what
    they submit meanwhile waits in them, each within its own limits."""
    max_clients: int = 1024
    """Connections, those of engines among them. A few more are for those who ask for status or a stop."""
    max_shared_memory: int = 16 << 30
    client: ClientLimits = ClientLimits()
    launcher_pid: int = 0
    """End with this process; 0 for a life of one's own."""

    def __post_init__(self) -> None:
        for name in SETTINGS:
            if hasattr(self, name):
                check(name, getattr(self, name))


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, ``engines`` and ``socket``. Raises InvalidRequest that names file and key.

    ``[[engine]]`` tables have ``spec``, ``copies``, ``env`` (a table, or a list of them) and ``python``; at the top may stand
    ``socket`` and all of SETTINGS, without ``_s``.
    """
    try:
        # Whatever the locale; some editors begin a file with a byte-order mark.
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise InvalidRequest(f"cannot read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"{path} is not TOML: {e}") from e
    names = {name.removesuffix("_s"): name for name in SETTINGS}
    _check_keys(path, "the top level", document, {"socket": str, **dict.fromkeys(names, object), "engine": list})
    settings = {key: document[key] for key in ("socket",) if key in document}
    try:
        settings |= {names[key]: check(names[key], document[key], key) for key in names if key in document}
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {e}") from e
    settings["engines"] = tuple(_engine(path, i, table) for i, table in enumerate(document.get("engine", ())))
    return settings


def _engine(path: Path, index: int, table: Any) -> EngineConfig:
    where = f"[[engine]] number {index + 1}"
    if not isinstance(table, dict) or "spec" not in table:
        raise InvalidRequest(f'{path}: {where} must be a table with at least spec = "..."')
    _check_keys(path, where, table, {"spec": str, "copies": int, "env": (dict, list), "python": str})
    env = table.get("env", [])
    tables = env if isinstance(env, list) else [env]
    for variables in tables:
        if not isinstance(variables, dict) or not all(isinstance(v, str) for v in variables.values()):
            raise InvalidRequest(
                f"{path}: {where}: env holds {variables!r}; it must be a table of strings, or a list of such"
            )
    try:
        return EngineConfig(
            spec=table["spec"], copies=table.get("copies", 1), env=tuple(tables), python=table.get("python")
        )
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {where}: {e}") from e


_KINDS = {str: "a text", int: "a whole number", dict: "a table", list: "a list of tables"}


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if key not in known:
            raise InvalidRequest(f"{path}: {where} has {key!r}; known are {', '.join(known)}")
        if not isinstance(value, known[key]) or (known[key] is int and isinstance(value, bool)):
            kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
            wanted = " or ".join(_KINDS[kind] for kind in kinds)
            hint = f"; engines are written [[{key}]]" if known[key] is list else ""
            raise InvalidRequest(f"{path}: {where}: {key} is {value!r}; it must be {wanted}{hint}")

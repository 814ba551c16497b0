"""``shmsched up``: the daemon in the foreground."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmsched.cli.options import (
    LEAST_SECONDS,
    MOST_SECONDS,
    POSITIVE_SECONDS,
    SECONDS,
    SPEC_HELP,
    check_spec,
    socket_option,
)

if TYPE_CHECKING:
    from shmsched.daemon.config import DaemonConfig

_LIMIT = click.IntRange(min=1)


@click.command("up")
@socket_option
@click.option(
    "--engine", "specs", callback=check_spec, multiple=True, metavar="SPEC", help="Spawn an engine; repeatable."
)
@click.option("--engines", "copies", type=_LIMIT, metavar="N", help="Spawn N of each.  [default: 1]")
@click.option("--max-decode-sequences", type=_LIMIT, metavar="N", help="Decodes in one batch.  [default: 32]")
@click.option("--max-prefill-chunk-size", type=_LIMIT, metavar="N", help="Tokens of a prefill chunk.  [default: 256]")
@click.option(
    "--max-queued-steps",
    type=_LIMIT,
    metavar="N",
    help="Of all clients together; beyond it those that flood have to wait.  [default: 262144]",
)
@click.option(
    "--max-clients", type=_LIMIT, metavar="N",
    help="Connections at once, those of engines among them.  [default: 1024]",
)  # fmt: skip
@click.option(
    "--drain-timeout", type=SECONDS, metavar="S", help="How long open sessions may go on at the end.  [default: 30]"
)
@click.option(
    "--step-timeout", type=POSITIVE_SECONDS, metavar="S", help="When a batch counts as hanging.  [default: 300]"
)
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE.toml", help="Settings; options given here win over them."
)
def command(config: Path | None, **options: Any) -> int:
    """Run the scheduler daemon in the foreground, with the engines that it is told to spawn.

    Prints one line, "ready SOCKET", on standard output when the engines are up; everything else, and what the engines
    print, goes to standard error. Without engines it waits for those that `shmsched engine` attaches.

    Ctrl-C or SIGTERM ends it: it takes no new sessions, lets open ones go on until they close or the drain time-out has
    passed, and exits. A second one ends it at once.

    A configuration file has [[engine]] tables with spec, copies, env (a table, or a list with one for each copy) and
    python, and above them socket, max_decode_sequences, max_prefill_chunk_size, max_queued_steps, max_clients,
    drain_timeout and step_timeout.
    """
    from shmsched.daemon.running import run

    return run(daemon_config(config, **options))


command.epilog = SPEC_HELP


def daemon_config(
    file: Path | None,
    *,
    socket: Path | None,
    specs: tuple[str, ...],
    copies: int | None,
    max_decode_sequences: int | None,
    max_prefill_chunk_size: int | None,
    max_queued_steps: int | None,
    max_clients: int | None,
    drain_timeout: float | None,
    step_timeout: float | None,
) -> DaemonConfig:
    """The file's settings, and over them the options that were given."""
    from shmsched.daemon.config import EngineConfig, read_config

    settings = read_config(file) if file is not None else {}
    engines: tuple[EngineConfig, ...] = settings.pop("engines", ())
    if specs:
        engines = tuple(EngineConfig(spec=spec) for spec in specs)
    if copies is not None:
        if not engines:
            raise click.UsageError("--engines says how many of each engine to spawn; name one with --engine.")
        engines = tuple(replace(engine, copies=copies) for engine in engines)
    given = {
        "socket": socket,
        "max_decode_sequences": max_decode_sequences,
        "max_prefill_chunk_size": max_prefill_chunk_size,
        "max_queued_steps": max_queued_steps,
        "max_clients": max_clients,
        "drain_timeout": drain_timeout,
        "step_timeout": step_timeout,
    }
    settings |= {name: value for name, value in given.items() if value is not None}
    return _checked(file, settings, engines)


def _checked(file: Path | None, settings: dict[str, Any], engines: tuple[Any, ...]) -> DaemonConfig:
    """Options were checked as they were read: what does not fit here stands in the file, unless there is none."""
    from shmsched.daemon.config import DaemonConfig
    from shmsched.engine.spec import EngineSpec
    from shmsched.errors import InvalidRequest
    from shmsched.scheduling import SchedulerParams

    rest: dict[str, Any] = {}
    try:
        for engine in engines:
            EngineSpec.parse(engine.spec)
        limits = {
            name: settings[name] for name in ("max_decode_sequences", "max_prefill_chunk_size") if name in settings
        }
        params = SchedulerParams(**limits)
        for name, least in (("drain_timeout", 0.0), ("step_timeout", LEAST_SECONDS)):
            if name in settings:
                rest[f"{name}_s"] = seconds = settings[name]
                if not least <= seconds <= MOST_SECONDS:
                    raise ValueError(f"{name} is {seconds}; it must be from {least:g} to {MOST_SECONDS:,}")
        for name in ("max_queued_steps", "max_clients"):
            if name in settings:
                rest[name] = settings[name]
                if rest[name] < 1:
                    raise ValueError(f"{name} is {rest[name]}; it must be 1 or more")
    except ValueError as e:
        if file is None:
            raise click.UsageError(str(e)) from e
        raise InvalidRequest(f"{file}: {e}") from e
    if "socket" in settings:
        rest["socket"] = Path(settings["socket"])
    return DaemonConfig(engines=engines, params=params, **rest)

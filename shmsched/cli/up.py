"""``shmsched up``: the daemon in the foreground."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmsched import arguments
from shmsched.cli.options import SPEC_HELP, Number, check_spec, socket_option
from shmsched.scheduling.settings import SETTINGS, checked

if TYPE_CHECKING:
    from shmsched.daemon.config import DaemonConfig


def _setting(name: str, help: str) -> Callable[[Any], Any]:
    """The option of a setting, within its bounds."""
    check, least, most = SETTINGS[name]
    whole = check is arguments.whole
    kind = click.IntRange(int(least), int(most)) if whole else Number(least, most)
    option = "--" + name.removesuffix("_s").replace("_", "-")
    return click.option(option, name, type=kind, metavar="N" if whole else "S", help=help)


@click.command("up")
@socket_option
@click.option(
    "--engine", "specs", callback=check_spec, multiple=True, metavar="SPEC", help="Spawn an engine; repeatable."
)
@click.option("--engines", "copies", type=click.IntRange(min=1), metavar="N", help="Spawn N of each.  [default: 1]")
@_setting("max_decode_sequences", "Decodes in one batch.  [default: 32]")
@_setting("max_prefill_chunk_size", "Tokens of a prefill chunk.  [default: 256]")
@_setting("max_queued_steps", "Of all clients together; beyond it those that flood have to wait.  [default: 262144]")
@_setting("max_clients", "Connections at once, those of engines among them.  [default: 1024]")
@_setting("drain_timeout_s", "How long open sessions may go on at the end.  [default: 30]")
@_setting("step_timeout_s", "When a batch counts as hanging.  [default: 300]")
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
    max_shared_memory, drain_timeout, start_timeout, step_timeout, linger_share and ahead_share.
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
    **given: Any,
) -> DaemonConfig:
    """The file's settings, and over them the options that were given."""
    from shmsched.daemon.config import DaemonConfig, EngineConfig, read_config
    from shmsched.engine.spec import EngineSpec
    from shmsched.errors import InvalidRequest

    settings = read_config(file) if file is not None else {}
    engines: tuple[EngineConfig, ...] = settings.pop("engines", ())
    if specs:
        engines = tuple(EngineConfig(spec=spec) for spec in specs)
    if copies is not None:
        if not engines:
            raise click.UsageError("--engines says how many of each engine to spawn; name one with --engine.")
        engines = tuple(replace(engine, copies=copies) for engine in engines)
    chosen = settings.pop("socket", None) if socket is None else socket
    try:
        for engine in engines:
            EngineSpec.parse(engine.spec)
        params, rest = checked(settings | {name: value for name, value in given.items() if value is not None})
    except ValueError as e:
        # Options were checked as they were read: it stands in the file, unless there is none.
        if file is None:
            raise click.UsageError(str(e)) from e
        raise InvalidRequest(f"{file}: {e}") from e
    if chosen is not None:
        rest["socket"] = Path(chosen)
    return DaemonConfig(engines=engines, params=params, **rest)

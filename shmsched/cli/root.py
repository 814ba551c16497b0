"""``shmsched``: the commands, each loaded when it is used, and what becomes of their errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import click

from shmsched.cli.exits import (
    FAILED,
    INTERRUPTED,
    NOBODY_READS,
    Failed,
    NobodyReads,
    finish_streams,
    is_of_the_output,
    say_error,
    show_usage_error,
    status_of,
    telling_of_readers_that_left,
)
from shmsched.errors import ShmschedError


class Lazy(NamedTuple):
    """Where a command is, as ``module:attribute``, and what the list of commands says of it."""

    target: str
    help: str


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used, and not to list it."""

    def __init__(self, lazy: Mapping[str, Lazy], help: str) -> None:
        super().__init__(help=help, context_settings={"help_option_names": ["-h", "--help"]})
        self._lazy = lazy

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with telling_of_readers_that_left():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with telling_of_readers_that_left():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in self._lazy.items()])


def _say_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from shmsched.dataplane import BUILD

        click.echo(f"shmsched, version {version('shmsched')}, {BUILD}")
        ctx.exit()


group = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_say_version,
    help="Show the version, and whether it is compiled.",
)(
    LazyGroup(
        {
            "up": Lazy("shmsched.cli.up:command", "Run the scheduler daemon and its engines."),
            "status": Lazy("shmsched.cli.status:command", "Show what the daemon is doing."),
            "stop": Lazy("shmsched.cli.stop:command", "Stop the daemon."),
            "engine": Lazy("shmsched.cli.engine:command", "Attach an engine to a running daemon."),
            "generate": Lazy("shmsched.cli.generate:command", "Continue a text with the daemon's model."),
            "demo": Lazy("shmsched.cli.demo:command", "Watch one model serve several processes at once."),
            "stress": Lazy("shmsched.tools.stress:command", "Load a daemon, and check every answer."),
            "bench": Lazy("shmsched.tools.bench.command:command", "Measure beside other transports, against bars."),
        },
        help="A scheduler for batched LLM serving that lives in its own process.",
    )
)


def run(arguments: Sequence[str]) -> int:
    """Run a command. Returns the exit status, which nothing that is still to be written changes."""
    try:
        status = _run(arguments)
    finally:
        finish_streams()
    return status


def _run(arguments: Sequence[str]) -> int:
    try:
        status = group.main(list(arguments), prog_name="shmsched", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as e:
        show_usage_error(e)
        return e.exit_code
    except click.ClickException as e:
        say_error(e.format_message())
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Failed as e:
        say_error(e)
        return e.status
    except ShmschedError as e:
        say_error(e)
        return status_of(e)
    except (NobodyReads, BrokenPipeError):
        return NOBODY_READS
    except OSError as e:
        say_error(f"cannot write to standard output: {e.strerror}" if is_of_the_output(e) else e)
        return FAILED
    return status if isinstance(status, int) else 0

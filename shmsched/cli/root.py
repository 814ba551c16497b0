"""``shmsched``: the commands, each loaded when it is used, and what becomes of their errors."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import NamedTuple

import click

from shmsched.cli.exits import FAILED, INTERRUPTED, Failed, say_error
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


group = click.version_option(version("shmsched"), prog_name="shmsched")(
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
    """Run a command. Returns the exit status."""
    try:
        status = group.main(list(arguments), prog_name="shmsched", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Failed as e:
        say_error(e)
        return e.status
    except ShmschedError as e:
        say_error(e)
        return FAILED
    except BrokenPipeError:
        # The reader has gone. What Python still holds for it must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status if isinstance(status, int) else 0

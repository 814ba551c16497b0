"""``shmsched status``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmsched.cli.exits import FAILED
from shmsched.cli.options import socket_option

if TYPE_CHECKING:
    from shmsched.client.control import Control

PERIOD_S = 1.0


@click.command("status")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print the document that the tables are made from.")
@click.option("--watch", is_flag=True, help="Go on, once a second, until Ctrl-C.")
def command(socket: Path | None, as_json: bool, watch: bool) -> int:
    """Show the daemon's ledger, clients, engines, queues and limits.

    Exit status 0: ready. 1: not ready, because no engine is, or because it is stopping. 3: no daemon answers, or the
    socket's path is wrong.
    """
    from shmsched.client.control import Control

    with Control(socket) as control:
        if watch:
            return _watch(control, as_json)
        document = control.status()
        if as_json:
            click.echo(json.dumps(document, indent=2))
        else:
            from shmsched.cli.status_tables import console, tables

            console().print(tables(document))
        return exit_status(document)


def exit_status(document: dict[str, Any]) -> int:
    ready = document["state"] == "running" and any(engine["state"] == "ready" for engine in document["engines"])
    return 0 if ready else FAILED


def _watch(control: Control, as_json: bool) -> int:
    """Until interrupted. A terminal's screen is painted over; elsewhere one report follows the other."""
    document = control.status()
    try:
        with _display(as_json) as show:
            while True:
                show(document)
                time.sleep(PERIOD_S)
                document = control.status()
    except KeyboardInterrupt:
        return exit_status(document)


@contextmanager
def _display(as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    if as_json:
        yield lambda document: click.echo(json.dumps(document))
        return
    from rich.live import Live

    from shmsched.cli.status_tables import console, tables

    if not sys.stdout.isatty():
        yield lambda document: console().print(tables(document))
        return
    with Live(console=console(), auto_refresh=False, screen=True) as live:
        yield lambda document: live.update(tables(document), refresh=True)

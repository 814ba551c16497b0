"""``shmsched engine``: an engine attached by hand."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shmsched.cli.options import SECONDS, SPEC_HELP, check_spec, socket_option


@click.command("engine", epilog=SPEC_HELP)
@click.argument("spec", callback=check_spec)
@socket_option
@click.option("--wait", type=SECONDS, metavar="S", default=0.0, help="Wait up to S seconds for the daemon to be there.")
def command(spec: str, socket: Path | None, wait: float) -> int:
    """Attach an engine to a running daemon: from another virtual environment, or on another GPU.

    It runs until the daemon ends, or Ctrl-C. Exit status 3: no daemon answers, or the socket's path is wrong.
    """
    from shmsched.engine.__main__ import run

    return run(spec, os.fspath(socket) if socket is not None else None, wait=wait)

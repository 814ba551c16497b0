"""Options that several commands have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from shmsched.arguments import LONGEST_S


class Number(click.FloatRange):
    """A number in a range. To click, ``nan`` and ``inf`` are in most."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


SECONDS = Number(min=0, max=LONGEST_S)


def check_spec(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse an engine that is not written as one. Whether there is such an engine, its own process finds out."""
    from shmsched.engine.spec import EngineSpec
    from shmsched.errors import EngineSpecError

    for spec in value if isinstance(value, tuple) else (value,):
        try:
            EngineSpec.parse(spec)
        except EngineSpecError as e:
            raise click.BadParameter(str(e), ctx, param) from e
    return value


SPEC_HELP = "An engine is written name[:argument][?key=value&...], package.module:Class or file.py:Class."

socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The daemon's socket.  [default: $SHMSCHED_SOCKET, or one in a private directory of yours]",
)

"""``shmsched stress``: client processes that submit at random and check every answer."""

from __future__ import annotations

import json
import math
import secrets
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shmsched.tools.load import report
from shmsched.tools.load.chaos import SHARES, Chaos, Fault, parse_chaos
from shmsched.tools.load.options import Mode, Options
from shmsched.tools.load.run import run
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.target import UnfitTarget

INTERRUPTED = 130
NO_TERMINAL_WIDTH = 110


def _seconds(_: click.Context, __: click.Parameter, value: float) -> float:
    if not (math.isfinite(value) and 0.1 <= value <= 86400):
        raise click.BadParameter(f"{value:g} is not from 0.1 to 86400 seconds")
    return value


def _json_path(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {value.absolute().parent}")
    return value


def _chaos(_: click.Context, __: click.Parameter, value: str | None) -> Chaos:
    try:
        return Chaos() if value is None else parse_chaos(value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


@click.command("stress", context_settings={"show_default": True})
@click.option("--clients", type=click.IntRange(1, 256), default=4, help="Client processes.")
@click.option("--sessions", type=click.IntRange(1, 4096), default=8, help="Sessions of each client at once.")
@click.option("--seconds", type=float, default=10.0, callback=_seconds, help="How long to submit.")
@click.option("--mode", type=click.Choice([m.value for m in Mode]), default="mixed", help="What the sessions do most.")
@click.option("--engine", default="echo", metavar="SPEC", help="Engine of our own daemon; it must answer as echo does.")
@click.option("--engines", type=click.IntRange(1, 64), default=1, help="Copies of the engine.")
@click.option(
    "--socket", type=click.Path(path_type=Path), default=None, help="A daemon that runs already, instead of our own."
)
@click.option(
    "--chaos",
    default=None,
    callback=_chaos,
    metavar="FAULT=N,...",
    help=f"Inject faults, each every N seconds or so: {', '.join(f for f in Fault if f not in SHARES)} (garbage: a hostile"
    " peer's). cancel=N cancels that share of the submissions, and pid-namespace=N gives that share of the clients a PID"
    " namespace of their own.",
)
@click.option(
    "--soak",
    is_flag=False,
    flag_value=1_000_000,
    type=click.IntRange(min=1000),
    default=None,
    metavar="[STEPS]",
    help="Instead of --seconds: go on for a million steps (or STEPS), with a client connection and a session opened for"
    " every hundred of them, and see that memory, descriptors and shared memory of daemon and engines stay flat.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=None, help="Repeats the clients' choices.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, writable=True, path_type=Path), default=None,
    callback=_json_path, help="Write the results here too.",
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, mode: str, seed: int | None, json_path: Path | None, **given: Any) -> None:
    """Submit at random from several processes and check every answer.

    Exit status 1 if any answer is wrong, any step is lost or fails for no fault that was injected, anything is left behind,
    the ledger does not balance, or memory grows.
    """

    def is_given(name: str) -> bool:
        return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT

    options = Options(mode=Mode(mode), seed=secrets.randbits(32) if seed is None else seed, **given)
    if options.soak is not None and is_given("seconds"):
        raise click.UsageError("--seconds and --soak exclude each other: a soak ends once it has done what it is to do")
    for name in ("engine", "engines", "chaos", "soak") if options.socket is not None else ():
        if is_given(name):
            raise click.UsageError(f"--{name} is for a daemon of our own; with --socket its own engines are used")
    try:
        with _bar() as bar:
            outcome = run(options, _Shown(bar, options))
    except UnfitTarget as e:
        raise click.ClickException(str(e)) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        ctx.exit(INTERRUPTED)
    report.show(outcome, Console(width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(report.to_json(outcome), indent=2) + "\n", encoding="utf-8")
        except OSError as e:
            raise click.ClickException(f"cannot write {json_path}: {e.strerror}") from None
    ctx.exit(1 if not outcome.good else INTERRUPTED if outcome.interrupted else 0)


def _bar() -> Progress:
    """Shown on a terminal only."""
    columns = (TextColumn("stress {task.fields[said]}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


class _Shown:
    def __init__(self, bar: Progress, options: Options) -> None:
        self._bar = bar
        self._soak = options.soak
        self._task = bar.add_task("stress", total=options.soak or options.seconds, said="")

    def __call__(self, elapsed: float, tally: Tally) -> None:
        said = f"{tally.completed:,} steps, {tally.completed / max(elapsed, 0.1):,.0f}/s"
        if self._soak is not None:
            said += f", {tally.connects:,} connects, {tally.sessions_opened:,} session opens"
        if tally.wrong or tally.failed:
            said += f", {tally.wrong:,} wrong, {tally.failed:,} failed"
        done = elapsed if self._soak is None else min(tally.completed, self._soak)
        self._bar.update(self._task, completed=done, said=said)


if __name__ == "__main__":
    command()

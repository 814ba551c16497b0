"""``shmsched bench``: measures, and shows what was found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from shmsched import ShmschedError
from shmsched.tools.bench import plot, report
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.machine import machine
from shmsched.tools.bench.measure import Finding, full, quick
from shmsched.tools.bench.scenarios import SCENARIOS

EXTRA = {"zmq": "pyzmq", "msgspec": "msgspec", "matplotlib": "matplotlib"}
NO_TERMINAL_WIDTH = 130


def _writable(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {value.absolute().parent}")
    return value


def _file(name: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(f"--{name}", f"{name}_path", type=kind, callback=_writable, help=help)


@click.command(
    "bench", epilog="Scenarios: " + "; ".join(f"{name}: {s.measures}" for name, s in SCENARIOS.items()) + "."
)
@click.option(
    "--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)), metavar="NAME",
    help="One of those below; may be given again.  [default: all]",
)  # fmt: skip
@click.option("--quick", "is_quick", is_flag=True, help="Few and short rounds: to see that it runs, not to judge by.")
@_file("json", "Write every run here too.")
@_file("png", "Draw the plot here too.")
def command(names: tuple[str, ...], is_quick: bool, json_path: Path | None, png_path: Path | None) -> None:
    """Measure shmsched beside other transports, in alternating runs, against what it must reach.

    A bar that is missed is shown and is no error. Exit status 1 if an answer is wrong or a contestant fails.
    """
    missing = [package for module, package in EXTRA.items() if find_spec(module) is None]
    if missing:
        raise click.ClickException(f"bench needs {', '.join(missing)}: pip install 'shmsched[bench]'")
    findings: list[Finding] = []
    faults: list[str] = []
    measured_on = machine()
    for name in names or SCENARIOS:
        with _showing(name) as show:
            try:
                findings.append(SCENARIOS[name].run(quick(show) if is_quick else full(show)))
            except (BenchFault, ShmschedError) as e:
                # What the other scenarios found took minutes to measure.
                faults.append(f"{name}: {e}")
    if findings:
        _report(findings, measured_on, is_quick, json_path, png_path)
    if faults:
        raise click.ClickException("; ".join(faults))


def _report(
    findings: list[Finding], measured_on: dict[str, str], is_quick: bool, json_path: Path | None, png_path: Path | None
) -> None:
    console = Console(width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH)
    report.show(findings, measured_on, console)
    console.print(plot.in_terminal(findings))
    if is_quick:
        console.print("quick: few and short rounds; not to be judged by", style="yellow")
    try:
        if json_path is not None:
            json_path.write_text(
                json.dumps(report.to_json(findings, measured_on, is_quick), indent=2) + "\n", encoding="utf-8"
            )
        if png_path is not None:
            plot.to_png(findings, png_path)
    except OSError as e:
        raise click.ClickException(f"cannot write {e.filename}: {e.strerror}") from None


@contextmanager
def _showing(scenario: str) -> Iterator[Callable[[str], None]]:
    """What is being measured, on a terminal only."""
    console = Console(stderr=True)
    with console.status(f"{scenario} ...") as status:
        yield lambda doing: status.update(f"{scenario}: {doing}")

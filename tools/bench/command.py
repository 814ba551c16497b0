"""``shmsched bench``: measures, and shows what was found."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from shmsched import ShmschedError
from shmsched.tools.bench import report
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.measure import FULL, QUICK, Finding
from shmsched.tools.bench.races import RACES
from shmsched.tools.bench.scenarios import SCENARIOS

EXTRA = {"zmq": "pyzmq", "msgspec": "msgspec", "matplotlib": "matplotlib"}
NO_TERMINAL_WIDTH = 150


def _writable(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {value.absolute().parent}")
    return value


def _show(status: Status, scenario: str, doing: str) -> None:
    status.update(f"{scenario}: {doing}")


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(
    "bench", epilog="Scenarios: " + "; ".join(f"{name}: {s.measures}" for name, s in SCENARIOS.items()) + "."
)
@click.option(
    "--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)), metavar="NAME",
    help="One of those below; may be given again.  [default: all]",
)  # fmt: skip
@click.option(
    "--beside", metavar="PYTHON",
    help="Race against the shmsched of another environment's PYTHON, and nobody else: another commit, or this one as another build, "
    f"'SHMSCHED_INTERPRETED=1 {sys.executable}' say. For {', '.join(RACES)}.",
)  # fmt: skip
@click.option("--quick", "is_quick", is_flag=True, help="Few and short rounds: to see that it runs, not to judge by.")
@click.option("--json", "json_path", type=_FILE, callback=_writable, help="Write every run here too.")
@click.option("--png", "png_path", type=_FILE, callback=_writable, help="Draw the plot here too.")
def command(
    names: tuple[str, ...], beside: str | None, is_quick: bool, json_path: Path | None, png_path: Path | None
) -> None:
    """Measure shmsched beside other transports, in alternating runs, against what it must reach.

    A bar that is missed is shown and is no error. Exit status 1 if an answer is wrong or a contestant fails.
    """
    missing = [package for module, package in EXTRA.items() if find_spec(module) is None]
    if missing:
        raise click.ClickException(f"bench needs {', '.join(missing)}: pip install 'shmsched[bench]'")
    if beside and (others := set(names) - set(RACES)):
        raise click.UsageError(f"--beside is for {', '.join(RACES)}; not for {', '.join(sorted(others))}")
    findings: dict[str, Finding] = {}
    faults: list[str] = []
    measured_on = report.machine()
    progress = Console(stderr=True)
    for name in names or (RACES if beside else SCENARIOS):
        with progress.status(f"{name} ...") as status:
            effort = replace(QUICK if is_quick else FULL, show=partial(_show, status, name), beside=beside)
            try:
                findings[name] = SCENARIOS[name].run(effort)
            except (BenchFault, ShmschedError) as e:
                # What the other scenarios found took minutes to measure.
                faults.append(f"{name}: {e}")
    if findings:
        console = Console(width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH)
        report.show(findings, measured_on, console)
        if is_quick:
            console.print("quick: few and short rounds; not to be judged by", style="yellow")
        try:
            if json_path is not None:
                document = report.to_json(findings, measured_on, is_quick)
                json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            if png_path is not None:
                report.to_png(findings, png_path)
        except OSError as e:
            raise click.ClickException(f"cannot write {e.filename}: {e.strerror}") from None
    if faults:
        raise click.ClickException("; ".join(faults))

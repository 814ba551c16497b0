"""What the README shows is run: its programs, its engine, its configuration and its commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import shmsched
from shmsched.daemon.config import read_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DEADLINE = 120.0

pytestmark = pytest.mark.usefixtures("no_leftovers")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block(language: str, containing: str) -> str:
    (found,) = [b for b in blocks(language) if containing in b]
    return found


def test_the_client_example_runs() -> None:
    program = block("python", "raw.logits.data.shape")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(1, 32000)\n"
    assert done.stderr == ""


def test_the_engine_example_is_complete_and_under_40_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block("python", "# bigram.py")
    assert len(source.splitlines()) < 40
    (tmp_path / "bigram.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    (spec,) = re.findall(r"--engine '(bigram\.py:[^']+)'", README)
    with shmsched.launch(spec) as cluster, cluster.client() as client, client.open_session() as session:
        assert client.models["bigram"].info.vocab_size == 1000
        assert session.submit([1, 2, 3, 1]).result(DEADLINE).tokens.tolist() == [2]
        rows = session.submit([2, 3], output_rows=shmsched.OutputRows.ALL).result(DEADLINE).tokens.tolist()
        assert rows == [3, 1]
        assert session.submit([7, 8, 7], position=2).result(DEADLINE).tokens.tolist() == [8]
        (command,) = re.findall(r"^shmsched (generate --wait .*)$", README, re.MULTILINE)
        generate = [Path(sys.executable).with_name("shmsched"), *shlex.split(command), "--socket", cluster.socket]
        said = subprocess.run(generate, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith("abra")


def test_the_scheduler_example_runs() -> None:
    program = block("python", "scheduler.get_work()")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.stdout, done.stderr) == ("[42]\n", "")


EXAMPLES = re.findall(r"```python\n(.*?)```", README.split("## Examples")[1].split("\n## ")[0], re.DOTALL)


@pytest.mark.parametrize("program", EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
def test_each_example_runs_and_prints_what_it_says(program: str) -> None:
    """``print(...)  # this`` prints this; where nothing is said, it prints something."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    printed = done.stdout.splitlines()
    assert printed
    if said:
        assert printed == said


def test_there_is_an_example_of_each_kind() -> None:
    for kind in ("generate(", "generate_text(", ".fork(", "draft=", "logits_processor=", "AsyncClient("):
        assert any(kind in program for program in EXAMPLES), kind


def test_the_configuration_example_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(block("toml", "[[engine]]"))
    settings = read_config(path)
    assert settings["max_prefill_chunk_size"] == 512
    (engine,) = settings["engines"]
    assert (engine.spec, engine.copies) == ("gemma", 2)
    assert [engine.env_of(copy)["CUDA_VISIBLE_DEVICES"] for copy in range(2)] == ["0", "1"]


def test_every_command_and_option_that_it_names_exists() -> None:
    named = re.findall(
        r"shmsched (up|engine|stop|status|generate|demo|stress|bench)((?: --[a-z-]+| [^\s`|#&]+)*)", README
    )
    assert len({command for command, _ in named}) == 8
    for command in sorted({command for command, _ in named}):
        shown = subprocess.run(
            [Path(sys.executable).with_name("shmsched"), command, "--help"],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        for option in {o for c, rest in named if c == command for o in re.findall(r"--[a-z-]+", rest)}:
            assert option in shown.stdout, f"shmsched {command} has no {option}"


def test_every_path_that_it_names_exists() -> None:
    for name in re.findall(r"`((?:dataplane|scheduling|memory|wire)/[a-z_]+\.py)`", README):
        assert (ROOT / "shmsched" / name).is_file(), name
    for name in re.findall(
        r"`((?:client|daemon|dataplane|engine|scheduling)/[a-z_]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()
    ):
        assert (ROOT / "shmsched" / name).is_file(), name


def test_every_fault_has_a_test_that_exists_and_every_fault_test_is_named() -> None:
    (section,) = re.findall(r"^## Faults seen elsewhere.*?(?=^## )", README, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (F\d+) \|.*$", section, re.MULTILINE)
    assert rows == [f"F{i}" for i in range(1, 16)]
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "faults").glob("test_*.py"))
    existing = re.findall(r"^def (test_f\d+_\w+)\(", sources, re.MULTILINE)
    named = []
    for row, line in zip(rows, re.findall(r"^\| F\d+ .*$", section, re.MULTILINE), strict=True):
        tests = re.findall(r"`(test_\w+)`", line)
        assert tests, f"{row} names no test"
        assert all(name.startswith(f"test_{row.lower()}_") for name in tests), line
        named += tests
    assert sorted(named) == sorted(existing)

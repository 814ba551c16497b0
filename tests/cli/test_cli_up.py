"""``shmsched up``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from commands import DEADLINE_S, daemon, no_traceback, running, shmsched

from shmsched import Control
from shmsched.dataplane import BUILD

from processes.leftovers import wait_until

ENV_ENGINE = """
import os
from shmsched.workers.echo import Echo


class Named(Echo):
    def __init__(self) -> None:
        super().__init__(model=os.environ["MODEL_NAME"])
"""


def socket_of(home: Path) -> Path:
    return home / "shmsched" / "default.sock"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_one_ready_line_and_ends_with_0_on_a_signal(home: Path, number: int) -> None:
    with running(home, "up", "--engine", "echo", "--engines", "2") as up:
        up.read_until(b"\n")
        with Control(socket_of(home)) as control:
            assert [engine["state"] for engine in control.status()["engines"]] == ["ready", "ready"]
        up.process.send_signal(number)
        assert up.wait() == 0, up.err
        assert up.out.decode() == f"ready {socket_of(home)}\n"
        assert f"shmsched: {BUILD}, pid {up.process.pid}, " in up.err.splitlines()[0]
        assert no_traceback(up.err)
        assert not socket_of(home).exists()


def test_a_second_daemon_on_the_same_socket_is_refused_naming_the_first(home: Path) -> None:
    with daemon(home) as up:
        second = shmsched(home, "up")
        assert second.returncode == 1
        assert second.stdout == ""
        assert second.stderr.count("\n") == 1
        assert str(up.process.pid) in second.stderr
        assert shmsched(home, "status").returncode == 1, "the first goes on, without an engine"


def test_the_socket_of_a_killed_daemon_is_replaced(home: Path) -> None:
    with daemon(home, "--engine", "echo") as up:
        up.process.send_signal(signal.SIGKILL)
        assert up.wait() == -signal.SIGKILL
        assert socket_of(home).exists()
    with daemon(home, "--engine", "echo"):
        assert shmsched(home, "status").returncode == 0


def test_the_socket_comes_from_the_option_then_the_environment(home: Path) -> None:
    one, other = home / "one.sock", home / "other.sock"
    with daemon(home, "--socket", str(one), SHMSCHED_SOCKET=str(other)):
        assert one.is_socket()
        assert not other.exists()
    with daemon(home, SHMSCHED_SOCKET=str(other)):
        assert other.is_socket()
        assert shmsched(home, "status", SHMSCHED_SOCKET=str(other)).returncode == 1


def test_a_file_gives_engines_and_each_copy_its_environment(home: Path) -> None:
    (home / "named.py").write_text(ENV_ENGINE)
    (home / "up.toml").write_text(
        f"""
        socket = "{home / "file.sock"}"
        max_decode_sequences = 7
        max_prefill_chunk_size = 33
        [[engine]]
        spec = "echo?vocab=99"
        [[engine]]
        spec = "named.py:Named"
        copies = 2
        env = [{{ MODEL_NAME = "first" }}, {{ MODEL_NAME = "second" }}]
        """
    )
    with daemon(home, "--config", "up.toml", "--max-decode-sequences", "5"), Control(home / "file.sock") as control:
        status = control.status()
        assert sorted(engine["model"] for engine in status["engines"]) == ["echo", "first", "second"]
        assert {engine["vocab_size"] for engine in status["engines"]} == {99, 32000}
        assert status["limits"]["max_decode_sequences"] == 5, "the option wins over the file"
        assert status["limits"]["max_prefill_chunk_size"] == 33


def test_engines_on_the_command_line_replace_those_of_the_file(home: Path) -> None:
    (home / "up.toml").write_text('[[engine]]\nspec = "no_such_engine"\n')
    with daemon(home, "--config", "up.toml", "--engine", "echo?model=mine"), Control(socket_of(home)) as control:
        assert [engine["model"] for engine in control.status()["engines"]] == ["mine"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sockett = 'x'", "sockett"),
        ("max_decode_sequences = 'x'", "max_decode_sequences"),
        ("max_decode_sequences = 0", "max_decode_sequences"),
        ("max_prefill_chunk_size = 2147483647", "max_prefill_chunk_size"),
        ("drain_timeout = -1", "drain_timeout"),
        ("drain_timeout = nan", "drain_timeout"),
        ("[[engine]]\ncopies = 2", "spec"),
        ("[[engine]]\nspec = '?'", "'?'"),
        ("[[engine]]\nspec = 'echo'\ncopies = 0", "copies"),
        ("[[engine]]\nspec = 'echo'\ncopies = 3\nenv = [{}, {}]", "env"),
        ("[[engine]]\nspec = 'echo'\nenv = {A = 1}", "env"),
        ("[engine]\nspec = 'echo'", "engine"),
        ("= 3", "TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it_and_the_key(home: Path, text: str, names: str) -> None:
    (home / "bad.toml").write_text(text)
    done = shmsched(home, "up", "--config", "bad.toml")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "bad.toml" in done.stderr
    assert names in done.stderr


def test_a_file_that_is_not_there_is_named(home: Path) -> None:
    done = shmsched(home, "up", "--config", "none.toml")
    assert done.returncode == 1
    assert "none.toml" in done.stderr
    assert no_traceback(done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engines", "2"),
        ("--engines", "0", "--engine", "echo"),
        ("--engine", ""),
        ("--engine", "echo?vocab"),
        ("--max-decode-sequences", "-1"),
        ("--max-prefill-chunk-size", "2147483647"),
        ("--drain-timeout", "nan"),
        ("--drain-timeout", "inf"),
        ("--drain-timeout", "-1"),
        ("--nonsense",),
        ("stray",),
    ],
)
def test_wrong_options_are_usage_errors(home: Path, arguments: tuple[str, ...]) -> None:
    done = shmsched(home, "up", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: shmsched up")
    assert done.stdout == ""


def test_no_engine_that_starts_is_exit_status_1_and_no_ready_line(home: Path) -> None:
    done = shmsched(home, "up", "--engine", "echo?nonsense=1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "nonsense" in done.stderr
    assert no_traceback(done.stderr)


def test_what_an_engine_prints_goes_to_standard_error(home: Path) -> None:
    (home / "loud.py").write_text(
        "from shmsched.workers.echo import Echo\n\nclass Loud(Echo):\n    def start(self, limits):\n        print('loud words')\n"
    )
    with daemon(home, "--engine", "loud.py:Loud", prints=["loud words"]) as up:
        up.process.terminate()
        assert up.wait() == 0
        assert up.out.count(b"\n") == 1
        assert "loud words" in up.err


def test_the_engines_of_a_killed_daemon_end_with_it(home: Path) -> None:
    with daemon(home, "--engine", "echo") as up:
        engines = json.loads(shmsched(home, "status", "--json").stdout)["engines"]
        up.process.kill()
        up.process.wait(DEADLINE_S)
        for engine in engines:
            wait_until(lambda pid=engine["pid"]: not _runs(pid), f"engine {engine['pid']} to end with its daemon")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and os.path.exists(f"/proc/{pid}")

"""The daemon's settings: what a file says is what is run, and every mistake names file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmsched.daemon.config import DaemonConfig, EngineConfig, read_config
from shmsched.errors import InvalidRequest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "daemon.toml"


def test_everything_that_may_be_said(file: Path) -> None:
    file.write_text(
        """
        socket = "/run/x.sock"
        max_decode_sequences = 8
        max_prefill_chunk_size = 64
        max_queued_steps = 1000
        max_clients = 10
        drain_timeout = 2.5
        linger_share = 0
        [[engine]]
        spec = "echo?vocab=100"
        [[engine]]
        spec = "gemma"
        copies = 2
        python = "/opt/venv/bin/python"
        env = [{CUDA_VISIBLE_DEVICES = "0"}, {CUDA_VISIBLE_DEVICES = "1"}]
        [[engine]]
        spec = "echo"
        copies = 3
        env = {A = "b"}
        """
    )
    settings = read_config(file)
    assert settings == {
        "socket": "/run/x.sock",
        "max_decode_sequences": 8,
        "max_prefill_chunk_size": 64,
        "max_queued_steps": 1000,
        "max_clients": 10,
        "drain_timeout_s": 2.5,
        "linger_share": 0,
        "engines": (
            EngineConfig(spec="echo?vocab=100"),
            EngineConfig(
                spec="gemma",
                copies=2,
                python="/opt/venv/bin/python",
                env=({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}),
            ),
            EngineConfig(spec="echo", copies=3, env=({"A": "b"},)),
        ),
    }
    _, gemma, echo = settings["engines"]
    assert [gemma.env_of(i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0", "1"]
    assert [echo.env_of(i) for i in range(3)] == [{"A": "b"}] * 3
    assert settings["engines"][0].env_of(0) == {}


def test_an_empty_file_changes_nothing(file: Path) -> None:
    file.write_text("")
    assert read_config(file) == {"engines": ()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sockets = 1", "the top level has 'sockets'; known are socket, max_decode_sequences"),
        ("socket = 1", "the top level: socket is 1; it must be a text"),
        ("max_decode_sequences = 1.5", r"max_decode_sequences is 1\.5; it must be a whole number"),
        ("max_decode_sequences = true", "max_decode_sequences is True; it must be a whole number"),
        ('drain_timeout = "5"', "drain_timeout is '5'; it must be a number from 0 to"),
        ("engine = 1", r"engine is 1; it must be a list of tables; engines are written \[\[engine\]\]"),
        ('[engine]\nspec = "echo"', r"engine is .*; engines are written \[\[engine\]\]"),
        ("engine = [1]", r"\[\[engine\]\] number 1 must be a table with at least spec"),
        ("[[engine]]\ncopies = 1", r"\[\[engine\]\] number 1 must be a table with at least spec"),
        (
            '[[engine]]\nspec = "a"\n[[engine]]\nspec = "b"\ncopy = 2',
            r"\[\[engine\]\] number 2 has 'copy'; known are spec, copies, env, python",
        ),
        ("[[engine]]\nspec = 5", r"\[\[engine\]\] number 1: spec is 5; it must be a text"),
        ('[[engine]]\nspec = "a"\ncopies = "2"', r"number 1: copies is '2'; it must be a whole number"),
        ('[[engine]]\nspec = "a"\nenv = "A=1"', "number 1: env is 'A=1'; it must be a table or a list of tables"),
        ('[[engine]]\nspec = "a"\nenv = {A = 1}', "number 1: env holds {'A': 1}; it must be a table of strings"),
        ('[[engine]]\nspec = "a"\nenv = ["A"]', "number 1: env holds 'A'; it must be a table of strings"),
        ("socket = ", "is not TOML: Invalid value"),
        ("a = 1\nb = = 2", "is not TOML: .*line 2"),
        ("\x00", "is not TOML"),
    ],
)
def test_every_mistake_names_the_file_and_the_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=message) as e:
        read_config(file)
    assert str(file) in str(e.value)


def test_files_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*daemon\.toml: No such file"):
        read_config(file)
    file.write_bytes(b"socket = '\xff'")
    with pytest.raises(InvalidRequest, match=r"daemon\.toml is not TOML"):
        read_config(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[engine]]\nspec = "a"\ncopies = 0', "engine 'a': copies is 0; it must be 1 or more"),
        (
            '[[engine]]\nspec = "a"\ncopies = 3\nenv = [{}, {}]',
            "engine 'a': env lists 2 tables for 3 copies; give none, one for all, or one each",
        ),
    ],
)
def test_contradictions_are_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=message) as e:
        read_config(file)
    assert str(file) in str(e.value)


def test_the_default_socket_is_found_when_the_daemon_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSCHED_SOCKET", str(tmp_path / "s"))
    assert DaemonConfig().socket == tmp_path / "s"

"""``shmsched generate``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import daemon, running, shmsched
from tiny import write_model

from shmsched import Client

from processes.ways import ENGINES

ENDLESS = """
import dataclasses, time
from shmsched.workers.gemma import Gemma


class Endless(Gemma):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.info = dataclasses.replace(self.info, stop_tokens=())

    def forward(self, batch):
        time.sleep(0.05)
        super().forward(batch)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "tiny.gguf")


def test_text_is_what_the_model_says_after_the_prompt(home: Path, model: Path) -> None:
    with daemon(home, "--engine", f"gemma:{model}", XDG_CACHE_HOME=str(home)):
        options = ("--temperature", "0", "--max-new-tokens", "24")
        done = shmsched(home, "generate", "Hello world", *options)
        raw = shmsched(home, "generate", "Hello world", "--raw-prompt", *options)
        seeded = [shmsched(home, "generate", "Hello", "--temperature", "2", "--seed", s).stdout for s in "112"]
        with Client(socket=home / "shmsched" / "default.sock") as client, client.open_session() as session:
            tokenizer = session.model.tokenizer
            tokens = tokenizer.encode("Hello world", bos=True)
            n_prompt = len(tokens)
            for _ in range(24):
                tokens.append(int(session.submit(tokens[session.position :]).result(30).tokens[0]))
                if tokens[-1] in session.model.info.stop_tokens:
                    break
            expected = tokenizer.decode(tokens)[len(tokenizer.decode(tokens[:n_prompt])) :]
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    assert raw.returncode == 0
    assert raw.stdout != done.stdout
    assert seeded[0] == seeded[1] != seeded[2]


def test_a_full_session_ends_the_text_and_says_so(home: Path, model: Path) -> None:
    with daemon(home, "--engine", f"gemma:{model}?max_session_tokens=16", XDG_CACHE_HOME=str(home)):
        for seed in range(20):
            done = shmsched(home, "generate", "Hello", "--temperature", "3", "--top-k", "0", "--seed", str(seed))
            assert done.returncode == 0, done.stderr
            if "the session is full (16 tokens)" in done.stderr:
                break
        else:
            raise AssertionError("every text of 20 ended at a stop token")
        done = shmsched(home, "generate", "Hello world " * 20)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "16" in done.stderr


def test_ctrl_c_ends_it_cleanly(home: Path, model: Path) -> None:
    (home / "endless.py").write_text(ENDLESS)
    with (
        daemon(home, "--engine", f"endless.py:Endless:{model}", XDG_CACHE_HOME=str(home)),
        running(home, "generate", "Hello", "--max-new-tokens", "900") as generating,
    ):
        generating.read_something()
        generating.process.send_signal(signal.SIGINT)
        assert generating.wait() == 130, generating.err
        assert generating.err.strip() == ""
        assert generating.out.endswith(b"\n")


def test_a_model_without_a_tokenizer_is_named(home: Path) -> None:
    with daemon(home, "--engine", "echo"):
        done = shmsched(home, "generate", "Hello")
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "'echo' has no tokenizer, since its engine names none" in done.stderr
        assert "Give it tokens: session.generate" in done.stderr


def test_an_empty_prompt_is_said_to_be_one(home: Path) -> None:
    with daemon(home, "--engine", f"{ENGINES}:Reciter"):
        done = shmsched(home, "generate", "")
        assert done.returncode == 1
        assert (
            done.stderr
            == "shmsched: the prompt '' has no tokens for model 'reciter' to go on from; give it some text\n"
        )


def test_a_model_that_is_not_served_is_named(home: Path) -> None:
    with daemon(home, "--engine", "echo"):
        done = shmsched(home, "generate", "Hello", "--model", "other")
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "other" in done.stderr


def test_without_a_daemon_it_says_how_to_start_one(home: Path) -> None:
    done = shmsched(home, "generate", "Hello")
    assert done.returncode == 3
    assert "shmsched up" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--top-k", "-1"),
        ("--seed", "-1"),
        ("--max-new-tokens", "0"),
    ],
)
def test_wrong_options_are_usage_errors(home: Path, option: tuple[str, str]) -> None:
    done = shmsched(home, "generate", "Hello", *option)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: shmsched generate")

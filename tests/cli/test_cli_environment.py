"""What variables, the user database and the file system say, or do not say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import DEADLINE_S, SCRIPT, daemon, no_traceback, shmsched
from tiny import write_model

LAUNCH = """
import sys, shmsched
with shmsched.launch(*sys.argv[1:]) as cluster, cluster.client() as client, client.open_session() as session:
    assert session.submit([1]).result(30).tokens.size == 1
    print(cluster.socket)
"""
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Without what Python does by itself to make it UTF-8."""


def bare(home: Path, *command: str | bytes, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run it with these variables and no others."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "SHMSCHED_TEST_RUN")}
    return subprocess.run(
        command, env={**kept, **env}, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S
    )


def long(home: Path) -> str:
    directory = home / ("x" * 100)
    directory.mkdir(exist_ok=True)
    return str(directory)


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR", "SHMSCHED_SOCKET"])
def test_a_path_too_long_names_its_variable_and_launch_finds_another(home: Path, variable: str) -> None:
    value = long(home) + ("/s" if variable == "SHMSCHED_SOCKET" else "")
    for command in ("up", "status"):
        done = bare(home, SCRIPT, command, **{variable: value})
        assert done.returncode in (1, 3)
        assert done.stderr.count(b"\n") == 1
        assert b"at most 107" in done.stderr
        assert variable.encode() in done.stderr
        assert b"SHMSCHED_SOCKET" in done.stderr, "what to set"
    done = bare(home, sys.executable, "-c", LAUNCH, "echo", **{variable: value})
    assert done.stdout.startswith(f"/tmp/shmsched-{os.geteuid()}/launch-".encode()), done.stderr


def test_variables_that_name_nothing_are_passed_over(home: Path) -> None:
    done = bare(
        home, sys.executable, "-c", LAUNCH, "echo", TMPDIR="/no/such", XDG_RUNTIME_DIR="/nor/this", HOME="/nope"
    )
    assert done.stdout.startswith(f"/tmp/shmsched-{os.geteuid()}/launch-".encode()), done.stderr


def test_a_mistyped_path_makes_nothing_and_names_who_said_it(home: Path) -> None:
    done = bare(home, SCRIPT, "up", SHMSCHED_SOCKET=str(home / "mistyped" / "s"))
    assert done.returncode == 1
    assert b"No such file or directory. Make it, with mode 700" in done.stderr
    assert b"SHMSCHED_SOCKET" in done.stderr
    assert not (home / "mistyped").exists()


@pytest.mark.parametrize("command", ["up", "status", "stop"])
@pytest.mark.parametrize("path", ["", ".", "..", "/", "/tmp/"])
def test_a_path_that_names_a_directory_is_refused_in_words(home: Path, command: str, path: str) -> None:
    done = bare(home, SCRIPT, command, "--socket", path)
    assert done.returncode in (1, 3)
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert b"names a directory; give it the name of a file in there, as in" in done.stderr
    if path:
        done = bare(home, SCRIPT, command, SHMSCHED_SOCKET=path)
        assert b"names a directory" in done.stderr
        assert b"SHMSCHED_SOCKET" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc belongs to root, and nobody makes a file there")
def test_a_directory_that_takes_no_file_names_who_said_it(home: Path) -> None:
    done = bare(home, SCRIPT, "up", SHMSCHED_SOCKET="/proc/shmsched.sock")
    assert done.returncode == 1
    assert b"cannot open /proc/shmsched.sock.lock: " in done.stderr
    assert b"Choose a path elsewhere with SHMSCHED_SOCKET" in done.stderr


def test_files_of_no_size_at_all_are_a_limit_that_is_named(home: Path) -> None:
    done = bare(home, "bash", "-c", f"ulimit -f 0; exec {SCRIPT} up --socket {home}/s")
    assert done.returncode == 1
    assert b"may have at most 0 bytes" in done.stderr, done.stderr
    assert b"`ulimit -f`" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="to be a user without an entry takes root")
def test_a_user_without_an_entry_and_without_a_home(home: Path) -> None:
    home.chmod(0o1777)
    code = (
        "import os; from shmsched.wire.listener import Listener; from shmsched.wire.socket_path import default_socket\n"
        "from shmsched.workers.gemma.files import cache_directory\n"
        "os.setuid(54321); Listener(default_socket()).close(); print(default_socket(), flush=True); cache_directory()"
    )
    done = bare(home, sys.executable, "-c", code, TMPDIR=str(home))
    assert done.stdout == f"{home}/shmsched-54321/default.sock\n".encode()
    assert b"user 54321 has no home directory" in done.stderr
    assert b"Set XDG_CACHE_HOME or HOME" in done.stderr


def test_the_weights_cache_says_what_to_set(home: Path) -> None:
    write_model(home / "tiny.gguf")
    (home / "file").touch()
    cache = str(home / "file")
    done = shmsched(home, "up", "--engine", f"gemma:{home}/tiny.gguf", traces=True, XDG_CACHE_HOME=cache)
    assert done.returncode == 1
    assert "set XDG_CACHE_HOME to a directory that can be written" in done.stderr


def test_why_no_engine_came_up_is_in_the_exception_and_nowhere_else(home: Path) -> None:
    (home / "bad.py").write_text(
        "import sys\nfrom shmsched.workers.echo import Echo\n\n\nclass Bad(Echo):\n    def start(self, limits):\n"
        "        print('loading shard 7')\n        raise ValueError('shard 7 is torn')\n"
        "\n\nclass Dies(Echo):\n    def start(self, limits):\n        print('the last words')\n        sys.stdout.flush()\n"
        "        import os, signal\n        os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    code = "import sys, shmsched\ntry:\n    shmsched.launch(sys.argv[1])\nexcept shmsched.EngineStartError as e:\n    print(e)"
    for name, words in (("Bad", ["ValueError: shard 7 is torn", "loading shard 7"]), ("Dies", ["the last words"])):
        done = bare(home, sys.executable, "-c", code, f"bad.py:{name}")
        assert done.stderr == b""
        assert done.returncode == 0
        assert [word for word in words if word.encode() not in done.stdout] == [], done.stdout


def test_what_engines_print_is_handed_on_once_they_are_up(home: Path) -> None:
    (home / "loud.py").write_text(
        "from shmsched.workers.echo import Echo\n\n\nclass Loud(Echo):\n    def start(self, limits):\n        print('starting')\n"
        "\n    def forward(self, batch):\n        print('running')\n        super().forward(batch)\n"
    )
    done = bare(home, sys.executable, "-c", LAUNCH, "loud.py:Loud")
    assert done.returncode == 0
    assert done.stderr == b"starting\nrunning\n"


def test_two_containers_that_share_a_temporary_directory_do_not_see_each_other(home: Path) -> None:
    """All pids in them are the same."""
    inside = ["unshare", "-pf", "--mount-proc", "--kill-child"]
    if bare(home, *inside, "true").returncode:
        pytest.skip("no PID namespace may be made here")
    hold = LAUNCH + "    print('ready', flush=True); sys.stdin.readline()\n    assert session.submit([2]).result(30)\n"
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "SHMSCHED_TEST_RUN")}
    programs = []
    try:
        for _ in range(2):
            program = subprocess.Popen(
                [*inside, sys.executable, "-c", hold, "echo"],
                env={**kept, "TMPDIR": str(home)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            programs.append(program)
            assert program.stdout is not None
            assert str(home).encode() in program.stdout.readline()
        assert len(list(home.glob("*/launch-*.sock"))) == 2
        assert all(program.communicate(b"\n", DEADLINE_S) and program.returncode == 0 for program in programs)
        programs[0] = subprocess.Popen(
            [*inside, sys.executable, "-c", hold, "echo"],
            env={**kept, "TMPDIR": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert programs[0].stdout is not None
        programs[0].stdout.readline()
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    left = list(home.glob("*/launch-*.sock"))
    done = bare(home, sys.executable, "-c", LAUNCH, "echo", TMPDIR=str(home))
    assert done.returncode == 0, done.stderr
    assert len(left) == 1
    assert list(home.glob("*/launch-*")) == [], "what a kill left is swept by the next"


def test_a_file_of_settings_is_utf_8_and_may_have_a_mark(home: Path) -> None:
    (home / "é.py").write_text("from shmsched.workers.echo import Echo as É\n", encoding="utf-8-sig")
    (home / "up.toml").write_text('[[engine]]\nspec = "é.py:É?model=modèle"\n', encoding="utf-8-sig")
    for env in (POSIX, {}):
        with daemon(home, "--config", "up.toml", **env):
            done = shmsched(home, "status", **env)
            assert done.returncode == 0, done.stderr
            assert "modèle" in done.stdout
            done = shmsched(home, "status", PYTHONIOENCODING="ascii")
            assert done.returncode == 0, done.stderr
            assert "mod?le" in done.stdout


@pytest.mark.parametrize("env", [POSIX, {}], ids=["POSIX", "UTF-8"])
@pytest.mark.parametrize(
    "command",
    [
        [b"up", b"--engine", b"/no/\xff.py:E"],
        [b"up", b"--engine", b"echo?model=\xff"],
        [b"up", b"--socket", b"/no/\xff/s"],
        [b"up", b"--config", b"/no/\xff"],
        [b"engine", b"/no/\xff.py:E"],
        [b"status", b"--socket", b"/no/\xff"],
    ],
)
def test_what_is_not_utf_8_is_an_error_in_words(home: Path, command: list[bytes], env: dict[str, str]) -> None:
    done = bare(home, SCRIPT, *command, XDG_RUNTIME_DIR=str(home), **env)
    assert done.returncode in (1, 3)
    assert no_traceback(done.stderr.decode())
    assert done.stderr.startswith(b"shmsched")

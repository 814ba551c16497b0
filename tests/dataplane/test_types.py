"""A ``.pxd`` and its ``.py`` say the same: the compiled build takes its types from one, and everything else from the other."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from shmsched import dataplane
from shmsched.dataplane import extensions, marks

ATTRIBUTE = re.compile(r"    cdef public (?:[a-z]+ )*(?P<type>\w+) (?P<name>\w+)$")
METHOD = re.compile(r"    c(?:p?)def (?:(?:\w+ )*)(?P<name>\w+)\((?P<arguments>.*)\)")
CLASS = re.compile(r"cdef class (?P<name>\w+)(?:\(\w+\))?:")
CONSTANT = re.compile(r"    (?P<name>[A-Z_]+) = (?P<value>-?\d+)$")


def types_of(module: str) -> list[str]:
    """The ``.pxd``, with what is in one pair of parentheses in one line."""
    return re.sub(r"(?<=[(,])\s*\n\s*", " ", (extensions.SOURCES / f"{module}.pxd").read_text()).splitlines()


def typed(module: str) -> dict[str, tuple[set[str], dict[str, list[str]]]]:
    """Of each class in the ``.pxd``: its attributes, and its methods with their arguments."""
    classes: dict[str, tuple[set[str], dict[str, list[str]]]] = {}
    for line in types_of(module):
        if match := CLASS.match(line):
            attributes, methods = classes[match["name"]] = (set(), {})
        elif match := METHOD.match(line):
            methods[match["name"]] = [argument.split()[-1] for argument in match["arguments"].split(", ")]
        elif match := ATTRIBUTE.match(line):
            attributes.add(match["name"])
        else:
            assert "def " not in line, f"{module}.pxd: what does {line!r} say?"
    return classes


def written(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((extensions.SOURCES / f"{module}.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def slots(node: ast.ClassDef) -> set[str]:
    for part in node.body:
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name) and part.targets[0].id == "__slots__":
            return set(ast.literal_eval(part.value))
    raise AssertionError(f"{node.name} has no __slots__")


@pytest.mark.parametrize("module", extensions.MODULES)
def test_classes_have_the_same_attributes_and_methods(module: str) -> None:
    classes = written(module)
    for name, (attributes, methods) in typed(module).items():
        node = classes[name]
        assert slots(node) == attributes, f"{module}.{name}"
        functions = {
            f.name: [argument.arg for argument in f.args.args] for f in node.body if isinstance(f, ast.FunctionDef)
        }
        for method, arguments in methods.items():
            assert functions.get(method) == arguments, f"{module}.{name}.{method}"
        assigned = {part.targets[0].id for part in node.body if isinstance(part, ast.Assign)}  # type: ignore[attr-defined]
        assert "__reduce__" in assigned, f"{module}.{name} would be copied without what is in it"


@pytest.mark.parametrize("module", extensions.MODULES)
def test_locals_with_a_type_exist(module: str) -> None:
    """A name that is typed and not used is a type that something else was meant to have."""
    functions = {
        (c.name, f.name): {n.id for n in ast.walk(f) if isinstance(n, ast.Name)}
        for c in written(module).values()
        for f in c.body
        if isinstance(f, ast.FunctionDef)
    }
    where = ""
    found: set[str] = set()
    for line in types_of(module):
        if match := CLASS.match(line):
            where = match["name"]
        elif line.startswith("    @cython.locals("):
            found = set(re.findall(r"(\w+)=", line))
        elif match := METHOD.match(line):
            assert found <= functions[where, match["name"]], f"{module}.{where}.{match['name']}"
            found = set()


def test_constants_have_the_same_values() -> None:
    lines = (extensions.SOURCES / "marks.pxd").read_text().splitlines()
    compiled = {match["name"]: int(match["value"]) for line in lines if (match := CONSTANT.match(line))}
    assert compiled == {name: value for name, value in vars(marks).items() if name.isupper()}
    assert all(-(2**31) <= value < 2**31 for value in compiled.values()), "a C enum is an int"


def test_every_file_is_compiled_or_is_known_not_to_be() -> None:
    sources = {path.stem for path in extensions.SOURCES.glob("*.py")} - {"__init__"}
    assert sources == {*extensions.MODULES, *extensions.NOT_COMPILED}
    assert {path.stem for path in extensions.SOURCES.glob("*.pxd")} == {*extensions.MODULES, "marks"}


def test_what_runs_is_what_the_build_says() -> None:
    """All modules of one kind: a compiled one does not know the classes of an interpreted one."""
    modules = [importlib.import_module(f"shmsched.dataplane.{name}") for name in extensions.MODULES]
    ends = extensions.SUFFIX if dataplane.BUILD == "compiled" else ".py"
    assert all(str(module.__file__).endswith(ends) for module in modules)

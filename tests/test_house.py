"""The house rules as tests: floors, sizes, names, docstrings. An untested rule is a wish."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "structgen"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = Path(__file__).parent
FOLDERS = sorted({path.parent for path in FILES})

# A room imports only rooms on lower floors, and itself. `""` is the package: what users import.
FLOORS = (
    {
        *("errors", "schemas", "terms", "sampling", "request", "options", "chat", "backend"),
        *("events", "waiting"),
    },
    {"transcript", "output", "trace", "kernels", "grammar"},
    {"program", "remote", "testing", "models", "core"},
    {"engine"},
    {"server"},
    {"cli", ""},
    {"examples", "__main__"},  # these use the package as its users do
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Some floor-0 files build on each other, in this order.
VOCABULARY = (
    *("errors", "schemas", "terms", "sampling", "request", "options", "chat", "backend", "events"),
)

# Rooms that must be usable without torch, and the room that must be usable with little else.
TORCH = {"torch", "transformers", "triton", "xgrammar", "safetensors", "gguf", "tokenizers"}
TORCH_FREE = {*VOCABULARY, "transcript", "output", "trace", "program", "remote", "testing"}
TORCH_FREE |= {"cli", ""}
KERNEL_IMPORTS = {"torch", "triton", "numpy"}
VOCABULARY_IMPORTS = {"msgspec"}

# Where an import may stand inside a function: `import structgen` and `--help` load no torch, and
# a heavy library is loaded only for those who use it.
DEFERRING = {"", "cli", "models", "grammar", "testing", "program", "kernels"}

FORBIDDEN_NAME = re.compile(r"util|helper|common|misc|manager|handler|processor", re.IGNORECASE)
CODES = r"(:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?"
SILENCED = re.compile(rf"#\s*(noqa{CODES}|(type|pyright):\s*ignore(\[[\w, -]+\])?)(?P<reason>.*)")
FORBIDDEN_PREFIX = re.compile(r"_?(get|do|my)_[a-z]")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter"}
MUTATING = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "update"}
MUTATING |= {"setdefault", "discard", "appendleft"}


def room(path: Path) -> str:
    """The room of a file; "" for the package's own `__init__`."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """Every module that is imported in `node`, at any depth: deferring does not undo a cycle."""
    for child in ast.walk(node):
        match child:
            case ast.Import():
                yield from (alias.name for alias in child.names)
            case ast.ImportFrom(module="structgen"):
                names = {alias.name for alias in child.names}
                yield from (f"structgen.{n}" if n in FLOOR_OF else "structgen" for n in names)
            case ast.ImportFrom():
                yield "." * child.level + (child.module or "")


def imported_rooms(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported(tree(path)) if name.split(".")[0] == "structgen"]
    return {name[1] if len(name) > 1 else "" for name in parts}


def third_parties(path: Path) -> set[str]:
    names = {name.split(".")[0] for name in imported(tree(path))}
    return names - set(sys.stdlib_module_names) - {"structgen"}


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring not counted."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def mutable_globals(module: ast.Module) -> set[str]:
    """Names bound to a list, dict or set when the module is imported."""
    found: set[str] = set()
    for statement in module.body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names = [name]
            case _:
                continue
        match value:
            case ast.Call(func=ast.Name(id=called)) if called in MUTABLE_CALLS:
                found.update(names)
            case _ if isinstance(value, MUTABLE):
                found.update(names)
    return found


def changed_in_functions(module: ast.Module) -> set[str]:
    """Names whose items are set, or whose mutating methods are called, inside functions."""
    found: set[str] = set()
    for function in functions(module):
        for node in ast.walk(function):
            match node:
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    found.add(name)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                    found |= {name} if method in MUTATING else set()
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=relative)
class TestEveryFile:
    def test_stands_on_a_floor(self, path: Path) -> None:
        assert room(path) in FLOOR_OF

    def test_imports_only_downwards(self, path: Path) -> None:
        here = room(path)
        allowed = {r for r in FLOOR_OF if FLOOR_OF[r] < FLOOR_OF[here]} | {here}
        if here in VOCABULARY:
            allowed |= set(VOCABULARY[: VOCABULARY.index(here)])

        assert imported_rooms(path) - allowed == set()

    def test_imports_by_full_name(self, path: Path) -> None:
        assert [name for name in imported(tree(path)) if name.startswith(".")] == []

    def test_defers_imports_only_where_that_saves_a_heavy_library(self, path: Path) -> None:
        deferred = {name for function in functions(tree(path)) for name in imported(function)}

        assert deferred == set() or room(path) in DEFERRING

    def test_needs_torch_only_on_the_engine_side(self, path: Path) -> None:
        if room(path) in TORCH_FREE:
            assert third_parties(path) & TORCH == set()

    def test_imports_little_in_the_rooms_that_others_copy(self, path: Path) -> None:
        if room(path) in VOCABULARY:
            assert third_parties(path) <= VOCABULARY_IMPORTS
        if room(path) == "kernels":
            assert third_parties(path) <= KERNEL_IMPORTS
            assert imported_rooms(path) <= {"kernels"}

    def test_fits_on_ten_screens(self, path: Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500

    def test_opens_with_a_docstring(self, path: Path) -> None:
        assert ast.get_docstring(tree(path))

    def test_is_named_after_what_is_in_it(self, path: Path) -> None:
        assert not FORBIDDEN_NAME.search(path.stem)

    def test_names_things_by_nouns_of_the_field(self, path: Path) -> None:
        definitions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)]
        bad = [n.name for n in definitions if FORBIDDEN_NAME.search(n.name)]
        bad += [f.name for f in functions(tree(path)) if FORBIDDEN_PREFIX.match(f.name)]

        assert bad == []

    def test_has_functions_that_fit_on_a_screen(self, path: Path) -> None:
        assert {f.name: code_lines(f) for f in functions(tree(path)) if code_lines(f) > 50} == {}

    def test_keeps_no_state_in_the_module(self, path: Path) -> None:
        module = tree(path)
        rebound = [n.names for n in ast.walk(module) if isinstance(n, ast.Global)]

        assert rebound == []
        assert mutable_globals(module) & changed_in_functions(module) == set()

    def test_leaves_nothing_for_later(self, path: Path) -> None:
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text(encoding="utf-8"))

    def test_gives_a_reason_for_each_silenced_check(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        reasons = [found["reason"].strip(" #:-") for found in SILENCED.finditer(text)]

        assert [reason for reason in reasons if len(reason) < 8] == []

    def test_knows_no_machine(self, path: Path) -> None:
        assert not re.search(r"[\"' ]/(work|home|Users|root)/", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
class TestEveryFolder:
    def test_has_at_most_sixteen_files(self, folder: Path) -> None:
        assert len([p for p in folder.glob("*.py") if p.name != "__init__.py"]) <= 16

    def test_is_at_most_two_deep(self, folder: Path) -> None:
        assert len(folder.relative_to(SOURCE).parts) <= 2


class TestTheTests:
    @staticmethod
    def spelled(path: Path) -> Iterator[ast.Call]:
        """The parametrizations whose values give the tests their names."""
        calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        for call in calls:
            named = any(keyword.arg == "ids" for keyword in call.keywords)
            if named and getattr(call.func, "attr", "") == "parametrize":
                yield call

    def test_have_the_same_names_in_every_process(self) -> None:
        """A set of strings has another order in each; workers then disagree on what there is."""
        found = [
            f"{path.name}:{node.lineno}"
            for path in sorted(TESTS.rglob("*.py"))
            for call in self.spelled(path)
            for node in ast.walk(call.args[1])
            if isinstance(node, ast.SetComp) or (isinstance(node, ast.Set) and len(node.elts) > 1)
        ]
        assert found == []


class TestTheErrors:
    def test_are_all_drawn_in_the_tree(self) -> None:
        module = tree(SOURCE / "errors.py")
        classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
        drawing = re.findall(r"\w+Error\b", ast.get_docstring(module) or "")

        assert [name for name in classes if name not in drawing] == []


class TestImportingThePackage:
    SCRIPT = (
        "import sys, time\n"
        "before = time.process_time()\n"
        "import structgen\n"
        "print(time.process_time() - before, *sorted(m.split('.')[0] for m in sys.modules))\n"
    )

    def seconds_and_modules(self, installed: Path) -> tuple[float, set[str]]:
        command = [sys.executable, "-c", self.SCRIPT]
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        seconds, *modules = done.stdout.split()
        return float(seconds), set(modules)

    def test_loads_no_torch(self, installed: Path) -> None:
        assert self.seconds_and_modules(installed)[1] & TORCH == set()

    def test_takes_less_than_a_third_of_a_second(self, installed: Path) -> None:
        # The least of four: the machine may be busy.
        assert min(self.seconds_and_modules(installed)[0] for _ in range(4)) < 0.3

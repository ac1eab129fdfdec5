"""The floors of the house: imports point down only, and light commands stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "llminfer"

# what each place may import; its own folder is always allowed
FLOORS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "atomic": (),
    "foreign": ("errors",),
    "text": ("errors",),
    "units": ("errors",),
    "exclusions": ("errors",),
    "params": ("errors", "units", "exclusions"),
    "request": ("errors", "exclusions", "params"),
    "jobs": ("errors", "foreign", "text", "units", "params", "request"),
    "hub": ("errors",),
    "transcript": ("atomic", "errors", "foreign"),
    "kv": ("errors", "units", "foreign"),
    "sources": ("errors", "foreign", "hub", "kv"),
    "events": ("errors", "units", "params", "kv"),
    "engine": (
        *("atomic", "errors", "foreign", "text", "units", "hub", "transcript", "exclusions", "params", "request"),
        *("kv", "events"),
    ),
    "loader": ("errors", "hub", "params", "request", "kv", "engine"),
    "render": ("errors", "units", "params", "jobs", "kv", "events"),
    "api": ("errors", "units", "params", "request", "kv", "sources", "events", "engine", "loader"),
    "cli": (
        *("api", "atomic", "errors", "text", "units", "hub", "transcript", "exclusions", "params", "request"),
        *("jobs", "kv", "sources", "events", "engine", "loader", "render"),
        "__init__",
    ),
    "__init__": ("api", "errors", "params", "request", "events", "engine"),
    "__main__": ("cli",),
}
# the rooms of engine/ from the ground up; the files at its root come last
ROOMS = (
    "machine",
    "text",
    "sampling",
    "models",
    "checkpoints",
    "kv_cache",
    "forward",
    "weights",
    "speculation",
    "native",
)
HEAVY = {"torch", "transformers", "numpy"}
# only a chat on a terminal needs it
TERMINAL = {"prompt_toolkit"}


def place_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
            if node.module == "llminfer":
                found |= {f"llminfer.{alias.name}" for alias in node.names if alias.name != "__version__"}
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    place = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = {*FLOORS[place], place}
    ours = {place_of(name) for name in imports_of(file) if name.split(".")[0] == "llminfer" and name != "llminfer"}
    assert ours <= allowed, f"{place} may import {sorted(allowed)}, not {sorted(ours - allowed)}"
    if place not in {"engine"}:
        assert not {name.split(".")[0] for name in imports_of(file)} & HEAVY


def room_of(module: str) -> int:
    """The height of a module of the engine: its room's place, or above all rooms at the root."""
    name = module.removeprefix("llminfer.engine.").split(".")[0]
    return ROOMS.index(name) if name in ROOMS else len(ROOMS)


@pytest.mark.parametrize(
    "file", sorted((PACKAGE / "engine").rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE / "engine"))
)
def test_the_rooms_of_the_engine_import_downwards(file: Path) -> None:
    here = room_of(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
    climbing = {name for name in imports_of(file) if name.startswith("llminfer.engine.") and room_of(name) > here}
    assert not climbing


def test_every_room_is_on_the_list_and_says_what_it_holds() -> None:
    folders = sorted(folder.name for folder in (PACKAGE / "engine").iterdir() if (folder / "__init__.py").exists())
    assert folders == sorted(ROOMS)
    for room in ROOMS:
        assert ast.get_docstring(ast.parse((PACKAGE / "engine" / room / "__init__.py").read_text(encoding="utf-8")))


def modules_after(arguments: list[str], stdin: str = "") -> tuple[int, set[str], str, str]:
    """Exit code, what was imported, and both outputs of the command line in a process of its own."""
    code = (
        "import sys, json\n"
        "from llminfer.cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "sys.stdout.flush()\n"
        "print('\\n' + json.dumps([code, sorted(sys.modules)]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=True
    )
    output, _, last = result.stdout.rstrip("\n").rpartition("\n")
    exit_code, modules = json.loads(last)
    return exit_code, set(modules), output, result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["generate", "--help"], 0),
        (["generate", "hi", "--temperature", "nan"], 2),
        (["generate", "hi", "--no-such-option"], 2),
        (["generate", "hi", "--dtype", "banana"], 2),
        (["generate", "hi", "-m", "/no/such/model"], 3),
        (["generate"], 2),
        (["generate", "hi", "--draft-tokens", "3"], 2),
        (["generate", "hi", "--speculate", "banana"], 2),
        (["chat", "--help"], 0),
        (["chat", "--temperature", "nan"], 2),
        (["chat", "--device", "banana"], 2),
        (["chat", "--load", "/no/such/file"], 2),
        (["chat", "--load", "x", "--system", "y"], 2),
        (["chat", "-m", "/no/such/model"], 3),
    ],
)
def test_help_and_refusals_import_nothing_heavy(arguments: list[str], expected: int) -> None:
    exit_code, modules, _, err = modules_after(arguments)
    assert exit_code == expected
    assert not modules & (HEAVY | TERMINAL)
    assert "Traceback" not in err
    if expected:
        assert err.startswith("error: ")


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, llminfer; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in loaded for name in (*HEAVY, "rich", "typer"))

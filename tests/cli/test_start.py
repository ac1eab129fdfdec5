"""What makes a start short: no garbage collection while importing, no taking apart of the interpreter at the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

# a process that has torch, or so it seems, and an object that would hear of the interpreter's end
_SETTING = """
import atexit, sys, threading, time, types
from llminfer.cli.app import main
class Loud:
    def __del__(self, write=sys.stdout.write, flush=sys.stdout.flush):
        write("taken apart\\n"); flush()
loud = Loud()
atexit.register(print, "at exit")
"""
_TORCH = "sys.modules['torch'] = types.ModuleType('torch')\n"
_NO_MODEL = "main(['kv-size', 'no-such-model'])"


def run(code: str) -> tuple[int, list[str], str]:
    """Exit code, lines of standard output, standard error."""
    done = subprocess.run([sys.executable, "-c", _SETTING + code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_process_with_torch_ends_at_once_and_says_all_it_had_to_say() -> None:
    code, lines, _ = run(_TORCH + "print('written', end='\\n'); main(['--version'])")
    assert code == 0
    assert lines[0] == "written"
    assert lines[1].startswith("llminfer ")
    assert lines[2:] == ["at exit"]


def test_errors_keep_their_exit_code_and_lines() -> None:
    usual, at_once = run(_NO_MODEL), run(_TORCH + _NO_MODEL)
    assert usual[0] == at_once[0] != 0
    assert usual[2] == at_once[2]
    assert usual[2].startswith("error: ")
    assert (usual[1], at_once[1]) == (["at exit", "taken apart"], ["at exit"])


@pytest.mark.parametrize(
    "watcher",
    [
        "sys.settrace(lambda *event: None)\n",
        "sys.setprofile(lambda *event: None)\n",
        "threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n",
    ],
)
def test_who_still_needs_the_interpreter_has_it_to_the_end(watcher: str) -> None:
    code, lines, _ = run(_TORCH + watcher + "main(['--version'])")
    assert code == 0
    assert lines[-2:] == ["at exit", "taken apart"]
    assert ("thread" in lines) is ("Thread" in watcher)


@pytest.mark.parametrize("broken", ["", "raise ValueError"])
def test_garbage_is_collected_again_after_the_first_import(broken: str) -> None:
    program = f"""
import gc
from llminfer.cli.loading import quick_start
try:
    with quick_start():
        print(gc.isenabled())
        {broken}
except ValueError:
    pass
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""
    assert run(program)[1][:2] == ["False", "True True"]


def test_a_process_that_had_torch_before_keeps_its_garbage_collection() -> None:
    program = """
import gc
from llminfer.cli.loading import quick_start
with quick_start():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count())
"""
    assert run(_TORCH + program)[1][:2] == ["True", "True 0"]

"""Files that are there whole or as they were, whenever the writer stops, and nothing beside them for good."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llminfer.atomic import replacing

# writes half a file through safetensors, which has a temporary file of its own, and waits to be killed
HALF_WRITTEN = """
import os, sys, time
from pathlib import Path
from llminfer.atomic import replacing
with replacing(Path(sys.argv[1])) as beside:
    beside.with_name(".tmpAbCdEf").write_bytes(b"half")
    beside.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)
"""


def write(target: Path, text: str) -> None:
    with replacing(target) as beside:
        beside.write_text(text)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write(target, "first")
    assert target.stat().st_mode & 0o777 == 0o600
    target.chmod(0o644)
    write(target, "second")
    assert target.read_text() == "second"
    assert target.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write(target, "first")

    def fail() -> None:
        with replacing(target) as beside:
            beside.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_text() == "first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(target)
    write(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


@pytest.mark.skipif(sys.platform == "win32", reason="without flock leftovers stay")
def test_what_a_killed_writer_leaves_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "file.safetensors"
    write(target, "whole")
    with subprocess.Popen([sys.executable, "-c", HALF_WRITTEN, str(target)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        write(tmp_path / "another", "text")
        write(target, "by another writer")
        assert len(os.listdir(tmp_path)) == 3, "what is being written is no leftover"
        process.send_signal(signal.SIGKILL)
    assert target.read_text() == "by another writer"
    with replacing(target) as beside:
        save_file({"x": torch.ones(3)}, beside)
    assert sorted(os.listdir(tmp_path)) == ["another", "file.safetensors"]
    assert load_file(target)["x"].sum() == 3


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    target, texts = tmp_path / "file", [str(number) * 10_000 for number in range(8)]

    def many(text: str) -> None:
        for _ in range(20):
            write(target, text)

    threads = [threading.Thread(target=many, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() in texts
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for target in (pipe, tmp_path / "link", tmp_path):
        with pytest.raises(OSError, match="it is not a file"), replacing(target):
            pytest.fail("there is nothing to write to")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]

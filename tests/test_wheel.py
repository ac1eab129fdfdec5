"""What users install: the wheel carries the code, the C++ of the native engine, the type marker and the configs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"llminfer/py.typed", "llminfer/cli/app.py", "llminfer/engine/loop.py"} <= names
    native = ROOT / "llminfer" / "engine" / "native"
    for source in (*native.glob("*.h"), *native.glob("*.cpp")):
        assert f"llminfer/engine/native/{source.name}" in names
    for config in (ROOT / "configs").iterdir():
        assert f"llminfer/configs/{config.name}" in names
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "llminfer = llminfer.cli.app:main" in zipfile.ZipFile(wheel).read(entry_points).decode()
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)

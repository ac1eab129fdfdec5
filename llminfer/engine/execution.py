"""What carries out a loaded model's arithmetic: other weight formats, the compiler, our own step."""

from __future__ import annotations

from typing import Any

from llminfer.engine.compiled import check_compiled
from llminfer.errors import UnsupportedArchitecture
from llminfer.params import Execution


def prepare_execution(model: Any, execution: Execution, source: str) -> tuple[str, ...]:
    """Change a loaded model to what `execution` asks for; return notes for the user.

    Args:
        source: names the model in errors.

    Raises:
        UnsupportedArchitecture: when the model cannot be run so.
    """
    if execution.compiled:
        check_compiled(model.config, source, known=type(model))
    if execution != Execution(compiled=execution.compiled):
        raise UnsupportedArchitecture(f"{source} cannot be run so yet")
    return ()

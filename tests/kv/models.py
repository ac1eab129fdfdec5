"""Small hand-made models, a strategy for arbitrary ones, and nothing read from a config."""

from __future__ import annotations

from hypothesis import strategies as st

from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State


def attention(heads: int, dim: int, *, window: int | None = None, kind: str | None = None) -> LayerKV:
    """K and V of equal size, in a window or not."""
    tensors = (PerToken(name="k", heads=heads, dim=dim), PerToken(name="v", heads=heads, dim=dim))
    return LayerKV(kind=kind or ("full" if window is None else "sliding"), tensors=tensors, window=window)


def recurrent(channels: int, columns: int, state: int) -> LayerKV:
    """A convolution and a float32 state."""
    return LayerKV(
        kind="linear",
        states=(
            State(name="conv", shape=(channels, columns), role="conv", needed_columns=columns - 1),
            State(name="ssm", shape=(channels, state), dtype="float32"),
        ),
    )


def model(*layers: LayerKV, model_type: str = "gemma2", name: str = "tiny", limit: int | None = None) -> ModelKV:
    """A bfloat16 model of these layers."""
    return ModelKV(name=name, model_type=model_type, layers=layers, dtype="bfloat16", context_limit=limit)


def any_model() -> st.SearchStrategy[ModelKV]:
    """Full, windowed and recurrent layers in any mixture whose pages vLLM can make equal."""
    heads, dim = st.sampled_from((1, 2, 8)), st.sampled_from((32, 64))

    def of(sizes: tuple[int, int]) -> st.SearchStrategy[ModelKV]:
        layer = st.one_of(
            st.just(attention(*sizes)),
            st.builds(lambda window: attention(*sizes, window=window), st.sampled_from((2, 16, 100))),
            st.just(recurrent(64, 4, 16)),
        )
        return st.lists(layer, min_size=1, max_size=6).map(lambda layers: model(*layers))

    return st.tuples(heads, dim).flatmap(of)

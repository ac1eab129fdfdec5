"""From a GGUF header to the layers that cache, by llama.cpp's own reading of its metadata.

Sources, llama.cpp 0c1e57098: `llama-model.cpp` (`load_hparams`: heads, key and value lengths),
`models/*.cpp` (window patterns, which layers are recurrent), `llama-hparams.cpp` (state sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable, UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.config import MOST, MOST_LAYERS
from llminfer.kv.gguf import GgufHeader, read_gguf_header
from llminfer.kv.layer import Field, LayerKV, ModelKV, PerToken, State

# what llama.cpp keeps K and V in when it is not told otherwise; the type of the weights has no say
CACHE_DTYPE = "float16"


def read_gguf_model(path: Path) -> ModelKV:
    """What the model in this GGUF file caches; only the header is read.

    Raises:
        ModelNotAvailable: when the file is missing, cut, or no GGUF.
        UnsupportedArchitecture: when the architecture is not in the table.
        UnknownConfigField: when the metadata lack a number that the sizes need, or it is unusable.
    """
    return model_from_header(read_gguf_header(path))


def model_from_header(header: GgufHeader) -> ModelKV:
    """The layers of a header that was read already; errors as in `read_gguf_model`."""
    if not header.architecture:
        what = f"{header.path} is a later part of a model (split.no {header.metadata['split.no']})"
        raise ModelNotAvailable(what, hint="give its first part, whose name ends in -00001-of-...")
    if header.architecture not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{header.path}: cannot predict the cache of the GGUF architecture {header.architecture!r}",
            hint=f"known: {', '.join(sorted(ARCHITECTURES))}",
        )
    view = Metadata(architecture=header.architecture, values=header.metadata, source=str(header.path))
    read, model_type = ARCHITECTURES[header.architecture]
    layers = read(view)
    dtype = Field(name="dtype", value=CACHE_DTYPE, origin="llama.cpp's default cache type")
    return ModelKV(
        name=str(header.path),
        model_type=model_type or header.architecture,
        layers=layers,
        dtype=CACHE_DTYPE,
        context_limit=view.integer("context_length") if view.get("context_length") else None,
        fields=(*view.used.values(), dtype),
    )


@dataclass(slots=True, kw_only=True)
class Metadata:
    """The metadata of one architecture, read key by key; what was read is kept."""

    architecture: str
    values: Mapping[str, Any]
    source: str
    used: dict[str, Field] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value of `<architecture>.<key>`, None when the file has none."""
        name = f"{self.architecture}.{key}"
        value = self.values.get(name)
        if value is not None:
            self.used[name] = Field(name=name, value=value, origin="file")
        return value

    def integer(self, key: str, *, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`.

        Raises:
            UnknownConfigField: when it is missing without a default, or is no such number.
        """
        found = self.get(key)
        value = default if found is None else found
        if value is None:
            raise UnknownConfigField(f"{self.source}: the metadata have no {self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            what = f"not a whole number from {least}{f' to {most}' if most < MOST else ' on'}"
            raise UnknownConfigField(f"{self.source}: {self.architecture}.{key} is {value!r}, {what}")
        return value

    def per_layer(self, key: str, layers: int, *, default: int | None = None) -> list[int]:
        """A number per layer of the trunk, from one number for all or an array, in which some may be 0.

        Raises:
            UnknownConfigField: when it is missing without a default, of another length than the file has
                blocks, or holds no such numbers.
        """
        value = self.get(key)
        if not isinstance(value, tuple):
            return [self.integer(key, default=default)] * layers
        numbers = [int(item) if isinstance(item, (bool, int)) else -1 for item in value]
        if len(numbers) != self.integer("block_count") or any(number < 0 for number in numbers):
            raise UnknownConfigField(f"{self.source}: {self.architecture}.{key} does not give {layers} layers a number")
        return numbers[:layers]


def plain_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """K of `h_kv · key_length` and V of `h_kv · value_length` per token and layer, no window."""
    return _attention(view, _layer_count(view), sliding=None)


def pattern_layers(pattern: int, *, window: int | None = None, kind: str = "sliding") -> Callable[..., Any]:
    """Windowed layers, but for every `pattern`-th; a file with its own pattern or window overrides both.

    Source: `llama_hparams::set_swa_pattern`: layer i is windowed when i mod p < p − 1.
    """

    def layers(view: Metadata) -> tuple[LayerKV, ...]:
        count = _layer_count(view)
        stated = view.get("attention.sliding_window")
        if stated == 0 or (stated is None and window is None):
            return _attention(view, count, sliding=None)
        own = "attention.sliding_window_pattern"
        if isinstance(view.get(own), tuple):
            windowed = [bool(item) for item in view.per_layer(own, count)]
        else:
            period = view.integer(own, default=pattern, least=0)
            windowed = [period == 0 or index % period < period - 1 for index in range(count)]
        size = window if window is not None else view.integer("attention.sliding_window")
        return _attention(view, count, sliding=windowed, window=size, kind=kind)

    return layers


def latent_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """Multi-head latent attention: the compressed latent and the rotary part, once.

    Files converted before llama.cpp kept the latent have no `key_length_mla`: they cache expanded heads.
    """
    count = _layer_count(view)
    if view.get("attention.key_length_mla") is None:
        return _attention(view, count, sliding=None)
    latent = PerToken(name="k", heads=1, dim=view.integer("attention.key_length"))
    return (LayerKV(kind="latent", latent=True, tensors=(latent,)),) * count


def mamba_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """Nothing but recurrent layers."""
    return (LayerKV(kind="mamba", states=_ssm_states(view)),) * _layer_count(view)


def hybrid_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """Recurrent where a layer has no key-value heads, attention elsewhere; a Nemotron MLP holds nothing."""
    count = _layer_count(view)
    heads = view.per_layer("attention.head_count_kv", count)
    feed_forward = view.per_layer("feed_forward_length", count) if view.architecture == "nemotron_h" else [0] * count
    attention = _attention(view, count, sliding=None)
    recurrent = LayerKV(kind="mamba", states=_ssm_states(view))
    others = [LayerKV(kind="none") if width else recurrent for width in feed_forward]
    return tuple(attention[index] if heads[index] else others[index] for index in range(count))


def interval_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """Gated DeltaNet, but for every `full_attention_interval`-th layer."""
    count = _layer_count(view)
    interval = view.integer("full_attention_interval", default=4)
    attention = _attention(view, count, sliding=None)
    recurrent = LayerKV(kind="linear", states=_ssm_states(view))
    return tuple(recurrent if (index + 1) % interval else attention[index] for index in range(count))


def parallel_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """Falcon-H1: attention and a state space in every layer."""
    states = _ssm_states(view)
    attention = _attention(view, _layer_count(view), sliding=None)
    return tuple(LayerKV(kind="hybrid", tensors=layer.tensors, states=states) for layer in attention)


def short_conv_layers(view: Metadata) -> tuple[LayerKV, ...]:
    """LFM2: a short convolution where a layer has no key-value heads."""
    count = _layer_count(view)
    columns, channels = view.integer("shortconv.l_cache"), view.integer("embedding_length")
    conv = LayerKV(kind="conv", states=(State(name="conv", shape=(channels, columns), role="conv"),))
    heads = view.per_layer("attention.head_count_kv", count)
    attention = _attention(view, count, sliding=None)
    return tuple(attention[index] if heads[index] else conv for index in range(count))


def _layer_count(view: Metadata) -> int:
    """Layers of the trunk: blocks that only predict further tokens are not part of its cache."""
    blocks = view.integer("block_count", most=MOST_LAYERS)
    return blocks - view.integer("nextn_predict_layers", default=0, least=0, most=blocks - 1)


def _attention(
    view: Metadata, count: int, *, sliding: list[bool] | None, window: int | None = None, kind: str = "sliding"
) -> tuple[LayerKV, ...]:
    heads = view.per_layer("attention.head_count", count)
    stated = view.get("attention.head_count_kv") is not None
    kv_heads = view.per_layer("attention.head_count_kv", count) if stated else heads
    if not any(kv_heads) and view.get("ssm.inner_size") is None:
        raise UnknownConfigField(f"{view.source}: {view.architecture}.attention.head_count_kv gives no layer a head")
    key, value = _length(view, "key", heads), _length(view, "value", heads)
    own = count - view.integer("attention.shared_kv_layers", default=0, least=0, most=count - 1)
    rows = []
    for index in range(count):
        if index >= own or not kv_heads[index]:
            rows.append(LayerKV(kind="none"))
            continue
        narrow = bool(sliding and sliding[index])
        tensors = (
            PerToken(name="k", heads=kv_heads[index], dim=_windowed_length(view, "key", key, narrow)),
            PerToken(name="v", heads=kv_heads[index], dim=_windowed_length(view, "value", value, narrow)),
        )
        rows.append(LayerKV(kind=kind if narrow else "full", tensors=tensors, window=window if narrow else None))
    return tuple(rows)


def _length(view: Metadata, which: str, heads: list[int]) -> int:
    stated = view.get(f"attention.{which}_length")
    if stated is not None:
        return view.integer(f"attention.{which}_length")
    width, count = view.integer("embedding_length"), max(heads)
    if count == 0 or width % count:
        raise UnknownConfigField(f"{view.source}: embedding length {width} is not a multiple of {count} heads")
    return width // count


def _windowed_length(view: Metadata, which: str, full: int, narrow: bool) -> int:
    return view.integer(f"attention.{which}_length_swa", default=full) if narrow else full


def _ssm_states(view: Metadata) -> tuple[State, ...]:
    """Channels · k of the convolution; inner size · state size of the recurrence."""
    inner, size = view.integer("ssm.inner_size"), view.integer("ssm.state_size")
    groups = view.integer("ssm.group_count", default=0, least=0)
    channels = inner + 2 * groups * size
    return (
        State(name="conv", shape=(channels, view.integer("ssm.conv_kernel")), role="conv"),
        State(name="ssm", shape=(inner, size), dtype="float32"),
    )


_PLAIN = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell command-r dbrx deci
    deepseek dots1 ernie4_5 ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptneox granite granitemoe grok
    grovemoe hunyuan-dense hunyuan-moe internlm2 jais llama minicpm minicpm3 minimax-m2 mistral3 mpt nemotron olmo
    olmoe openelm orion phi2 phi3 phimoe plamo plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe
    refact seed_oss smollm3 stablelm starcoder starcoder2 xverse
"""

# how the layers are read, and the transformers model type whose rules the runtimes use, where its name is another
ARCHITECTURES: dict[str, tuple[Callable[[Metadata], tuple[LayerKV, ...]], str | None]] = {
    **dict.fromkeys(_PLAIN.split(), (plain_layers, None)),
    **dict.fromkeys(("afmoe", "cohere2", "exaone4"), (pattern_layers(4), None)),
    "gemma2": (pattern_layers(2), None),
    "gemma3": (pattern_layers(6), "gemma3_text"),
    "gemma3n": (pattern_layers(5), "gemma3n_text"),
    "gpt-oss": (pattern_layers(2), "gpt_oss"),
    "llama4": (pattern_layers(4, window=8192, kind="chunked"), "llama4_text"),
    "olmo2": (pattern_layers(4), "olmo3"),
    "deepseek2": (latent_layers, "deepseek_v3"),
    "mamba": (mamba_layers, None),
    "mamba2": (mamba_layers, None),
    "jamba": (hybrid_layers, None),
    "granitehybrid": (hybrid_layers, "granitemoehybrid"),
    "nemotron_h": (hybrid_layers, None),
    "qwen3next": (interval_layers, "qwen3_next"),
    "falcon-h1": (parallel_layers, "falcon_h1"),
    "lfm2": (short_conv_layers, None),
    "lfm2moe": (short_conv_layers, "lfm2_moe"),
}

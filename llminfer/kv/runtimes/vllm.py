"""vLLM's V1 block manager: what it must have free before it admits the sequences.

Sources, vLLM V1: `kv_cache_interface.py` (`max_memory_usage_bytes` and `page_size_bytes` of each
spec), `kv_cache_utils.py` (groups of layers of one page size, with padding layers),
`models/config.py` (`HybridAttentionMambaModelConfig`: the attention block is raised until its
page holds a state page, state pages are padded to it), `mamba_utils.py` (k − 1 columns, states in
the model's dtype).

Modelled with block size 16, chunked prefill of 2048 tokens (`SchedulerConfig`'s default; the
server raises it on large GPUs), no speculative decoding, no prefix caching of states.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from llminfer.errors import UsageError
from llminfer.kv.dtypes import ElementType, element_type
from llminfer.kv.layer import LayerKV, ModelKV, State
from llminfer.kv.runtimes.records import (
    Allocation,
    LayerBytes,
    Request,
    Term,
    check_latent,
    check_no_compression,
    each_layer,
    per_token_terms,
    refuse,
    state_terms,
    unpinned,
)

BLOCK_TOKENS = 16
MAX_BATCHED_TOKENS = 2048
TYPES = ("float32", "bfloat16", "float16", "fp8")
# model types whose vLLM config pins the recurrent state to float32 (mamba_ssm_cache_dtype)
FLOAT32_STATE_MODEL_TYPES = frozenset({"nemotron_h", "kimi_linear"})
# model types for which vLLM's `is_deepseek_mla` holds; it expands the heads of MiniCPM3
LATENT_MODEL_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What vLLM calls a KV cache spec: a block's tokens and its page, and the blocks a sequence needs."""

    kind: str
    block_tokens: int
    page_bytes: int
    window: int | None = None

    def blocks(self, tokens: int) -> int:
        """Blocks of one layer for one sequence of `tokens` tokens."""
        if self.kind == "state":
            return 1
        if self.window is None:
            return -(-tokens // self.block_tokens)
        if self.kind == "chunked":
            return -(-min(self.window + MAX_BATCHED_TOKENS, tokens) // self.block_tokens)
        # one more: the window need not begin where a block does
        return -(-min(self.window - 1 + MAX_BATCHED_TOKENS, tokens) // self.block_tokens) + 1


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """Blocks of every layer, and of the padding layers that make vLLM's groups equal."""
    _check(model, layers, request)
    specs = _specs(model, layers, request)
    rows = each_layer(layers, lambda layer: _layer(model, layer, specs[layer], request))
    counts = Counter(spec for layer in layers for spec in specs[layer])
    padding = sum(
        layers_added * spec.blocks(request.tokens) * spec.page_bytes * request.batch
        for spec, layers_added in _padding_layers(counts).items()
    )
    blocks = {spec.block_tokens for spec in counts if spec.kind != "state"}
    return Allocation(
        layers=rows,
        padding_bytes=padding,
        block_tokens=max(blocks, default=1),
        notes=tuple(f"attention blocks of {size} tokens" for size in sorted(blocks - {BLOCK_TOKENS})),
    )


def _check(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> None:
    if request.k_type != request.v_type:
        raise UsageError("vllm has one element type for keys and values", hint="give --dtype alone")
    if request.k_type.name not in TYPES:
        raise UsageError(f"vllm has no {request.k_type.name} cache", hint=f"known: {', '.join(TYPES)}")
    check_no_compression("vllm", model, layers)
    check_latent("vllm", model, layers, known=LATENT_MODEL_TYPES)
    if any(tensor.name.startswith("index") for layer in layers for tensor in layer.tensors):
        raise refuse("vllm", model, "no rule for the keys of its indexer")
    for whole, part in zip(model.layers, layers, strict=True):
        _check_groups(model, whole, part)


def _check_groups(model: ModelKV, whole: LayerKV, part: LayerKV) -> None:
    """Refuse ranks that do not divide Mamba-2's groups: vLLM widens the convolution for them then."""
    conv = next((state for state in whole.states if state.role == "conv"), None)
    scan = next((state for state in whole.states if state.name == "ssm" and len(state.shape) == 3), None)
    if conv is None or scan is None:
        return
    ranks = whole.states[0].shape[0] // part.states[0].shape[0]
    heads, head_dim, size = scan.shape
    groups = (conv.shape[0] - heads * head_dim) // (2 * size)
    if groups % ranks:
        raise refuse("vllm", model, f"no rule for {groups} state groups on {ranks} ranks")


def _specs(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> dict[LayerKV, tuple[Spec, ...]]:
    """The specs of each distinct layer: one for what grows, one for its states."""
    distinct = dict.fromkeys(layers)
    token_bytes = {layer: _token_bytes(layer, request) for layer in distinct if layer.tensors}
    state_bytes = {
        layer: sum(term.size_bytes for term in _state_terms(model, layer, request, sequences=1))
        for layer in distinct
        if layer.states
    }
    block = BLOCK_TOKENS
    if token_bytes and state_bytes:
        block = max(block, 16 * -(-max(state_bytes.values()) // (16 * min(token_bytes.values()))))
    page = max((block * size for size in token_bytes.values()), default=0)
    uniform = not state_bytes and len({(layer.window, layer.kind == "chunked") for layer in token_bytes}) == 1
    specs: dict[LayerKV, tuple[Spec, ...]] = {}
    for layer in distinct:
        found: list[Spec] = []
        if layer in token_bytes:
            ratio, rest = (1, 0) if uniform else divmod(page, block * token_bytes[layer])
            if rest:
                raise refuse("vllm", model, "its layers' pages differ and none is a multiple of the other")
            kind = "chunked" if layer.kind == "chunked" else "attention"
            size = block * ratio
            found.append(Spec(kind=kind, block_tokens=size, page_bytes=size * token_bytes[layer], window=layer.window))
        if layer in state_bytes:
            found.append(Spec(kind="state", block_tokens=1, page_bytes=max(page, state_bytes[layer])))
        specs[layer] = tuple(found)
    return specs


def _padding_layers(counts: Counter[Spec]) -> dict[Spec, int]:
    """Layers that vLLM adds to make groups of equal size, by spec; none when all layers are of one type.

    Source: `_get_kv_cache_groups_uniform_page_size`: groups as large as the rarest type, or as the
    commonest when that is less than half as many again.
    """
    if len({(spec.kind, spec.window) for spec in counts}) <= 1:
        return {}
    smallest, largest = min(counts.values()), max(counts.values())
    group = largest if largest < smallest * 1.5 else smallest
    return {spec: -count % group for spec, count in counts.items()}


def _layer(model: ModelKV, layer: LayerKV, specs: tuple[Spec, ...], request: Request) -> LayerBytes:
    grown: tuple[Term, ...] = ()
    states: tuple[Term, ...] = ()
    slots = 0
    for spec in specs:
        if spec.kind == "state":
            states = _state_terms(model, layer, request, sequences=request.batch)
            padding = spec.page_bytes * request.batch - sum(term.size_bytes for term in states)
            if padding:
                label = f"{layer.kind} page padding"
                states += (Term(label=label, symbols=("pad",), factors=(str(padding),), size_bytes=padding),)
        else:
            slots = spec.blocks(request.tokens) * spec.block_tokens
            grown = per_token_terms(layer, slots, request, sequences=request.batch, symbol="slots")
    return LayerBytes(slots=slots, grown=grown, states=states)


def _token_bytes(layer: LayerKV, request: Request) -> int:
    one = replace(request, batch=1, tokens=1)
    return sum(term.size_bytes for term in per_token_terms(layer, 1, one, sequences=1))


def _state_terms(model: ModelKV, layer: LayerKV, request: Request, *, sequences: int) -> tuple[Term, ...]:
    return state_terms(
        layer, sequences=sequences, dtype=lambda state: _state_type(model, state, request), needed_only=True
    )


def _state_type(model: ModelKV, state: State, request: Request) -> ElementType:
    pinned = model.model_type in FLOAT32_STATE_MODEL_TYPES and state.role != "conv"
    return element_type("float32") if pinned else unpinned(state.dtype, request)

"""llama.cpp: one pool of cells for all sequences, padded to 256; recurrent states in float32.

Sources, llama.cpp 0c1e57098 (llama-cpp-python 0.3.36): `llama-context.cpp` pads the context,
`llama-kv-cache-iswa.cpp` sizes the sliding pool, `llama-kv-cache.cpp` leaves V out for MLA,
`llama-hparams.cpp` (`n_embd_r`, `n_embd_s`) and `llama-model.cpp` give the recurrent states.
Modelled without --swa-full, as llama-server and llama-cli run, with a unified pool
(`--kv-unified`; with one sequence there is no difference), flash attention on, and the default
physical batch.
"""

from __future__ import annotations

from dataclasses import replace

from llminfer.errors import InvalidParams
from llminfer.kv.dtypes import element_type
from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.kv.runtimes.records import (
    Allocation,
    LayerBytes,
    Request,
    check_latent,
    check_no_compression,
    each_layer,
    per_token_terms,
    state_terms,
    tensor_type,
    unpinned,
)

CELLS_MULTIPLE = 256
UBATCH_TOKENS = 512  # llama.cpp's default --ubatch-size
# the model types whose window llama.cpp applies to its cells (models/*.cpp that set swa_type); it keeps every
# token of all others, also of those whose config states a window (Mistral 7B 0.1, Phi-3)
WINDOWED_MODEL_TYPES = frozenset(
    (
        *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
        *("gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "laguna", "llama4", "llama4_text", "mellum"),
        *("mimo_v2_flash", "olmo3", "plamo3", "smallthinker"),
    )
)
# models/*.cpp that read attention.key_length_mla; MiniCPM3's heads are cached expanded
LATENT_MODEL_TYPES = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear"}
)


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """Cells for batch · tokens tokens, a smaller pool for sliding layers, states in float32."""
    check_no_compression("llama.cpp", model, layers)
    check_latent("llama.cpp", model, layers, known=LATENT_MODEL_TYPES)
    _check_blocks(layers, request)
    windowed = model.model_type in WINDOWED_MODEL_TYPES
    rows = each_layer(layers, lambda layer: _layer(layer, request, windowed=windowed))
    ignored = any(layer.window is not None for layer in layers) and not windowed
    note = (f"llama.cpp does not use the window of {model.model_type}: every token keeps its cell",)
    return Allocation(layers=rows, notes=note if ignored else (), block_tokens=CELLS_MULTIPLE)


def _layer(layer: LayerKV, request: Request, *, windowed: bool) -> LayerBytes:
    cells = _pad(request.tokens * request.batch)
    if layer.window is not None and windowed:
        cells = _pad(min(cells, layer.window * request.batch + UBATCH_TOKENS))
    float32 = replace(request, float_type=element_type("float32"))
    states = state_terms(
        layer, sequences=request.batch, dtype=lambda state: unpinned(state.dtype, float32), needed_only=True
    )
    return LayerBytes(
        slots=cells if layer.tensors else 0,
        grown=per_token_terms(layer, cells, request, sequences=1, symbol="cells"),
        states=states,
    )


def _pad(cells: int) -> int:
    return -(-cells // CELLS_MULTIPLE) * CELLS_MULTIPLE


def _check_blocks(layers: tuple[LayerKV, ...], request: Request) -> None:
    for layer in layers:
        # llama_new_context_with_model wants whole blocks in a head; a latent's parts lie in one row
        row = sum(tensor.dim for tensor in layer.tensors) if layer.latent else None
        for tensor in layer.tensors:
            kind, dim = tensor_type(tensor, request), row or tensor.dim
            if dim % kind.block_elements:
                raise InvalidParams(
                    f"llama.cpp refuses {kind.name} for heads of {dim}: not whole blocks of {kind.block_elements}"
                )

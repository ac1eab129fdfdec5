"""Configs with one or two fields changed hold what is predicted, or run in neither transformers nor here.

The tiny config of every causal type is changed as people and tools change files, run by its own
classes without weights, and compared with the prediction from the same file: layer by layer and in
storage, after the prefill and a step later. Hypothesis draws the changes, the same ones each time.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.engine.kv_cache.dry_run import Measurement, dry_run
from llminfer.errors import UnsupportedArchitecture
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from tests.engine.kv_cache.test_dry_run import LOOKS_AT_VALUES
from tests.kv.test_every_architecture import CANNOT_RUN, FLOAT32_ONLY, as_json
from tests.tiny_models import tiny_config, tiny_fields

TYPES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in CANNOT_RUN)
NEEDS_VALUES = (*LOOKS_AT_VALUES, "xlnet")
# fields that shape no cache: names, ids, lengths, rates, and parts that are not the language model
_SHAPES_NOTHING = re.compile(
    r"(^|_)(id|ids|index|labels|id2label|label2id|bos|eos|pad|vocab|vocabulary)($|_)|max_position|^n_positions$|^n_ctx$"
    # XLNet's for training on pairs of sequences: with it a single one is dropped by the first layer
    r"|^bi_data$"
    # whether it is a decoder at all has a test of its own
    r"|^is_decoder$|max_seq_len|^output_|return_dict|use_cache|^tie_|is_encoder_decoder|initializer|chunk_size_feed|axial_pos"
    r"|vision|audio|image|video|speech|^rope_|quantization|generation|_map$"
)
_STILL_SHAPES = frozenset({"attn_layer_indices", "ple_layer_ids", "local_layer_ids", "full_attn_idxs"})
_CHANGES = {"half": lambda n: n // 2, "twice": lambda n: n * 2, "thrice": lambda n: n * 3} | {
    "more": lambda n: n + 1,
    "less": lambda n: n - 1,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A changed config, what was changed, and how it is run."""

    config: dict[str, Any]
    changed: tuple[str, ...]
    tokens: int
    batch: int
    dtype: str


def shaping_fields(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every number, flag and list in a config that can shape its cache."""
    for name, value in config.items():
        if _SHAPES_NOTHING.search(name) and name not in _STILL_SHAPES:
            continue
        if isinstance(value, Mapping):
            yield from shaping_fields(value, (*above, name))
        elif isinstance(value, int) or (isinstance(value, list) and len({*map(str, value)}) > 1):
            yield (*above, name)


@st.composite
def cases(draw: st.DrawFn, model_type: str | None = None) -> Case:
    """A tiny config as stated, as transformers writes it or in full, with one or two fields changed."""
    name = model_type or draw(st.sampled_from(TYPES))
    config = tiny_config(name)
    form = draw(st.sampled_from(("stated", "written", "full")))
    stated = {**tiny_fields(name), "model_type": name}
    file = as_json({"stated": stated, "written": config.to_diff_dict(), "full": config.to_dict()}[form])
    fields = sorted(shaping_fields(file))
    changed = []
    for path in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=2, unique=True)):
        part = file
        for key in path[:-1]:
            part = part[key]
        old = part[path[-1]]
        if isinstance(old, bool):
            new: Any = not old
        elif isinstance(old, int):
            new = _CHANGES[draw(st.sampled_from(sorted(_CHANGES)))](old)
        else:
            new = draw(st.permutations(old))
        part[path[-1]] = new
        changed.append(f"{form} {'.'.join(path)}: {old} → {new}")
    return Case(
        config=json.loads(json.dumps(file)),
        changed=tuple(changed),
        tokens=draw(st.integers(3, 19)),
        batch=draw(st.integers(1, 2)),
        dtype="float32" if name in FLOAT32_ONLY else draw(st.sampled_from(("float32", "bfloat16"))),
    )


def measure(case: Case) -> tuple[Measurement, ...] | None:
    """What the classes hold, None when they do not run on such a config."""
    try:
        return dry_run(
            copy.deepcopy(case.config),
            tokens=case.tokens,
            batch=case.batch,
            dtype=case.dtype,
            real=case.config["model_type"] in NEEDS_VALUES,
        )
    except UnsupportedArchitecture:
        return None


def compare(case: Case) -> bool:
    """Assert that what is predicted is what is measured; False when transformers cannot run the config."""
    moments = measure(case)
    if moments is None:
        return False
    model = read_model(case.config, source="changed")  # a refusal of what runs is an error
    starts = {tensor.after for layer in model.layers for tensor in layer.tensors}
    before = footprint(model, tokens=case.tokens, batch=case.batch, dtype=case.dtype)
    stored = {peak.name: peak.size_bytes for peak in before.peaks}
    for moment, name in zip(moments, ("storage after prefill", "storage after the next step"), strict=True):
        if moment.tokens > case.tokens and any(case.tokens <= start <= moment.tokens for start in starts):
            break  # what begins with a step has other sizes, as the answer says
        predicted = footprint(model, tokens=moment.tokens, batch=case.batch, dtype=case.dtype)
        pairs = [*zip_longest(predicted.layer_bytes, (layer.size_bytes for layer in moment.layers), fillvalue=0)]
        assert [a for a, _ in pairs] == [b for _, b in pairs], f"{moment.tokens} tokens"
        assert stored.get(name, predicted.total_bytes) == moment.storage_bytes, name
    return True


bounded = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(1800)  # a machine that does much else takes long for so many models
def test_changed_configs_hold_what_is_predicted() -> None:
    ran: Counter[bool] = Counter()

    @settings(bounded, max_examples=150)
    @given(case=cases())
    def check(case: Case) -> None:
        ran[compare(case)] += 1

    check()
    assert ran[True] > ran[False]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model_type", TYPES)
def test_changed_configs_of_every_type_hold_what_is_predicted(model_type: str) -> None:
    @settings(bounded, max_examples=14)
    @given(case=cases(model_type))
    def check(case: Case) -> None:
        compare(case)

    check()


# what the changes above found, and reviews before them: a stated value stands, whatever the class would derive
FOUND: list[tuple[str, dict[str, Any]]] = [
    ("falcon_mamba", {"expand": 16, "intermediate_size": 64}),
    ("mamba", {"expand": 3, "intermediate_size": 64}),
    ("mamba", {"hidden_size": 96}),
    ("modernbert-decoder", {"local_attention": 128, "sliding_window": 12}),
    ("modernbert-decoder", {"local_attention": 14}),
    ("hrm_text", {"num_layers_per_stack": 4, "num_hidden_layers": 32, "L_cycles": 1}),
    ("hrm_text", {"num_layers_per_stack": 2, "num_hidden_layers": 33}),
    ("hrm_text", {"num_hidden_layers": 3, "L_cycles": 1}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 13}),
    ("zamba2", {"num_attention_heads": 2, "attention_head_dim": 16}),
    ("zamba2", {"num_attention_heads": 2}),
    ("bailing_hybrid", {"linear_num_heads": 6}),
    ("stablelm", {"hidden_size": 16}),
    ("dbrx", {"num_key_value_heads": 4}),
    ("flex_olmo", {"num_attention_heads": 12, "num_key_value_heads": 6}),
    ("bigbird_pegasus", {"decoder_layers": 2}),
]


@pytest.mark.parametrize(("model_type", "changes"), FOUND)
def test_a_stated_value_stands(model_type: str, changes: dict[str, Any]) -> None:
    config = as_json({**tiny_fields(model_type), "model_type": model_type, **changes})
    for tokens, batch, dtype in ((4, 1, "float32"), (17, 2, "bfloat16")):
        case = Case(config=config, changed=(str(changes),), tokens=tokens, batch=batch, dtype=dtype)
        assert compare(case), f"{model_type} does not run"


def test_a_falcon_mamba_of_seven_billion() -> None:
    config = {"model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096, "intermediate_size": 8192}
    model = read_model({**config, "expand": 16, "dtype": "bfloat16"}, source="7b")
    # a convolution of 4 columns in 16 bit and a state of 16 in 32 bit, for each of 8192 channels
    assert footprint(model, tokens=1).total_bytes == 64 * 8192 * (4 * 2 + 16 * 4)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "deepseek_v4", "reformer", "rwkv", "cohere2"])
@pytest.mark.parametrize("tokens", [3, 7, 8, 12, 16, 17, 33])
def test_what_stays_allocated_is_predicted(model_type: str, tokens: int) -> None:
    config = as_json(tiny_config(model_type).to_dict())
    for batch, dtype in ((1, "float32"), (2, "float32" if model_type in FLOAT32_ONLY else "bfloat16")):
        assert compare(Case(config=config, changed=(), tokens=tokens, batch=batch, dtype=dtype))

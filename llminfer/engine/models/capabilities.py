"""What a model's class and config say about how it can be run, before or after its weights are there.

The exceptions are by model type and were found by running a tiny model of every type; the tests run
them again, so that one that no longer holds is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from llminfer.errors import UnsupportedArchitecture

# several tokens after others get other logits than one after the other would, or fail
ONE_AT_A_TIME: Mapping[str, str] = {
    "blt": "its patches are cut in one pass over the prompt",
    "cpmant": "its prompt is fed with a prefix in one pass",
    "falcon_mamba": "its prefill starts from an empty state",
    "mamba": "its prefill starts from an empty state",
    "moshi": "its depth decoder expects the whole prompt",
    "prophetnet": "its decoder takes one token after the first pass",
    "recurrent_gemma": "its prefill starts from an empty state",
    "reformer": "its hash buckets are made in one pass",
    "xlm": "its mask is that of one token after the first pass",
    "xlnet": "its permutation mask is that of one pass",
}
# a token after a cached prompt gets other logits than as the last of a prompt
NOT_CONTINUED: Mapping[str, str] = {name: ONE_AT_A_TIME[name] for name in ("blt", "cpmant", "moshi", "prophetnet")}
_INDEXED = "indexed_attention"


def text_config(config: Any) -> Any:
    """The language model's own part of a transformers config."""
    return config.get_text_config(decoder=True)


def layer_types(config: Any) -> frozenset[str]:
    """The kinds of the model's layers, as its caches are made for them."""
    return frozenset(get_layer_types_and_kwargs(text_config(config))[0])


def model_class(config: Any) -> Any | None:
    """The class that transformers has for the config; None when only the checkpoint's own code has one."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        found = mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    return None


def forward_parameters(model: Any) -> frozenset[str]:
    """Names of the arguments that the forward of a model, or of a class of models, takes."""
    return frozenset(inspect.signature(_class_of(model).forward).parameters)


def prepares_by_default(model: Any) -> bool:
    """Whether the inputs of a model, or of a class, are just ids, positions and a default cache."""
    overridden = any(
        getattr(_class_of(model), name) is not getattr(GenerationMixin, name)
        for name in (
            "prepare_inputs_for_generation",
            "_update_model_kwargs_for_generation",
            "_prepare_position_ids_for_generation",
        )
    )
    return not overridden and "cache" in forward_parameters(model) and model._supports_default_dynamic_cache()


def why_one_at_a_time(config: Any) -> str | None:
    """Why the model must not be fed several tokens after others; None when it may."""
    model_type = text_config(config).model_type
    if model_type in ONE_AT_A_TIME:
        return ONE_AT_A_TIME[model_type]
    if _INDEXED in layer_types(config):
        return "what its sparse attention selects depends on the pieces"
    return None


def check_chunks(config: Any, source: str) -> None:
    """Refuse to feed a prompt in chunks where the model takes it in one pass only.

    Raises:
        UnsupportedArchitecture: with the reason.
    """
    reason = why_one_at_a_time(config)
    if reason is not None:
        raise UnsupportedArchitecture(f"{source} cannot be fed in chunks: {reason}", hint="drop --prefill-chunk")


def _class_of(model: Any) -> Any:
    return model if isinstance(model, type) else type(model)

"""What a model's class and config say about how it can be run, before or after its weights are there."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from llminfer.engine.models.protocols import CausalLM, Config
from llminfer.engine.models.quirks import quirks_of
from llminfer.errors import UnsupportedArchitecture

_INDEXED = "indexed_attention"
_PREPARING = (
    *("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"),
    "_prepare_position_ids_for_generation",
)


def text_config(config: Config) -> Config:
    """The language model's own part of a transformers config."""
    return config.get_text_config(decoder=True)


def layer_types(config: Config) -> frozenset[str]:
    """The kinds of the model's layers, as its caches are made for them."""
    return frozenset(get_layer_types_and_kwargs(text_config(config))[0])


def model_class(config: Config) -> type[CausalLM] | None:
    """The class that transformers has for the config; None when only the checkpoint's own code has one."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        found = mapping.get(type(config), None)
        known: type[CausalLM] | None = found[0] if isinstance(found, tuple) else found
        if known is not None:
            return known
    return None


def forward_parameters(model: CausalLM | type[CausalLM]) -> frozenset[str]:
    """Names of the arguments that the forward of a model, or of a class of models, takes."""
    return frozenset(inspect.signature(_class_of(model).forward).parameters)


def prepares_by_default(model: CausalLM | type[CausalLM]) -> bool:
    """Whether the inputs of a model, or of a class, are just ids, positions and a default cache."""
    overridden = any(getattr(_class_of(model), name) is not getattr(GenerationMixin, name) for name in _PREPARING)
    return not overridden and "cache" in forward_parameters(model) and model._supports_default_dynamic_cache()


def why_one_at_a_time(config: Config) -> str | None:
    """Why the model must not be fed several tokens after others; None when it may."""
    quirk = quirks_of(text_config(config).model_type).one_at_a_time
    if quirk is None and _INDEXED in layer_types(config):
        return "what its sparse attention selects depends on the pieces"
    return quirk


def check_chunks(config: Config, source: str) -> None:
    """Refuse to feed a prompt in chunks where the model takes it in one pass only.

    Raises:
        UnsupportedArchitecture: with the reason.
    """
    if (reason := why_one_at_a_time(config)) is not None:
        raise UnsupportedArchitecture(f"{source} cannot be fed in chunks: {reason}", hint="drop --prefill-chunk")


def _class_of(model: CausalLM | type[CausalLM]) -> type[CausalLM]:
    return model if isinstance(model, type) else type(model)

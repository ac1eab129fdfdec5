"""Which checkpoints continue a text from left to right: told from their configs, before any weights are read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llminfer.engine.machine.library_errors import foreign_errors
from llminfer.engine.models.capabilities import model_class
from llminfer.engine.models.protocols import Config
from llminfer.engine.models.quirks import quirks_of
from llminfer.errors import ModelNotAvailable, UnsupportedArchitecture
from llminfer.kv.rules.direction import ENCODER_DECODERS, ENCODER_HINT, IS_ENCODER, IS_ENCODER_DECODER, is_encoder

NEEDS_CODE = "needs Python code that the checkpoint brings"
TRUST_HINT = "--trust-remote-code runs that code: read it first"


def read_architecture(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> Config:
    """The transformers config of a checkpoint whose model continues text.

    `config` is the content of its config.json; `trust_remote_code` runs Python code from the folder.

    Raises:
        UnsupportedArchitecture: for a model that does not continue text by itself.
        ModelNotAvailable: for one that only the checkpoint's own code knows, or a config that cannot be read.
    """
    source = str(folder)
    check_model_type(config, source, trust_remote_code=trust_remote_code)
    with foreign_errors(folder, "cannot load the config", stated=config):
        loaded: Config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    check_direction(loaded, source)
    with foreign_errors(folder, "cannot load the model's code"):
        check_inputs(loaded, source)
    return loaded


def auto_class(config: Config) -> Any:
    """The transformers class that loads this config's model: its language model alone where there is a class for it."""
    for known in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in known._model_mapping:
            return known
    return AutoModelForCausalLM  # where the checkpoint's own code registers itself


def check_model_type(config: Mapping[str, Any], source: str, *, trust_remote_code: bool) -> None:
    """Refuse by name what cannot continue a text.

    Raises:
        UnsupportedArchitecture: for types that are not causal language models, and unknown ones.
        ModelNotAvailable: for a type that only the checkpoint's own code knows.
    """
    model_type = config.get("model_type")
    if config.get("auto_map") and trust_remote_code:
        return
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedArchitecture(f"{source}: the config names no model_type")
    if (not_alone := quirks_of(model_type).not_alone) is not None:
        raise UnsupportedArchitecture(f"{source}: {model_type} {not_alone}")
    encoder_decoder = model_type in ENCODER_DECODERS
    reads_images = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not encoder_decoder
    if reads_images or model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if config.get("auto_map"):
        raise ModelNotAvailable(f"{source}: {model_type} {NEEDS_CODE}", hint=TRUST_HINT)
    if encoder_decoder:
        raise UnsupportedArchitecture(f"{source}: {model_type} {IS_ENCODER_DECODER}")
    if model_type in CONFIG_MAPPING_NAMES:
        raise UnsupportedArchitecture(f"{source}: {model_type} is not a causal language model")
    raise UnsupportedArchitecture(
        f"{source}: model type {model_type!r} is unknown to the installed transformers",
        hint="a newer transformers may know it",
    )


def check_direction(config: Config, source: str) -> None:
    """Refuse models that do not read from left to right, by their config with its class defaults.

    Raises:
        UnsupportedArchitecture: for encoder-decoder and encoder-only models.
    """
    if config.is_encoder_decoder:
        raise UnsupportedArchitecture(f"{source}: {config.model_type} {IS_ENCODER_DECODER}")
    if is_encoder(config.model_type, getattr(config, "is_decoder", None)):
        raise UnsupportedArchitecture(f"{source}: {config.model_type} {IS_ENCODER}", hint=ENCODER_HINT)


def check_inputs(config: Config, source: str) -> None:
    """Refuse models that do not run on ids alone, by the class that would be loaded.

    Raises:
        UnsupportedArchitecture: for classes that need an image, and those that do not write token by token.
    """
    known = model_class(config)
    if known is None:  # the checkpoint's own code, or what loading will explain
        return
    if not hasattr(known, "prepare_inputs_for_generation"):
        raise UnsupportedArchitecture(f"{source}: {config.model_type} does not write token by token")
    parameters = inspect.signature(known.forward).parameters
    if "pixel_values" in parameters and parameters["pixel_values"].default is inspect.Parameter.empty:
        raise UnsupportedArchitecture(f"{source}: {config.model_type} cannot run without an image")

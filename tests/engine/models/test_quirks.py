"""The table of quirks: its rows are of types that exist, and say what still holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.engine.models.capabilities import forward_parameters, model_class
from llminfer.engine.models.quirks import QUIRKS, Quirks, quirks_of
from llminfer.kv.rules.direction import DECODERS_THAT_DENY_IT
from tests.parity import GREEDY, SAMPLED, check_batch
from tests.tiny_models import tiny_config, tiny_image_text_model, tiny_model

AT_WORK = {"not_alone", "prompt_without_cache"}


def having(name: str, value: object = None) -> list[str]:
    """The types whose row has this value, or any where none is given."""
    rows = ((model_type, getattr(quirks, name)) for model_type, quirks in QUIRKS.items())
    return [model_type for model_type, found in rows if (found == value if value is not None else found)]


@pytest.mark.parametrize("model_type", QUIRKS)
def test_every_row_is_of_a_type_that_exists_and_says_something(model_type: str) -> None:
    row = QUIRKS[model_type]
    assert model_type in CONFIG_MAPPING_NAMES
    assert row != Quirks()
    assert quirks_of(model_type) is row
    # the reason is the same, and given once
    assert row.one_at_a_time or not row.not_continued
    if not any(getattr(row, name) for name in AT_WORK) and row.places != "own":
        assert model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_a_type_without_a_row_has_no_quirks() -> None:
    assert quirks_of("llama") == quirks_of("unheard-of") == Quirks()


@pytest.mark.parametrize("model_type", sorted(DECODERS_THAT_DENY_IT))
def test_a_config_that_denies_decoding_still_does(model_type: str) -> None:
    assert CONFIG_MAPPING[model_type]().is_decoder is False


@pytest.mark.parametrize("model_type", having("places", "distances"))
def test_attention_that_knows_distances_alone_takes_no_positions(model_type: str) -> None:
    assert "position_ids" not in forward_parameters(model_class(tiny_config(model_type)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", having("places", "own"))
def test_a_type_that_counts_places_its_own_way_still_cannot_be_padded(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(model_type)
    build = tiny_model if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else tiny_image_text_model
    model = build(config, torch.float32)
    told = {**QUIRKS, model_type: replace(QUIRKS[model_type], places=None)}
    monkeypatch.setattr("llminfer.engine.models.quirks.QUIRKS", told)
    together = True
    try:
        together = check_batch(model, GREEDY) and check_batch(model, SAMPLED)
    except Exception:  # other tokens, or what the model makes of the padding
        return
    assert not together

"""Which model types do not continue a text, as `generate` and `kv-size` both refuse or label them."""

from __future__ import annotations

# transformers' MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
ENCODER_DECODERS = frozenset(
    (
        *("audioflamingo3", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt"),
        *("glmasr", "granite_speech", "granite_speech_plus", "led", "longt5", "m2m_100", "marian", "mbart"),
        *("moss_transcribe_diarize", "mt5", "musicflamingo", "mvp", "nemo_speechlm", "nllb-moe", "omniasr", "pegasus"),
        *("pegasus_x", "plbart", "prophetnet", "qwen2_audio", "qwen3_asr", "seamless_m4t", "seamless_m4t_v2"),
        *("switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5", "vibevoice_asr", "voxtral", "voxtral_realtime"),
    )
)
IS_ENCODER_DECODER = "is an encoder-decoder model"
IS_ENCODER = "is an encoder, which does not continue a text"
ENCODER_HINT = "its config says is_decoder: false"
# causal models whose config inherits `is_decoder: false` from a shared base
DECODERS_THAT_DENY_IT = frozenset({"gpt_neox", "gpt_neox_japanese", "musicgen_decoder", "musicgen_melody_decoder"})


def is_encoder(model_type: str, is_decoder: object) -> bool:
    """Whether a model of this type reads in both directions, by `is_decoder` of its config or its class."""
    return is_decoder is False and model_type not in DECODERS_THAT_DENY_IT

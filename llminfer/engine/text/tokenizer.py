"""What we call of transformers' tokenizers, which have no types of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back."""

    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, Any]

    @property
    def all_special_ids(self) -> Sequence[int]:
        """The ids that mark something and are no text."""
        ...

    def __call__(self, text: str, **options: Any) -> Mapping[str, Any]:
        """The ids of a text, under `input_ids`."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """The ids of a conversation in the model's own format."""
        ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """The text of ids."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The token of an id as the vocabulary writes it."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        ...

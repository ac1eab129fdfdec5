"""What we call of transformers' tokenizers, which have no types of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back."""

    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None

    @property
    def all_special_ids(self) -> Sequence[int]: ...
    def __call__(self, text: str, **options: Any) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any: ...
    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    def get_vocab(self) -> dict[str, int]: ...

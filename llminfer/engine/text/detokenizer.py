"""Ids to text as they come: whole characters only, and in the end what `tokenizer.decode` gives for all ids.

Decoding each id alone breaks characters that are split over tokens, and slicing a growing decode
by length loses text where decoding is not append-only. So text is let out only where the decoder
can no longer change it:

- byte-level vocabularies: the bytes go through an incremental UTF-8 decoder;
- all others: at tokens after which decoding starts afresh, which are those that do not end in an
  incomplete character;
- byte-fallback tokens among those: each character when its last byte is there.

One thing differs from `tokenizer.decode`: a byte token that is part of no character becomes one U+FFFD,
as in sentencepiece. The tokenizers library makes that of every byte of the run in which it stands, and
a later byte could do so to any run: nothing of a run could be shown before its end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llminfer.engine.text.tokenizer import Tokenizer

_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNDECODED_BYTE = re.compile("[\udc80-\udcff]")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns ids into text, one id at a time."""

    def push(self, token_id: int) -> str:
        """The text that became final with this id, often none or that of several ids."""

    def flush(self) -> str:
        """The rest, once no more ids will come."""


Decode = Callable[[Sequence[int]], str]
IdToToken = Callable[[int], str | None]


def make_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """The detokenizer for a transformers tokenizer; special tokens are hidden."""
    hidden = frozenset(special_tokens(tokenizer))
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder: Any = getattr(backend, "decoder", None)
    if decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel":
        return _ByteLevelDetokenizer(backend.id_to_token, hidden)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    letter = tokenizer.convert_tokens_to_ids("<0x41>")
    falls_back = letter is not None and decode([letter]) == "A"
    kind = _ByteFallbackDetokenizer if falls_back else _WindowDetokenizer
    return kind(decode, tokenizer.convert_ids_to_tokens, hidden)


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """What `decode(skip_special_tokens=True)` leaves out, by id; a config may name special tokens that have none."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)} - {None}
    return {token_id: token for token_id in ids if (token := tokenizer.convert_ids_to_tokens(token_id))}


def byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on.

    Source: the GPT-2 encoder (Radford et al., 2019), which all byte-level vocabularies share.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _ByteLevelDetokenizer:
    __slots__ = ("_alphabet", "_hidden", "_id_to_token", "_utf8")

    def __init__(self, id_to_token: IdToToken, hidden: frozenset[int]) -> None:
        self._id_to_token, self._hidden = id_to_token, hidden
        self._alphabet = byte_level_alphabet()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = None if token_id in self._hidden else self._id_to_token(token_id)
        if token is None:  # an id beyond the vocabulary, as padded embeddings allow, has no text
            return ""
        try:
            data = bytes([self._alphabet[character] for character in token])
        except KeyError:  # an added token, written as plain text
            data = token.encode("utf-8")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes a window of ids: an anchor whose text is out already, then the ids that are not."""

    __slots__ = ("_anchor", "_decode", "_hidden", "_id_to_token", "_pending")

    def __init__(self, decode: Decode, id_to_token: IdToToken, hidden: frozenset[int]) -> None:
        self._decode, self._id_to_token, self._hidden = decode, id_to_token, hidden
        self._anchor: list[int] = []  # keeps the decoder from treating the window as a text's beginning
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = None if token_id in self._hidden else self._id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return self._take(token)

    def _take(self, token: str) -> str:
        """The text that became final with the newest pending token."""
        text = self._window_text()
        if text.endswith(_REPLACEMENT):
            return ""
        self._anchor, self._pending = self._pending[-1:], []
        return text

    def flush(self) -> str:
        text = self._window_text() if self._pending else ""
        self._pending = []
        return text

    def _window_text(self) -> str:
        return self._decode(self._anchor + self._pending)[len(self._decode(self._anchor)) :]


class _ByteFallbackDetokenizer(_WindowDetokenizer):
    """Puts the bytes of byte tokens together itself; pending are those without a whole character yet."""

    __slots__ = ("_utf8",)

    def __init__(self, decode: Decode, id_to_token: IdToToken, hidden: frozenset[int]) -> None:
        super().__init__(decode, id_to_token, hidden)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def _take(self, token: str) -> str:
        byte = _BYTE_FALLBACK_TOKEN.fullmatch(token)
        if byte is not None:
            return self._characters(self._utf8.decode(bytes.fromhex(byte[1])))
        newest = self._pending.pop()
        unfinished = self.flush()
        self._pending = [newest]
        text = self._window_text()
        self._anchor, self._pending = self._pending, []
        return unfinished + text

    def flush(self) -> str:
        return self._characters(self._utf8.decode(b"", final=True))

    def _characters(self, decoded: str) -> str:
        text = _UNDECODED_BYTE.sub(_REPLACEMENT, decoded)
        if text and not self._anchor:  # decoders may take a space from a text's beginning
            text = text if _REPLACEMENT in text else self._decode(self._pending)
            self._anchor = self._pending
        if text:
            self._pending = []
        return text

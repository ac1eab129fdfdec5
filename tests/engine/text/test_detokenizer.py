"""The stream of text is, in the end, exactly `tokenizer.decode` of all ids, and whole characters on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from llminfer.engine.text.detokenizer import make_detokenizer
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from tests.tiny_checkpoints import byte_level_tokenizer, sentencepiece_tokenizer

PIECES = ("Hello", " big", " world", "\ufffd", "日本", "👩‍👩‍👧", "é", "\n\n", "  ", "don't", " .")
WORDS = ("▁Hello", "▁big", "▁world", "▁", "▁▁", "lo", "日", "\ufffd", ".", "▁.", "👍")


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """A decoder that cleans up spaces before punctuation inside its tokens."""
    words = ["[UNK]", "hello", "##ing", ",", ".", "do", "n't", "world", "' s"]
    backend = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", *WORDS]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(dict.fromkeys(words))}, merges=[]))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def suffix_tokenizer() -> PreTrainedTokenizerFast:
    """A decoder that turns a word-end mark into a space unless the word is the last."""
    words = ["<unk>", "hel", "lo</w>", "world</w>", "!</w>"]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(PIECES),
    "sentencepiece": sentencepiece_tokenizer(WORDS),
    "metaspace": metaspace_tokenizer(),
    "wordpiece": wordpiece_tokenizer(),
    "suffix": suffix_tokenizer(),
}


def stream(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def whole(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def without_broken_bytes(ids: list[int]) -> list[int]:
    """Of the sentencepiece vocabulary: each byte that belongs to no character is the token U+FFFD in its place."""
    tokenizer, result, run = TOKENIZERS["sentencepiece"], [], bytearray()
    replacement = tokenizer.convert_tokens_to_ids("\ufffd")

    def end_run() -> None:
        data = bytes(run)
        run.clear()
        while data:
            try:
                data.decode()
                whole, broken = len(data), 0
            except UnicodeDecodeError as error:
                whole, broken = error.start, error.end - error.start
            result.extend([*(3 + byte for byte in data[:whole]), *[replacement] * broken])
            data = data[whole + broken :]

    for token_id in ids:
        if token_id in tokenizer.all_special_ids:  # left out before anything is decoded
            continue
        if 3 <= token_id < 3 + 256:
            run.append(token_id - 3)
        else:
            end_run()
            result.append(token_id)
    end_run()
    return result


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_byte_tokens_are_decoded_as_the_tokenizer_does_but_for_broken_ones(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    written = st.text(max_size=3).map(lambda text: [3 + byte for byte in text.encode("utf-8", "surrogatepass")])
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=3)
    bytes_alone = st.lists(st.integers(3 + 0x80, 3 + 0xFF), max_size=4)
    parts = data.draw(st.lists(st.one_of(written, written, anything, bytes_alone), max_size=8))
    ids = [token_id for part in parts for token_id in part]
    text = "".join(stream(tokenizer, ids))
    mended = without_broken_bytes(ids)
    assert text == whole(tokenizer, mended)
    if mended == [token_id for token_id in ids if token_id not in tokenizer.all_special_ids]:
        assert text == whole(tokenizer, ids)


def test_characters_of_byte_tokens_come_at_once_and_stop() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [3 + byte for byte in "北京🐙。 and so on".encode()]
    assert stream(tokenizer, ids)[:14] == ["", "", "北", "", "", "京", "", "", "", "🐙", "", "", "。", " "]
    output = Output(
        detokenizer=make_detokenizer(tokenizer),
        matcher=StopMatcher(["🐙。"]),
        eos_ids=frozenset(),
        limit=TokenLimit(tokens=99),
        token_text=str,
    )
    texts = []
    while output.reason is None:
        texts.append(output.push(ids[output.count]))
    assert (output.reason, output.count, "".join(texts)) == ("stop", 13, "北京")


def test_a_broken_byte_spoils_itself_alone() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [3 + byte for byte in b"a\xe4\xbd\xa0\xe5b\xff"]
    assert stream(tokenizer, ids) == ["a", "", "", "你", "", "\ufffdb", "\ufffd", ""]
    assert whole(tokenizer, ids) == "\ufffd" * 7


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_stream_equals_the_decode_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert "".join(stream(tokenizer, ids)) == whole(tokenizer, ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_text_written_byte_by_byte_streams_in_whole_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    first = 3  # both vocabularies have their 256 bytes from id 3 on
    alphabet = tokenizer.convert_tokens_to_ids
    ids = (
        [alphabet(f"<0x{byte:02X}>") for byte in text.encode()]
        if name == "sentencepiece"
        else [first + byte for byte in text.encode()]
    )
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == whole(tokenizer, ids) == text.removeprefix(" " if name == "sentencepiece" else "")
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_emoji_over_four_tokens_comes_whole_and_at_once() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces = stream(tokenizer, [3 + byte for byte in "🐙日本".encode()])
    assert pieces == ["", "", "", "🐙", "", "", "日", "", "", "本", ""]


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_a_literal_replacement_character_passes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    piece = "\ufffd" if name == "sentencepiece" else "ï¿½"
    ids = [tokenizer.convert_tokens_to_ids(piece)] * 2
    assert "".join(stream(tokenizer, ids)) == "\ufffd\ufffd"


def test_invalid_bytes_are_shown_as_the_decoder_shows_them() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [3 + byte for byte in b"a\xf0\x9f\x90 b\xff"]
    assert "".join(stream(tokenizer, ids)) == whole(tokenizer, ids) == "a\ufffd b\ufffd"


def test_leading_spaces_are_kept_as_the_whole_decode_keeps_them() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(["▁Hello", "▁big", "▁world"])
    assert stream(tokenizer, ids) == ["Hello", " big", " world", ""]
    bare_first = tokenizer.convert_tokens_to_ids(["▁", "▁big"])
    assert "".join(stream(tokenizer, bare_first)) == whole(tokenizer, bare_first) == " big"


def test_special_tokens_are_hidden_and_do_not_break_characters() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first, *rest = (3 + byte for byte in "é".encode())
    assert "".join(stream(tokenizer, [first, 0, 1, *rest])) == "é"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(stream(tokenizer, [3 + ord("a"), len(tokenizer) + 5, 3 + ord("b")])) == "ab"


def test_the_real_vocabulary_streams_exactly(smollm: Any) -> None:
    tokenizer, generator = smollm.tokenizer, random.Random(0)
    for _ in range(100):
        ids = [generator.randrange(len(tokenizer)) for _ in range(generator.randrange(60))]
        assert "".join(stream(tokenizer, ids)) == whole(tokenizer, ids)
    text = "Žluťoučký kůň 🐎 请用一句话介绍北京 👩‍👩‍👧 \x00 \u200b end"
    ids = tokenizer(text)["input_ids"]
    assert "".join(stream(tokenizer, ids)) == text


# Stop texts


def matched_by_character(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read character by character, end at the first stop text that is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abé🐙", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abé🐙", min_size=1, max_size=5), max_size=3),
)
def test_stop_texts_are_found_as_if_read_character_by_character(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    expected, stop = matched_by_character("".join(pieces), stops)
    assert (shown, matcher.matched) == (expected, stop)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["a", "xE", "N", "Dz"], ["END"], ["a", "x", "", ""], "END"),
        (["E", "N", "X"], ["END"], ["", "", "ENX"], None),
        (["aaab"], ["aab"], ["a"], "aab"),
        (["aa", "aa", "b"], ["aab"], ["", "aa", ""], "aab"),
        (["abab", "ac"], ["ababac"], ["", ""], "ababac"),
        (["x", "\n", "\n"], ["\n\n"], ["x", "", ""], "\n\n"),
        (["ab"], ["b", "ab"], [""], "ab"),
        (["ab", "c"], ["abc", "b"], ["a", ""], "b"),
    ],
)
def test_stop_texts_over_token_boundaries(
    pieces: list[str], stops: list[str], shown: list[str], matched: str | None
) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == shown
    assert matcher.matched == matched


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("xEN"), matcher.flush(), matcher.matched) == ("x", "EN", None)

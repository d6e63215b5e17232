"""Ids to text: characters over several tokens, spaces at the start, stop sequences, finish reasons."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.text.generated import ENDS_OF_THE_MODEL, Detokeniser, Ends, FinishReason, GeneratedText
from router.text.tokenizer import REPLACEMENT, LonePieces, ModelTokenizer
from tests.router.doubles import EOS, byte_tokenizer, bytes_to_characters, without_mark, word_tokenizer
from tests.running import ROOT

DEMO = ROOT / "server" / "demo"
TOKENIZER = byte_tokenizer()


def pieces(text: bytes, prompt: bytes = b"a prompt") -> list[str]:
    detokeniser = Detokeniser(TOKENIZER, list(prompt))
    return [*(detokeniser.push(byte) for byte in text), detokeniser.flush()]


def generate(
    ids: list[int],
    *,
    stop: tuple[str, ...] = (),
    max_new_tokens: int = 100,
    tokenizer: ModelTokenizer = TOKENIZER,
    ends: Ends = ENDS_OF_THE_MODEL,
) -> tuple[GeneratedText, list[str], FinishReason | None]:
    """Push until the end: the state, the shown texts, the reason."""
    generated = GeneratedText(tokenizer, [1, 2], stop, max_new_tokens, ends)
    shown = []
    for id in ids:
        text, reason = generated.push(id)
        shown.append(text)
        if reason:
            return generated, shown, reason
    return generated, shown, None


def test_character_comes_out_when_its_last_byte_is_there() -> None:
    assert pieces("é🙂!".encode()) == ["", "é", "", "", "", "🙂", "!", ""]


def test_bytes_that_never_become_text_are_not_held_for_ever() -> None:
    got = pieces(b"\xff" * 20 + b"ok")
    assert "".join(got) == REPLACEMENT * 20 + "ok"
    assert any(got[:10])


def test_prompt_that_ends_in_a_replacement_character_is_not_repeated() -> None:
    assert pieces(b"yes", prompt="secret \ufffd".encode()) == ["y", "e", "s", ""]


@given(st.text(), st.text(min_size=1))
def test_pieces_add_up_to_the_text(text: str, prompt: str) -> None:
    got = pieces(text.encode(), prompt.encode())
    assert "".join(got) == text
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(got)


@given(st.binary(max_size=40))
def test_pieces_of_any_bytes_are_what_all_ids_at_once_would_give(garbage: bytes) -> None:
    generated, _, _ = generate([*garbage, ord("a")], max_new_tokens=len(garbage) + 1)
    if len(garbage) < 8:  # longer runs of garbage may be given out before their last byte
        assert generated.text == TOKENIZER.decode([*garbage, ord("a")])
        if garbage:
            assert generate([*garbage], max_new_tokens=len(garbage))[0].text == TOKENIZER.decode([*garbage])


# ---------------------------------------------------------------------------- tokens that are looked up, not decoded


def tokenizer_of(decoder: Any, *words: str) -> ModelTokenizer:
    """One token for each word; the last is special, the one before it was added."""
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoder
    tokenizer.add_tokens(["<added>"])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer.of(tokenizer, frozenset({len(words) + 1}))


def byte_words(*words: bytes) -> list[str]:
    return ["".join(bytes_to_characters()[byte] for byte in word) for word in words]


def fallback(*, spaces: int) -> Any:
    """The decoder of Llama 2 and its kin."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", spaces, 0)]
    return decoders.Sequence(parts)


SMILE = "🙂".encode()
PARTS = (b"A", b" a", b"  ", "é".encode(), SMILE, SMILE[:2], SMILE[2:], b"\xff", b"x\xe2", b"\x82y")
WORDS = ("▁", "▁▁", "▁a", "b", "▁é🙂", REPLACEMENT, "<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x20>")
LOCAL = {
    "byte level": tokenizer_of(decoders.ByteLevel(), *byte_words(*PARTS)),
    "fallback": tokenizer_of(fallback(spaces=1), *WORDS),
    "fallback, many spaces": tokenizer_of(fallback(spaces=3), *WORDS),
    "fallback, no strip": tokenizer_of(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), *WORDS),
    "metaspace": tokenizer_of(decoders.Metaspace(), *WORDS),
    "metaspace, never": tokenizer_of(decoders.Metaspace(prepend_scheme="never"), *WORDS),
}
OTHERS = {
    "none": None,
    "word piece": decoders.WordPiece(),
    "suffix": decoders.BPEDecoder("▁"),
    "pattern": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁b", "c")]),
    "strip at the end": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
}


def pieces_of(tokenizer: ModelTokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    detokeniser = Detokeniser(tokenizer, prompt)
    return [*map(detokeniser.push, ids), detokeniser.flush()]


def without_lookups(tokenizer: ModelTokenizer) -> ModelTokenizer:
    careful = ModelTokenizer(tokenizer.tokenizer, tokenizer.special_ids, tokenizer.eos_ids)
    vars(careful)["lone_pieces"] = defaultdict(str)
    return careful


@pytest.mark.parametrize("kind", LOCAL)
@given(st.data())
def test_looked_up_tokens_are_what_decoding_them_among_others_gives(kind: str, data: st.DataObject) -> None:
    tokenizer = LOCAL[kind]
    num_ids = tokenizer.tokenizer.get_vocab_size() - 1  # the special one never gets this far
    ids = st.lists(st.integers(0, num_ids - 1), max_size=20)
    prompt, generated = data.draw(ids | st.just([num_ids])), data.draw(ids)
    assert pieces_of(without_lookups(tokenizer), prompt, generated) == pieces_of(tokenizer, prompt, generated)


@pytest.mark.parametrize("kind", LOCAL)
def test_ordinary_words_are_looked_up(kind: str) -> None:
    pieces = LonePieces(LOCAL[kind].tokenizer)
    assert any(pieces[id] for id in range(5))


@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_is_looked_up_where_a_decoder_looks_at_neighbours(kind: str) -> None:
    tokenizer = tokenizer_of(OTHERS[kind], *WORDS)
    assert not any(LonePieces(tokenizer.tokenizer)[id] for id in range(len(WORDS)))


# ----------------------------------------------------------------------------------------------------------- spaces


def test_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start_of_a_text() -> None:
    tokenizer = word_tokenizer("?", "▁Hello", "▁world")
    assert Detokeniser(tokenizer, [1]).push(2) == " world"
    assert Detokeniser(tokenizer, []).push(2) == "world"


def test_bytes_that_the_end_token_cuts_off_are_neither_in_the_text_nor_in_the_stream() -> None:
    cut = "hi🙂".encode()[:-2]
    generated, shown, _ = generate([*cut, EOS])
    assert (generated.text, shown) == ("hi", ["h", "i", "", "", "</s>"])
    generated, shown, _ = generate([*cut], max_new_tokens=len(cut))
    assert (generated.text, shown) == (f"hi{REPLACEMENT}", ["h", "i", "", REPLACEMENT])


def test_whole_characters_of_a_token_do_not_wait_for_its_last() -> None:
    tokenizer = LOCAL["byte level"]
    cut, rest, end = PARTS.index(b"x\xe2"), PARTS.index(b"\x82y"), len(PARTS) + 1
    assert generate([cut, end], tokenizer=tokenizer)[:2][1] == ["x", "</s>"]
    assert generate([cut, end], tokenizer=tokenizer)[0].text == "x"
    generated, shown, _ = generate([cut, rest, end], tokenizer=tokenizer)
    assert "".join(shown[:-1]) == generated.text == tokenizer.decode([cut, rest])


@pytest.mark.parametrize("kind", [*LOCAL, *OTHERS])
@given(st.data())
def test_text_is_what_the_stream_shows_of_all_but_special_tokens(kind: str, data: st.DataObject) -> None:
    """Whatever characters the tokens cut, wherever special tokens stand, and however the request ends."""
    tokenizer = LOCAL.get(kind) or tokenizer_of(OTHERS[kind], *WORDS)
    num_ids = tokenizer.tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, num_ids - 1), min_size=1, max_size=20))
    if data.draw(st.booleans()):  # special tokens need not be ends
        tokenizer = ModelTokenizer(tokenizer.tokenizer, tokenizer.special_ids, frozenset({0}))
    stop = tuple(
        data.draw(st.lists(st.sampled_from(["a", " b", "é", "🙂", REPLACEMENT, "A\ufffd", "</s>"]), max_size=2))
    )
    generated, shown, reason = generate(
        ids, stop=stop, tokenizer=tokenizer, max_new_tokens=data.draw(st.integers(1, len(ids)))
    )
    assert reason is not None
    pairs = zip(ids[: generated.num_tokens], shown, strict=True)
    assert "".join(text for id, text in pairs if id not in tokenizer.special_ids) == generated.text
    if reason is FinishReason.STOP_SEQUENCE and ids[generated.num_tokens - 1] not in tokenizer.special_ids:
        assert generated.text.endswith(stop) or any(id in tokenizer.special_ids for id in ids)


def test_length_outranks_eos_outranks_stop() -> None:
    assert generate([*b"ab", EOS], max_new_tokens=3)[2] is FinishReason.LENGTH
    assert generate([*b"ab", EOS], stop=("</s>",))[2] is FinishReason.EOS_TOKEN
    assert generate(list(b"abc"), stop=("b",), max_new_tokens=2)[2] is FinishReason.LENGTH
    assert generate(list(b"abc"), stop=("b",))[2] is FinishReason.STOP_SEQUENCE


def test_elsewhere_than_on_tgi_s_routes_a_text_is_complete_with_its_end_token() -> None:
    ends = Ends(shows_stop=False)
    assert FinishReason.EOS_TOKEN is generate([*b"ab", EOS], ends=ends, max_new_tokens=3)[2]
    assert FinishReason.LENGTH is generate([*b"abc", EOS], ends=ends, max_new_tokens=3)[2]


def test_ignored_end_tokens_are_shown_but_end_nothing() -> None:
    generated, shown, reason = generate([*b"a", EOS, *b"b", EOS, *b"c"], ends=Ends(ignores_eos=True), max_new_tokens=5)
    assert (["a", "</s>", "b", "</s>", "c"], FinishReason.LENGTH) == (shown, reason)
    assert generated.text == "abc"


def test_further_tokens_end_a_text() -> None:
    ends = Ends(stop_ids=frozenset({98, EOS}))
    assert ("ab", FinishReason.STOP_SEQUENCE) == _ending(list(b"abc"), ends)
    assert ("a", FinishReason.EOS_TOKEN) == _ending([97, EOS, 98], ends)
    assert ("a", FinishReason.STOP_SEQUENCE) == _ending([97, EOS, 98], replace(ends, ignores_eos=True))


def test_nothing_but_its_length_ends_a_text_of_too_few_tokens() -> None:
    ends = Ends(stop_ids=frozenset({98}), min_tokens=4)
    assert ("abab", FinishReason.STOP_SEQUENCE) == _ending(list(b"abababab"), ends)
    assert ("x.y.", FinishReason.STOP_SEQUENCE) == _ending(list(b"x.y.z."), ends, stop=(".",))
    assert ("x.yz.", FinishReason.STOP_SEQUENCE) == _ending(list(b"x.yz."), ends, stop=(".",))
    assert ("x", FinishReason.LENGTH) == _ending([120, EOS], ends, max_new_tokens=2)
    assert (".x", None) == _ending(list(b".x"), ends, stop=(".",))


def _ending(ids: list[int], ends: Ends, **more: Any) -> tuple[str, FinishReason | None]:
    generated, _, reason = generate(ids, ends=ends, **more)
    return generated.text, reason


def test_stop_sequence_inside_a_token_cuts_what_follows_it() -> None:
    tokenizer = word_tokenizer("?", "▁wait.Then")
    generated, shown, reason = generate([1], stop=("t.",), tokenizer=tokenizer)
    assert reason is FinishReason.STOP_SEQUENCE
    assert generated.text.endswith("wait.") and shown[-1].endswith("wait.")


def test_earliest_match_of_several_stop_sequences_counts() -> None:
    tokenizer = word_tokenizer("?", "▁abcdef")
    assert generate([1], stop=("def", "bc"), tokenizer=tokenizer)[0].text.endswith("abc")


@given(st.text("ab🙂", max_size=30), st.lists(st.text("ab🙂", min_size=1, max_size=9), min_size=1, max_size=3))
def test_stop_search_agrees_with_a_plain_search(text: str, stop: list[str]) -> None:
    ends = [text.find(one) + len(one) for one in stop if one in text]
    generated, shown, reason = generate(list(text.encode()), stop=tuple(stop))
    assert (reason is not None) == bool(ends)
    assert "".join(shown) == generated.text == text[: min(ends, default=None)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_end_of_the_program_is_no_error_of_the_tokenizer(error: BaseException) -> None:
    ended = ModelTokenizer(Mock(decode=Mock(side_effect=error)), frozenset(), frozenset())
    with pytest.raises(type(error)):
        ended.decode([1])


def model_folder(folder: Path, **files: object) -> str:
    TOKENIZER.tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_eos_ids_of_all_files_count(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    loaded = ModelTokenizer.load(folder)
    assert loaded.eos_ids == {7, 8, 9, EOS}
    assert loaded.special_ids == {EOS}


def test_infinity_in_a_config_is_as_transformers_writes_it(tmp_path: Path) -> None:
    """Mamba-2's `time_step_limit` is [0.0, Infinity], which is no JSON but Python's."""
    loaded = ModelTokenizer.load(model_folder(tmp_path, config={"time_step_limit": [0.0, math.inf], "eos_token_id": 9}))
    assert 9 in loaded.eos_ids


def test_saved_length_limit_does_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.tokenizer.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = ModelTokenizer.load(str(tmp_path))
    assert loaded.encode("abcdef") == list(b"abcdef")
    assert loaded.encode("a") == list(b"a")


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', "<html>", "[" * 100_000, '{"model": "\\ud800"}'])
def test_broken_tokenizer_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not"):
        ModelTokenizer.load(str(tmp_path))


BROKEN_PARTS: list[tuple[str, object]] = [
    ("model", value) for value in ([], {}, 3, None, "BPE", {"type": "BPE"}, {"type": "None"}, {"type": [], "vocab": {}})
] + [
    (f"model.{name}", value)
    for name in ("vocab", "merges")
    for value in (3, "a", [3], {"a": "b"}, {"a": -1}, {"a": 1.5}, [["a"]], ["a b c"])
] + [
    (name, value)
    for name in ("added_tokens", "decoder", "pre_tokenizer", "normalizer", "post_processor")
    for value in (3, "a", [3], {"type": 3}, {"type": "nobody"})
]  # fmt: skip


@pytest.mark.parametrize(("part", "value"), BROKEN_PARTS)
def test_a_tokenizer_with_a_broken_part_is_refused_by_name(tmp_path: Path, part: str, value: object) -> None:
    content = json.loads(TOKENIZER.tokenizer.to_str())
    outer, _, inner = part.partition(".")
    (content[outer] if inner else content)[inner or outer] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer that can be used: its vocabulary"):
        ModelTokenizer.load(str(tmp_path))


@pytest.mark.parametrize("value", ["2", [[2]], -1, 2.0, True, {"id": 2}, [2, None], 2**31])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_end_tokens_that_are_no_ids_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"/{name}\.json says eos_token_id .*, which must be a token id"):
        ModelTokenizer.load(model_folder(tmp_path, **{name: {"eos_token_id": value}}))


def test_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_pretrained"):
        ModelTokenizer.load(str(tmp_path))


@pytest.mark.parametrize(
    "declared",
    [
        {"eos_token": "</s>"},
        {"eos_token": {"content": "</s>", "lstrip": False}},
        {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}},
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("is_added", [True, False])
def test_what_companions_call_special_is(declared: dict[str, Any], file: str, is_added: bool, tmp_path: Path) -> None:
    """Though tokenizer.json says nothing of it: it is one token of a prompt, and not in the text of an answer."""
    without_mark("</s>", tmp_path, is_added=is_added)
    (tmp_path / file).write_text(json.dumps(declared | {"pad_token": "."}))
    loaded = ModelTokenizer.load(str(tmp_path))
    usual = ModelTokenizer.load(str(DEMO))
    assert usual.special_ids == loaded.special_ids and "Hi." == loaded.decode(loaded.encode_plain("Hi.</s>"))
    assert usual.encode("Hi.</s>\nyou") == loaded.encode("Hi.</s>\nyou")


def test_what_companions_call_special_and_nobody_knows_is_left_out(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    odd = {"eos_token": "<nowhere>", "bos_token": 5, "added_tokens_decoder": {"9": "x", "8": {"special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(odd))
    usual, loaded = ModelTokenizer.load(str(DEMO)), ModelTokenizer.load(str(tmp_path))
    assert usual.special_ids == loaded.special_ids and usual.encode("<nowhere>") == loaded.encode("<nowhere>")


def test_an_end_token_that_is_not_special_is_not_in_the_text_of_other_routes_than_tgis(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 202}))
    tokenizer = ModelTokenizer.load(str(tmp_path))
    ids = [*tokenizer.encode_plain("Hi."), 202]
    for shows_stop, ignores_eos, text in ((False, False, "Hi."), (False, True, "Hi.\n"), (True, False, "Hi.\n")):
        generated = GeneratedText(tokenizer, [5], (), len(ids), Ends(shows_stop=shows_stop, ignores_eos=ignores_eos))
        for id in ids:
            generated.push(id)
        assert text == generated.text


@pytest.mark.parametrize(
    ("min_tokens", "text", "other_text"),
    [
        (4, "one", "one--"),
        (5, "one-", "one--"),
        (6, "one--two", "one--two--"),
    ],
)
def test_a_stop_sequence_may_begin_before_the_least_number_of_tokens(
    min_tokens: int, text: str, other_text: str
) -> None:
    """What of it is out by then stays. The second is TGI's."""
    tokenizer = byte_tokenizer()
    for shows_stop, expected in ((False, text), (True, other_text)):
        generated = GeneratedText(tokenizer, [1], ("--",), 99, Ends(min_tokens=min_tokens, shows_stop=shows_stop))
        ids = iter(tokenizer.encode("one--two--three"))
        while generated.push(next(ids))[1] is None:
            pass
        assert expected == generated.text


def test_sequences_that_overlap_at_the_least_number_of_tokens_are_found() -> None:
    tokenizer = byte_tokenizer()
    generated = GeneratedText(tokenizer, [1], ("aXa",), 99, Ends(min_tokens=4, shows_stop=False))
    ids = iter(tokenizer.encode("aXaXaXa"))
    while generated.push(next(ids))[1] is None:
        pass
    assert ("aXa", 5) == (generated.text, generated.num_tokens)

"""What llguidance says of texts: for tokenizers of every kind, and where grammars are wrong or cost too much."""

from __future__ import annotations

import importlib.metadata
import json
import random
from base64 import b64decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from router.grammars import matcher as matcher_module
from router.grammars.matcher import MOST_DRAFTED, GrammarError, Matchers, TextMatcher, cause, mask_of
from router.sandbox import MOST_ANSWER_BYTES
from router.scheduling.grammar import Continuation, Grammar, GrammarKind, Mask
from router.text.tokenizer import ModelTokenizer
from tests.router.doubles import byte_tokenizer, without_mark, word_tokenizer
from tests.running import ROOT
from tests.system.schemas import random_schema

DEMO = ROOT / "server" / "demo"
A, B, C, EOS = 68, 69, 70, 2  # in its tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "größe": {"enum": ["日本", 'a "b"', 1]}},
    "required": ["name", "größe"],
    "additionalProperties": False,
}


def llama_tokenizer() -> ModelTokenizer:
    """Pieces with `▁` for a space, and a token for each byte that has no piece."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz_", "▁", '"', "{", "}"]
    vocab = {word: id for id, word in enumerate([*words, "▁a", '▁"', '":', "na"])}
    merges = [("▁", "a"), ("▁", '"'), ("n", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["</s>"])
    return ModelTokenizer.of(tokenizer, frozenset({len(vocab)}))


def metaspace_tokenizer() -> ModelTokenizer:
    """Pieces alone, as T5 has them."""
    characters = [*'abcdefghijklmnopqrstuvwxyz_"{}:,0123456789', "▁", "ö", "ß", "日", "本", "\\"]
    return word_tokenizer("<unk>", *characters, '▁"', "▁a", '":', "name")


KINDS: dict[str, Callable[[], ModelTokenizer]] = {
    "bytes": byte_tokenizer,
    "demo": lambda: ModelTokenizer.load(str(DEMO)),
    "fallback": llama_tokenizer,
    "metaspace": metaspace_tokenizer,
}


def made(tokenizer: ModelTokenizer, folder: Path, padding: int = 70) -> Matchers:
    """Matchers for a model whose vocabulary is larger than the tokenizer's."""
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.tokenizer.get_vocab_size() + padding
    return Matchers(str(folder / "tokenizer.json"), size, sorted(tokenizer.eos_ids))


def read(answer: dict[str, Any]) -> Continuation:
    return Continuation.read(json.loads(json.dumps(answer)))


def allowed(answer: dict[str, Any], size: int) -> list[int]:
    mask = read(answer).mask
    if mask.allowed is not None:
        return list(mask.allowed)
    if mask.forbidden is not None:
        return [id for id in range(size) if id not in mask.forbidden]
    assert mask.bits is not None
    return [id for id in range(min(size, 8 * len(mask.bits))) if mask.bits[id // 8] >> id % 8 & 1]


def drawn(matchers: Matchers, grammar: Grammar, size: int, eos: Sequence[int], seed: int) -> list[int]:
    """A random text of the grammar with its end token, or a part of one."""
    rng, text, tokens = random.Random(seed), matchers.begin(grammar), []
    for _ in range(300):
        answer = text.go_on()
        tokens += answer["forced"]
        tokens.append(rng.choice(allowed(answer, size)))
        if tokens[-1] in eos:
            break
        text.take(tokens[-1:])
    return tokens


def masks_of(text: TextMatcher, tokens: Sequence[int], rng: random.Random | None = None) -> list[Mask]:
    """What may come at each place of the text, found one by one, or with drafts that rng disturbs and shortens."""
    masks, came = list[Mask](), list[int]()
    while len(masks) < len(tokens):
        draft = drafted(tokens[len(masks) :], rng) if rng else []
        found = read(text.go_on(came, draft))
        assert not (found.forced and found.drafted)
        masks += [Mask(allowed=(token,)) for token in found.forced]
        left = list(tokens[len(masks) :])
        num_right = next((place for place, guess in enumerate(draft) if draft[: place + 1] != left[: place + 1]), 99)
        rows = [found.mask, *found.drafted][: 1 + num_right]
        came = left[: rng.randint(1, len(rows))] if rng else left[:1]
        masks += rows[: len(came)]
    return masks


def drafted(right: Sequence[int], rng: random.Random) -> list[int]:
    """A draft of any length, half of the time with a wrong guess."""
    draft = list(right[: rng.randint(0, 20)])
    if draft and rng.random() < 0.5:
        draft[rng.randrange(len(draft))] = rng.choice([A, EOS, rng.randrange(3000), -1])
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_keeps_to_a_schema(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    matchers, size = made(tokenizer, tmp_path), tokenizer.tokenizer.get_vocab_size()
    for seed in range(5):
        tokens = drawn(
            matchers, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), size + 70, [*tokenizer.eos_ids], seed
        )
        assert tokens[-1] in tokenizer.eos_ids and max(tokens) < size  # nothing of the padding is ever allowed
        jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), SCHEMA)


@pytest.mark.parametrize("kind", ["demo", "fallback"])
def test_forced_tokens_are_those_that_the_tokenizer_would_write(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    text = '{"name": "a banana", "other_key": "the little fox walked along the river"}'
    grammar = Grammar(GrammarKind.LARK, f"start: {json.dumps(text)}")
    answer = made(tokenizer, tmp_path).begin(grammar).go_on()
    assert tokenizer.encode_plain(text) == answer["forced"]
    assert [*tokenizer.eos_ids] == answer["allowed"]


def test_all_end_tokens_end_a_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(str(DEMO))
    tokenizer.tokenizer.save(str(tmp_path / "tokenizer.json"))
    answer = Matchers(str(tmp_path / "tokenizer.json"), 2048, [2, 1]).begin(Grammar(GrammarKind.REGEX, "a?")).go_on()
    assert {1, 2, tokenizer.encode_plain("a")[0]} == set(answer["allowed"])


def test_a_smaller_vocabulary_than_the_tokenizer_s_is_kept_to(tmp_path: Path) -> None:
    matchers = made(byte_tokenizer(), tmp_path, padding=-157)  # 0 … 99 are left, and no end token
    assert max(allowed(matchers.begin(Grammar(GrammarKind.REGEX, ".*")).go_on(), 100)) == 99
    with pytest.raises(GrammarError, match="a token that the model does not have"):
        matchers.begin(Grammar(GrammarKind.REGEX, "zzz")).go_on()
    with pytest.raises(GrammarError, match="no token of the model can come next"):
        matchers.begin(Grammar(GrammarKind.REGEX, "[y-z]b")).go_on()


def test_a_grammar_that_no_token_begins_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="no token of the model can come next"):
        made(metaspace_tokenizer(), tmp_path).begin(Grammar(GrammarKind.REGEX, "[#%]a")).go_on()


@pytest.fixture(scope="module")
def demo() -> Matchers:
    return Matchers(str(DEMO / "tokenizer.json"), 2048, [2])


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, "a(?=b)", "look-around"),
        (GrammarKind.REGEX, "(" * 30000 + ")" * 30000, ""),
        (GrammarKind.REGEX, ".*" * 500, "it is too complex"),
        (GrammarKind.JSON_SCHEMA, "{", "EOF while parsing"),
        (GrammarKind.JSON_SCHEMA, '{"type": "frob"}', "Invalid type: frob"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "Unimplemented keys"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://localhost/x"}', "does not fetch"),
        (GrammarKind.JSON_SCHEMA, '{"a":' * 500 + "1" + "}" * 500, "recursion limit"),
        (GrammarKind.LARK, 'start: "a" b', 'unknown name: "b"'),
        (GrammarKind.LARK, "", "Empty grammar"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_grammar_is_refused_with_a_short_sentence(
    demo: Matchers, kind: GrammarKind, text: str, sentence: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        demo.begin(Grammar(kind, text)).go_on()
    assert sentence in str(caught.value)
    assert 0 < len(str(caught.value)) < 220 and not {"\n", "error: "} & {str(caught.value)[:7], *str(caught.value)}


@pytest.mark.parametrize(
    "regex",
    ["a{1000000000}", "(a|aa){1000}b", "(.*a){25}.{25}", "[a-z]{1,100000}", "(a*)*b", "((a{0,100}){0,100}b){0,9}"],
)
def test_an_explosive_expression_is_answered_or_refused(demo: Matchers, regex: str) -> None:
    try:
        answer = demo.begin(Grammar(GrammarKind.REGEX, regex)).go_on()
    except GrammarError:
        return
    assert len(answer["forced"]) <= 4096


def test_a_text_that_leaves_its_grammar_is_noticed(demo: Matchers) -> None:
    text = demo.begin(Grammar(GrammarKind.REGEX, "[0-9]+"))
    with pytest.raises(GrammarError):
        text.take([94])


def test_texts_of_one_grammar_do_not_disturb_each_other(demo: Matchers) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]c[de]")
    first, second = demo.begin(grammar), demo.begin(grammar)
    first.take([68])
    first.go_on()
    assert {68, 69} <= set(second.go_on()["allowed"])


def test_masks_have_their_shortest_form() -> None:
    bits = np.zeros(300, dtype=np.uint8)
    bits[7] = 2
    assert {"allowed": [57]} == mask_of(bits.tobytes(), 2400)
    assert {"forbidden": [57]} == mask_of((255 - bits).tobytes(), 2400)
    bits[::2] = 170
    found = mask_of(bits.tobytes(), 2400)
    assert bits.tobytes() == b64decode(found["bits"])


def test_an_error_says_nothing_of_llguidance_s_settings() -> None:
    assert "it is too complex" == cause("lexer failed; either increase limits.initial_lexer_fuel or disable it")
    assert 202 == len(cause("x" * 5000))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_mask_of_any_tokenizer(kind: str, tmp_path: Path) -> None:
    tokenizer, grammar = KINDS[kind](), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    matchers, size = made(tokenizer, tmp_path), tokenizer.tokenizer.get_vocab_size() + 70
    for seed in range(5):
        tokens = drawn(matchers, grammar, size, [*tokenizer.eos_ids], seed)
        expected = masks_of(matchers.begin(grammar), tokens)
        assert expected == masks_of(matchers.begin(grammar), tokens, random.Random(seed))


@pytest.mark.parametrize("seed", range(25))
def test_drafts_change_no_mask_of_random_schemas(demo: Matchers, seed: int) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(random.Random(1000 + seed))))
    tokens = drawn(demo, grammar, 2048, [EOS], seed)
    expected = masks_of(demo.begin(grammar), tokens)
    for other in range(4):
        assert expected == masks_of(demo.begin(grammar), tokens, random.Random(other))


@pytest.mark.parametrize("guess", [B, C, EOS, 2048, -1])
@pytest.mark.parametrize("place", range(6))
def test_a_draft_is_cut_where_its_grammar_forbids_it(demo: Matchers, place: int, guess: int) -> None:
    """Where it is only wrong, the masks are those behind wrong guesses. The text goes on with what is right."""
    grammar = Grammar(GrammarKind.REGEX, "([ab]{2}|ba[xy])[ab]{2}([ab]{3}|[ab]b[xy]{2})[ab]{9}")
    right = [A] * 6
    draft = [*right[:place], guess, *right[place + 1 :]]
    text = demo.begin(grammar)
    found = read(text.go_on((), draft))
    cut = draft if guess == B else right[:place]
    assert masks_of(demo.begin(grammar), [*cut, A]) == [found.mask, *found.drafted]
    expected = masks_of(demo.begin(grammar), right)[1:]
    assert expected == [read(text.go_on([token])).mask for token in right[:-1]]


def test_equal_masks_are_one_object(demo: Matchers) -> None:
    found = read(demo.begin(Grammar(GrammarKind.REGEX, "[ab]{9}[xy]{9}")).go_on((), [A, B] * 4 + [A]))
    assert 9 == len(found.drafted)
    assert found.drafted[0] is found.drafted[3]


def test_a_draft_ends_before_what_ends_the_text(demo: Matchers) -> None:
    assert 2 == len(demo.begin(Grammar(GrammarKind.REGEX, "[ab]{3}")).go_on((), [A, B, A, EOS])["drafted"])
    assert 3 == len(demo.begin(Grammar(GrammarKind.REGEX, "[ab]{3,9}")).go_on((), [A, B, A, EOS, A])["drafted"])
    assert [] == demo.begin(Grammar(GrammarKind.REGEX, "a?")).go_on((), [EOS])["drafted"]


def test_forced_tokens_in_a_draft_are_all_guessed_or_end_it(demo: Matchers) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab](acac)[ab]{9}")
    forced, behind = demo.begin(grammar).go_on([A])["forced"], C
    assert len(forced) > 1
    found = read(demo.begin(grammar).go_on((), [A, *forced, behind, B]))
    assert [Mask(allowed=(token,)) for token in forced] == list(found.drafted[: len(forced)])
    assert 3 + len(forced) == len(found.drafted)
    for draft in ([A], [A, *forced[:-1]], [A, *forced[:-1], B, behind]):
        assert [] == demo.begin(grammar).go_on((), draft)["drafted"]


def test_tokens_that_end_within_forced_ones_have_the_rest_forced(demo: Matchers) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab](acac)[ab]{9}")
    forced = demo.begin(grammar).go_on([A])["forced"]
    for place in range(1 + len(forced)):
        answer = demo.begin(grammar).go_on([A, *forced[:place]], [*forced[place:], C])
        assert forced[place:] == answer["forced"]
        assert ("drafted" in answer) == (place == len(forced))


@pytest.mark.parametrize("has_drafted", [True, False])
def test_what_costs_one_text_too_much_fails_no_other_of_its_grammar(demo: Matchers, has_drafted: bool) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a[ab]*|b(a|aa){1000}b")
    costly, other = demo.begin(grammar), demo.begin(grammar)
    assert 1 == len(other.go_on([A], [B])["drafted"])
    if has_drafted:
        assert [] == costly.go_on((), [B, A])["drafted"]
        assert {A, B} <= set(costly.go_on([A])["allowed"])
        assert "drafted" not in costly.go_on([A], [A])
        demo.begin(grammar).go_on((), [B, A])
    else:
        with pytest.raises(GrammarError, match="too many"):
            costly.go_on([B])
    assert {A, B} <= set(other.go_on([B, A])["allowed"])
    assert 1 == len(demo.begin(grammar).go_on([A], [A])["drafted"])


def test_a_draft_that_takes_too_long_is_cut(demo: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]{99}")
    assert MOST_DRAFTED == len(demo.begin(grammar).go_on((), [A] * 60)["drafted"])
    monkeypatch.setattr(matcher_module, "DRAFT_S", 0.0)
    assert 1 == len(demo.begin(grammar).go_on((), [A] * 60)["drafted"])


def test_where_few_tokens_are_left_few_guesses_are() -> None:
    mask, found = Mask(allowed=(A,)), Continuation((), Mask(allowed=(B,)), (Mask(allowed=(A,)), Mask(allowed=(B,))))
    assert [(), found.drafted[:1], found.drafted, found.drafted] == [found.at_most(n).drafted for n in range(4)]
    assert found is found.at_most(2)
    assert Continuation((C,), mask) == Continuation((C, A, B), found.mask).at_most(1)


def test_an_answer_with_a_draft_has_room_on_its_line() -> None:
    """With 250,000 tokens, in every form, where no two masks are equal."""
    rng = np.random.default_rng(0)
    for share in (0.0416, 0.5, 1 - 0.0416):
        bits = np.packbits(rng.random(250_000) < share).tobytes()
        assert (2 + MOST_DRAFTED) * len(json.dumps(mask_of(bits, 250_000))) < MOST_ANSWER_BYTES / 4


@pytest.mark.parametrize("seed", range(25))
def test_random_schemas_are_kept_to(demo: Matchers, seed: int) -> None:
    schema = random_schema(random.Random(1000 + seed))
    tokenizer = ModelTokenizer.load(str(DEMO))
    tokens = drawn(demo, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), 2048, [2], seed)
    assert 2 == tokens[-1]
    jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


def published() -> list[Path]:
    """JSON schemas that packages of the test environment carry."""
    names = [
        "jsonschema-specifications",
        "jsonschema",
        "openai",
        "huggingface-hub",
        "schemathesis",
        "jupyter",
        "nbformat",
    ]
    found = []
    for name in names:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [Path(str(file.locate())) for file in files if file.suffix == ".json" or "metaschemas" in file.parts]
    return [path for path in found if path.is_file() and b'"$schema"' in path.read_bytes()[:4000]]


def test_published_schemas_are_compiled_or_refused_for_a_reason(demo: Matchers) -> None:
    schemas = published()
    assert len(schemas) > 5
    refused = {}
    for path in schemas:
        try:
            demo.begin(Grammar(GrammarKind.JSON_SCHEMA, path.read_text())).go_on()
        except GrammarError as error:
            refused[path.name] = str(error)
    assert len(refused) < len(schemas)
    assert all(reason and "panic" not in reason for reason in refused.values())


@pytest.mark.parametrize("is_added", [True, False])
def test_tokens_that_companions_call_special_are_no_text(is_added: bool, tmp_path: Path) -> None:
    """As the router takes them: tokenizer.json says nothing of `<s>`, or that it is a word."""
    path = without_mark("<s>", tmp_path, is_added=is_added)
    grammar = Grammar(GrammarKind.REGEX, "[<s>]{3}")
    allowed = [
        Matchers(str(given), 2048, [2], special).begin(grammar).go_on()["allowed"]
        for given, special in ((DEMO / "tokenizer.json", ()), (path, ("<s>",)), (path, ()))
    ]
    assert 1 not in allowed[0] and allowed[0] == allowed[1]
    assert is_added or 1 in allowed[2]  # what is to be mended; llguidance has all that are added for no text

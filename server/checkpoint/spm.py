"""From a sentencepiece `tokenizer.model` to tokenizer.json, for models whose tokenizer is code in their repository.

Baichuan and ChatGLM ship such code, and it is never run here. What it wraps is a sentencepiece model (Kudo and
Richardson 2018, arXiv 1808.06226), which this module writes out as data that the `tokenizers` library reads: BPE with
the merges recovered from the scores, or Unigram, with the model's own normalizer. What a family's code adds around the
model is the table FAMILIES; what a repository adds is read from its JSON files.

The format is sentencepiece_model.proto of the sentencepiece library. A model is untrusted and may be of kinds that no
served model has: of words or characters, with a vocabulary restricted to a part (unused pieces), with spaces written
behind words, or with a denormalizer. Such a model is refused when it is read.

No library does this. Those that can read a tokenizer.model ignore what the model says of spaces, and apply its table of
characters otherwise or not at all. The sentencepiece library itself knows no added tokens, and nothing that goes around
a prompt. Of 2,985 texts, so many have other ids than those of sentencepiece, on each of the five BPE and two Unigram
models that `pytest -m formats -rP tests/server/checkpoint/test_spm.py -k no_library` trains (transformers 5.23,
tokenizers 0.23):

    this module                                      0      0      0      2      0       0      2
    transformers' LlamaTokenizer                   169  2,815  1,040    258  2,947   2,949  2,704
    transformers' TokenizersBackend              2,984      0  2,935  2,984  2,900   2,900  2,984
    transformers' SpmConverter                          fails on every BPE model     1,148  2,945
    transformers' LlamaConverter                        fails on every BPE model     2,630  2,703
    tokenizers' SentencePieceUnigramTokenizer           refuses every BPE model      1,429  2,505

Three points where `tokenizers` differs from sentencepiece are bridged:

* A normalizer is a table of what is replaced by what, and rules for spaces. The library's step for such a table,
  `Precompiled`, takes the *shortest* entry at the start of each grapheme and drops the rest of it, while sentencepiece
  takes the longest entry at each character. So every stretch that the table maps as one is first isolated by a
  separator and put through NFKC, which composes it; `Precompiled` then sees single characters. The table is read and
  the outcome is compared for every entry of it. Of nmt_nfkc's 225,276 entries 393 differ, all of rare letters (U+A7F1
  to U+A7F3, beyond U+FFFF).
* A user-defined piece splits the text without giving what follows a space of its own: it is matched after
  normalisation. The library normalises the piece, too, so the leading space is taken back where it is all the text.
* Sentencepiece merges characters that are no pieces themselves. Where such a character is one byte, its byte's id gets
  it as a second name.

Some differences stay. Measured on 10,008 generated strings, a published Baichuan vocabulary (133,120 pieces) gives
other ids for 14, all for the second reason, and on 818 source files for none. The models that the tests train give
others for the first reason only.

* The text of a control or added token (`</s>`) is that token, as with every tokenizer of transformers; sentencepiece
  spells it out. A text that is nothing but one user-defined piece gets no leading space.
* Pieces with a character of several bytes that is no piece itself are never made.
* Pieces of equal score merge by id; sentencepiece takes the leftmost first.
* In Unigram models the names of byte and control pieces (`<0x0A>`) are found in normalised text, and sums of scores are
  not rounded to float32.
* A run of byte tokens that is cut inside a character is decoded as one U+FFFD per byte, whole characters before it in
  the run included; sentencepiece keeps these. Unknown tokens are left out of texts, where it writes a mark.
* Decoding strips one leading space; sentencepiece strips one from each token until there is text, where the model
  removes extra spaces. No text encodes to such ids, unless it has the character that stands for a space.
"""

from __future__ import annotations

import json
import math
import operator
import struct
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as pb
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

SPACE = "▁"  # how sentencepiece writes a space inside pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # piece types of sentencepiece_model.proto
UNIGRAM, BPE = 1, 2  # model types
Piece = Any  # messages of sentencepiece_model.proto, which has no annotations
Model = Any


class SpmError(ValueError):
    """Why a sentencepiece model cannot be converted, as a part of a sentence."""


SEPARATOR = "\ufdd0"  # a noncharacter: no text has it, Unicode combines it with nothing
ALONE = "\ufdd1"  # another noncharacter; marks a plain word that is the whole text
STAND_INS = 0x10F000  # the first character for private use that stands in for what NFKC must not touch
MAX_PROTECTED = 32  # characters kept from NFKC: each costs two passes over every text
MAX_KEY_BYTES = 64  # of an entry of a normalizer's table; nmt_nfkc has 12
MAX_WALK = 4_000_000  # steps through such a table; nmt_nfkc, whose entries share their endings, takes 263,000
MAX_WRONG = 0.01  # of a normalizer's table; a rule of its own making would be wrong nearly everywhere
MAX_ID = 1 << 31  # the library counts in 32 bits
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFamily:
    """What a family's tokenizer code adds to its sentencepiece model."""

    appended: tuple[str, ...] = ()  # tokens whose ids follow the last piece, in this order
    # Those of them that are plain words: found only where nothing else stands between two tokens.
    alone: frozenset[str] = frozenset()
    prefix: tuple[str, ...] = ()  # tokens that stand before every prompt


# By config.json's model_type. ChatGLM2 lacks the four roles: there their ids are rows of the padded embedding.
FAMILIES: Mapping[str, TokenizerFamily] = {
    "chatglm": TokenizerFamily(
        appended=(
            *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        alone=frozenset({"sop", "eop"}),
        prefix=("[gMASK]", "sop"),
    ),
}


@dataclass(frozen=True)
class Companions:
    """The JSON files that lie beside a tokenizer.model; empty where one is absent."""

    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    added_tokens: Mapping[str, Any] = field(default_factory=dict)


def convert(data: bytes, model_type: str = "", companions: Companions | None = None) -> dict[str, str]:
    """Name and text of each file to write: tokenizer.json, and a tokenizer_config.json that names the EOS token.

    data: the bytes of tokenizer.model; model_type: the one in config.json. Raises SpmError.
    """
    model = parse(data)
    files = companions or Companions()
    _rename(model, files)
    family = FAMILIES.get(model_type, TokenizerFamily())
    extra = _extra_tokens(model, family, files)
    skeleton = Tokenizer(models.BPE())
    skeleton.normalizer = normalizer(model, family.alone)
    skeleton.decoder = _decoder(model, family.alone)
    document = json.loads(skeleton.to_str())
    document["added_tokens"] = _added_tokens(model, family, files, extra, skeleton.normalizer)
    document["post_processor"] = _post_processor(model, family, files, extra)
    document["model"] = _unigram(model, extra) if model.trainer_spec.model_type == UNIGRAM else _bpe(model, extra)
    settings = {"eos_token": _piece(model, model.trainer_spec.eos_id), **files.tokenizer_config}
    return {
        "tokenizer.json": json.dumps(document, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2),
    }


def _piece(model: Model, id: int) -> str | None:
    return model.pieces[id].piece if 0 <= id < len(model.pieces) else None


def _ids(model: Model, extra: Mapping[str, int]) -> dict[str, int]:
    return {piece.piece: id for id, piece in enumerate(model.pieces)} | dict(extra)


# Vocabulary


def _bpe(model: Model, extra: Mapping[str, int]) -> dict[str, Any]:
    ids = _ids(model, extra)
    # The vocabulary has second names for some ids. Only a document keeps them: a Tokenizer saves one name for each id.
    second = _byte_names(model, ids) if model.trainer_spec.byte_fallback else {}
    return {
        "type": "BPE",
        "unk_token": next(piece.piece for piece in model.pieces if piece.type == UNKNOWN),
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
        "vocab": ids | second,
        "merges": merges(model.pieces, second),
    }


def _byte_names(model: Model, ids: Mapping[str, int]) -> dict[str, int]:
    """Characters of one byte that occur in pieces and are none: sentencepiece merges them before it looks them up."""
    used = {character for piece in model.pieces if piece.type == NORMAL for character in piece.piece}
    return {c: ids[f"<0x{ord(c):02X}>"] for c in sorted(used) if ord(c) < 128 and c not in ids}


def merges(pieces: Iterable[Piece], single: Collection[str]) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, best first. single: characters that merge without being pieces.

    Sentencepiece ranks by the piece that is made and takes the leftmost first. Here each way has a rank of its own.
    That is the same unless two ways overlap, as in `ab a ba` for `aba`; then the right part is also how the piece
    begins, and that way is ranked first.
    """
    normal = sorted((-piece.score, id, piece.piece) for id, piece in enumerate(pieces) if piece.type == NORMAL)
    parts = {text for _, _, text in normal}.union(single)
    found: list[tuple[str, str]] = []
    for _, _, text in normal:
        ways = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in parts and text[i:] in parts]
        found += sorted(ways, key=lambda way: not text.startswith(way[1]))
    return found


def _unigram(model: Model, extra: Mapping[str, int]) -> dict[str, Any]:
    added = sorted(extra, key=lambda token: extra[token])
    if [extra[token] for token in added] != list(range(len(model.pieces), len(model.pieces) + len(added))):
        raise SpmError("the ids of its added tokens do not follow the pieces")
    return {
        "type": "Unigram",
        "unk_id": next(id for id, piece in enumerate(model.pieces) if piece.type == UNKNOWN),
        "vocab": [[piece.piece, piece.score] for piece in model.pieces] + [[token, 0.0] for token in added],
        "byte_fallback": model.trainer_spec.byte_fallback,
    }


# Special and added tokens


def _rename(model: Model, files: Companions) -> None:
    """Give reserved pieces the names that the files give their ids. Baichuan names the roles of a chat so."""
    for id, token in _listed_tokens(files):
        if id < len(model.pieces) and model.pieces[id].type in (UNKNOWN, CONTROL, USER_DEFINED):
            model.pieces[id].piece = token["content"]
    names = Counter(piece.piece for piece in model.pieces)
    if len(names) < len(model.pieces):
        raise SpmError(f"its files name a token as another piece: {names.most_common(1)[0][0]!r}")


def _extra_tokens(model: Model, family: TokenizerFamily, files: Companions) -> dict[str, int]:
    """The ids of tokens that are no pieces. Where a file gives a normal piece's id another name, the piece stands."""
    extra = {token: len(model.pieces) + number for number, token in enumerate(family.appended)}
    known = {piece.piece for piece in model.pieces}
    for id, token in _listed_tokens(files):
        content = token["content"]
        if id < len(model.pieces) or extra.get(content) == id:
            continue
        if content in known or content in extra or id in extra.values():
            raise SpmError(f"its files give the added token {content!r} an id ({id}) that does not fit")
        extra[content] = id
    return extra


def _listed_tokens(files: Companions) -> list[tuple[int, dict[str, Any]]]:
    """Id and properties of what added_tokens.json and added_tokens_decoder list."""
    listed: list[tuple[Any, Any]] = [(id, {"content": content}) for content, id in files.added_tokens.items()]
    listed += (files.tokenizer_config.get("added_tokens_decoder") or {}).items()
    for id, token in listed:
        is_id = str(id).isdecimal() and int(id) < MAX_ID
        if not is_id or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise SpmError(f"its files list an added token that is none: {id!r}")
    return [(int(id), token) for id, token in listed if token["content"]]


def _named_tokens(files: Companions) -> set[str]:
    """The texts that the configuration files name as special tokens."""
    found: set[str] = set()
    for settings in (files.tokenizer_config, files.special_tokens_map):
        more = settings.get("additional_special_tokens") or []
        values = [settings.get(name) for name in NAMED_TOKENS] + (more if isinstance(more, list) else [])
        contents = (value.get("content") if isinstance(value, dict) else value for value in values)
        found.update(content for content in contents if isinstance(content, str))
    return found


def _added_tokens(
    model: Model, family: TokenizerFamily, files: Companions, extra: Mapping[str, int], rule: Any
) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split into pieces. rule: the normalizer."""
    named = _named_tokens(files)
    listed = {(id, token["content"]): token for id, token in _listed_tokens(files)}
    ids = _ids(model, extra)
    special = {piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)}
    special |= (named & ids.keys()) | set(family.appended)
    special |= {content for (_, content), token in listed.items() if token.get("special")} & ids.keys()
    raw = special | {content for id, content in listed if ids.get(content) == id}
    normalized = (set(_user_defined(model, rule)) - raw) | family.alone
    added = [_added_token(content, ids, listed) for content in raw | normalized]
    flags = [{"normalized": token["content"] in normalized, "special": token["content"] in special} for token in added]
    return sorted(map(operator.or_, added, flags), key=lambda token: token["id"])


def _added_token(
    content: str, ids: Mapping[str, int], listed: Mapping[tuple[int, str], Mapping[str, Any]]
) -> dict[str, Any]:
    properties = listed.get((ids[content], content), {})
    flags = {name: bool(properties.get(name)) for name in ("single_word", "lstrip", "rstrip")}
    return {"id": ids[content], "content": content, **flags}


def _user_defined(model: Model, rule: Any) -> list[str]:
    """User-defined pieces that normalised text can have. Sentencepiece, too, finds none with a plain space in it."""
    pieces = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    return [piece for piece in pieces if rule.normalize_str(piece) == piece]


def _post_processor(
    model: Model, family: TokenizerFamily, files: Companions, extra: Mapping[str, int]
) -> dict[str, Any] | None:
    """A template with the tokens around a prompt, or None if there are none."""
    ids = _ids(model, extra)
    before = [*family.prefix, *_asked_for(model, files, "bos")]
    after = _asked_for(model, files, "eos")
    if not before and not after:
        return None
    for token in (*before, *after):
        if token not in ids:
            raise SpmError(f"its files put {token!r} around prompts, which has no id")
    single = [*map(_special, before), _sequence("A"), *map(_special, after)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, _sequence("B")],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (*before, *after)},
    }


def _asked_for(model: Model, files: Companions, name: str) -> list[str]:
    """The token of that name if tokenizer_config.json wants it around prompts."""
    if files.tokenizer_config.get(f"add_{name}_token") is not True:
        return []
    value = files.tokenizer_config.get(f"{name}_token") or files.special_tokens_map.get(f"{name}_token")
    content = value.get("content") if isinstance(value, dict) else value
    return [str(content or _piece(model, getattr(model.trainer_spec, f"{name}_id")))]


def _special(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _sequence(id: str) -> dict[str, Any]:
    return {"Sequence": {"id": id, "type_id": 0}}


# Decoder


def _decoder(model: Model, alone: Collection[str] = ()) -> decoders.Decoder:
    """The steps from pieces back to text. alone: as for `normalizer`."""
    spec = model.normalizer_spec
    steps: list[Any] = []
    if alone:  # the library decodes such a token as its normalised text, which it does not take for special
        steps.append(decoders.Replace(Regex(rf"{SPACE}?{_literal(ALONE)}{_any_of(alone)}"), ""))
    steps.append(decoders.Replace(SPACE, " "))
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if spec.escape_whitespaces and (spec.add_dummy_prefix or spec.remove_extra_whitespaces):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def parse(data: bytes) -> Model:
    """The model that these bytes hold, checked for what the conversion relies on. Raises SpmError."""
    try:
        model = pb.ModelProto.FromString(data)  # type: ignore[attr-defined]  # protobuf makes the class at import
    except DecodeError:
        raise SpmError("tokenizer.model is not a sentencepiece model") from None
    for is_wrong, problem in _problems(model):
        if is_wrong:
            raise SpmError(f"tokenizer.model {problem}")
    return model


def _problems(model: Model) -> Iterator[tuple[bool, str]]:
    """Each reason to refuse a model, and whether this one gives it."""
    types = Counter(piece.type for piece in model.pieces)
    spec = model.trainer_spec
    yield types[UNKNOWN] != 1, "is not a sentencepiece model: it has not one unknown piece"
    yield len({piece.piece for piece in model.pieces}) < len(model.pieces), "names a piece twice"
    yield not all(math.isfinite(piece.score) for piece in model.pieces), "has a score that is no number"
    yield spec.model_type not in (UNIGRAM, BPE), "is neither BPE nor Unigram"
    yield types[UNUSED] > 0, "has unused pieces"
    yield spec.treat_whitespace_as_suffix, "writes spaces behind words"
    yield bool(model.denormalizer_spec.precompiled_charsmap), "has a denormalizer"
    is_complete = {f"<0x{byte:02X}>" for byte in range(256)} <= {piece.piece for piece in model.pieces}
    yield spec.byte_fallback and not is_complete, "lacks byte pieces"


def normalizer(model: Model, alone: Collection[str] = ()) -> normalizers.Sequence:
    """The model's normalizer_spec as one sequence. alone: words to mark with ALONE where they are the whole text."""
    spec = model.normalizer_spec
    user_defined = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    steps: list[Any] = []
    shown: list[Any] = []
    prefix = _prefix(SPACE if spec.escape_whitespaces else " ", user_defined) if spec.add_dummy_prefix else []
    if spec.precompiled_charsmap:
        steps, shown = _charsmap_beside(spec.precompiled_charsmap, [text for text in user_defined if " " not in text])
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +(?= )"), ""))
        steps.append(normalizers.Replace(Regex(rf"[ {SPACE}]+\z" if spec.escape_whitespaces else r" +\z"), ""))
        steps += prefix
    else:  # first: a text of which nothing remains has it still
        steps = [*prefix, *steps]
    if alone:
        steps = [normalizers.Prepend(ALONE), _unless(ALONE, rf"(?!{_any_of(alone)}\z)"), *steps]
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence([*steps, *shown])


def _charsmap_beside(charsmap: bytes, kept: Collection[str]) -> tuple[list[Any], list[Any]]:
    """Steps that apply the table to all but the kept texts, and last steps, which bring some of these back."""
    longest_first = sorted(kept, key=len, reverse=True)
    steps = charsmap_steps(charsmap, longest_first)
    rule = normalizers.Sequence(steps)
    hide, show = _stand_ins([text for text in longest_first if rule.normalize_str(text) != text])
    return [*hide, *steps], show


def _prefix(space: str, user_defined: Collection[str]) -> list[Any]:
    """Steps that put a space before a text. The library also normalises user-defined pieces, which must not change."""
    steps = [normalizers.Prepend(space)]
    return [*steps, _unless(space, rf"(?={_any_of(user_defined)}\z)")] if user_defined else steps


def _unless(prepended: str, following: str) -> Any:
    """A step that takes back what was prepended. To insert at the start by an expression makes a later NFKC crash."""
    return normalizers.Replace(Regex(rf"\A{_literal(prepended)}{following}"), "")


def _stand_ins(texts: Iterable[str], first: int = STAND_INS) -> tuple[list[Any], list[Any]]:
    """Steps that put a private character in place of each text, and steps that put the texts back."""
    pairs = [(text, chr(first + number)) for number, text in enumerate(texts)]
    hide = [normalizers.Replace(text, stand_in) for text, stand_in in pairs]
    return hide, [normalizers.Replace(stand_in, text) for text, stand_in in pairs]


def charsmap_steps(charsmap: bytes, apart: Collection[str] = ()) -> list[Any]:
    """Steps that together replace as sentencepiece does: at each character the longest entry of the table.

    apart: texts that nothing after them may combine with, longest first. Raises SpmError if more than a hundredth of
    the table's entries would be replaced otherwise.
    """
    table = read_charsmap(charsmap)
    precompiled = normalizers.Precompiled(charsmap)
    isolate = normalizers.Replace(Regex(_isolating(table, apart)), SEPARATOR)
    join = normalizers.Replace(SEPARATOR, "")
    steps = [isolate, normalizers.NFKC(), precompiled, join]
    rule = normalizers.Sequence(steps)
    single = {c for c in table if len(c) == 1} | set(_changed_by_nfkc())
    protected = sorted(c for c in single if rule.normalize_str(c) != table.get(c, c))[:MAX_PROTECTED]
    hide, show = _stand_ins(protected, STAND_INS + 0x800)
    steps = [*hide, isolate, normalizers.NFKC(), *show, precompiled, join]
    rule = normalizers.Sequence(steps)
    wrong = sum(rule.normalize_str(key) != value for key, value in table.items())
    if wrong > MAX_WRONG * len(table):
        raise SpmError(f"tokenizer.model has a normalizer of its own making ({wrong} of {len(table)} entries differ)")
    return steps


def _changed_by_nfkc() -> Iterator[str]:
    characters = (chr(code) for code in range(0x80, 0x30000) if not 0xD800 <= code < 0xE000)
    return (c for c in characters if unicodedata.normalize("NFKC", c) != c)


def read_charsmap(charsmap: bytes) -> dict[str, str]:
    """What a table replaces by what. Raises SpmError for a damaged one.

    The bytes are a double-array trie over UTF-8 (github.com/s-yata/darts-clone) and then the values that it points to.
    """
    try:
        (size,) = struct.unpack_from("<I", charsmap)
        units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
        values = charsmap[4 + size :]
        return {key.decode(): values[at : values.index(0, at)].decode() for key, at in _entries(units)}
    except (struct.error, ValueError, IndexError):
        raise SpmError("tokenizer.model has a damaged normalizer") from None


def _entries(units: tuple[int, ...]) -> Iterator[tuple[bytes, int]]:
    """The key of each entry and where its value begins. A unit has a label in its low byte, or else a value."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for at, unit in enumerate(units):
        if not unit >> 31 and unit & 0xFF:
            children[at ^ (unit & 0xFF)].append(at)
    waiting = [(0, b"")]
    for _ in range(MAX_WALK):
        if not waiting:
            return
        at, key = waiting.pop()
        base = at ^ (units[at] >> 10 << ((units[at] & 0x200) >> 6))
        if units[at] >> 8 & 1:
            yield key, units[base] & 0x7FFFFFFF
        if len(key) > MAX_KEY_BYTES or base | 0xFF >= len(units):  # the library would look beyond the end
            break
        waiting += [(child, key + bytes([units[child] & 0xFF])) for child in children[base]]
    raise ValueError("the table goes in circles, or beyond its end")


def _isolating(table: Mapping[str, str], apart: Collection[str]) -> str:
    """A pattern for the empty string after what is replaced as one, and before marks that join what precedes."""
    endings: defaultdict[str, set[str]] = defaultdict(set)
    for key in table:
        if len(key) > 1:
            endings[key[0]].add(key[1:])
    several = _alternatives(endings)
    joining = _one_of({c for ends in endings.values() for end in ends for c in end})
    single = _one_of({key for key in table if len(key) == 1})
    whole = "|".join(filter(None, [*map(_literal, apart), several, single]))
    return rf"(?>(?:{whole})\K|[\s\S]\K(?=\p{{M}}|{joining}))"


def _alternatives(endings: Mapping[str, Collection[str]]) -> str:
    """A pattern for first characters with what may follow each: those followed by the same share one branch."""
    firsts: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    for first, rest in endings.items():
        firsts[frozenset(rest)].append(first)
    return "|".join(_one_of(characters) + _following(rest) for rest, characters in firsts.items())


def _following(rest: frozenset[str]) -> str:
    endings: defaultdict[str, set[str]] = defaultdict(set)
    for text in rest:
        if text:
            endings[text[0]].add(text[1:])
    return f"(?:{_alternatives(endings)}){'?' if '' in rest else ''}" if endings else ""


def _one_of(characters: Collection[str]) -> str:
    """A pattern for one of these characters, runs of them as ranges. It matches nothing if there are none."""
    parts: list[str] = []
    codes = sorted(map(ord, characters))
    for i, code in enumerate(codes):
        if i == 0 or codes[i - 1] != code - 1:
            start = code
        if i + 1 == len(codes) or codes[i + 1] != code + 1:
            parts.append(_escaped(chr(start)) + (f"-{_escaped(chr(code))}" if code > start else ""))
    return f"[{''.join(parts)}]" if parts else "(?!)"


def _escaped(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _any_of(texts: Collection[str]) -> str:
    """A pattern for any one of the texts."""
    return f"(?:{'|'.join(map(_literal, sorted(texts)))})"


def _literal(text: str) -> str:
    """A pattern for this very text."""
    return "".join(map(_escaped, text))

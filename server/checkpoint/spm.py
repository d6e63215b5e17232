"""From a sentencepiece `tokenizer.model` to tokenizer.json, for models whose tokenizer is code in their repository.

Baichuan and ChatGLM ship such code, and it is never run here. What it wraps is a sentencepiece model (Kudo and
Richardson 2018, arXiv 1808.06226), which this module writes out as data that the `tokenizers` library reads: BPE with
the merges recovered from the scores, or Unigram, with the model's own normalizer (`spm_normalizer.py`). What a family's
code adds around the model is the table FAMILIES; what a repository adds is read from its JSON files. What cannot be
converted is refused (`spm_model.py`).

No library does this. Those that can read a tokenizer.model ignore what the model says of spaces, and apply its table of
characters otherwise or not at all. The sentencepiece library itself knows no added tokens, and nothing that goes around
a prompt. `pytest -rP tests/server/test_spm.py -k no_library` counts for how many of 2,985 texts the ids differ from
those of sentencepiece, on each of the five BPE and two Unigram models that it trains (transformers 5.23, tokenizers
0.23):

    this module                                      0      0      0      2      0       0      2
    transformers' LlamaTokenizer                   169  2,815  1,040    258  2,947   2,949  2,704
    transformers' TokenizersBackend              2,984      0  2,935  2,984  2,900   2,900  2,984
    transformers' SpmConverter                          fails on every BPE model     1,148  2,945
    transformers' LlamaConverter                        fails on every BPE model     2,630  2,703
    tokenizers' SentencePieceUnigramTokenizer           refuses every BPE model      1,429  2,505

Three points where `tokenizers` differs from sentencepiece are bridged. One is the table of a normalizer
(`spm_normalizer.py`), the others are these:

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
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models

from server.checkpoint.spm_model import (
    CONTROL,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    Model,
    Piece,
    SpmError,
    parse,
)
from server.checkpoint.spm_normalizer import ALONE, any_of, literal, normalizer

MAX_ID = 1 << 31  # the library counts in 32 bits
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFamily:
    """What a family's tokenizer code adds to its sentencepiece model."""

    appended: tuple[str, ...] = ()  # tokens whose ids follow the last piece, in this order
    alone: frozenset[str] = (
        frozenset()
    )  # those of them that are plain words: found only where nothing else stands between two tokens
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
        steps.append(decoders.Replace(Regex(rf"{SPACE}?{literal(ALONE)}{any_of(alone)}"), ""))
    steps.append(decoders.Replace(SPACE, " "))
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if spec.escape_whitespaces and (spec.add_dummy_prefix or spec.remove_extra_whitespaces):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)

"""The model's tokenizer: ids of texts, texts of ids, the bytes of each token, and how many tokens a text has at least.

Most tokens are whole characters that any neighbour leaves alone, and most decoders are of kinds for which that can be
known. What such a token adds to a text is worked out once and looked up from then on (`LonePieces`).

A token may be a part of a character, or the end of one and the beginning of the next, so that bytes alone can say what
it adds to a text (`TokenBytes`). A decoder may also leave something out, such as the space at the start of a text, or
treat tokens by their neighbours: what is shown is the measure then, and the bytes are the token's share of it
(`TokenShares`).

A prompt of two megabytes takes seconds to tokenise, only to be refused for its length. Where every character of a text
ends up in some token, a text with more characters than all of its tokens could hold need not be looked at. Many
tokenizers lose characters, though: they strip, compose or drop them, or one unknown token stands for any number. So
the bound (`most_characters_per_token`) is given for the kinds that are known to lose none (byte-level BPE and BPE that
falls back to bytes: GPT-2, BLOOM, Llama, Qwen and their kin), and for no others.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

END_TOKENS = 16  # enough for any mark with blanks behind it, in letters if need be
MOST_IDS = 2**31
HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # of UTF-16, or a half of one
NAMED_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")
STRIPPING = ("lstrip", "rstrip", "single_word")  # flags of a special token
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character
LONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece names a token that stands for one byte
# A character has at most 4 bytes, so 8 tokens that end inside one are bytes that will never be text.
MOST_TOKENS_OF_A_CHARACTER = 8
# Unicode's canonical forms: composing makes at most so many characters one (UAX #15, maximum expansion of NFD).
MOST_COMPOSED = 4
KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


@dataclass(frozen=True)
class ModelTokenizer:
    """The model's tokenizer with what its configuration files say about special tokens."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]  # not part of the generated text
    eos_ids: frozenset[int]
    declared: tuple[str, ...] = ()  # special tokens of which tokenizer.json does not say so

    @classmethod
    def load(
        cls, model_path: str, tokenizer_path: str | None = None, tokenizer_config_path: str | None = None
    ) -> ModelTokenizer:
        """Read tokenizer.json and its companions. Raises ValueError with the remedy.

        model_path: folder of config.json; tokenizer_path: folder of tokenizer.json, if it is another.
        """
        folder = Path(tokenizer_path or model_path)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json: convert the model's tokenizer once with "
                "transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        tokenizer_config = Path(tokenizer_config_path or folder / "tokenizer_config.json")
        if "model" not in read_json(path):
            raise ValueError(f"{path} is not a tokenizer: it has no `model`; download or convert it again")
        try:
            with _tokenizer_errors():
                tokenizer = Tokenizer.from_file(str(path))
        except TokenizerError:
            raise ValueError(
                f"{path} is not a tokenizer that can be used: its vocabulary, or another part of it, is broken; "
                "download or convert it again"
            ) from None
        declared = _declared_special(read_json(tokenizer_config), read_json(folder / "special_tokens_map.json"))
        return cls.of(tokenizer, _eos_ids(tokenizer, Path(model_path), tokenizer_config), declared)

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: frozenset[int], declared: Sequence[AddedToken] = ()) -> ModelTokenizer:
        """From a tokenizer at hand. Takes it over: a length limit or padding saved with it is switched off.

        declared: tokens that are special whatever the tokenizer says of them, if it has them.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        ids = {token.content: tokenizer.token_to_id(token.content) for token in declared}
        if added := [token for token in declared if ids[token.content] not in (None, *special)]:
            tokenizer.add_special_tokens(added)
            special.update(id for token in added if (id := ids[token.content]) is not None)
        return cls(tokenizer, frozenset(special), eos_ids, tuple(token.content for token in added))

    @cached_property
    def lone_pieces(self) -> LonePieces:
        """The tokens' texts that do not depend on neighbours, filled as tokens come."""
        return LonePieces(self.tokenizer)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text in bytes, filled as tokens come."""
        return TokenBytes(self)

    @cached_property
    def most_characters_per_token(self) -> int | None:
        """No token of a prompt stands for more characters than this; None where that is not known."""
        return most_characters_per_token(self.tokenizer)

    # `Tokenizer.encode` holds the interpreter's lock for as long as it takes, and with it every stream; batches of one
    # text do not. The fast kind, which counts no offsets, takes two thirds of the time.

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the model wants around a prompt. Raises TokenizerError."""
        with _tokenizer_errors():
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text that stands alone, without special tokens around it. Raises TokenizerError."""
        return self.encode(text, add_special_tokens=False)

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        """How many token ids `encode` gives. Raises TokenizerError."""
        with _tokenizer_errors():
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return len(encoding)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, tuple[int, int]]]:
        """Token ids with their [start, stop) in characters; special tokens have (0, 0). Raises TokenizerError."""
        with _tokenizer_errors():
            [encoding] = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(zip(encoding.ids, encoding.offsets, strict=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens. Raises TokenizerError."""
        with _tokenizer_errors():
            return self.tokenizer.decode(ids, skip_special_tokens=True)

    def end_of(self, ids: Sequence[int]) -> str:
        """Text of the last few ids, special tokens and all. Raises TokenizerError."""
        with _tokenizer_errors():
            return self.tokenizer.decode(list(ids[-END_TOKENS:]), skip_special_tokens=False)

    def decode_long(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of many ids; it leaves the interpreter to others meanwhile. Raises TokenizerError."""
        with _tokenizer_errors():
            [text] = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            return text

    def token_text(self, id: int) -> str:
        """One token on its own, special or not. Raises TokenizerError."""
        with _tokenizer_errors():
            return self.tokenizer.decode([id], skip_special_tokens=False)


class TokenizerError(Exception):
    """The tokenizer failed on a text or on token ids. It does not repeat them."""


@contextmanager
def _tokenizer_errors() -> Iterator[None]:
    """Make one Exception of whatever the tokenizer raises: a panic of its Rust code is none, and may end a loop."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer failed with {type(error).__name__}") from None


def named_eos_ids(model_folder: Path) -> set[int]:
    """The end tokens that generation_config.json and config.json name, one or several.

    Raises ValueError for what is no id.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = read_json(model_folder / name).get("eos_token_id")
        given = [] if found is None else found if isinstance(found, list) else [found]
        if any(type(id) is not int or not 0 <= id < MOST_IDS for id in given):
            raise ValueError(
                f"{model_folder / name} says eos_token_id {str(found)[:80]}, which must be a token id or a list of "
                "some: download it again"
            )
        ids.update(given)
    return ids


def _declared_special(*configs: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens that the companions of tokenizer.json call special, as transformers takes their word for it.

    A token for padding, which no text has, may be any word that a text needs: it is not taken for its name alone.
    """
    found: dict[str, AddedToken] = {}
    for config in configs:
        marked = config.get("added_tokens_decoder")
        tokens = [token for token in marked.values() if _is_marked(token)] if isinstance(marked, dict) else []
        for token in [*tokens, *(config.get(name) for name in NAMED_SPECIAL)]:
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str) and content:
                flags = {name: token[name] for name in STRIPPING if token.get(name)} if isinstance(token, dict) else {}
                found.setdefault(content, AddedToken(content, special=True, normalized=False, **flags))
    return list(found.values())


def _is_marked(token: object) -> bool:
    return isinstance(token, dict) and token.get("special") is True


def _eos_ids(tokenizer: Tokenizer, model_folder: Path, tokenizer_config: Path) -> frozenset[int]:
    ids = named_eos_ids(model_folder)
    token = read_json(tokenizer_config).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str) and (id := tokenizer.token_to_id(content)) is not None:
        ids.add(id)
    return frozenset(ids)


class LonePieces(dict[int, str]):
    """Token id -> what the token adds to a text whatever its neighbours are; empty where that depends on them.

    It is filled as tokens come, so that it holds at most the vocabulary: some tens of megabytes if all of it is used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._is_local = decoder is not None and _is_local(json.loads(decoder.__getstate__()))

    def __missing__(self, id: int) -> str:
        with _tokenizer_errors():
            piece = self[id] = self._piece(id) if self._is_local else ""
        return piece

    def _piece(self, id: int) -> str:
        """The token after itself: at the start of a text it may lose its leading space."""
        if LONE_BYTE.fullmatch(self._tokenizer.id_to_token(id) or ""):
            return ""
        at_start = self._tokenizer.decode([id])
        piece = self._tokenizer.decode([id, id])[len(at_start) :]
        return piece if at_start and REPLACEMENT not in piece else ""


def _is_local(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder treats tokens alone, but for joining bytes to characters and trimming the start of a text."""
    kind = decoder["type"]
    if kind == "Sequence":
        return all(_is_local(part) for part in decoder["decoders"])
    if kind == "Strip":
        return bool(decoder["stop"] == 0)
    if kind == "Replace":
        return len(decoder["pattern"].get("String", "")) == 1
    return kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")


class TokenBytes(dict[int, bytes]):
    """Token id -> what it adds to a text in bytes. Filled as tokens come, so that it holds at most the vocabulary."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        decoder = tokenizer.tokenizer.decoder
        is_byte_level = decoder is not None and _has_byte_level(json.loads(decoder.__getstate__()))
        self._byte_of = _bytes_by_character() if is_byte_level else {}

    def __missing__(self, id: int) -> bytes:
        found = self[id] = self._found(id)
        return found

    def _found(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id]
        if piece := self._tokenizer.lone_pieces[id]:
            return piece.encode()
        name = self._tokenizer.tokenizer.id_to_token(id) or ""
        if lone := LONE_BYTE.fullmatch(name):
            return bytes([int(lone[1], 16)])
        if name and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        # At the start of a text it may lose a space: behind itself it does not.
        alone = self._tokenizer.token_text(id)
        return (self._tokenizer.decode([id, id])[len(alone) :] or alone).encode()


def _has_byte_level(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Sequence":
        return any(_has_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _bytes_by_character() -> dict[str, int]:
    """The printable characters by which byte-level vocabularies name bytes: those that are printable, then others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenShare(NamedTuple):
    """A token's share of a text: its place among the tokens that were pushed, its characters, and its bytes."""

    place: int
    text: str  # empty for all tokens of a character but the last
    data: bytes


class TokenShares:
    """Divides a text that comes in pieces, each with a token, among the tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._num_pushed = 0
        self._open: list[tuple[int, str, bytes]] = []  # tokens whose last character has not come yet

    def push(self, id: int, piece: str) -> list[TokenShare]:
        """The shares that are certain by now, in order. piece: what the text grows by with this token."""
        place, data = self._num_pushed, self._bytes[id]
        self._num_pushed += 1
        if not self._open and data == piece.encode():
            return [TokenShare(place, piece, data)]
        self._open.append((place, piece, data))
        if len(self._open) <= MOST_TOKENS_OF_A_CHARACTER and _ends_inside_a_character(
            b"".join(d for _, _, d in self._open)
        ):
            return []
        return self.close()

    def close(self) -> list[TokenShare]:
        """The shares of all tokens that are left: no more of their text will come."""
        found, self._open = self._open, []
        text, whole = ("".join(piece for _, piece, _ in found), b"".join(data for _, _, data in found))
        if whole.decode(errors="replace") == text:
            return [TokenShare(*one) for one in found]
        return [TokenShare(place, piece, piece.encode()) for place, piece, _ in found]


def _ends_inside_a_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


def most_characters_per_token(tokenizer: Tokenizer) -> int | None:
    """No token stands for more characters of a text than this; None where that is not known."""
    shrinking = _shrinking(_state(tokenizer.normalizer))
    if shrinking is None or not _keeps_all(_state(tokenizer.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # one such token takes in all spaces beside it
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not _knows_every_byte(tokenizer, vocab):
        return None
    return shrinking * (max(map(len, vocab)) + 1)  # 1: a space that a normalizer puts in front of an added token


def _state(part: Any) -> Mapping[str, Any]:
    """A normalizer or pre-tokenizer as tokenizer.json describes it; empty where there is none."""
    state: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _shrinking(normalizer: Mapping[str, Any]) -> int | None:
    """Characters that it makes one at most; None where it may drop any."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        shrinking = 1
        for part in normalizer["normalizers"]:
            if (factor := _shrinking(part)) is None:
                return None
            shrinking *= factor
        return shrinking
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(normalizer["content"]) >= len(pattern) else None
    return {None: 1, "Prepend": 1, "NFD": 1, "NFKD": 1, "ByteLevel": 1, "NFC": MOST_COMPOSED}.get(kind)


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind is None or kind in KEEPING_PRE_TOKENIZERS


def _knows_every_byte(tokenizer: Tokenizer, vocab: Mapping[str, int]) -> bool:
    """Whether no character is ever unknown, because its bytes are tokens."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    is_byte_level = any(
        _contains(_state(part), "ByteLevel") for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    )
    return is_byte_level and all(character in vocab for character in pre_tokenizers.ByteLevel.alphabet())


def _contains(part: Mapping[str, Any], kind: str) -> bool:
    inner = part.get("normalizers") or part.get("pretokenizers") or ()
    return part.get("type") == kind or any(_contains(one, kind) for one in inner)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, with Infinity and NaN as Python writes them, and so `transformers`; empty where there is no file.

    Raises ValueError that names the file.
    """
    try:
        raw = path.read_bytes()
        value = json.loads(raw.decode(json.detect_encoding(raw)))
        if HALF_OF_A_PAIR.search(raw):
            json.dumps(value, ensure_ascii=False).encode()  # what is no text would be an error later, and of nobody
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value

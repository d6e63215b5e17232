"""Between token ids and text: the model's tokenizer, incremental detokenisation, stop sequences, finish reasons.

Detokenising one token at a time is wrong twice over: a character may be spread over several tokens, and the text of a
token may depend on its neighbours (a leading space disappears at the start of a text). So each new token is decoded
together with the last few that are already out, and only what it adds is given out, once it is whole characters.

Most tokens are whole characters that any neighbour leaves alone, and most decoders are of kinds for which that can be
known. What such a token adds is worked out once and looked up from then on (`LonePieces`).

This does by hand what `tokenizers.decoders.DecodeStream` offers, on purpose. That class cannot give out held bytes at
the end of a generation, and it gives out the end of the *prompt* when that ends in U+FFFD. The text of a finished
request is here what decoding all its ids at once would have given, but for bytes that a special token cuts off at the
end: they are never shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from router import model_files
from router.prompt_length import most_characters_per_token
from router.stops import StopFilter
from router.token_bytes import LONE_BYTE, TokenBytes

CONTEXT_TOKENS = 5  # of the prompt, decoded along with the first tokens; enough for every decoder's joining rules
END_TOKENS = 16  # enough for any mark with blanks behind it, in letters if need be
# A character has at most 4 bytes, so 8 tokens without a whole one are bytes that will never be text.
MAX_HELD_TOKENS = 8
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character


class FinishReason(StrEnum):
    """Why a generation ended, in TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True)
class ModelTokenizer:
    """The model's tokenizer with what its configuration files say about special tokens."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]  # not part of the generated text
    eos_ids: frozenset[int]

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
        if "model" not in model_files.read_json(path):
            raise ValueError(f"{path} is not a tokenizer: it has no `model`; download or convert it again")
        try:
            with _tokenizer_errors():
                tokenizer = Tokenizer.from_file(str(path))
        except TokenizerError:
            raise ValueError(
                f"{path} is not a tokenizer that can be used: its vocabulary, or another part of it, is broken; "
                "download or convert it again"
            ) from None
        return cls.of(tokenizer, _eos_ids(tokenizer, Path(model_path), tokenizer_config))

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> ModelTokenizer:
        """From a tokenizer at hand. Takes it over: a length limit or padding saved with it is switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        return cls(tokenizer, special, eos_ids)

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
        with _tokenizer_errors():
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return list(encoding.ids)

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


def _eos_ids(tokenizer: Tokenizer, model_folder: Path, tokenizer_config: Path) -> frozenset[int]:
    ids = model_files.eos_ids(model_folder)
    token = model_files.read_json(tokenizer_config).get("eos_token")
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
        self._is_local = decoder is not None and is_local(json.loads(decoder.__getstate__()))

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


def is_local(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder treats tokens alone, but for joining bytes to characters and trimming the start of a text."""
    kind = decoder["type"]
    if kind == "Sequence":
        return all(is_local(part) for part in decoder["decoders"])
    if kind == "Strip":
        return bool(decoder["stop"] == 0)
    if kind == "Replace":
        return len(decoder["pattern"].get("String", "")) == 1
    return kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")


class Detokeniser:
    """Turns the growing ids of one sequence into pieces of whole characters."""

    def __init__(self, tokenizer: ModelTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context_text: str | None = tokenizer.decode(self._context)  # None: not asked for yet, and not empty
        self._held: list[int] = []
        self._num_shown = 0  # characters of the held tokens that are out already

    def push(self, token_id: int) -> str:
        """The whole characters that this token completes; empty while it ends inside the only one."""
        piece = self._tokenizer.lone_pieces[token_id]
        if piece and not self._held and self._context_text != "":
            self._context, self._context_text = [token_id], None
            return piece
        self._held.append(token_id)
        piece = self._held_text()
        if (piece and not piece.endswith(REPLACEMENT)) or len(self._held) >= MAX_HELD_TOKENS:
            return self._give_out(piece)
        piece = piece.rstrip(REPLACEMENT)
        self._num_shown += len(piece)
        return piece

    def flush(self) -> str:
        """The text of held tokens, whole characters or not: nothing more will come."""
        return self._give_out(self._held_text()) if self._held else ""

    def _held_text(self) -> str:
        """What the held tokens add to their context, but for what is out."""
        if self._context_text is None:
            self._context_text = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *self._held])
        return text[len(self._context_text) + self._num_shown :]

    def _give_out(self, piece: str) -> str:
        self._context, self._held, self._num_shown = self._held, [], 0
        self._context_text = self._tokenizer.decode(self._context)
        return piece


class StopSearch:
    """Finds the first of several stop sequences in text that arrives in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._num_kept = max(map(len, stop), default=1) - 1  # a match may begin this far back
        self._tail = ""

    def push(self, piece: str) -> int | None:
        """How much of the piece is left when it is cut after the first match that ends in it; None if none does."""
        if not self._stop or not piece:
            return None
        text = self._tail + piece
        start = len(self._tail)
        ends = [at + len(s) for s in self._stop if (at := text.find(s, max(0, start - len(s) + 1))) >= 0]
        self._tail = text[max(0, len(text) - self._num_kept) :]
        return min(ends) - start if ends else None


@dataclass(frozen=True, slots=True)
class Ends:
    """Which tokens end a generation, and from when on anything but its length does. By default the model's own do."""

    stop_ids: frozenset[int] = frozenset()  # beside the model's end tokens
    ignores_eos: bool = False
    min_tokens: int = 0
    shows_stop: bool = True  # whether a stop sequence is part of the text, as on TGI's routes
    shown_ids: frozenset[int] = frozenset()  # special tokens that are part of the text where stop sequences are not
    has_grammar: bool = False  # then an end token is the grammar's word, which counts more than `min_tokens`

    def reason(self, token_id: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """What a token ends a generation for; None for most tokens."""
        if token_id in eos_ids and not self.ignores_eos:
            return FinishReason.EOS_TOKEN
        return FinishReason.STOP_SEQUENCE if token_id in self.stop_ids else None

    def ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """All tokens that end a generation."""
        return self.stop_ids if self.ignores_eos else self.stop_ids | eos_ids


ENDS_OF_THE_MODEL = Ends()


class GeneratedText:
    """What one request has generated so far, as text, and whether it has ended."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        max_new_tokens: int,
        ends: Ends = ENDS_OF_THE_MODEL,
    ) -> None:
        self.num_tokens = 0
        self.piece = ""  # what the last token added to the text, of which less may be shown by now
        self._ends = ends
        self._stop_filter = None if ends.shows_stop else StopFilter(stop)
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._detokeniser = Detokeniser(tokenizer, prompt_ids)
        self._stop_search = StopSearch(stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The generated text: without special tokens, up to and including a stop sequence."""
        return "".join(self._pieces)

    @property
    def stop_sequence(self) -> str | None:
        """Which stop sequence ended the text; None where none did, or where it is part of the text."""
        return self._stop_filter.found if self._stop_filter is not None else None

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take one token: the text to show for it, and the reason if it is the last.

        What is shown of all tokens but the special ones is `text`. Special tokens are searched for stop sequences. One
        that ends the request inside a character leaves its bytes out of both: no token is left to show them with.
        """
        self.num_tokens += 1
        if self._stop_filter is not None:
            return self._push_filtered(token_id, self._stop_filter)
        if token_id in self._tokenizer.special_ids:
            self.piece = shown = self._tokenizer.token_text(token_id)
            return shown, self._reason(token_id, self._stop_search.push(shown) is not None)
        piece = self._detokeniser.push(token_id)
        cut = self._stop_search.push(piece)
        if self.num_tokens < self._ends.min_tokens:
            cut = None
        reason = self._reason(token_id, cut is not None)
        piece = piece[:cut]
        if reason is not None and cut is None:
            piece += self._detokeniser.flush()
        self.piece = piece
        self._pieces.append(piece)
        return piece, reason

    def _push_filtered(self, token_id: int, stops: StopFilter) -> tuple[str, FinishReason | None]:
        """As `push`, but no stop sequence and no special token is shown, and a stop counts more than a length."""
        is_special = token_id in self._tokenizer.special_ids
        piece = self._tokenizer.token_text(token_id) if is_special else self._detokeniser.push(token_id)
        if is_special and token_id in self._ends.shown_ids:
            piece, is_special = self._detokeniser.flush() + piece, False
        self.piece = "" if is_special else piece
        if self.num_tokens < self._ends.min_tokens:
            shown, has_stopped = "" if is_special else piece, False
        else:
            shown, has_stopped = stops.push(piece, not is_special)
        reason = FinishReason.STOP_SEQUENCE if has_stopped else self._reason(token_id, has_stopped)
        if reason is not None and not has_stopped:
            rest = "" if is_special else self._detokeniser.flush()
            self.piece += rest
            more, has_stopped = stops.push(rest)
            shown += more if has_stopped else more + stops.flush()
        self._pieces.append(shown)
        return shown, reason

    def _reason(self, token_id: int, has_stopped: bool) -> FinishReason | None:
        """On TGI's routes a length counts most, elsewhere an end token: with it a text is complete."""
        is_last = self.num_tokens >= self._max_new_tokens
        if is_last and self._stop_filter is None:
            return FinishReason.LENGTH
        if self.num_tokens < self._ends.min_tokens:
            is_end = self._ends.has_grammar and token_id in self._tokenizer.eos_ids
            return FinishReason.EOS_TOKEN if is_end else None
        stopped = FinishReason.STOP_SEQUENCE if has_stopped else None
        ended = self._ends.reason(token_id, self._tokenizer.eos_ids) or stopped
        return ended or (FinishReason.LENGTH if is_last else None)

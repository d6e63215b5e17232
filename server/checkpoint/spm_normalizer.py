"""The normalizer of a sentencepiece model, as steps that the `tokenizers` library runs.

A model brings its own normalizer: a table of what is replaced by what, and rules for spaces. `tokenizers` has a step
for such a table, `Precompiled`, which takes the *shortest* entry at the start of each grapheme and drops the rest of
it, while sentencepiece takes the longest entry at each character. So every stretch that the table maps as one is first
isolated by a separator and put through NFKC, which composes it; `Precompiled` then sees single characters. The table
is read and the outcome is compared for every entry of it. Of nmt_nfkc's 225,276 entries 393 differ, all of rare letters
(U+A7F1 to U+A7F3, beyond U+FFFF).

This module knows nothing of ids, merges or added tokens (`spm.py`).
"""

from __future__ import annotations

import struct
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Regex, normalizers

from server.checkpoint.spm_model import SPACE, USER_DEFINED, Model, SpmError

SEPARATOR = "\ufdd0"  # a noncharacter: no text has it, Unicode combines it with nothing
ALONE = "\ufdd1"  # another noncharacter; marks a plain word that is the whole text
STAND_INS = 0x10F000  # the first character for private use that stands in for what NFKC must not touch
MAX_PROTECTED = 32  # characters kept from NFKC: each costs two passes over every text
MAX_KEY_BYTES = 64  # of an entry of a normalizer's table; nmt_nfkc has 12
MAX_WALK = 4_000_000  # steps through such a table; nmt_nfkc, whose entries share their endings, takes 263,000
MAX_WRONG = 0.01  # of a normalizer's table; a rule of its own making would be wrong nearly everywhere


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
        steps = [normalizers.Prepend(ALONE), _unless(ALONE, rf"(?!{any_of(alone)}\z)"), *steps]
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
    return [*steps, _unless(space, rf"(?={any_of(user_defined)}\z)")] if user_defined else steps


def _unless(prepended: str, following: str) -> Any:
    """A step that takes back what was prepended. To insert at the start by an expression makes a later NFKC crash."""
    return normalizers.Replace(Regex(rf"\A{literal(prepended)}{following}"), "")


def _stand_ins(texts: Iterable[str], first: int = STAND_INS) -> tuple[list[Any], list[Any]]:
    """Steps that put a private character in place of each text, and steps that put the texts back."""
    pairs = [(text, chr(first + number)) for number, text in enumerate(texts)]
    hide = [normalizers.Replace(text, stand_in) for text, stand_in in pairs]
    return hide, [normalizers.Replace(stand_in, text) for text, stand_in in pairs]


# The precompiled table of characters


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
    whole = "|".join(filter(None, [*map(literal, apart), several, single]))
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


def any_of(texts: Collection[str]) -> str:
    """A pattern for any one of the texts."""
    return f"(?:{'|'.join(map(literal, sorted(texts)))})"


def literal(text: str) -> str:
    """A pattern for this very text."""
    return "".join(map(_escaped, text))

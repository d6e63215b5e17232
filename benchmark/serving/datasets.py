"""Prompts of files and traces of real traffic: what people sent, how long it was, and when it came.

Files are ShareGPT's JSON, JSONL, CSV, and folders of such files as a data set of the Hugging Face Hub is. A record is a
conversation (`conversations` or `messages`), a prompt with or without its answer, or two lengths. What a file says of
lengths is kept; tokens are counted elsewhere. Parquet and Arrow need a library that Lockstep does without.

Traces have lengths and no texts: Mooncake's JSONL (`timestamp` in milliseconds, `input_length`, `output_length`,
`hash_ids`: one for each block of 512 prompt tokens, equal where a prompt is the same up to there), the Azure LLM
inference CSV (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`) and `arrival_s` in place of `timestamp`. Times count
from the first request.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmark.result import BenchError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one request in tokens: its prompt, and its answer."""

    input_length: int
    output_length: int


ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
PROMPTS = ("prompt", "inputs", "input", "question", "instruction", "text")
ANSWERS = ("completion", "output", "answer", "response", "chosen")
INPUT_LENGTHS = ("input_length", "prompt_tokens", "prompt_length", "input_tokens")
OUTPUT_LENGTHS = ("output_length", "completion_tokens", "output_tokens", "max_new_tokens", "max_tokens")
READABLE = (".jsonl", ".json", ".csv")
UNREADABLE = (".parquet", ".arrow")
FORMS = (
    'a record has "conversations" or "messages", or a prompt (' + ", ".join(PROMPTS) + ") with an answer or an "
    '"output_length", or "input_length" and "output_length"'
)

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of a conversation: what is asked, by a user and perhaps a system, and what the file says of the answer.

    Without messages, only lengths are known.
    """

    messages: Sequence[Message]
    answer: str | None = None
    input_length: int | None = None
    output_length: int | None = None


Conversation = Sequence[Said]


def read_dataset(path: Path, split: str | None = None, column: str | None = None) -> list[Conversation]:
    """The conversations of a file, or of a folder's files; those without a question are left out.

    split: which part of a folder, such as train; column: of the prompt. Raises BenchError that names file and line.
    """
    files = _files_of(path, split) if path.is_dir() else [path]
    found = [turns for file in files for where, record in _records(file) if (turns := _turns(record, column, where))]
    if not found:
        raise BenchError(f"--dataset {path} has no prompts: {FORMS}")
    return found


def _files_of(folder: Path, split: str | None) -> list[Path]:
    everything = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    named = [path for path in everything if split is None or split in str(path.relative_to(folder))]
    files = [path for path in named if path.suffix in READABLE and path.name not in ("dataset_info.json", "state.json")]
    if split is None:
        files = [path for path in files if "train" in path.name] or files
    if files:
        return files
    if any(path.suffix in UNREADABLE for path in named):
        raise BenchError(_unreadable(folder))
    names = ", ".join(READABLE)
    within = f" with {split} in their names: give another --split" if split else ": download the data set into it"
    raise BenchError(f"--dataset {folder} has no files that end in {names}{within}")


def _unreadable(path: Path) -> str:
    return (
        f"--dataset {path} is Parquet or Arrow, which Lockstep does not read: write it as JSONL once, with "
        f"datasets.load_dataset(…).to_json(…) where that library is"
    )


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each record is, for errors, and the record."""
    if path.suffix in UNREADABLE:
        raise BenchError(_unreadable(path))
    try:
        with path.open(newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --dataset {path}: {error}; give a file or a folder of {READABLE}") from None
    if path.suffix == ".csv":
        reader = csv.DictReader(text.splitlines(keepends=True))
        yield from ((f"{path}, line {reader.line_num}", row) for row in reader)
    elif text.lstrip().startswith("["):
        yield from ((f"{path}, record {number}", record) for number, record in enumerate(_list(text, path), 1))
    else:
        yield from ((where, _object(line, where)) for where, line in _lines(text, path))


def _lines(text: str, path: Path) -> Iterator[tuple[str, str]]:
    return ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _list(text: str, path: Path) -> list[Any]:
    try:
        return list(json.loads(text))
    except ValueError as error:
        raise BenchError(f"--dataset {path} is no JSON: {error}; download it again") from None


def _object(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BenchError(f"--dataset {where} is no JSON: {error}; each line is one object") from None


def _turns(record: Any, column: str | None, where: str) -> Conversation:
    """The turns of a record; empty for a conversation in which nobody asks. Raises BenchError."""
    try:
        return _read(record, column)
    except (KeyError, TypeError, ValueError, AttributeError):
        wanted = f'has no usable "{column}", which --prompt-column names' if column else f"is not understood: {FORMS}"
        raise BenchError(f"--dataset {where}: {str(record)[:80]!r} {wanted}") from None


def _read(record: Mapping[str, Any], column: str | None) -> Conversation:
    lengths = _length(record, INPUT_LENGTHS), _length(record, OUTPUT_LENGTHS)
    prompts = [column] if column else [name for name in ("conversations", "messages", *PROMPTS) if record.get(name)]
    if not prompts:
        if {"conversations", "messages"} & record.keys():
            return ()
        if None in lengths:
            raise ValueError
        return (Said((), None, *lengths),)
    asked = record[prompts[0]]
    if isinstance(asked, str):
        answers = [record[name] for name in ANSWERS if isinstance(record.get(name), str)]
        return (Said(({"role": "user", "content": asked},), answers[0] if answers else None, *lengths),) * bool(asked)
    return _conversation([_message(one) for one in asked], lengths[1])


def _length(record: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """A length by the first of its names. Raises ValueError for what is none."""
    given = next((record[name] for name in names if record.get(name) is not None), None)
    if given is None:
        return None
    if isinstance(given, bool) or int(given) < 1 or int(given) != float(given):
        raise ValueError
    return int(given)


def _message(one: Mapping[str, Any]) -> Message:
    """A message of ShareGPT's (`from`, `value`) or OpenAI's (`role`, `content`), whose content may be in parts."""
    role, content = (one["from"], one["value"]) if "from" in one else (one["role"], one["content"])
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str):
        raise TypeError
    return {"role": ROLES[role], "content": content}


def _conversation(messages: Sequence[Message], output_length: int | None) -> Conversation:
    """A turn for each answer, and one for a question that the file does not answer. Answers before a question go."""
    turns: list[Said] = []
    asked: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            asked.append(message)
        elif any(one["role"] == "user" for one in asked):
            turns.append(Said(tuple(asked), message["content"], None, output_length))
            asked = []
    if any(one["role"] == "user" for one in asked):
        turns.append(Said(tuple(asked), None, None, output_length))
    return tuple(turns)


# --------------------------------------------------------------------------------------------------------------- traces


BLOCK_TOKENS = 512  # that one of Mooncake's hashes stands for
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TRACE_FORMS = (
    'a line of Mooncake\'s JSONL is {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": '
    f"[46, 47]}}, a CSV of Azure begins with {','.join(AZURE)}"
)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace. blocks: hashes of its prompt's blocks; empty where the trace has none."""

    arrives_s: float
    lengths: Lengths
    blocks: Sequence[int] = ()
    max_new_tokens: int | None = None  # that were asked for; None: as many as came


def read_trace(path: Path, speed: float = 1.0) -> list[TracedRequest]:
    """The requests, `speed` times as fast, from the first of them on. Raises BenchError that names the line."""
    found = traced_requests(path)
    return [replace(one, arrives_s=(one.arrives_s - found[0].arrives_s) / speed) for one in found]


def traced_requests(path: Path) -> list[TracedRequest]:
    """The requests in the order of their arrival, at the trace's times. Raises BenchError that names the line."""
    try:
        with path.open(newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --trace {path}: {error}; {TRACE_FORMS}") from None
    is_csv = path.suffix.lower() == ".csv" or (bool(lines) and lines[0].startswith(AZURE[0]))
    found = sorted(_of_csv(lines, path) if is_csv else _of_json(lines, path), key=lambda one: one.arrives_s)
    if not found:
        raise BenchError(f"--trace {path} has no requests: {TRACE_FORMS}")
    return found


def _of_json(lines: Sequence[str], path: Path) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _request_of(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise BenchError(f"--trace {path}, line {number} is no request: {line[:80]!r}; {TRACE_FORMS}") from None


def _request_of(record: Mapping[str, Any]) -> TracedRequest:
    at = float(record["arrival_s"]) if "arrival_s" in record else float(record["timestamp"]) / 1000
    blocks = record.get("hash_ids") or ()
    if any(type(block) is not int for block in blocks):
        raise ValueError
    found = _checked(at, record["input_length"], record["output_length"], tuple(blocks))
    most = record.get("max_new_tokens")
    is_enough = most is None or (type(most) is int and most >= found.lengths.output_length)
    if at < 0 or not is_enough:
        raise ValueError
    return replace(found, max_new_tokens=most)


def _of_csv(lines: Sequence[str], path: Path) -> Iterator[TracedRequest]:
    reader = csv.DictReader(lines)
    if missing := [name for name in AZURE if name not in (reader.fieldnames or ())]:
        raise BenchError(f"--trace {path} has no column {', '.join(missing)}: its first line names {', '.join(AZURE)}")
    began_at: float | None = None  # of the file's first line
    for row in reader:
        try:
            at = datetime.fromisoformat(row[AZURE[0]]).timestamp()
            began_at = at if began_at is None else began_at
            yield _checked(at - began_at, int(row[AZURE[1]]), int(row[AZURE[2]]))
        except (ValueError, TypeError):
            where = f"--trace {path}, line {reader.line_num}"
            raise BenchError(f"{where} is no request: {lines[reader.line_num - 1][:80]!r}; {TRACE_FORMS}") from None


def _checked(at: float, input_length: Any, output_length: Any, blocks: Sequence[int] = ()) -> TracedRequest:
    """An answer without a token was cancelled: it is asked for one. Raises ValueError."""
    if type(input_length) is not int or type(output_length) is not int or not math.isfinite(at):
        raise ValueError
    if input_length < 1 or output_length < 0 or len(blocks) > math.ceil(input_length / BLOCK_TOKENS):
        raise ValueError
    return TracedRequest(at, Lengths(input_length, max(1, output_length)), blocks)

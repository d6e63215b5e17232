"""Prompts of files: ShareGPT's JSON, JSONL, CSV, and folders of such files as a data set of the Hugging Face Hub is.

A record is a conversation (`conversations` or `messages`), a prompt with or without its answer, or two lengths. What a
file says of lengths is kept; tokens are counted elsewhere. Parquet and Arrow need a library that Lockstep does without.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.report import BenchError

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

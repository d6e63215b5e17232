"""From a model id to checked local folders: download, or a folder that is already there.

Runs once, in the launcher, before any process is started; the shards and the router only ever see folders. It imports
no torch, and `huggingface_hub` only when something may have to be downloaded: a local folder makes no connection. What
the files of a folder must be is said in `files.py`, how a repository of the hub is fetched in `download.py`; old
formats are converted in a separate process (`convert.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.checkpoint.download import PAUSES, Report, Repository
from server.checkpoint.files import (
    HubError,
    check_safetensors,
    checked_file,
    need_space,
    read_json,
    refuse_placeholder,
    weight_files,
)
from server.disk.folders import make_private

TOKENIZER_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")

Convert = Callable[[str, Path, Path], None]  # ("weights" or "tokenizer", source folder, target folder)


@dataclass(frozen=True)
class ResolvedModel:
    """The folders that hold the files of one model, and its commit if it came from a repository."""

    path: Path  # has config.json and its companions
    weights_path: Path  # has *.safetensors
    tokenizer_path: Path  # has tokenizer.json
    sha: str | None  # None: a local folder


def resolve(
    model_id: str,
    *,
    convert: Convert,
    user_cache: Path,
    revision: str | None = None,
    cache_dir: str | None = None,
    with_weights: bool = True,
    weights_override: str | None = None,
    token: str | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    report: Report = print,
    pauses: Sequence[float] = PAUSES,
) -> ResolvedModel:
    """Bring the model to this machine if needed, check its files and convert old formats. Raises HubError.

    Without `with_weights` the model's description and tokenizer are enough. convert: makes the new files of old ones;
    user_cache: where these go if the model's own folder cannot be written; pauses: seconds between tries of a transfer.
    """
    local = Path(os.path.expanduser(model_id))
    is_local = bool(model_id) and local.is_dir()
    if is_local:
        folder = local.resolve()
    elif model_id.startswith((".", "/", "~")):
        raise HubError(f"the model {model_id} is not a folder: check the path")
    else:
        repository = Repository(model_id, revision, cache_dir, token, offline, endpoint, report, pauses)
        folder = repository.download(with_weights=with_weights and weights_override is None)
    read_json(folder / "config.json", "the model's description")
    weights_from = folder if weights_override is None else Path(weights_override).expanduser().resolve()
    return ResolvedModel(
        path=folder,
        weights_path=_weights(weights_from, convert, user_cache, report) if with_weights else folder,
        tokenizer_path=_tokenizer(folder, convert, user_cache, report),
        sha=None if is_local else folder.name,
    )


def _weights(folder: Path, convert: Convert, user_cache: Path, report: Report) -> Path:
    """The folder with checked safetensors files: `folder` itself, or the one that its *.bin were converted into."""
    files = weight_files(folder)
    if files[0].suffix == ".bin":
        folder = _converted("weights", folder, files, convert, user_cache, report)
        files = weight_files(folder)
    for path in files:
        check_safetensors(path)
    return folder


def _tokenizer(folder: Path, convert: Convert, user_cache: Path, report: Report) -> Path:
    """The folder with tokenizer.json: `folder` itself, or the one that its older tokenizer was converted into."""
    if (folder / "tokenizer.json").exists():
        refuse_placeholder(checked_file(folder, "tokenizer.json"))
        return folder
    sources = [folder / name for name in TOKENIZER_SOURCES if (folder / name).exists()]
    if not sources:
        raise HubError(f"{folder} has no tokenizer.json: add it, or serve a model that comes with its tokenizer")
    return _converted("tokenizer", folder, sources, convert, user_cache, report)


def _converted(
    kind: str, folder: Path, sources: Iterable[Path], convert: Convert, user_cache: Path, report: Report
) -> Path:
    """The folder with the conversion of `sources`, made now if it is not there. Changed sources get a new folder."""
    known = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    name = f"{kind}-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}"
    in_cache = folder.parent.name == "snapshots"
    beside = folder.parent.parent / "lockstep" / folder.name if in_cache else folder / ".lockstep"
    elsewhere = user_cache / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    for home in (beside, elsewhere):
        if os.access(home / name, os.R_OK | os.X_OK):  # and not another user's
            return home / name
    home = beside if _is_writable(beside) else elsewhere
    make_private(home)
    need_space(home, sum(size for _, size, _ in known), f"to convert the {kind}: make room")
    report(f"Converting the {kind} of {folder} once, into {home / name}")
    convert(kind, folder, home / name)
    return home / name


def _is_writable(folder: Path) -> bool:
    try:
        make_private(folder)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True

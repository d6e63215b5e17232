"""From a model id to checked local folders: download, or a folder that is already there.

Runs once, in the launcher, before any process is started; the shards and the router only ever see folders. It imports
no torch, and `huggingface_hub` only when something may have to be downloaded: a local folder makes no connection.
Everything in a repository is untrusted. Python files and pickles other than `*.bin` are never fetched, `*.bin` is
converted in a separate process (`convert.py`), names in an index must be plain names of regular files in the folder,
and every safetensors file is measured against its own header. Contents are not hashed: a flipped bit passes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]*")
TEXT_FILES = re.compile(r"[\w.-]+\.(json|model|jinja)|vocab\.txt|merges\.txt")  # configs, tokenizers, indexes
TOKENIZER_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds between the five tries of a transfer
REMAINS_SECONDS = 3600  # a temporary file not written for so long belongs to nobody
RETRY_STATUS = (408, 429, 500, 502, 503, 504)
MAX_JSON_BYTES = 50_000_000  # an index of a hundred thousand tensors has a tenth of it
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts

Report = Callable[[str], None]
Convert = Callable[[str, Path, Path], None]  # ("weights" or "tokenizer", source folder, target folder)


class HubError(ValueError):
    """Why a model cannot be served, in one sentence with its remedy."""


class HubUnreachable(HubError):
    """The hub did not answer, or not sensibly: what is in the cache may still do."""


@dataclass(frozen=True)
class ResolvedModel:
    """Where the files of one model lie."""

    path: Path  # config.json and its companions
    weights_path: Path  # *.safetensors
    tokenizer_path: Path  # tokenizer.json
    sha: str | None  # commit, for a repository


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

    Without `with_weights` the model's description and tokenizer are enough.
    """
    local = Path(os.path.expanduser(model_id))
    is_local = bool(model_id) and local.is_dir()
    if is_local:
        folder = local.resolve()
    elif model_id.startswith((".", "/", "~")):
        raise HubError(f"--model-id {model_id} is not a folder: check the path")
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


# Files of a folder


def _weights(folder: Path, convert: Convert, user_cache: Path, report: Report) -> Path:
    """The folder with checked safetensors files: `folder` itself, or where its *.bin were converted to."""
    files = weight_files(folder)
    if files[0].suffix == ".bin":
        folder = _converted("weights", folder, files, convert, user_cache, report)
        files = weight_files(folder)
    for path in files:
        check_safetensors(path)
    return folder


def _tokenizer(folder: Path, convert: Convert, user_cache: Path, report: Report) -> Path:
    if (folder / "tokenizer.json").exists():
        _refuse_placeholder(checked_file(folder, "tokenizer.json"))
        return folder
    sources = [folder / name for name in TOKENIZER_SOURCES if (folder / name).exists()]
    if not sources:
        raise HubError(f"{folder} has no tokenizer.json: add it, or serve a model that comes with its tokenizer")
    return _converted("tokenizer", folder, sources, convert, user_cache, report)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder."""
    chosen = choose_weights(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not chosen:
        raise HubError(f"{folder} has no weights: *.safetensors or *.bin must lie in it")
    if chosen[0].endswith(".index.json"):
        chosen = indexed_names(folder / chosen[0])
    return [checked_file(folder, name) for name in chosen]


def choose_weights(names: Iterable[str]) -> list[str]:
    """Of a model's files the index, else the one whole file, else all that hold weights; safetensors before *.bin."""
    present = sorted(names)
    for suffix, whole in ((".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin")):
        files = [name for name in present if name.endswith(suffix) and name != "training_args.bin"]
        indexes = [name for name in present if name.endswith(f"{suffix}.index.json")]
        if files or indexes:
            return indexes[:1] or ([whole] if whole in files else files)
    return []


def indexed_names(index: Path) -> list[str]:
    """Names in an index's weight map, which whoever made the model chose: only plain ones are let through."""
    weight_map = read_json(index, "the list of weight files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HubError(f"{index} has no weight_map: fetch the file again")
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    for name in sorted(names):
        if not PLAIN_NAME.fullmatch(name) or Path(name).suffix not in (".safetensors", ".bin"):
            raise HubError(f"{index} names {name!r}, which is not a plain file name: do not use this model")
    return sorted(names)


def checked_file(folder: Path, name: str) -> Path:
    """`folder/name` if it is a regular file that truly lies there, or in the hub cache that `folder` is part of."""
    path = folder / name
    home = folder.resolve()
    if home.parent.name == "snapshots":  # the hub cache links snapshots/COMMIT/name to blobs/HASH
        home = home.parent.parent
    real = path.resolve()
    if not real.exists():
        raise HubError(f"{path} is missing: fetch the model again")
    if not real.is_relative_to(home) or not stat.S_ISREG(real.stat().st_mode):
        raise HubError(f"{path} is not a regular file inside its folder: copy it there")
    return path


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    if not path.exists():
        raise HubError(f"{path} is missing ({purpose}): a model folder needs it; is this the right folder?")
    _refuse_placeholder(checked_file(path.parent, path.name))
    if path.stat().st_size > MAX_JSON_BYTES:
        raise HubError(f"{path} is larger than {MAX_JSON_BYTES} bytes: it cannot be what its name says")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise HubError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise HubError(f"{path} holds no JSON object: fetch it again")
    return value


def _refuse_placeholder(path: Path) -> None:
    """Refuse what downloads by hand leave in the place of a file."""
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise HubError(f"{path} is empty: fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise HubError(f"{path} is a git-LFS pointer, not the file itself: run `git lfs pull` in its folder")
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        raise HubError(f"{path} is a web page, not the file itself: download it again")


def check_safetensors(path: Path) -> None:
    """Compare the file's length with what its header says, so that a cut download is named before anything loads."""
    _refuse_placeholder(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise HubError(f"{path} is not a safetensors file: fetch it again")
        text = file.read(header_bytes)
    if len(text) < header_bytes:
        raise _truncated(path, 8 + header_bytes, size)
    try:
        header = json.loads(text)
        ranges = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        end = 0
        for begin, stop in ranges:
            if begin != end or stop < begin:
                raise HubError(f"{path} has tensors that overlap or leave gaps: fetch it again")
            end = stop
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, HubError):
            raise
        raise HubError(f"{path} has a damaged header: fetch it again") from None
    if size != 8 + header_bytes + end:
        raise _truncated(path, 8 + header_bytes + end, size)


def _truncated(path: Path, expected: int, actual: int) -> HubError:
    fault = "is cut short" if actual < expected else "has bytes after its end"
    return HubError(f"{path} {fault}: {expected} bytes expected, {actual} found; delete it and fetch it again")


def _converted(
    kind: str, folder: Path, sources: Iterable[Path], convert: Convert, user_cache: Path, report: Report
) -> Path:
    """Where the conversion of `sources` lies; made now if it is not there. Changed sources get a new place."""
    known = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    name = f"{kind}-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}"
    in_cache = folder.parent.name == "snapshots"
    beside = folder.parent.parent / "lockstep" / folder.name if in_cache else folder / ".lockstep"
    elsewhere = user_cache / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    for home in (beside, elsewhere):
        if (home / name).is_dir():
            return home / name
    home = beside if _is_writable(beside) else elsewhere
    home.mkdir(parents=True, exist_ok=True)
    need_space(home, sum(size for _, size, _ in known), f"to convert the {kind}: make room")
    report(f"Converting the {kind} of {folder} once, into {home / name}")
    convert(kind, folder, home / name)
    return home / name


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def need_space(folder: Path, needed: int, purpose_and_remedy: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HubError(f"{folder} has {readable(free)} free but {readable(needed)} are needed {purpose_and_remedy}")


def readable(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


# Repositories of the hub


@dataclass(frozen=True)
class Repository:
    """One revision of one model on the hub."""

    model_id: str
    revision: str | None
    cache_dir: str | None
    token: str | None
    offline: bool
    endpoint: str | None
    report: Report
    pauses: Sequence[float]

    def download(self, with_weights: bool) -> Path:
        """The snapshot folder with every file that is needed. Small files first: they may refuse the model."""
        self._check_names()
        if self.offline:
            return self._cached("HF_HUB_OFFLINE is set")
        try:
            sizes = self._listing()
        except HubUnreachable as error:
            return self._cached(str(error))
        if "config.json" not in sizes:
            raise HubError(f"{self.model_id} has no config.json: it is not a model that can be served")
        folder = self._fetch(sorted(name for name in sizes if TEXT_FILES.fullmatch(name)), sizes)
        if with_weights:
            self._fetch(self._weight_names(folder, sizes), sizes)
        return folder

    def _check_names(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.model_id)
        except HFValidationError:
            raise HubError(
                f"--model-id {self.model_id!r} is neither a folder nor a repository name such as bigscience/bloomz-560m"
            ) from None
        if self.revision is not None and (not REVISION.fullmatch(self.revision) or ".." in self.revision):
            raise HubError(
                f"--revision {self.revision!r} is no branch, tag or commit: use letters, digits, . _ - and /"
            )

    def _listing(self) -> dict[str, int]:
        """Size of every file at the top of the repository."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self.token)
        info = self._try(
            lambda: api.model_info(self.model_id, revision=self.revision, files_metadata=True, timeout=20),
            () if self._present(["config.json"]) else self.pauses,  # with files in the cache there is no need to wait
        )
        return {file.rfilename: file.size or 0 for file in info.siblings or [] if PLAIN_NAME.fullmatch(file.rfilename)}

    def _weight_names(self, folder: Path, sizes: dict[str, int]) -> list[str]:
        chosen = choose_weights(sizes)
        if not chosen:
            raise HubError(f"{self.model_id} has no weights in a supported format: *.safetensors or *.bin")
        return indexed_names(folder / chosen[0]) if chosen[0].endswith(".index.json") else chosen

    def _fetch(self, names: list[str], sizes: dict[str, int]) -> Path:
        """Download what is not in the cache yet and return the snapshot folder.

        A broken connection is resumed where it broke. A launch that is stopped keeps the files that are complete; the
        others start again, for huggingface_hub gives every process temporary files of its own.
        """
        from huggingface_hub import constants, snapshot_download

        cache = Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()
        present = self._present(names)
        missing = sum(sizes.get(name, 0) for name in names if name not in present)
        if missing:
            cache.mkdir(parents=True, exist_ok=True)
            self._remove_remains(cache)
            need_space(cache, missing, f"to download {self.model_id}: make room, or move --huggingface-hub-cache")
            self.report(f"Downloading {readable(missing)} of {self.model_id} into {cache}")
        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in names]
        return Path(
            self._try(
                lambda: snapshot_download(
                    self.model_id,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    token=self.token,
                    endpoint=self.endpoint,
                    allow_patterns=patterns,
                    tqdm_class=progress_class(self.report),
                ),
                self.pauses,
            )
        )

    def _remove_remains(self, cache: Path) -> None:
        """Remove temporary files of downloads that were killed; one that is running writes to its own all the time."""
        for path in cache.glob(f"models--{self.model_id.replace('/', '--')}/blobs/*.incomplete"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > REMAINS_SECONDS:
                    path.unlink()

    def _present(self, names: Iterable[str]) -> set[str]:
        from huggingface_hub import try_to_load_from_cache

        load = {name: try_to_load_from_cache(self.model_id, name, self.cache_dir, self.revision) for name in names}
        return {name for name, path in load.items() if isinstance(path, str)}

    def _cached(self, reason: str) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = snapshot_download(
                self.model_id,
                revision=self.revision,
                cache_dir=self.cache_dir,
                local_files_only=True,
                allow_patterns=["config.json"],
            )
        except LocalEntryNotFoundError:
            raise HubError(
                f"{self.model_id} is not in the cache and cannot be downloaded ({reason}): connect once, or give a "
                "folder as --model-id"
            ) from None
        self.report(f"Using the cached files of {self.model_id} ({reason})")
        return Path(folder)

    def _try(self, action: Callable[[], Any], pauses: Sequence[float]) -> Any:
        """Run one transfer, again after each pause if the fault may pass, and say in one sentence why it failed."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's, whichever hub uses

        for attempt, pause in enumerate((*pauses, None), 1):
            try:
                return action()
            except (HTTPError, OSError) as error:
                problem = self._explain(error)
            if pause is None or not isinstance(problem, HubUnreachable):
                raise problem
            self.report(f"{problem}; try {attempt + 1} of {len(pauses) + 1} in {pause:g} s")
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _explain(self, error: Exception) -> HubError:
        """The sentence for a failed transfer."""
        from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

        name = self.model_id
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, OSError) and error.filename is not None:
            return HubError(f"cannot write {error.filename}: {error.strerror}; make room or check permissions")
        if isinstance(error, GatedRepoError) or status == 403:
            return HubError(f"{name} is gated: accept its terms on its hub page and set HF_TOKEN to your token")
        if isinstance(error, RevisionNotFoundError):
            return HubError(f"{name} has no revision {self.revision!r}: check --revision")
        if status == 401:
            return HubError(f"{name} does not exist or is private: check --model-id, or set HF_TOKEN to a token")
        if status == 404:
            return HubError(f"{name} was not found on the hub: check --model-id")
        if status is None:
            return HubUnreachable(f"the hub cannot be reached ({_innermost(error)}): check the network, or HF_ENDPOINT")
        kind = HubUnreachable if status in RETRY_STATUS else HubError
        return kind(f"the hub answered {name} with status {status}: try later")


def _innermost(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


def progress_class(report: Report) -> Any:
    """Progress bars on a terminal; elsewhere one line every ten seconds. A class, as huggingface_hub wants it."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Progress(tqdm):
        """Bars go to standard error; where that is no terminal, the bar that counts the files' bytes speaks instead."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.speaks = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            self.said = time.monotonic()
            super().__init__(*args, **{"disable": None, **options})  # None: shown on a terminal only

        def update(self, n: float | None = 1) -> Any:
            if self.disable:  # then tqdm counts nothing
                self.n += n or 0
            if self.disable and self.speaks and time.monotonic() - self.said > 10:
                self.said = time.monotonic()
                report(f"Downloaded {readable(self.n)} of {readable(self.total or 0)}")
            return super().update(n)

    return Progress

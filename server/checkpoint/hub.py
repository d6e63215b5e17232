"""From a model id to checked local folders: downloaded, found in huggingface_hub's cache, or a folder that is given.

Runs once, in the launcher, before any process is started; the shards and the router only ever see folders. It imports
no torch, and `huggingface_hub` only when something may have to be downloaded: a local folder makes no connection.
`huggingface_hub` downloads; this module chooses the files (Python files and pickles other than `*.bin` are never
fetched), looks at the room on the disk first, tries again what may pass, and says in one sentence why it gave up.

What the files of a folder must be is said in `files.py`; old formats are converted in a separate process
(`convert.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from host.folders import make_private
from server.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PLAIN_NAME,
    QUANTISATION_FILES,
    HubError,
    adapter_files,
    check_safetensors,
    checked_file,
    choose_adapter_weights,
    choose_weights,
    indexed_names,
    need_space,
    read_json,
    readable,
    refuse_placeholder,
    weight_files,
)

REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
TEXT_FILES = re.compile(r"[\w.-]+\.(json|model|jinja)|vocab\.txt|merges\.txt")  # configs, tokenizers, indexes
TOKENIZER_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds between the five tries of a transfer
REMAINS_SECONDS = 3600  # a temporary file not written for so long belongs to no running download
RETRY_STATUS = (408, 429, 500, 502, 503, 504)

Report = Callable[[str], None]  # shows one line to the user
Convert = Callable[[str, Path, Path], None]  # ("weights", "tokenizer" or "adapter", source folder, target folder)


@dataclass(frozen=True)
class Content:
    """What a repository holds. choose: of the names of its files those with weights; none: it has none."""

    what: str
    description: str  # the file that says what it is
    choose: Callable[[Iterable[str]], list[str]]


MODEL = Content("model", "config.json", choose_weights)
ADAPTER = Content("adapter", ADAPTER_CONFIG, choose_adapter_weights)


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
    with_tokenizer: bool = True,
    weights_override: str | None = None,
    token: str | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    report: Report = print,
    pauses: Sequence[float] = PAUSES,
) -> ResolvedModel:
    """Bring the model to this machine if needed, check its files and convert old formats. Raises HubError.

    Without `with_weights` the model's description and tokenizer are enough; without `with_tokenizer` it needs none, and
    `tokenizer_path` has perhaps no tokenizer. convert: makes the new files of old ones;
    user_cache: where these go if the model's own folder cannot be written; pauses: seconds between tries of a transfer.
    """
    local = local_folder(model_id)
    repository = Repository(model_id, revision, cache_dir, token, offline, endpoint, report, pauses)
    folder = local or repository.download(with_weights=with_weights and weights_override is None)
    read_json(folder / "config.json", "the model's description")
    weights_from = folder if weights_override is None else Path(weights_override).expanduser().resolve()
    return ResolvedModel(
        path=folder,
        weights_path=_weights(weights_from, convert, user_cache, report) if with_weights else folder,
        tokenizer_path=_tokenizer(folder, convert, user_cache, report) if with_tokenizer else folder,
        sha=None if local else folder.name,
    )


def resolve_adapter(
    adapter_id: str,
    *,
    convert: Convert,
    user_cache: Path,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    report: Report = print,
    pauses: Sequence[float] = PAUSES,
) -> Path:
    """The folder of an adapter in PEFT's format, its weights in safetensors. Arguments and errors as of `resolve`."""
    local = local_folder(adapter_id, ADAPTER.what)
    repository = Repository(adapter_id, revision, cache_dir, token, offline, endpoint, report, pauses, content=ADAPTER)
    folder = local or repository.download(with_weights=True)
    read_json(folder / ADAPTER.description, "the adapter's description")
    files = adapter_files(folder)
    if files[0].suffix == ".bin":
        folder = _converted("adapter", folder, [*files, folder / ADAPTER.description], convert, user_cache, report)
        files = [folder / ADAPTER_WEIGHTS[0]]
    for path in files:
        check_safetensors(path)
    return folder


def local_folder(model_id: str, what: str = "model") -> Path | None:
    """The folder that a model id is the path of; None: a repository's name. Raises HubError for a path to nothing."""
    local = Path(os.path.expanduser(model_id))
    if model_id and local.is_dir():
        return local.resolve()
    if model_id and local.is_file():
        raise HubError(f"the {what} {model_id} is a file: give the folder that it is in")
    if model_id.startswith((".", "/", "~")):
        raise HubError(f"the {what} {model_id} is not a folder: check the path")
    return None


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


class HubUnreachable(HubError):
    """The hub did not answer, or not sensibly. What is in the cache may still suffice."""


@dataclass(frozen=True)
class Repository:
    """One revision of one model on the hub. pauses: seconds before each further try of a transfer that failed."""

    model_id: str
    revision: str | None
    cache_dir: str | None
    token: str | None
    offline: bool
    endpoint: str | None
    report: Report
    pauses: Sequence[float]
    timeout: float = 20.0  # seconds without an answer of the hub
    content: Content = MODEL

    def describe(self, spare: Path) -> tuple[Path, set[str]]:
        """A folder with config.json, and the names of the repository's files where the hub was asked for them.

        What the cache lacks is fetched into the folder `spare`: config.json and what says how weights are quantised.
        Raises HubError.
        """
        self._check_names()
        if self.offline or self._present([self.content.description]):
            return self._cached("HF_HUB_OFFLINE is set"), set()
        try:
            commit, sizes = self._listing()
        except HubUnreachable as error:
            raise HubUnreachable(self._absent(str(error))) from None
        for name in {self.content.description, *QUANTISATION_FILES} & sizes.keys():
            (spare / name).write_bytes(self._try(partial(self._read, name, commit), self.pauses))
        return spare, set(sizes)

    def download(self, with_weights: bool) -> Path:
        """The folder in the cache that holds every file that is needed. Raises HubError.

        Small files are fetched first, because they may show that the model cannot be served. If the hub does not
        answer, or offline, what the cache holds is taken as it is.
        """
        self._check_names()
        if self.offline:
            return self._cached("HF_HUB_OFFLINE is set")
        try:
            _, sizes = self._listing()
        except HubUnreachable as error:
            return self._cached(str(error))
        folder = self._fetch(sorted(name for name in sizes if TEXT_FILES.fullmatch(name)), sizes)
        if with_weights:
            self._fetch(self._weight_names(folder, sizes), sizes)
        return folder

    @property
    def cache(self) -> Path:
        """The folder of all downloaded models."""
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    def _check_names(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.model_id)
        except HFValidationError:
            raise HubError(
                f"the {self.content.what} {self.model_id!r} is neither a folder nor a repository name such as "
                "bigscience/bloomz-560m"
            ) from None
        if self.revision is not None and (not REVISION.fullmatch(self.revision) or ".." in self.revision):
            raise HubError(
                f"--revision {self.revision!r} is no branch, tag or commit: use letters, digits, . _ - and /"
            )

    def _listing(self) -> tuple[str, dict[str, int]]:
        """The commit, and the size of every file at the top. Raises HubError, also where there is other content."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self.token)
        info = self._try(
            lambda: api.model_info(self.model_id, revision=self.revision, files_metadata=True, timeout=self.timeout),
            # With files in the cache there is no need to wait.
            () if self._present([self.content.description]) else self.pauses,
        )
        files = info.siblings or []
        sizes = {file.rfilename: file.size or 0 for file in files if PLAIN_NAME.fullmatch(file.rfilename)}
        if self.content.description not in sizes:
            raise HubError(
                f"{self.model_id} has no {self.content.description}: it is no {self.content.what} that can be served"
            )
        return info.sha or "main", sizes

    def _read(self, name: str, commit: str) -> bytes:
        """A small file of the repository, past the cache."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(self.model_id, name, revision=commit, endpoint=self.endpoint)
        answer = get_session().get(url, headers=build_hf_headers(token=self.token), timeout=self.timeout)
        hf_raise_for_status(answer)
        return answer.content

    def _weight_names(self, folder: Path, sizes: dict[str, int]) -> list[str]:
        chosen = self.content.choose(sizes)
        if not chosen:
            raise HubError(f"{self.model_id} has no weights in a supported format: *.safetensors or *.bin")
        return indexed_names(folder / chosen[0]) if chosen[0].endswith(".index.json") else chosen

    def _fetch(self, names: list[str], sizes: dict[str, int]) -> Path:
        """Download what is not in the cache yet and return the snapshot folder.

        A broken connection is resumed where it broke. A launch that is stopped keeps the files that are complete; the
        others start again, for huggingface_hub gives every process temporary files of its own.
        """
        from huggingface_hub import snapshot_download

        cache = self.cache
        present = self._present(names)
        missing = sum(sizes.get(name, 0) for name in names if name not in present)
        if missing:
            make_private(cache)
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
                    tqdm_class=_progress_class(self.report),
                ),
                self.pauses,
            )
        )

    def _remove_remains(self, cache: Path) -> None:
        """Remove temporary files of downloads that were killed.

        A download that is running writes to its own temporary file all the time, so that the file is never old.
        """
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
                allow_patterns=[self.content.description],
            )
        except LocalEntryNotFoundError:
            remedy = ": check the name, or unset HF_HUB_OFFLINE" if self.offline else ""
            raise HubError(self._absent(reason + remedy)) from None
        self.report(f"Using the cached files of {self.model_id} ({reason})")
        return Path(folder)

    def _absent(self, reason: str) -> str:
        return f"{self.model_id} is no folder here, is not in the cache and cannot be downloaded, as {reason}"

    def _try(self, action: Callable[[], Any], pauses: Sequence[float]) -> Any:
        """Run one transfer, again after each pause if the fault may pass, and say in one sentence why it failed."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's, whichever hub uses

        for attempt, pause in enumerate((*pauses, None), 1):
            try:
                return action()
            except (HTTPError, OSError) as error:
                problem = self._explain(error)
            except (ValueError, TypeError, KeyError, AttributeError):  # of JSON that is none, or of another shape
                problem = HubUnreachable("the hub's answer cannot be read: check the network, or HF_ENDPOINT")
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
            return HubError(
                f"{name} is no folder here, and on the hub it does not exist or is private: check the name, or set "
                "HF_TOKEN to a token"
            )
        if status == 404:
            return HubError(f"{name} is neither a folder here nor on the hub: check the name")
        if status is None:
            return HubUnreachable(f"the hub cannot be reached ({_innermost(error)}): check the network, or HF_ENDPOINT")
        kind = HubUnreachable if status in RETRY_STATUS else HubError
        return kind(f"the hub answered {name} with status {status}: try later")


def _innermost(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


def _progress_class(report: Report) -> Any:
    """A class, as huggingface_hub wants it, that shows progress as bars on a terminal, else as a line every 10 s."""
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

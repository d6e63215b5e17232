"""Resolving a model: local folders and their checks, and downloads from a hub that runs in this process."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.checkpoint import hub
from server.checkpoint.files import HubError
from server.checkpoint.hub import Repository, ResolvedModel

MADE = {"weights": "model.safetensors", "tokenizer": "tokenizer.json", "adapter": "adapter_model.safetensors"}
SHA = "1234567890abcdef1234567890abcdef12345678"


def safetensors(data_bytes: int = 8, **header: Any) -> bytes:
    entry = {"w": {"dtype": "F32", "shape": [data_bytes // 4], "data_offsets": [0, data_bytes]}}
    text = json.dumps(header or entry).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bloom"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(safetensors())
    return model


def resolve(model: Path | str, **options: Any) -> ResolvedModel:
    def convert(kind: str, source: Path, target: Path) -> None:
        raise AssertionError("nothing to convert")

    defaults = {
        "convert": convert,
        "user_cache": Path("/nonexistent"),
        "report": lambda _: None,
        "pauses": (0, 0, 0, 0),
    }
    return hub.resolve(str(model), **{**defaults, **options})


def made(kind: str, source: Path, target: Path) -> None:
    """Stands in for a conversion."""
    target.mkdir()
    (target / MADE[kind]).write_bytes(safetensors())


def index(folder: Path, *names: object) -> None:
    weight_map = {f"w{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# Local folders


def test_a_link_that_leads_to_itself_is_one_sentence(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to("model.safetensors")
    with pytest.raises(
        HubError, match=r"model\.safetensors (is a link that leads to itself|is missing): fetch the model"
    ):
        resolve(folder)


def test_local_folder_is_used_as_it_is_and_makes_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert ResolvedModel(folder, folder, folder, None) == resolve(folder)


def test_weights_can_come_from_another_folder(folder: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    (folder / "model.safetensors").rename(flat / "model.safetensors")
    assert flat == resolve(folder, weights_override=str(flat)).weights_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no weights: \*\.safetensors or \*\.bin must lie in it"),
    ],
)
def test_missing_file_is_named(folder: Path, name: str, expected: str) -> None:
    (folder / name).unlink()
    with pytest.raises(HubError, match=expected):
        resolve(folder)


def test_path_that_is_no_folder_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(HubError, match=r"model\.gguf is a file: give the folder that it is in"):
        resolve(tmp_path / "model.gguf")
    with pytest.raises(HubError, match="is not a folder: check the path"):
        resolve(tmp_path / "nothing")


def described(**ranges: tuple[int, int]) -> bytes:
    """A file of bytes up to the last of these ranges, each of which is a tensor of its header."""
    header = {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop) in ranges.items()
    }
    return safetensors(max(stop for _, stop in ranges.values()), **header)


DAMAGED = {
    "cut short": safetensors()[:-3],
    "cut inside its header": safetensors()[:20],
    "bytes after its end": safetensors() + b"x",
    "tensors that overlap": described(a=(0, 8), b=(4, 8)),
    "gap before a tensor": described(a=(4, 8)),
    "gap between tensors": described(a=(0, 4), b=(8, 12)),
    "header that is no JSON": struct.pack("<Q", 4) + b"[1,]",
    "header that is no object": struct.pack("<Q", 4) + b"[[]]",
    "header with a range in words": safetensors(8, w={"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}),
    "header without a shape": safetensors(8, w={"dtype": "F32", "data_offsets": [0, 8]}),
    "header with another shape": safetensors(8, w={"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}),
    "header of impossible length": struct.pack("<Q", 1 << 60) + b"{}",
    "too short for a header": b"1234567",
    "archive": b"PK\x03\x04not really",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_are_named_before_anything_loads(folder: Path, content: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(HubError) as refusal:
        resolve(folder)
    assert str(refusal.value).startswith(f"{path} is damaged or incomplete (")
    assert str(refusal.value).endswith("): delete it and fetch it again")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.safetensors", "", "is empty"),
        ("model.safetensors", POINTER, "is a git-LFS pointer"),
        ("model.safetensors", "<!DOCTYPE html><html>login</html>", "is a web page"),
        ("tokenizer.json", POINTER, "is a git-LFS pointer"),
    ],
)
def test_what_stands_in_for_a_file_is_told_apart(folder: Path, name: str, content: str, expected: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(HubError, match=rf"{re.escape(name)} {expected}"):
        resolve(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000, "is not JSON"),
        ("", "is empty"),
        (" " * 50_000_001, "is larger than"),
    ],
)
def test_damaged_config_is_refused(folder: Path, content: str, expected: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(HubError, match=rf"config\.json {expected}"):
        resolve(folder)


def test_every_file_of_the_index_is_checked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with pytest.raises(HubError, match=r"model-00002-of-00002\.safetensors is missing"):
        resolve(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors())
    assert folder == resolve(folder).weights_path


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "~/x.safetensors", "x.pt", 7, None]
)
def test_index_that_names_anything_but_a_plain_file_is_refused(folder: Path, name: object) -> None:
    (folder.parent / "outside.safetensors").write_bytes(safetensors())
    index(folder, "model.safetensors", name)
    with pytest.raises(HubError, match=r"which is not a plain file name: do not use this model"):
        resolve(folder)


@pytest.mark.parametrize("weight_map", [[], {}, None, "model.safetensors"])
def test_index_without_a_map_is_refused(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(HubError, match="has no weight_map"):
        resolve(folder)


def test_link_out_of_the_folder_is_refused(folder: Path) -> None:
    outside = folder.parent / "secret.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(HubError, match="is not a regular file inside its folder"):
        resolve(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_pipe_in_place_of_a_file_is_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(HubError, match="is not a regular file inside its folder"):
        resolve(folder)


def test_old_weights_and_tokenizer_are_converted_once(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    calls = []

    def convert(kind: str, source: Path, target: Path) -> None:
        calls.append((kind, source))
        made(kind, source, target)

    first = resolve(folder, convert=convert)
    assert [("weights", folder), ("tokenizer", folder)] == calls
    assert folder / ".lockstep" == first.weights_path.parent == first.tokenizer_path.parent
    assert first == resolve(folder, convert=convert)
    assert 2 == len(calls)
    (folder / "pytorch_model.bin").write_bytes(safetensors(16))
    assert first.weights_path != resolve(folder, convert=convert).weights_path


def test_conversion_goes_to_the_users_cache_where_the_folder_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(hub, "_is_writable", lambda _: False)
    assert tmp_path / "cache" in resolve(folder, convert=made, user_cache=tmp_path / "cache").weights_path.parents


def test_conversion_that_does_not_fit_is_refused_before_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(HubError, match=r"has 0\.0 MB free but .* are needed to convert the weights"):
        resolve(folder)


# The hub


class FakeHub(ThreadingHTTPServer):
    """One repository of the hub: model info, tree, and files with ranges; faults on demand."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files: dict[str, bytes] = {}
        self.faults: list[tuple[str, int]] = []  # (part of the path, status), each used once; 0 cuts the connection
        self.always: int | None = None  # status of every answer
        self.body = b"{}"  # of it
        self.silence = 0.0  # seconds in place of every answer
        self.gated = False
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests[f"{self.command} {path}"] += 1
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.silence:
            self.close_connection = True
            return time.sleep(self.server.silence)
        if self.server.always:
            return self.answer(self.server.always, self.server.body)
        if path.startswith("/api/models/some/model/tree/"):
            tree = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in self.server.files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if re.fullmatch(r"/api/models/some/model(/revision/(main|v1|" + SHA + "))?", path):
            siblings = [{"rfilename": name, "size": len(body)} for name, body in self.server.files.items()]
            return self.answer(200, json.dumps({"id": "some/model", "sha": SHA, "siblings": siblings}).encode())
        if path.startswith("/api/models/some/model/revision/"):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith(f"/some/model/resolve/{SHA}/"):
            return self.file(path.rsplit("/", 1)[1])
        self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def file(self, name: str) -> None:
        if self.server.gated:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        body = self.server.files[name]
        status, headers = 200, {"ETag": f'"{sha256(body).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if (wanted := self.headers.get("Range")) and self.command == "GET":
            self.server.ranges.append(f"{name} {wanted}")
            begin = int(re.findall(r"\d+", wanted)[0])
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[begin:]
        fault = next((f for f in self.server.faults if f[0] == name and self.command == "GET"), None)
        if fault:
            self.server.faults.remove(fault)
            if fault[1]:
                return self.answer(fault[1], b"{}")
            self.answer(status, body, headers, cut=len(body) // 2)
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        self.answer(status, body, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            self.wfile.flush()


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = FakeHub()
    server.files = {
        "config.json": b'{"model_type": "bloom"}',
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors(400_000),
        "pytorch_model.bin": b"a pickle",
        "modeling_evil.py": b"raise SystemExit",
        "model.h5": b"h5",
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    close_session()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def download(fake_hub: FakeHub, tmp_path: Path) -> Callable[..., ResolvedModel]:
    def run(model_id: str = "some/model", **options: Any) -> ResolvedModel:
        return resolve(model_id, **{"cache_dir": str(tmp_path / "hub"), "endpoint": fake_hub.url, **options})

    return run


def test_download_takes_what_is_needed_and_nothing_else(fake_hub: FakeHub, download: Any) -> None:
    model = download(token="hf_abc")
    assert {"config.json", "tokenizer.json", "model.safetensors"} == {path.name for path in model.path.iterdir()}
    assert SHA == model.sha and "Bearer hf_abc" in fake_hub.tokens
    assert fake_hub.files["model.safetensors"] == (model.weights_path / "model.safetensors").read_bytes()


def test_second_launch_downloads_nothing(fake_hub: FakeHub, download: Any) -> None:
    first = download()
    fake_hub.requests.clear()
    assert first == download()
    assert not [request for request in fake_hub.requests if "/resolve/" in request and request.startswith("GET")]


def test_bin_is_fetched_only_where_there_are_no_safetensors(fake_hub: FakeHub, download: Any) -> None:
    del fake_hub.files["model.safetensors"]
    model = download(convert=made)
    assert b"a pickle" == (model.path / "pytorch_model.bin").read_bytes()
    assert model.path.parent.parent / "lockstep" / SHA == model.weights_path.parent


def test_only_the_files_of_the_index_are_fetched(fake_hub: FakeHub, download: Any) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {"weight_map": {"a": names[0], "b": names[1]}}
    fake_hub.files |= {name: safetensors() for name in names} | {"consolidated.safetensors": safetensors()}
    fake_hub.files["model.safetensors.index.json"] = json.dumps(weight_map).encode()
    assert names == sorted(path.name for path in download().weights_path.glob("*.safetensors"))


def adapter_of(adapter_id: str, **options: Any) -> Path:
    defaults = {"convert": made, "user_cache": Path("/nonexistent"), "report": lambda _: None, "pauses": ()}
    return hub.resolve_adapter(adapter_id, **{**defaults, **options})


@pytest.fixture
def download_adapter(fake_hub: FakeHub, tmp_path: Path) -> Callable[..., Path]:
    """From a repository that has a merged model too."""
    described = {"adapter_config.json": b"{}", "README.md": b"", "training_args.bin": b"a pickle"}
    del fake_hub.files["config.json"]
    fake_hub.files |= described | {"adapter_model.safetensors": safetensors(), "adapter_model.bin": b"a pickle"}
    return lambda **options: adapter_of("some/model", cache_dir=str(tmp_path), endpoint=fake_hub.url, **options)


def test_of_an_adapter_its_own_files_are_fetched(fake_hub: FakeHub, download_adapter: Any) -> None:
    folder = download_adapter(revision="v1")
    expected = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert expected == {path.name for path in folder.iterdir()}
    fake_hub.requests.clear()
    assert folder == download_adapter(revision="v1", offline=True) and not fake_hub.requests


def test_an_adapter_in_an_old_format_is_converted(fake_hub: FakeHub, download_adapter: Any) -> None:
    del fake_hub.files["adapter_model.safetensors"]
    folder = download_adapter()
    assert "adapter_model.safetensors" in {path.name for path in folder.iterdir()} and "adapter-" in folder.name


def test_what_is_no_adapter_is_refused(fake_hub: FakeHub, download_adapter: Any, tmp_path: Path) -> None:
    del fake_hub.files["adapter_model.safetensors"], fake_hub.files["adapter_model.bin"]
    with pytest.raises(HubError, match="some/model has no weights in a supported format"):
        download_adapter()
    del fake_hub.files["adapter_config.json"]
    with pytest.raises(HubError, match=r"some/model has no adapter_config\.json: it is no adapter that can be served"):
        download_adapter()
    with pytest.raises(HubError, match="the adapter /no/where is not a folder"):
        adapter_of("/no/where")
    with pytest.raises(HubError, match=r"adapter_config\.json is missing \(the adapter's description\)"):
        adapter_of(str(tmp_path))


def test_index_from_the_hub_is_not_trusted(fake_hub: FakeHub, download: Any) -> None:
    fake_hub.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../../../etc/passwd"}}'
    with pytest.raises(HubError, match="not a plain file name"):
        download()


def test_weights_are_left_out_where_they_come_from_elsewhere(fake_hub: FakeHub, download: Any, folder: Path) -> None:
    model = download(weights_override=str(folder))
    assert folder == model.weights_path
    assert {"config.json", "tokenizer.json"} == {path.name for path in model.path.iterdir()}


def test_repository_without_config_is_refused_before_its_weights_are_fetched(fake_hub: FakeHub, download: Any) -> None:
    del fake_hub.files["config.json"]
    with pytest.raises(HubError, match=r"has no config\.json"):
        download()
    assert not [request for request in fake_hub.requests if "/resolve/" in request]


def test_every_file_is_of_the_wanted_revision(fake_hub: FakeHub, download: Any) -> None:
    assert SHA == download(revision="v1").sha
    assert {SHA} == {request.split("/")[4] for request in fake_hub.requests if "/resolve/" in request}


def test_interrupted_file_is_resumed(fake_hub: FakeHub, download: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # 10 MB, bigger than our file
    fake_hub.faults = [("model.safetensors", 0)]
    model = download()
    assert fake_hub.files["model.safetensors"] == (model.weights_path / "model.safetensors").read_bytes()
    (resumed,) = fake_hub.ranges
    assert 0 < int(resumed.removeprefix("model.safetensors bytes=").split("-")[0]) < 400_000


def test_passing_fault_is_tried_again(fake_hub: FakeHub, download: Any) -> None:
    fake_hub.faults = [("model.safetensors", 500), ("model.safetensors", 503)]
    said: list[str] = []
    assert SHA == download(report=said.append).sha
    assert [line for line in said if "try 2 of 5" in line]


def test_lasting_fault_ends_after_five_tries(fake_hub: FakeHub, download: Any) -> None:
    fake_hub.always = 500
    with pytest.raises(HubError, match="the hub answered some/model with status 500: try later"):
        download()
    assert 5 == sum(fake_hub.requests.values())


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            401,
            "some/model is no folder here, and on the hub it does not exist or is private: check the name, or set "
            "HF_TOKEN to a token",
        ),
        (403, "some/model is gated: accept its terms on its hub page and set HF_TOKEN to your token"),
        (404, "some/model is neither a folder here nor on the hub: check the name"),
    ],
)
def test_refusal_of_the_hub_is_one_sentence_and_not_retried(
    fake_hub: FakeHub, download: Any, status: int, expected: str
) -> None:
    fake_hub.always = status
    with pytest.raises(HubError) as refusal:
        download()
    assert expected == str(refusal.value)
    assert 1 == sum(fake_hub.requests.values())


def test_gated_files_of_a_public_listing_and_an_unknown_revision_are_named(fake_hub: FakeHub, download: Any) -> None:
    with pytest.raises(HubError, match="some/model has no revision 'v9': check --revision"):
        download(revision="v9")
    fake_hub.gated = True
    with pytest.raises(HubError, match="some/model is gated"):
        download()


@pytest.mark.parametrize("revision", ["", "../../x", "-x", "a b", "a\n", "x" * 201])
def test_revision_that_cannot_be_one_is_refused_at_once(fake_hub: FakeHub, download: Any, revision: str) -> None:
    with pytest.raises(HubError, match="is no branch, tag or commit"):
        download(revision=revision)
    assert not fake_hub.requests


@pytest.mark.parametrize("model_id", ["a/b/c", "a--b", "some model", "a/..b", "-x", "a\nb", ""])
def test_name_that_cannot_be_one_is_refused_at_once(fake_hub: FakeHub, download: Any, model_id: str) -> None:
    with pytest.raises(HubError, match="is neither a folder nor a repository name"):
        download(model_id)
    assert not fake_hub.requests


def test_offline_uses_the_cache_without_a_connection(fake_hub: FakeHub, download: Any) -> None:
    first = download()
    fake_hub.requests.clear()
    assert first == download(offline=True)
    assert not fake_hub.requests


def test_offline_without_cache_says_what_to_do(download: Any) -> None:
    with pytest.raises(
        HubError,
        match=r"no folder here, .*downloaded, as HF_HUB_OFFLINE is set: check the name, or unset HF_HUB_OFFLINE",
    ):
        download(offline=True)


def asked(fake_hub: FakeHub, tmp_path: Path, timeout: float = 60.0) -> tuple[Path, set[str]]:
    options = {"report": lambda sentence: None, "pauses": (), "token": None, "offline": False, "endpoint": fake_hub.url}
    repository = Repository("some/model", None, str(tmp_path / "hub"), **options, timeout=timeout)
    (tmp_path / "spare").mkdir(exist_ok=True)
    return repository.describe(tmp_path / "spare")


def test_of_a_description_config_json_alone_is_fetched(fake_hub: FakeHub, tmp_path: Path) -> None:
    folder, names = asked(fake_hub, tmp_path)
    assert (tmp_path / "spare", {*fake_hub.files}) == (folder, names)
    assert ["config.json"] == [path.name for path in folder.iterdir()] and not (tmp_path / "hub").exists()


def test_a_description_in_the_cache_is_not_fetched(fake_hub: FakeHub, download: Any, tmp_path: Path) -> None:
    first = download()
    fake_hub.requests.clear()
    assert (first.path, set()) == asked(fake_hub, tmp_path)
    assert not fake_hub.requests


@pytest.mark.parametrize("answer", [b"{", b"[1]", b'{"siblings": 3}'])
def test_an_answer_of_the_hub_that_cannot_be_read_is_a_sentence(
    answer: bytes, fake_hub: FakeHub, tmp_path: Path
) -> None:
    fake_hub.always, fake_hub.body = 200, answer
    with pytest.raises(HubError, match="the hub's answer cannot be read"):
        asked(fake_hub, tmp_path)


def test_a_silent_hub_is_given_up(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.silence = 2.0
    with pytest.raises(HubError, match="the hub cannot be reached"):
        asked(fake_hub, tmp_path, timeout=0.5)


def test_unreachable_hub_falls_back_to_the_cache(fake_hub: FakeHub, download: Any) -> None:
    first = download()
    said: list[str] = []
    assert first == download(endpoint="http://127.0.0.1:9", report=said.append)
    assert 1 == len(said) and "the hub cannot be reached" in said[0]
    fake_hub.always = 503
    assert first == download()


def test_unreachable_hub_without_cache_is_one_sentence(download: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds == 0 or pytest.fail(f"it waited for {seconds} s"))
    with pytest.raises(
        HubError, match=r"cannot be downloaded, as the hub cannot be reached \(.*\): check the network, or HF_ENDPOINT$"
    ):
        download(endpoint="http://127.0.0.1:9")


def test_incomplete_cache_is_noticed_offline(download: Any) -> None:
    (download().path / "model.safetensors").unlink()
    with pytest.raises(HubError, match="has no weights"):
        download(offline=True)


def test_full_disk_is_noticed_before_the_download(
    fake_hub: FakeHub, download: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    with pytest.raises(HubError, match=r"free but .* are needed to download some/model: make room"):
        download()
    assert not [request for request in fake_hub.requests if "model.safetensors" in request]


def test_disk_that_fills_up_during_the_download_is_one_sentence(download: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/blobs/x")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(HubError, match="cannot write /cache/blobs/x: No space left on device; make room"):
        download()


def test_remains_of_a_killed_download_are_removed_once_they_are_old(download: Any, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    for name, age in (("a.1.incomplete", 7200), ("b.2.incomplete", 60)):
        (blobs / name).write_bytes(b"x")
        os.utime(blobs / name, (time.time() - age,) * 2)
    download()
    assert ["b.2.incomplete"] == [path.name for path in blobs.glob("*.incomplete")]


def test_two_launches_download_once(fake_hub: FakeHub, download: Any) -> None:
    found: list[ResolvedModel] = []
    threads = [threading.Thread(target=lambda: found.append(download())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 == len(found) and found[0] == found[1]
    assert 1 == fake_hub.requests[f"GET /some/model/resolve/{SHA}/model.safetensors"]


def test_progress_is_told_in_lines_where_there_is_no_terminal(download: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = iter(range(0, 100_000, 11))
    monkeypatch.setattr("server.checkpoint.hub.time.monotonic", lambda: float(next(clock)))
    download(report=said.append)
    assert [line for line in said if line.startswith("Downloaded 0.4 MB of 0.4 MB")]

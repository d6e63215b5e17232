"""Names and what they stand for: what files hold now, and nothing where there is none."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from router.errors import Unavailable, UnknownModel, ValidationError
from router.requests import adapter_files, adapters
from router.requests.adapter_files import Appearance, Content
from router.requests.adapters import Adapters
from router.scheduling.adapters import Adapter
from server.adapters.identity import content_key
from tests.adapter_folders import adapter_folder
from tests.router.scheduling.test_drain_rate import Clock

OWN = ("a/model", "tgi")
HOSTILE = (
    *(
        "..",
        ".",
        "../home",
        "../home/alice",
        "home/alice",
        "alice/",
        "alice/.",
        "./alice",
        "/etc",
        "//",
        "alice/../alice",
    ),
    *("%2e%2e%2falice", "..\\alice", "alice\0", "\0", "alice\n", " alice", "alice ", "~root", "$HOME", "*", "al?ce"),
    *(".hidden", "\u202ealice", "\uff0e\uff0e/", "\ud7ff", "a" * 5000, "a/" * 2500, "CON", "-rf", "--", "tgi/alice"),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of --adapter-dir, beside another one with an adapter."""
    adapter_folder(tmp_path / "outside" / "carol", "c")
    adapter_folder(tmp_path / "home" / "alice", "a")
    adapter_folder(tmp_path / "home" / ".hidden", "h")
    return tmp_path / "home"


def of_folder(home: Path, clock: Clock | None = None, **options: Any) -> Adapters:
    return Adapters(OWN, (), str(home), clock=clock or Clock(), **options)


async def refusal(found: Adapters, name: str, kind: type[Exception] = UnknownModel) -> str:
    with pytest.raises(kind) as refused:
        await found.chosen(name, None)
    return str(refused.value)


class Shards:
    """Serve any adapter but for a reason, and note what is asked of them."""

    def __init__(self, problem: str = "") -> None:
        self.prepared: list[Adapter] = []
        self.discarded: list[bytes] = []
        self.refused: set[str] = set()
        self._problem = problem

    async def prepare(self, adapter: Adapter) -> str:
        self.prepared.append(adapter)
        return self._problem

    def refuses(self, adapter: Adapter) -> bool:
        return adapter.name in self.refused

    def discard(self, key: bytes) -> None:
        self.discarded.append(key)


async def test_without_adapters_any_name_is_the_model() -> None:
    none = Adapters(OWN, is_on=False)
    assert [None] * 4 == [await none.chosen(name, None) for name in ("a/model", "gpt-4", "", None)]
    with pytest.raises(ValidationError, match="this server has no adapters: leave `adapter_id` out"):
        await none.chosen(None, "alice")


async def test_a_name_is_an_adapter_s_or_the_model_s_and_nothing_else(tmp_path: Path) -> None:
    folders = {name: adapter_folder(tmp_path / name.replace("/", "-"), name) for name in ("alice", "b/ob")}
    found = Adapters(OWN, [(name, str(folder)) for name, folder in folders.items()])
    assert [None] * 4 == [await found.chosen(name, None) for name in ("a/model", "tgi", "", None)]
    for name, folder in folders.items():
        expected = Adapter(name, content_key(folder), str(folder))
        assert expected == await found.chosen(name, None) == await found.chosen(None, name)
        assert expected == await found.chosen("a/model", name)
    assert "the model Alice is not served here: there is a/model, alice, b/ob" == await refusal(found, "Alice")
    assert "the model b is not served here" in await refusal(found, "b")


async def test_a_refusal_shows_the_beginning_of_many_names() -> None:
    found = Adapters(OWN, [(f"adapter-{number}", "/nowhere") for number in range(30)])
    assert (await refusal(found, "x" * 9000 + "\n")).endswith("adapter-9 and more")
    assert len(await refusal(found, "x" * 9000)) < 300 and "\n" not in await refusal(found, "\n")


async def test_a_refusal_looks_at_few_of_many_names() -> None:
    class Counting(Shards):
        looks = 0

        def refuses(self, adapter: Adapter) -> bool:
            self.looks += 1
            return False

    found = Adapters(OWN, [(f"adapter-{number}", "/nowhere") for number in range(1000)], shelf=(shelf := Counting()))
    for source in found._named.values():
        source.content = Content(Appearance(source.path, ()), b"key")
    await refusal(found, "nobody")
    assert 0 < shelf.looks < 20


async def test_a_key_sees_its_own_names_alone(tmp_path: Path) -> None:
    folder = str(adapter_folder(tmp_path / "alice"))
    found = Adapters(OWN, [("alice", folder), ("bob", folder)])
    mine = frozenset({"alice"})
    assert "alice" == getattr(await found.chosen("alice", None, mine), "name", None)
    for name in ("bob", "carol", "a/model", "tgi", None):
        with pytest.raises(UnknownModel, match=r"is not served here: there is alice$"):
            await found.chosen(name, None, mine)
    for base in ("", "a/model", "tgi"):
        assert None is await found.chosen(None, None, frozenset({base}))
        assert ["alice"] == list(found.names(frozenset({base, "alice"})))
    with pytest.raises(UnknownModel, match="there is nothing that this API key may use"):
        await found.chosen("a/model", None, frozenset({"gone"}))


async def test_a_folder_is_found_when_it_is_asked_for_and_not_before(home: Path) -> None:
    found = of_folder(home)
    assert [] == list(found.names())
    assert content_key(home / "alice") == getattr(await found.chosen("alice", None), "key", None)
    assert ["alice"] == list(found.names())
    await refusal(found, "bob")
    adapter_folder(home / "bob", "b")
    assert "bob" == getattr(await found.chosen("bob", None), "name", None)
    shutil.rmtree(home / "bob")
    found._clock.now += 2  # type: ignore[attr-defined]
    await refusal(found, "bob")
    assert ["alice"] == list(found.names())


async def test_no_name_leads_out_of_the_folder_or_to_what_is_hidden(home: Path, tmp_path: Path) -> None:
    (home / "link").symlink_to(tmp_path / "outside" / "carol")
    (home / "up").symlink_to("..")
    (home / "itself").symlink_to("itself")
    (home / "same").symlink_to(".")
    (home / "file").write_text("")
    os.mkfifo(home / "pipe")
    adapter_folder(home / "stolen")
    (home / "stolen" / "adapter_model.safetensors").unlink()
    (home / "stolen" / "adapter_model.safetensors").symlink_to(tmp_path / "outside/carol/adapter_model.safetensors")
    found = of_folder(home)
    for name in (*HOSTILE, "link", "up", "itself", "same", "file", "pipe", "stolen"):
        sentence = await refusal(found, name)
        assert sentence.isprintable() and len(sentence) < 200 and str(tmp_path) not in sentence
    assert [] == list(found.names()) and not found._arriving and not found._unloaded


async def test_what_lay_outside_while_it_was_read_is_not_served(home: Path, tmp_path: Path) -> None:
    """A folder that somebody puts in the place of one, and takes back before it is looked at again."""
    other, spare = adapter_folder(tmp_path / "other", "stolen"), tmp_path / "spare"

    def exchanging(path: Path, **options: Any) -> bytes:
        (home / "alice").rename(spare)
        other.rename(home / "alice")
        try:
            return content_key(path, **options)
        finally:
            (home / "alice").rename(other)
            spare.rename(home / "alice")

    with patch.object(adapter_files, "content_key", exchanging), pytest.raises(Unavailable, match="is being written"):
        await of_folder(home).chosen("alice", None)


async def test_the_log_says_why_what_lies_there_is_not_served(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "empty").mkdir()
    (home / "up").symlink_to("..")
    found = of_folder(home)
    for name in ("empty", "nothing", "up"):
        await refusal(found, name)
    found._clock.now += 2  # type: ignore[attr-defined]
    await refusal(found, "up")
    assert [
        "empty in the folder for adapters is not served: it has no adapter_config.json",
        "up in the folder for adapters is not served: it does not lie in the folder for adapters",
    ] == caplog.messages


async def test_a_link_within_the_folder_may_be_turned(home: Path) -> None:
    adapter_folder(home / "v2", "b")
    (home / "latest").symlink_to("alice")
    found = of_folder(home)
    first = await found.find("latest")
    (home / "latest").unlink()
    (home / "latest").symlink_to("v2")
    found._clock.now += 2  # type: ignore[attr-defined]
    second = await found.find("latest")
    assert [content_key(home / "alice"), content_key(home / "v2")] == [first.key, second.key]
    assert [str(home / "alice"), str(home / "v2")] == [first.folder, second.folder]


async def test_ten_thousand_names_that_are_nobody_s_leave_nothing(home: Path) -> None:
    found = of_folder(home)

    async def ask(start: int, stop: int) -> int:
        """How many objects there are afterwards."""
        for number in range(start, stop, 50):
            asked = [found.chosen(f"nobody-{one}", None) for one in range(number, number + 50)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert {UnknownModel} == set(map(type, answers))
        del asked, answers
        gc.collect()
        return len(gc.get_objects())

    before = await ask(0, 1_000)
    assert await ask(1_000, 10_000) - before < 200
    assert not (found._found or found._arriving or found._unloaded)


async def test_files_that_changed_are_another_adapter_within_a_second(home: Path) -> None:
    found, clock = of_folder(home), Clock()
    found._clock = clock
    first = await found.find("alice")
    adapter_folder(home / "alice", "b")
    clock.now += 0.5
    assert first == await found.find("alice")
    clock.now += 0.5
    second = await found.find("alice")
    assert first.key != second.key == content_key(home / "alice")
    (home / "alice" / "adapter_config.json").write_text("{}")
    clock.now += 1
    assert second.key != (await found.find("alice")).key
    shutil.rmtree(home / "alice")
    adapter_folder(home / "alice", "a")
    clock.now += 1
    assert first == await found.find("alice")


async def test_files_are_read_once_however_many_ask_and_looked_at_once_a_second(home: Path) -> None:
    found = of_folder(home)
    reads, looks = [], []
    read, look = adapter_files.content_key, adapters.appearance

    def reading(folder: Path, **options: Any) -> bytes:
        reads.append(folder)
        return read(folder, **options)

    def looking(*where: Any) -> Any:
        looks.append(where)
        return look(*where)

    with patch.object(adapter_files, "content_key", reading), patch.object(adapters, "appearance", looking):
        await asyncio.gather(*(found.find("alice") for _ in range(50)))
        assert (1, 1) == (len(reads), len(looks))
        for _ in range(50):
            await found.find("alice")
        assert (1, 1) == (len(reads), len(looks))
        found._clock.now += 1  # type: ignore[attr-defined]
        await asyncio.gather(*(found.find("alice") for _ in range(50)))
        assert (1, 2) == (len(reads), len(looks))


async def test_who_leaves_takes_no_look_of_others_along(home: Path) -> None:
    found = of_folder(home)
    first, second = (asyncio.ensure_future(found.find("alice")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert "alice" == (await second).name and first.cancelled()


async def test_what_cannot_be_served_is_a_sentence(home: Path) -> None:
    found = of_folder(home, most_bytes=10**6)
    large = adapter_folder(home / "large")
    with (large / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(10 * 10**9)  # which takes no room, and would take seconds to be read
    os.rename(adapter_folder(home / "old") / "adapter_model.safetensors", home / "old" / "adapter_model.bin")
    (adapter_folder(home / "empty") / "adapter_model.safetensors").unlink()
    (adapter_folder(home / "pipe") / "adapter_model.safetensors").unlink()
    os.mkfifo(home / "pipe" / "adapter_model.safetensors")
    many = adapter_folder(home / "many")
    for number in range(adapter_files.MOST_FILES):
        (many / str(number)).touch()
    for name, sentence in {
        "large": "the adapter large has 10,000.0 MB, and --adapter-memory has room for what 1.0 MB of files take",
        "old": "the adapter old has weights in *.bin, which are not read while the server runs",
        "empty": "the adapter empty has no *.safetensors",
        "pipe": "the adapter pipe has a adapter_model.safetensors that is no regular file",
        "many": "the adapter many has more than 256 files in its folder",
    }.items():
        assert sentence in await refusal(found, name, ValidationError)
    assert [] == list(found.names())


async def test_files_that_are_written_or_gone_are_waited_for(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "alice")
    found = Adapters(OWN, [("alice", str(folder))])

    def writing(path: Path, **options: Any) -> bytes:
        adapter_folder(path, str(os.urandom(4)))
        return content_key(path, **options)

    with patch.object(adapter_files, "content_key", writing):
        assert "the adapter alice is being written: ask again" == await refusal(found, "alice", Unavailable)
    shutil.rmtree(folder)
    assert "the files of the adapter alice are not there: put them back" == await refusal(found, "alice", Unavailable)
    adapter_folder(folder)
    assert "alice" == (await found.find("alice")).name


async def test_what_the_settings_name_is_there_or_a_sentence(tmp_path: Path) -> None:
    folders = [(name, str(adapter_folder(tmp_path / name, name))) for name in "abc"]
    found, problems = await Adapters(OWN, folders).listed()
    assert (["a", "b", "c"], []) == ([one.name for one in found], problems)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "c" / "adapter_model.safetensors").unlink()
    found, problems = await Adapters(OWN, folders).listed()
    assert ["a"] == [one.name for one in found]
    assert [
        "the adapter b is no folder that can be read",
        "the adapter c has no *.safetensors: copy all of it",
    ] == problems


async def test_only_some_of_a_large_folder_are_kept(home: Path) -> None:
    found = of_folder(home)
    for name in "bcd":
        adapter_folder(home / name)
    with patch.object(adapters, "MOST_FOUND", 3):
        for name in ("alice", "b", "c", "alice", "d"):
            await found.find(name)
    assert ["c", "alice", "d"] == list(found.names())
    assert "b" == (await found.find("b")).name


# ------------------------------------------------------------------------------------------------ loading and unloading


async def test_a_loaded_adapter_has_a_name_of_its_own_until_it_is_unloaded(home: Path) -> None:
    found = of_folder(home, shelf=(shards := Shards()))
    adapter_folder(home / "deep" / "er", "d")
    loaded = await found.load("mine", "deep/er", in_place=False)
    assert loaded == Adapter("mine", content_key(home / "deep" / "er"), str(home / "deep" / "er")) == shards.prepared[0]
    assert loaded == await found.chosen("mine", None) and ["mine"] == list(found.names())
    await found.load("also", "deep/er", in_place=False)
    await found.unload("also")
    assert [] == shards.discarded  # another name stands for the same
    await found.unload("mine")
    assert [loaded.key] == shards.discarded
    await refusal(found, "mine")
    with pytest.raises(UnknownModel):
        await found.unload("mine")


async def test_another_takes_a_name_s_place_only_where_that_is_asked_for(home: Path) -> None:
    found = of_folder(home)
    adapter_folder(home / "b", "b")
    first = await found.load("mine", str(home / "alice"), in_place=False)
    with pytest.raises(ValidationError, match="the adapter mine is loaded already: set `load_inplace` to true"):
        await found.load("mine", "b", in_place=False)
    assert first == await found.find("mine")
    second = await found.load("mine", "b", in_place=True)
    assert first.key != second.key and second == await found.find("mine")


async def test_an_unloaded_name_is_not_found_in_the_folder_again(home: Path) -> None:
    found = of_folder(home)
    await found.unload("alice")  # which nobody has asked for yet
    await refusal(found, "alice")
    await found.load("alice", "alice", in_place=False)
    assert "alice" == (await found.find("alice")).name
    listed = Adapters(OWN, [("bob", str(home / "alice"))], str(home))
    await listed.unload("bob")
    await refusal(listed, "bob")


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../outside/carol", "alice/..", "link", "/etc", "nobody", "\0", "x" * 5000, "org/repository"],
)
async def test_nothing_is_loaded_but_from_below_the_folder(home: Path, path: str) -> None:
    (home / "link").symlink_to(home.parent / "outside" / "carol")
    found = of_folder(home)
    for given in (path, str(home / path) if "\0" not in path else path):
        with pytest.raises(ValidationError, match=r"`lora_path` .*: give the path of an adapter's folder in that of"):
            await found.load("mine", given, in_place=True)
    assert [] == list(found.names())


async def test_of_two_that_load_one_name_at_once_one_is_refused(home: Path) -> None:
    found = of_folder(home)
    adapter_folder(home / "b", "b")
    both = [found.load("mine", path, in_place=False) for path in ("alice", "b")]
    results = await asyncio.gather(*both, return_exceptions=True)
    assert 1 == sum(isinstance(result, ValidationError) for result in results)


async def test_a_folder_called_as_the_model_is_nobodys(home: Path) -> None:
    adapter_folder(home / OWN[0], "b")
    found = of_folder(home)
    with pytest.raises(UnknownModel):
        await found.find(OWN[0])
    assert [] == list(found.names())


async def test_what_shards_refuse_is_told_without_the_folder(home: Path) -> None:
    problem = f"tensor a in {home}/alice/adapter_model.safetensors has NaN"
    found = of_folder(home, shelf=Shards(problem))
    with pytest.raises(ValidationError, match=r"cannot be served: tensor a in adapter_model\.safetensors has NaN"):
        await found.load("mine", "alice", in_place=False)


async def test_what_shards_refuse_is_not_shown(home: Path) -> None:
    adapter_folder(home / "bob", "b")
    found = of_folder(home, shelf=(shards := Shards()))
    shards.refused.add("bob")
    for name in ("alice", "bob"):
        await found.find(name)
    assert ["alice"] == list(found.served()) == list(found.served({"alice", "bob"}))
    assert ["alice", "bob"] == list(found.names())
    assert "the model eve is not served here: there is a/model, alice" == await refusal(found, "eve")


async def test_what_shards_refuse_is_not_loaded(home: Path) -> None:
    refusing, found = of_folder(home, shelf=Shards("it has NaN in its weights")), of_folder(home)
    with pytest.raises(ValidationError, match="the adapter mine cannot be served: it has NaN in its weights"):
        await refusing.load("mine", "alice", in_place=False)
    assert [] == list(refusing.names())
    for name in ("a/model", "tgi", "../x", "", "x" * 129):
        with pytest.raises(ValidationError, match=r"`lora_name` .*cannot be an adapter's"):
            await found.load(name, "alice", in_place=False)
    with pytest.raises(ValidationError, match="start the server with a folder for them, --adapter-dir"):
        await Adapters(OWN, [("x", "/x")]).load("mine", "alice", in_place=False)
    assert [] == list(found.names())
    with patch.object(adapters, "MOST_NAMED", 1):
        await found.load("one", "alice", in_place=False)
        with pytest.raises(ValidationError, match="1 adapters are loaded, which is the most: unload some"):
            await found.load("two", "alice", in_place=False)


async def test_a_folder_that_is_away_is_no_answer_about_what_lies_in_it(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a share that is not mounted for a while: clients are not told that there is no such model."""
    clock = Clock()
    found = of_folder(home, clock)
    adapter = await found.chosen("alice", None)
    home.rename(home.with_name("unmounted"))
    clock.now += 60
    for name in ("alice", "nobody"):
        assert "the folder for adapters cannot be read: No such file" in await refusal(found, name, Unavailable)
    assert 1 == sum("mount or make" in record.getMessage() for record in caplog.records)
    home.with_name("unmounted").rename(home)
    clock.now += 60
    assert adapter == await found.chosen("alice", None)
    await refusal(found, "nobody")

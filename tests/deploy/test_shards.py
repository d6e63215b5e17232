"""A batch job in pieces: each line once, whichever pieces are done already."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lockstep_ray.shards import Job, ShardJournal, answer_shard, begin, finish, folder_of, unless_gone, write_part
from router.jobs.lines import BatchRequest, InputChanged, JobError, Reply
from router.jobs.runner import NoAnswer, Plan

LINES = 23


class Echo:
    """Answers with the body; after `most` answers the server is gone. key: of its adapter, if it has one."""

    def __init__(self, most: int = 1000, key: str = "") -> None:
        self.num_left = most
        self._adapters = {"alice": key} if key else {}

    async def send(self, wanted: BatchRequest, request_id: str) -> Reply:
        await asyncio.sleep(0)
        if not self.num_left:
            raise NoAnswer("no connection", was_sent=False)
        self.num_left -= 1
        return Reply(200, request_id, wanted.body, adapters=self._adapters)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"n": n}} for n in range(LINES)]
    lines[20]["custom_id"] = "1"  # of another shard
    lines[9]["custom_id"] = "8"  # of the same
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "", "no JSON"]))
    return path


def job_of(given: Path) -> Job:
    job = begin(given, given.with_name("out.jsonl"), 5)
    assert job is not None
    return job


def answer(job: Job, number: int, echo: Echo) -> None:
    journal = ShardJournal(job, job.shards[number])
    asyncio.run(answer_shard(job, journal, job.shards[number], echo, Plan(4)))
    write_part(job, job.shards[number], journal)


def test_shards_in_any_order_and_a_second_beginning_make_the_whole(given: Path) -> None:
    job = job_of(given)
    assert [0, 1, 2, 3, 4] == [shard.number for shard in job.left()]
    for number in (3, 0):
        answer(job, number, Echo())
    again = job_of(given)
    assert again == job
    assert [1, 2, 4] == [shard.number for shard in again.left()]
    for shard in again.left():
        answer(again, shard.number, Echo())
    assert 3 == finish(again)
    found = [json.loads(line) for line in again.output.read_text().splitlines()]
    assert [*range(1, 24), 25] == [int(one["id"].rpartition("_")[2]) for one in found]
    codes = {one["id"].rpartition("_")[2]: one["error"]["code"] for one in found if one["error"]}
    assert {"10": "duplicate_custom_id", "21": "duplicate_custom_id", "25": "invalid_json_line"} == codes
    assert "line 2:" in found[20]["error"]["message"] and "line 9:" in found[9]["error"]["message"]
    assert not folder_of(again.output).exists()


def test_a_server_that_ends_in_a_shard_costs_none_of_its_lines(given: Path) -> None:
    job = job_of(given)
    shard, echo = job.shards[1], Echo(most=2)
    journal = ShardJournal(job, shard)

    async def story() -> None:
        assert not await unless_gone(answer_shard(job, journal, shard, echo, Plan(2)), lambda: not echo.num_left, 0.01)
        assert 2 == len(journal.answers)
        assert await unless_gone(answer_shard(job, journal, shard, Echo(), Plan(2)), lambda: False)

    asyncio.run(story())
    assert [6, 7, 8, 9, 10] == sorted(journal.answers)


def test_shards_are_of_one_content_of_an_adapter(given: Path) -> None:
    job = job_of(given)
    answer(job, 0, Echo(key="00"))
    with pytest.raises(JobError, match="the adapter alice is not the one that this job was begun with"):
        answer(job_of(given), 1, Echo(key="11"))
    assert [1, 2, 3, 4] == [shard.number for shard in job.left()]
    for shard in job.left():
        answer(job, shard.number, Echo(key="00"))
    assert 3 == finish(job)


def test_half_a_part_is_none(given: Path) -> None:
    job = job_of(given)
    (job.folder / "part-000000.77.new").write_text("torn")
    assert 5 == len(job.left())


def test_what_was_done_of_another_job_is_not_gone_on_with(given: Path) -> None:
    job_of(given)
    with pytest.raises(JobError, match="was begun with other options"):
        begin(given, given.with_name("out.jsonl"), 6)
    given.write_text("{}\n")
    with pytest.raises(InputChanged, match="is not the input"):
        job_of(given)
    (given.parent / "mine.jsonl").write_text("precious")
    with pytest.raises(JobError, match="no job of it is under way"):
        begin(given, given.with_name("mine.jsonl"), 5)


def test_lines_that_are_missing_or_doubled_are_no_output(given: Path) -> None:
    job = job_of(given)
    for shard in job.shards:
        answer(job, shard.number, Echo())
    part = job.part(2)
    text = part.read_text()
    part.write_text(text + text.splitlines(keepends=True)[0])
    with pytest.raises(JobError, match="a line that is not its own"):
        finish(job)
    part.write_text("".join(text.splitlines(keepends=True)[1:]))
    with pytest.raises(JobError, match="have 23 of 24 lines"):
        finish(job)
    part.write_text(text)
    finish(job)
    with pytest.raises(JobError, match="no job of it is under way"):
        job_of(given)

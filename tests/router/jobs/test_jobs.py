"""Jobs: each line exactly once, whatever ends them and wherever that leaves their files."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.jobs import journal as journal_module
from router.jobs.journal import Journal, State, journal_path
from router.jobs.lines import BatchRequest, InputChanged, JobError, LineFile, Problem, Reply, ServerGone
from router.jobs.runner import NoAnswer, Plan, Runner
from tests.router.jobs.making import MOST_BYTES, Answering, index_of, read_lines, request, run_job, write_requests


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.runner.FIRST_WAIT_S", 0.0)


class Died(BaseException):
    """The process does not get further than this."""


def test_every_line_has_an_answer_in_the_shape_of_openai(tmp_path: Path) -> None:
    rows = [json.dumps(request("a")), "", "{", json.dumps(request("a")), json.dumps(request("b"))]
    (tmp_path / "in").write_text("\n".join(rows))
    sender = Answering(lambda wanted, _: Reply(200 if wanted.custom_id == "a" else 400, "id-1", b'{"x": 1}'))
    journal = run_job(tmp_path / "in", tmp_path / "out", sender, concurrency=1)
    job = journal.state.job
    found = read_lines(tmp_path / "out")
    response = {"status_code": 200, "request_id": "id-1", "body": {"x": 1}}
    assert {"id": f"batch_req_{job}_1", "custom_id": "a", "response": response, "error": None} == found[0]
    assert [None, "a", "b"] == [one["custom_id"] for one in found[1:]]
    assert ["invalid_json_line", "duplicate_custom_id"] == [one["error"]["code"] for one in found[1:3]]
    assert (None, 400) == (found[3]["error"], found[3]["response"]["status_code"])
    assert (1, 3, True) == (journal.state.completed, journal.state.failed, journal.state.is_complete)
    assert {"a": 1, "b": 1} == sender.asked


def test_an_answer_that_is_nested_too_deep_is_kept_as_text(tmp_path: Path) -> None:
    sender = Answering(lambda *_: Reply(200, "x", b"[" * 400 + b"]" * 400))
    assert 2 == run_job(write_requests(tmp_path / "in", 2), tmp_path / "out", sender).state.completed
    [message] = {one["response"]["body"]["error"]["message"] for one in read_lines(tmp_path / "out")}
    assert 400 * "[" + 400 * "]" == message


def test_what_failed_goes_to_a_file_of_its_own_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(["nonsense", json.dumps(request("a")), json.dumps(request("b"))]))
    sender = Answering(lambda wanted, _: Reply(200 if wanted.custom_id == "a" else 422, "x", b"{}"))
    run_job(tmp_path / "in", tmp_path / "out", sender, errors=tmp_path / "err")
    assert ["a"] == [one["custom_id"] for one in read_lines(tmp_path / "out")]
    assert {None, "b"} == {one["custom_id"] for one in read_lines(tmp_path / "err")}
    with pytest.raises(JobError, match="was begun with a file for errors"):
        run_job(tmp_path / "in", tmp_path / "out", sender)


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_no_lines_make_an_empty_output(tmp_path: Path, content: str) -> None:
    (tmp_path / "in").write_text(content)
    journal = run_job(tmp_path / "in", tmp_path / "out", Answering())
    assert (b"", True, 0) == ((tmp_path / "out").read_bytes(), journal.state.is_complete, journal.num_left)


def test_no_more_requests_are_under_way_than_allowed(tmp_path: Path) -> None:
    class Together(Answering):
        """Answers seven requests once all of them are there: with fewer it would wait for ever."""

        barrier = asyncio.Barrier(7)
        num_under_way = most_under_way = 0

        async def send(self, wanted: BatchRequest, request_id: str) -> Reply | Problem:
            self.num_under_way += 1
            self.most_under_way = max(self.most_under_way, self.num_under_way)
            await self.barrier.wait()
            self.num_under_way -= 1
            return await super().send(wanted, request_id)

    sender = Together()
    run_job(write_requests(tmp_path / "in", 21), tmp_path / "out", sender, concurrency=7)
    assert (7, 21) == (sender.most_under_way, sender.asked.total())


# ------------------------------------------------------------------------------------------------------- going on again


def run_until_killed(source: Path, output: Path, errors: Path, left: int | None) -> list[bytes] | None:
    """The checkpoints that might have been written, one behind each answer; None where the job came to its end."""
    num_answers = 0
    saved: list[bytes] = []
    write = Journal.write

    def answer(wanted: BatchRequest, _: int) -> Reply:
        nonlocal num_answers
        num_answers += 1
        if left is not None and num_answers > left:
            raise Died
        return Reply(200 if int(wanted.custom_id[1:]) % 3 else 500, "x", b'{"y": "\\n"}')

    def noting(self: Journal, line: int, text: bytes, *, is_failure: bool) -> None:
        write(self, line, text, is_failure=is_failure)
        saved.append(self.state.to_json())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "write", noting)
        for name in ("fsync", "fdatasync"):  # no power is cut here
            patch.setattr(journal_module.os, name, lambda _: None)
        try:
            run_job(source, output, Answering(answer), errors=errors, concurrency=3, max_tries=1)
        except Died:
            return saved
    return None


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_each_line_is_there_once_wherever_the_job_was_cut(data: st.DataObject) -> None:
    """A kill leaves some checkpoint, and outputs that are whole up to any later byte; a power cut leaves zeros."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        source, output, errors = write_requests(folder / "in", 12), folder / "out", folder / "err"
        index_of(source).ids.close()
        run_until_killed(source, output, errors, 0)
        kept = journal_path(output).read_bytes()
        for _ in range(data.draw(st.integers(0, 4))):
            saved = run_until_killed(source, output, errors, data.draw(st.integers(0, 5)))
            if saved is None:
                break
            # Any of these may be the last that was written, and what is beyond it may be torn.
            kept = data.draw(st.sampled_from([kept, *saved]))
            journal_path(output).write_bytes(kept)
            state = State.of_json(kept)
            for path, least in ((output, state.output_bytes), (errors, state.errors_bytes or 0)):
                raw = path.read_bytes()
                cut = data.draw(st.integers(least, len(raw)))
                path.write_bytes(raw[:cut] + bytes(data.draw(st.sampled_from([0, 1, 64]))))
        assert run_until_killed(source, output, errors, None) is None
        found = [*read_lines(output), *read_lines(errors)]
        assert Counter(f"r{i}" for i in range(1, 13)) == Counter(one["custom_id"] for one in found)
        final = State.of_json(journal_path(output).read_bytes())
        assert (8, 4, True, {}) == (final.completed, final.failed, final.is_complete, final.under_way)


def test_a_second_death_soon_after_the_first_doubles_no_line(tmp_path: Path) -> None:
    """Line 4 is answered beyond the first checkpoint; the second speaks of its bytes before the job has come to it."""
    source, output, errors = write_requests(tmp_path / "in", 12), tmp_path / "out", tmp_path / "err"
    run_until_killed(source, output, errors, 0)
    first = journal_path(output).read_bytes()
    run_until_killed(source, output, errors, 4)  # 1, 2 and 4 in the output, 3 among the errors
    journal_path(output).write_bytes(first)
    errors.write_bytes(b"")
    saved = run_until_killed(source, output, errors, 1)
    assert saved is not None
    journal_path(output).write_bytes(saved[0])
    assert (4, {4}) == ((state := State.of_json(saved[0])).next_line, state.answered)
    assert run_until_killed(source, output, errors, None) is None
    found = [*read_lines(output), *read_lines(errors)]
    assert Counter(f"r{i}" for i in range(1, 13)) == Counter(one["custom_id"] for one in found)


def with_adapter(key: str) -> Answering:
    return Answering(lambda *_: Reply(200, "x", b"{}", adapters={"alice": key}))


def test_no_output_has_answers_of_two_contents_of_an_adapter(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 12), tmp_path / "out"

    def changes(wanted: BatchRequest, _: int) -> Reply:
        return Reply(200, "x", b"{}", adapters={"alice": "00" if wanted.custom_id != "r7" else "11"})

    with pytest.raises(JobError, match=r"the adapter alice is not the one that .*/out was begun with: put its files"):
        run_job(source, output, Answering(changes), concurrency=1)
    assert [f"r{number}" for number in range(1, 7)] == [one["custom_id"] for one in read_lines(output)]
    with pytest.raises(JobError, match="the adapter alice is not the one"):
        run_job(source, output, with_adapter("11"))
    assert 6 == len(read_lines(output))
    journal = run_job(source, output, with_adapter("00"))
    assert (12, {"alice": "00"}, True) == (
        journal.state.completed, journal.state.adapters, journal.state.is_complete
    )  # fmt: skip


def test_a_death_right_after_the_first_answer_forgets_no_adapter(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 4), tmp_path / "out"

    def dies(wanted: BatchRequest, _: int) -> Reply:
        if wanted.custom_id == "r2":
            raise Died
        return Reply(200, "x", b"{}", adapters={"alice": "00"})

    with pytest.MonkeyPatch.context() as patch:
        run_until = Journal.snapshot
        patch.setattr(
            Journal, "snapshot", lambda journal, **_: run_until(journal) if not read_lines(output) else died()
        )
        with pytest.raises(Died):
            run_job(source, output, Answering(dies), concurrency=1, checkpoint_s=1000.0)
    assert 1 == len(read_lines(output))
    with pytest.raises(JobError, match="the adapter alice is not the one"):
        run_job(source, output, with_adapter("11"))
    assert 4 == run_job(source, output, with_adapter("00")).state.completed


def died() -> Any:
    raise Died


def test_lines_that_were_answered_are_not_asked_again(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 30), tmp_path / "out"

    def dies(wanted: BatchRequest, _: int) -> Reply:
        if wanted.custom_id == "r20":
            raise Died
        return Reply(200, "x", b"{}")

    with pytest.raises(Died):
        run_job(source, output, Answering(dies))
    there = {one["custom_id"] for one in read_lines(output)}
    again = Answering()
    run_job(source, output, again)
    assert {f"r{i}" for i in range(1, 31)} - there == set(again.asked)
    once_more = Answering()
    assert run_job(source, output, once_more).state.completed == 30
    assert not once_more.asked


def test_what_is_not_this_jobs_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 3), tmp_path / "out"
    output.write_text("precious\n")
    with pytest.raises(JobError, match="out exists and belongs to no job: give another name"):
        run_job(source, output, Answering())
    assert "precious\n" == output.read_text() and not journal_path(output).exists()
    output.unlink()
    (tmp_path / "err").write_text("precious\n")
    with pytest.raises(JobError, match="err exists and belongs to no job"):
        run_job(source, output, Answering(), errors=tmp_path / "err")
    (tmp_path / "folder").mkdir()
    with pytest.raises(JobError, match="exists and belongs to no job"):
        run_job(source, tmp_path / "folder", Answering())


def test_an_input_that_changed_is_refused(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 3), tmp_path / "out"
    run_job(source, output, Answering())
    source.write_text(source.read_text().replace("hello", "other"))
    with pytest.raises(
        InputChanged, match=r"is not the input that .*out was begun with: put that back, or delete .*journal"
    ):
        run_job(source, output, Answering())
    write_requests(source, 3)
    assert run_job(source, output, Answering()).state.is_complete


def test_an_input_that_changes_under_the_job_ends_it(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in", 40)

    def changes(wanted: BatchRequest, _: int) -> Reply:
        source.write_text("{}\n" * 100)
        return Reply(200, "x", b"{}")

    with pytest.raises(InputChanged, match="changed while it was read"):
        run_job(source, tmp_path / "out", Answering(changes))


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"nonsense", "cannot be read"), (b"[]", "cannot be read"), (b'{"version": 9}', "another version")],
)
def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    source, output = write_requests(tmp_path / "in", 3), tmp_path / "out"
    run_job(source, output, Answering())
    journal_path(output).write_bytes(content)
    with pytest.raises(JobError, match=f"{says}.*to begin anew"):
        run_job(source, output, Answering())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, wrong)
            for name in ("next_offset", "output_bytes", "completed")
            for wrong in ("x", None, -1, 1.5, True)
        ],
        ("next_offset", 10**9),
        ("next_line", "q"),
        ("errors_bytes", ""),
        ("under_way", [[1, -5]]),
        ("under_way", [["x", 0]]),
        ("under_way", [[1, 10**9]]),
        ("under_way", [1]),
        ("answered", [[]]),
        ("answered", ["x"]),
        ("job", 5),
        ("job", "x"),
        ("is_complete", "x"),
    ],
)
def test_a_journal_with_a_value_that_is_none_is_named(tmp_path: Path, name: str, value: object) -> None:
    source, output = write_requests(tmp_path / "in", 3), tmp_path / "out"
    run_job(source, output, Answering())
    found = json.loads(journal_path(output).read_bytes())
    journal_path(output).write_text(json.dumps(found | {name: value}))
    with pytest.raises(JobError, match=r"out\.journal (cannot be read \(|speaks of bytes).*to begin anew"):
        run_job(source, output, Answering())


def test_an_output_that_lost_its_end_is_refused(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 3), tmp_path / "out"
    run_job(source, output, Answering())
    os.truncate(output, 10)
    with pytest.raises(JobError, match=r"is shorter than .*journal says"):
        run_job(source, output, Answering())


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in", 3), tmp_path / "out"
    index = index_of(source)
    with closing(index.ids), closing(Journal(output, None, index)):
        with pytest.raises(JobError, match=r"another process writes .*out"):
            run_job(source, output, Answering())
    assert run_job(source, output, Answering()).state.is_complete


def test_two_jobs_do_not_share_a_file_of_errors(tmp_path: Path) -> None:
    """Nor does one that begins when the other has just ended write over its lines."""
    (tmp_path / "in").write_text("nonsense\n" * 3)
    errors = tmp_path / "err"
    index = index_of(tmp_path / "in")
    with closing(index.ids), closing(Journal(tmp_path / "one", errors, index)):
        with pytest.raises(JobError, match=r"another process writes .*err"):
            run_job(tmp_path / "in", tmp_path / "two", Answering(), errors=errors)
    run_job(tmp_path / "in", tmp_path / "one", Answering(), errors=errors)
    with pytest.raises(JobError, match=r"err exists and belongs to no job"):
        run_job(tmp_path / "in", tmp_path / "two", Answering(), errors=errors)
    assert 3 == len(read_lines(errors))


def test_a_full_disk_ends_the_job_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write_requests(tmp_path / "in", 20), tmp_path / "out"
    real, num_writes = os.pwrite, 0

    def write(file: int, content: bytes, at: int) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 12:
            return real(file, content[:5], at)
        if num_writes > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, content, at)

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "pwrite", write)
        with pytest.raises(OSError) as full:
            run_job(source, output, Answering())
    assert errno.ENOSPC == full.value.errno and str(output) == full.value.filename
    assert not output.read_bytes().endswith(b"\n")
    run_job(source, output, Answering())
    assert {f"r{i}" for i in range(1, 21)} == {one["custom_id"] for one in read_lines(output)}
    assert 20 == len(read_lines(output))


@pytest.mark.parametrize(
    ("call", "name"), [("fdatasync", "out"), ("fsync", "out.journal.new"), ("posix_fallocate", "")]
)
def test_a_full_disk_is_said_of_a_file_or_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module.os, call, full)
    with pytest.raises(OSError) as error:
        run_job(write_requests(tmp_path / "in", 1), tmp_path / "out", Answering())
    assert errno.ENOSPC == error.value.errno and str(tmp_path / name) == error.value.filename


def test_a_failure_ends_the_requests_beside_it(tmp_path: Path) -> None:
    """Nothing is asked or written for a job that has ended: what it says of its outputs is what they are."""

    class Never(Answering):
        num_cancelled = 0

        async def send(self, wanted: BatchRequest, request_id: str) -> Reply | Problem:
            if wanted.custom_id == "r4":
                return await super().send(wanted, request_id)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            raise AssertionError

    def fails(wanted: BatchRequest, _: int) -> Reply:
        raise ServerGone("nobody is there")

    async def story() -> None:
        index, sender = index_of(tmp_path / "in"), Never(fails)
        with closing(LineFile(tmp_path / "in", MOST_BYTES)) as lines:
            with closing(index.ids), closing(Journal(tmp_path / "out", None, index)) as journal:
                runner = Runner(index, lines, journal, sender, Plan(concurrency=4))
                with pytest.raises(ServerGone, match="nobody is there"):
                    await runner.run()
                assert 1 == len(asyncio.all_tasks()) and 3 == sender.num_cancelled

    write_requests(tmp_path / "in", 9)
    asyncio.run(story())


def test_a_line_that_was_written_in_part_counts_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line begins where it began, and the checkpoint speaks of whole lines alone."""
    source, output = write_requests(tmp_path / "in", 2), tmp_path / "out"
    real, is_full = os.pwrite, False

    def write(file: int, content: bytes, at: int) -> int:
        nonlocal is_full
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        is_full = True
        return real(file, content[:5], at)

    index = index_of(source)
    with closing(index.ids), closing(Journal(output, None, index)) as journal:
        for line in (1, 2):
            journal.begun(line, 0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(journal_module.os, "pwrite", write)
            with pytest.raises(OSError, match="No space left"):
                journal.write(1, b'{"of": "the first"}\n', is_failure=False)
        assert 5 == output.stat().st_size
        journal.write(2, b'{"of": "the second"}\n', is_failure=False)
        assert b'{"of": "the second"}\n' == output.read_bytes()
        assert (len(output.read_bytes()), 1, {1: 0}) == (
            journal.state.output_bytes, journal.state.completed, journal.state.under_way,
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- trying again


def test_requests_that_are_not_taken_are_sent_until_they_are(tmp_path: Path) -> None:
    def answer(wanted: BatchRequest, times: int) -> Reply:
        if times % 3 == 0:
            raise NoAnswer("no connection", was_sent=False)
        return Reply(200 if times > 20 else (429, 503)[times % 2], "x", b"{}", 0.0)

    sender = Answering(answer)
    journal = run_job(write_requests(tmp_path / "in", 3), tmp_path / "out", sender, max_tries=1)
    assert (3, 0) == (journal.state.completed, journal.state.failed)
    assert all(times > 20 for times in sender.asked.values())


def test_requests_that_fail_once_they_are_sent_are_tried_a_number_of_times(tmp_path: Path) -> None:
    def answer(wanted: BatchRequest, times: int) -> Reply | Problem:
        if wanted.custom_id == "r1":
            raise NoAnswer("the connection was lost: reset", was_sent=True)
        if wanted.custom_id == "r2":
            return Reply(502, "x", b"<html>")
        if wanted.custom_id == "r3" and times < 3:
            return Reply(424, "x", b"{}")
        return Reply(400 if wanted.custom_id == "r4" else 200, "x", b"{}")

    sender = Answering(answer)
    run_job(write_requests(tmp_path / "in", 4), tmp_path / "out", sender, max_tries=3)
    assert {"r1": 3, "r2": 3, "r3": 3, "r4": 1} == sender.asked
    found = {one["custom_id"]: one for one in read_lines(tmp_path / "out")}
    assert "no_answer" == found["r1"]["error"]["code"] and "in 3 tries" in found["r1"]["error"]["message"]
    assert {"message": "<html>", "type": "not_json"} == found["r2"]["response"]["body"]["error"]
    assert (200, 400) == (found["r3"]["response"]["status_code"], found["r4"]["response"]["status_code"])


def test_the_job_gives_up_when_nobody_answers_and_goes_on_when_somebody_does(tmp_path: Path) -> None:
    def nobody(wanted: BatchRequest, _: int) -> Reply:
        raise NoAnswer("no connection to x: refused", was_sent=False)

    source, output = write_requests(tmp_path / "in", 4), tmp_path / "out"
    with pytest.raises(ServerGone, match=r"no connection to x: refused, for 0.05 s"):
        run_job(source, output, Answering(nobody), give_up_s=0.05)
    with pytest.raises(ServerGone, match="the server answers 503, for"):
        run_job(source, output, Answering(lambda *_: Reply(503, "x", b"")), give_up_s=0.05)
    with pytest.raises(ServerGone, match="API key is missing or wrong"):
        run_job(source, output, Answering(lambda *_: Reply(401, "x", b"{}")))
    assert 4 == run_job(source, output, Answering()).state.completed


def test_what_nobody_expected_of_a_line_is_that_lines_error(tmp_path: Path) -> None:
    """Whatever its type; the others are answered, and their answers stay."""

    def answer(wanted: BatchRequest, times: int) -> Reply:
        if wanted.custom_id == "r3":
            raise RecursionError("maximum recursion depth exceeded")
        return Reply(200, "r", b'{"text": "hi"}')

    source, output = write_requests(tmp_path / "in", 6), tmp_path / "out"
    journal = run_job(source, output, Answering(answer))
    assert (5, 1) == (journal.state.completed, journal.state.failed)
    [error] = [line["error"] for line in read_lines(output) if line["error"]]
    assert "internal_error" == error["code"] and "RecursionError" in error["message"]

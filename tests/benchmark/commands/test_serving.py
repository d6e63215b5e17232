"""Serving figures: formulas from events made by hand, loops with a clockwork sender, and whole runs against a mock.

The mock's times are 60 ms and more, and medians are compared, so that a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.commands import serving
from benchmark.commands.serving import limits_of
from benchmark.report import pictures
from benchmark.result import BenchError
from benchmark.serving import http_client, loops, sweep
from benchmark.serving.datasets import Lengths
from benchmark.serving.http_client import ChatApi, HttpClient, OpenAiApi, Reply, TgiApi
from benchmark.serving.outcomes import Load, Objectives, Outcome, records_of, remarks, row_of, throughput_table
from benchmark.serving.sweep import loads_of, num_requests
from benchmark.serving.workload import PlannedRequest
from tests.benchmark.mock_server import mock_server
from tests.ports import free_port

GRID = ("--input-length", "6", "--output-length", "8")
CELL = Lengths(6, 8)


def outcome(*token_times: float, intended_at: float = 10.0, sent_at: float = 10.0, error: str | None = None) -> Outcome:
    times = list(token_times)
    ended_at = times[-1] if times else sent_at + 1
    return Outcome(Lengths(6, 4), intended_at, Reply(sent_at, ended_at, times, len(times), 6, error))


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON of the last line ({} if there is none), and standard error."""
    code = main(["serving", *map(str, arguments)])
    output = capsys.readouterr()
    return code, json.loads(output.out.splitlines()[-1]) if output.out else {}, output.err


# ----------------------------------------------------------------------------------------------------- formulas


def test_times_of_one_request() -> None:
    one = outcome(10.5, 10.6, 10.8, 11.1)
    assert pytest.approx(500) == one.ttft_ms
    assert pytest.approx([100, 200, 300]) == one.inter_token_ms
    assert pytest.approx(200) == one.tpot_ms  # (11.1 - 10.5) / 3
    assert pytest.approx(1100) == one.e2e_ms
    assert pytest.approx(1100 / (6 + 4)) == one.latency_per_token_ms
    assert pytest.approx(1100 / 4) == one.latency_per_output_token_ms


def test_times_count_from_the_intended_sending() -> None:
    late = outcome(10.5, 11.0, intended_at=9.0, sent_at=10.0)
    assert (1500, 2000) == (late.ttft_ms, late.e2e_ms)
    assert outcome(10.5).tpot_ms is None  # of one token


def test_a_row_from_two_requests() -> None:
    requests = [outcome(10.5, 10.6, 10.7, 10.8), outcome(11.0, 11.1, 11.2, 11.5, intended_at=10.5, sent_at=10.5)]
    row = row_of(CELL, Load(concurrency=2), requests, Objectives())
    assert pytest.approx(1.5) == row["seconds"]  # 10.0 to 11.5
    assert pytest.approx(2 / 1.5) == row["requests_per_second"]
    assert pytest.approx(8 / 1.5) == row["output_tokens_per_second"]
    for name in ("requests_per_second", "output_tokens_per_second"):
        assert pytest.approx(row[name]) == sum(row["samples"][name]) / len(row["samples"][name])
    assert (8, 8) == (row["output_tokens"], row["asked_tokens"])
    assert pytest.approx((80 + 100) / 2) == row["latency_per_token_ms"]
    assert pytest.approx((200 + 250) / 2) == row["latency_per_output_token_ms"]
    assert pytest.approx(500) == row["ttft_ms"]["p50"]
    assert pytest.approx((100 + 500 / 3) / 2) == row["tpot_ms"]["mean"]
    assert pytest.approx(1000) == row["e2e_ms"]["p99"]
    assert (2, 0, {}, 0, None) == tuple(row[k] for k in ("requests", "errors", "errors_by_kind", "short", "goodput"))


def test_tokens_of_one_event_are_spread_over_the_events() -> None:
    """Sixteen tokens in four events, the later request first: rates are of tokens, and samples in the order of time."""
    early, late = outcome(10.5, 10.6, 10.7, 10.8), outcome(11.0, 11.1, 11.2, 11.5, intended_at=10.6, sent_at=10.6)
    early.reply.num_tokens = late.reply.num_tokens = 16
    row = row_of(CELL, Load(concurrency=2), [late, early], Objectives())
    assert (32, 8) == (row["output_tokens"], row["token_events"])
    rates = row["samples"]["output_tokens_per_second"]
    assert pytest.approx(32 / 1.5) == row["output_tokens_per_second"] == pytest.approx(sum(rates) / len(rates))
    assert 4 * len(rates) / 1.5 == pytest.approx(next(rate for rate in rates if rate))
    assert [500, 400] == pytest.approx(row["samples"]["ttft_ms"])
    [remark] = remarks(row)
    assert "32 tokens came in 8 events: times between tokens are those between events." in remark
    assert [] == list(remarks(row_of(CELL, Load(concurrency=1), [outcome(10.5, 10.6, 10.7, 10.8)], Objectives())))


def test_errors_are_counted_apart_and_never_in_latencies() -> None:
    requests = [outcome(10.5, 10.6, 10.7, 10.8), outcome(error="429"), outcome(10.1, error="disconnected")]
    row = row_of(CELL, Load(concurrency=2), requests, Objectives())
    assert (2, {"429": 1, "disconnected": 1}, 3) == (row["errors"], row["errors_by_kind"], row["requests"])
    assert [500] == pytest.approx(row["samples"]["ttft_ms"])
    assert pytest.approx(1 / row["seconds"]) == row["requests_per_second"]


def test_a_row_without_success_says_so() -> None:
    row = row_of(CELL, Load(request_rate=2.0), [outcome(error="429")] * 3, Objectives(ttft_ms=1))
    assert (0, None, None, 3) == tuple(row[k] for k in ("requests_per_second", "ttft_ms", "tpot_ms", "errors"))
    assert 0 == row["goodput"]["share"]
    assert "6 8 0.00 0.00 - -" == " ".join(throughput_table([row]).splitlines()[2].replace("|", "").split())


def test_goodput_counts_requests_that_keep_both_objectives() -> None:
    fast, late, slow = outcome(10.1, 10.2), outcome(10.9, 11.0), outcome(10.1, 10.9)
    failed = outcome(error="timeout")
    goodput = row_of(CELL, Load(concurrency=1), [fast, late, slow, failed], Objectives(200, 150))["goodput"]
    assert {"ttft_objective_ms": 200, "tpot_objective_ms": 150, "share": 0.25, "requests_per_second": 1.0} == goodput


# -------------------------------------------------------------------------------------------------------- loops


def test_a_closed_loop_never_has_more_than_its_streams() -> None:
    running, most = 0, 0

    async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        assert intended_at is None
        return outcome(10.5)

    done = asyncio.run(loops.closed_loop(send, [PlannedRequest("a", CELL)] * 20, 3))
    assert (20, 3) == (len(done), most)


def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    intended: list[float] = []
    times = [0.0, 0.03, 0.031, 0.09]

    async def story() -> None:
        all_sent = asyncio.Event()

        async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
            assert intended_at is not None and intended_at <= time.perf_counter()
            intended.append(intended_at)
            if len(intended) == len(times):
                all_sent.set()
            await all_sent.wait()  # a server that answers nobody before the last request is sent
            return outcome(10.5)

        await loops.open_loop(send, [PlannedRequest("a", CELL, after) for after in times])

    asyncio.run(asyncio.wait_for(story(), 60))
    assert times == pytest.approx([moment - intended[0] for moment in intended])


def test_a_lost_server_ends_the_loop_at_once() -> None:
    async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
        raise loops.unreachable("http://gone", "refused")

    requests = [PlannedRequest("a", CELL, after) for after in (0.0, 60.0)]
    with pytest.raises(BenchError, match="cannot reach http://gone"):
        asyncio.run(asyncio.wait_for(loops.open_loop(send, requests), 5))


# ----------------------------------------------------------------------------------------------------- the wire


@pytest.mark.parametrize("api", [TgiApi(), OpenAiApi("mock"), ChatApi("mock")])
def test_every_protocol_gives_every_token_and_the_servers_counts(api: TgiApi | OpenAiApi) -> None:
    with mock_server(ttft_ms=5, gap_ms=5) as url:
        reply = asyncio.run(HttpClient(url).stream(api, "one two three", 4, keep_text=True))
    assert (None, 4, 4, 3) == (reply.error, reply.num_tokens, len(reply.token_times), reply.num_prompt_tokens)
    assert (200, " word" * 4) == (reply.status, reply.text)
    assert reply.sent_at < reply.token_times[0] < reply.token_times[-1] <= reply.ended_at


@pytest.mark.parametrize(
    ("failure", "kind"), [("refuse_every", "429"), ("disconnect_every", "disconnected"), ("break_every", "generation")]
)
def test_failures_have_names(failure: str, kind: str) -> None:
    with mock_server(**{failure: 1}) as url:
        assert kind == asyncio.run(HttpClient(url).stream(TgiApi(), "one", 4)).error


def test_a_slow_answer_is_a_timeout() -> None:
    with mock_server(ttft_ms=60_000) as url:
        assert "timeout" == asyncio.run(HttpClient(url, timeout_s=0.1).stream(TgiApi(), "one", 4)).error


@pytest.mark.parametrize("kind", [OpenAiApi, ChatApi])
def test_end_tokens_are_passed_over_where_that_is_asked_for(kind: type[OpenAiApi]) -> None:
    assert kind("m").body("p", 1)["ignore_eos"] and "ignore_eos" not in kind("m", ignore_eos=False).body("p", 1)
    assert TgiApi(ignore_eos=True).body("p", 1)["parameters"]["ignore_eos"]
    assert "ignore_eos" not in TgiApi().body("p", 1)["parameters"]


def test_an_adapter_is_named_as_each_api_names_it() -> None:
    for kind in (OpenAiApi, ChatApi):
        assert ("m", "a") == tuple(kind("m").body("p", 1, adapter)["model"] for adapter in ("", "a"))
    assert "a" == TgiApi().body("p", 1, "a")["parameters"]["adapter_id"]
    assert "adapter_id" not in TgiApi().body("p", 1)["parameters"]


@pytest.mark.parametrize("api", ["tgi", "openai"])
def test_requests_name_adapters_of_the_server(capsys: pytest.CaptureFixture[str], api: str) -> None:
    with mock_server(gap_ms=0, ttft_ms=0) as url:
        given = ("--url", url, "--api", api, *GRID, "--concurrency", "8", "--num-requests", "60")
        code, result, _ = bench(capsys, *given, "--adapters", "3", "--zipf", "--model-id", "mock")
        assert 0 == code
        code, _, error = bench(capsys, *given, "--adapters", "5")
        assert 0 != code and "/v1/models lists 4 adapters, and --adapters is 5: start the server with as many" in error
    [row] = result["rows"]
    counts = row["adapters"]
    assert (60, 0) == (sum(counts.values()), row["errors"]) and counts["a"] > counts["b"] and "d" not in counts
    assert (3, True) == (result["work"]["adapters"], result["work"]["zipf"])
    assert "--zipf says how requests choose" in bench(capsys, "--url", "http://127.0.0.1:1", "--zipf")[2]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_lists_no_adapters_without_a_key_is_not_said_to_have_none(status: int) -> None:
    class Locked(HttpClient):
        async def json(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
            return status, {"error": "Missing or wrong API key"}

    with pytest.raises(BenchError, match=f"/v1/models answers status {status}: give the server's key by --api-key-fil"):
        await sweep.adapter_names(Locked("http://127.0.0.1:1"), 2)


def test_a_record_has_the_adapter_that_a_request_named() -> None:
    both = [replace(outcome(10.5), adapter="a"), outcome(10.6)]
    assert ["a", None] == [one["adapter"] for one in records_of(0, both, 10.0)]


def test_a_conversation_is_messages_for_a_chat_and_lines_for_a_text() -> None:
    asked = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert asked == ChatApi("m").body(asked, 1)["messages"]
    assert "one\ntwo" == OpenAiApi("m").body(asked, 1)["prompt"] == TgiApi().body(asked, 1)["inputs"]
    assert [{"role": "user", "content": "one"}] == ChatApi("m").body("one", 1)["messages"]


def test_thoughts_are_tokens_and_a_role_is_none() -> None:
    read = ChatApi("m").read
    assert read(b'{"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": null}]}').has_token
    assert not read(b'{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}').has_token
    assert not read(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}').has_token


def test_what_openai_servers_send_is_understood() -> None:
    api = OpenAiApi("m", ignore_eos=False)
    assert "ignore_eos" not in api.body("p", 1)
    assert api.read(b'{"choices": [{"text": "", "finish_reason": null}]}').has_token  # half a character
    assert not api.read(b'{"choices": [{"text": "", "finish_reason": "stop"}]}').has_token
    assert "overloaded" == api.read(b'{"error": {"type": "overloaded", "message": "x"}}').error
    assert api.read(b"[DONE]").is_last


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.alone
@pytest.mark.parametrize("load", [("--concurrency", 8), ("--request-rate", 20)])
def test_a_mocks_known_times_come_back(capsys: pytest.CaptureFixture[str], load: tuple[str, int]) -> None:
    """300 ms to the first of 8 tokens, 60 ms between them, 720 ms in all.

    A busy machine delays some tokens, which shortens the gap to the next: the bounds only find a wrong unit.
    What is computed from known times is tested above.
    """
    with mock_server(ttft_ms=300, gap_ms=60) as url:
        code, result, _ = bench(capsys, "--url", url, *GRID, *load, "--num-requests", 16, "--warmups", 0)
    assert 0 == code
    assert ("mock", "cpu", "float32") == tuple(result[key] for key in ("model", "device", "dtype"))
    [row] = result["rows"]
    known = {"ttft_ms": 300, "tpot_ms": 60, "inter_token_ms": 60, "e2e_ms": 720}
    for name, expected in known.items():
        assert 0.1 * expected < row[name]["p50"] < 100 * expected, name
    assert 14 * row["latency_per_token_ms"] == pytest.approx(8 * row["latency_per_output_token_ms"])
    assert 8 * row["requests_per_second"] == pytest.approx(row["output_tokens_per_second"])
    assert 16 == pytest.approx(row["requests_per_second"] * row["seconds"])
    assert (0, 0, 0) == (row["errors"], row["short"], row["other_input_length"])


def test_several_loads_are_several_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server() as url:
        loads = ("--concurrency", 1, 2, "--request-rate", 50, "--num-requests", 4)
        _, result, _ = bench(capsys, "--url", url, "--api", "openai", *GRID, *loads)
    assert [(1, None), (2, None), (None, 50)] == [(row["concurrency"], row["request_rate"]) for row in result["rows"]]
    assert [0, 0, 0] == [row["errors"] + row["short"] + row["other_input_length"] for row in result["rows"]]


def test_refused_and_cut_requests_are_errors_and_short_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(refuse_every=4, disconnect_every=5, longest=5) as url:
        flags = ("--concurrency", 2, "--num-requests", 20, "--warmups", 0, "--ttft-objective", 10_000)
        code, result, _ = bench(capsys, "--url", url, *GRID, *flags)
    [row] = result["rows"]
    assert 0 == code
    assert {"429": 5, "disconnected": 3} == row["errors_by_kind"]  # the 20th is refused before it could be cut
    assert (20, 8, 12, 0.6) == (row["requests"], row["errors"], row["short"], row["goodput"]["share"])


@pytest.mark.parametrize(("without", "is_watched"), [("", True), ("metrics", False)])
def test_the_servers_batch_is_watched_and_drawn(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without: str,
    is_watched: bool,
) -> None:
    monkeypatch.setattr(sweep, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(sweep.ServerWatch.__init__, "__defaults__", (0.05,))
    monkeypatch.setattr(pictures, "DOTS_PER_INCH", 20)
    with mock_server(gap_ms=50, without=without) as url:
        flags = ("--concurrency", 2, "--num-requests", 2, "--warmups", 0, "--output", tmp_path)
        code, result, _ = bench(capsys, "--url", url, "--input-length", 6, "--output-length", 24, *flags)
    [row] = result["rows"]
    assert 0 == code
    running = [point["running"] for point in row["server_timeline"]]
    assert (len(running) > 2 and max(running) == 2.0) if is_watched else not running
    assert (tmp_path / "server.png").exists() == is_watched
    found = (tmp_path / "report.html").read_text().count("data:image/png;base64,")
    assert found == 4 + 1 + is_watched  # the published four, distributions, and the server's


def test_a_server_that_dies_keeps_the_finished_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock_server(die_at=12) as url:
        flags = ("--concurrency", 2, "--num-requests", 8, "--warmups", 0, "--output", tmp_path)
        code, result, errors = bench(capsys, "--url", url, "--input-length", 6, 7, "--output-length", 8, *flags)
    assert (1, 1) == (code, len(result["rows"]))
    assert result["rows"] == json.loads((tmp_path / "result.json").read_text())["rows"]
    assert "Incomplete" in (tmp_path / "result.md").read_text()
    assert "Incomplete" in (tmp_path / "report.html").read_text()
    assert "error: cannot reach http://127.0.0.1" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_lengths_that_the_server_does_not_take_are_refused_before_they_are_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock_server(max_input_length=1024) as url:
        code, result, errors = bench(capsys, "--url", url)
    assert (1, {}) == (code, result)
    assert errors.startswith(
        "error: requests of up to 2048 tokens are asked for, and max_input_length of the server is"
    )
    assert "start it with --max-input-length 2048" in errors


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"http://127.0.0.1:{free_port()}", "cannot reach"),
        ("localhost:3000", "is not a URL"),
        ("http://127.0.0.1:http", "is not a URL"),
    ],
    ids=["nobody there", "no scheme", "no port"],
)
def test_a_wrong_url_is_one_sentence(capsys: pytest.CaptureFixture[str], url: str, sentence: str) -> None:
    code, _, errors = bench(capsys, "--url", url, *GRID)
    assert (1, 1) == (code, len(errors.splitlines()))
    assert sentence in errors


def test_a_missing_route_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(without="generate_stream") as url:
        code, _, errors = bench(capsys, "--url", url, *GRID)
    assert (1, 1) == (code, len(errors.splitlines()))
    assert "/generate_stream was answered by 404: is --api right" in errors


def test_a_server_that_cannot_count_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(without="tokenize") as url:
        code, _, errors = bench(capsys, "--url", url, *GRID)
    assert 1 == code
    assert "give --tokenizer" in errors


def test_when_nothing_succeeds_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(refuse_every=1) as url:
        code, result, errors = bench(capsys, "--url", url, *GRID, "--num-requests", 4)
    assert (1, 4) == (code, result["rows"][0]["errors"])
    assert "no request succeeded" in errors


def test_lengths_from_a_file_take_the_place_of_the_grid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_length": 3, "output_length": 2}\n{"input_length": 5, "output_length": 4}\n')
    with mock_server() as url:
        flags = ("--length-distribution", path, "--concurrency", 4, "--num-requests", 12)
        code, result, _ = bench(capsys, "--url", url, *flags)
    [row] = result["rows"]
    assert (0, 4, 3, 0, 0) == (code, *(row[k] for k in ("input_length", "output_length", "short", "errors")))


def test_limits_are_those_of_one_request(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_length": 30, "output_length": 2}\n{"input_length": 5, "output_length": 20}\n')
    limits = limits_of(parsed("--length-distribution", str(path)))
    assert {"max_input_length": 30, "max_total_tokens": 32} == limits  # and not 30 + 20
    assert {"max_input_length": 6 + 8 + 6, "max_total_tokens": 28} == limits_of(parsed(*GRID, "--turns", "2"))


def test_a_server_of_ours_has_room_for_what_messages_add() -> None:
    flags = serving._limits(parsed(*GRID, "--turns", "2"))
    assert ["--max-input-length", str(20 + 3 * 32), "--max-total-tokens", str(28 + 3 * 32)] == flags[:4]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    args = parser.parse_args(arguments)
    serving._complete(args)
    return args


def test_what_follows_two_dashes_goes_to_the_launcher() -> None:
    args = parsed(*GRID, "--concurrency", "1", "200", "--", "--max-total-tokens", "99", "--json-output")
    assert ["--max-total-tokens", "99", "--json-output"] == args.launcher_flags
    assert ["--max-input-length", "6", "--max-concurrent-requests", "200"] == serving._limits(args)


def test_loads_and_lengths_can_be_repeated_and_have_defaults() -> None:
    args = parsed("--concurrency", "1", "8", "--concurrency", "8", "--request-rate", "2.5")
    wanted = loads_of(args)
    assert [Load(concurrency=1), Load(concurrency=8), Load(request_rate=2.5)] == wanted
    assert [32, 32, 150] == [num_requests(args, load) for load in wanted]
    assert ([128, 512, 1024, 2048], [16]) == (parsed().input_length, parsed().concurrency)


def test_an_unknown_distribution_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = bench(capsys, "--url", "http://127.0.0.1:1", "--length-distribution", "gaussian")
    assert 1 == code
    assert "gaussian is none of fixed, uniform, lognormal" in errors


def test_a_real_server_is_started_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--input-length", 16, "--output-length", 4, "--concurrency", 2, "--num-requests", 4)
    code, result, _ = bench(capsys, "--device", "cpu", "--dtype", "float32", *work)
    [row] = result["rows"]
    assert (0, 0, 0) == (code, row["errors"], row["other_input_length"])
    assert ("server/demo", "float32", 1) == tuple(result[key] for key in ("model", "dtype", "num_shard"))
    assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
    assert "memory left " in result["startup"]["table"] and result["startup"]["ready_s"] > 0


def test_what_a_server_calls_itself_is_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving._named("a\x1b[31mb\n" + 1000 * "c", "unknown") == "a?[31mb?" + 192 * "c"
    assert [serving._named(said, "unknown") for said in (None, "", 7, ["x"])] == 4 * ["unknown"]


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MOST_BODY", 100_000)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
        with suppress(OSError):
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()

    async def scenario() -> http_client.Reply:
        async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
            client = http_client.HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(ConnectionResetError, match="its answer to /metrics has more than 100000 bytes"):
                await client.text("/metrics")
            return await client.stream(http_client.TgiApi(), "a prompt", 8)

    assert asyncio.run(scenario()).error == "disconnected"

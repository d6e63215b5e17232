"""Settings: where each value comes from, what is refused and with which words, and that none is undocumented."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from launch.config import DEMO, AdapterSource, LauncherConfig, parse_adapters
from launch.errors import Refusal
from launch.flags import build_parser, render_settings
from launch.machine import storage_warnings
from launch.settings import Settings, public_settings
from launcher import prepare
from router.config import ADAPTER_NAME_RULE, RouterConfig
from server.config import QUANTIZE_REFUSED, ShardConfig
from tests.running import ROOT

ORIGINS = "give * or origins as browsers send them, without a path, such as https://example.org"
METHODS = "auto, ngram, suffix, draft, medusa, eagle3, mtp"
NO_MODEL = (
    "--speculative-method is eagle3 but there is no --speculative-model: name the model that proposes tokens, or leave "
    "--speculative-method out"
)
TWO_SOURCES = (
    "--speculative-model is m but --speculative-method is mtp, whose guesses come from layers of the served model: "
    "leave one of them out"
)
NOT_USED = "--speculate is 0, so nothing could use --speculative-model: raise it, or leave one of them out"
NO_FOLDER = (
    "--allow-adapter-changes is set but there is no --adapter-dir, below which all must lie that is loaded: give the "
    "folder, or leave --allow-adapter-changes out"
)
NO_ADAPTER = "is neither ID nor NAME=ID, of which a repository may have @REVISION behind it"
SHARES = "give a share such as 40%, or a size such as 6GB, 500MB or 5.5GiB"
LARGEST = "the largest allowed value is 2147483647"


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    prepared = prepare(["--device", "cpu", *argv], environ or {})
    assert prepared is not None
    return prepared[0]


def problems(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(Refusal) as refusal:
        read(argv, environ)
    assert 2 == refusal.value.code
    return refusal.value.problems


def test_defaults_are_those_of_the_dataclasses() -> None:
    settings = read()
    assert 128 == settings.values["max_concurrent_requests"]
    assert str(DEMO) == settings.values["model_id"]
    assert {"default"} == {source for name, source in settings.sources.items() if name != "device"}


def test_adapters_are_named_as_tgi_names_them() -> None:
    given = read(["--lora-adapters", "org/one, two=/a@b/c", "--lora-adapters", "three=org/three@v1,/d/four"])
    assert [
        AdapterSource("org/one", "org/one"),
        AdapterSource("two", "/a@b/c"),
        AdapterSource("three", "org/three", "v1"),
        AdapterSource("four", "/d/four"),
    ] == parse_adapters(given.values["lora_adapters"])
    assert given.has_adapters and not read().has_adapters


@pytest.mark.parametrize("given", ["a b", "d/a;d/b", "one=a two=b", "one=/d/a two=/d/b", "./a ./b", "/d/a; /d/b"])
def test_what_else_may_stand_between_adapters_is_answered_with_a_comma(given: str) -> None:
    assert problems(["--lora-adapters", given])[0].endswith("; separate adapters by commas")


def test_a_path_may_have_spaces() -> None:
    assert [AdapterSource("a", "/my files/a=b; c")] == parse_adapters(["a=/my files/a=b; c"])


def test_a_value_knows_where_it_is_from() -> None:
    settings = read(["--max-batch-size", "4"], {"MAX_BATCH_SIZE": "8", "MAX_BEST_OF": "3", "PORT": ""})
    assert (4, "flag") == (settings.values["max_batch_size"], settings.sources["max_batch_size"])
    assert (3, "environment") == (settings.values["max_best_of"], settings.sources["max_best_of"])
    assert "default" == settings.sources["port"]  # an empty variable counts as unset


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--max-batch-size", "4"], {"MAX_BATCH_SIZE": "none"}, {"max_batch_size": 4}),  # which is not read
        ([], {"LOCKSTEP_LOG_LEVEL": "WARN"}, {"log_level": "warn"}),
        ([], {}, {"prefill_chunk": "auto", "json_output": False}),
        (["--prefill-chunk", "128"], {}, {"prefill_chunk": 128}),
        ([], {"PREFILL_CHUNK": "AUTO"}, {"prefill_chunk": "auto"}),
        (["--prefill-chunk", "auto"], {"PREFILL_CHUNK": "64"}, {"prefill_chunk": "auto"}),
        *(
            (["--weights-on-device", text, "--offload-dir", "/var/tmp"], {}, {"weights_on_device": expected})
            for text, expected in {"auto": "auto", "AUTO": "auto", "40%": "40%", "6GB": "6GB"}.items()
        ),
        (["--max-batch-size=7"], {}, {"max_batch_size": 7}),
        (["--max_batch_size=7"], {}, {"max_batch_size": 7}),
        (
            ["--model_id=my_user/my_model", "--shard-uds-path", "/tmp/a_b"],
            {},
            {"model_id": "my_user/my_model", "shard_uds_path": "/tmp/a_b"},
        ),
        (["-p", "8080", "-e"], {}, {"port": 8080, "env": True}),
        (["--json-output"], {}, {"json_output": True}),
        (["--json-output", "false"], {"JSON_OUTPUT": "1"}, {"json_output": False}),
        ([], {"JSON_OUTPUT": "true"}, {"json_output": True}),
        ([], {"JSON_OUTPUT": "0"}, {"json_output": False}),
        (  # what machines say of themselves is none of it
            [],
            {"HOSTNAME": "web-7f9c", "ENV": "production", "LOCKSTEP_HOSTNAME": "127.0.0.1"},
            {"hostname": "127.0.0.1", "env": False},
        ),
        (
            ["--cors-allow-origin", "https://a.example, https://b.example", "--cors-allow-origin", "https://c.example"],
            {},
            {"cors_allow_origin": ("https://a.example", "https://b.example", "https://c.example")},
        ),
        # Pages of files, in the words of two browsers.
        (["--cors-allow-origin", "null,file://"], {}, {"cors_allow_origin": ("null", "file://")}),
        (["--max-input-tokens", "9"], {}, {"max_input_length": 9}),  # another name of it
        ([], {"MAX_INPUT_TOKENS": "9"}, {"max_input_length": 9}),
    ],
)
def test_what_is_said_is_meant(argv: list[str], environ: dict[str, str], expected: dict[str, object]) -> None:
    values = read(argv, environ).values
    assert expected == {name: values[name] for name in expected}


def test_setting_and_alias_together_are_refused() -> None:
    both = {"MAX_INPUT_LENGTH": "9", "MAX_INPUT_TOKENS": "9"}
    assert ["MAX_INPUT_LENGTH and MAX_INPUT_TOKENS are two names of one setting: give only one of them"] == problems(
        [], both
    )


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--max-batch-size", "0"], {}, "--max-batch-size is 0: the smallest allowed value is 1"),
        (
            [],
            {"MAX_BATCH_SIZE": "0"},
            "--max-batch-size is 0: the smallest allowed value is 1 (from environment MAX_BATCH_SIZE)",
        ),
        (["--port", "65536"], {}, "--port is 65536: the largest allowed value is 65535"),
        (["--max-batch-total-tokens", "9" * 20], {}, f"--max-batch-total-tokens is {'9' * 20}: {LARGEST}"),
        (["--port", "-1"], {}, "--port is -1: the smallest allowed value is 0"),
        (["--port", "http"], {}, "--port is http: give a whole number"),
        (["--port", "1.5"], {}, "--port is 1.5: give a whole number"),
        (["--prefill-chunk", "0"], {}, "--prefill-chunk is 0: the smallest allowed value is 1"),
        (["--state-checkpoint-tokens", "0"], {}, "--state-checkpoint-tokens is 0: the smallest allowed value is 1"),
        (["--prefill-chunk", "fast"], {}, "--prefill-chunk is fast: give a whole number or auto"),
        (
            ["--prefill-chunk", "512"],
            {"MAX_INTER_TOKEN_MS": "100"},
            "--max-inter-token-ms is 100 but --prefill-chunk is 512, a fixed size, and only one that is chosen can "
            "keep to it: leave one of them out, or set --prefill-chunk to auto",
        ),
        (["--waiting-served-ratio", "nan"], {}, "--waiting-served-ratio is nan: give a finite number"),
        (["--watermark-delta", "inf"], {}, "--watermark-delta is inf: give a finite number"),
        (["--watermark-delta", "x"], {}, "--watermark-delta is x: give a number"),
        (["--dtype", "int3"], {}, "--dtype is int3: give one of float32, float16, bfloat16"),
        (
            [],
            {"LOCKSTEP_LOG_LEVEL": "loud"},
            "--log-level is loud: give one of debug, info, warn, error (from environment LOCKSTEP_LOG_LEVEL)",
        ),
        *(
            (["--quantize", name.upper()], {}, f"--quantize is {name.upper()}: {remedy}")
            for name, remedy in QUANTIZE_REFUSED.items()
        ),
        (["--quantize-head", "int4"], {}, "--quantize-head is int4: give one of int8, none"),
        (["--speculative-method", "foo"], {}, f"--speculative-method is foo: give one of {METHODS}"),
        (["--speculative-method", "eagle3"], {}, NO_MODEL),
        (["--speculative-method", "mtp", "--speculative-model", "m"], {}, TWO_SOURCES),
        (["--speculate", "0", "--speculative-model", "m"], {}, NOT_USED),
        (["--allow-adapter-changes"], {}, NO_FOLDER),
        (["--adapter-dir", "/no"], {}, "--adapter-dir is /no, which is no folder: make it first, or check the path"),
        (
            ["--weights-cache-override", "/no"],
            {},
            "--weights-cache-override is /no, which is no folder: make it first, or check the path",
        ),
        *[
            (["--lora-adapters", given], {}, f"--lora-adapters is {given}: {sentence}")
            for given, sentence in (
                ("a=b=c", f"'a=b=c' {NO_ADAPTER}"),
                ("a@", f"'a@' {NO_ADAPTER}"),
                ("a=", f"'a=' {NO_ADAPTER}"),
                ("=/a", f"'' cannot be an adapter's name: {ADAPTER_NAME_RULE}"),
                ("../..", f"'..' cannot be an adapter's name: {ADAPTER_NAME_RULE}"),
                ("a b=/x", f"'a b' cannot be an adapter's name: {ADAPTER_NAME_RULE}; separate adapters by commas"),
                ("/x/a,a=b/c", "two adapters are called a: write NAME=ID with names of their own"),
            )
        ],
        (["--speculate", "17"], {}, "--speculate is 17: the largest allowed value is 16"),
        ([], {"SPECULATE": "x"}, "--speculate is x: give a whole number (from environment SPECULATE)"),
        (["--num-shard", "3"], {}, "--num-shard is 3: give one of auto, 1, 2, 4, 8"),
        *(
            (["--cors-allow-origin", origin], {}, f"--cors-allow-origin is {origin}: {ORIGINS}")
            for origin in (
                "example.org",
                "file:///x",
                "https://a.example/",
                "https://a.example/x",
                "/x",
                "https://a.example,b",
            )
        ),
        (["--sharded", "maybe"], {}, "--sharded is maybe: give true or false"),
        (["--revision", ""], {}, "--revision is empty: give a value or leave it out"),
        (["--api-key", " "], {}, "--api-key is empty: give a value or leave it out"),
        (["--prot", "1"], {}, "--prot is not an option: did you mean --port?"),
        (["--api-kye=hunter2"], {}, "--api-kye is not an option: did you mean --api-key?"),
        (["--zzzzzz"], {}, "--zzzzzz is not an option: see lockstep --help"),
        (["--weights-on-device", "-5%"], {}, f"--weights-on-device is -5%: {SHARES}"),
        (["my/model"], {}, "my/model belongs to no option: a model is given as --model-id my/model"),
        (["--dtype", "\x1b[31m"], {}, r"--dtype is \x1b[31m: give one of float32, float16, bfloat16"),
    ],
)
def test_wrong_value_is_refused_with_its_remedy(argv: list[str], environ: dict[str, str], expected: str) -> None:
    assert [expected] == problems(argv, environ)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--port"], "--port/-p: expected one argument"),
        (
            ["--max-input-length", "10", "--max-total-tokens", "10"],
            "--max-input-length is 10 but must be less than --max-total-tokens, 10",
        ),
        (
            ["--prefix-cache-disk-gb", "1"],
            "--prefix-cache-disk-gb is 1 but there is no --prefix-cache-dir: give a folder",
        ),
        (
            ["--kv-on-device", "50%", "--offload-dir", str(ROOT), "--prefix-cache-host-gb", "1"],
            "--kv-on-device 50% has no prefix cache on host or disk: leave out --prefix-cache-host-gb and",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(argv: list[str], expected: str) -> None:
    (problem,) = problems(argv)
    assert problem.startswith(expected)


def test_what_needs_a_folder_or_a_gpu_is_found_by_the_flags_alone() -> None:
    given = ["--model-id", "no/model", "--kv-on-device", "5%", "--weights-on-host", "1GB", "--offload-dir", "/no/where"]
    starts = ["--weights-on-host is for GPUs", "--offload-dir /no/where: no file can be made there"]
    assert [True, True] == [found.startswith(start) for found, start in zip(problems(given), starts, strict=True)]
    assert "null" == read(["--model-id", "null", "--kv-on-device", "5%"]).values["model_id"]


def test_what_changes_nothing_is_said(tmp_path: Path) -> None:
    idle = read(["--offload-dir", str(tmp_path)])
    assert ["--offload-dir holds"] == [" ".join(x.split()[:2]) for x in storage_warnings(idle)]


def test_a_setting_that_is_gone_is_refused_by_name_with_what_to_use() -> None:
    flags, variables = problems(["--batch-dir", "/tmp"]), problems([], {"BATCH_DIR": "/tmp"})
    assert flags[0].startswith("--batch-dir is not an option any more: the server keeps no files and no batches")
    assert ["BATCH_DIR is no setting any more: " + flags[0].partition("more: ")[2]] == variables
    assert "`lockstep batch --url URL`" in variables[0]


def test_a_pace_of_the_null_model_is_idle_beside_a_model() -> None:
    paced = ["--null-step-ms", "5"]
    sentence = "--null-step-ms is 5 but there is a model: it slows --model-id null alone"
    assert [sentence] == storage_warnings(read(paced))
    assert [] == storage_warnings(read(["--model-id", "null", *paced]))
    bound = ["--null-step-ms is 70000: the largest allowed value is 60000.0"]
    assert bound == problems(["--null-step-ms", "70000"])


def test_every_problem_is_reported_at_once() -> None:
    found = problems(["--max-batch-size", "0", "--colour"], {"PORT": "x", "MAX_TOTAL_TOKENS": "1"})
    assert 4 == len(found)


def test_help_and_settings_page_never_fall_behind() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == render_settings(), (
        "run: python launcher.py --print-settings > docs/settings.md"
    )


def test_help_shows_what_may_be_chosen() -> None:
    shown = build_parser(public_settings()).format_help()
    assert "--log-level debug|info|warn|error" in shown and "--num-shard auto|1|2|4|8" in shown
    assert re.search("--port(, -p)? INT", shown)  # before Python 3.13 each name has it
    assert "--max-batch-size REQUESTS" in shown


def test_every_public_setting_has_a_group_and_all_its_texts() -> None:
    declared = [
        f for config in (LauncherConfig, RouterConfig, ShardConfig) for f in fields(config) if "help" in f.metadata
    ]
    assert {f.name for f in declared} == set(public_settings())
    assert [] == [f.name for f in declared if not f.metadata.get("when")]
    assert [] == [f.name for f in declared if f.default is None and "default" not in f.metadata]
    assert {s.kind for s in public_settings().values()} <= {bool, int, float, str, tuple}

"""TGI's command line: every flag and variable of its launcher is taken, changes nothing and says so, or is refused."""

from __future__ import annotations

import pytest

from launch.compatibility.tgi import SETTINGS, Fate, TgiSetting
from launch.settings import public_settings
from tests.launch.test_settings import problems, read

# A valid value of each flag of TGI 3.3.7's launcher, which is also that of the variable of this name.
FLAGS = {
    "model_id": "null", "revision": "main", "validation_workers": "3", "sharded": "false", "num_shard": "2",
    "quantize": "bitsandbytes-nf4", "speculate": "2", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3fn",
    "trust_remote_code": "true", "max_concurrent_requests": "64", "max_best_of": "3", "max_stop_sequences": "5",
    "max_top_n_tokens": "6", "max_input_tokens": "100", "max_input_length": "100", "max_total_tokens": "200",
    "waiting_served_ratio": "0.3", "max_batch_prefill_tokens": "500", "max_batch_total_tokens": "4096",
    "max_waiting_tokens": "10", "max_batch_size": "8", "cuda_graphs": "1,2,4", "hostname": "127.0.0.1",
    "port": "0", "prometheus_port": "9001", "shard_uds_path": "/tmp/tgi", "master_addr": "localhost",
    "master_port": "29501", "huggingface_hub_cache": "/tmp", "weights_cache_override": "server/demo",
    "disable_custom_kernels": "true", "cuda_memory_fraction": "0.9", "rope_scaling": "linear", "rope_factor": "2.0",
    "json_output": "true", "otlp_endpoint": "http://127.0.0.1:4317", "otlp_service_name": "tgi",
    "cors_allow_origin": "*", "api_key": "key", "watermark_gamma": "0.4", "watermark_delta": "1.5", "ngrok": "true",
    "ngrok_authtoken": "token", "ngrok_edge": "edge", "tokenizer_config_path": "server/demo/tokenizer_config.json",
    "disable_grammar_support": "true", "env": "true", "max_client_batch_size": "8",
    "lora_adapters": "predibase/dbpedia,mine=/adapter", "usage_stats": "no-stack", "payload_limit": "3000000",
    "enable_prefill_logprobs": "true", "graceful_termination_timeout": "30",
}  # fmt: skip
SWITCHES = {
    "trust_remote_code", "disable_custom_kernels", "json_output", "ngrok", "disable_grammar_support", "env",
    "enable_prefill_logprobs",
}  # fmt: skip
# And of each variable that has no flag but changes what its launcher, router or shards do.
VARIABLES = {
    "HF_TOKEN": "hf_x", "HUGGING_FACE_HUB_TOKEN": "hf_x", "HF_API_TOKEN": "hf_x", "HF_HOME": "/data",
    "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all", "HOSTNAME": "0.0.0.0",
    "LOG_LEVEL": "info,text_generation_router=debug", "LOG_COLORIZE": "1", "ATTENTION": "flashdecoding",
    "USE_FLASH_ATTENTION": "false", "PREFIX_CACHING": "0", "PREFILL_CHUNKING": "0", "TGI_WIGGLE_ROOM": "0.8",
    "HF_HUB_ENABLE_HF_TRANSFER": "1", "HF_HUB_USER_AGENT_ORIGIN": "aws", "COMPUTE_TYPE": "gpu",
    "ZE_AFFINITY_MASK": "0",
}  # fmt: skip
WITHOUT_VARIABLE = {"env", "hostname"}  # here: of the machine, and not of us


def setting_of(name: str) -> TgiSetting:
    """As the table has it; what is not there is the same here."""
    return SETTINGS.get(name, TgiSetting(name, has_variable=name not in WITHOUT_VARIABLE))


def test_every_setting_of_tgi_is_one_of_ours_or_in_the_table() -> None:
    assert SETTINGS.keys() <= FLAGS.keys() | VARIABLES.keys()
    ours = {name for setting in public_settings().values() for name in setting.names}
    taken = {name for name in FLAGS if setting_of(name).fate is Fate.TAKEN}
    assert taken | {"trust_remote_code"} == FLAGS.keys() & ours
    assert all(setting.reason for setting in SETTINGS.values() if setting.fate is not Fate.TAKEN)


def given(name: str, value: str) -> list[str]:
    """How TGI's documentation writes a flag."""
    flag = setting_of(name).flag
    return [flag] if name in SWITCHES else [flag, value]


def becomes(name: str, argv: list[str], environ: dict[str, str]) -> None:
    """Hold one setting, given in one of two ways, to what the table says of it."""
    setting = setting_of(name)
    if setting.fate is Fate.REFUSED:
        (problem,) = problems(argv, environ)
        assert problem.endswith(f"is refused: {setting.reason}")
        return
    idle = read(argv, environ).idle
    assert ([f"changes nothing: {setting.reason}"] if setting.fate is Fate.IDLE else []) == [
        f"changes nothing{line.partition(' changes nothing')[2]}" for line in idle
    ]


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_becomes_what_the_table_says(name: str) -> None:
    becomes(name, given(name, FLAGS[name]), {})


@pytest.mark.parametrize("name", sorted((FLAGS.keys() | VARIABLES.keys()) - WITHOUT_VARIABLE))
def test_every_variable_becomes_what_the_table_says(name: str) -> None:
    becomes(name, [], {setting_of(name).variable: (FLAGS | VARIABLES)[name]})


def test_a_flag_and_its_variable_are_one_line() -> None:
    assert ["--prometheus-port 2 changes nothing"] == [
        line.partition(":")[0] for line in read(["--prometheus-port", "2"], {"PROMETHEUS_PORT": "3"}).idle
    ]


def test_a_value_that_asks_for_nothing_is_taken() -> None:
    nothing = {"NGROK": "false", "TRUST_REMOTE_CODE": "0", "SPECULATE": "0", "LORA_ADAPTERS": "", "HOSTNAME": "web-7f9"}
    assert [] == list(read(["--ngrok", "false"], nothing).idle)


def test_a_secret_is_not_repeated() -> None:
    assert not [line for line in read([], {"NGROK_AUTHTOKEN": "hunter2"}).idle if "hunter2" in line]


def test_a_value_of_tgi_is_called_as_here() -> None:
    assert "fp8_e4m3" == read([], {"KV_CACHE_DTYPE": "fp8_e4m3fn"}).values["kv_cache_dtype"]


def test_the_short_flags_of_tgi_are_known() -> None:
    settings = read(["-p", "8080", "-g", "5", "-e"])
    assert (8080, 5) == (settings.values["port"], settings.values["graceful_termination_timeout"])


def test_what_changes_nothing_is_not_proposed() -> None:
    assert ["--prometheus-prt is not an option: see lockstep --help"] == problems(["--prometheus-prt", "1"])

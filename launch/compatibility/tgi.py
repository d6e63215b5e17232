"""The flags and environment variables of TGI 3.3.7's launcher, and what becomes of each here.

None is unknown. Most have the same name and meaning here (`launch/settings.py`), and are not in this table: it has
those that are taken with a difference, such as another default, those that change nothing, and those that are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import ip_address

from launch.logs import printable

PROGRAM = "text-generation-launcher"
ATTENTION = "each device has its own; DISABLE_CUSTOM_KERNELS=true takes torch's own operators"


class Fate(Enum):
    """What becomes of a setting of TGI's."""

    TAKEN = "taken"
    IDLE = "changes nothing"
    REFUSED = "refused"


def _always(value: str) -> bool:
    return True


def _unless_false(value: str) -> bool:
    return value.lower() not in ("false", "0")


def _if_address(value: str) -> bool:
    """Whether somebody means an address: shells and containers set HOSTNAME to the machine's name."""
    try:
        ip_address(value)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class TgiSetting:
    """One setting of TGI: as a flag and as a variable of the same name, or as a variable alone (capitals)."""

    name: str
    fate: Fate = Fate.TAKEN
    reason: str = ""  # why it changes nothing or is refused, and what does the same here
    default: str = ""  # TGI's, where it is not ours and that can be noticed
    values: Mapping[str, str] = field(default_factory=dict)  # what a value of TGI's is called here
    is_switch: bool = False
    has_variable: bool = True
    means_something: Callable[[str], bool] = _always  # whether a value asks for anything at all

    @property
    def flag(self) -> str:
        """The option; empty where there is none."""
        return "" if self.name.isupper() else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable; empty where there is none."""
        return self.name.upper() if self.has_variable else ""


def _idle(name: str, reason: str, *, when: Callable[[str], bool] = _always, is_switch: bool = False) -> TgiSetting:
    return TgiSetting(name, Fate.IDLE, reason, means_something=when, is_switch=is_switch)


def _refused(name: str, reason: str, *, when: Callable[[str], bool] = _always, is_switch: bool = False) -> TgiSetting:
    return TgiSetting(name, Fate.REFUSED, reason, means_something=when, is_switch=is_switch)


SETTINGS: Mapping[str, TgiSetting] = {
    setting.name: setting
    for setting in (
        # Taken, with a default or a meaning of its own.
        TgiSetting("model_id", default="bigscience/bloom-560m"),
        TgiSetting("hostname", default="0.0.0.0", has_variable=False),
        TgiSetting("max_input_tokens", default="max_total_tokens - 1"),
        TgiSetting("max_input_length", default="max_total_tokens - 1"),
        TgiSetting("max_total_tokens", default="what model and memory allow"),
        TgiSetting(
            "max_batch_prefill_tokens",
            default="from the GPU",
            reason="it bounds a step; a longer prompt takes several steps",
        ),
        TgiSetting("max_batch_total_tokens", reason="it is kept, or refused where it does not fit; TGI replaces it"),
        TgiSetting("max_top_n_tokens", default="5"),
        TgiSetting("speculate"),
        TgiSetting("waiting_served_ratio", default="0.3"),
        TgiSetting("cors_allow_origin", default="any"),
        TgiSetting("enable_prefill_logprobs", default="false"),
        TgiSetting("dtype", default="float16"),
        TgiSetting("kv_cache_dtype", values={"fp8_e4m3fn": "fp8_e4m3"}),
        TgiSetting("cuda_graphs", default="1,2,4,8,16,32"),
        TgiSetting(
            "lora_adapters", reason="a name that is none of them is an error; TGI answers it without an adapter"
        ),
        # Without a meaning here.
        _idle("trust_remote_code", "code from a model repository is never run", when=_unless_false, is_switch=True),
        _idle("prometheus_port", "/metrics is on --port"),
        _idle("usage_stats", "no usage is ever reported"),
        _idle("ngrok_authtoken", "there is no tunnel; give it to the ngrok program"),
        _idle("ngrok_edge", "there is no tunnel; give it to the ngrok program"),
        _refused("ngrok", "there is no tunnel; run `ngrok http PORT` beside it", when=_unless_false, is_switch=True),
        # Variables without a flag.
        _idle("HOSTNAME", "it is the machine's name in shells and containers; set LOCKSTEP_HOSTNAME", when=_if_address),
        _idle("LOG_LEVEL", "other programs read it; set LOCKSTEP_LOG_LEVEL to debug, info, warn or error"),
        _idle("LOG_COLORIZE", "logs have colours on a terminal; set NO_COLOR=1 for none"),
        _idle("ATTENTION", ATTENTION),
        _idle("USE_FLASH_ATTENTION", ATTENTION),
        _idle("PREFIX_CACHING", "prefixes are cached; DISABLE_PREFIX_CACHING=true turns that off"),
        _idle("PREFILL_CHUNKING", "long prompts are computed in chunks; PREFILL_CHUNK sets their size"),
        _idle("TGI_WIGGLE_ROOM", "free memory is measured; CUDA_MEMORY_FRACTION leaves some to other programs"),
        _idle("HF_HUB_ENABLE_HF_TRANSFER", "huggingface_hub downloads without it"),
        _idle("HF_HUB_USER_AGENT_ORIGIN", "downloads do not name their origin"),
        _idle("COMPUTE_TYPE", "x-compute-type names the device that computes"),
        _idle("ZE_AFFINITY_MASK", "Intel's GPUs are not used"),
    )
}


def own_value(name: str, text: str) -> str:
    """What a value of TGI's is called here: the same, mostly."""
    return SETTINGS[name].values.get(text.strip().lower(), text) if name in SETTINGS else text


def foreign_settings() -> list[TgiSetting]:
    """Those with a flag that are not taken, so that a command line may have them."""
    return [setting for setting in SETTINGS.values() if setting.flag and setting.fate is not Fate.TAKEN]


def read(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(what changes nothing, what is refused): one sentence for each setting that is given. A flag wins."""
    said: dict[Fate, list[str]] = {Fate.IDLE: [], Fate.REFUSED: []}
    for setting in SETTINGS.values():
        text = flags.get(setting.name) or environ.get(setting.variable, "")
        if setting.fate is Fate.TAKEN or not text or not setting.means_something(text):
            continue
        label = setting.flag if setting.name in flags else setting.variable
        secret = "token" in setting.name
        shown = "" if secret or setting.is_switch else f" {printable(text)}"
        verb = "is refused" if setting.fate is Fate.REFUSED else "changes nothing"
        said[setting.fate].append(f"{label}{shown} {verb}: {setting.reason}")
    return said[Fate.IDLE], said[Fate.REFUSED]

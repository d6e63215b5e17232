"""What docs/deploying.md says of Ray Serve in its text, held against the source: no Ray is needed.

Its blocks of commands are typed, and what they print is compared, by `tests/ray/test_page.py`.
"""

from __future__ import annotations

import re

import pytest
import yaml

from lockstep_ray.requests import PREFIX_CHARACTERS
from lockstep_ray.settings import Deployment, Model, Scaling, read_settings
from router.scheduling.balancing import POLICIES
from tests.pages import section
from tests.running import ROOT

PAGE = section("deploying.md", "Ray Serve")
APP = yaml.safe_load((ROOT / "deploy/ray/app.yaml").read_text())
ROWS = dict(re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", PAGE.partition("### Settings in app.yaml")[2], re.MULTILINE))
TABLE = {name: said for names, said in ROWS.items() for name in re.findall(r"`(\w+)`", names)}
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
# Commands amid the text, most of which tests/ray type.
INLINE = {
    "serve run",
    "serve deploy",
    "serve status",
    "ray start",
    ".venv/bin/ray status",
    ".venv/bin/ray get-auth-token --generate",
    "LOCKSTEP_API_KEY=… .venv/bin/serve deploy …",
}


def test_every_command_amid_the_text_is_known() -> None:
    found = set(re.findall(r"`((?:[A-Z_]+=\S+ )?(?:(?:\.venv/bin/)?(?:serve|ray)|make) [^`]+)`", PROSE))
    assert INLINE == found


def test_the_table_has_every_setting() -> None:
    of_models = Model.model_fields.keys() | {"min_replicas", "max_replicas", "queue", "kv"}
    told = TABLE.keys() | set(re.findall(r"`(\w+)`", TABLE["scaling"]))
    assert (Deployment.model_fields.keys() | of_models) <= told
    assert TABLE.keys() <= Deployment.model_fields.keys() | Model.model_fields.keys()


@pytest.mark.parametrize(
    ("row", "defaults"),
    [
        ("max_ongoing_requests", [Model.model_fields["max_ongoing_requests"]]),
        ("graceful_shutdown_timeout_s", [Model.model_fields["graceful_shutdown_timeout_s"]]),
        ("health_check_period_s", [Model.model_fields[f"health_check_{name}_s"] for name in ("period", "timeout")]),
        ("most_tries", [Deployment.model_fields[name] for name in ("most_tries", "give_up_s")]),
        ("num_ingresses", [Deployment.model_fields["num_ingresses"]]),
    ],
)
def test_the_defaults_are_those_of_the_source(row: str, defaults: list[object]) -> None:
    assert [field.default for field in defaults] == [float(number) for number in re.findall(r"\b\d+\b", TABLE[row])]


def test_when_a_replica_is_full_is_what_the_source_says() -> None:
    scaling = Scaling()
    assert f"`queue` waiting requests ({scaling.queue:g}) or at `kv` of its cache ({scaling.kv:g})" in PAGE
    for name in ("upscale_delay_s", "downscale_delay_s"):
        assert f"`{name}` ({getattr(scaling, name):g})" in PAGE
    assert f"the same first {PREFIX_CHARACTERS} characters" in PAGE


def test_policies_are_those_that_the_simulator_has() -> None:
    assert set(POLICIES) == set(re.findall(r"`([\w-]+)`", TABLE["policy"]))
    assert f"`{Model(name='any').policy}` (the default)" in TABLE["policy"]


def test_app_yaml_is_what_the_first_commands_need() -> None:
    """The port that clients go to, the model that is asked for, the name of the application."""
    [model] = read_settings(APP["applications"][0]["args"]).models
    assert f'model: "{model.name}"' in PAGE and "lockstep" == APP["applications"][0]["name"]
    assert f"Clients go to port {APP['http_options']['port']}" in PAGE and "127.0.0.1" == APP["http_options"]["host"]


def test_metrics_are_those_of_a_replica() -> None:
    text = PAGE.partition("Prometheus endpoint has ")[2].partition(" of each replica")[0]
    names = [name.removeprefix("lockstep_replica_").removeprefix("…_") for name in re.findall(r"`([^`]+)`", text)]
    source = (ROOT / "deploy/ray/lockstep_ray/replica.py").read_text()
    assert len(names) == 5 and all(f'"tgi_{name}"' in source for name in names), names

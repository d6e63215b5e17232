"""The Dockerfile as it stands: what its stages may do, what they leave, and that its page says the same.

What its steps give is tried by `make test-docker`, which takes minutes and root.
"""

from __future__ import annotations

import http.server
import re
import runpy
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from router.launch.flags import read_command_line
from router.launch.settings import public_settings, read_settings
from tests.deploy.chroot import Builder, context_of, mirror_of_host, pip_of_host, place, remove
from tests.deploy.dockerfile import Stage, context_files, image_of, needed_for, parse
from tests.deploy.image import obstacle
from tests.ports import free_port
from tests.running import ROOT

DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
STAGES = parse(DOCKERFILE)
NAMED = {stage.name: stage for stage in STAGES}
PAGE = (ROOT / "docs/docker.md").read_text()
TARGETS = ("cpu", "cuda")
COMPILERS = {"g++", "gcc", "clang", "build-essential", "make", "cmake", "python3-pip", "python3-venv", "curl", "wget"}
# Triton compiles what launches its kernels when a server first starts.
NEEDED_TO_SERVE = {"cpu": set(), "cuda": {"gcc"}}

of_targets = pytest.mark.parametrize("target", TARGETS)


def serving(target: str) -> list[Stage]:
    """The stages whose files are all in the image: the target's and those it is FROM."""
    found, name = [], target
    while name in NAMED:
        found.append(NAMED[name])
        name = NAMED[name].base
    return found


def apt_packages(stage: Stage) -> set[str]:
    """What its steps install of the distribution."""
    commands = [command for run in stage.of("RUN") for command in run.arguments.split("&&")]
    found = [match[1] for command in commands if (match := re.search(r"apt-get install (.*)", command))]
    return {word for words in found for word in words.split() if not word.startswith("-")}


# ---------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_begins_with_one_of_ours_or_with_a_version(stage: Stage) -> None:
    if stage.base not in NAMED:
        tag = stage.base.partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{stage.base} names no version"
        assert "latest" not in tag


@of_targets
def test_who_serves_is_a_user_with_a_number_and_no_right_to_change_the_program(target: str) -> None:
    image = image_of(STAGES, target)
    assert re.fullmatch(r"[1-9]\d{4}:[1-9]\d{4}", image.user), image.user
    after = [step.name for step in NAMED[target].instructions]
    assert "RUN" not in after and "COPY" not in after[after.index("USER") :]
    assert all("chown" not in step.flags for step in NAMED[target].instructions)


@of_targets
def test_the_image_has_no_compiler_that_it_does_not_need(target: str) -> None:
    installed = {package for stage in serving(target) for package in apt_packages(stage)}
    assert "python3" in installed and installed & COMPILERS == NEEDED_TO_SERVE[target]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_what_a_step_downloads_it_leaves_nothing_else_of(stage: Stage) -> None:
    for run in stage.of("RUN"):
        assert "sudo" not in run.arguments and "| " not in run.arguments  # a pipe hides a failure
        if "apt-get" in run.arguments:
            assert run.arguments.startswith("apt-get update && apt-get install --yes --no-install-recommends ")
            assert "&& rm -rf /var/lib/apt/lists/*" in run.arguments
        for command in run.arguments.split("&&"):
            assert not re.search(r"\b(curl|wget|git|npm)\b.*http", command), command


@of_targets
def test_packages_are_those_of_the_lock_file(target: str) -> None:
    """pip reads PIP_CONSTRAINT for what it builds with, too."""
    build = NAMED[f"{target}-build"]
    env = image_of(STAGES, build.name).env
    assert "/src/constraints.txt" == env["PIP_CONSTRAINT"] and "1" == env["PIP_NO_CACHE_DIR"]
    steps = [step.arguments for step in build.instructions]
    installing = [number for number, step in enumerate(steps) if " install " in step and "pip" in step]
    copied = next(number for number, step in enumerate(steps) if step.startswith("constraints.txt "))
    own = [number for number in installing if "apt-get" not in steps[number]]
    assert own and copied < own[0]
    assert not any(re.search(r"pip .*(--upgrade|==)", step) for step in steps)


def test_the_targets_differ_in_base_and_torch_alone() -> None:
    assert image_of(STAGES, "cpu") == image_of(STAGES, "cuda")

    def steps(name: str) -> list[tuple[str, str]]:
        return [(step.name, step.arguments.replace("cuda-", "cpu-")) for step in NAMED[name].instructions]

    assert steps("cpu") == steps("cuda")
    cpu, cuda = set(steps("cpu-build")), set(steps("cuda-build"))
    assert {"https://download.pytorch.org/whl/cu130"} == {
        words.partition("=")[2] for _, words in cuda - cpu if "pytorch" in words
    }
    assert {"ARG", "RUN"} == {name for name, _ in cpu ^ cuda}
    assert not any("--portable" in words for _, words in cuda) and any("--portable" in words for _, words in cpu)


def test_what_is_built_when_no_target_is_named_is_for_cpus() -> None:
    assert "cpu" == STAGES[-1].name
    assert ["cpu-base", "cpu-build", "cpu"] == [stage.name for stage in needed_for(STAGES, "cpu")]
    assert ["cuda-base", "cuda-build", "cuda"] == [stage.name for stage in needed_for(STAGES, "cuda")]


@of_targets
def test_the_image_serves_the_embedded_model_to_other_machines(target: str) -> None:
    image = image_of(STAGES, target)
    assert ("lockstep",) == image.entrypoint and () == image.command  # as `make serve` without ARGS
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert "lockstep" in scripts and image.env["PATH"].startswith("/opt/lockstep/bin:")
    assert "0.0.0.0" == image.env["LOCKSTEP_HOSTNAME"] and "hostname" in public_settings()
    assert (3000,) == image.ports and "SIGTERM" == image.stop_signal
    assert {"/tmp", image.env["HOME"]} == set(image.volumes)
    assert all(image.env[name].startswith("/cache") for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"))


# -------------------------------------------------------------------------------------------------------------- context


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    files = context_of(ROOT)
    copied = {
        PurePosixPath(word)
        for stage in STAGES
        for step in stage.of("COPY")
        if not step.flags
        for word in step.words(2)[:-1]
    }
    for source in copied:
        assert any(path.is_relative_to(source) for path in files), source
    unused = {path for path in files if not any(path.is_relative_to(source) for source in copied)}
    assert {PurePosixPath("deploy/docker/Dockerfile")} == unused
    assert not [path for path in files if path.suffix == ".pyc" or "compiled" in path.parts or "tests" in path.parts]


def test_the_wheel_is_of_what_the_build_is_given() -> None:
    """Each folder and file of the wheel, and those that its description names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], project["project"]["readme"]}
    wanted |= {*project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    copied = {word for step in NAMED["cpu-build"].of("COPY") for word in step.words(2)[:-1]}
    assert wanted == {word for word in copied if not word.startswith("deploy/docker/")}


@pytest.mark.parametrize(
    ("ignore", "kept"),
    [
        ("", ["a.py", "b/c.py", "b/d/e.pyc"]),
        ("*", []),
        ("*\n!a.py", ["a.py"]),
        ("*\n!b/d", ["b/d/e.pyc"]),
        ("*\n!b\n**/*.pyc", ["b/c.py"]),
        ("# a.py\nb/*.py", ["a.py", "b/d/e.pyc"]),
        ("b\n!b/c.py", ["a.py", "b/c.py"]),
    ],
)
def test_the_last_rule_that_fits_says_whether_a_file_is_sent(tmp_path: Path, ignore: str, kept: list[str]) -> None:
    for name in ("a.py", "b/c.py", "b/d/e.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert kept == [str(path) for path in context_files(tmp_path, ignore)]


# --------------------------------------------------------------------------------------------------------------- parser


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM a:1 AS b\nADD x y", "line 2: ADD x y: only FROM, |COPY"),
        ("FROM a:1", "arguments are not what it takes"),
        ("FROM a:1 AS b\nFROM a:1 AS b", "a-name-of-its-own"),
        ("ARG A=1\nFROM a:1 AS b", "before the first FROM"),
        ("FROM a:1 AS b\nCMD lockstep", "exec form"),
        ("FROM a:1 AS b\nCMD [1]", "other things than strings"),
        ("FROM a:1 AS b\nENV A", "a value is missing"),
        ("FROM a:1 AS b\nENV A=$NOBODY", "NOBODY.*not known"),
        ("FROM a:1 AS b\nCOPY --chown=1 a b", "--chown is not read"),
        ("FROM a:1 AS b\nHEALTHCHECK NONE", "begins with CMD"),
        ("FROM a:1 AS b\nRUN a \\", "line 2: the last line goes on"),
    ],
)  # fmt: skip
def test_what_the_subset_has_not_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        image_of(parse(text), "b")


def test_lines_that_go_on_are_joined_and_comments_amid_them_left_out() -> None:
    text = 'FROM a:1 AS b\n\nRUN one \\\n    # why\n    && two\nENV A=1 B="2 3"\nENV A=$B C=$A\nWORKDIR /x\nWORKDIR y\n'
    [stage] = parse(text)
    assert [("RUN", "one && two", 3)] == [(run.name, run.arguments, run.line) for run in stage.of("RUN")]
    image = image_of([stage], "b")
    assert ("2 3", "1", "/x/y") == (image.env["A"], image.env["C"], image.folder)


# -------------------------------------------------------------------------------------------------------------- builder


def test_files_are_copied_to_where_docker_copies_them(tmp_path: Path) -> None:
    context = tmp_path / "context"
    (context / "code/deep").mkdir(parents=True)
    for name in ("one", "two", "code/three", "code/deep/four", "code/ignored.pyc"):
        (context / name).write_text(name)
    text = """
        FROM made:1.0 AS first
        WORKDIR /src
        COPY one two ./
        COPY one renamed
        COPY code code
        FROM made:1.0 AS last
        COPY --from=first /src/code /opt/code
        COPY one /opt/
        VOLUME ["/opt"]
    """
    files = context_files(context, "**/*.pyc")
    builder = Builder(tmp_path / "trees", context, files, {}, {}, {})
    tree, image = builder.build(parse(text), "last", lambda name, tree: (tree / "usr").mkdir(parents=True))
    src = tmp_path / "trees/first/src"
    found = {str(path.relative_to(src)): path.read_text() for path in src.rglob("*") if path.is_file()}
    assert {
        "one": "one",
        "two": "two",
        "renamed": "one",
        "code/three": "code/three",
        "code/deep/four": "code/deep/four",
    } == found
    assert {"code", "one"} == {path.name for path in (tree / "opt").iterdir()}
    assert {"usr", "opt"} == {path.name for path in tree.iterdir()} and ("/opt",) == image.volumes


def test_a_file_that_the_context_has_not_is_named(tmp_path: Path) -> None:
    builder = Builder(tmp_path, tmp_path, [], {}, {}, {})
    with pytest.raises(ValueError, match=r"line 2: COPY missing x: .* has no missing"):
        builder.build(parse("FROM made:1.0 AS a\nCOPY missing x"), "a", lambda name, tree: tree.mkdir())


def test_links_do_not_lead_out_of_a_tree(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/etc")
    assert tmp_path / "usr" == place(tmp_path, "/usr")
    with pytest.raises(ValueError, match="leads out of"):
        place(tmp_path, "/out/passwd")


def test_trees_with_something_mounted_below_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    info = tmp_path / "mountinfo"
    info.write_text(f"1 0 8:1 / / rw\n2 1 8:1 / {tmp_path}/tree/proc rw\n")
    with pytest.raises(RuntimeError, match="tree/proc is still mounted"):
        remove(tmp_path / "tree", info)
    info.write_text("1 0 8:1 / / rw\n")
    remove(tmp_path / "tree", info)
    assert not (tmp_path / "tree").exists()


def test_the_configuration_of_pip_is_found_in_a_tree(tmp_path: Path) -> None:
    folder, file = tmp_path / "wheels", tmp_path / "bundle.crt"
    folder.mkdir()
    file.touch()
    settings = f":env:.cert='{file}'\nglobal.extra-index-url='file://{folder} https://index.example/simple'\nglobal.timeout='9'\n"
    environment, binds = pip_of_host(settings)
    assert f"/mnt{file}" == environment["PIP_CERT"] and "9" == environment["PIP_TIMEOUT"]
    assert f"file:///mnt{folder} https://index.example/simple" == environment["PIP_EXTRA_INDEX_URL"]
    assert str(file) == binds[f"/mnt{file}"] and any(folder.is_relative_to(source) for source in binds.values())


def test_where_nothing_can_be_built_a_sentence_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "only root" in (obstacle(tmp_path) or "")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "debootstrap" else name)
    assert "there is no debootstrap: apt-get install debootstrap" in (obstacle(tmp_path) or "")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    assert "5 GiB free of 12" in (obstacle(tmp_path) or "")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50 << 30))
    assert obstacle(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "deb http://mirror.example/debian bookworm main\n",
        "deb [signed-by=/k] http://mirror.example/debian/ bookworm main\n",
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n",
    ],
)
def test_the_mirror_is_that_of_the_machine(tmp_path: Path, text: str) -> None:
    assert "http://deb.debian.org/debian" == mirror_of_host(tmp_path)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/other.list").write_text("deb https://other.example/apt stable main\n")
    (tmp_path / "sources.list.d/debian.sources").write_text(text)
    assert "http://mirror.example/debian" == mirror_of_host(tmp_path)


# ------------------------------------------------------------------------------------------------------- what is copied


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


@of_targets
def test_the_health_check_is_what_the_image_runs(target: str) -> None:
    assert ("python", "-I", "/opt/lockstep/healthy.py") == image_of(STAGES, target).health
    assert "deploy/docker/healthy.py /opt/lockstep/" in [step.arguments for step in NAMED[target].of("COPY")]


def test_the_requirements_are_those_of_the_project(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    runpy.run_path("deploy/docker/requirements.py", run_name="__main__")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == capsys.readouterr().out.splitlines()


# ----------------------------------------------------------------------------------------------------------------- page


def test_the_page_speaks_of_what_the_dockerfile_has() -> None:
    image = image_of(STAGES, "cpu")
    commands = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    assert set(TARGETS) == set(re.findall(r"--target (\S+)", commands))
    arguments = {name for stage in STAGES for step in stage.of("ARG") for name in step.pairs()}
    assert arguments == set(re.findall(r"--build-arg (\w+)=", commands))
    assert {"3000:3000"} == set(re.findall(r"(?:--publish|-p) (\S+)", commands))
    assert set(image.volumes) <= set(re.findall(r"(?:--volume \S+:|--tmpfs )(/\w+)", commands))
    assert f"user {image.user.partition(':')[0]}" in PAGE
    for stage in STAGES:
        assert stage.name in PAGE and (stage.base in NAMED or stage.base in PAGE)
    words = {word.lower() for word in re.findall(r"(?:-e|--env) ([A-Z_]+)", commands)}
    assert words <= set(public_settings()) | {"hf_token", "hf_hub_offline"}, words


def test_what_the_page_gives_the_server_are_settings_of_it() -> None:
    given = re.findall(r"docker run (?:[^\n]|(?<=\\)\n)*?lockstep:\w+ ?(.*)", PAGE)
    assert len(given) > 2 and "" in given
    for words in given:
        flags, problems = read_command_line(words.split())
        assert [] == problems + read_settings(flags, {})[1]


def test_the_page_asks_as_the_readme_does() -> None:
    [asked] = re.findall(r"^curl .*/generate -X POST .*\\\n.*$", PAGE, re.MULTILINE)
    assert asked in (ROOT / "README.md").read_text()


def test_the_page_says_what_was_tried_and_what_was_not() -> None:
    assert "linted" in PAGE and "make test-docker" in PAGE and "never been built" in PAGE

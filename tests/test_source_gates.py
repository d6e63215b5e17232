"""What no line of the shipped code does, so that whole classes of attack have nothing to begin with."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import ROOT, longest_match, sources

# Modules whose loaders run code that is in what they load.
UNPICKLERS = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
RUN_WHAT_THEY_READ = {"eval", "exec", "numpy.load", "np.load", "torch.export.load", "torch.jit.load", "yaml.load"}
PICKLING_COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
}  # fmt: skip
# The kinds of error that torch.load raises are found there; the module is imported for nothing else.
MAY_IMPORT_PICKLE = {"server.checkpoint.convert"}

CLIENTS = {"aiohttp", "ftplib", "http.client", "httpx", "httpx2", "requests", "smtplib", "urllib.request", "urllib3"}
OPENERS = {"connect", "connect_ex", "create_connection", "open_connection", "sock_connect", "urlopen"}

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
# Log lines and traces carry the time of day. How old a file is, only its file system's clock can say.
MAY_READ_WALL_CLOCKS = {
    "router.requests.continuing",  # when a stream began, as its answers say
    "launch.node_agent",  # says what its clock shows, and …
    "launch.remote_nodes",  # … node 0 compares, for a sentence on logs that do not line up
    "launch.logs",
    "launch.commands.tls",
    "lockstep_ray.ingress",
    "router.apis.openai.answers",
    "router.telemetry.tracing",
    "server.checkpoint.hub",
}


def shipped() -> Iterator[tuple[str, ast.Module]]:
    """Modules that serve; measurements do not."""
    return ((name, tree) for name, tree in sources() if not name.startswith("benchmark"))


def imported(tree: ast.Module) -> set[str]:
    """Modules that a module imports, at its top or inside functions, and the packages around them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names | {name.split(".")[0] for name in names}


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def runs_what_it_reads(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "torch.load":
        return not any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
    return name in RUN_WHAT_THEY_READ or name.rsplit(".", 1)[-1] in PICKLING_COLLECTIVES


def test_nothing_that_is_read_is_run() -> None:
    users = {module for module, tree in shipped() if imported(tree) & UNPICKLERS}
    assert users <= MAY_IMPORT_PICKLE
    assert {module for module, tree in shipped() if any(map(runs_what_it_reads, calls(tree)))} == set()
    [convert] = [tree for module, tree in shipped() if module in MAY_IMPORT_PICKLE]
    used = {ast.unparse(node) for node in ast.walk(convert) if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.UnpicklingError"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("eval(text)", True),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("torch.load(path, weights_only=True)", False),
        ("dist.broadcast_object_list(x)", True),
        ("model.eval()", False),
        ("json.loads(text)", False),
    ],
)
def test_what_runs_is_recognised(line: str, expected: bool) -> None:
    assert expected == any(map(runs_what_it_reads, calls(ast.parse(line))))


def test_code_of_a_repository_is_refused_in_constants_that_no_switch_turns() -> None:
    """Neither a setting, nor a file of the model, nor `python -O`, which drops asserts, lets such code in."""
    given = [
        ast.unparse(word.value)
        for _, tree in shipped()
        for call in calls(tree)
        for word in call.keywords
        if word.arg == "trust_remote_code"
    ]
    assert given and set(given) == {"False"}


def test_the_router_has_nothing_to_open_connections_with() -> None:
    """It speaks through gRPC alone: to shards over the sockets that the launcher names, and to a collector if asked.

    The launcher dials a socket of its own folder, which a link carries to node 0, and asks the kernel for an address.
    """
    router = [(module, tree) for module, tree in shipped() if longest_match(module, {"router", "launch"})]
    users = [module for module, tree in router if imported(tree) & CLIENTS]
    assert users == ["launch.commands.batch"]  # a command's own process, whose modules no router imports
    opened = {
        (module, ast.unparse(call.func))
        for module, tree in router
        for call in calls(tree)
        if isinstance(call.func, ast.Attribute) and call.func.attr in OPENERS
    }
    assert opened == {("launch.node_agent", "end.connect"), ("launch.nodes", "probe.connect")}


def test_deadlines_know_no_time_of_day() -> None:
    """A clock that is set changes no deadline, no rate and no order: durations are of monotonic clocks alone."""
    readers = {module for module, tree in shipped() for call in calls(tree) if ast.unparse(call.func) in WALL_CLOCKS}
    assert readers == MAY_READ_WALL_CLOCKS
    bare = {
        module
        for module, tree in shipped()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
    }
    assert bare == set()


def test_keys_are_compared_in_constant_time() -> None:
    """As digests, by hmac; nowhere else does the router look at what a client gave as its key."""
    tree = ast.parse((ROOT / "router" / "accounts.py").read_text())
    [find] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "find"]
    assert "hmac.compare_digest" in ast.unparse(find)
    readers = {module for module, tree in shipped() if "b'authorization'" in ast.unparse(tree)}
    assert readers == {"router.apis.middleware"}


# What a user asked for by its path, and what others than its maker run.
MAKE_FOLDERS_FOR_OTHERS = {"server.quantize.output_folder", "server.backends.cpu.build", "lockstep_ray.shards"}


@pytest.mark.parametrize(
    ("code", "is_open"),
    [
        ("folder.mkdir(parents=True)", True),
        ("os.makedirs(path)", True),
        ("folder.mkdir(mode=0o755)", True),
        ("folder.mkdir(mode=0o700, parents=True)", True),  # the mode of those above is the umask's
        ("folder.mkdir(mode=0o700)", False),
        ("make_private(folder)", False),
    ],
)
def test_the_gate_below_knows_folders_that_others_may_enter(code: str, is_open: bool) -> None:
    assert is_open == any(map(opens_a_folder, calls(ast.parse(code))))


def opens_a_folder(call: ast.Call) -> bool:
    """Whether it makes a folder whose mode, or that of one above it, the umask decides."""
    name = ast.unparse(call.func).rsplit(".", 1)[-1]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return name == "makedirs" or (name == "mkdir" and ("parents" in given or given.get("mode") != str(0o700)))


def test_folders_are_made_for_this_user_alone() -> None:
    found = {name for name, tree in shipped() if any(map(opens_a_folder, calls(tree)))}
    assert found <= MAKE_FOLDERS_FOR_OTHERS

"""llama.cpp's tests of its server against one that runs already: a pytest plugin.

Nothing of a test is changed. `ServerProcess` knows of servers that it does not start; here every one is `$SERVER_URL`,
and no model is downloaded, so that settings that a test gives its server are not given.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import pytest

WITHOUT_VERSION = ("/chat/completions", "/completions", "/models", "/responses", "/messages")  # another name there
URL = urlsplit(os.environ["SERVER_URL"])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before any test is read, and after the tests' own folder can be imported from."""
    import utils

    def reach(server: Any) -> None:
        server.external_server, server.server_host, server.server_port = True, URL.hostname, URL.port

    usual, url_of = utils.ServerProcess.__init__, utils.ServerProcess.make_url

    def __init__(self: Any) -> None:
        usual(self)
        reach(self)

    def start(self: Any, timeout_seconds: int = 0) -> None:
        reach(self)  # tests choose ports of their own

    def make_url(self: Any, path: str, host: str | None = None) -> str:
        return url_of(self, f"/v1{path}" if path in WITHOUT_VERSION else path, host)

    utils.ServerProcess.__init__ = __init__
    utils.ServerProcess.make_url = make_url
    utils.ServerProcess.start = start
    utils.ServerPreset.load_all = staticmethod(lambda: None)

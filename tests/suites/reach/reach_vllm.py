"""vLLM's tests against a server that runs already: a pytest plugin in place of what they import of vLLM.

Nothing of a test is changed. `RemoteOpenAIServer` reaches `$SERVER_URL` and starts nothing, so that settings that a
test gives its server are not given here; vLLM's tokenizer of a model is the served one's. Whatever else of vLLM a test
calls ends it with "in-process", and a model's files from the hub with "weights".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

import anthropic
import openai
import pytest
import transformers

ABSENT = ("vllm", "torch", "fastapi", "starlette", "openai_harmony", "lm_eval", "schemathesis", "tests.conftest")
URL, KEY = os.environ["SERVER_URL"], "none is asked for"


class Absent(type):
    """The class of what is not here: it can be subclassed, decorated with and asked what platform this is."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        asked = cls.__name__.rpartition(".")[2]
        if asked.startswith(("is_", "has_")):
            return False
        if "PYTEST_CURRENT_TEST" not in os.environ:  # a test is only being read
            return cls
        pytest.fail(f"in-process: {cls.__name__}", pytrace=False)

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __getitem__(cls, key: Any) -> Any:
        return cls


def absent(name: str) -> Any:
    """What stands for `name` of vLLM."""
    return Absent(name, (), {})


class Absences(MetaPathFinder, Loader):
    """Finds every module of `ABSENT`, and nothing in it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(ABSENT) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return PRESENT.get(name, absent(f"{module.__name__}.{name}"))

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


class RemoteOpenAIServer:
    """The server that runs already."""

    DUMMY_API_KEY = KEY

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.url_root = URL
        self.host, self.port = URL.removeprefix("http://").split(":")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *(part.strip("/") for part in parts if part)))

    def get_client(self, **named: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{URL}/v1", **self._usual(named))

    def get_async_client(self, **named: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{URL}/v1", **self._usual(named))

    def get_client_anthropic(self, **named: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=URL, **self._usual(named))

    def get_async_client_anthropic(self, **named: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=URL, **self._usual(named))

    def _usual(self, named: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": KEY, "max_retries": 0, "timeout": 60} | named


def tokenizer(*arguments: Any, **named: Any) -> Any:
    """The served model's, whatever model is named."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(os.environ["SERVER_MODEL"])


def weights(*arguments: Any, **named: Any) -> Any:
    """What a test does with files of a model that is not here."""
    pytest.fail("weights: files of a model from the hub", pytrace=False)


def undecorated(*arguments: Any, **named: Any) -> Callable[[Any], Any]:
    """A decorator, with or without arguments, that leaves a test as it is."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda test: test


class Hub:
    """Nothing is fetched: the served model is there."""

    def snapshot_download(self, *arguments: Any, **named: Any) -> None:
        pass


PRESENT = {"get_tokenizer": tokenizer, "cached_tokenizer_from_config": tokenizer, "hf_api": Hub}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything is imported for a test."""
    sys.meta_path.insert(0, Absences())
    utils = ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.multi_gpu_only = utils.requires_fp8 = undecorated  # type: ignore[attr-defined]
    utils.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
    utils.VLLM_PATH = early_config.rootpath  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils
    transformers.AutoTokenizer.from_pretrained = tokenizer
    transformers.AutoConfig.from_pretrained = weights

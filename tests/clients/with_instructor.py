"""Instructor, which makes objects of answers in several ways: all that OpenAI's API has."""

from __future__ import annotations

import os
from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict

URL, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]


class Mood(BaseModel):
    """What is asked for: nothing else, or a small model writes keys for ever."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_object_in_every_mode(mode: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
    )
    most = {"max_output_tokens": 200} if mode.startswith("RESPONSES") else {"max_tokens": 200}
    found = client.chat.completions.create(
        model="any", response_model=Mood, messages=[{"role": "user", "content": "Hello"}], max_retries=0, **most
    )
    assert found.mood in ("good", "bad")

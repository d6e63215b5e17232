"""Every route with answers takes `speculate`."""

from __future__ import annotations

from router.apis.anthropic import routes as anthropic
from router.apis.openai.responses import routes as responses


def test_messages_and_responses_may_want_fewer_guesses() -> None:
    asked = {"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    for given in ({}, {"speculate": 0}, {"speculate": 3}):
        wanted = given.get("speculate")
        assert wanted == anthropic.parameters_of(anthropic.MessagesRequest(**asked, **given)).speculate
        body = responses.ResponsesRequest(model="any", input="x", **given)
        assert wanted == responses.parameters_of(body).speculate

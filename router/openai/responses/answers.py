"""The shapes of OpenAI's responses: whole answers, and the items that they consist of.

Pure functions. What a body said is told again, as far as it is short: in a stream it comes three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orjson import JSONEncodeError, dumps

from router.chat.parts import CountingReader, Part, parts_of
from router.entry import Entry
from router.errors import RouterError
from router.openai import answers
from router.openai.logprobs import shown_tokens
from router.openai.responses.schemas import ResponsesRequest
from router.openai.scored import Scoring
from router.samples import Answer
from router.text import FinishReason

NOT_STORED = "responses are not stored here: keep what `/v1/responses` answers, and send its items with the next input"
TOOL = {"description": None, "parameters": None, "strict": None}  # which every function has in an answer
MOST_ECHOED = 16_384  # bytes of a field of the body that are told again
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}  # of ids, by the kind of part that an item is
# What parameters are called in OpenAI's other APIs, and here.
NAMES = {
    "`max_tokens`": "`max_output_tokens`",
    "`response_format`": "`text.format`",
    "`grammar.value`": "`text.format`",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What an answer says of itself, whatever comes of it. number: what all its ids have in common."""

    number: str
    model: str
    echoed: Json
    created: int = field(default_factory=answers.now)

    def response(self, status: str, output: Sequence[Json], usage: Json | None, **changes: Any) -> Json:
        """A whole response; changes: fields that are mostly null."""
        return {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "completed_at": answers.now() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": usage,
            **self.echoed,
            **changes,
        }

    def item_id(self, kind: str, index: int) -> str:
        """Of an item of the output."""
        return f"{PREFIXES[kind]}_{self.number}_{index}"


def echo_of(body: ResponsesRequest) -> Json:
    """What an answer repeats of its request."""
    reasoning = body.reasoning
    return {
        "frequency_penalty": body.frequency_penalty or 0.0,
        "instructions": _if_short(body.instructions, None),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "prompt_cache_key": _if_short(body.prompt_cache_key, None),
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": _if_short(body.safety_identifier, None),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _if_short(body.text and body.text.format, None) or {"type": "text"}},
        "tool_choice": _if_short(body.tool_choice, None) or "auto",
        "tools": [{**TOOL, **tool} for tool in _if_short(body.tools, None) or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }


def _if_short(value: Any, otherwise: Any) -> Any:
    try:
        return value if len(dumps(value)) <= MOST_ECHOED else otherwise
    except JSONEncodeError:  # it has a number of more than 64 bits
        return otherwise


def usage(entry: Entry, num_generated: int, num_reasoning: int) -> Json:
    """Counts of tokens."""
    prompt = entry.request.input_length
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": entry.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": prompt + num_generated,
    }


def ending(reason: FinishReason) -> tuple[str, Json]:
    """The status of a response that has ended, and what is wrong with it."""
    if reason is FinishReason.LENGTH:
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {}


def response(head: Head, answer: Answer, entry: Entry, reader: CountingReader, scoring: Scoring | None) -> Json:
    """The whole answer of `/v1/responses`. scoring: of one that is text alone."""
    pieces = [piece for token in answer.tokens for piece in reader.feed(token.text)]
    parts = parts_of([*pieces, *reader.end()])
    status, details = ending(answer.finished.reason)
    items = [item_of(part, head.item_id(part.kind, index), "completed") for index, part in enumerate(parts)]
    if scoring is not None:
        items[0]["content"][0]["logprobs"] = scoring.entries(shown_tokens(answer, scoring.tokenizer))
    items[-1]["status"] = "incomplete" if reader.is_in_call else status
    told = usage(entry, answer.finished.generated_tokens, reader.num_reasoning)
    return head.response(status, items, told, **details)


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_part(text: str) -> Json:
    """The one part of reasoning."""
    return {"type": "reasoning_text", "text": text}


def item_of(part: Part, id: str, status: str, logprobs: Sequence[Json] = ()) -> Json:
    """An item of the output. While it is in progress, it has no text yet."""
    is_empty = status == "in_progress"
    match part.kind:
        case "text":
            content = [] if is_empty else [text_part(part.text, logprobs)]
            return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}
        case "reasoning":
            content = [] if is_empty else [reasoning_part(part.text)]
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}
        case "call":
            told = {"call_id": part.id, "name": part.name, "arguments": part.text}
            return {"id": id, "type": "function_call", "status": status, **told}


def error_body(error: RouterError) -> Json:
    """OpenAI's shape, with the names that parameters have in this API."""
    body = answers.error_body(error)
    for elsewhere, here in NAMES.items():
        body["error"]["message"] = body["error"]["message"].replace(elsewhere, here)
    return body

"""Between texts and token ids: `/tokenize`, `/chat_tokenize` and `/detokenize`. Nothing is generated.

One key of a body tells whose it is: vLLM and SGLang send `prompt`, or a chat's `messages`; llama.cpp sends `content`,
TGI `inputs`. Ids are called `tokens` everywhere but in TGI, and the answer has the text by all three names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from orjson import dumps
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from router.apis.document import add_post
from router.apis.openai.requests import ChatRequest, ModelName
from router.apis.openai.routes import rendering_of
from router.apis.serving import Services, caller_of, json_response, parsed, read, read_bytes, values_of_conversations
from router.apis.tgi.bodies import (
    ChatTokenizedBody,
    DetokenizedBody,
    DetokenizeRequest,
    GenerateRequest,
    TokenizedBody,
    chat_tokenized_body,
    prompt_request_of,
    tokenized_body,
)
from router.http.guard import ClientConnection
from router.http.responses import PlainAnswer
from router.requests import schemas
from router.requests.schemas import GenerateParameters, Lenient, PromptRequest, Strict

Tokens = Sequence[tuple[int, tuple[int, int]]]


class Keys(Strict):
    """Which of the keys a body has."""

    inputs: Any = None
    prompt: Any = None
    messages: Any = None
    content: Any = None


class Ids(Strict):
    """Whether a body has ids by their other name."""

    tokens: Any = None


class PromptToTokenize(Lenient):
    """vLLM's and SGLang's body."""

    prompt: str
    model: ModelName | None = None
    add_special_tokens: bool | None = Field(default=None, description="Absent: true.")
    return_token_strs: bool | None = Field(default=None, description="Return the text of each token too.")


class ContentToTokenize(Lenient):
    """llama.cpp's body."""

    content: str
    add_special: bool | None = Field(default=None, description="Absent: false.")
    with_pieces: bool | None = Field(default=None, description="Return the text of each token too.")


class TokensToText(Lenient):
    """The body of `/detokenize` by another name of the ids."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)]
    model: str | None = Field(default=None, description="Any name.")
    skip_special_tokens: bool | None = Field(default=None, description="Leave special tokens out. Absent: true.")


class CountedTokens(TypedDict):
    """What vLLM and SGLang answer."""

    count: int
    max_model_len: Annotated[int, Field(description="Tokens of a whole sequence.")]
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(TypedDict):
    """A token and its text."""

    id: int
    piece: str


class TokenPieces(TypedDict):
    """What llama.cpp answers."""

    tokens: list[int] | list[TokenPiece]


class NamedText(TypedDict):
    """The text of tokens as SGLang, vLLM and llama.cpp call it."""

    text: str
    prompt: str
    content: str


def counted_tokens(text: str, tokens: Tokens, *, most: int, has_texts: bool) -> bytes:
    """The answer of `/tokenize` to vLLM's and SGLang's clients. most: tokens of a whole sequence."""
    texts = [text[start:stop] for _, (start, stop) in tokens] if has_texts else None
    ids = [id for id, _ in tokens]
    told: CountedTokens = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts}
    return dumps(told)


def pieces(text: str, tokens: Tokens, *, has_texts: bool) -> bytes:
    """The answer of `/tokenize` to llama.cpp's clients."""
    named: list[TokenPiece] = [{"id": id, "piece": text[start:stop]} for id, (start, stop) in tokens]
    told: TokenPieces = {"tokens": named if has_texts else [id for id, _ in tokens]}
    return dumps(told)


def named_text(text: str) -> NamedText:
    """The answer of `/detokenize` to other clients than TGI's."""
    return {"text": text, "prompt": text, "content": text}


def add_token_routes(app: FastAPI, services: Services) -> None:
    """Serve what asks for the tokens of a text, or for the text of tokens."""

    counted = partial(counted_tokens, most=services.limits.max_total_tokens)

    async def tokenize(request: Request) -> Response:
        raw = await read_bytes(request, services)
        keys = schemas.parse(Keys, raw)
        if keys.inputs is None and keys.messages is not None:
            chat = parsed(request, ChatRequest, raw)
            has_texts = (chat.model_extra or {}).get("return_token_strs") is True
            return await answered(request, prompt_request_of_chat(chat), partial(counted, has_texts=has_texts))
        if keys.inputs is None and keys.prompt is not None:
            its = parsed(request, PromptToTokenize, raw)
            asked = PromptRequest(its.prompt, GenerateParameters(), its.add_special_tokens is False, model=its.model)
            return await answered(request, asked, partial(counted, has_texts=its.return_token_strs is True))
        if keys.inputs is None and keys.content is not None:
            one = parsed(request, ContentToTokenize, raw)
            asked = PromptRequest(one.content, GenerateParameters(), has_special_tokens=one.add_special is not True)
            return await answered(request, asked, partial(pieces, has_texts=one.with_pieces is True))
        return await answered(request, prompt_request_of(parsed(request, GenerateRequest, raw)), tokenized_body)

    async def chat_tokenize(request: Request) -> Response:
        return await answered(
            request,
            prompt_request_of_chat(await read(request, services, ChatRequest, values_of_conversations(services))),
            chat_tokenized_body,
        )

    def prompt_request_of_chat(body: ChatRequest) -> PromptRequest:
        body.refuse_what_is_not_served()
        render = rendering_of(body, services)
        return PromptRequest(render, GenerateParameters(), has_special_tokens=True, model=body.model)

    async def answered(request: Request, asked: PromptRequest, shape: Callable[[str, Tokens], bytes]) -> Response:
        with ClientConnection.of(request.scope).needed():
            return PlainAnswer(await services.generator.tokenise(asked, shape, caller_of(request, services)))

    async def detokenize(request: Request) -> Response:
        raw, most = await read_bytes(request, services), schemas.MOST_VALUES + services.limits.max_total_tokens
        is_tgi_s = schemas.parse(Ids, raw, most).tokens is None
        if is_tgi_s:
            native = parsed(request, DetokenizeRequest, raw, most)
            ids, skips = native.ids, native.skip_special_tokens
        else:
            body = parsed(request, TokensToText, raw, most)
            ids, skips = body.tokens, body.skip_special_tokens
        with ClientConnection.of(request.scope).needed():
            text = await services.generator.detokenise(ids, skips is not False, caller_of(request, services))
        told: DetokenizedBody = {"text": text}
        return json_response(told if is_tgi_s else named_text(text))

    bodies = (GenerateRequest, PromptToTokenize, ContentToTokenize, ChatRequest)
    answer = list[TokenizedBody] | CountedTokens | TokenPieces
    add_post(app, "/tokenize", tokenize, "The tokens of a prompt", bodies, answer)
    add_post(app, "/chat_tokenize", chat_tokenize, "A chat's prompt and its tokens", ChatRequest, ChatTokenizedBody)
    of_text = DetokenizedBody | NamedText
    add_post(app, "/detokenize", detokenize, "The text of token ids", (DetokenizeRequest, TokensToText), of_text)

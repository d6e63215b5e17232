"""Between texts and token ids: `/tokenize`, `/chat_tokenize` and `/detokenize`. Nothing is generated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from router import schemas, tgi
from router.api_document import documented
from router.asked import Asked
from router.guard import ClientConnection
from router.openai.routes import rendering_of
from router.openai.schemas import ChatRequest
from router.plain_answer import PlainAnswer
from router.schemas import DetokenizeRequest, GenerateParameters, GenerateRequest
from router.serving import Services, asked_by, json_response, parsed, read, read_bytes
from router.token_schemas import (
    ContentToTokenize,
    Ids,
    Keys,
    PromptToTokenize,
    Tokens,
    TokensToText,
    counted_tokens,
    named_text,
    pieces,
)


def add_token_routes(app: FastAPI, services: Services) -> None:
    """Serve what asks for the tokens of a text, or for the text of tokens."""

    counted = partial(counted_tokens, most=services.limits.max_total_tokens)

    async def tokenize(request: Request) -> Response:
        raw = await read_bytes(request, services)
        keys = schemas.parse(Keys, raw)
        if keys.inputs is None and keys.messages is not None:
            chat = parsed(request, ChatRequest, raw)
            has_texts = (chat.model_extra or {}).get("return_token_strs") is True
            return await answered(request, asked_of_chat(chat), partial(counted, has_texts=has_texts))
        if keys.inputs is None and keys.prompt is not None:
            its = parsed(request, PromptToTokenize, raw)
            asked = Asked(its.prompt, GenerateParameters(), has_special_tokens=its.add_special_tokens is False)
            return await answered(request, asked, partial(counted, has_texts=its.return_token_strs is True))
        if keys.inputs is None and keys.content is not None:
            one = parsed(request, ContentToTokenize, raw)
            asked = Asked(one.content, GenerateParameters(), has_special_tokens=one.add_special is not True)
            return await answered(request, asked, partial(pieces, has_texts=one.with_pieces is True))
        return await answered(request, tgi.asked(parsed(request, GenerateRequest, raw)), tgi.tokenized_body)

    async def chat_tokenize(request: Request) -> Response:
        return await answered(
            request, asked_of_chat(await read(request, services, ChatRequest)), tgi.chat_tokenized_body
        )

    def asked_of_chat(body: ChatRequest) -> Asked:
        body.refuse_what_is_not_served()
        return Asked(rendering_of(body, services), GenerateParameters(), has_special_tokens=True)

    async def answered(request: Request, asked: Asked, shape: Callable[[str, Tokens], bytes]) -> Response:
        with ClientConnection.of(request.scope).needed():
            return PlainAnswer(await services.generator.tokenise(asked, shape, **asked_by(request, services)))

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
            text = await services.generator.detokenise(ids, skips is not False, **asked_by(request, services))
        told: tgi.DetokenizedBody = {"text": text}
        return json_response(told if is_tgi_s else named_text(text))

    tokens = documented(GenerateRequest, list[tgi.TokenizedBody])
    app.post("/tokenize", summary="The tokens of a prompt", response_class=Response, **tokens)(tokenize)
    chat = documented(ChatRequest, tgi.ChatTokenizedBody)
    app.post("/chat_tokenize", summary="A chat's prompt and its tokens", response_class=Response, **chat)(chat_tokenize)
    text = documented(DetokenizeRequest, tgi.DetokenizedBody)
    app.post("/detokenize", summary="The text of token ids", response_class=Response, **text)(detokenize)

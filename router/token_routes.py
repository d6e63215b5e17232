"""Between texts and token ids: `/tokenize`, `/chat_tokenize` and `/detokenize`. Nothing is generated."""

from __future__ import annotations

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
from router.serving import Services, asked_by, json_response, read


def add_token_routes(app: FastAPI, services: Services) -> None:
    """Serve what asks for the tokens of a text, or for the text of tokens."""

    async def tokenize(request: Request) -> Response:
        body = await read(request, services, GenerateRequest)
        with ClientConnection.of(request.scope).needed():
            return PlainAnswer(
                await services.generator.tokenise(tgi.asked(body), tgi.tokenized_body, **asked_by(request, services))
            )

    async def chat_tokenize(request: Request) -> Response:
        body = await read(request, services, ChatRequest)
        asked = Asked(rendering_of(body, services), GenerateParameters(), has_special_tokens=True)
        with ClientConnection.of(request.scope).needed():
            return PlainAnswer(
                await services.generator.tokenise(asked, tgi.chat_tokenized_body, **asked_by(request, services))
            )

    async def detokenize(request: Request) -> Response:
        body = await read(request, services, DetokenizeRequest, schemas.MOST_VALUES + services.limits.max_total_tokens)
        skip = body.skip_special_tokens is not False
        with ClientConnection.of(request.scope).needed():
            text = await services.generator.detokenise(body.ids, skip, **asked_by(request, services))
        return json_response({"text": text})

    tokens = documented(GenerateRequest, list[schemas.TokenizedBody])
    app.post("/tokenize", summary="The tokens of a prompt", response_class=Response, **tokens)(tokenize)
    chat = documented(ChatRequest, schemas.ChatTokenizedBody)
    app.post("/chat_tokenize", summary="A chat's prompt and its tokens", response_class=Response, **chat)(chat_tokenize)
    text = documented(DetokenizeRequest, schemas.DetokenizedBody)
    app.post("/detokenize", summary="The text of token ids", response_class=Response, **text)(detokenize)

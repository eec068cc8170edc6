"""Chat completions and models as OpenAI's client libraries ask for them: a message is translated, nothing more."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ziggurat.serve.interfaces.description import (
    OPENAI,
    Described,
    Field,
    Operation,
    Schema,
    flag,
    listed,
    record,
    text,
    whole,
)
from ziggurat.serve.pool import Model
from ziggurat.serve.requests import Refused, unless_gone
from ziggurat.serve.translations import Translations

_PARTS = listed({"type": "object"}, "parts, of which those with `text` count")
_MESSAGE = record({"role": text("`user` counts"), "content": {"anyOf": [text(), _PARTS]}})
_NULL: Schema = {"type": "null"}

COMPLETE = Operation(
    OPENAI,
    "Translate the last message of the user; others, and all settings of sampling, do not matter",
    (
        Field("model", text("the name of a model, or `source-target`"), required=True),
        Field("messages", listed(_MESSAGE), required=True),
        Field("stream", flag("whether to answer as events")),
    ),
    record(
        {
            "id": text(),
            "object": text("", "chat.completion"),
            "created": whole("seconds since 1970"),
            "model": text(),
            "choices": listed(
                record(
                    {
                        "index": whole(),
                        "message": record({"role": text("", "assistant"), "content": text("the translation")}),
                        "finish_reason": text("", "stop"),
                        "logprobs": _NULL,
                    }
                )
            ),
        }
    ),
    kinds={"text/event-stream": "with `stream`: chunks, of which one is the translation"},
)
_MODEL = record({"id": text(), "object": text("", "model"), "created": whole(), "owned_by": text()})
MODELS = Operation(OPENAI, "List the models", (), record({"object": text("", "list"), "data": listed(_MODEL)}))
MODEL = Operation(OPENAI, "Tell of one model", (), _MODEL)


class OpenAI:
    """OpenAI's paths over the translations of this server. The name of a model is that of a served one, or `de-en`.

    Args:
        translations: what the server can do.
    """

    def __init__(self, translations: Translations) -> None:
        self._server = translations
        self._began = int(time.time())

    def routes(self) -> list[Described]:
        """Return the paths."""
        return [
            Described("/v1/chat/completions", self.complete, COMPLETE, ["POST"]),
            Described("/v1/models", self.models, MODELS),
            Described("/v1/models/{name:path}", self.model, MODEL),
        ]

    async def complete(self, request: Request) -> Response:
        """Translate the last message of the user; others, and all settings of sampling, do not matter."""
        fields = await COMPLETE.fields(request)
        said, name = _message(fields.get("messages")), fields.get("model")
        if (excess := self._server.excess([said])) is not None:
            raise Refused(400, f"the message is longer than {excess.most} {excess.kind}")
        source, target, model = self._named(name)
        client = self._server.bearer(request, len(said))
        work = self._server.translate([said], [source], target, client, model=model)
        translation = (await unless_gone(request, work))[0].best.text
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if fields.get("stream") is True:
            return StreamingResponse(_events(head, translation), media_type="text/event-stream")
        message = {"role": "assistant", "content": translation}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        # No `usage`, which may be missing: the tokens of a translation model are not those that a client has in mind.
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice]})

    async def models(self, request: Request) -> Response:
        """List the models."""
        self._server.bearer(request, 0)
        return JSONResponse({"object": "list", "data": list(map(self._told, self._server.pool.models))})

    async def model(self, request: Request) -> Response:
        """Tell of one model."""
        self._server.bearer(request, 0)
        name = request.path_params["name"]
        self._named(name)
        return JSONResponse(self._told(name))

    def _told(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began, "owned_by": "ziggurat"}

    def _named(self, name: Any) -> tuple[str, str, Model | None]:
        """Return the languages that a model's name stands for, and the model if it is that of one.

        Raises Refused (404) for an unknown name.
        """
        pool = self._server.pool
        if isinstance(name, str):
            if (model := pool.models.get(name)) is not None:
                return model.source, model.target, model
            for source, targets in pool.languages.items():
                if name.startswith(f"{source}-") and name.removeprefix(f"{source}-") in targets:
                    return source, name.removeprefix(f"{source}-"), None
        raise Refused(404, f"there is no such model; there are: {', '.join(pool.models)}")


def _message(messages: Any) -> str:
    """Return the text of the user's last message. Raises Refused where there is none."""
    if isinstance(messages, list):
        for message in reversed(messages):
            if not isinstance(message, dict) or message.get("role") != "user":
                continue
            content = message.get("content")
            if isinstance(content, list):  # in parts, of which some may be images
                parts = [part.get("text") for part in content if isinstance(part, dict)]
                content = "".join(part for part in parts if isinstance(part, str))
            if isinstance(content, str) and content:
                return content
    raise Refused(400, "`messages` has no text of the role `user`")


async def _events(head: dict[str, Any], text: str) -> AsyncIterator[str]:
    """Yield the events of a stream; the translation is one of them, since a search has none before it ends."""
    for delta, reason in (({"role": "assistant", "content": text}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        yield f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"

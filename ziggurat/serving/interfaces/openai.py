"""Chat completions and models as OpenAI's client libraries ask for them: a message is translated, nothing more."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ziggurat.serving.requests import Refused, fields_of, unless_gone
from ziggurat.serving.translations import Translations

__all__ = ["OpenAI"]


class OpenAI:
    """OpenAI's paths over the translations of this server. The name of a model is that of a served one, or `de-en`.

    Args:
        translations: what the server can do.
    """

    def __init__(self, translations: Translations) -> None:
        self._server = translations
        self._began = int(time.time())

    def routes(self) -> list[Route]:
        """Return the paths."""
        return [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
        ]

    async def complete(self, request: Request) -> Response:
        """Translate the last message of the user; others, and all settings of sampling, do not matter."""
        fields = await fields_of(request)
        text, name = _message(fields.get("messages")), fields.get("model")
        if len(text) > self._server.limits.characters:
            raise Refused(400, f"the message is longer than {self._server.limits.characters} characters")
        pair = self._pair(name)
        client = self._server.bearer(request, len(text))
        work = self._server.translate([text], [pair[0]], pair[1], client)
        translation = (await unless_gone(request, work))[0].best.text
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if fields.get("stream") is True:
            return StreamingResponse(_events(head, translation), media_type="text/event-stream")
        message = {"role": "assistant", "content": translation}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        used = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": used})

    async def models(self, request: Request) -> Response:
        """List the models."""
        self._server.bearer(request, 0)
        listed = [
            {"id": name, "object": "model", "created": self._began, "owned_by": "ziggurat"}
            for name in self._server.pool.models
        ]
        return JSONResponse({"object": "list", "data": listed})

    def _pair(self, name: Any) -> tuple[str, str]:
        """Return the languages that a model's name stands for. Raises Refused (404) for an unknown one."""
        pool = self._server.pool
        if isinstance(name, str):
            if (model := pool.models.get(name)) is not None:
                return model.source, model.target
            for source, targets in pool.languages.items():
                if name.startswith(f"{source}-") and name.removeprefix(f"{source}-") in targets:
                    return source, name.removeprefix(f"{source}-")
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

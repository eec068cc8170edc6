"""Chat completions and models as OpenAI's client libraries request them; a message is translated, nothing more."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic import Field as PydanticField
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ziggurat.serve.pool import Model
from ziggurat.serve.requests import (
    OPENAI,
    Described,
    Field,
    Operation,
    Refused,
    Schema,
    flag,
    listed,
    record,
    text,
    unless_gone,
    whole,
)
from ziggurat.serve.translations import Translations, noticed
from ziggurat.system.errors import printable
from ziggurat.translate.options import TranslateOptions

_PARTS = listed({"type": "object"}, "parts of the type `text`, joined into one text")
_MESSAGE = record({"role": text("`user` counts"), "content": {"anyOf": [text(), _PARTS]}})
_NULL: Schema = {"type": "null"}
_USAGE = record(
    dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), whole("words and punctuation marks"))
)
_TOKEN = re.compile(r"\w+|[^\w\s]")
_LONGEST_END = 8
_END = re.compile(r"""[.!?…。！？।؟]["'”’»)\]]*\Z""")  # of a sentence


class WithoutEffect(BaseModel, strict=True):
    """Fields for sampling, cost and bookkeeping, which clients send to any server, with the values allowed here."""

    temperature: float | None = PydanticField(None, ge=0, le=2)
    top_p: float | None = PydanticField(None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = PydanticField(None, ge=-2, le=2)
    frequency_penalty: float | None = PydanticField(None, ge=-2, le=2)
    max_tokens: int | None = PydanticField(None, ge=1)
    max_completion_tokens: int | None = PydanticField(None, ge=1)
    reasoning_effort: str | None = None
    verbosity: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None


_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tools", "functions", "stop", "logit_bias", "logprobs", "top_logprobs"), lambda given: not given),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), lambda given: given is None),
    **dict.fromkeys(("tool_choice", "function_call"), lambda given: given in (None, "none", "auto")),
    "modalities": lambda given: given in (None, ["text"]),
    "response_format": lambda given: given in (None, {"type": "text"}),
}
# Fields that would change the response, each with the values that request nothing.

COMPLETE = Operation(
    OPENAI,
    (
        Field("model", text("the name of a model, or `source-target`"), required=True),
        Field("messages", listed(_MESSAGE), required=True),
        Field("stream", flag("whether to respond with events")),
        Field(
            "stream_options", {"type": "object", "description": "with `stream`; `include_usage` ends it with `usage`"}
        ),
        Field("n", whole("choices", minimum=1)),
        *(
            Field(name, {"anyOf": schema["anyOf"], "description": "without effect"})
            for name, schema in WithoutEffect.model_json_schema()["properties"].items()
        ),
        *(Field(name, {"description": "refused unless it requests nothing"}) for name in _REFUSED),
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
            "usage": _USAGE,
        }
    ),
    kinds={"text/event-stream": "with `stream`: chunks, one of which is the translation"},
    strict=True,
    noticed=True,
)
_MODEL = record({"id": text(), "object": text("", "model"), "created": whole(), "owned_by": text()})
MODELS = Operation(OPENAI, (), record({"object": text("", "list"), "data": listed(_MODEL)}))
MODEL = Operation(OPENAI, (), _MODEL)


class OpenAI:
    """OpenAI's paths, answered with this server's translations. A model's name is that of a served model, or `de-en`.

    Args:
        translations: the server's models.
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
        """Translate the last message of the user; other messages and sampling settings are ignored."""
        fields = await COMPLETE.fields(request)
        said, name = _message(fields.get("messages")), fields.get("model")
        count, streamed, told = self._asked(fields)
        self._server.characters([said], 400, "the message is longer than {most} {kind}")
        source, target, model = self._named(name)
        client = self._server.client(request, OPENAI, None, len(said))
        options = TranslateOptions(n_best=count)
        work = self._server.translate([said], [source], target, client, options, model=model)
        (found,) = await unless_gone(request, work)
        different = [found.best.text, *(other.text for other in found.others)]
        # As with a model that samples, choices may be equal: if there are fewer translations, they are repeated.
        texts = [different[number % len(different)] for number in range(count)]
        tokens = [len(_TOKEN.findall(said)), sum(len(_TOKEN.findall(text)) for text in texts)]
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        headers = noticed([found])
        if streamed:
            events = _events(head, texts, usage if told else None)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "logprobs": None,
            }
            for number, text in enumerate(texts)
        ]
        answer = {**head, "object": "chat.completion", "choices": choices, "usage": usage}
        return JSONResponse(answer, headers=headers)

    def _asked(self, fields: Mapping[str, Any]) -> tuple[int, bool, bool]:
        """Return how many choices are requested, whether to stream them as events, and whether to end those with usage.

        Raises Refused (400) for fields that would change the response in unsupported ways.
        """
        for name, idle in _REFUSED.items():
            if not idle(fields.get(name)):
                raise Refused(400, f"`{name}` is not supported: messages are translated, nothing more")
        try:
            WithoutEffect.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise Refused(400, f"`{first['loc'][0]}`: {first['msg'].lower()}") from None
        count, most = fields.get("n"), self._server.limits.alternatives + 1
        count = 1 if count is None else count
        if type(count) is not int or not 1 <= count <= most:
            raise Refused(400, f"`n` must be a whole number from 1 to {most}")
        stream, ends = fields.get("stream"), fields.get("stream_options")
        if stream is not None and type(stream) is not bool:
            raise Refused(400, "`stream` must be true or false")
        if ends is None:
            return count, stream is True, False
        if not stream:
            raise Refused(400, "`stream_options` goes with `stream: true` alone")
        if not isinstance(ends, dict) or (unknown := ends.keys() - {"include_usage", "include_obfuscation"}):
            what = f"`stream_options.{printable(min(unknown), 60)}`" if isinstance(ends, dict) else "`stream_options`"
            raise Refused(400, f"{what} is not supported; there is `include_usage`")
        return count, True, ends.get("include_usage") is True

    async def models(self, request: Request) -> Response:
        """List the models."""
        self._server.client(request, OPENAI, None)
        return JSONResponse({"object": "list", "data": list(map(self._told, self._server.pool.models))})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        self._server.client(request, OPENAI, None)
        name = request.path_params["name"]
        self._named(name)
        return JSONResponse(self._told(name))

    def _told(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began, "owned_by": "ziggurat"}

    def _named(self, name: Any) -> tuple[str, str, Model | None]:
        """Return the languages that a model's name stands for, and the model if the name is that of a single one.

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
    """Return the text of the user's last message. Raises Refused if there is none."""
    if isinstance(messages, list):
        for message in reversed(messages):
            if not isinstance(message, dict) or message.get("role") != "user":
                continue
            content = message.get("content")
            if isinstance(content, list):
                content = _joined(map(_part, content))
            if isinstance(content, str) and content:
                return content
    raise Refused(400, "`messages` has no text of the role `user`")


def _joined(parts: Iterable[str]) -> str:
    """Return the text of a message's parts. A part that ends a sentence ends a line; others continue in the next."""
    text = ""
    for part in parts:
        first = part[:1]
        goes_on = not first or first.isspace() or first.islower() or first.isdigit()
        text += part if goes_on or not _END.search(text[-_LONGEST_END:]) else f"\n{part}"
    return text


def _part(part: Any) -> str:
    """Return the text of a part of a message. Raises Refused for an image, a file or another type."""
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        kind = printable(str(part.get("type")), 60) if isinstance(part, dict) else "none"
        raise Refused(400, f"parts of `messages` of the type `{kind}` are not supported; use `text`")
    if not isinstance(part.get("text"), str):
        raise Refused(400, "parts of `messages` of the type `text` need a text as `text`")
    return str(part["text"])


async def _events(head: dict[str, Any], texts: Sequence[str], usage: dict[str, int] | None) -> AsyncIterator[str]:
    """Yield the events of a stream; each translation is a single event, as a search yields nothing until it ends."""
    more = {} if usage is None else {"usage": None}

    def event(choices: list[dict[str, Any]], **last: Any) -> str:
        chunk = {**head, "object": "chat.completion.chunk", "choices": choices, **more, **last}
        return f"data: {json.dumps(chunk)}\n\n"

    for number, content in enumerate(texts):
        yield event([{"index": number, "delta": {"role": "assistant", "content": content}, "finish_reason": None}])
        yield event([{"index": number, "delta": {}, "finish_reason": "stop"}])
    if usage is not None:
        yield event([], usage=usage)
    yield "data: [DONE]\n\n"

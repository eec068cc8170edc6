"""The interface of LibreTranslate 1.9.6, so that programs written for it work with this server.

Its responses were observed from outside; docs/serve.md lists what is compared.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ziggurat.serve.requests import (
    LIBRETRANSLATE,
    Described,
    Field,
    Operation,
    Refused,
    Schema,
    flag,
    listed,
    number,
    record,
    text,
    texts_of,
    unless_gone,
    whole,
)
from ziggurat.serve.text.documents.kinds import KINDS
from ziggurat.serve.text.elements import HTML
from ziggurat.serve.translations import Translations, noticed
from ziggurat.translate.options import TranslateOptions

FORMATS = ("text", "html")

SOURCE = Field("source", text("the language code of the text, or `auto`"), required=True)
TARGET = Field("target", text("the code of the language to translate into"), required=True)
KEY = Field("api_key", text("an API key, if the server requires one"))
_DETECTED = record({"confidence": number("from 0 to 100"), "language": text("its code")})
_NAMED = record({"code": text(), "name": text()})


def _one_or_many(each: Schema, about: str = "") -> Schema:
    """Return the schema of a response for one text, or for a list of texts."""
    return {"oneOf": [each, listed(each)], **({"description": about} if about else {})}


TRANSLATE = Operation(
    LIBRETRANSLATE,
    (
        Field("q", _one_or_many(text(), "one text or several"), required=True),
        SOURCE,
        TARGET,
        Field("format", text("`html` preserves tags", *FORMATS)),
        Field("alternatives", whole("number of alternative translations of each text", minimum=0)),
        KEY,
    ),
    record(
        {
            "translatedText": _one_or_many(text()),
            "alternatives": {"oneOf": [listed(text()), listed(listed(text()))]},
            "detectedLanguage": _one_or_many(_DETECTED, "with `auto`"),
        },
        optional=("alternatives", "detectedLanguage"),
    ),
    noticed=True,
)
DETECT = Operation(
    LIBRETRANSLATE,
    (Field("q", _one_or_many(text()), required=True), KEY),
    listed(_DETECTED),
)
LANGUAGES = Operation(
    LIBRETRANSLATE,
    (),
    listed(record({"code": text(), "name": text(), "targets": listed(text())})),
)
SETTINGS = Operation(
    LIBRETRANSLATE,
    (),
    record(
        {
            "apiKeys": flag(),
            "charLimit": whole("maximum number of characters in a request"),
            "filesTranslation": flag("whether documents are translated"),
            "frontendTimeout": whole("milliseconds"),
            "keyRequired": flag(),
            "language": record({"source": _NAMED, "target": _NAMED}),
            "suggestions": flag(),
            "supportedFilesFormat": listed(text("a file name extension, such as `.docx`")),
        }
    ),
)
SUGGEST = Operation(LIBRETRANSLATE)


class LibreTranslate:
    """LibreTranslate's paths, answered with this server's translations.

    Args:
        translations: the server's models.
        files: whether documents are translated.
    """

    def __init__(self, translations: Translations, *, files: bool) -> None:
        self._server, self._files = translations, files

    def routes(self) -> list[Described]:
        """Return its paths."""
        return [
            Described("/translate", self.translate, TRANSLATE, ["POST"]),
            Described("/detect", self.detect, DETECT, ["POST"]),
            Described("/languages", self.languages, LANGUAGES, ["GET", "POST"]),  # Argos' own client posts
            Described("/frontend/settings", self.settings, SETTINGS),
            Described("/suggest", self.suggest, SUGGEST, ["POST"]),
        ]

    async def translate(self, request: Request) -> Response:
        """Translate one text or a list of texts."""
        fields = await TRANSLATE.fields(request)
        for name in ("q", "source", "target"):
            if not fields.get(name):
                raise Refused(400, f"Invalid request: missing {name} parameter")
        texts, characters = self._texts(fields["q"])
        kind = str(fields.get("format") or "text")
        if kind not in FORMATS:
            raise Refused(400, f"{kind} format is not supported")
        alternatives = self._alternatives(fields.get("alternatives"))
        client = self._server.client(request, LIBRETRANSLATE, fields.get("api_key"), characters)
        sources, target, detected = await self._server.languages(texts, str(fields["source"]), str(fields["target"]))
        options, markup = TranslateOptions(n_best=alternatives + 1), HTML if kind == "html" else None
        found = await unless_gone(request, self._server.translate(texts, sources, target, client, options, markup))
        many = isinstance(fields["q"], list)
        best = [each.best.text for each in found]
        answer: dict[str, Any] = {"translatedText": best if many else best[0]}
        if alternatives:
            others = [[other.text for other in each.others] for each in found]
            answer["alternatives"] = others if many else others[0]
        if detected is not None:
            answer["detectedLanguage"] = detected if many else detected[0]
        return JSONResponse(answer, headers=noticed(found))

    async def detect(self, request: Request) -> Response:
        """Detect the language of a text."""
        fields = await DETECT.fields(request)
        if not fields.get("q"):
            raise Refused(400, "Invalid request: missing q parameter")
        texts, _ = self._texts(fields["q"])
        self._server.client(request, LIBRETRANSLATE, fields.get("api_key"))
        found = await self._server.detect("\n".join(texts))
        return JSONResponse([{"confidence": confidence, "language": code} for code, confidence in found])

    async def languages(self, request: Request) -> Response:
        """List the languages, each with those that it can be translated into, including itself."""
        pool = self._server.pool
        codes = sorted({code for pair in pool.pairs for code in pair})  # including those that are only translated into
        return JSONResponse(
            [
                {
                    "code": code,
                    "name": pool.language_name(code),
                    "targets": sorted([code, *pool.languages.get(code, ())]),
                }
                for code in codes
            ]
        )

    async def settings(self, request: Request) -> Response:
        """Report what the server offers, for a web page."""
        pool, limits = self._server.pool, self._server.limits
        # A model from a language into itself gives no pair: without other models, only that language is left.
        source, (target, *_) = next(iter(pool.languages.items()), next((s, [t]) for s, t in pool.pairs))
        first = {code: {"code": code, "name": pool.language_name(code)} for code in (source, target)}
        return JSONResponse(
            {
                "apiKeys": self._server.access.required,
                "charLimit": limits.characters,
                "filesTranslation": self._files,
                "frontendTimeout": 500,
                "keyRequired": self._server.access.required,
                "language": {"source": first[source], "target": first[target]},
                "suggestions": False,
                "supportedFilesFormat": [e for k in KINDS for e in k.endings] if self._files else [],
            }
        )

    async def suggest(self, request: Request) -> Response:
        """Refuse suggestions of better translations: they are not collected."""
        raise Refused(403, "Suggestions are disabled on this server.")

    def _texts(self, q: Any) -> tuple[list[str], int]:
        """Return the texts of a request and their total length. Raises Refused for anything else, or for too many."""
        texts = texts_of(q, "Invalid request: q parameter must be a text or a list of texts")
        beyond = "Invalid request: request ({asked}) exceeds text limit ({most})"
        return texts, self._server.characters(texts, 400, beyond)

    def _alternatives(self, asked: Any) -> int:
        most = self._server.limits.alternatives
        try:
            count = int(asked or 0)
            if asked is True or (isinstance(asked, float) and count != asked):
                raise ValueError(asked)  # LibreTranslate takes `true` for 1, and 2.7 for 2
        except (TypeError, ValueError, OverflowError):
            raise Refused(400, "Invalid request: alternatives parameter is not a number") from None
        if count > most:
            raise Refused(400, f"Invalid request: alternatives parameter must be <= {most}")
        return max(0, count)

"""The parts of DeepL's interface (v2) that its own client libraries use for texts, for programs built on these."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ziggurat.config.languages import main_language
from ziggurat.serving.requests import Refused, fields_of, unless_gone
from ziggurat.serving.translations import Translations
from ziggurat.text.markup import HTML

__all__ = ["DeepL"]

_SCHEME = "DeepL-Auth-Key "
_UNLIMITED = 10**12
"""Characters that an account may have translated, as /v2/usage tells it: clients expect a number."""


class DeepL:
    """DeepL's paths over the translations of this server.

    Args:
        translations: what the server can do.
    """

    def __init__(self, translations: Translations) -> None:
        self._server = translations
        self._used: Counter[str] = Counter()  # characters by client, since the start
        self._counting = threading.Lock()

    def routes(self) -> list[Route]:
        """Return the paths."""
        return [
            Route("/v2/translate", self.translate, methods=["POST"]),
            Route("/v2/languages", self.languages, methods=["GET", "POST"]),
            Route("/v2/usage", self.usage, methods=["GET", "POST"]),
        ]

    async def translate(self, request: Request) -> Response:
        """Translate a list of texts."""
        fields = await fields_of(request)
        given = fields.get("text")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise Refused(400, "Parameter 'text' not specified.")
        limits, characters = self._server.limits, sum(map(len, texts))
        if len(texts) > limits.texts or characters > limits.characters:
            raise Refused(413, f"At most {limits.texts} texts and {limits.characters} characters in a request.")
        handling = str(fields.get("tag_handling") or "")
        if handling not in ("", "html", "xml"):
            raise Refused(400, "Value for 'tag_handling' not supported.")
        if fields.get("glossary_id"):
            raise Refused(400, "Value for 'glossary_id' not supported.")
        ignored = _names(fields.get("ignore_tags"))
        markup = replace(HTML, copied=HTML.copied | ignored, inline=HTML.inline | ignored) if handling else None
        target = self._code(fields.get("target_lang"), "target_lang")
        client = self._client(request, fields, len(texts), characters)
        if fields.get("source_lang"):
            source = self._code(fields["source_lang"], "source_lang")
            if source != target and self._server.pool.route(source, target) is None:
                raise Refused(400, "Value for 'source_lang' not supported.")
            sources = [source] * len(texts)
        else:
            sources = [self._server.detect(text, target)[0][0] for text in texts]
        work = self._server.translate(texts, sources, target, client, markup=markup)
        found = await unless_gone(request, work)
        with self._counting:
            self._used[client] += characters
        return JSONResponse(
            {
                "translations": [
                    {
                        "detected_source_language": main_language(source).upper(),
                        "text": translations[0],
                        # Always: DeepL's own client for Python fails without.
                        "billed_characters": len(text),
                    }
                    for text, source, translations in zip(texts, sources, found, strict=True)
                ]
            }
        )

    async def languages(self, request: Request) -> Response:
        """List the languages, `type` source or target."""
        fields = await fields_of(request)
        self._client(request, fields, 1, 0)
        kind = str(fields.get("type") or "source")
        if kind not in ("source", "target"):
            raise Refused(400, "Value for 'type' not supported.")
        pool = self._server.pool
        codes = list(pool.languages)
        if kind == "target":
            codes = sorted({target for targets in pool.languages.values() for target in targets})
        named = [{"language": code.upper(), "name": pool.language_name(code)} for code in codes]
        return JSONResponse([{**each, "supports_formality": False} for each in named] if kind == "target" else named)

    async def usage(self, request: Request) -> Response:
        """Tell how many characters a client has had translated since the server began."""
        client = self._client(request, await fields_of(request), 1, 0)
        return JSONResponse({"character_count": self._used[client], "character_limit": _UNLIMITED})

    def _client(self, request: Request, fields: dict[str, Any], requests: int, characters: int) -> str:
        given = request.headers.get("authorization", "")
        key = given.removeprefix(_SCHEME) if given.startswith(_SCHEME) else fields.get("auth_key")
        try:
            return self._server.client(request, key, requests, characters)
        except Refused as error:
            if error.status == 429:
                raise
            raise Refused(403, "Authorization failed. Please supply a valid DeepL-Auth-Key.") from None

    def _code(self, given: Any, name: str) -> str:
        """Return the code of a language as the models call it; DeepL's are in upper case, some with a region."""
        if not isinstance(given, str) or not given:
            raise Refused(400, f"Parameter '{name}' not specified.")
        known = {code.lower(): code for pair in self._server.pool.pairs for code in pair}
        found = known.get(given.lower()) or known.get(given.lower().partition("-")[0])
        if found is None:
            raise Refused(400, f"Value for '{name}' not supported.")
        return found


def _names(given: Any) -> frozenset[str]:
    """Return names of tags from a list, or from a text with commas between them."""
    listed = given if isinstance(given, list) else [given]
    return frozenset(name.strip() for text in listed if isinstance(text, str) for name in text.split(",")) - {""}

"""The interface of LibreTranslate 1.9.6, so that programs written for it work with this server.

What it answers was observed from outside; see docs/serve.md for what is compared.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ziggurat.serving.requests import Refused, fields_of, unless_gone
from ziggurat.serving.translations import Translations, Wanted
from ziggurat.text.documents.kinds import KINDS
from ziggurat.text.markup import HTML

__all__ = ["LibreTranslate"]

FORMATS = ("text", "html")


class LibreTranslate:
    """Its paths over the translations of this server.

    Args:
        translations: what the server can do.
        files: whether documents are translated.
    """

    def __init__(self, translations: Translations, *, files: bool) -> None:
        self._server, self._files = translations, files

    def routes(self) -> list[Route]:
        """Return its paths."""
        return [
            Route("/translate", self.translate, methods=["POST"]),
            Route("/detect", self.detect, methods=["POST"]),
            Route("/languages", self.languages, methods=["GET", "POST"]),  # Argos' own client posts
            Route("/frontend/settings", self.settings, methods=["GET"]),
            Route("/suggest", self.suggest, methods=["POST"]),
        ]

    async def translate(self, request: Request) -> Response:
        """Translate one text or a list of texts."""
        fields = await fields_of(request)
        for name in ("q", "source", "target"):
            if not fields.get(name):
                raise Refused(400, f"Invalid request: missing {name} parameter")
        texts = self._texts(fields["q"])
        kind = str(fields.get("format") or "text")
        if kind not in FORMATS:
            raise Refused(400, f"{kind} format is not supported")
        alternatives = self._alternatives(fields.get("alternatives"))
        client = self._server.client(request, fields.get("api_key"), sum(map(len, texts)))
        sources, target, detected = await self._server.languages(texts, str(fields["source"]), str(fields["target"]))
        wanted = Wanted(markup=HTML if kind == "html" else None, more=alternatives)
        found = await unless_gone(request, self._server.translate(texts, sources, target, client, wanted))
        many = isinstance(fields["q"], list)
        best = [each.best.text for each in found]
        answer: dict[str, Any] = {"translatedText": best if many else best[0]}
        if alternatives:
            others = [[other.text for other in each.others] for each in found]
            answer["alternatives"] = others if many else others[0]
        if detected is not None:
            answer["detectedLanguage"] = detected if many else detected[0]
        return JSONResponse(answer)

    async def detect(self, request: Request) -> Response:
        """Tell the language of a text."""
        fields = await fields_of(request)
        if not fields.get("q"):
            raise Refused(400, "Invalid request: missing q parameter")
        text = "\n".join(self._texts(fields["q"]))
        self._server.client(request, fields.get("api_key"), 0)
        found = await self._server.detect(text)
        return JSONResponse([{"confidence": confidence, "language": code} for code, confidence in found])

    async def languages(self, request: Request) -> Response:
        """List the languages, each with those that it can be translated into, itself among them."""
        pool = self._server.pool
        codes = sorted({code for pair in pool.pairs for code in pair})  # those that are only translated into, too
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
        """Tell a page what the server offers."""
        pool, limits = self._server.pool, self._server.limits
        source, targets = next(iter(pool.languages.items()))
        first = {code: {"code": code, "name": pool.language_name(code)} for code in (source, targets[0])}
        return JSONResponse(
            {
                "apiKeys": self._server.access.required,
                "charLimit": limits.characters,
                "filesTranslation": self._files,
                "frontendTimeout": 500,
                "keyRequired": self._server.access.required,
                "language": {"source": first[source], "target": first[targets[0]]},
                "suggestions": False,
                "supportedFilesFormat": [e for k in KINDS for e in k.endings] if self._files else [],
            }
        )

    async def suggest(self, request: Request) -> Response:
        """Refuse a better translation that somebody suggests: they are not collected."""
        raise Refused(403, "Suggestions are disabled on this server.")

    def _texts(self, q: Any) -> list[str]:
        """Return the texts of a request. Raises Refused where they are none, or beyond the limits."""
        texts = list(q) if isinstance(q, list) else [q]
        if not all(isinstance(text, str) for text in texts):
            raise Refused(400, "Invalid request: q parameter must be a text or a list of texts")
        limits, characters = self._server.limits, sum(map(len, texts))
        if len(texts) > limits.texts:
            raise Refused(400, f"Invalid request: request ({len(texts)}) exceeds text limit ({limits.texts})")
        if characters > limits.characters:
            raise Refused(400, f"Invalid request: request ({characters}) exceeds text limit ({limits.characters})")
        return texts

    def _alternatives(self, asked: Any) -> int:
        most = self._server.limits.alternatives
        try:
            count = int(asked or 0)
        except (TypeError, ValueError, OverflowError):
            raise Refused(400, "Invalid request: alternatives parameter is not a number") from None
        if count > most:
            raise Refused(400, f"Invalid request: alternatives parameter must be <= {most}")
        return max(0, count)

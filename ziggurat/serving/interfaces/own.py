"""The server's own interface: n-best lists, alignments, scores, prefixes and glossaries (docs/serve.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ziggurat import __version__
from ziggurat.errors import printable
from ziggurat.serving.interfaces.details import details
from ziggurat.serving.requests import Refused, fields_of, unless_gone
from ziggurat.serving.translations import TextTranslation, Translations, Wanted
from ziggurat.text.documents.kinds import KINDS
from ziggurat.text.glossary import Term, Terms
from ziggurat.text.markup import HTML

__all__ = ["Own", "terms_of"]

_FORMATS = ("text", "html")


class Own:
    """Paths under /v1 that are not OpenAI's, over the translations of this server.

    Args:
        translations: what the server can do.
        files: whether documents are translated.
    """

    def __init__(self, translations: Translations, *, files: bool) -> None:
        self._server, self._files = translations, files

    def routes(self) -> list[Route]:
        """Return the paths."""
        return [
            Route("/v1/settings", self.settings, methods=["GET"]),
            Route("/v1/translate", self.translate, methods=["POST"]),
        ]

    async def settings(self, request: Request) -> Response:
        """Tell what the server offers; no key is needed."""
        server = self._server
        limits, pool = server.limits, server.pool
        names = {code: pool.language_name(code) for pair in pool.pairs for code in pair}
        return JSONResponse(
            {
                "version": __version__,
                "limits": {
                    "characters": limits.characters,
                    "texts": limits.texts,
                    "alternatives": limits.alternatives,
                    "file_bytes": limits.file_bytes,
                    "glossary_terms": limits.glossary_terms,
                },
                "key_required": server.access.required,
                "languages": [
                    {"code": code, "name": name, "targets": pool.languages.get(code, [])}
                    for code, name in sorted(names.items())
                ],
                "detection": True,
                "files": [ending for kind in KINDS for ending in kind.endings] if self._files else [],
            }
        )

    async def translate(self, request: Request) -> Response:
        """Translate a text or a list of texts, with what is asked for beside the translations."""
        fields = await fields_of(request)
        texts = self._texts(fields.get("text"))
        source, target = fields.get("source", "auto"), fields.get("target")
        if not isinstance(source, str) or not isinstance(target, str) or not source or not target:
            raise Refused(400, "`source` is a language code or `auto`, `target` is a language code")
        wanted = self._wanted(fields, texts)
        client = self._server.bearer(request, sum(map(len, texts)), fields.get("api_key"))
        sources, target, detected = await self._server.languages(texts, source, target)
        self._check_models(sources, target, wanted)
        found = await unless_gone(request, self._server.translate(texts, sources, target, client, wanted))
        if wanted.alignments and wanted.markup is None:
            _check_alignments(found)

        def records() -> list[dict[str, Any]]:
            return [details(each, code, wanted) for each, code in zip(found, sources, strict=True)]

        answers = await self._server.in_thread(records)
        for answer, language in zip(answers, detected or [], strict=False):
            answer["detected"] = language
        return JSONResponse({"translations": answers})

    def _texts(self, given: Any) -> list[str]:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise Refused(400, "`text` is a text or a list of texts")
        self._server.refuse_large(texts)
        return texts

    def _wanted(self, fields: Mapping[str, Any], texts: Sequence[str]) -> Wanted:
        kind, prefix = fields.get("format", "text"), fields.get("prefix") or ""
        if kind not in _FORMATS:
            raise Refused(400, f"`format` is one of {', '.join(_FORMATS)}")
        if not isinstance(prefix, str) or len(prefix) > self._server.limits.characters:
            raise Refused(400, "`prefix` is the text that the translation must begin with")
        most = self._server.limits.alternatives
        more = _number(fields.get("alternatives", 0))
        if more is None or not 0 <= more <= most:
            raise Refused(400, f"`alternatives` is a number from 0 to {most}")
        if prefix.strip() and (kind == "html" or len(texts) > 1):
            raise Refused(400, "`prefix` goes with one text of one sentence, and `format: text`")
        return Wanted(
            markup=HTML if kind == "html" else None,
            more=more,
            alignments=_flag(fields, "alignments") and kind == "text",
            scores=_flag(fields, "scores") and kind == "text",
            prefix=prefix.strip(),
            terms=terms_of(fields.get("glossary"), self._server.limits.glossary_terms),
        )

    def _check_models(self, sources: Sequence[str], target: str, wanted: Wanted) -> None:
        """Raise Refused for what the models of these languages cannot do."""
        for source in set(sources):
            route = self._server.route(source, target)
            if wanted.prefix and len(route) != 1:
                raise Refused(400, "`prefix` needs a model that leads from `source` to `target`; here two do, or none")
            self._server.refuse_soft(source, target, wanted.terms)


def terms_of(given: Any, most: int) -> Terms | None:
    """Return a glossary as requests have it: a list of objects, or an object of soft terms; None: there is none.

    Raises Refused (400) for something else, or more than `most` terms; DataError as Terms does.
    """
    if given is None or given in ("", [], {}):
        return None
    entries = [{"source": s, "target": t} for s, t in given.items()] if isinstance(given, dict) else given
    if not isinstance(entries, list):
        raise Refused(400, "`glossary` is a list of objects with `source`, `target` and `mode`, or an object of terms")
    if len(entries) > most:
        raise Refused(413, f"at most {most} terms in a glossary")
    terms = []
    for entry in entries:
        values = [entry.get(name) for name in ("source", "target")] if isinstance(entry, dict) else []
        mode = entry.get("mode", "soft") if isinstance(entry, dict) else None
        if mode not in ("soft", "hard") or len(values) != 2 or not all(isinstance(value, str) for value in values):
            raise Refused(
                400, f"`glossary`: {printable(str(entry), 60)}: needs `source`, `target`, and `mode`: soft, hard"
            )
        terms.append(Term(str(values[0]), str(values[1]), mode == "hard"))
    return Terms(terms)


def _number(given: Any) -> int | None:
    """Return a whole number, of a form as text; None for anything else."""
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 6:
        return int(given)
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    given = fields.get(name, False)
    if isinstance(given, str) and given.lower() in ("", "0", "1", "false", "true"):
        return given.lower() in ("1", "true")
    if not isinstance(given, bool):
        raise Refused(400, f"`{name}` is true or false")
    return given


def _check_alignments(found: Sequence[TextTranslation]) -> None:
    """Raise Refused where a model told no alignment."""
    for each in found:
        if each.recorded is not None and len(each.recorded.route) == 1:
            best = [translation.hypotheses[0] for translation in each.recorded.found.values()]
            if any(hypothesis.alignment is None and hypothesis.tokens for hypothesis in best):
                model = each.recorded.route[0]
                why = "has no attention weights to tell them by"
                if model.origin.is_exported:
                    why = "was exported before exports told them; export it again"
                raise Refused(400, f"no `alignments`: {model.name} {why}")

"""The server's own interface: n-best lists, alignments, scores, prefixes and glossaries; and the web page that uses it
(docs/serve.md).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ziggurat import __version__
from ziggurat.serve.glossaries import entries_of
from ziggurat.serve.interfaces.libretranslate import FORMATS
from ziggurat.serve.requests import (
    OWN,
    SERVER,
    Described,
    Field,
    Operation,
    Refused,
    Schema,
    flag,
    listed,
    number,
    optional_texts,
    record,
    text,
    texts_of,
    unless_gone,
    whole,
)
from ziggurat.serve.text.alignment import piece_spans
from ziggurat.serve.text.documents.kinds import KINDS
from ziggurat.serve.text.elements import HTML
from ziggurat.serve.text.sentences import units
from ziggurat.serve.translation_request import TextTranslation, ranked
from ziggurat.serve.translations import Translations
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Hypothesis
from ziggurat.translate.terms import Term, Terms


def native_response(found: TextTranslation, source: str, options: TranslateOptions, *, plain: bool) -> dict[str, Any]:
    """Return a translation in the form of the response; `plain` text has sentences."""
    record: dict[str, Any] = {"text": found.best.text, "source": source}
    if options.more:
        record["alternatives"] = [other.text for other in found.others]
    if plain and (options.more or options.alignments or options.scores):
        record["sentences"] = _sentences(found, options)
    if found.notices:
        record["notices"] = found.notices.records()
    if options.terms is not None:
        records = found.tally.records(options.terms)
        record["glossary"] = [
            {**each, "dropped": _dropped(found, term)} for each, term in zip(records, options.terms.terms, strict=True)
        ]
    return record


def _dropped(found: TextTranslation, term: Term) -> int:
    """Return the number of sentences in which a soft term was dropped because it harmed the translation."""
    if not found.route or term.hard:
        return 0
    return sum(
        term.target in phrases and any(each.term == term for each in Terms([term]).found(sentence))
        for sentence, phrases in found.dropped.items()
    )


def _sentences(found: TextTranslation, options: TranslateOptions) -> list[dict[str, Any]]:
    """Return the sentences of a text, each with the requested details."""
    records: list[dict[str, Any]] = []
    direct = len(found.route) == 1
    for index, pair in enumerate(found.best.sentences):
        record: dict[str, Any] = {"source": list(pair.source), "target": list(pair.target)}
        said = found.best.text[slice(*pair.target)]
        if options.more:
            record["alternatives"] = _alternatives(found, index, said)
        best = _hypothesis(found, pair.source, said, 0)
        record["score"] = None if best is None else best.score
        if options.scores and direct:
            spans = None if best is None else piece_spans(best.text, best.tokens)
            shift = 0 if best is None else pair.target[0] - (len(best.text) - len(best.text.lstrip()))
            record["tokens"] = [
                {"target": [start + shift, end + shift] if start < end else [shift, shift], "score": score}
                for (start, end), score in zip(spans or [], best.token_log_probabilities if best else [], strict=False)
            ]
        records.append(record)
    if options.alignments and direct:
        for record, links in zip(records, _word_links(found), strict=True):
            record["links"] = links
    return records


def _hypothesis(found: TextTranslation, source: tuple[int, int], said: str, rank: int) -> Hypothesis | None:
    """Return the hypothesis of a sentence's whole translation; None if it was assembled from several."""
    translation = found.found.get(found.source[slice(*source)])
    if translation is None:
        return None
    (hypothesis,) = ranked(translation, rank).hypotheses
    return hypothesis if hypothesis.text.strip() == said else None


def _alternatives(found: TextTranslation, number: int, best: str) -> list[dict[str, Any]]:
    """Return the other translations of a sentence; those assembled from several parts have no score."""
    seen, listed = {best}, []
    for other, rank in zip(found.others, found.ranks, strict=True):
        pair = other.sentences[number]
        said = other.text[slice(*pair.target)]
        if said not in seen:
            seen.add(said)
            hypothesis = _hypothesis(found, pair.source, said, rank)
            listed.append({"text": said, "score": None if hypothesis is None else hypothesis.score})
    return listed


def _word_links(found: TextTranslation) -> list[list[list[int]]]:
    """Return, for each sentence, the links between its words and those of its translation."""
    pairs = found.best.sentences
    begins = [pair.source[0] for pair in pairs]
    listed: list[dict[tuple[int, int, int, int], None]] = [{} for _ in pairs]
    sources, targets = units(found.source), units(found.best.text)
    for link in found.best.links:
        here = _overlapped(sources, link.source_start, link.source_end)
        there = _overlapped(targets, link.target_start, link.target_end)
        # A link of many words to many only shows that one phrase became another, not which word became which.
        if len(here) > 1 and len(there) > 1:
            came_through = found.source[slice(*link[:2])] == found.best.text[slice(*link[2:])]
            if not came_through:  # such as an address
                continue
            here, there = [link[:2]], [link[2:]]
        number = bisect_right(begins, link.source_start) - 1
        if number >= 0:
            listed[number] |= {(*source, *target): None for source in here for target in there}
    return [[list(link) for link in links] for links in listed]


def _overlapped(spans: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    first = max(0, bisect_right(spans, start, key=lambda span: span[0]) - 1)
    found = []
    for span in spans[first:]:
        if span[0] >= end:
            break
        if span[1] > start:
            found.append(span)
    return found


_PROTECT = "patterns (Python's `regex`) of text that stays unchanged"

_SPAN: Schema = listed(whole(), "character offsets, begin and exclusive end", minItems=2, maxItems=2)
_SCORE: Schema = {"type": ["number", "null"], "description": "null: assembled from several translations"}
_TERM = {"source": text(), "target": text(), "mode": text("", "soft", "hard")}
_SENTENCE = record(
    {
        "source": _SPAN,
        "target": _SPAN,
        "score": _SCORE,
        "alternatives": listed(record({"text": text(), "score": _SCORE})),
        "tokens": listed(record({"target": _SPAN, "score": number("log-probability")})),
        "links": listed(listed(whole(), minItems=4, maxItems=4), "source begin, end, target begin, end"),
    },
    optional=("alternatives", "tokens", "links"),
)
NOTICE = record(
    {
        "kind": text("as named in docs/documents.md"),
        "count": whole(),
        "text": text("in words"),
        "place": text("place of the first"),
    },
    optional=("place",),
)
_TRANSLATION = record(
    {
        "text": text(),
        "source": text("the language code of the text"),
        "detected": record({"language": text(), "confidence": number("from 0 to 100")}),
        "alternatives": listed(text()),
        "sentences": listed(_SENTENCE),
        "glossary": listed(
            record({**_TERM, "found": whole(), "applied": whole(), "dropped": whole("sentences it would have harmed")})
        ),
        "notices": listed(NOTICE, "what needed special handling"),
    },
    optional=("detected", "alternatives", "sentences", "glossary", "notices"),
)
TRANSLATE = Operation(
    OWN,
    (
        Field("text", {"oneOf": [text(), listed(text())]}, required=True),
        Field("source", text("a language code; detected if missing or `auto`")),
        Field("target", text("a code"), required=True),
        Field("format", text("`html` has neither sentences nor alternatives", *FORMATS)),
        Field("alternatives", whole("alternative translations of the text and of each sentence", minimum=0)),
        Field("scores", flag("whether to include each sentence's score and the tokens' log-probabilities")),
        Field("alignments", flag("whether to include `links` between words")),
        Field("prefix", text("text that the translation must begin with; for one text of one sentence")),
        Field("complete", flag("whether the prefix ends with a whole word; by default its last word may continue")),
        Field("next_words", flag("whether alternatives differ in the word after the prefix, or in the first word")),
        Field(
            "glossary",
            {
                "oneOf": [
                    listed(record(_TERM, optional=["mode"])),
                    {"type": "object", "additionalProperties": text(), "description": "terms without a mode"},
                ],
                "description": "terms without `mode` are soft, or hard if the model cannot search for them",
            },
        ),
        Field("protect", {"oneOf": [text(), listed(text())], "description": _PROTECT}),
        Field("api_key", text("an API key, if no header has it")),
    ),
    record({"translations": listed(_TRANSLATION)}),
    strict=True,
)
_LIMITS = ("characters", "texts", "alternatives", "file_bytes", "glossary_terms")
_PAIR = record(
    {
        "source": text(),
        "target": text(),
        "models": listed(text("name"), "one model, or two that translate through a third language"),
        "soft_terms": flag("whether glossary terms can be searched for; if not, `mode: soft` is refused"),
        "prefixes": flag("whether a translation can start with a given prefix"),
    }
)
SETTINGS = Operation(
    OWN,
    (),
    record(
        {
            "version": text("of Ziggurat"),
            "limits": record(dict.fromkeys(_LIMITS, whole())),
            "key_required": flag(),
            "languages": listed(record({"code": text(), "name": text(), "targets": listed(text())})),
            "pairs": listed(_PAIR),
            "detection": flag(),
            "files": listed(text("a file name extension, such as `.docx`")),
        }
    ),
)


class NativeApi:
    """Paths under /v1 that are not OpenAI's, answered with this server's translations.

    Args:
        translations: the server's models.
        files: whether documents are translated.
    """

    def __init__(self, translations: Translations, *, files: bool) -> None:
        self._server, self._files = translations, files

    def routes(self) -> list[Described]:
        """Return the paths."""
        return [
            Described("/v1/settings", self.settings, SETTINGS),
            Described("/v1/translate", self.translate, TRANSLATE, ["POST"]),
        ]

    async def settings(self, request: Request) -> Response:
        """Report what the server offers; no key is needed."""
        server, pool = self._server, self._server.pool
        names = {code: pool.language_name(code) for pair in pool.pairs for code in pair}
        return JSONResponse(
            {
                "version": __version__,
                "limits": {name: getattr(server.limits, name) for name in _LIMITS},
                "key_required": server.access.required,
                "languages": [
                    {"code": code, "name": name, "targets": pool.languages.get(code, [])}
                    for code, name in sorted(names.items())
                ],
                "pairs": [self._pair(source, target) for source, to in pool.languages.items() for target in to],
                "detection": True,
                "files": [ending for kind in KINDS for ending in kind.endings] if self._files else [],
            }
        )

    def _pair(self, source: str, target: str) -> dict[str, Any]:
        """Report what the models of a language pair can do."""
        route = self._server.route(source, target)
        return {
            "source": source,
            "target": target,
            "models": [model.name for model in route],
            "soft_terms": not self._server.never_softens(route),
            "prefixes": len(route) == 1 and not route[0].origin.has_shortlist(),
        }

    async def translate(self, request: Request) -> Response:
        """Translate a text or a list of texts, with the requested details."""
        fields = await TRANSLATE.fields(request)
        texts = texts_of(fields.get("text"), "`text` is a text or a list of texts")
        characters = self._server.characters(texts)
        source, target = fields.get("source", "auto"), fields.get("target")
        if not isinstance(source, str) or not isinstance(target, str) or not source or not target:
            raise Refused(400, "`source` is a language code or `auto`, `target` is a language code")
        options, markup = self._options(fields, texts), HTML if fields.get("format") == "html" else None
        entries = entries_of(fields.get("glossary"), self._server.limits.glossary_terms)
        client = self._server.client(request, OWN, fields.get("api_key"), characters)
        sources, target, detected = await self._server.languages(texts, source, target)
        if options.begun and any(len(self._server.route(code, target)) != 1 for code in sources):
            raise Refused(
                400,
                "`prefix` and `next_words` need one model from `source` to `target`; here there are two or none",
            )
        options = replace(options, terms=self._server.terms(entries, sources, target))
        found = await unless_gone(request, self._server.translate(texts, sources, target, client, options, markup))
        if options.alignments:
            _check_alignments(found)

        def records() -> list[dict[str, Any]]:
            return [
                native_response(each, code, options, plain=markup is None)
                for each, code in zip(found, sources, strict=True)
            ]

        answers = await self._server.in_thread(records)
        for answer, language in zip(answers, detected or [], strict=False):
            answer["detected"] = language
        return JSONResponse({"translations": answers})

    def _options(self, fields: Mapping[str, Any], texts: Sequence[str]) -> TranslateOptions:
        kind, prefix = fields.get("format", "text"), fields.get("prefix") or ""
        if kind not in FORMATS:
            raise Refused(400, f"`format` is one of {', '.join(FORMATS)}")
        if not isinstance(prefix, str) or len(prefix) > self._server.limits.characters:
            raise Refused(400, "`prefix` is the text that the translation must begin with")
        most = self._server.limits.alternatives
        more = _number(fields.get("alternatives", 0))
        if more is None or not 0 <= more <= most:
            raise Refused(400, f"`alternatives` is a number from 0 to {most}")
        # The likeliest beams are mostly alike, but a client that gives a prefix wants different ways to continue it.
        next_words = _flag(fields, "next_words", default=bool(prefix.strip() and more))
        if (prefix.strip() or next_words) and (kind == "html" or len(texts) > 1):
            raise Refused(400, "`prefix` and `next_words` go with one text of one sentence, and `format: text`")
        return TranslateOptions(
            n_best=more + 1,
            alignments=_flag(fields, "alignments") and kind == "text",
            scores=_flag(fields, "scores") and kind == "text",
            prefix=prefix.strip(),
            complete=_flag(fields, "complete") and bool(prefix.strip()),
            next_words=next_words,
            protect=optional_texts(fields.get("protect"), "protect"),
        )


def _number(given: Any) -> int | None:
    """Return a whole number, which forms send as text; None for anything else."""
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 6:
        return int(given)
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _flag(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    given = fields.get(name, default)
    if isinstance(given, str) and given.lower() in ("", "0", "1", "false", "true"):
        return given.lower() in ("1", "true")
    if not isinstance(given, bool):
        raise Refused(400, f"`{name}` is true or false")
    return given


def _check_alignments(found: Sequence[TextTranslation]) -> None:
    """Raise Refused if a model gave no alignment."""
    for each in found:
        if len(each.route) == 1:
            best = [translation.hypotheses[0] for translation in each.found.values()]
            if any(hypothesis.alignment is None and hypothesis.tokens for hypothesis in best):
                raise Refused(400, f"no `alignments`: {each.route[0].name} has no attention weights to take them from")


_SCRIPTS = ("page.js", "common.js", "documents.js", "glossary.js", "output.js")
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
}

_HEADERS = {
    # Scripts, styles and requests of this server only; images inside the page only; no embedding in frames, no form
    # submission, and no text that a script could turn into markup (Trusted Types).
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # cached but revalidated each time, so that a new version never meets an old script
}


def page_routes() -> list[Described]:
    """Return the paths of the page, whose files are read now."""
    folder = files("ziggurat.serve.interfaces") / "static"
    return [_route(path, (folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, content: bytes, kind: str) -> Described:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def page(request: Request) -> Response:
        """Show the web page."""
        held = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in held or "*" in held:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    what = "the web page" if path == "/" else "a part of the web page"
    kinds = {kind.partition(";")[0]: what}
    return Described(path, page, Operation(SERVER, kinds=kinds))

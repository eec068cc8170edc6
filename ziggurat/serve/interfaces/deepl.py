"""The parts of DeepL's interface (v2) that its client libraries use, for programs built on them.

docs/serve.md describes each field. Documents and glossaries are in ziggurat.serve.interfaces.deepl_resources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ziggurat.config.languages import main_language
from ziggurat.serve.glossaries import Glossaries
from ziggurat.serve.requests import (
    DEEPL,
    Described,
    Field,
    Operation,
    Refused,
    flag,
    listed,
    record,
    text,
    texts_of,
    unless_gone,
    whole,
)
from ziggurat.serve.text.elements import HTML, MarkupRules
from ziggurat.serve.text.markup import xml_tokens
from ziggurat.serve.text.tokens import Token
from ziggurat.serve.translation_request import PLAIN
from ziggurat.serve.translations import Split, Translations, noticed
from ziggurat.system.errors import DataError
from ziggurat.translate.terms import Terms

_UNLIMITED = 10**12
"""_UNLIMITED is the character limit of an account that /v2/usage reports, because clients expect a number."""

_SPLITS: dict[str, Split] = {"0": "none", "1": "lines", "nonewlines": "sentences"}
REFUSED = [
    Field(name, {"description": "refused"})
    for name in (
        "glossary_ids",
        "style_id",
        "writing_style",
        "translation_memory_id",
        "translation_memory_threshold",
        "custom_instructions",
        "extra_body_parameters",
    )
]
_NEUTRAL = ("default", "prefer_more", "prefer_less")
_MODEL_TYPES = ("quality_optimized", "prefer_quality_optimized", "latency_optimized")
_FLAGS = ("preserve_formatting", "enable_beta_languages", "show_billed_characters", "outline_detection")
_VALUES = {
    "formality": _NEUTRAL,
    "model_type": _MODEL_TYPES,
    "tag_handling_version": ("v1", "v2"),
    **dict.fromkeys(_FLAGS, ("true", "false", "1", "0", "True", "False")),
}
_TAG_LISTS = ("ignore_tags", "splitting_tags", "non_splitting_tags")
FORMALITY = Field("formality", text("not supported by any model: `more` and `less` are refused", *_NEUTRAL))

KEY = Field("auth_key", text("an API key, if no header has it"))
SOURCE = Field("source_lang", text("the language code of the texts; detected if missing"))
TARGET = Field("target_lang", text("the code of the language to translate into"), required=True)
GLOSSARY = Field("glossary_id", text("a glossary; requires `source_lang`"))
_TAGS = {"anyOf": [text("separated by commas"), listed(text())]}

TRANSLATE = Operation(
    DEEPL,
    (
        Field("text", {"anyOf": [text(), listed(text())]}, required=True),
        SOURCE,
        TARGET,
        Field("split_sentences", text("", *_SPLITS)),
        Field("tag_handling", text("", "html", "xml")),
        Field("ignore_tags", {**_TAGS, "description": "elements that are left unchanged"}),
        Field("splitting_tags", {**_TAGS, "description": "elements that break sentences"}),
        Field("non_splitting_tags", {**_TAGS, "description": "elements that do not break sentences"}),
        Field("outline_detection", {"type": ["string", "boolean"], "description": "for XML; see docs/serve.md"}),
        GLOSSARY,
        FORMALITY,
        Field("model_type", text("accepted; each language pair has a single model", *_MODEL_TYPES)),
        Field("preserve_formatting", flag("without effect: white space and punctuation are always preserved")),
        Field("enable_beta_languages", flag("without effect: there are no beta languages")),
        Field("show_billed_characters", flag("without effect: they are always included")),
        Field("context", text("without effect: a sentence is translated by itself")),
        Field("tag_handling_version", text("", "v1", "v2")),
        *REFUSED,
        KEY,
    ),
    record(
        {
            "translations": listed(
                record(
                    {
                        "detected_source_language": text(),
                        "text": text(),
                        "billed_characters": whole(),
                        "model_type_used": text("if `model_type` was given", *_MODEL_TYPES),
                    },
                    optional=["model_type_used"],
                )
            )
        }
    ),
    noticed=True,
)
LANGUAGES = Operation(
    DEEPL,
    (Field("type", text("", "source", "target")), KEY),
    listed(record({"language": text(), "name": text(), "supports_formality": flag()}, optional=["supports_formality"])),
)
USAGE = Operation(
    DEEPL,
    (KEY,),
    record({"character_count": whole(), "character_limit": whole()}),
)


class DeepL:
    """DeepL's paths for texts, and what its other paths share: client, languages and glossary of a request.

    Args:
        server: the server's models.
        glossaries: glossaries that clients store.
    """

    def __init__(self, server: Translations, glossaries: Glossaries) -> None:
        self.server, self.glossaries = server, glossaries

    def routes(self) -> list[Described]:
        """Return the paths."""
        return [
            Described("/v2/translate", self.translate, TRANSLATE, ["POST"]),
            Described("/v2/languages", self.languages, LANGUAGES, ["GET", "POST"]),
            Described("/v2/usage", self.usage, USAGE, ["GET", "POST"]),
        ]

    async def translate(self, request: Request) -> Response:
        """Translate a list of texts."""
        fields = await TRANSLATE.fields(request)
        texts = texts_of(fields.get("text"), "Parameter 'text' not specified.")
        characters = self.server.characters(texts)
        self.refuse_unsupported(fields)
        markup, split = await self._markup(fields, texts), fields.get("split_sentences")
        if split is None:
            split = "1" if markup is None else "nonewlines"
        if str(split) not in _SPLITS:
            raise Refused(400, "Value for 'split_sentences' not supported.")
        source, target = self.pair(fields)
        client = self.client(request, fields, characters)
        terms = self.terms(fields, client, source, target)
        if source is not None:
            sources = [source] * len(texts)
        else:
            sources = [code for code, _ in await self.server.detect_sources(texts, target)]
        work = self.server.translate(
            texts, sources, target, client, replace(PLAIN, terms=terms), markup, _SPLITS[str(split)]
        )
        found = await unless_gone(request, work)
        kind = str(fields.get("model_type") or "").removeprefix("prefer_")
        used = {"model_type_used": kind} if kind else {}
        return JSONResponse(
            {
                "translations": [
                    {
                        "detected_source_language": main_language(source).upper(),
                        "text": translation.best.text,
                        # Always included, because DeepL's Python client fails without it.
                        "billed_characters": len(given),
                        **used,
                    }
                    for given, source, translation in zip(texts, sources, found, strict=True)
                ]
            },
            headers=noticed(found),
        )

    async def _markup(self, fields: Mapping[str, Any], texts: Sequence[str]) -> MarkupRules | None:
        """Return the rules of the texts' tags; None: they are plain text."""
        handling = str(fields.get("tag_handling") or "")
        if handling not in ("", "html", "xml"):
            raise Refused(400, "Value for 'tag_handling' not supported.")
        if not handling:
            return None
        ignored, splitting, others = (_names(fields.get(name)) for name in _TAG_LISTS)
        if handling == "html":
            inline = (HTML.inline - splitting) | others | ignored
            return replace(HTML, copied=HTML.copied | ignored, inline=inline)
        outline = str(fields.get("outline_detection", "1")).lower() not in ("0", "false")
        try:
            return await self.server.in_thread(
                lambda: _xml_rules([xml_tokens(each) for each in texts], ignored, splitting, others, outline=outline)
            )
        except DataError:
            raise Refused(400, "Tag handling parsing failed, please check input.") from None

    async def languages(self, request: Request) -> Response:
        """List the languages."""
        fields = await LANGUAGES.fields(request)
        self.client(request, fields)
        kind = str(fields.get("type") or "source")
        if kind not in ("source", "target"):
            raise Refused(400, "Value for 'type' not supported.")
        pool = self.server.pool
        codes = list(pool.languages)
        if kind == "target":
            codes = sorted({target for targets in pool.languages.values() for target in targets})
        named = [{"language": code.upper(), "name": pool.language_name(code)} for code in codes]
        return JSONResponse([{**each, "supports_formality": False} for each in named] if kind == "target" else named)

    async def usage(self, request: Request) -> Response:
        """Report the characters translated since the server started, for a key or, without keys, for everyone."""
        account = self.server.access.account(self.client(request, await USAGE.fields(request)))
        return JSONResponse({"character_count": self.server.used[account], "character_limit": _UNLIMITED})

    def client(self, request: Request, fields: Mapping[str, Any], characters: int = 0) -> str:
        """Return the client. Raises Refused: 403 for a wrong key, 429 or 413 beyond a limit."""
        return self.server.client(request, DEEPL, fields.get("auth_key"), characters)

    def code(self, given: Any, name: str) -> str:
        """Return a language's code as the models spell it; DeepL's are in upper case, some with a region."""
        if not isinstance(given, str) or not given:
            raise Refused(400, f"Parameter '{name}' not specified.")
        known = {code.lower().replace("_", "-"): code for pair in self.server.pool.pairs for code in pair}
        given, main = given.lower(), given.lower().partition("-")[0]
        # DeepL's source languages have no regions: PT means pt-BR if that is the only one that a model has.
        regional = [code for name, code in known.items() if name.startswith(f"{given}-")]
        found = known.get(given) or known.get(main) or (regional[0] if len(regional) == 1 else None)
        if found is None:
            raise Refused(400, f"Value for '{name}' not supported.")
        return found

    def pair(self, fields: Mapping[str, Any]) -> tuple[str | None, str]:
        """Return the languages of a request; None: the source language is to be detected."""
        target = self.code(fields.get("target_lang"), "target_lang")
        if not fields.get("source_lang"):
            return None, target
        source = self.code(fields["source_lang"], "source_lang")
        if source != target and not self.server.route(source, target):
            raise Refused(400, "Value for 'source_lang' not supported.")
        return source, target

    @staticmethod
    def refuse_unsupported(fields: Mapping[str, Any]) -> None:
        """Raise Refused (400) for unsupported values, and for fields whose effect this server cannot provide."""
        for field in REFUSED:
            if fields.get(field.name):
                raise Refused(400, f"Value for '{field.name}' not supported.")
        if fields.get("formality") in ("more", "less"):
            raise Refused(400, "'formality' is not supported for given 'target_lang'.")
        fits = {name: str(fields.get(name) or known[0]) in known for name, known in _VALUES.items()}
        fits["context"] = isinstance(fields.get("context") or "", str)
        for name in _TAG_LISTS:
            given = fields.get(name) or ""
            fits[name] = all(isinstance(each, str) for each in (given if isinstance(given, list) else [given]))
        for name in (name for name, is_fit in fits.items() if not is_fit):
            raise Refused(400, f"Value for '{name}' not supported.")

    def terms(self, fields: Mapping[str, Any], client: str, source: str | None, target: str) -> Terms | None:
        """Return the glossary named in a request: soft terms, or hard ones if the model cannot search for them.

        Raises Refused if there is none with this id (404), or if its languages differ (400).
        """
        given = fields.get("glossary_id")
        if not given:
            return None
        if source is None:
            raise Refused(400, "Use of a glossary requires the source_lang parameter to be specified.")
        found = self.glossaries.get(self.server.access.account(client), str(given))
        if (found.source, found.target) != (source, target):
            raise Refused(400, "Glossary language pair does not match the languages of the request.")
        route = self.server.route(source, target)
        return found.hard if self.server.never_softens(route) else found.soft


def _names(given: Any) -> frozenset[str]:
    """Return names of tags from a list, or from a text separated by commas."""
    every = given if isinstance(given, list) else [given]
    return frozenset(name.strip() for each in every for name in (each or "").split(",")) - {""}


def _xml_rules(
    tokens: Sequence[Sequence[Token]],
    ignored: frozenset[str],
    splitting: frozenset[str],
    non_splitting: frozenset[str],
    *,
    outline: bool,
) -> MarkupRules:
    """Return the rules for XML whose texts have these tokens.

    With `outline`, an element breaks sentences unless it occurs at least once with text next to it, in the same
    element. Without it, only the elements named in `splitting` do.
    """
    names: set[str] = set()
    beside: set[str] = set()
    for own in tokens:
        children: list[set[str]] = [set()]  # child elements of each open element, and of the text itself
        has_text = [False]
        for token in own:
            if token.kind == "text":
                has_text[-1] |= bool(token.text.strip())
            if token.kind in ("open", "empty"):
                names.add(token.name)
                children[-1].add(token.name)
            if token.kind == "open":
                children.append(set())
                has_text.append(False)
            elif token.kind == "close" and len(children) > 1:
                inside, text_inside = children.pop(), has_text.pop()
                beside |= inside if text_inside else set()
        beside |= children[0] if has_text[0] else set()
    inline = frozenset(beside if outline else names)
    return MarkupRules(inline=(inline - splitting) | non_splitting | ignored, copied=ignored, xml=True)

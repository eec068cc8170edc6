"""Services behind every interface of a server: translation of texts, detection of languages, access control."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from ziggurat.config.languages import main_language
from ziggurat.data.cleaning.filters import MOST_CHARACTERS, identifier
from ziggurat.serve.access import Access
from ziggurat.serve.config import LimitsConfig
from ziggurat.serve.glossaries import Entry
from ziggurat.serve.notices import notice_headers
from ziggurat.serve.pool import Model, ModelPool
from ziggurat.serve.requests import Dialect, Refused
from ziggurat.serve.text.elements import MarkupRules
from ziggurat.serve.text.glossary import Tally
from ziggurat.serve.text.markup import html, xml
from ziggurat.serve.text.paragraphs import AlignedText, aligned_text, sentence_count
from ziggurat.serve.text.sentences import Options, Result, SentenceRequests
from ziggurat.serve.text.splitting import Protection, sentencex_splitter
from ziggurat.serve.translation_request import PLAIN, TextTranslation, TranslationRequest
from ziggurat.system.errors import DataError
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.terms import Term, Terms

_SURE = 50.0  # per cent


class Detector:
    """A language detector, based on py3langid.

    Args:
        codes: the languages that it may find, by the models' codes. One that py3langid does not know is returned only
            if no other language is possible.
    """

    def __init__(self, codes: Iterable[str]) -> None:
        self._codes = list(codes)
        known = set(identifier(None).labels)
        self._of: dict[str, list[str]] = {}  # py3langid's code -> the models' codes
        for code in self._codes:
            if main_language(code) in known:
                self._of.setdefault(main_language(code), []).append(code)

    def rank(self, text: str, among: Sequence[str] | None = None) -> list[tuple[str, float]]:
        """Return the languages that `text` may have, most likely first, each with its confidence from 0 to 100.

        If `among` is given, only its languages are returned. A text without letters, or in a language that py3langid
        does not know, gives all languages with confidence 0, in the models' order. If py3langid does not know one of
        the candidates, the text may be in none of the others. Their confidence is then the share among all languages
        that it knows, because one of few candidates, and certainly a single one, would always win.
        """
        wanted = [code for code in self._codes if among is None or code in among]
        names = {name: [code for code in codes if code in wanted] for name, codes in self._of.items()}
        names = {name: codes for name, codes in names.items() if codes}
        found: list[tuple[str, float]] = []
        if names and any(map(str.isalpha, text)):
            every = sum(map(len, names.values())) == len(wanted)
            ranked = identifier(tuple(sorted(names)) if every else None).rank(text[:MOST_CHARACTERS])
            found = [(code, round(100 * float(share), 1)) for name, share in ranked for code in names.get(name, ())]
        return found + [(code, 0.0) for code in wanted if code not in {code for code, _ in found}]

    def source(self, text: str, sources: Sequence[str], target: str) -> tuple[str, float]:
        """Return the language of `text`, which is to be translated into `target`, with its confidence.

        It is one of `sources`, the languages that can be translated into `target`. It is the target itself, whose text
        is not translated, only if the detector is at least half sure: never because it knows no other language, and
        never for a text that gives no evidence.
        """
        ranks = self.rank(text, [*sources, target])
        return next((code, share) for code, share in ranks if code != target or share >= _SURE)


def work_of(
    text: str, options: Options, markup: MarkupRules | None, *, lines: bool
) -> SentenceRequests[Result[AlignedText]]:
    """Yield the sentences of a text to translate; return the translation, for markup without sentences."""
    if markup is None:
        return (yield from aligned_text(text, options, lines=lines))
    marked = yield from (xml if markup.xml else html)(text, options, markup)
    return Result(AlignedText(marked.value, [], []), marked.notices)


Value = TypeVar("Value")

Split = Literal["lines", "sentences", "none"]
"""Split is where a sentence ends: also at line ends, only at sentence ends, or never."""

ALIASES = {"zh": "zh-Hans", "zt": "zh-Hant", "pb": "pt-BR"}
"""ALIASES maps codes that older programs send to the codes that replace them if a model has those."""

_SHORT = 2000
"""_SHORT is the number of characters up to which a text is processed on the event loop, faster than in a thread."""
_THREADS = 4  # for longer texts, and for language detection


class Translations:
    """Translation of texts by the models of a pool, for an event loop.

    Args:
        pool: the models.
        access: keys and limits of clients.
        limits: limits of requests.
    """

    def __init__(self, pool: ModelPool, access: Access, limits: LimitsConfig, protect: Sequence[str] = ()) -> None:
        self.pool, self.access, self.limits, self._protect = pool, access, limits, tuple(protect)
        self._detector = Detector(sorted({code for pair in pool.pairs for code in pair}))
        self._threads = ThreadPoolExecutor(_THREADS, "text")
        self.used: Counter[str] = Counter()
        """Characters translated since the start, by account; only the event loop counts."""

    def client(self, request: Request, dialect: Dialect, key: object, characters: int = 0) -> str:
        """Return the client, identified by the key in its dialect's header or in a field, or by its address.

        Raises Refused, in the dialect's words, if it has no access or exceeds a limit.
        """
        given = request.headers.get("authorization", "")
        if dialect.scheme and given.startswith(dialect.scheme):
            key = given.removeprefix(dialect.scheme)
        try:
            return self.access.client(key if isinstance(key, str) else None, _address(request), characters)
        except Refused as error:
            if dialect.denied is None or error.status not in (400, 403):
                raise
            raise Refused(*dialect.denied) from None

    def holder(self, request: Request) -> str:
        """Return the holder of an arriving request's slot, by the key in its headers or its address."""
        _, _, key = request.headers.get("authorization", "").partition(" ")
        return self.access.holder(key, _address(request))

    async def in_thread(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, run outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def detect(self, text: str) -> list[tuple[str, float]]:
        """Return the languages that a text may have, most likely first, with a confidence from 0 to 100.

        Only languages that can be translated are returned.
        """
        return await self.in_thread(lambda: self._detector.rank(text, list(self.pool.languages)))

    async def detect_sources(self, texts: Sequence[str], target: str) -> list[tuple[str, float]]:
        """Return the language of each text with its confidence: one that can be translated into `target`, or `target`.

        Raises Refused (400) if no model translates into it.
        """
        sources = [code for code, targets in self.pool.languages.items() if target in targets]
        if not sources:
            raise Refused(400, f"no model translates into {target}")
        return await self.in_thread(lambda: [self._detector.source(text, sources, target) for text in texts])

    async def languages(
        self, texts: Sequence[str], source: str, target: str
    ) -> tuple[list[str], str, list[dict[str, Any]] | None]:
        """Return the language of each text, that of the translations, and what was detected if `source` is `auto`.

        Raises Refused (400), with LibreTranslate's wording, which some programs look for, if a language is unknown or
        no model translates the pair.
        """
        pool, detected = self.pool, None
        target = self.code(target)
        if source == "auto":
            found = await self.detect_sources(texts, target)
            detected = [{"confidence": confidence, "language": code} for code, confidence in found]
            sources = [code for code, _ in found]
        else:
            sources = [self.code(source)] * len(texts)
        for code in set(sources) - {target}:
            if pool.route(code, target) is None:
                raise Refused(
                    400,
                    f"{pool.language_name(target)} ({target}) is not available as a target language from "
                    f"{pool.language_name(code)} ({code})",
                )
        return sources, target, detected

    def code(self, given: str) -> str:
        """Return a language's code as the models spell it. Raises Refused (400) if no model has it."""
        known = {code for codes in self.pool.pairs for code in codes}
        code = given if given in known else ALIASES.get(given, given)
        if code not in known:
            raise Refused(400, f"{given} is not supported")
        return code

    def characters(
        self, texts: Sequence[str], status: int = 413, said: str = "At most {most} {kind} in a request."
    ) -> int:
        """Return the number of characters in a request's texts.

        Raises Refused beyond the limits, with this status and the interface's wording, in which `{kind}`, `{asked}` and
        `{most}` are replaced.
        """
        counts = {"texts": len(texts), "characters": sum(map(len, texts))}
        for kind, asked in counts.items():
            if asked > (most := getattr(self.limits, kind)):
                raise Refused(status, said.format(kind=kind, asked=asked, most=most))
        return counts["characters"]

    def never_softens(self, route: Sequence[Model]) -> str:
        """Return why this route cannot search for soft terms; empty if it can."""
        if route and route[-1].origin.is_exported:
            return f"{route[-1].name} is an exported model, which cannot search for given terms"
        if route and route[-1].origin.has_shortlist():
            return f"{route[-1].name} has a shortlist, which may lack the terms"
        return ""

    def terms(self, entries: Sequence[Entry], sources: Collection[str], target: str) -> Terms | None:
        """Return the glossary of a request from any of these languages; `auto` is any available one.

        A term without a mode is soft, or hard if a model cannot search for it. Raises Refused (400) for a term with
        `mode: soft` in that case, and DataError as Terms does.
        """
        if not entries:
            return None
        codes = set(self.pool.languages) if "auto" in sources else set(sources)
        reasons = [self.never_softens(self.route(code, target)) for code in sorted(codes)]
        why = next(filter(None, reasons), "")
        if why and any(entry.mode == "soft" for entry in entries):
            raise Refused(400, f"{why}: terms of the `glossary` need `mode: hard`, or none")
        return Terms(Term(*entry[:2], entry.mode or ("hard" if why else "soft")) for entry in entries)

    def route(self, source: str, target: str) -> list[Model]:
        """Return the models that lead from one language to another; none if they are the same."""
        return [] if source == target else self.pool.route(source, target) or []

    async def translate(
        self,
        texts: Sequence[str],
        sources: Sequence[str],
        target: str,
        client: str,
        options: TranslateOptions = PLAIN,
        markup: MarkupRules | None = None,
        split: Split = "lines",
        model: Model | None = None,
    ) -> list[TextTranslation]:
        """Return the translation of each text; a text in the target language is returned unchanged.

        Args:
            texts: the texts.
            sources: the language of each.
            target: the language of the translations.
            client: the client that sent the request.
            options: the requested options; alternatives (`n_best`) are only for plain text.
            markup: rules for the texts' tags; None: plain text.
            split: whether a sentence also ends at the ends of `lines`, only where `sentences` end, or never.
            model: the model to use; None: the models of the languages.

        Either all sentences of a request are queued, or none. Raises QueueFull, DeadlineExceeded, ModelFailed,
        ConfigError and DataError. If the caller is cancelled, so are the sentences.
        """
        protection = self.protection(options.protect)
        # Hard terms, and text that patterns match, are put back by the alignment if a translation has lost them.
        hard = options.terms is not None and options.terms.has("hard")
        aligned = options.alignments or markup is not None or hard or protection is not None
        long = sum(map(len, texts)) > _SHORT
        asking = TranslationRequest(
            client,
            time.monotonic() + self.limits.seconds,
            replace(options, alignments=aligned),
            self.in_thread if long else _at_once,
        )
        routes = [self.route(source, target) if model is None else [model] for source in sources]
        found = [TextTranslation(route, text) for text, route in zip(texts, routes, strict=True)]
        pairs, lines = [], split == "lines"
        for text, code in zip(found, sources, strict=True):
            if text.route:
                cut = self.cut(code, text.route, options.terms, split=split != "none")
                pairs.append((text, replace(cut, again=not options.begun, protect=protection)))
        if options.begun:
            sentences = sum(sentence_count(text.source, cut, lines=lines) for text, cut in pairs)
            if sentences != 1:  # also if the second repeats the first, and is not requested
                raise DataError(f"a prefix needs a text of one sentence; this one has {sentences}")
        routed = [text for text, _ in pairs]
        works = [work_of(text.source, replace(cut, tally=text.tally), markup, lines=lines) for text, cut in pairs]
        for text, outcome in zip(routed, await asking.results(works, routed), strict=True):
            text.best = outcome.value
            text.notices.include(outcome.notices)
        # Markup has a single form: the second-best translations of two sentences may place the same tags differently.
        for rank in range(1, options.more + 1 if markup is None else 1):
            works = [work_of(text.source, cut, markup, lines=lines) for text, cut in pairs]
            for text, outcome in zip(routed, await asking.results(works, routed, rank), strict=True):
                other = outcome.value
                if other.text not in (text.best.text, *(each.text for each in text.others)):
                    text.others.append(other)
                    text.ranks.append(rank)
        self.used[self.access.account(client)] += sum(map(len, texts))
        return found

    def protection(self, patterns: Sequence[str] = ()) -> Protection | None:
        """Return the patterns of the configuration and of a request. Raises ConfigError as Protection does."""
        every = (*self._protect, *patterns)
        return Protection(every) if every else None

    def cut(
        self,
        source: str,
        route: Sequence[Model],
        terms: Terms | None = None,
        tally: Tally | None = None,
        *,
        split: bool = True,
    ) -> Options:
        """Return the settings for splitting texts in a language into sentences and reassembling them."""
        return Options(
            split=sentencex_splitter(source) if split else None,
            # Links of the second of two models do not point into the text.
            aligned=len(route) == 1 and route[0].engine.state.aligned is not False,
            terms=terms,
            tally=tally,
        )

    def close(self) -> None:
        """End the threads once they have finished their current work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def noticed(found: Iterable[TextTranslation]) -> dict[str, str]:
    """Return the header with the notices of texts, for an interface without a field for them."""
    return notice_headers(sum((text.notices for text in found), Counter[str]()))


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


async def _at_once(work: Callable[[], Value]) -> Value:
    return work()

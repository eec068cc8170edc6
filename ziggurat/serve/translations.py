"""Services behind every interface of a server: translations of texts, detection of languages, who may ask."""

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
from ziggurat.serve.text.glossary import Tally
from ziggurat.serve.text.markup import MarkupRules, html, xml
from ziggurat.serve.text.paragraphs import AlignedText, aligned_text, sentence_count
from ziggurat.serve.text.sentences import Options, Result, SentenceRequests
from ziggurat.serve.text.splitting import Protection, sentencex_splitter
from ziggurat.serve.translation_request import PLAIN, TextTranslation, TranslationRequest
from ziggurat.system.errors import DataError
from ziggurat.translate.options import Term, Terms, TranslateOptions

_SURE = 50.0  # per cent


class Detector:
    """A detector of languages, by py3langid.

    Args:
        codes: the languages that it may find, as the models call them. One that py3langid does not know is found only
            where no other is left.
    """

    def __init__(self, codes: Iterable[str]) -> None:
        self._codes = list(codes)
        known = set(identifier(None).labels)
        self._of: dict[str, list[str]] = {}  # code of py3langid -> those of the models
        for code in self._codes:
            if main_language(code) in known:
                self._of.setdefault(main_language(code), []).append(code)

    def rank(self, text: str, among: Sequence[str] | None = None) -> list[tuple[str, float]]:
        """Return the languages that `text` may have, the likeliest first, each with its confidence from 0 to 100.

        Only those of `among`, where it is given. A text without letters, or in none of the languages that py3langid
        knows, gives all languages with confidence 0, in the order of the models. Where py3langid does not know one of
        them, the text may be in none of the others: their confidence is then the share among all languages that it
        knows, since among few, and most of all one, something would always win.
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
        """Return the language that `text` has, which is to be translated into `target`, with its confidence.

        One of `sources`, the languages that lead there. The target itself, whose text is not translated, only where the
        detector is at least half sure of it: never because it knows no other, or of a text that tells nothing.
        """
        ranks = self.rank(text, [*sources, target])
        return next((code, share) for code, share in ranks if code != target or share >= _SURE)


def work_of(
    text: str, options: Options, markup: MarkupRules | None, *, lines: bool
) -> SentenceRequests[Result[AlignedText]]:
    """Return the work of translating a text; of markup the result has no sentences."""
    if markup is None:
        return (yield from aligned_text(text, options, lines=lines))
    marked = yield from (xml if markup.xml else html)(text, options, markup)
    return Result(AlignedText(marked.value, [], []), marked.notices)


Value = TypeVar("Value")

Split = Literal["lines", "sentences", "none"]
"""Split is where text ends a sentence: at the ends of lines too, only where sentences end, or never."""

ALIASES = {"zh": "zh-Hans", "zt": "zh-Hant", "pb": "pt-BR"}
"""Codes that older programs send, and those that they stand for where a model has these."""

_SHORT = 2000
"""Characters of a request that is cut and put together on the event loop: it takes less time than a thread's turn."""
_THREADS = 4  # for longer ones, and for the detection of languages


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
        """Characters that were translated since the start, by account; only the event loop counts."""

    def client(self, request: Request, dialect: Dialect, key: object, characters: int = 0) -> str:
        """Return who asks, by the key in the header of its dialect, the one of a field, or its address.

        Raises Refused where it may not, in the words of the dialect, or asks for too much.
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
        """Return whose place a request takes that is still coming, by the key in its headers or its address."""
        _, _, key = request.headers.get("authorization", "").partition(" ")
        return self.access.holder(key, _address(request))

    async def in_thread(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, which is done beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def detect(self, text: str) -> list[tuple[str, float]]:
        """Return the languages that a text may have, the likeliest first, with a confidence from 0 to 100.

        Only those that can be translated from.
        """
        return await self.in_thread(lambda: self._detector.rank(text, list(self.pool.languages)))

    async def detect_sources(self, texts: Sequence[str], target: str) -> list[tuple[str, float]]:
        """Return the language of each text, of those that lead to `target` and that one itself, with its confidence.

        Raises Refused (400) where no model translates into it.
        """
        sources = [code for code, targets in self.pool.languages.items() if target in targets]
        if not sources:
            raise Refused(400, f"no model translates into {target}")
        return await self.in_thread(lambda: [self._detector.source(text, sources, target) for text in texts])

    async def languages(
        self, texts: Sequence[str], source: str, target: str
    ) -> tuple[list[str], str, list[dict[str, Any]] | None]:
        """Return the language of each text, that of the translations, and what was detected where `source` is `auto`.

        Raises Refused (400), in the words of LibreTranslate, which some programs look for: an unknown language, or a
        pair that no model translates.
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
        """Return the code of a language as the models call it. Raises Refused (400) for one that no model has."""
        known = {code for codes in self.pool.pairs for code in codes}
        code = given if given in known else ALIASES.get(given, given)
        if code not in known:
            raise Refused(400, f"{given} is not supported")
        return code

    def characters(
        self, texts: Sequence[str], status: int = 413, said: str = "At most {most} {kind} in a request."
    ) -> int:
        """Return the characters of a request's texts.

        Raises Refused beyond the limits, with this status and in the words of the interface, in which `{kind}`,
        `{asked}` and `{most}` are filled in.
        """
        counts = {"texts": len(texts), "characters": sum(map(len, texts))}
        for kind, asked in counts.items():
            if asked > (most := getattr(self.limits, kind)):
                raise Refused(status, said.format(kind=kind, asked=asked, most=most))
        return counts["characters"]

    def never_softens(self, route: Sequence[Model]) -> str:
        """Return why soft terms cannot be searched for on this way; empty: they can."""
        if route and route[-1].origin.is_exported:
            return f"{route[-1].name} is an exported model, which cannot be told what to search for"
        if route and route[-1].origin.has_shortlist():
            return f"{route[-1].name} has a shortlist, which may lack what is to be searched for"
        return ""

    def terms(self, entries: Sequence[Entry], sources: Collection[str], target: str) -> Terms | None:
        """Return the glossary of a request from any of these languages; `auto` is any that there is.

        A term without a mode is soft, and hard where a model cannot be told to search for it. Raises Refused (400) for
        a term that asks to be soft there; DataError as Terms does.
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
        """Return the models that lead from one language to another; none where these are the same."""
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
        """Return the translation of each text; a text in the target language comes back as it is.

        Args:
            texts: the texts.
            sources: the language of each.
            target: that of the translations.
            client: who asks.
            options: what is asked of the translations; its further ones (`n_best`) are of plain text alone.
            markup: the rules of the texts' tags; None: plain text.
            split: whether text ends a sentence at the ends of `lines`, too, only where `sentences` end, or never.
            model: by which all are translated; None: the one of their languages.

        All sentences of a request are let into the queues, or none. Raises QueueFull, DeadlineExceeded, ModelFailed,
        ConfigError and DataError; where the caller is cancelled, so are the sentences.
        """
        # Hard terms, and what patterns match, are put back by the alignment where a translation has lost them.
        aligned = markup is not None or (options.terms is not None and options.terms.has("hard"))
        protection = self.protection(options.protect)
        aligned = aligned or protection is not None
        long = sum(map(len, texts)) > _SHORT
        asking = TranslationRequest(
            client,
            time.monotonic() + self.limits.seconds,
            replace(options, alignments=options.alignments or aligned),
            self.in_thread if long else _at_once,
        )
        routes = [self.route(source, target) if model is None else [model] for source in sources]
        found = [TextTranslation(route, text) for text, route in zip(texts, routes, strict=True)]
        led = [(text, code) for text, code in zip(found, sources, strict=True) if text.route]
        cuts = [self.cut(code, text.route, options.terms, split=split != "none") for text, code in led]
        cuts = [replace(cut, again=not options.begun, protect=protection) for cut in cuts]
        routed, lines = [text for text, _ in led], split == "lines"
        if options.begun:
            sentences = sum(
                sentence_count(text.source, cut, lines=lines) for text, cut in zip(routed, cuts, strict=True)
            )
            if sentences != 1:  # also where the second says the same as the first, and is not asked for
                raise DataError(f"a prefix goes with a text of one sentence; this one has {sentences}")
        pairs = list(zip(routed, cuts, strict=True))
        works = [work_of(text.source, replace(cut, tally=text.tally), markup, lines=lines) for text, cut in pairs]
        for text, outcome in zip(routed, await asking.results(works, routed), strict=True):
            text.best = outcome.value
            text.notices.include(outcome.notices)
        # Markup has one form only: the second best of two sentences may place the same tags in other ways.
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
        """Return the patterns of the configuration and those of a request. Raises ConfigError as Protection does."""
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
        """Return how texts in a language are cut into sentences and put together again."""
        return Options(
            split=sentencex_splitter(source) if split else None,
            # Links of the second of two models do not lead to the text.
            aligned=len(route) == 1 and route[0].engine.state.aligned is not False,
            terms=terms,
            tally=tally,
        )

    def close(self) -> None:
        """End the threads once they have done what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def noticed(found: Iterable[TextTranslation]) -> dict[str, str]:
    """Return the header with the notices of texts, for an interface that has no field for them."""
    return notice_headers(sum((text.notices for text in found), Counter[str]()))


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


async def _at_once(work: Callable[[], Value]) -> Value:
    return work()

"""One request for translations on its way through the models: room in the queues, requested sentences, and results.

Everything here runs on the event loop, except the works themselves (splitting and reassembling text), which the
caller's `run` executes: long ones in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.pool import Model
from ziggurat.serve.queue import DeadlineExceeded, FairQueue, QueuedLine, QueueFull
from ziggurat.serve.text.alignment import rendered
from ziggurat.serve.text.glossary import Run, Tally, constrained
from ziggurat.serve.text.paragraphs import AlignedText
from ziggurat.serve.text.sentences import SentenceRequests, SentenceTranslation
from ziggurat.system.errors import DataError
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Hypothesis, Translation
from ziggurat.translate.terms import Term

Value = TypeVar("Value")

PLAIN = TranslateOptions(n_best=1)
"""PLAIN requests the best translation and nothing else."""
_CHUNK = 32
"""_CHUNK is how many sentences of a document enter a queue together. Two such groups may wait at a time, so that no
document fills the queue."""


@dataclass(frozen=True)
class _Slim(Translation):
    """A translation without its attention weights, which would fill the memory for all sentences of a document."""

    answer: SentenceTranslation = field(default_factory=lambda: SentenceTranslation(""))


def _slim(translation: Translation) -> Translation:
    best = replace(translation.hypotheses[0], alignment=None)
    return _Slim(translation.source, [best], translation.parts, rendered(translation))


def ranked(translation: Translation, rank: int) -> Translation:
    """Return a translation with a single hypothesis: that of a rank, from 0, or the last one if there are fewer."""
    chosen: Hypothesis = translation.hypotheses[min(rank, len(translation.hypotheses) - 1)]
    return replace(translation, hypotheses=[chosen])


class TextTranslation:
    """A text on its way through the models of a route, and in the end its translations.

    Attributes:
        source: the text; empty for a document.
        route: the models, at most two, one after the other; none: it is already in the target language.
        best: the translation; for markup, without sentences.
        others: alternative translations, all different from the best one and from each other.
        ranks: for each of `others`, the rank, from 1, of the sentence translations that it consists of.
        tally: what became of the glossary.
        notices: counts, by kind, of what needed special handling (ziggurat.serve.notices).
        found: the translation of each sentence; through a third language, by its text in the source language. From them
            a text can be assembled again with the second-best ones.
        dropped: harmful soft terms, by sentence.
        new: sentences that its work requests and that are not translated yet.
        ended: whether the work has its `result`.
    """

    def __init__(self, route: Sequence[Model], source: str = "") -> None:
        self.source, self.route = source, route
        self.best = AlignedText(source, [], [])
        self.others: list[AlignedText] = []
        self.ranks: list[int] = []
        self.tally = Tally()
        self.notices = TextNotices()
        self.found: dict[str, Translation] = {}
        self.dropped: dict[str, list[str]] = {}
        self.new: list[str] = []
        self.ended, self.result = False, None
        self._sentences: list[str] = []

    def begin(self, work: SentenceRequests[Any], rank: int) -> None:
        """Let a work request its first sentences; it gets the translations of this rank, from 0."""
        self.ended, self._work, self._rank = False, work, rank
        self._advance(lambda: next(work))

    def resume(self) -> None:
        """Give the work its translations, and let it request more."""
        answers = self._rendered()
        self._advance(lambda: self._work.send(answers))

    def _rendered(self) -> list[SentenceTranslation]:
        answers = []
        for sentence in self._sentences:
            found = self.found[sentence]
            answers.append(found.answer if isinstance(found, _Slim) else rendered(ranked(found, self._rank)))
        # Links of the last model point into the intermediate language, not into the text.
        return answers if len(self.route) == 1 else [SentenceTranslation(answer.text) for answer in answers]

    def _advance(self, step: Callable[[], list[str]]) -> None:
        try:
            self._sentences = step()
        except StopIteration as ended:
            self.ended, self.result, self.new = True, ended.value, []
            return
        self.new = [each for each in dict.fromkeys(self._sentences) if each not in self.found]


class PendingLines:
    """Lines in the queue of one model, and their future translations."""

    def __init__(
        self,
        model: Model,
        texts: Sequence[str],
        request: TranslationRequest,
        options: TranslateOptions,
        constraints: Sequence[Sequence[str]] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.model, self._deadline = model, request.deadline
        self._futures: list[asyncio.Future[Translation]] = [loop.create_future() for _ in texts]

        def deliver(future: asyncio.Future[Translation], result: Translation | Exception) -> None:
            if future.done():  # the request was cancelled in the meantime
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def done(future: asyncio.Future[Translation], result: Translation | Exception) -> None:
            loop.call_soon_threadsafe(deliver, future, result)

        self.lines = [
            QueuedLine(text, request.client, options, self._deadline, partial(done, future), tuple(phrases))
            for text, future, phrases in zip(texts, self._futures, constraints or [()] * len(texts), strict=True)
        ]
        model.engine.queue.put(self.lines)

    async def results(self) -> list[Translation]:
        """Return the translations. Raises DeadlineExceeded, ModelFailed."""
        try:
            # The engine checks deadlines between two steps; a model that takes minutes to open has no steps.
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                return list(await asyncio.gather(*self._futures))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Remove unfinished lines from the queue and the search."""
        # A caller that is cancelled while awaiting them has cancelled all of them.
        if any(not future.done() or future.cancelled() for future in self._futures):
            self.model.engine.queue.remove(self.lines)
        for future in self._futures:
            if future.done() and not future.cancelled():
                future.exception()  # retrieved, because one reported failure is enough


class TranslationRequest:
    """One request.

    Args:
        client: the client, which takes turns with others: the name of a key, or an address.
        deadline: `time.monotonic()` after which no one waits for the response.
        options: the requested options; soft terms among them are searched for here.
        run: calls a function, in a thread if it may be slow.
        progress: for a document; called with the finished and the known sentences when these numbers change. If a queue
            is full, a document waits for room, in small groups, instead of being refused.
    """

    def __init__(
        self,
        client: str,
        deadline: float,
        options: TranslateOptions,
        run: Run,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self.client, self.deadline = client, deadline
        self._options = replace(options, terms=None)
        terms = options.terms
        # A search for terms would not respect words that must differ.
        self._soft = terms if terms is not None and terms.has("soft") and not options.next_words else None
        self._run, self._progress = run, progress
        self._let_in = False
        self._under_way: set[PendingLines] = set()
        self._done = self._total = 0

    async def results(
        self, works: Sequence[SentenceRequests[Value]], texts: Sequence[TextTranslation], rank: int = 0
    ) -> list[Value]:
        """Return the results of works, each with the translations of its route.

        A request is admitted as a whole: if one of the queues has no room for its sentences, none of them is queued.
        Raises QueueFull, DeadlineExceeded, ModelFailed, and errors of the works. If the caller is cancelled, so are the
        sentences.
        """
        tasks: list[asyncio.Future[Value]] = []
        try:
            for text, work in zip(texts, works, strict=True):
                await self._run(partial(text.begin, work, rank))
            # No other request can intervene between here and the last line added, because nothing is awaited.
            started = [None] * len(texts) if self._progress is not None else self._enter(texts)
            tasks = [asyncio.ensure_future(self._finished(*pair)) for pair in zip(texts, started, strict=True)]
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # one that fails ends the others
                task.cancel()
            for lines in self._under_way:
                lines.give_up()
            for work in works:
                with contextlib.suppress(ValueError):  # still running in a worker thread, which will close it
                    work.close()

    def _enter(self, texts: Sequence[TextTranslation]) -> list[PendingLines | None]:
        """Put the first sentences of all texts into the queues of their models."""
        if not self._let_in:
            if self._options.begun and not any(text.new for text in texts):
                raise DataError("a prefix needs a text of one sentence; this one has none")
            room: Counter[FairQueue] = Counter()
            for text in texts:
                room[text.route[0].engine.queue] += len(text.new)
            for queue, lines in (+room).items():
                queue.check(self.client, lines)
            self._let_in = True
        return [self._put(text.route[0], text.new, self._of_model(text, 0)) if text.new else None for text in texts]

    def _of_model(self, text: TextTranslation, number: int) -> TranslateOptions:
        """Return the options for a model on a text's route: only the last model must give more than a translation."""
        return self._options if number == len(text.route) - 1 else PLAIN

    def _put(
        self,
        model: Model,
        texts: Sequence[str],
        options: TranslateOptions,
        phrases: Sequence[Sequence[str]] | None = None,
    ) -> PendingLines:
        lines = PendingLines(model, texts, self, options, phrases)
        self._under_way.add(lines)
        return lines

    async def _finished(self, text: TextTranslation, started: PendingLines | None) -> Any:
        """Request the sentences of a text until its work has its result."""
        while not text.ended:
            if text.new:
                self._total += len(text.new)
                self._tell()
                found = await self._translated(text, started)
                text.found |= dict(zip(text.new, found, strict=True))
                started = None
            await self._run(text.resume)
        return text.result

    async def _translated(self, text: TextTranslation, started: PendingLines | None) -> list[Translation]:
        """Return the translations of a text's new sentences."""
        said, found = list(text.new), list[Translation]()
        for number, model in enumerate(text.route):
            if number:
                said = [translation.text for translation in found]
            if started is not None and not number:
                found = await self._results(started, text)
            else:  # a request with a prefix has one sentence, so a repeated one starts in the same way
                found = await self._through(model, said, self._of_model(text, number), of=text)
        return found if self._soft is None else await self._with_soft_terms(text, said, found)

    async def _with_soft_terms(
        self, text: TextTranslation, said: Sequence[str], free: Sequence[Translation]
    ) -> list[Translation]:
        """Return the translations; those that lack soft terms are searched again with them."""
        glossary, options = self._soft, replace(self._options, constrained=True)
        assert glossary is not None

        def found_terms() -> list[list[Term]]:
            every = (glossary.found(sentence) for sentence in text.new)
            return [[each.term for each in own if not each.term.hard] for own in every]

        async def search(places: Sequence[int], phrases: Sequence[Sequence[str]]) -> list[Translation]:
            return await self._through(text.route[-1], [said[n] for n in places], options, phrases)

        found, dropped = await constrained(free, await self._run(found_terms), search, self._run)
        text.dropped |= {text.new[place]: phrases for place, phrases in dropped.items()}
        return found

    async def _through(
        self,
        model: Model,
        texts: Sequence[str],
        options: TranslateOptions,
        phrases: Sequence[Sequence[str]] | None = None,
        *,
        of: TextTranslation | None = None,
    ) -> list[Translation]:
        """Return the translations of `texts` by one model, each with its phrases; `of` as in `_results`."""
        if self._progress is None:
            return await self._results(self._put(model, texts, options, phrases), of)
        two = asyncio.Semaphore(2)

        async def group(own: slice) -> list[Translation]:
            async with two:
                await self._room(model.engine.queue, len(texts[own]))
                lines = self._put(model, texts[own], options, None if phrases is None else phrases[own])
                found = await self._results(lines, of)
                self._under_way.discard(lines)
                slim: list[Translation] = await self._run(lambda: list(map(_slim, found)))
                return slim

        groups = [slice(begin, begin + _CHUNK) for begin in range(0, len(texts), _CHUNK)]
        tasks = [asyncio.ensure_future(group(own)) for own in groups]
        try:
            return [translation for found in await asyncio.gather(*tasks) for translation in found]
        finally:
            for task in tasks:
                task.cancel()

    async def _room(self, queue: FairQueue, lines: int) -> None:
        """Wait until a queue has room for `lines` lines. Raises DeadlineExceeded."""
        while True:
            try:
                return queue.check(self.client, lines)
            except QueueFull as full:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded("the deadline passed") from None
                await asyncio.sleep(min(full.seconds, left, 5.0))

    async def _results(self, lines: PendingLines, of: TextTranslation | None) -> list[Translation]:
        """Return the translations of lines, counted as done and with notices for the text that they belong to (`of`).

        None: they were already searched for, and counted.
        """
        found = await lines.results()
        if of is not None:
            for line in lines.lines:
                of.notices.update(line.notices)
            if lines.model is of.route[-1]:
                self._done += len(found)
                self._tell()
        return found

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)

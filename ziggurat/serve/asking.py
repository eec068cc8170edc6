"""The sentences of one request on their way through the models: who asks, room in the queues, what comes back.

Everything here runs on the event loop, but for the works themselves (cutting text, putting it together), which are run
by whatever the request is given for that: long ones in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ziggurat.serve.pool import Asked, Lines, Model
from ziggurat.serve.queue import Late, QueueFull, SearchOptions
from ziggurat.serve.soft_terms import constrained
from ziggurat.serve.text.alignment import rendered
from ziggurat.serve.text.glossary import Term
from ziggurat.serve.text.sentences import Rendered, Sentence, Work
from ziggurat.system.errors import DataError
from ziggurat.translate.results import Hypothesis, Translation

Result = TypeVar("Result")

_CHUNK = 32
"""Sentences of a document that enter a queue together; two such groups at a time, so that no document fills it."""


class Recorded:
    """The translations of sentences by the models of a route, so that a text can be made again of the second best.

    Attributes:
        route: the models, at most two, one after the other.
        found: the translation of each sentence; through a third language by its text in the source language.
        dropped: soft terms that did harm, by sentence.
    """

    def __init__(self, route: Sequence[Model]) -> None:
        self.route = route
        self.found: dict[Sentence, Translation] = {}
        self.dropped: dict[Sentence, list[str]] = {}

    def rendered(self, sentences: Sequence[Sentence], rank: int) -> list[Rendered]:
        """Return the translation of that rank of each sentence, from 0; the last one where there are fewer."""
        answers = []
        for sentence in sentences:
            found = self.found[sentence]
            answers.append(found.answer if isinstance(found, _Slim) else rendered(ranked(found, rank)))
        # Links of the last model lead to the language between, not to the text.
        return answers if len(self.route) == 1 else [Rendered(answer.text) for answer in answers]


@dataclass(frozen=True)
class _Slim(Translation):
    """A translation without its weights of attention, which for all sentences of a document would fill the memory."""

    answer: Rendered = field(default_factory=lambda: Rendered(""))


def _slim(translation: Translation) -> Translation:
    best = replace(translation.hypotheses[0], alignment=None)
    return _Slim(translation.source, [best], translation.parts, rendered(translation))


def ranked(translation: Translation, rank: int) -> Translation:
    """Return a translation with one hypothesis: that of a rank, from 0, or the last one where there are fewer."""
    chosen: Hypothesis = translation.hypotheses[min(rank, len(translation.hypotheses) - 1)]
    return replace(translation, hypotheses=[chosen])


class Asking:
    """One request.

    Args:
        asked: who asks, and how.
        run: calls a function, in a thread where it may take long.
        progress: called with the sentences that are done and those that are known of, when these change.
    """

    def __init__(
        self,
        asked: Asked,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self.asked = asked
        self._run, self._progress = run, progress
        self._admitted = False
        self._under_way: set[Lines] = set()
        self._done = self._total = 0

    async def results(self, works: Sequence[Work[Result]], recorded: Sequence[Recorded], rank: int = 0) -> list[Result]:
        """Return the results of works, each with the translations of its own route.

        A request is let in as a whole: where one of the queues has no room for its sentences, none of them waits.
        Raises QueueFull, Late, ModelFailed, and errors of the works; where the caller is cancelled, so are the
        sentences.
        """
        parts = [_Part(work, each, rank) for work, each in zip(works, recorded, strict=True)]
        tasks: list[asyncio.Future[Result]] = []
        try:
            for part in parts:
                await self._run(part.begin)
            # No other request comes between here and the last line that is put: nothing waits for anything.
            started = self._enter(parts)
            tasks = [asyncio.ensure_future(self._finished(*pair)) for pair in zip(parts, started, strict=True)]
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # one that fails ends the others
                task.cancel()
            for lines in self._under_way:
                lines.give_up()
            for part in parts:
                part.close()

    def _enter(self, parts: Sequence[_Part[Result]]) -> list[Lines | None]:
        """Put the first sentences of all parts into the queues of their models."""
        if self.asked.patient:
            return [None] * len(parts)
        if not self._admitted:
            sentences = sum(len(part.new) for part in parts)
            if (self.asked.prefix or self.asked.options.next_words) and sentences != 1:
                raise DataError("a prefix goes with a text of one sentence; this one has none, or several")
            room: Counter[str] = Counter()
            models = {part.recorded.route[0].name: part.recorded.route[0] for part in parts if part.new}
            for part in parts:
                room[part.recorded.route[0].name] += len(part.new)
            for name, model in models.items():
                model.engine.queue.check(self.asked.client, room[name])
            self._admitted = True
        return [self._first(part) if part.new else None for part in parts]

    def _first(self, part: _Part[Result]) -> Lines:
        route, texts = part.recorded.route, [sentence.text for sentence in part.new]
        options = self.asked.options if len(route) == 1 else SearchOptions()
        return self._put(route[0], texts, options, prefix=self.asked.prefix if len(route) == 1 else "")

    def _put(
        self,
        model: Model,
        texts: Sequence[str],
        options: SearchOptions,
        constraints: Sequence[Sequence[str]] | None = None,
        prefix: str = "",
        *,
        admitted: bool = True,
    ) -> Lines:
        lines = Lines(model, texts, replace(self.asked, options=options), constraints, prefix, admitted=admitted)
        self._under_way.add(lines)
        return lines

    async def _finished(self, part: _Part[Result], started: Lines | None) -> Result:
        """Ask for the sentences of a part until it has its result."""
        while not part.ended:
            if part.new:
                self._total += len(part.new)
                self._progress(self._done, self._total)
                found = await self._translated(part, started)
                part.recorded.found |= dict(zip(part.new, found, strict=True))
                started = None
            await self._run(part.go_on)
        return part.result

    async def _translated(self, part: _Part[Result], started: Lines | None) -> list[Translation]:
        """Return the translations of a part's new sentences."""
        route, asked = part.recorded.route, self.asked
        texts = [sentence.text for sentence in part.new]
        for number, model in enumerate(route):
            last = number == len(route) - 1
            options = asked.options if last else SearchOptions()
            found = await (self._through(model, texts, options, counted=last) if started is None else started.results())
            if started is not None and last:
                self._count(len(texts))
            started = None
            if not last:
                texts = [translation.text for translation in found]
        if asked.terms is not None:
            found = await self._with_soft_terms(part, texts, found)
        return found

    async def _with_soft_terms(
        self, part: _Part[Result], texts: Sequence[str], free: Sequence[Translation]
    ) -> list[Translation]:
        """Return the translations, those that lack soft terms searched for again with them."""
        glossary = self.asked.terms
        assert glossary is not None
        model, options = part.recorded.route[-1], replace(self.asked.options, constrained=True)

        def found_terms() -> list[list[Term]]:
            every = (glossary.found(sentence.text) for sentence in part.new)
            return [[each.term for each in own if not each.term.hard] for own in every]

        async def search(places: Sequence[int], phrases: Sequence[Sequence[str]]) -> list[Translation]:
            return await self._through(model, [texts[place] for place in places], options, phrases, counted=False)

        found, dropped = await constrained(free, await self._run(found_terms), search, self._run)
        part.recorded.dropped |= {part.new[place]: phrases for place, phrases in dropped.items()}
        return found

    async def _through(
        self,
        model: Model,
        texts: Sequence[str],
        options: SearchOptions,
        phrases: Sequence[Sequence[str]] | None = None,
        *,
        counted: bool,
    ) -> list[Translation]:
        """Return the translations of `texts` by one model, each with its phrases."""
        if not self.asked.patient:
            prefix = self.asked.prefix if phrases is not None else ""
            found = await self._put(model, texts, options, phrases, prefix).results()
            self._count(len(texts) if counted else 0)
            return found
        places = [range(begin, min(begin + _CHUNK, len(texts))) for begin in range(0, len(texts), _CHUNK)]
        two = asyncio.Semaphore(2)

        async def group(own: range) -> list[Translation]:
            few, with_them = [texts[n] for n in own], None if phrases is None else [phrases[n] for n in own]
            async with two:
                found = await self._patiently(model, few, options, with_them)
                self._count(len(few) if counted else 0)
                return found

        tasks = [asyncio.ensure_future(group(own)) for own in places]
        try:
            return [translation for found in await asyncio.gather(*tasks) for translation in found]
        finally:
            for task in tasks:
                task.cancel()

    async def _patiently(
        self, model: Model, texts: Sequence[str], options: SearchOptions, phrases: Sequence[Sequence[str]] | None
    ) -> list[Translation]:
        """Return the translations of a few sentences, once the queue has room for them."""
        while True:
            try:
                lines = self._put(model, texts, options, phrases, admitted=False)
                break
            except QueueFull as full:
                left = self.asked.deadline - time.monotonic()
                if left <= 0:
                    raise Late("the deadline passed") from None
                await asyncio.sleep(min(full.seconds, left, 5.0))
        found = await lines.results()
        self._under_way.discard(lines)
        slim: list[Translation] = await self._run(lambda: list(map(_slim, found)))
        return slim

    def _count(self, done: int) -> None:
        self._done += done
        self._progress(self._done, self._total)


class _Part(Generic[Result]):
    """A work with the translations of its route: what it asks for, and its result in the end."""

    def __init__(self, work: Work[Result], recorded: Recorded, rank: int) -> None:
        self.recorded, self.ended = recorded, False
        self.new: list[Sentence] = []
        """Sentences that it asks for and that are not translated yet."""
        self._work, self._rank = work, rank
        self._sentences: list[Sentence] = []

    def begin(self) -> None:
        """Let the work ask for its first sentences."""
        self._advance(lambda: next(self._work))

    def go_on(self) -> None:
        """Give the work its translations, and let it ask for more."""
        answers = self.recorded.rendered(self._sentences, self._rank)
        self._advance(lambda: self._work.send(answers))

    def close(self) -> None:
        """Give the work up."""
        with contextlib.suppress(ValueError):  # a thread is at it: it ends with the thread
            self._work.close()

    def _advance(self, step: Callable[[], list[Sentence]]) -> None:
        try:
            self._sentences = step()
        except StopIteration as ended:
            self.result: Result = ended.value
            self.ended, self.new = True, []
            return
        self.new = [each for each in dict.fromkeys(self._sentences) if each not in self.recorded.found]

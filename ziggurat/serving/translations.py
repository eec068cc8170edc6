"""What every interface of a server can ask for: translations of texts, the language of a text, who may ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from ziggurat.decoding.results import Hypothesis, Translation
from ziggurat.serving.access import Access
from ziggurat.serving.config import LimitsConfig
from ziggurat.serving.detection import Detector
from ziggurat.serving.pool import Model, ModelPool
from ziggurat.serving.queue import Job, Late, Options
from ziggurat.serving.requests import Refused
from ziggurat.text.alignment import rendered
from ziggurat.text.markup import Rules
from ziggurat.text.markup import html as html_text
from ziggurat.text.paragraphs import plain_text
from ziggurat.text.sentences import Options as TextOptions
from ziggurat.text.splitting import sentencex_splitter
from ziggurat.text.work import Outcome, Rendered, Result, Sentence, Work

__all__ = ["Asked", "Translations"]


@dataclass(frozen=True)
class Asked:
    """Who asks, and how.

    Attributes:
        client: takes turns with others: the name of a key, or an address.
        deadline: `time.monotonic()` after which nobody waits for the answer any more.
        options: of the translations.
        constraints: phrases that the translation of each sentence must contain.
    """

    client: str
    deadline: float
    options: Options = field(default_factory=Options)
    constraints: tuple[str, ...] = ()


class _Recorded:
    """The translations of a request's sentences, so that a work can be done again with the second best of each."""

    def __init__(self) -> None:
        self.found: dict[Sentence, Translation] = {}

    def rendered(self, sentences: Sequence[Sentence], rank: int) -> list[Rendered]:
        """Return the translation of that rank of each sentence, from 0; the last one where there are fewer."""
        return [_of_rank(self.found[sentence], rank) for sentence in sentences]


def _of_rank(translation: Translation, rank: int) -> Rendered:
    if not rank:
        return rendered(translation)
    chosen: Hypothesis = translation.hypotheses[min(rank, len(translation.hypotheses) - 1)]
    return rendered(Translation(translation.source, [chosen], translation.parts))


class Translations:
    """Translation of texts by the models of a pool, for an event loop.

    Args:
        pool: the models.
        access: keys and limits of clients.
        limits: limits of requests.
    """

    def __init__(self, pool: ModelPool, access: Access, limits: LimitsConfig) -> None:
        self.pool, self.access, self.limits = pool, access, limits
        self._languages = pool.languages
        self._detector = Detector(sorted({code for pair in pool.pairs for code in pair}))

    def client(self, request: Request, key: object, requests: int, characters: int) -> str:
        """Return who asks, by key or address. Raises Refused where it may not, or asks for too much."""
        address = request.client.host if request.client else "unknown"
        return self.access.client(key if isinstance(key, str) else None, address, requests, characters)

    def detect(self, text: str, target: str | None = None) -> list[tuple[str, float]]:
        """Return the languages that `text` may have, the likeliest first, with a confidence from 0 to 100.

        Only those that can be translated from; where `target` is given, those that can be translated into it, and it.
        Raises Refused (400) where no model translates into it.
        """
        among = list(self._languages)
        if target is not None:
            among = [code for code, targets in self._languages.items() if target in targets]
            if not among:
                raise Refused(400, f"no model translates into {target}")
            among.append(target)
        return self._detector.rank(text, among)

    async def translate(
        self,
        texts: Sequence[str],
        sources: Sequence[str],
        target: str,
        client: str,
        *,
        markup: Rules | None = None,
        more: int = 0,
    ) -> list[list[str]]:
        """Return for each text its translation, followed by up to `more` others; `markup` where the texts have tags.

        A text in the target language comes back as it is. Raises QueueFull, Late and ModelFailed; where the caller is
        cancelled, so are the sentences.
        """
        asked = Asked(
            client, time.monotonic() + self.limits.seconds, Options(n_best=more + 1, alignments=markup is not None)
        )
        tasks = [
            self._text(text, source, target, asked, markup, more) for text, source in zip(texts, sources, strict=True)
        ]
        running = [asyncio.ensure_future(task) for task in tasks]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for task in running:  # one that fails ends the others
                task.cancel()

    async def _text(
        self, text: str, source: str, target: str, asked: Asked, markup: Rules | None, more: int
    ) -> list[str]:
        route = [] if source == target else self.pool.route(source, target)
        if not route:
            return [text]
        options, recorded = TextOptions(split=sentencex_splitter(source)), _Recorded()
        make = partial(plain_text, text, options) if markup is None else partial(html_text, text, options, markup)
        found = [(await self._perform(make(), route, asked, recorded)).value]
        # Markup has one form only: the second best of two sentences may place the same tags in other ways.
        for rank in range(1, more + 1 if markup is None else 1):
            other = await self._again(make(), route, asked, recorded, rank)
            if other not in found:
                found.append(other)
        return found

    async def _perform(
        self, work: Work[Result], route: Sequence[Model], asked: Asked, recorded: _Recorded, rank: int = 0
    ) -> Result:
        """Return the result of a work, whose sentences are translated by the models of `route` one after the other."""
        try:
            sentences = next(work)
            while True:
                new = [sentence for sentence in dict.fromkeys(sentences) if sentence not in recorded.found]
                recorded.found |= dict(zip(new, await self._translated(new, route, asked), strict=True))
                answers = recorded.rendered(sentences, rank)
                if len(route) > 1:  # links of the last model lead to the language between, not to the text
                    answers = [Rendered(each.text) for each in answers]
                sentences = work.send(answers)
        except StopIteration as ended:
            result: Result = ended.value
            return result
        finally:
            work.close()

    async def _again(
        self, work: Work[Outcome[str]], route: Sequence[Model], asked: Asked, recorded: _Recorded, rank: int
    ) -> str:
        return (await self._perform(work, route, asked, recorded, rank)).value

    async def _translated(
        self, sentences: Sequence[Sentence], route: Sequence[Model], asked: Asked
    ) -> list[Translation]:
        texts = [sentence.text for sentence in sentences]
        found: list[Translation] = []
        for model in route[:-1]:
            found = await self._through(model, texts, Asked(asked.client, asked.deadline))
            texts = [translation.text for translation in found]
        return await self._through(route[-1], texts, asked)

    async def _through(self, model: Model, texts: Sequence[str], asked: Asked) -> list[Translation]:
        """Return the translations of `texts` by one model, once they have had their turn in its queue."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Translation]] = [loop.create_future() for _ in texts]

        def deliver(future: asyncio.Future[Translation], result: Translation | Exception) -> None:
            if future.done():  # the request was cancelled meanwhile
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def done(future: asyncio.Future[Translation], result: Translation | Exception) -> None:
            loop.call_soon_threadsafe(deliver, future, result)

        jobs = [
            Job(text, asked.client, asked.options, asked.deadline, partial(done, future), asked.constraints)
            for text, future in zip(texts, futures, strict=True)
        ]
        model.engine.queue.put(jobs)
        try:
            # The engine looks at deadlines between two steps; a model that takes minutes to open has none.
            async with asyncio.timeout(max(0.0, asked.deadline - time.monotonic())):
                return list(await asyncio.gather(*futures))
        except TimeoutError:
            raise Late("the deadline passed") from None
        finally:
            for job in jobs:  # what is done does not mind
                job.cancel()
            for future in futures:
                if future.done() and not future.cancelled():
                    future.exception()  # looked at: one failure is enough to tell

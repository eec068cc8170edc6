"""Lines of a request in the queue of one model, awaited on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ziggurat.serve.pool import Model
from ziggurat.serve.queue import Late, QueuedLine, SearchOptions
from ziggurat.serve.text.glossary import Terms
from ziggurat.translate.results import Translation


@dataclass(frozen=True)
class Asked:
    """Who asks, and how.

    Attributes:
        client: takes turns with others: the name of a key, or an address.
        deadline: `time.monotonic()` after which nobody waits for the answer any more.
        options: of the translations.
        prefix: what the translation of the first sentence must begin with.
        terms: a glossary, whose soft terms are searched for.
        patient: whether to wait for room in a full queue, in small groups, instead of being refused.
    """

    client: str
    deadline: float
    options: SearchOptions = field(default_factory=SearchOptions)
    prefix: str = ""
    terms: Terms | None = None
    patient: bool = False


class Lines:
    """Lines in the queue of one model, and their translations to come.

    Raises QueueFull unless they are `admitted`.
    """

    def __init__(
        self,
        model: Model,
        texts: Sequence[str],
        asked: Asked,
        constraints: Sequence[Sequence[str]] | None,
        prefix: str,
        *,
        admitted: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._queue, self._deadline = model.engine.queue, asked.deadline
        self._futures: list[asyncio.Future[Translation]] = [loop.create_future() for _ in texts]

        def deliver(future: asyncio.Future[Translation], result: Translation | Exception) -> None:
            if future.done():  # the request was cancelled meanwhile
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def done(future: asyncio.Future[Translation], result: Translation | Exception) -> None:
            loop.call_soon_threadsafe(deliver, future, result)

        options = asked.options if prefix else replace(asked.options, prefixed=False, complete=False)
        phrases = constraints or [()] * len(texts)
        self._jobs = [
            QueuedLine(text, asked.client, options, asked.deadline, partial(done, future), tuple(own), prefix)
            for text, future, own in zip(texts, self._futures, phrases, strict=True)
        ]
        self._queue.put(self._jobs, admitted=admitted)

    async def results(self) -> list[Translation]:
        """Return the translations. Raises Late, ModelFailed."""
        try:
            # The engine looks at deadlines between two steps; a model that takes minutes to open has none.
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                return list(await asyncio.gather(*self._futures))
        except TimeoutError:
            raise Late("the deadline passed") from None
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Take what is not done out of the queue and the search."""
        # Whoever is cancelled while it awaits them all has cancelled them all.
        if any(not future.done() or future.cancelled() for future in self._futures):
            self._queue.remove(self._jobs)
        for future in self._futures:
            if future.done() and not future.cancelled():
                future.exception()  # looked at: one failure is enough to tell

"""The interface of all translators: of streams of lines, and of texts in this process."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

from ziggurat.config import DecodingConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.options import LineExtras, TranslateOptions, line_extras
from ziggurat.translate.results import Notices, TargetScore, Translation
from ziggurat.translate.text_lines import WINDOW_LINES, refuse_single, windows


class StreamTranslator(ABC):
    """A translator of streams of lines: in this process, or in several.

    Attributes:
        decoding: default search settings of calls.
        origin: description of the weights, for messages.
        target_language: code of the target language; scores may depend on it.
        notices: counts of lines that needed special handling: `blank_lines` (not shown to the model),
            `long_lines` (translated in parts), `unfinished` (cut at the length limit), `unmet` (constraints are
            missing), `untagged` (no tag, although the model has tags of several languages), `tag_as_text` (a tag at the
            start of the text), `in_pieces` (already cut into subword pieces), `unknown` (text that the vocabulary
            lacks); and `too_large`, how often memory ran out, so that the rest of a call was translated in smaller
            batches. The first of each kind gives a warning, except for blank lines.
        on_finished: called with the number of sentences that have just been translated, for a progress bar; a line
            translated in parts counts once per part, a blank line not at all.
        about_precision: returns the chosen precision and, on request, a faster one, which may require measuring.
    """

    decoding: DecodingConfig
    origin: str
    target_language: str

    def __init__(self) -> None:
        self.notices = Notices()
        self.on_finished: Callable[[int], object] = lambda count: None
        self.about_precision: Callable[[bool], str] = lambda hints: ""

    def translate_stream(
        self,
        lines: Iterable[str],
        options: TranslateOptions | None = None,
        *,
        window: int = WINDOW_LINES,
        first: int = 0,
        prefixes: Iterable[str] | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        **asked: Any,
    ) -> Iterator[Translation]:
        """Yield one Translation per line, in order, in memory that does not grow with the number of lines.

        `window` lines are read, sorted by length and translated together, so nothing appears before the
        window is full or the input ends: for a dialogue use `window=1`, for throughput a few thousand. Several workers
        get whole windows, and a few for each are read before the first translation is yielded. Other arguments are as
        in `translate`. If `lines` raises an error, every line before it is translated first.
        """
        refuse_single(lines=lines, prefixes=prefixes, constraints=constraints)
        tasks = line_extras(windows(lines, window), first, prefixes, constraints)
        options = TranslateOptions.of(options, asked)
        return chain.from_iterable(self._translated(tasks, options, constrained=constraints is not None))

    @abstractmethod
    def _translated(
        self,
        tasks: Iterable[tuple[list[str], LineExtras]],
        options: TranslateOptions,
        *,
        constrained: bool,
    ) -> Iterator[list[Translation]]:
        """Yield the translations of windows of lines; `constrained`: lines may have constraints.

        Raises ConfigError immediately for contradictory options.
        """


class TextTranslator(StreamTranslator):
    """A translator of text in this process: by PyTorch (Translator) or by CTranslate2 (CTranslate2Translator).

    Attributes:
        own_search: whether it uses ziggurat.translate.search, which supports required phrases and lines that join a
            running search (ziggurat.translate.call.ContinuousTranslation).
        source_tokenizer, target_tokenizer: tokenizers of the two sides.
        max_positions: maximum number of positions of either side; None: no limit.
        before_step: called before every step of ziggurat's search; an error that it raises ends the translation.
    """

    own_search: ClassVar[bool]
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    max_positions: int | None
    before_step: Callable[[], None]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.origin}>"

    def translate(
        self,
        texts: Sequence[str],
        options: TranslateOptions | None = None,
        *,
        first: int = 0,
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        longest: Sequence[int] | None = None,
        **asked: Any,
    ) -> list[Translation]:
        """Return one Translation per text, in the same order.

        Args:
            texts: lines; a line end inside a text counts as a space.
            options: options of all texts; most calls use keywords instead.
            first: the number of the first text, on which the random numbers of sampling depend.
            prefixes: start of each translation; an empty one leaves it free.
            constraints: phrases that each translation must contain; the result lists those that it lacks.
            longest: maximum number of tokens of each translation, if lower than `decoding.max_length`; for a text
                translated in parts, of each part.
            asked: `tag`: a token such as `<bt>` of the training data, put before every source sentence; `terminology`:
                source terms and their translations, for texts that contain the terms; `next_words`: the n best differ
                in the word after the prefix, or in the first part of a text that is translated in parts; `complete`:
                prefixes end with a whole word, otherwise the next word may be the rest of their last one; others are
                keys of the `decoding` section that replace the configured ones, except `precision` and `shortlist`,
                which are set when a model is opened; None leaves a key unchanged.

        Raises ConfigError for contradictory settings or an unknown tag, DataError if prefixes, constraints or limits do
        not match the texts in number, TypeError for a single string.
        """
        refuse_single(texts=texts, prefixes=prefixes, constraints=constraints)
        texts = list(texts)
        for name, given in (("prefixes", prefixes), ("constraints", constraints), ("longest", longest)):
            if given is not None and len(given) != len(texts):
                raise DataError(f"{len(texts)} texts, but {len(given)} {name}; they must pair up")
        extras = LineExtras(first, prefixes or (), constraints or (), longest or (), numbered=len(texts) > 1)
        options = TranslateOptions.of(options, asked)
        return next(self._translated([(texts, extras)], options, constrained=constraints is not None))

    @abstractmethod
    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None, first: int = 0
    ) -> list[TargetScore]:
        """Return the score of each given target. Raises ConfigError if the translator cannot score."""


def tells_alignments(translator: TextTranslator) -> bool:
    """Return whether the translations of this translator come with alignments.

    This translates a word to find out, since the answer depends on every model of an ensemble and, for an export, on
    the version that wrote it.
    """
    kept, translator.notices = translator.notices, Notices()
    try:
        with warnings.catch_warnings(action="ignore"):  # suppress the notice that this word was cut
            best = translator.translate(["a"], alignments=True)[0].hypotheses[0]
    except ConfigError:
        return False
    finally:
        translator.notices = kept
    return best.alignment is not None


def translate_tagged(
    translate: Callable[..., list[Translation]],
    texts: Sequence[str],
    tags: Sequence[str | None],
    longest: Sequence[int] | None = None,
) -> list[Translation]:
    """Return the translations of texts with individual tags, in the same order.

    `translate` is a translator's method, which takes one tag for all of its texts; `longest` as there.
    """
    found: dict[int, Translation] = {}
    for tag in dict.fromkeys(tags):
        own = [number for number, its in enumerate(tags) if its == tag]
        limits = None if longest is None else [longest[number] for number in own]
        found.update(zip(own, translate([texts[number] for number in own], tag=tag, longest=limits), strict=True))
    return [found[number] for number in range(len(texts))]

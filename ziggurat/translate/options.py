"""Requests to a translator: its protocol, what it is capable of, and the options of a call.

Neither PyTorch nor CTranslate2 is needed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from ziggurat.config import DecodingConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError
from ziggurat.translate.results import WINDOW_LINES, Notices, TargetScore, Translation
from ziggurat.translate.terminology import Terms


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a translator besides translating lines as they are.

    Attributes:
        constraints: it searches for translations that contain given phrases.
        continuous: lines join a search that is running (ziggurat.translate.call.ContinuousTranslation).
    """

    constraints: bool
    continuous: bool


@dataclass(frozen=True)
class TranslateOptions:
    """Options of a request, a stream or a job: the same for all of its lines.

    Attributes:
        n_best: translations of a line; 0: as many as the translator is set to give.
        alignments: with the alignment of tokens, also where the translator is not set to give it.
        scores: with the log-probability of each token; our own engine always gives these.
        tag: put before every source sentence; None: no tag.
        terms: a terminology for lines that contain its terms; a glossary, where a server applies it around the search.
        protect: patterns of what must come through unchanged, which a server applies around the search.
        prefix: what each translation must begin with, where lines have no prefixes of their own.
        complete: a prefix ends with a whole word; otherwise its last word may go on.
        next_words: the n best differ in the word after the prefix.
        constrained: lines have phrases that their translations must contain, whatever search the translator is set to.
        decoding: further keys of the `decoding` section in place of the translator's.
    """

    n_best: int = 0
    alignments: bool = False
    scores: bool = False
    tag: str | None = None
    terms: Terms | None = None
    protect: tuple[str, ...] = ()
    prefix: str = ""
    complete: bool = False
    next_words: bool = False
    constrained: bool = False
    decoding: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: TranslateOptions | None, asked: Mapping[str, Any]) -> TranslateOptions:
        """Return the options of a call: those `given`, changed by its keywords.

        The keywords are `tag`, `scores`, `complete`, `next_words`, and `terminology` (source term -> target term);
        others are keys of the `decoding` section, which win over `n_best` and `alignments` of `given`.
        """
        options, left = given or cls(), dict(asked)
        own: dict[str, Any] = {key: left.pop(key) for key in ("tag", "scores", "complete", "next_words") if key in left}
        own |= {key: unasked for key, unasked in (("n_best", 0), ("alignments", False)) if left.get(key) is not None}
        if (terms := left.pop("terminology", None)) is not None:
            own["terms"] = Terms.of(terms)
        return replace(options, **own, decoding={**options.decoding, **left})

    @property
    def more(self) -> int:
        """Translations of a line besides the best."""
        return max(0, self.n_best - 1)

    @property
    def begun(self) -> bool:
        """True if it is about the beginning of the translation of one sentence."""
        return bool(self.prefix) or self.next_words

    @cached_property
    def key(self) -> tuple[object, bool]:
        """The part that lines must share to be translated together: all but the words of the prefix."""
        return replace(self, prefix=""), bool(self.prefix)

    def changes(self, own: DecodingConfig) -> dict[str, Any]:
        """Return the keys of the `decoding` section that differ from the translator's `own`."""
        changes = dict(self.decoding)
        beam = changes.get("beam_size") or own.beam_size
        if self.n_best:
            changes["n_best"] = self.n_best
            if self.n_best > beam:
                changes["beam_size"] = self.n_best
        if self.constrained:
            changes["beam_size"] = max(2, self.n_best, beam)
            changes |= {"search": "beam", "endings": "candidates", "diverse_groups": 1, "mbr": 0}
        if self.next_words:
            changes |= {"search": "beam", "diverse_groups": 1, "mbr": 0}
        if self.alignments:
            changes["alignments"] = True
        return changes


class StreamTranslator(Protocol):
    """A translator of streams of lines: in this process, or in several.

    Attributes:
        decoding: search settings, for calls that do not give others.
        origin: description of the weights, for messages.
        target_language: code of the language that it translates into.
        notices: counts of what was not translated in the ordinary way.
        on_finished: called with the number of sentences that have just been translated.
        about_precision: returns what was chosen for the precision and, if asked to, what would be faster.
    """

    decoding: DecodingConfig
    origin: str
    target_language: str
    notices: Notices
    on_finished: Callable[[int], object]
    about_precision: Callable[[bool], str]

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
        """Yield one Translation per line, in order; see ziggurat.translate.translator.Translator."""


class TextTranslator(StreamTranslator, Protocol):
    """A translator of text in this process: by PyTorch (Translator) or by CTranslate2 (CTranslate2Translator).

    Attributes:
        capabilities: what it can do.
        source_tokenizer, target_tokenizer: tokenizers of the two sides.
        max_positions: most positions of either side; None: no limit.
        before_step: called before every step of our search; an error that it raises ends the translation.
    """

    capabilities: Capabilities
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    max_positions: int | None
    before_step: Callable[[], None]

    def translate(
        self,
        texts: Sequence[str],
        options: TranslateOptions | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        **asked: Any,
    ) -> list[Translation]:
        """Return one Translation per text, in the same order; see ziggurat.translate.translator.Translator."""

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None, first: int = 0
    ) -> list[TargetScore]:
        """Return the score of each given target. Raises ConfigError where it has no such capability."""


def tells_alignments(translator: TextTranslator) -> bool:
    """Return whether the translations of this translator come with alignments.

    A word is translated to see: whether there are attention weights depends on every model of an ensemble, and of an
    export on the version that wrote it.
    """
    kept, translator.notices = translator.notices, Notices()
    try:
        with warnings.catch_warnings(action="ignore"):  # of this word nobody wants to know that it was cut
            best = translator.translate(["a"], alignments=True)[0].hypotheses[0]
    except ConfigError:
        return False
    finally:
        translator.notices = kept
    return best.alignment is not None

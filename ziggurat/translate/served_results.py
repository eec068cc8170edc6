"""CTranslate2's translators opened, and its results as hypotheses, with the scores and alignments that ours have.

Importing this needs neither PyTorch nor CTranslate2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ziggurat.config import DecodingConfig
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.translate.lines import Notices
from ziggurat.translate.results import Alignment, Hypothesis, Translation, side_by_side
from ziggurat.translate.words import begins_word, ends_in_word, first_word

PIECES = 256
"""Next pieces among which those that may follow a prefix are looked for."""
_HEADS = 4
"""Of these, pieces that are gone on with for each word that is wanted: several may begin the same word."""


class Call(NamedTuple):
    """Settings of a call: the search, pieces before every source and of the first one's translation, token scores.

    With `words` the n best are by next word, of a prefix that ends with a whole one if it is `complete`.
    """

    decoding: DecodingConfig
    tag: list[str]
    scored: bool
    forced: list[str]
    words: bool = False
    complete: bool = False

    @property
    def batching(self) -> dict[str, Any]:
        """Arguments of CTranslate2 that batch lines by their tokens, however long one is: long ones are split before.

        Without the last it would cut sources, and the translations that it scores, without a word.
        """
        return {"max_batch_size": self.decoding.batch_tokens, "batch_type": "tokens", "max_input_length": 0}


class Found(NamedTuple):
    """One result of the search.

    Attributes:
        pieces: without end-of-sentence.
        score: after the length penalty.
        ended: whether it ended.
    """

    pieces: list[str]
    score: float
    ended: bool


def ctranslate2_module() -> Any:
    """Return CTranslate2. Raises ConfigError where it is not installed."""
    try:
        import ctranslate2
    except ModuleNotFoundError:
        raise ConfigError("`ctranslate2` is not installed: pip install 'ziggurat-mt[translate]'") from None
    return ctranslate2


def opened(ctranslate2: Any, path: str | Path, device: str, workers: int, threads: int | None) -> Any:
    """Return CTranslate2's translator of a directory. Raises CheckpointError where it cannot open it."""
    kind, _, index = device.partition(":")
    try:
        return ctranslate2.Translator(
            str(path), device=kind, device_index=int(index or 0), inter_threads=workers, intra_threads=threads or 0
        )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: CTranslate2 cannot open it: {error}") from None


def heads_of(pieces: Sequence[Found], call: Call) -> list[list[str]]:
    """Return the prefix with each of the next pieces that may follow it, which begin the words to choose from.

    Raises DataError where a whole word cannot be followed by any.
    """
    whole = call.complete and bool(call.forced) and ends_in_word(call.forced[-1])
    found = [each.pieces for each in pieces if not each.ended and not (whole and not begins_word(each.pieces[-1]))]
    if not found:
        raise DataError("the model finds nothing that could follow the prefix as a whole word; leave the word out")
    return found[: _HEADS * call.decoding.n_best]


def by_next_word(found: Sequence[list[Found]], call: Call, limit: int) -> list[Found]:
    """Return the best results whose words after the prefix differ; those of more than `limit` pieces are cut there."""
    words: dict[tuple[str, ...], Found] = {}
    for each in (results[0] for results in found):
        ended = each.ended and len(each.pieces) <= limit
        word = first_word(each.pieces[len(call.forced) :])
        words.setdefault(word, each._replace(pieces=each.pieces[:limit], ended=ended))
    return list(words.values())[: call.decoding.n_best]


def found_of(results: Sequence[Any], eos: str) -> list[list[Found]]:
    """Return CTranslate2's results of each source; `eos` is the piece that ends a translation."""
    return [
        [
            Found(pieces[:-1] if ended else pieces, score, ended)
            for pieces, score in zip(result.hypotheses, result.scores, strict=True)
            for ended in [pieces[-1:] == [eos]]
        ]
        for result in results
    ]


def hypothesis_of(
    found: Found, text: str, alpha: float, token_scores: Sequence[float], alignment: Alignment | None
) -> Hypothesis:
    """Return a result as a hypothesis; `alpha` is the exponent of the length penalty."""
    length = max(1, len(found.pieces) + found.ended)
    return Hypothesis(
        text=text,
        score=found.score,
        log_probability=found.score * length**alpha,  # CTranslate2 gives the score after the penalty alone
        tokens=found.pieces,
        token_log_probabilities=list(token_scores[: length if found.ended else len(found.pieces)]),
        finished=found.ended,
        alignment=alignment,
        ends=int(found.ended),
    )


def rescored(hypotheses: Sequence[Hypothesis], alpha: float, *, sort: bool) -> list[Hypothesis]:
    """Return hypotheses with the scores that follow from those of their tokens; `sort` puts the best first."""
    found = []
    for each in hypotheses:
        total, length = sum(each.token_log_probabilities), max(1, len(each.token_log_probabilities))
        found.append(replace(each, log_probability=total, score=total / length**alpha))
    return sorted(found, key=lambda each: -each.score) if sort else found


def alignment_of(attention: Sequence[Sequence[float]], source: Sequence[str], tag: int, eos: str) -> Alignment:
    """Return an alignment.

    Args:
        attention: for each piece of a translation the weights of those of the source, and maybe more columns.
        source: pieces of the source, tag included, end-of-sentence left out.
        tag: pieces at its beginning that stand for no text.
        eos: the piece of end-of-sentence, whose weight is what is left of 1.
    """
    # Beyond the source's own pieces, rows of a batch with longer sources have its end-of-sentence and padding.
    rows = [[float(weight) for weight in row[: len(source)]] for row in attention]
    return Alignment.of([*source, eos], [[*row, max(0.0, 1.0 - sum(row))] for row in rows], tag)


def joined(source: str, parts: list[list[Hypothesis]], notices: Notices) -> Translation:
    """Return the translation of a line, given the results for each of its parts; one that was cut is counted."""
    if not parts:
        return Translation(source, [Hypothesis("", 0.0, 0.0, [], [], True)], 0)
    translation = side_by_side(source, parts, max(map(len, parts)))
    if not translation.hypotheses[0].finished:
        notices.add("unfinished", "a translation was cut at the length limit (`decoding.max_length`)")
    return translation

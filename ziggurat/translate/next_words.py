"""Translations that differ in the next word: the n best words at the first free place, each with what follows it.

The n best hypotheses of a beam search are mostly alike up to their last words. Whoever chooses the next word of a
translation that has been begun wants the likeliest words instead. They are found in two steps: first by a beam search
whose hypotheses end where their word does, with the probability that it ends there; then each word becomes part of the
prefix, and the usual search goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ziggurat.translate.call import LineExtras, TranslationCall
from ziggurat.translate.choice import Sentence
from ziggurat.translate.hypotheses import Assembler, IdHypothesis
from ziggurat.translate.length import LengthPenalty
from ziggurat.translate.results import Translation
from ziggurat.translate.search import search
from ziggurat.translate.translator import Translator

_LONGEST = 16
"""Most tokens of a word."""
_BEAM = 16
"""Fewest beams of the search for words: several pieces may begin the same word, or be the beginnings of many."""


def translate_next_words(
    translator: Translator,
    texts: Sequence[str],
    prefixes: Sequence[str],
    *,
    n_best: int,
    tag: str | None = None,
    complete: bool = False,
    **decoding: Any,
) -> list[Translation]:
    """Return per text up to `n_best` translations that begin with its prefix and go on with different words.

    They are in the order of the words' probabilities. With `complete` each prefix ends with a whole word; without, the
    next word may be the rest of its last one. Of a text so long that it is translated in parts, that holds for the
    first. Raises the errors of `Translator.translate`.
    """
    usual: dict[str, Any] = {"search": "beam", "mbr": 0, "diverse_groups": 1, "n_best": 1}
    call = translator.call_of(tag, **{**decoding, **usual})
    call.end_words(complete=complete)
    extras = LineExtras(prefixes=list(prefixes), numbered=len(texts) > 1)
    owned, parts, sentences = call.segmented(texts, extras, translator.notices)

    # (1) The next words of the first part of each text.
    beginnings = [own.start for own in owned if own]
    words = _next_words(translator, call, [sentences[number] for number in beginnings], n_best)
    begun = dict(zip(beginnings, words, strict=True))

    # (2) What follows each; other parts as ever.
    wanted: list[tuple[int, Sentence]] = []
    for number, sentence in enumerate(sentences):
        wanted += [(number, each) for each in begun.get(number, [sentence])]
    results = search(translator.scorer(), [sentence for _, sentence in wanted], call.settings)
    found: list[list[IdHypothesis]] = [[] for _ in parts]
    for (number, _), (best, *_) in zip(wanted, results, strict=True):
        found[number].append(best)
    asked = call.decoding.model_copy(update={"n_best": n_best})
    assembler = Assembler(translator.source_tokenizer, translator.target_tokenizer, asked)
    return [
        assembler.line(text, [parts[i] for i in own], [found[i] for i in own])
        for text, own in zip(texts, owned, strict=True)
    ]


def _next_words(
    translator: Translator, call: TranslationCall, sentences: Sequence[Sentence], count: int
) -> list[list[Sentence]]:
    """Return each sentence with up to `count` longer prefixes, which differ in one word, the likeliest first."""
    beams = max(_BEAM, 2 * count)
    settings = replace(
        call.settings,
        beam_size=beams,
        n_best=beams,
        rules=replace(call.settings.rules, one_word=True, prune=None, eos_margin=None),
        penalty=LengthPenalty(),
        endings="candidates",
        keep_attention=False,
    )
    asked = [
        replace(each, max_length=min(each.max_length, len(each.prefix) + _LONGEST), min_length=0) for each in sentences
    ]
    listed = []
    for sentence, results in zip(sentences, search(translator.scorer(), asked, settings), strict=True):
        by_text = {
            call.target.decode(result.tokens): replace(sentence, prefix=tuple(result.tokens), complete=result.finished)
            for result in reversed(results)  # of the same word in other pieces the likeliest stays
        }
        order = dict.fromkeys(call.target.decode(result.tokens) for result in results)
        listed.append([by_text[text] for text in islice(order, count)])
    return listed

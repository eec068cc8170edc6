"""The two stages of a shard: translate its lines, then filter the pairs, with noise on the translations if asked for.

The noise is that of noised beam search: words dropped, replaced by a filler, and moved a little (Edunov et al. 2018).
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.corpora.jobs.models import ModelChoice, opened
from ziggurat.corpora.jobs.shards import Manifest, Shard, StageFiles
from ziggurat.corpora.synthesis.filters import PairFilter
from ziggurat.corpora.synthesis.lines import Line
from ziggurat.corpora.synthesis.plan import BackTranslationJob, sentence_metric
from ziggurat.data.lines import normalise
from ziggurat.translate.lines import TranslationWarning
from ziggurat.translate.results import Translation
from ziggurat.translate.served import ServedTranslator
from ziggurat.translate.translator import Translator

DROP = 0.1
"""Probability that a word is dropped."""
REPLACE = 0.1
"""Probability that a remaining word is replaced by the filler."""
FILLER = "_"
"""Replacement of a word: one character that every vocabulary can spell."""
REACH = 3
"""Most places that a word can move."""


def add_noise(text: str, *, seed: int, line: int) -> str:
    """Return `text` with noise that is a function of `seed` and the number `line` alone.

    In the order of Edunov et al. (2018, section 3): each word is dropped with probability DROP, but never all of them;
    each remaining one is replaced by FILLER with probability REPLACE; then the words are sorted by i + u_i, where i is
    a word's place and u_i uniform in [0, REACH + 1), so no word moves by more than REACH places (Lample et al. 2018,
    section 2.3). Blanks separate words. A text of one word stays as it is.
    """
    words = text.split(" ")
    if len(words) < 2:
        return text
    # Python promises the same numbers for the same seed in every version of `random()` alone, no other method.
    # Different lines have different seeds.
    draw = random.Random(seed << 64 | line).random
    kept = [word for word in words if draw() >= DROP] or [words[int(draw() * len(words))]]
    replaced = [FILLER if draw() < REPLACE else word for word in kept]
    places = [place + draw() * (REACH + 1) for place in range(len(replaced))]
    return " ".join(word for _, word in sorted(zip(places, replaced, strict=True)))


@dataclass(frozen=True)
class Stages:
    """Both stages, with the model and the settings that they need.

    Attributes:
        translator: the model, or the ensemble.
        settings: search settings and the model's tag, for `Translator.translate_stream`.
        filters: filters for pairs.
        noise_seed: seed of the noise on translations; None: no noise.
        forward: the text is the source of a pair, not its target.
        metric: score of a sentence, by which a candidate is chosen; None: the best one is taken.
        translated: files of the first stage.
        filtered: files of the second stage.
    """

    translator: Translator | ServedTranslator
    settings: Mapping[str, Any]
    filters: PairFilter
    noise_seed: int | None
    forward: bool
    metric: Any
    translated: StageFiles
    filtered: StageFiles

    def translate(self, shard: Shard[Line]) -> Manifest:
        """Write rows (line number, text, translation) of the lines that can be translated.

        All lines of the shard are one window of the translator, so its batches do not depend on earlier shards. A
        dropped line stays as a blank one, so that the others keep their numbers, and their random numbers.
        """
        dropped: Counter[str] = Counter()
        texts = []
        # Too long by the filter's measure: such a line would be dropped after its translation anyway.
        encode = self.translator.source_tokenizer.encode
        pieces = encode([line.text for line in shard.items])
        for line, ids in zip(shard.items, pieces, strict=True):
            why = line.reason or ("too_long" if len(ids) > self.filters.max_pieces else None)
            dropped.update([why] if why else [])
            texts.append("" if why else line.text)
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # counted below
            stream = self.translator.translate_stream(texts, window=len(texts), first=shard.first, **self.settings)
            found = list(stream)
        rows = []
        for place, (text, translation) in enumerate(zip(texts, found, strict=True)):
            chosen = self._chosen(translation, shard.items[place].reference)
            if text and chosen is None:
                dropped["unfinished"] += 1
            elif text:
                rows.append((str(shard.first + place), text, chosen or ""))
        return self.translated.write(shard.index, content_of(rows), read=len(texts), kept=len(rows), dropped=dropped)

    def _chosen(self, translation: Translation, reference: str) -> str | None:
        """Return the text of the best candidate, or of the one nearest the reference; None: it is not complete."""
        candidates = translation.hypotheses if reference and self.metric is not None else translation.hypotheses[:1]
        texts = normalise([found.text for found in candidates if found.finished], "none")
        if len(texts) < 2:
            return texts[0] if texts else None
        # The first of several that are equally near: the one that the model likes best.
        return max(texts, key=lambda text: float(self.metric.sentence_score(text, [reference]).score))

    def filter(self, translated: Manifest) -> Manifest:
        """Write rows (source, target) of the pairs that stay; noise comes last, so that no filter sees it."""
        rows = rows_of(self.translated.read(translated))
        texts, translations = ([row[field] for row in rows] for field in (1, 2))
        text_pieces = self.translator.source_tokenizer.encode(texts)
        translation_pieces = self.translator.target_tokenizer.encode(translations)
        dropped = Counter(translated.dropped)
        pairs = []
        for (number, text, translation), *pieces in zip(rows, text_pieces, translation_pieces, strict=True):
            why = self.filters.reason(text, translation, len(pieces[0]), len(pieces[1]))
            if why:
                dropped[why] += 1
                continue
            if self.noise_seed is not None:
                translation = add_noise(translation, seed=self.noise_seed, line=int(number))
            pairs.append((text, translation) if self.forward else (translation, text))
        return self.filtered.write(
            translated.shard,
            content_of(pairs),
            read=translated.read,
            kept=len(pairs),
            dropped=dropped,
            input=translated.output,
        )


def content_of(rows: Sequence[Sequence[str]]) -> bytes:
    """Return rows as the content of a file; no field has tabs or line ends."""
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def rows_of(content: bytes) -> list[list[str]]:
    """Return the rows of a shard's file."""
    return [line.split("\t") for line in content.decode().split("\n")[:-1]]


def filtered_files(out: Path, plan: str) -> StageFiles:
    """Return the files of the last stage."""
    return StageFiles(out, "filtered", plan)


def make_shard(job: BackTranslationJob, choice: ModelChoice, plan: str, shard: Shard[Line]) -> Manifest:
    """Do the stages of a shard that are not complete; return the last manifest. `plan` is the plan's fingerprint."""
    translator = opened(choice)
    metric = sentence_metric(job.nearest, translator.target_language) if job.references else None
    stages = Stages(
        translator=translator,
        settings={**job.settings(), "tag": job.model_tag},
        filters=job.filters,
        noise_seed=job.seed if job.method == "noised-beam" else None,
        forward=job.forward,
        metric=metric,
        translated=StageFiles(job.out, "translated", plan),
        filtered=filtered_files(job.out, plan),
    )
    return stages.filter(stages.translated.complete(shard.index) or stages.translate(shard))

"""The two stages of a shard: translate its lines, then filter the pairs and write them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ziggurat.backtranslation.filters import PairFilter
from ziggurat.backtranslation.job import Job
from ziggurat.backtranslation.noise import add_noise
from ziggurat.backtranslation.shards import Manifest, Shard, StageFiles
from ziggurat.data.normalise import normalise
from ziggurat.decoding.translator import TranslationWarning, Translator, load_translator

__all__ = ["Stages", "make_shard"]


@dataclass(frozen=True)
class Stages:
    """What both stages need.

    Attributes:
        translator: The model, or the ensemble.
        settings: Of the search, for `Translator.translate_stream`.
        filters: Which pairs are dropped.
        noise_seed: Seed of the noise on translations; None: no noise.
        forward: The text is the source of a pair, not its target.
        translated: Files of the first stage.
        filtered: Files of the second stage.
    """

    translator: Translator
    settings: Mapping[str, Any]
    filters: PairFilter
    noise_seed: int | None
    forward: bool
    translated: StageFiles
    filtered: StageFiles

    def translate(self, shard: Shard) -> Manifest:
        """Write rows (line number, text, translation) of the lines that can be translated.

        All lines of the shard are one window of the translator, so its batches are the same whatever was done before;
        a dropped line stays in it as a blank one, which keeps the numbers of the others.
        """
        dropped: Counter[str] = Counter()
        texts = []
        encode = self.translator.source_tokenizer.encode
        pieces = encode([text for text, _ in shard.lines])
        for (text, reason), ids in zip(shard.lines, pieces, strict=True):
            why = reason or ("too_long" if len(ids) > self.filters.max_pieces else None)
            dropped.update([why] if why else [])
            texts.append("" if why else text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TranslationWarning)  # counted here
            stream = self.translator.translate_stream(texts, window=len(texts), first=shard.first, **self.settings)
            found = list(stream)
        rows = []
        for number, (text, translation) in enumerate(zip(texts, found, strict=True), start=shard.first):
            if text and not translation.hypotheses[0].finished:
                dropped["unfinished"] += 1
            elif text:
                rows.append((str(number), text, normalise([translation.text], "none")[0]))
        counts = {"input": shard.checksum, "read": len(texts), "dropped": dict(sorted(dropped.items()))}
        return self.translated.write(shard.index, rows, **counts)

    def filter(self, translated: Manifest) -> Manifest:
        """Write rows (source, target) of the pairs that stay; noise comes last, so that it decides on no pair."""
        rows = self.translated.read(translated)
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
        counts = {"input": translated.output, "read": translated.read, "dropped": dict(sorted(dropped.items()))}
        return self.filtered.write(translated.shard, pairs, **counts)


@lru_cache(maxsize=1)
def _stages(job: Job, plan: str) -> Stages:
    """Load what a worker needs, once in its life."""
    torch.set_num_threads(job.threads)
    return Stages(
        translator=load_translator(job.models, which=job.which, device=job.device),
        settings=job.settings(),
        filters=job.filters,
        noise_seed=job.seed if job.method == "noised-beam" else None,
        forward=job.forward,
        translated=StageFiles(job.out, "translated", plan),
        filtered=StageFiles(job.out, "filtered", plan),
    )


def make_shard(job: Job, plan: str, shard: Shard) -> Manifest:
    """Do what is left to do of a shard and return the manifest of its last stage; `plan` is the plan's fingerprint."""
    stages = _stages(job, plan)
    return stages.filter(stages.translated.complete(shard.index) or stages.translate(shard))

"""Run of a back-translation: the shards that are not complete are translated and filtered, then merged to a corpus.

The two stages of a shard: translate its lines, then filter the pairs, with noise on the translations if asked for.

The noise is that of noised beam search: words dropped, replaced by a filler, and moved a little (Edunov et al. 2018).

Merge of shards of pairs, in order, into a corpus for `prepare`.
"""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
import yaml

from ziggurat.corpora.jobs.launchers import Manifest, Shard, StageFiles
from ziggurat.corpora.jobs.models import ModelChoice, opened
from ziggurat.corpora.jobs.run import JobOutcome, Plan, Work, complete_shards, run_job
from ziggurat.corpora.synthesis.plan import (
    BackTranslationJob,
    Line,
    PairFilter,
    make_plan,
    readable_lines,
    sentence_metric,
)
from ziggurat.data.lines import normalise
from ziggurat.system.errors import DataError
from ziggurat.system.files import atomic_file, write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded
from ziggurat.translate.results import Translation, TranslationWarning
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


CORPUS_FILE = "corpus.yaml"
MANIFEST_FILE = "manifest.json"
_SIDES = ("source.txt", "target.txt")


@dataclass(frozen=True)
class Report:
    """Counts of a merged corpus.

    Attributes:
        read: lines of the inputs.
        kept: pairs of the corpus.
        dropped: lines that gave no pair, by reason (ziggurat.corpora.synthesis.plan.Reason).
        files: size and checksum of each side, by file name.
        scores: threshold and median of the pairs' scores (ziggurat.corpora.synthesis.cross_entropy); else nothing.
    """

    read: int
    kept: int
    dropped: Mapping[str, int]
    files: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, float] = field(default_factory=dict)


def merged(out: Path, plan: Plan) -> Report | None:
    """Return the report of a corpus of `plan` that is complete already, else None."""
    try:
        document = parse_json(read_bounded(out / MANIFEST_FILE), MANIFEST_FILE)
        same = document.pop("plan") == plan.fingerprint
        sizes = [(out / name).stat().st_size == file["bytes"] for name, file in document["files"].items()]
        report = built(Report, document) if same and all(sizes) else None
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return report


def merge(out: Path, plan: Plan) -> Report:
    """Write the filtered shards as a corpus; see write_corpus. Raises DataError for a shard that is missing."""
    shards = filtered_files(out, plan.fingerprint)
    return write_corpus(
        out, plan, ((manifest, rows_of(shards.read(manifest)), {}) for manifest in complete_shards(plan, shards))
    )


def write_corpus(
    out: Path,
    plan: Plan,
    shards: Iterable[tuple[Manifest, Sequence[Sequence[str]], Mapping[str, int]]],
    *,
    scores: Mapping[str, float] | None = None,
) -> Report:
    """Write both sides of the corpus and then its manifest, in memory that does not grow with the corpus.

    Args:
        out: folder.
        plan: plan of the job.
        shards: the manifest of each shard, the pairs of it that stay, and how many were dropped just now, by reason.
        scores: of all pairs, for the report.

    Raises:
        DataError: a shard is incomplete or damaged, or no pair is left.
    """
    read, kept, dropped = 0, 0, Counter[str]()
    # Hashed while it is written, so that the corpus is never in memory.
    digests = [xxhash.xxh3_128() for _ in _SIDES]
    sizes = [0 for _ in _SIDES]
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_file(out / name)) for name in _SIDES]
        for manifest, pairs, just_now in shards:
            for side, (file, digest) in enumerate(zip(files, digests, strict=True)):
                content = "".join(pair[side] + "\n" for pair in pairs).encode()
                file.write(content)
                digest.update(content)
                sizes[side] += len(content)
            read, kept = read + manifest.read, kept + len(pairs)
            dropped.update(manifest.dropped)
            dropped.update({reason: count for reason, count in just_now.items() if count})
        if not kept:
            raise DataError(
                f"{out}: no pair is left of {read:,} lines; dropped: {dropped_text(dropped)}; "
                "loosen the filters, or use a model that translates better"
            )
    checksums = [digest.hexdigest() for digest in digests]
    names = zip(_SIDES, sizes, checksums, strict=True)
    described = {name: {"bytes": size, "xxh3_128": checksum} for name, size, checksum in names}
    report = Report(read, kept, dict(sorted(dropped.items())), described, scores or {})
    document = json.dumps({"plan": plan.fingerprint, **asdict(report)}, indent=1) + "\n"
    # Last: a corpus without a manifest is incomplete.
    write_atomically(out / MANIFEST_FILE, document.encode())
    return report


def dropped_text(dropped: Mapping[str, int]) -> str:
    """Return the counts of dropped lines as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "none"


def write_snippet(out: Path, *, name: str, weight: float, tag: str | None) -> str:
    """Write the corpus as an entry of `data.train` into CORPUS_FILE; return the YAML."""
    source, target = (str(out / side) for side in _SIDES)
    entry = {"name": name, "source": source, "target": target, "weight": weight, **({"tag": tag} if tag else {})}
    text = yaml.safe_dump({"data": {"train": [entry]}}, sort_keys=False, allow_unicode=True)
    write_atomically(out / CORPUS_FILE, text.encode())
    return text


def back_translate(job: BackTranslationJob, work: Work) -> JobOutcome[Report]:
    """Do what `work` says of `job`; the corpus does not depend on interruptions or on the number of workers.

    Raises:
        DataError: inputs that cannot be used, a folder that is in the way or in use, shards missing for the merge.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    plan, choice = make_plan(job)
    return run_job(
        plan,
        filtered_files(job.out, plan.fingerprint),
        partial(make_shard, job, choice, plan.fingerprint),
        partial(readable_lines, job.files, job.reference_files),
        partial(merge, job.out, plan),
        work,
        merged=partial(merged, job.out, plan),
    )

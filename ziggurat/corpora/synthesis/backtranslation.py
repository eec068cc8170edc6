"""Back-translation and distillation as a job: its plan, the two stages of a shard, and the merge to a corpus.

The plan contains everything that the result depends on, with models and text by their content. The lines of a shard are
translated, then its pairs are filtered. Noised beam search also adds noise to the translations: words are dropped,
replaced with a filler, and moved slightly (Edunov et al. 2018). Shards are merged, in order, for `prepare`.
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
from typing import Any, Literal

import xxhash
import yaml

from ziggurat.config.decode import WITHOUT_BEAM, WITHOUT_SAMPLING
from ziggurat.config.pipeline_models import Method
from ziggurat.corpora.jobs.job import JobOutcome, Plan, Work, complete_shards, fix_plan, run_job
from ziggurat.corpora.jobs.launchers import Manifest, Shard, StageFiles
from ziggurat.corpora.jobs.tasks import ModelChoice, opened
from ziggurat.corpora.synthesis.lines import Line, PairFilter, count_lines, readable_lines, text_files
from ziggurat.data.inputs import named_language
from ziggurat.data.lines import normalise
from ziggurat.data.store_checks import InputWatch
from ziggurat.evaluate.scores import sacrebleu_metric
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import atomic_file, write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded
from ziggurat.translate.engines import Engine
from ziggurat.translate.interface import TextTranslator
from ziggurat.translate.results import Translation, TranslationWarning

_SAMPLE = {"search": "sample", "mbr": 0, "n_best": 1, **WITHOUT_BEAM}
_BEAM = {"search": "beam", "n_best": 1, **WITHOUT_SAMPLING}

METHODS: Mapping[Method, Mapping[str, Any]] = {
    "sample": {**_SAMPLE, "top_k": 0},
    "top-k": {**_SAMPLE, "top_k": 10},
    "beam": _BEAM,
    "noised-beam": _BEAM,
}
"""Decoding settings of each method, which replace the model's own. They include the settings of the other search, so
that every method works with every model."""

Nearest = Literal["chrf", "bleu"]
"""Sentence score used to find the candidate nearest to its reference."""

N_BEST = 8
"""Number of candidates for each line if there are references."""

SHARD_LINES = 2000
"""Number of lines in a shard: the most work that an interruption loses per worker, and one window of the translator."""


@dataclass(frozen=True, kw_only=True)
class SynthesisJob:
    """One call that makes or filters a synthetic corpus with models; see ModelChoice."""

    models: tuple[str, ...]
    out: Path
    """Folder of the result."""
    which: str | None = None
    device: str = "auto"
    threads: int = 1
    engine: Engine = "auto"
    decoding: Mapping[str, Any] = field(default_factory=dict, hash=False)
    shard_lines: int = SHARD_LINES
    model_tag: str | None = None
    """Tag given to the models before every line; it must be one of those that they were trained with."""

    def settings(self) -> Mapping[str, Any]:
        """Return the decoding settings that replace the model's own."""
        return self.decoding

    @property
    def choice(self) -> ModelChoice:
        """The models, as workers open them. Raises ConfigError as `settings` does."""
        return ModelChoice(
            self.models,
            which=self.which,
            device=self.device,
            threads=self.threads,
            engine=self.engine,
            decoding=self.settings(),
        )


@dataclass(frozen=True, kw_only=True)
class BackTranslationJob(SynthesisJob):
    """One run of `ziggurat backtranslate`; the models are the reverse model or an ensemble, `forward` the teacher."""

    inputs: tuple[str, ...]
    """Paths or globs of monolingual text."""
    method: Method = "sample"
    forward: bool = False
    """True: the text is the source and its translation the target (sequence-level distillation, Kim and Rush 2016).
    False: the text is the target and its translation the source (back-translation)."""
    seed: int = 1
    """Seed of sampling and noise."""
    filters: PairFilter = field(default_factory=PairFilter)
    references: tuple[str, ...] = ()
    """Paths or globs of the text's translations, line by line, with `forward`: of a line's `n_best` candidates, the one
    nearest to its reference is kept (Kim and Rush 2016, section 3.3)."""
    n_best: int = N_BEST
    """Candidates of each line; the beam has this size, or that in `decoding`, which cannot be smaller."""
    nearest: Nearest = "chrf"

    @property
    def files(self) -> list[Path]:
        """The input files, in order. Raises DataError if there is none, or if one contains records."""
        return text_files(self.inputs, "--input")

    @property
    def reference_files(self) -> list[Path]:
        """The files of references, in order. Raises DataError as `files` does."""
        return text_files(self.references, "--reference")

    def settings(self) -> dict[str, Any]:
        """Return the decoding settings of the method and the user. Raises ConfigError if they contradict each other."""
        if self.decoding.get("n_best", 1) != 1:
            raise ConfigError(
                "`n_best`: backtranslate writes one translation for each line; leave it out, or let references choose "
                "among candidates, with `--reference FILE --n-best N`"
            )
        if clash := {"search", "seed"} & self.decoding.keys():
            raise ConfigError(f"`{min(clash)}`: give `--method` and `--seed` instead")
        settings = {**METHODS[self.method], "seed": self.seed, **self.decoding}
        if not self.references:
            return settings
        if not self.forward:
            raise ConfigError("`--reference` goes with `--forward`, where the text has human translations")
        # A beam as wide as the list is long, unless another is requested; `decoding` refuses a narrower one.
        beam = {"beam_size": self.n_best} if settings["search"] == "beam" else {}
        return {**beam, **settings, "n_best": self.n_best}


def _sentence_metric(name: Nearest, language: str) -> Any:
    """Return sacreBLEU's metric for single sentences in a language; BLEU uses the effective order.

    Raises ConfigError if the language's tokenizer is missing.
    """
    metric = sacrebleu_metric(name, target_language=language)
    if name == "bleu":  # without it a sentence of three words scores 0
        metric.effective_order = True
    return metric


def make_plan(job: BackTranslationJob) -> tuple[Plan, ModelChoice]:
    """Return the models and the plan of `job`, which is written into its folder unless it already exists.

    The models are opened, so that errors appear before any work is done. A UserWarning is issued for text that seems to
    be in the models' output language.

    Raises DataError for inputs that cannot be read or have no lines, and for a folder with another plan or foreign
    files; ConfigError or CheckpointError for settings or models that cannot be used.
    """
    files, watch = job.files, InputWatch()
    found = job.choice.identified()
    settings = {
        "inputs": [{"files": watch.fingerprint(path)} for path in files],
        "method": job.method,
        "forward": job.forward,
        "shard_lines": job.shard_lines,
        "filters": asdict(job.filters),
        **found.settings,
        **found.tag_settings(job.model_tag),
    }
    references = job.reference_files
    if references:
        _sentence_metric(job.nearest, found.experiment.data.target_language)  # its tokenizer may be missing
        settings["references"] = [{"files": watch.fingerprint(path)} for path in references]
        settings["nearest"] = job.nearest

    def count() -> int:
        if not (lines := count_lines(files)):
            raise DataError(f"--input: no line in {', '.join(map(str, files))}")
        if references and (beside := count_lines(references)) != lines:
            raise DataError(
                f"--reference: {beside:,} lines in {', '.join(map(str, references))}, but {lines:,} in "
                f"{', '.join(map(str, files))}; they must pair up"
            )
        return lines

    plan = fix_plan(job.out, "backtranslate", settings, watch, job.shard_lines, count)
    source, target = found.experiment.data.source_language, found.experiment.data.target_language
    if source != target and {named_language(str(file)) for file in files} == {target.lower()}:
        wanted = f"text in `{source}`" if job.forward else f"a model from `{target}` to `{source}`"
        warnings.warn(
            f"{job.models[0]} translates `{source}` into `{target}`, but judging by its name, {', '.join(job.inputs)} "
            f"is in `{target}` already: this takes {wanted}",
            stacklevel=2,
        )
    return plan, found.choice


_DROP = 0.1
"""Probability that a word is dropped."""
_REPLACE = 0.1
"""Probability that a remaining word is replaced by the filler."""
FILLER = "_"
"""Replacement of a word: one character that every vocabulary can spell."""
_REACH = 3
"""Maximum number of positions by which a word can move."""


def add_noise(text: str, *, seed: int, line: int) -> str:
    """Return `text` with noise that depends only on `seed` and the number `line`.

    The order is that of Edunov et al. (2018, section 3). Each word is dropped with probability _DROP, but never all of
    them, and each remaining word is replaced with FILLER with probability _REPLACE. Then the words are sorted by
    i + u_i, where i is a word's position and u_i is uniform in [0, _REACH + 1), so no word moves by more than _REACH
    positions (Lample et al. 2018, section 2.3). Spaces separate words. A text of one word is unchanged.
    """
    words = text.split(" ")
    if len(words) < 2:
        return text
    # Only for `random()` does Python guarantee the same numbers for a seed in every version.
    # Different lines have different seeds.
    draw = random.Random(seed << 64 | line).random
    kept = [word for word in words if draw() >= _DROP] or [words[int(draw() * len(words))]]
    replaced = [FILLER if draw() < _REPLACE else word for word in kept]
    places = [place + draw() * (_REACH + 1) for place in range(len(replaced))]
    return " ".join(word for _, word in sorted(zip(places, replaced, strict=True)))


@dataclass(frozen=True)
class Stages:
    """Both stages with their files, model and settings."""

    job: BackTranslationJob
    translator: TextTranslator
    metric: Any
    """Sentence score for choosing a candidate; None: the model's best is used."""
    translated: StageFiles
    filtered: StageFiles

    def translate(self, shard: Shard[Line]) -> Manifest:
        """Write rows (line number, text, translation) of the lines that can be translated.

        All lines of the shard are one window of the translator, so its batches do not depend on earlier shards. A
        dropped line is kept as a blank line, so that the others keep their numbers, and thus their random numbers.
        """
        dropped: Counter[str] = Counter()
        texts = []
        # The filter would drop such a long line after its translation anyway.
        encode = self.translator.source_tokenizer.encode
        pieces = encode([line.text for line in shard.items])
        for line, ids in zip(shard.items, pieces, strict=True):
            why = line.reason or ("too_long" if len(ids) > self.job.filters.max_pieces else None)
            dropped.update([why] if why else [])
            texts.append("" if why else line.text)
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # counted below
            settings = {**self.job.settings(), "tag": self.job.model_tag}
            found = list(self.translator.translate_stream(texts, window=len(texts), first=shard.first, **settings))
        rows = []
        for place, (text, translation) in enumerate(zip(texts, found, strict=True)):
            chosen = self._chosen(translation, shard.items[place].reference)
            if text and chosen is None:
                dropped["unfinished"] += 1
            elif text:
                rows.append((str(shard.first + place), text, chosen or ""))
        return self.translated.write(shard.index, content_of(rows), read=len(texts), kept=len(rows), dropped=dropped)

    def _chosen(self, translation: Translation, reference: str) -> str | None:
        """Return the text of the best candidate, or of the one nearest to the reference; None: it is incomplete."""
        candidates = translation.hypotheses if reference and self.metric is not None else translation.hypotheses[:1]
        texts = normalise([found.text for found in candidates if found.finished], "none")
        if len(texts) < 2:
            return texts[0] if texts else None
        # Among equally near candidates the first wins, which the model finds most likely.
        return max(texts, key=lambda text: float(self.metric.sentence_score(text, [reference]).score))

    def filter(self, translated: Manifest) -> Manifest:
        """Write rows (source, target) of the pairs that pass; noise is added last, so that no filter sees it."""
        rows = rows_of(self.translated.read(translated))
        texts, translations = ([row[field] for row in rows] for field in (1, 2))
        text_pieces = self.translator.source_tokenizer.encode(texts)
        translation_pieces = self.translator.target_tokenizer.encode(translations)
        dropped = Counter(translated.dropped)
        pairs = []
        for (number, text, translation), *pieces in zip(rows, text_pieces, translation_pieces, strict=True):
            why = self.job.filters.reason(text, translation, len(pieces[0]), len(pieces[1]))
            if why:
                dropped[why] += 1
                continue
            if self.job.method == "noised-beam":
                translation = add_noise(translation, seed=self.job.seed, line=int(number))
            pairs.append((text, translation) if self.job.forward else (translation, text))
        return self.filtered.write(
            translated.shard,
            content_of(pairs),
            read=translated.read,
            kept=len(pairs),
            dropped=dropped,
            input=translated.output,
        )


def content_of(rows: Sequence[Sequence[str]]) -> bytes:
    """Return rows as the content of a file; fields must not have tabs or line ends."""
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def rows_of(content: bytes) -> list[list[str]]:
    """Return the rows of a shard's file."""
    return [line.split("\t") for line in content.decode().split("\n")[:-1]]


def _filtered_files(out: Path, plan: str) -> StageFiles:
    return StageFiles(out, "filtered", plan)


def make_shard(job: BackTranslationJob, choice: ModelChoice, plan: str, shard: Shard[Line]) -> Manifest:
    """Do the incomplete stages of a shard; return the last manifest. `plan` is the plan's fingerprint."""
    translator = opened(choice)
    metric = _sentence_metric(job.nearest, translator.target_language) if job.references else None
    stages = Stages(job, translator, metric, StageFiles(job.out, "translated", plan), _filtered_files(job.out, plan))
    return stages.filter(stages.translated.complete(shard.index) or stages.translate(shard))


CORPUS_FILE = "corpus.yaml"
MANIFEST_FILE = "manifest.json"
_SIDES = ("source.txt", "target.txt")


@dataclass(frozen=True)
class Report:
    """Counts of a merged corpus."""

    read: int
    """Lines of the inputs."""
    kept: int
    """Pairs of the corpus."""
    dropped: Mapping[str, int]
    """Lines that gave no pair, by reason (ziggurat.corpora.synthesis.lines.Reason)."""
    files: Mapping[str, Mapping[str, Any]]
    """Size and checksum of each side, by file name."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Threshold and median of the pairs' scores (ziggurat.corpora.synthesis.cross_entropy), if they have any."""


def merged(out: Path, plan: Plan) -> Report | None:
    """Return the report of a corpus of `plan` if it is already complete, otherwise None."""
    try:
        document = parse_json(read_bounded(out / MANIFEST_FILE), MANIFEST_FILE)
        same = document.pop("plan") == plan.fingerprint
        sizes = [(out / name).stat().st_size == file["bytes"] for name, file in document["files"].items()]
        report = built(Report, document) if same and all(sizes) else None
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return report


def merge(out: Path, plan: Plan) -> Report:
    """Write the filtered shards as a corpus; see write_corpus. Raises DataError for a missing shard."""
    shards = _filtered_files(out, plan.fingerprint)
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

    `shards` yields the manifest of each shard, its remaining pairs, and the numbers of pairs just dropped, by reason.

    Raises DataError if a shard is incomplete or damaged, or if no pair is left.
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
                f"{out}: none of {read:,} lines gave a pair; dropped: {dropped_text(dropped)}; "
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
    """Do this call's work on `job`; the corpus does not depend on interruptions or on the number of workers.

    Raises:
        DataError: inputs that cannot be used, a folder that is in the way or in use, shards missing for the merge.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    plan, choice = make_plan(job)
    return run_job(
        plan,
        _filtered_files(job.out, plan.fingerprint),
        partial(make_shard, job, choice, plan.fingerprint),
        partial(readable_lines, job.files, job.reference_files),
        partial(merge, job.out, plan),
        work,
        merged=partial(merged, job.out, plan),
    )

"""A back-translation, and its plan: everything that its result depends on, models and text by their content.

Lines of text files: counted, read, and decoded to text or to the reason why no pair can be made of them.

Filters of a synthetic corpus: lines and pairs that are dropped, each for one reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from ziggurat.config.data import FilterConfig
from ziggurat.config.decode import WITHOUT_BEAM, WITHOUT_SAMPLING
from ziggurat.config.pipeline_models import MAX_RATIO, RATIO_SLACK, Method
from ziggurat.corpora.jobs.models import ModelChoice
from ziggurat.corpora.jobs.run import Plan, fix_plan
from ziggurat.data.inputs import named_language
from ziggurat.data.lines import is_blank, normalise
from ziggurat.data.store_checks import InputWatch
from ziggurat.evaluate.scores import sacrebleu_metric
from ziggurat.system.compressed import byte_blocks
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import find_files

Reason = Literal["encoding", "nul", "empty", "too_long", "unfinished", "ratio", "copy", "cross_entropy"]
"""Reason why a line gives no pair:

- `encoding`: not valid UTF-8;
- `nul`: contains U+0000, so it is not text;
- `empty`: the line, or its translation, is blank;
- `too_long`: the line or its translation has too many pieces, or the line more than MAX_CHARACTERS;
- `unfinished`: the translation was cut at the length limit;
- `ratio`: the sides differ too much in length;
- `copy`: the translation is the text itself;
- `cross_entropy`: the pair is among the least likely (ziggurat.corpora.synthesis.cross_entropy).
"""

MAX_CHARACTERS = FilterConfig().max_characters or 4000
"""Longest line that is used, as in `prepare`."""
_BYTE_ORDER_MARK = "\ufeff"


def readable(raw: bytes | None, *, first_of_file: bool = False) -> tuple[str, Reason | None]:
    """Return the text of a line, trimmed and without its line end, and None; or "" and the reason to drop it.

    Args:
        raw: the line's bytes; None where there were too many to keep.
        first_of_file: a byte order mark is removed.
    """
    if raw is None:
        return "", "too_long"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "encoding"
    (text,) = normalise([text.removeprefix(_BYTE_ORDER_MARK) if first_of_file else text], "none")
    if "\0" in text:
        return "", "nul"
    if is_blank(text):
        return "", "empty"
    return ("", "too_long") if len(text) > MAX_CHARACTERS else (text, None)


@dataclass(frozen=True)
class PairFilter:
    """The filters of fairseq's back-translation recipe (Edunov et al. 2018), milder with short sentences; and copies.

    The longer side may have `max_ratio` times the pieces of the shorter one and `ratio_slack` more. The ratio alone is
    a rule for long sentences: a true translation of four pieces by seven breaks it.

    Attributes:
        max_pieces: most subword pieces of either side, by the tokenizers of the model that translated.
        max_ratio: largest ratio of the sides' pieces.
        ratio_slack: pieces that the longer side may have beyond that.
    """

    max_pieces: int = FilterConfig().max_pieces or 250
    max_ratio: float = MAX_RATIO
    ratio_slack: int = RATIO_SLACK

    def reason(self, text: str, translation: str, text_pieces: int, translation_pieces: int) -> Reason | None:
        """Return the first reason, in this order, to drop the pair, or None."""
        if is_blank(translation):
            return "empty"
        if max(text_pieces, translation_pieces) > self.max_pieces:
            return "too_long"
        if self.uneven(text_pieces, translation_pieces):
            return "ratio"
        return "copy" if text == translation else None

    def uneven(self, pieces: int, others: int) -> bool:
        """Return whether the sides of a pair differ too much in length."""
        shorter, longer = sorted((pieces, others))
        return longer > self.max_ratio * shorter + self.ratio_slack


_MAX_BYTES = 4 * MAX_CHARACTERS + 5  # a UTF-8 character has up to 4 bytes, a byte order mark 3, CR and LF 2


@dataclass
class Line:
    """A line of text as it stands in its file.

    It is decoded, which takes ten times as long as reading it, when its text is asked for: by the worker that has its
    shard, and not where other calls do the shard.
    """

    raw: bytes | None
    """Its bytes; None: too many to keep."""
    first_of_file: bool = False
    translation: Line | None = None
    """Its translation as somebody else has it."""

    @cached_property
    def _found(self) -> tuple[str, Reason | None]:
        return readable(self.raw, first_of_file=self.first_of_file)

    @property
    def text(self) -> str:
        """The text, or "" where there is a reason."""
        return self._found[0]

    @property
    def reason(self) -> Reason | None:
        """Reason to drop the line, or None."""
        return self._found[1]

    @property
    def reference(self) -> str:
        """The text of its translation; "" where there is none, or none that can be read."""
        return "" if self.translation is None else self.translation.text


def raw_lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file as bytes without LF, unpacked by its name's ending; None for a line that is too long.

    Memory does not grow with the file or a line. Raises DataError for a file that cannot be read or unpacked.
    """
    begun, too_long = b"", False  # the beginning of a line whose end is in a later block
    for block in byte_blocks(path):
        *ended, rest = block.split(b"\n")
        for piece in ended:
            whole = begun + piece
            yield None if too_long or len(whole) > _MAX_BYTES else whole
            begun, too_long = b"", False
        begun += rest
        # Forget the beginning of a line that is too long, so that memory does not grow with it.
        if len(begun) > _MAX_BYTES:
            begun, too_long = b"", True
    if begun or too_long:
        yield None if too_long else begun


def count_lines(files: Sequence[Path]) -> int:
    """Return the number of lines of all files together. Raises DataError as `raw_lines` does."""
    return sum(1 for path in files for _ in raw_lines(path))


def readable_lines(files: Sequence[Path], references: Sequence[Path] = ()) -> Iterator[Line]:
    """Yield the lines of all files, in order, with those of `references`, if there are any, as their references.

    Raises DataError as `raw_lines` does, or where there are not as many references as lines.
    """
    lines = _lines(files)
    if not references:
        yield from lines
        return
    for line, reference in zip_longest(lines, _lines(references)):
        if line is None or reference is None:
            raise DataError(f"the files became shorter while they were read: {', '.join(map(str, references))} or text")
        yield Line(line.raw, line.first_of_file, reference)


def _lines(files: Sequence[Path]) -> Iterator[Line]:
    for path in files:
        for in_file, raw in enumerate(raw_lines(path)):
            yield Line(raw, in_file == 0)


_SAMPLE = {"search": "sample", "mbr": 0, "n_best": 1, **WITHOUT_BEAM}
_BEAM = {"search": "beam", "n_best": 1, **WITHOUT_SAMPLING}

METHODS: Mapping[Method, Mapping[str, Any]] = {
    "sample": {**_SAMPLE, "top_k": 0},
    "top-k": {**_SAMPLE, "top_k": 10},
    "beam": _BEAM,
    "noised-beam": _BEAM,
}
"""Decoding settings of each method, which replace the model's own: those of the other search among them, so that a
method goes with every model."""

Nearest = Literal["chrf", "bleu"]
"""Score of a sentence by which the candidate nearest its reference is found."""

N_BEST = 8
"""Candidates of each line where there are references."""

SHARD_LINES = 2000
"""Lines of a shard: the most work that an interruption loses per worker, and one window of the translator."""


@dataclass(frozen=True)
class BackTranslationJob:
    """One call of the verb.

    Attributes:
        models: runs or model directories: the reverse model (`forward`: the teacher), or the members of an ensemble.
        inputs: paths or globs of monolingual text.
        out: folder of the result.
        method: search for the synthetic side.
        forward: the text is the source and its translation the target (sequence-level distillation, Kim and Rush
            2016); else the text is the target and its translation the source (back-translation).
        which: checkpoint of a run; see ziggurat.model.directory.open_model.
        device: `auto`, `cpu`, `cuda`, ...
        threads: CPU threads of each worker. The result depends on them: another number of threads sums matrix products
            in another order, which rounds differently.
        seed: seed of sampling and noise.
        shard_lines: lines of a shard.
        filters: filters for pairs.
        decoding: keys of the `decoding` section that replace the model's own.
        engine: `torch`, `ctranslate2`, or `auto`: the latter for an exported model. Never by speed: parts of the work
            may be done on several machines.
        references: paths or globs of the text's translations, line by line, with `forward`: of the `n_best` candidates
            of a line, the one nearest its reference is kept (Kim and Rush 2016, section 3.3).
        n_best: candidates of each line; the beam has this size, or one that `decoding` gives, which cannot be smaller.
        nearest: score of a candidate against its reference.
        model_tag: tag that the models are given before every line, of those that they were trained with.
    """

    models: tuple[str, ...]
    inputs: tuple[str, ...]
    out: Path
    method: Method = "sample"
    forward: bool = False
    which: str | None = None
    device: str = "auto"
    threads: int = 1
    seed: int = 1
    shard_lines: int = SHARD_LINES
    filters: PairFilter = field(default_factory=PairFilter)
    decoding: Mapping[str, Any] = field(default_factory=dict, hash=False)
    engine: str = "auto"
    references: tuple[str, ...] = ()
    n_best: int = N_BEST
    nearest: Nearest = "chrf"
    model_tag: str | None = None

    @property
    def files(self) -> list[Path]:
        """The input files, in order. Raises DataError where there is none."""
        return [path for pattern in self.inputs for path in find_files(pattern, "--input")]

    @property
    def reference_files(self) -> list[Path]:
        """The files of references, in order. Raises DataError where one is missing."""
        return [path for pattern in self.references for path in find_files(pattern, "--reference")]

    @property
    def choice(self) -> ModelChoice:
        """The models, as workers open them. Raises ConfigError as `settings`."""
        return ModelChoice(
            self.models,
            which=self.which,
            device=self.device,
            threads=self.threads,
            engine=self.engine,
            decoding=self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """Return the decoding settings of the method and of the user.

        Raises:
            ConfigError: the user's settings contradict the method or the verb.
        """
        if self.decoding.get("n_best", 1) != 1:
            raise ConfigError(
                "`n_best`: backtranslate writes one translation for each line; leave it out, or let references choose "
                "among candidates, by `--reference FILE --n-best N`"
            )
        if clash := {"search", "seed"} & self.decoding.keys():
            raise ConfigError(f"`{min(clash)}`: give `--method` and `--seed` instead")
        settings = {**METHODS[self.method], "seed": self.seed, **self.decoding}
        if not self.references:
            return settings
        if not self.forward:
            raise ConfigError("`--reference` goes with `--forward`: there the text has true translations")
        # A beam as wide as the list is long, unless another is asked for: `decoding` refuses one that is narrower.
        beam = {"beam_size": self.n_best} if settings["search"] == "beam" else {}
        return {**beam, **settings, "n_best": self.n_best}


def sentence_metric(name: Nearest, language: str) -> Any:
    """Return sacreBLEU's object for the score of single sentences in a language, whose BLEU has an effective order.

    Raises ConfigError when the language's tokenizer is missing.
    """
    metric = sacrebleu_metric(name, target_language=language)
    if name == "bleu":  # without it a sentence of three words scores 0
        metric.effective_order = True
    return metric


def make_plan(job: BackTranslationJob) -> tuple[Plan, ModelChoice]:
    """Return the plan of `job`, which is written into its folder unless it is there already, and the models.

    The models are opened, so that errors appear before any work is done. Text that seems to be in the language that the
    models write gives a UserWarning.

    Raises:
        DataError: inputs that cannot be read or have no lines; a folder with another plan, or with other things.
        ConfigError, CheckpointError: settings or models that cannot be used.
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
        sentence_metric(job.nearest, found.experiment.data.target_language)  # its tokenizer may be missing
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
            f"{job.models[0]} translates `{source}` into `{target}`, but by its name {', '.join(job.inputs)} is in "
            f"`{target}` already: this takes {wanted}",
            stacklevel=2,
        )
    return plan, found.choice

"""Translation of text: lines are segmented, searched for in batches, and joined to exactly one result per line.

The path of a line: `Translator.translate` -> `TranslationCall` (settings, sentences of token ids) -> `Search` over a
`Scorer` (hypotheses of token ids) -> `Assembler` (text). `open_workers` opens several processes, each with a copy of
the model and a share of the CPU threads: each window of lines goes to one of them.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import DecodingConfig
from ziggurat.config.load import change_section
from ziggurat.data.shortlist import read_shortlist
from ziggurat.data.subword import Tokenizer
from ziggurat.model.fast import compiled
from ziggurat.model.fast.packed import make_fast
from ziggurat.model.fast.precision import decoding_notice, maps_of, settled
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.processes import in_order, share_cores, worker_pool
from ziggurat.translate.assembly import Assembler
from ziggurat.translate.call import TranslationCall
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.interface import StreamTranslator, TextTranslator
from ziggurat.translate.options import ARGUMENTS, LineExtras, TranslateOptions
from ziggurat.translate.results import Notices, TargetScore, Translation, TranslationWarning
from ziggurat.translate.scorers import Scorer, Shortlist, force_score, open_members, scorer_of
from ziggurat.translate.text_lines import count_untagged, without_nul


class Translator(TextTranslator):
    """Translator of text with one model or an ensemble; `ziggurat.load` and `load_translator` create one.

    Args:
        model: one model, or the members of an ensemble (ziggurat.translate.scorers), in evaluation mode, on `device`.
        source_tokenizer, target_tokenizer: tokenizers of the models' two sides.
        decoding: default search settings of calls.
        max_positions: maximum number of positions of either side, if a model has such a limit (learned positions).
        device: device of the models.
        origin: description of the weights, for messages.
        target_language: code of the target language; scores may depend on it.
        before_step: called before every step of a search; an error that it raises ends the translation.
        scorer: creates the search's scorer instead of the models, which may then be missing (an exported model).
    """

    own_search = True

    def __init__(
        self,
        model: Seq2Seq | Sequence[Seq2Seq],
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        decoding: DecodingConfig | None = None,
        *,
        max_positions: int | None = None,
        device: torch.device | str = "cpu",
        origin: str = "",
        target_language: str = "",
        before_step: Callable[[], None] = lambda: None,
        scorer: Callable[[], Scorer] | None = None,
    ) -> None:
        super().__init__()
        # Threads that spin at barriers slow down when other processes use the cores.
        share_cores(torch.get_num_threads())
        self.models = tuple(model) if isinstance(model, Sequence) else (model,)
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.decoding = decoding or DecodingConfig()
        self.max_positions = max_positions
        self.device = device
        self.origin = origin
        self.target_language = target_language
        self.before_step = before_step
        self.scorer = scorer or (lambda: scorer_of(self.models))

    @property
    def model(self) -> Seq2Seq:
        """The model, or the first one of an ensemble."""
        return self.models[0]

    @cached_property
    def control_bytes(self) -> frozenset[int]:
        """Ids of target pieces that stand for the bytes of control characters, which Marian's search never writes."""
        names = {f"<0x{byte:02X}>" for byte in range(32)}
        pieces = self.target_tokenizer.pieces(range(self.target_tokenizer.size))
        return frozenset(number for number, piece in enumerate(pieces) if piece in names)

    def _translated(
        self,
        tasks: Iterable[tuple[list[str], LineExtras]],
        options: TranslateOptions,
        *,
        constrained: bool,
    ) -> Iterator[list[Translation]]:
        call = self.call_of(options, constrained=constrained)
        return (self._translate_window(texts, call, extras) for texts, extras in tasks)

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None, first: int = 0
    ) -> list[TargetScore]:
        """Return the score of each given target as the translation of its source; `first` is as in `translate`.

        The score includes the length penalty, but not lingvo's coverage.

        Raises DataError for unequal numbers of lines, or a line with more tokens than the model has positions,
        ConfigError for an exported model.
        """
        if len(sources) != len(targets):
            raise DataError(f"lines: {len(sources)} of sources, {len(targets)} of targets; they must pair up")
        if not self.models:
            raise ConfigError(f"{self.origin}: scores of given translations need the model itself, not an export of it")
        call, reader = self.call_of(TranslateOptions(tag=tag)), self.source_tokenizer
        count_untagged(tag is not None, sources, reader, self.notices)
        count_untagged(True, targets, self.target_tokenizer, self.notices)
        source_ids = [[*call.tag, *ids, reader.eos] for ids in reader.encode(without_nul(sources))]
        target_ids = self.target_tokenizer.encode(without_nul(targets))
        for number, sides in enumerate(zip(source_ids, target_ids, strict=True), start=first + 1):
            longest = max(len(sides[0]), len(sides[1]) + 1)  # begin-of-sentence comes before the target
            if self.max_positions is not None and longest > self.max_positions:
                raise DataError(f"line {number}: {longest} tokens, but the model has {self.max_positions} positions")
        tokenizer = self.target_tokenizer
        scores = force_score(
            self.models,
            source_ids,
            target_ids,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            pad=tokenizer.pad,
            batch_tokens=call.decoding.batch_tokens,
            device=self.device,
        )
        penalty = LengthPenalty.of(call.decoding.length_penalty)
        return [
            TargetScore(
                penalty.score(log_probability, float(len(ids) + 1)),
                log_probability,
                tokenizer.pieces(ids),
                of_tokens,
            )
            for ids, of_tokens, log_probability in zip(target_ids, scores, map(math.fsum, scores), strict=True)
        ]

    def call_of(self, options: TranslateOptions, *, constrained: bool = False) -> TranslationCall:
        """Return the settings of a call; raises ConfigError if they contradict each other."""
        changes = options.changes(self.decoding)
        asked = {key: value for key, value in changes.items() if value is not None}
        decoding = change_section(self.decoding, asked, "decoding", ARGUMENTS)
        for key in ("shortlist", "precision"):
            if getattr(decoding, key) != getattr(self.decoding, key):
                raise ConfigError(f"`decoding.{key}` is set when a model is opened; give it there")
        return TranslationCall(self, decoding, options, constrained=constrained)

    def _translate_window(self, texts: Sequence[str], call: TranslationCall, extras: LineExtras) -> list[Translation]:
        # (1) Segment the lines; a blank one has no parts.
        lines = call.segmented(texts, extras, self.notices)
        # (2) Search.
        if call.options.next_words:
            call.search_next_words(self.scorer, lines)
        else:
            call.search(self.scorer, [part for line in lines for part in line], self.notices, self.on_finished)
        # (3) Join the parts of each line.
        assembler = Assembler(self.source_tokenizer, self.target_tokenizer, call.decoding, call.n_best)
        translations = []
        for place, (text, parts) in enumerate(zip(texts, lines, strict=True)):
            translation = assembler.line(text, parts, asked=extras.asked(place))
            translations.append(translation)
            best = translation.hypotheses[0]
            if not best.finished:
                self.notices.add("unfinished", "a translation was cut at the length limit (`decoding.max_length`)")
            if parts and best.unmet_constraints:
                self.notices.add("unmet", f"a translation lacks {best.unmet_constraints[0]!r}, which was requested")
        return translations


def load_translator(
    path: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    which: str | None = None,
    without_layers: str | None = None,
    **decoding: Any,
) -> Translator:
    """Open a run or a model directory for translation, or several as an ensemble.

    Args:
        path: folder of a run or a model, or a list of them: an ensemble, with the decoding settings of the first.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...
        which: checkpoint of a run (of each run in the list), such as `best`; see ziggurat.model.directory.open_model.
        without_layers: layers to leave out of a single model, such as `encoder.5,decoder.3` (ziggurat.config.depth).
        decoding: keys of the `decoding` section that replace the saved ones, such as `beam_size=8` or
            `length_penalty={"alpha": 1.0}` (which leaves the other keys of `length_penalty` unchanged).

    Raises CheckpointError for a missing or damaged model; ConfigError for a wrong setting, differing vocabularies, or a
    device that is missing or does not compute correctly with `decoding.precision`; DataError for a missing or damaged
    shortlist.
    """
    paths = [path] if isinstance(path, str | Path) else path
    members = open_members(paths, which=which, device=device, without_layers=without_layers)
    others = ("device", "which", "without_layers")
    settings = change_section(members[0].experiment.decoding, decoding, "decoding", others)
    first, shape, here = members[0], members[0].experiment.model, members[0].model.device
    asked, widths = settings.precision, (shape.d_model, shape.d_ff)
    precision = settled(asked, here, widths, set().union(*(maps_of(member.model) for member in members)))
    settings = settings.model_copy(update={"precision": precision})
    for member in members:
        make_fast(member.model, precision, as_trained=member.experiment.training.quantise == "int8")
    origins = "; ".join(member.origin for member in members)
    models = [member.model for member in members]
    listed, target = settings.shortlist, first.tokenizers[1]
    shortlist = Shortlist(read_shortlist(listed, *first.tokenizers), target.size, here) if listed else None
    limits = [member.experiment.model.embedding.limit for member in members]
    translator = Translator(
        models,
        *first.tokenizers,
        settings,
        max_positions=min(filter(None, limits), default=None),
        device=here,
        origin=origins if len(members) == 1 else f"ensemble of {len(members)}: {origins}",
        target_language=first.experiment.data.target_language,
        scorer=lambda: scorer_of(models, shortlist),
    )

    def about_precision(hints: bool) -> str:
        loops = compiled.notice() if hints and here.type == "cpu" else ""
        return "; ".join(filter(None, (decoding_notice(asked, precision, here, widths, hints=hints), loops)))

    translator.about_precision = about_precision
    return translator


_Translated = tuple[list[Translation], dict[str, int], dict[str, str]]
"""_Translated holds the translations of a window, and the counts and messages of its notices."""

_WINDOWS_PER_WORKER = 2
"""_WINDOWS_PER_WORKER is the number of windows per worker that are read but not yet yielded: one in translation and one
waiting."""


@dataclass(frozen=True)
class _Opening:
    """Arguments for `load_translator` in each worker; `threads` is the total over all workers."""

    models: tuple[str, ...]
    workers: int
    threads: int | None
    which: str | None
    without_layers: str | None
    device: str
    decoding: Mapping[str, Any] = field(compare=False)  # of one WorkerTranslator; a worker serves no other


class WorkerTranslator(StreamTranslator):
    """Translator of streams of text by worker processes; `open_workers` creates one.

    `notices` sums those of all workers.
    """

    def __init__(self, submit: Callable[..., Future[Any]], opening: _Opening) -> None:
        super().__init__()
        self._submit = submit
        self.decoding, origin, self.target_language, about = submit(_introduce, opening).result()
        # With `auto` precision, this worker chooses for all, because others might choose differently.
        self._opening = replace(opening, decoding={**opening.decoding, "precision": self.decoding.precision})
        self.origin = f"{origin}; {opening.workers} workers"
        self.about_precision = about.__getitem__

    def _translated(
        self,
        tasks: Iterable[tuple[list[str], LineExtras]],
        options: TranslateOptions,
        *,
        constrained: bool,
    ) -> Iterator[list[Translation]]:
        def start(task: tuple[list[str], LineExtras]) -> Future[_Translated]:
            return self._submit(_translate, self._opening, task, options, constrained)

        start(([], LineExtras())).result()  # reject settings before any text is read
        return map(self._received, in_order(start, tasks, _WINDOWS_PER_WORKER * self._opening.workers))

    def _received(self, done: _Translated) -> list[Translation]:
        translations, counts, told = done
        self.notices.merge(counts, told)
        self.on_finished(len(translations))
        return translations


@contextlib.contextmanager
def open_workers(
    path: str | Path | Sequence[str | Path],
    *,
    workers: int,
    threads: int | None = None,
    device: str = "auto",
    which: str | None = None,
    without_layers: str | None = None,
    **decoding: Any,
) -> Iterator[WorkerTranslator]:
    """Open a run or a model directory, or several as an ensemble, in worker processes that end with the block.

    The workers import the calling script again, so a script needs `if __name__ == "__main__":` around its work. Each of
    the `workers` has an equal share of the CPU `threads` (None: PyTorch's default), at least one. Other arguments are
    as in `load_translator`. Raises its errors, and DataError if a worker died.
    """
    paths = [path] if isinstance(path, str | Path) else path
    opening = _Opening(tuple(map(str, paths)), workers, threads, which, without_layers, device, decoding)
    with worker_pool(workers, way_out="use fewer `--workers` or a smaller `batch_tokens`") as submit:
        yield WorkerTranslator(submit, opening)


# A worker process serves one WorkerTranslator, so one model at a time.
@lru_cache(maxsize=1)
def _opened(opening: _Opening) -> Translator:
    torch.set_num_threads(max(1, (opening.threads or torch.get_num_threads()) // opening.workers))
    return load_translator(
        opening.models,
        which=opening.which,
        without_layers=opening.without_layers,
        device=opening.device,
        **opening.decoding,
    )


def _introduce(opening: _Opening) -> tuple[DecodingConfig, str, str, Mapping[bool, str]]:
    """Return the opened model's settings, origin and target language, and its notice about precisions."""
    translator = _opened(opening)
    about = {hints: translator.about_precision(hints) for hints in (False, True)}
    return translator.decoding, translator.origin, translator.target_language, about


def _translate(
    opening: _Opening, task: tuple[list[str], LineExtras], options: TranslateOptions, constrained: bool
) -> _Translated:
    translator = _opened(opening)
    translator.notices = Notices()
    # Notices.merge issues these warnings in the parent, each kind once for all workers.
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):
        translations = next(translator._translated([task], options, constrained=constrained))
    return translations, dict(translator.notices), translator.notices.told

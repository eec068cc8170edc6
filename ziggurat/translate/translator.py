"""Translation of text: lines are segmented, searched for in batches, and joined to exactly one result per line.

The way of a line: `Translator.translate` -> `TranslationCall` (settings, sentences of token ids) -> `Search` over a
`Scorer` (hypotheses of token ids) -> `Assembler` (text). `load_translator` opens the models.

`open_workers` opens several processes, each with a copy of the model and a share of the CPU threads. Each window of
lines goes to one of them as a whole; the translations come back in order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

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
from ziggurat.translate.call import LineExtras, TranslationCall, line_extras
from ziggurat.translate.hypotheses import Assembler
from ziggurat.translate.length import LengthPenalty
from ziggurat.translate.options import Capabilities, TranslateOptions
from ziggurat.translate.results import (
    WINDOW_LINES,
    Notices,
    TargetScore,
    Translation,
    TranslationWarning,
    count_untagged,
    refuse_single,
    windows,
    without_nul,
)
from ziggurat.translate.scorers import Scorer, Shortlist, force_score, open_members, scorer_of


class Translator:
    """Translator of text with one model or an ensemble; `ziggurat.load` and `load_translator` create one.

    Args:
        model: one model, or the members of an ensemble (ziggurat.translate.scorers), in evaluation mode, on `device`.
        source_tokenizer, target_tokenizer: tokenizers of the models' two sides.
        decoding: search settings, for calls that do not give others.
        max_positions: most positions of either side, where a model has such a limit (learned positions).
        device: where the models are.
        origin: description of the weights, for messages.
        target_language: code of the language that it translates into; scores may depend on it.
        before_step: called before every step of a search; an error that it raises ends the translation.
        scorer: creates the search's scorer in place of the models, which may then be missing (an exported model).

    `notices` counts what was not translated in the ordinary way: `blank_lines` (not shown to the model), `long_lines`
    (translated in parts), `unfinished` (cut at the length limit), `unmet` (constraints are missing), `untagged` (no
    tag, where the model has those of several languages), `tag_as_text` (a tag that the text begins with), `in_pieces`
    (cut into subword pieces already), `unknown` (text that the vocabulary lacks); and `too_large`, how often memory
    ran out, so that the rest of a call was translated in smaller batches. The first of each kind gives a warning,
    except for blank lines.
    `on_finished` is called with the number of sentences that a step of the search has finished, for a progress bar; a
    line in several parts is several sentences, a blank one is none. `about_precision` returns what `auto` has chosen
    and, if told to, what would be faster, for which it may measure.
    """

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
        # Threads that spin at barriers slow down when other processes want the cores.
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
        self.notices = Notices()
        self.on_finished: Callable[[int], object] = lambda count: None
        self.about_precision: Callable[[bool], str] = lambda hints: ""
        self.capabilities = Capabilities(constraints=True, continuous=True)

    @property
    def model(self) -> Seq2Seq:
        """The model; the first one of an ensemble."""
        return self.models[0]

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
            texts: lines; a line end inside a text counts as a blank.
            options: what is asked of all of them; most calls give keywords instead.
            first: the number of the first text, on which the random numbers of sampling depend.
            prefixes: beginning of each translation; an empty one leaves it free.
            constraints: phrases that each translation must contain; the result lists those that it lacks.
            longest: most tokens of each translation, where `decoding.max_length` allows more; of each part of it, where
                a text is translated in parts.
            asked: `tag`: a token such as `<bt>` of the training data, put before every source sentence; `terminology`:
                source terms and their translations, for texts that contain the terms; `next_words`: the n best differ
                in the word after the prefix, or in the first part of a text that is translated in parts; `complete`:
                prefixes end with a whole word, otherwise the next word may be the rest of their last one; others are
                keys of the `decoding` section in place of the configured ones, but for `precision` and `shortlist`,
                which belong to the opening of the model; None leaves one as it is.

        Raises ConfigError for settings that contradict each other or an unknown tag, DataError for more or fewer
        prefixes, constraints or limits than texts, TypeError for a single string.
        """
        refuse_single(texts=texts, prefixes=prefixes, constraints=constraints)
        texts = list(texts)
        for name, given in (("prefixes", prefixes), ("constraints", constraints), ("longest", longest)):
            if given is not None and len(given) != len(texts):
                raise DataError(f"{len(texts)} texts, but {len(given)} {name}; they must pair up")
        call = self.call_of(TranslateOptions.of(options, asked), constrained=constraints is not None)
        extras = LineExtras(first, prefixes or (), constraints or (), longest or (), numbered=len(texts) > 1)
        return self._translate_window(texts, call, extras)

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
        window is full or the input ends: for a dialogue use `window=1`, for throughput a few thousand.
        Other arguments are as in `translate`. If `lines` raises an error, every line before it is translated first.
        """
        refuse_single(lines=lines, prefixes=prefixes, constraints=constraints)
        call = self.call_of(TranslateOptions.of(options, asked), constrained=constraints is not None)
        pairs = line_extras(windows(lines, window), first, prefixes, constraints)
        return chain.from_iterable(self._translate_window(texts, call, extras) for texts, extras in pairs)

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None, first: int = 0
    ) -> list[TargetScore]:
        """Return the score of each given target as the translation of its source; `first` is as in `translate`.

        It is after the length penalty, without lingvo's coverage.

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
                score.log_probability / penalty.divisor(float(len(ids) + 1)),
                score.log_probability,
                tokenizer.pieces(ids),
                score.token_log_probabilities,
            )
            for ids, score in zip(target_ids, scores, strict=True)
        ]

    def call_of(self, options: TranslateOptions, *, constrained: bool = False) -> TranslationCall:
        """Return the settings of a call; raises ConfigError where they contradict each other."""
        changes = options.changes(self.decoding)
        decoding = change_section(self.decoding, {k: v for k, v in changes.items() if v is not None}, "decoding")
        for key in ("shortlist", "precision"):
            if getattr(decoding, key) != getattr(self.decoding, key):
                raise ConfigError(f"`decoding.{key}` is for the opening of a model; name it there")
        return TranslationCall(
            decoding,
            options,
            self.source_tokenizer,
            self.target_tokenizer,
            vocabulary_size=self.scorer().vocabulary_size,
            max_positions=self.max_positions,
            device=self.device,
            before_step=self.before_step,
            constrained=constrained,
        )

    def _translate_window(self, texts: Sequence[str], call: TranslationCall, extras: LineExtras) -> list[Translation]:
        """Translate `texts`, all in memory at once."""
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
                self.notices.add("unmet", f"a translation lacks {best.unmet_constraints[0]!r}, which was asked for")
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
        device: `auto` takes a GPU when there is one; else `cpu`, `cuda`, `cuda:1`, ...
        which: checkpoint of a run (of each run in the list), such as `best`; see ziggurat.model.directory.open_model.
        without_layers: layers to leave out of a single model, such as `encoder.5,decoder.3` (ziggurat.config.layers).
        decoding: keys of the `decoding` section that replace the saved ones, such as `beam_size=8` or
            `length_penalty={"alpha": 1.0}` (which leaves the other keys of `length_penalty` as they are).

    Raises CheckpointError for a missing or damaged model; ConfigError for a wrong setting, a device that is missing or
    does not compute with `decoding.precision`, or does so wrongly, or other vocabularies; DataError for a missing or
    damaged shortlist.
    """
    paths = [path] if isinstance(path, str | Path) else path
    members = open_members(paths, which=which, device=device, without_layers=without_layers)
    settings = change_section(members[0].experiment.decoding, decoding, "decoding")
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


_WINDOWS_PER_WORKER = 2
"""Windows of each worker that are read and not yet yielded: one that it translates and one that waits for it."""


@dataclass(frozen=True)
class _Opening:
    """Arguments for `load_translator` in each worker; `threads` are those of all workers together."""

    models: tuple[str, ...]
    workers: int
    threads: int | None
    which: str | None
    without_layers: str | None
    device: str
    decoding: Mapping[str, Any] = field(compare=False)  # of one WorkerTranslator; a worker serves no other


class _ModelFacts(NamedTuple):
    """The opened model's settings and description, for this process."""

    decoding: DecodingConfig
    origin: str
    target_language: str
    about_precision: Mapping[bool, str]  # with hints or without


class _TranslatedWindow(NamedTuple):
    """A window's translations, and its notices (ziggurat.translate.results)."""

    translations: list[Translation]
    counts: dict[str, int]
    told: dict[str, str]


class WorkerTranslator:
    """Translator of streams of text by worker processes; `open_workers` creates one.

    `decoding`, `origin`, `target_language`, `about_precision`, `notices` and `on_finished` are as in a Translator;
    `notices` adds up those of all workers.
    """

    def __init__(self, submit: Callable[..., Future[Any]], opening: _Opening) -> None:
        self._submit = submit
        self._opening = opening
        model: _ModelFacts = submit(_introduce, opening).result()
        # Where the precision is `auto`, this worker has chosen: the others might find something else.
        self._opening = replace(opening, decoding={**opening.decoding, "precision": model.decoding.precision})
        self.decoding = model.decoding
        self.origin = f"{model.origin}; {opening.workers} workers"
        self.about_precision: Callable[[bool], str] = model.about_precision.__getitem__
        self.target_language = model.target_language
        self.notices = Notices()
        self.on_finished: Callable[[int], object] = lambda count: None

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

        One worker translates a window as a whole. Up to _WINDOWS_PER_WORKER windows for each worker are read before the
        first translation is yielded. Other arguments are as in Translator.translate_stream.
        """
        refuse_single(lines=lines, prefixes=prefixes, constraints=constraints)
        options = TranslateOptions.of(options, asked)

        def start(texts: list[str], extras: LineExtras) -> Future[_TranslatedWindow]:
            of_lines = {
                "first": extras.first,
                "prefixes": None if prefixes is None else extras.prefixes,
                "constraints": None if constraints is None else extras.constraints,
            }
            return self._submit(_translate, self._opening, texts, options, of_lines)

        start([], LineExtras()).result()  # refuses settings before any text is read
        tasks = line_extras(windows(lines, window), first, prefixes, constraints)
        limit = _WINDOWS_PER_WORKER * self._opening.workers
        return chain.from_iterable(map(self._received, in_order(lambda task: start(*task), tasks, limit)))

    def _received(self, done: _TranslatedWindow) -> list[Translation]:
        self.notices.merge(done.counts, done.told)
        self.on_finished(len(done.translations))
        return done.translations


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

    The workers import the calling script again, so a script needs `if __name__ == "__main__":` around its own work.

    Args:
        path: folder of a run or a model, or a list of them; this, `device`, `which`, `without_layers` and
            `decoding` as in `load_translator`.
        workers: number of processes.
        threads: CPU threads of all workers together (None: as many as PyTorch would take); each worker has an equal
            share, at least one.
        device: `auto`, `cpu`, `cuda`, ...; the same for all workers.
        which: checkpoint of a run.
        without_layers: layers to leave out.
        decoding: keys of the `decoding` section that replace the saved ones.

    Raises the errors of `load_translator`, and DataError where a worker died.
    """
    paths = [path] if isinstance(path, str | Path) else path
    opening = _Opening(tuple(map(str, paths)), workers, threads, which, without_layers, device, decoding)
    with worker_pool(workers, way_out="use fewer `--workers` or a smaller `batch_tokens`") as submit:
        yield WorkerTranslator(submit, opening)


# A worker process serves one WorkerTranslator, so one model at a time.
@lru_cache(maxsize=1)
def _opened(opening: _Opening) -> Translator:
    """Load the model, once in the life of a worker."""
    torch.set_num_threads(max(1, (opening.threads or torch.get_num_threads()) // opening.workers))
    return load_translator(
        opening.models,
        which=opening.which,
        without_layers=opening.without_layers,
        device=opening.device,
        **opening.decoding,
    )


def _introduce(opening: _Opening) -> _ModelFacts:
    translator = _opened(opening)
    about = {hints: translator.about_precision(hints) for hints in (False, True)}
    return _ModelFacts(translator.decoding, translator.origin, translator.target_language, about)


def _translate(
    opening: _Opening, texts: list[str], options: TranslateOptions, of_lines: dict[str, Any]
) -> _TranslatedWindow:
    translator = _opened(opening)
    translator.notices = Notices()
    # Notices.merge gives these warnings in the parent, each kind once for all workers.
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):
        translations = translator.translate(texts, options, **of_lines)
    return _TranslatedWindow(translations, dict(translator.notices), translator.notices.told)

"""Text in, n-best text out: segmentation, batches, search, and exactly one result per line."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import DecodingConfig, LengthPenaltyConfig, MaxLengthConfig
from ziggurat.config.load import change_section
from ziggurat.data.subword import Tokenizer, load_tokenizers
from ziggurat.decoding.batches import length_batches, padded
from ziggurat.decoding.beam import SearchSettings, beam_search
from ziggurat.decoding.ensemble import open_members, scorer_of
from ziggurat.decoding.hypotheses import IdHypothesis
from ziggurat.decoding.length import LengthPenalty
from ziggurat.decoding.lines import WINDOW_LINES, join_parts, one_line, split_long, windows
from ziggurat.decoding.results import Hypothesis, TargetScore, Translation
from ziggurat.decoding.score import force_score
from ziggurat.errors import ConfigError, DataError, printable
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["WINDOW_LINES", "TranslationWarning", "Translator", "load_translator"]


class TranslationWarning(UserWarning):
    """Something in the input was not translated in the ordinary way; counted in `Translator.notices`."""


@dataclass(frozen=True)
class _Job:
    """What one call of the search needs besides sentences."""

    decoding: DecodingConfig
    settings: SearchSettings
    prefix: list[int]


class Translator:
    """Translates text with one model or an ensemble; `ziggurat.load` and `load_translator` make one.

    Args:
        model: one model, or the members of an ensemble (ziggurat.decoding.ensemble), in evaluation mode, on `device`.
        source_tokenizer, target_tokenizer: of the models' two sides.
        decoding: search settings for calls that do not give their own.
        max_positions: most positions of either side, where a model has such a limit (learned positions).
        device: where the models are.
        origin: which weights these are, in words for people.
        target_language: code of the language it translates into; scores may depend on it.
        before_step: called before every step of a search; what it raises ends the translation.

    `notices` counts by kind what was not translated in the ordinary way: `blank_lines` (not shown to the model),
    `long_lines` (translated in parts), `unfinished` (cut at the length limit); the first of either of these warns.
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
    ) -> None:
        self.models = tuple(model) if isinstance(model, Sequence) else (model,)
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.decoding = decoding or DecodingConfig()
        self.max_positions = max_positions
        self.device = device
        self.origin = origin
        self.target_language = target_language
        self.before_step = before_step
        self.notices: Counter[str] = Counter()

    @property
    def model(self) -> Seq2Seq:
        """The model; the first one of an ensemble."""
        return self.models[0]

    def translate(
        self,
        texts: Sequence[str],
        *,
        beam_size: int | None = None,
        n_best: int | None = None,
        min_length: int | None = None,
        length_penalty: LengthPenaltyConfig | None = None,
        max_length: MaxLengthConfig | None = None,
        batch_tokens: int | None = None,
        tag: str | None = None,
    ) -> list[Translation]:
        """Return one Translation per text, in the same order.

        What is None comes from the configuration; `tag` is a token such as `<bt>` of the training data, put
        before every source sentence. A line end inside a text counts as a blank. Raises ConfigError for
        settings that contradict each other or an unknown tag, TypeError for a single string.
        """
        if isinstance(texts, str):
            raise TypeError("give a list of texts, such as [text]: a string is a sequence of characters")
        changes = {"beam_size": beam_size, "n_best": n_best, "min_length": min_length, "batch_tokens": batch_tokens}
        job = self._job(tag, **changes, length_penalty=length_penalty, max_length=max_length)
        return self._translate_window(texts, job)

    def translate_stream(
        self, lines: Iterable[str], *, window: int = WINDOW_LINES, tag: str | None = None, **decoding: Any
    ) -> Iterator[Translation]:
        """Yield one Translation per line, in order, in memory that does not grow with the number of lines.

        `window` lines are read, sorted by length and translated together, so nothing appears before the
        window is full or the input ends: for a dialogue use `window=1`, for throughput a few thousand.
        `decoding`: as in `translate`. If `lines` raises an error, every line before it is translated first.
        """
        if window < 1:
            raise ConfigError(f"`window` must be at least 1, not {window}")
        job = self._job(tag, **decoding)
        return chain.from_iterable(self._translate_window(texts, job) for texts in windows(lines, window))

    def score(self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None) -> list[TargetScore]:
        """Return the score of each given target as the translation of its source.

        Raises DataError for unequal numbers of lines, or a line with more positions than the model has.
        """
        if len(sources) != len(targets):
            raise DataError(
                f"unequal numbers of lines: {len(sources)} of sources, {len(targets)} of targets; they must pair up"
            )
        job = self._job(tag)
        source_ids = [[*job.prefix, *ids] for ids in self.source_tokenizer.encode(_without_nul(sources))]
        target_ids = self.target_tokenizer.encode(_without_nul(targets))
        for number, sides in enumerate(zip(source_ids, target_ids, strict=True), start=1):
            longest = max(map(len, sides)) + 1
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
            batch_tokens=job.decoding.batch_tokens,
            device=self.device,
        )
        return [
            TargetScore(
                score.log_probability / job.settings.penalty.divisor(float(len(ids) + 1)),
                score.log_probability,
                tokenizer.pieces(ids),
                score.token_log_probabilities,
            )
            for ids, score in zip(target_ids, scores, strict=True)
        ]

    def _job(self, tag: str | None, **changes: Any) -> _Job:
        decoding = change_section(self.decoding, {k: v for k, v in changes.items() if v is not None}, "decoding")
        tokenizer = self.target_tokenizer
        prefix = []
        if tag is not None:
            if tag not in self.source_tokenizer.tags:
                known = ", ".join(self.source_tokenizer.tags) or "none"
                raise ConfigError(f"unknown tag {printable(tag)!r}; this model has: {known}")
            prefix = [self.source_tokenizer.tags[tag]]
        never = {tokenizer.pad, tokenizer.bos, *tokenizer.tags.values()}
        never.update(range(tokenizer.size, self.model.vocabulary_size))  # rows that only fill up the matrix
        settings = SearchSettings(
            beam_size=decoding.beam_size,
            n_best=decoding.n_best,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            forbidden=tuple(sorted(never - {tokenizer.eos})),
            min_length=decoding.min_length,
            penalty=LengthPenalty.of(decoding.length_penalty),
            endings=decoding.endings,
            before_step=self.before_step,
        )
        return _Job(decoding, settings, prefix)

    def _translate_window(self, texts: Sequence[str], job: _Job) -> list[Translation]:
        """Translate `texts`, all in memory at once."""
        clean = _without_nul(texts)
        encoded = self.source_tokenizer.encode(clean)
        limit = job.decoding.max_source_pieces
        if self.max_positions is not None:
            limit = min(limit, max(1, self.max_positions - 1 - len(job.prefix)))
        parts: list[list[int]] = []
        owned: list[range] = []
        for text, ids in zip(clean, encoded, strict=True):
            # str.strip also takes the blanks that normalisation leaves, such as U+3000.
            new = split_long(text, ids, self.source_tokenizer.encode, limit) if text.strip() and ids else []
            owned.append(range(len(parts), len(parts) + len(new)))
            parts += new
            self.notices["blank_lines"] += not new
            if len(new) > 1:
                self._notice(
                    "long_lines",
                    f"a line of {len(ids)} pieces is translated in {len(new)} parts of at most "
                    f"{limit} pieces (`decoding.max_source_pieces`)",
                )
        found = self._search(parts, job)
        return [
            self._joined(text, [found[i] for i in indices], job.decoding.n_best)
            for text, indices in zip(texts, owned, strict=True)
        ]

    def _search(self, parts: Sequence[list[int]], job: _Job) -> list[list[IdHypothesis]]:
        """Return the results of each part (ids without tag and end-of-sentence)."""
        rule = job.decoding.max_length
        limit = rule.limit if self.max_positions is None else min(rule.limit, self.max_positions - 1)
        scorer = scorer_of(self.models, keep_attention=job.decoding.length_penalty.coverage > 0)
        found: dict[int, list[IdHypothesis]] = {}
        lengths = [len(part) + len(job.prefix) + 1 for part in parts]
        for batch in length_batches(lengths, job.decoding.batch_tokens):
            rows = [[*job.prefix, *parts[i], self.source_tokenizer.eos] for i in batch]
            source, mask = padded(rows, self.source_tokenizer.pad, self.device)
            longest = [min(int(rule.ratio * len(parts[i]) + rule.extra), limit) for i in batch]
            max_lengths = torch.tensor(longest, device=self.device)
            found.update(zip(batch, beam_search(scorer, source, mask, max_lengths, job.settings), strict=True))
        return [found[i] for i in range(len(parts))]

    def _joined(self, source: str, parts: list[list[IdHypothesis]], n_best: int) -> Translation:
        """Return the translation of a line: the k-th best results of its parts, side by side.

        A part with fewer results gives its best one again; scores and log-probabilities add up.
        """
        if not parts:
            return Translation(source, [Hypothesis("", 0.0, 0.0, [], [], True)], 0)
        decode, pieces = self.target_tokenizer.decode, self.target_tokenizer.pieces
        hypotheses = []
        for rank in range(min(n_best, max(map(len, parts)))):
            chosen = [part[rank] if rank < len(part) else part[0] for part in parts]
            hypotheses.append(
                Hypothesis(
                    text=join_parts(one_line(decode(h.tokens)) for h in chosen),
                    score=sum(h.score for h in chosen),
                    log_probability=sum(h.log_probability for h in chosen),
                    tokens=[p for h in chosen for p in pieces(h.tokens)],
                    token_log_probabilities=[p for h in chosen for p in h.token_log_probabilities],
                    finished=all(h.finished for h in chosen),
                )
            )
        hypotheses.sort(key=lambda h: -h.score)
        if not hypotheses[0].finished:
            self._notice("unfinished", "a translation was cut at the length limit (`decoding.max_length`)")
        return Translation(source, hypotheses, len(parts))

    def _notice(self, kind: str, message: str) -> None:
        self.notices[kind] += 1
        if self.notices[kind] == 1:
            warnings.warn(f"{message}; further ones are only counted", TranslationWarning, stacklevel=4)


def _without_nul(texts: Sequence[str]) -> list[str]:
    """Return `texts` with NUL, which no training text holds, made a blank."""
    return [text.replace("\0", " ") for text in texts]


def load_translator(
    path: str | Path | Sequence[str | Path], *, device: str = "auto", which: str | None = None, **decoding: Any
) -> Translator:
    """Open a run or a model directory for translation, or several as an ensemble.

    Args:
        path: folder of a run (or of a model that `ziggurat average` wrote), or a list of them: the mean of their
            probabilities is used, with the decoding settings of the first.
        device: `auto` takes a GPU when there is one; else `cpu`, `cuda`, `cuda:1`, ...
        which: checkpoint of a run (of each run in the list), such as `best`; see ziggurat.models.directory.open_model.
        decoding: keys of the `decoding` section that replace the saved ones, such as `beam_size=8` or
            `length_penalty={"alpha": 1.0}` (which leaves the other keys of `length_penalty` as they are).

    Raises CheckpointError for a missing or damaged model, ConfigError for a wrong setting, a device that is not
    there, or models with different vocabularies.
    """
    members = open_members([path] if isinstance(path, str | Path) else path, which=which, device=device)
    first, origins = members[0], "; ".join(member.origin for member in members)
    source, target = load_tokenizers(first.directory)
    embeddings = [member.experiment.model.embedding for member in members]
    return Translator(
        [member.model for member in members],
        source,
        target,
        change_section(first.experiment.decoding, decoding, "decoding"),
        max_positions=min((e.max_positions for e in embeddings if e.positions == "learned"), default=None),
        device=first.model.device,
        origin=origins if len(members) == 1 else f"ensemble of {len(members)}: {origins}",
        target_language=first.experiment.data.target_language,
    )

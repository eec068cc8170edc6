"""Verification of an export: the result must translate like the model, and lose no more BLEU than is allowed.

The same beam search over the same text must give the same translations. Other toolkits sum in a different order, and
redistribute the probability of tokens that are never written, such as padding (ziggurat.translate.rules does not); so
two translations with nearly equal scores may swap ranks. The model itself distinguishes such ties from real
differences: by its scores in fp64, and by searches with weights perturbed in their last digits and with that
probability redistributed.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import Experiment
from ziggurat.data.babel import generate
from ziggurat.data.corpus import Store
from ziggurat.data.subword import Tokenizer
from ziggurat.data.vocabulary import several_languages
from ziggurat.evaluate.scores import evaluate, sacrebleu_metric
from ziggurat.evaluate.tokenisation import splitting
from ziggurat.exchange.huggingface import MAX_NEW_TOKENS
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import ExportTarget, ExportTranslator
from ziggurat.model.directory import OpenedModel
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.compressed import byte_stream
from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.translate.results import Translation
from ziggurat.translate.scorers import force_score
from ziggurat.translate.text_lines import read_lines
from ziggurat.translate.translator import Translator

BEAM = 4
_TIE = 1e-4
"""_TIE is the difference below which log-probabilities are equal: about the error of an fp32 sum over tokens."""
_TRIALS = 8
_IMPOSSIBLE = -1e9  # bias of a token that is never written
_NOISE = 2.0**-21
"""_NOISE is the relative change of every weight in a trial: a few units in the last place of fp32."""


@dataclass(frozen=True)
class ExportVerification:
    """Counts of the compared lines.

    Attributes:
        lines: lines compared.
        identical: lines with the same translation.
        ties: another translation with the same score, or one that ziggurat's own search finds when weights change in
            their last digits or when tokens that are never written have no probability.
        cut: another translation, where one of the two did not end within the limit; toolkits rank those differently.
        different: another translation for none of the reasons above.
        example: the first line that is different.
    """

    lines: int
    identical: int
    ties: int
    cut: int
    different: int
    example: str = ""

    def check(self) -> None:
        """Raise ExportError unless both are the same model."""
        if self.different:
            raise ExportError(
                f"the exported model gives a different text for {self.different:,} of {self.lines:,} lines "
                f"({self.ties:,} more are ties), such as {self.example}; nothing was written"
            )
        if self.cut > self.lines // 2:
            raise ExportError(
                f"{self.cut:,} of {self.lines:,} translations hit the length limit, so they prove nothing; is the "
                "model trained? Pass text of the kind it was trained on with `--verify FILE`. Nothing was written"
            )


def search_settings(positions: int, limit: int) -> dict[str, Any]:
    """Return settings under which all toolkits search alike: a plain beam, no penalty, one limit for all lines.

    `limit` is the model's own limit, in tokens; at most MAX_NEW_TOKENS - 1 are used.
    """
    limit = min(MAX_NEW_TOKENS - 1, positions - 1, limit)
    return {
        "beam_size": BEAM,
        "n_best": 1,
        "min_length": 1,
        "endings": "beam",
        "shortlist": None,
        # Whatever search the model itself uses, none of its settings may be combined with `endings: beam`.
        "search": "beam",
        "diverse_groups": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "epsilon": 0.0,
        "mbr": 0,
        "length_penalty": {"kind": "none", "alpha": 0.0, "coverage": 0.0, "word_penalty": 0.0},
        "unknown": False,
        "replace_unknown": False,
        "max_length": {"ratio": 0.0, "extra": limit, "limit": limit},
    }


def compare(
    ours: Translator,
    theirs: ExportTranslator,
    texts: Sequence[str],
    settings: dict[str, Any],
) -> ExportVerification:
    """Translate `texts` with the model and with its export, and compare the translations.

    Warns if the model's tags name several languages, because the texts here have no tag.
    """
    if languages := several_languages(ours.source_tokenizer.tags):
        warnings.warn(
            f"the model's tags name several languages ({languages}), and the export is compared without a tag: both "
            "models choose the language, which still compares their weights; BLEU of a `--reference` mixes languages",
            stacklevel=2,
        )
    mine = list(ours.translate_stream(texts, **settings))
    others = list(theirs.translate_stream(texts, **settings))
    counts = {"identical": 0, "ties": 0, "cut": 0, "different": 0}
    unlike: list[int] = []
    for number, (a, b) in enumerate(zip(mine, others, strict=True)):
        if a.text == b.text:
            counts["identical"] += 1
        # Translations that were cut off prove nothing: toolkits rank them differently.
        elif a.hypotheses[0].finished and b.hypotheses[0].finished:
            unlike.append(number)
        else:
            counts["cut"] += 1
    tied = _ties(ours, [mine[n] for n in unlike], [others[n] for n in unlike], settings)
    counts["ties"] = sum(tied)
    counts["different"] = len(unlike) - sum(tied)
    example = ""
    for number, is_tie in zip(unlike, tied, strict=True):
        if not is_tie:
            shown = (printable(text) for text in (texts[number], mine[number].text, others[number].text))
            example = "`{}`: `{}`, exported `{}`".format(*shown)
            break
    return ExportVerification(len(texts), **counts, example=example)


def _ties(ours: Translator, mine: list[Translation], others: list[Translation], settings: dict[str, Any]) -> list[bool]:
    """Return, for each pair of different translations, True if only rounding separates them."""
    if not mine:
        return []
    sources = [translation.source for translation in mine]
    scores = [_log_probabilities(ours, sources, side) for side in (mine, others)]
    # (1) The model gives both the same score in fp64.
    tied = [abs(a - b) <= _TIE for a, b in zip(*scores, strict=True)]
    generator = torch.Generator().manual_seed(0)
    # (2) A search finds the export's translation, in fp64 (the first two trials) or with weights perturbed in their
    # last digits. Every other trial redistributes the probability of tokens that are never written. That probability is
    # large in small vocabularies, because label smoothing gives each token a share.
    for trial in range(2 * _TRIALS + 2):
        left = [number for number, tie in enumerate(tied) if not tie]
        if not left:
            break
        shaken = _shaken(ours, generator if trial > 1 else None, shares_out=trial % 2 == 1)
        found = shaken.translate_stream([sources[n] for n in left], **settings)
        for number, translation in zip(left, found, strict=True):
            tied[number] = translation.text == others[number].text
    return tied


def _log_probabilities(ours: Translator, sources: list[str], translations: list[Translation]) -> list[float]:
    """Return the log-probability of each translation by the model itself, in fp64."""
    tokenizer = ours.target_tokenizer
    ids = {piece: number for number, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}
    targets = [[ids.get(piece, tokenizer.unk) for piece in t.hypotheses[0].tokens] for t in translations]
    scored = force_score(
        # In fp64 no tie is due to rounding. This is a copy, because the weights may be exported again, quantised.
        copy.deepcopy(ours.model).double(),
        [[*ids, ours.source_tokenizer.eos] for ids in ours.source_tokenizer.encode(sources)],
        targets,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        pad=tokenizer.pad,
    )
    return [sum(of_tokens) for of_tokens in scored]


@torch.no_grad()
def _shaken(ours: Translator, generator: torch.Generator | None, *, shares_out: bool) -> Translator:
    """Return the translator in fp64, with its weights perturbed in their last digits if a generator is given.

    `shares_out`: tokens that are never written have no probability, so that the others have more.
    """
    model = copy.deepcopy(ours.model).double()
    if generator is not None:
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + _NOISE * noise)
    if shares_out:
        _rule_out(model, ours.target_tokenizer, ours.target_tokenizer.unk)
    return _with_model(ours, model)


@torch.no_grad()
def _rule_out(model: Seq2Seq, tokenizer: Tokenizer, *more: int) -> None:
    """Remove the probability of tokens that are not text, and of the ids `more`, so that the others have more."""
    given = model.output.bias
    bias = torch.zeros_like(model.output.weight[:, 0]) if given is None else given.clone()
    never = {tokenizer.pad, tokenizer.bos, *tokenizer.tags.values(), *more} - {tokenizer.eos}
    bias[sorted(never)] = _IMPOSSIBLE
    model.output.bias = torch.nn.Parameter(bias)


def _with_model(ours: Translator, model: Seq2Seq) -> Translator:
    return Translator(
        model, ours.source_tokenizer, ours.target_tokenizer, ours.decoding, max_positions=ours.max_positions
    )


def _text_only(ours: Translator) -> Translator:
    """Return the translator without tokens that are not text; the unknown token keeps its probability, as in Marian."""
    _rule_out(model := copy.deepcopy(ours.model), ours.target_tokenizer)
    return _with_model(ours, model)


@dataclass(frozen=True)
class Gate:
    """A test set on which the result must be as good as the model.

    Attributes:
        source: text file.
        reference: its translation.
        tolerance: largest loss of BLEU that is allowed.
    """

    source: Path
    reference: Path
    tolerance: float = 0.2

    def read(self, language: str | None) -> tuple[list[str], list[str]]:
        """Return the lines of source and reference, in the target `language`.

        Raises DataError if they do not pair up, ConfigError if BLEU's tokenizer for the language is not installed.
        """
        sources, references = _lines(self.source), _lines(self.reference)
        if len(sources) != len(references):
            raise DataError(
                f"{self.source} has {len(sources):,} lines, but {self.reference} has {len(references):,}: "
                "they must pair up"
            )
        sacrebleu_metric("bleu", tokenize=splitting([references], language).bleu)
        return sources, references


@dataclass(frozen=True)
class ExportChecks:
    """Comparisons of a model with its export in a folder.

    Attributes:
        target: what the model is exported to.
        model: the model; its sample is the text that both translate.
        ours: its translator.
        like_theirs: the same, but searching as the target's toolkit does.
    """

    target: ExportTarget
    model: ExportedModel
    ours: Translator
    like_theirs: Translator

    @classmethod
    def of(cls, opened: OpenedModel, model: ExportedModel, target: ExportTarget) -> ExportChecks:
        """Return the checks of an opened model."""

        def translator(experiment: Experiment) -> Translator:
            return Translator(
                opened.model,
                model.source,
                model.target,
                experiment.decoding,
                max_positions=experiment.model.embedding.limit,
                origin=opened.origin,
                target_language=experiment.data.target_language,
            )

        ours = translator(opened.experiment)
        like_theirs = translator(model.searching_as_others(target.rules)) if target.own_search else ours
        return cls(target, model, ours, _text_only(like_theirs) if target.text_only else like_theirs)

    def verified(self, folder: Path) -> dict[str, Any]:
        """Return the figures of the comparison, without lines that are too long. Raises ExportError: they differ."""
        limits, positions, texts = self.like_theirs.decoding, self.model.positions, self.model.sample
        settings = search_settings(positions, limits.max_length.limit) | dict(self.target.settings)
        # Longer lines than these are translated in parts by ziggurat's search, but not by every other toolkit.
        longest = min(MAX_NEW_TOKENS - 1, positions - 1, limits.max_source_pieces + 1)
        lengths = [len(ids) for ids in self.model.source.encode(list(texts))]
        short = [text for text, length in zip(texts, lengths, strict=True) if length < longest]
        if not short:
            raise DataError(f"no line to verify the export with is shorter than {longest} pieces")
        verification = compare(self.like_theirs, self.target.translator(folder), short, settings)
        verification.check()
        figures = {**asdict(verification), "left_out": len(texts) - len(short), "settings": settings}
        return figures if self.target.checked_by is None else {**figures, "by": self.target.checked_by()}

    def unchanged(self, folder: Path) -> dict[str, int]:
        """Return the number of texts that are translated as before, with the model's own search or the target's."""
        ours = self.like_theirs if self.target.search else self.ours
        sides = (
            each.translate_stream(self.model.sample, **self.target.search)
            for each in (ours, self.target.translator(folder))
        )
        same = sum(a.text == b.text for a, b in zip(*sides, strict=True))
        return {"lines": len(self.model.sample), "identical": same}

    def passed(self, folder: Path, gate: Gate, sources: list[str], references: list[str]) -> dict[str, Any]:
        """Return BLEU before and after. Raises ExportError if it falls by more than the tolerance."""
        scores = []
        for translator in (self.ours, self.target.translator(folder)):
            hypotheses = [translation.text for translation in translator.translate_stream(sources)]
            scores += evaluate(hypotheses, [references], metrics=["bleu"], target_language=self.ours.target_language)
        before, after = (score.value for score in scores)
        if before - after > gate.tolerance:
            raise ExportError(
                f"BLEU falls from {before:.2f} to {after:.2f} on {gate.source}, by more than "
                f"`--tolerance {gate.tolerance}`; nothing was written"
            )
        return {
            "source": str(gate.source),
            "reference": str(gate.reference),
            "before": before,
            "after": after,
            "tolerance": gate.tolerance,
            "signature": scores[0].signature,
        }


def verification_text(experiment: Experiment, verify: Path | None, lines: int) -> tuple[list[str], str]:
    """Return text to verify with, at most `lines` lines, and a description of its origin.

    Raises DataError if the text is empty or the store cannot be read. It may be missing.
    """
    store = Path(experiment.data.store).expanduser()
    if verify is not None:
        texts, origin = _lines(verify), str(verify)
    else:
        try:
            dev = Store.open(store).dev if os.path.lexists(store) else None
        except DataError as error:
            raise DataError(f"{error}; or give text for the comparison as `--verify FILE`") from None
        if dev is not None:
            texts, origin = dev.texts(range(min(lines, len(dev))))[0], f"{experiment.data.store}: development set"
        else:
            texts, origin = [source for source, _ in generate(lines, seed=1)], "embedded sentences (Babel)"
    texts = [text for text in texts if text.strip()][:lines]
    if not texts:
        raise DataError(f"{origin}: no text to verify the export with")
    return texts, origin


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file, compressed or not. Raises DataError if it cannot be read."""
    with byte_stream(path) as stream:
        return list(read_lines(stream, str(path)))

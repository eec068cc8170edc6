"""Verification of an exported model: the same beam search over the same text must give the same translations.

Toolkits sum in another order than ours, and share out the probability of tokens that are never written, such as padding
(ziggurat.translate.rules does not); so two translations of nearly the same score may change places. Such ties are told
from real differences by the model itself: by its scores in fp64, and by searches with weights moved in their last
digits and with that probability shared out.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ziggurat.data.tags import several_languages
from ziggurat.exchange.huggingface import MAX_NEW_TOKENS
from ziggurat.exchange.targets import ExportTranslator
from ziggurat.system.errors import ExportError, printable
from ziggurat.translate.results import Translation
from ziggurat.translate.scorers import force_score
from ziggurat.translate.translator import Translator

BEAM = 4
_TIE = 1e-4
"""Log-probabilities that differ by less are equal: about the error of a sum over tokens in fp32."""
_TRIALS = 8
_IMPOSSIBLE = -1e9
"""Bias of a token that is never written."""
_NOISE = 2.0**-21
"""Relative change of every weight in a trial: a few units in the last place of fp32."""


@dataclass(frozen=True)
class ExportVerification:
    """Counts of the lines compared.

    Attributes:
        lines: lines compared.
        identical: lines with the same translation.
        ties: another translation of the same score, or one that our own search finds when weights change in their last
            digits, or when tokens that are never written have no probability.
        cut: another translation, where one of the two did not end within the limit; toolkits rank those differently.
        different: another translation for none of these reasons.
        example: the first line that is different.
    """

    lines: int
    identical: int
    ties: int
    cut: int
    different: int
    example: str = ""

    def record(self) -> dict[str, Any]:
        """Return the counts by name."""
        return asdict(self)

    def check(self) -> None:
        """Raise ExportError unless the two are the same model."""
        if self.different:
            raise ExportError(
                f"the exported model gives another text for {self.different:,} of {self.lines:,} lines "
                f"({self.ties:,} more are ties), such as {self.example}; nothing was written"
            )
        if self.cut > self.lines // 2:
            raise ExportError(
                f"{self.cut:,} of {self.lines:,} translations did not end, so they show nothing; is the model trained? "
                "Give text of its kind by `--verify FILE`. Nothing was written"
            )


def search_settings(positions: int, limit: int) -> dict[str, Any]:
    """Return settings under which all toolkits search alike: an ordinary beam, no penalty, one limit for all lines.

    `limit` is the model's own, in tokens; at most MAX_NEW_TOKENS - 1 are used.
    """
    limit = min(MAX_NEW_TOKENS - 1, positions - 1, limit)
    return {
        "beam_size": BEAM,
        "n_best": 1,
        "min_length": 1,
        "endings": "beam",
        "shortlist": None,
        # Whatever the model's own search is, nothing of it may stand beside `endings: beam`.
        **{"search": "beam", "diverse_groups": 1},
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "epsilon": 0.0, "mbr": 0},
        "length_penalty": {"kind": "none", "alpha": 0.0, "coverage": 0.0},
        "max_length": {"ratio": 0.0, "extra": limit, "limit": limit},
    }


def compare(
    ours: Translator, theirs: ExportTranslator, texts: Sequence[str], settings: dict[str, Any]
) -> ExportVerification:
    """Translate `texts` with the model and with its export, and compare the translations.

    Warns where the model's tags name several languages: no text has one here.
    """
    if languages := several_languages(ours.source_tokenizer.tags):
        warnings.warn(
            f"the model's tags name several languages ({languages}), and an export is tried without one: both write "
            "in whatever language, which still compares their weights; BLEU of a `--reference` is of no one language",
            stacklevel=2,
        )
    mine = list(ours.translate_stream(texts, **settings))
    others = list(theirs.translate_stream(texts, **settings))
    counts = {"identical": 0, "ties": 0, "cut": 0, "different": 0}
    unlike: list[int] = []
    for number, (a, b) in enumerate(zip(mine, others, strict=True)):
        if a.text == b.text:
            counts["identical"] += 1
        # Translations that were cut are no evidence: toolkits rank them differently.
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
    """Return, for each pair of unlike translations, True if only rounding decided between them."""
    if not mine:
        return []
    sources = [translation.source for translation in mine]
    scores = [_log_probabilities(ours, sources, side) for side in (mine, others)]
    # (1) The model gives both the same score in fp64.
    tied = [abs(a - b) <= _TIE for a, b in zip(*scores, strict=True)]
    generator = torch.Generator().manual_seed(0)
    # (2) A search finds the export's translation, in fp64 (the first two trials) or with weights moved in their last
    # digits; in every other one the probability of tokens that are never written is shared out. That counts where it is
    # large: in small vocabularies, of which label smoothing gives each token a part.
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
        # fp64 leaves no ties to rounding; a copy, since the weights may be exported again, quantised.
        copy.deepcopy(ours.model).double(),
        [[*ids, ours.source_tokenizer.eos] for ids in ours.source_tokenizer.encode(sources)],
        targets,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        pad=tokenizer.pad,
    )
    return [score.log_probability for score in scored]


@torch.no_grad()
def _shaken(ours: Translator, generator: torch.Generator | None, *, shares_out: bool) -> Translator:
    """Return the translator in fp64, with its weights moved in their last digits where a generator is given.

    `shares_out`: tokens that are never written have no probability, so that the others have more.
    """
    model = copy.deepcopy(ours.model).double()
    if generator is not None:
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + _NOISE * noise)
    if shares_out:
        tokenizer = ours.target_tokenizer
        never = sorted({tokenizer.pad, tokenizer.bos, *tokenizer.tags.values()} - {tokenizer.eos})
        bias = torch.zeros(model.output.weight.shape[0], dtype=torch.float64, device=model.device)
        bias += 0.0 if model.output.bias is None else model.output.bias
        bias[never] = _IMPOSSIBLE
        model.output.bias = torch.nn.Parameter(bias)
    return Translator(
        model, ours.source_tokenizer, ours.target_tokenizer, ours.decoding, max_positions=ours.max_positions
    )

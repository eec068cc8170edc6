"""The answer in plain words: what was compared, and who stands best by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ziggurat.evaluation.findings import Pair, Scores
from ziggurat.report.content import Content
from ziggurat.report.differences import Setting
from ziggurat.report.runs import ReportRun

__all__ = ["answer", "compared"]

_SHOWN = 5
_SIGNIFICANT = 0.05
_TRANSLATES = 1.0  # BLEU; below it there is nothing to compare


def compared(content: Content) -> str:
    """Return one or two sentences on what the runs are and what tells them apart."""
    runs = content.runs
    if len(runs) == 1:
        model = runs[0].experiment.model
        return f"One run: {model.residual if model.family == 'transformer' else model.family}, {_size(runs[0])}."
    sizes = list(dict.fromkeys(_size(run) for run in runs))
    of = f" of {sizes[0]}" if len(sizes) == 1 else ""
    first = f"{len(runs)} runs{of}, {_data(runs)}."
    telling = [s for s in content.settings if s.key not in ("data.store",)]
    if not telling:
        return f"{first} Their configurations are the same."
    told = [_told(setting) for setting in telling[:_SHOWN]]
    more = f", and {len(telling) - _SHOWN} more settings" if len(telling) > _SHOWN else ""
    return f"{first} They differ in {'; '.join(told)}{more}."


def answer(content: Content) -> list[str]:
    """Return who stands best, and whether that may be chance; nothing for a single run."""
    if len(content.runs) < 2:
        return []
    said = []
    if ahead := _ahead_in_training(content):
        said.append(ahead)
    if content.translations is not None and (tested := _tested(content.translations.comparison.scores)):
        said.append(tested)
    failed = [run.name for run, its in zip(content.runs, content.standings, strict=True) if its.level == "bad"]
    if len(failed) == len(content.runs):
        said.append("None of them trained.")
    elif failed:
        said.append(f"{_listed(failed)} did not train." if len(failed) > 1 else f"{failed[0]} did not train.")
    return said


def _ahead_in_training(content: Content) -> str | None:
    """Return who has the best dev score of training, BLEU where all have it, else the loss."""
    for key, name, sign, digits in (("bleu", "dev BLEU", 1, 1), ("best_nll", "dev loss", -1, 2)):
        if key == "best_nll" and not _same_tokens(content):
            return "Dev losses, which are per token, are not ranked: data or vocabulary are not the same."
        values = [its.figures[key] for its in content.standings]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue
        if key == "bleu" and max(known) < _TRANSLATES:
            continue
        order = sorted(range(len(known)), key=lambda i: -sign * known[i])
        best, second = order[:2]
        gap = abs(known[best] - known[second])
        if math.isclose(gap, 0.0, abs_tol=0.5 * 10**-digits):
            return f"No run is ahead: {content.runs[best].name} and {content.runs[second].name} have equal {name}."
        return (
            f"{content.runs[best].name} stands best with a {name} of {known[best]:.{digits}f}, {gap:.{digits}f} "
            f"{'more' if sign > 0 else 'less'} than {content.runs[second].name}."
        )
    return None


def _same_tokens(content: Content) -> bool:
    """Whether losses per token are of the same tokens: dev sets have one name, and are prepared alike."""
    data = [run.experiment.data for run in content.runs]
    kept = [
        (its.unicode, its.subword, [Path(corpus.target or corpus.path or "").name for corpus in its.dev])
        for its in data
    ]
    return all(its == kept[0] for its in kept)


def _tested(scores: Sequence[Scores]) -> str | None:
    """Return what both tests say of the best two systems under the first metric."""
    if not scores or len(scores[0].systems) < 2 or max(its.mean for its in scores[0].systems) < _TRANSLATES:
        return None
    first = scores[0]
    pair = _best_pair(first)
    left_is_better = (pair.difference > 0) == first.higher_is_better
    better, worse = (pair.left, pair.right) if left_is_better else (pair.right, pair.left)
    p = max(pair.bootstrap_adjusted, pair.randomisation_adjusted)
    by = f"{abs(pair.difference):.1f} {first.metric}"
    where = "On the sentences translated for this report"
    if p < _SIGNIFICANT and pair.difference:
        return f"{where} {better} is better than {worse} by {by}, which is not chance (p = {p:.3f})."
    return f"{where} {better} is ahead of {worse} by {by}, which may well be chance (p = {p:.2f})."


def _best_pair(scores: Scores) -> Pair:
    """Return the pair of the two best systems."""
    sign = 1 if scores.higher_is_better else -1
    order = sorted(range(len(scores.systems)), key=lambda i: -sign * scores.systems[i].mean)
    names = list(dict.fromkeys(name for pair in scores.pairs for name in (pair.left, pair.right)))
    best = {names[i] for i in order[:2]}
    return next(pair for pair in scores.pairs if {pair.left, pair.right} == best)


def _size(run: ReportRun) -> str:
    model = run.experiment.model
    return f"{model.encoder.layers}-{model.decoder.layers} layers, width {model.d_model}"


def _data(runs: Sequence[ReportRun]) -> str:
    data = [run.experiment.data.model_copy(update={"store": ""}) for run in runs]
    return "on the same data" if all(one == data[0] for one in data) else "on different data"


def _told(setting: Setting) -> str:
    values = [value if len(value) <= 40 else value[:39] + "…" for value in dict.fromkeys(setting.values)]
    return f"`{setting.key}` ({' / '.join(values)})"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"

"""The report as one HTML file: no script, nothing fetched, all text escaped.

The answer of a report in plain sentences: the runs compared, the best of them, and by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ziggurat.config import dump
from ziggurat.data.subword import load_tokenizers, same_vocabulary
from ziggurat.evaluate.findings import Pair, Scores
from ziggurat.inspect.report.content import Content, Setting
from ziggurat.inspect.report.drawing import name_of_run
from ziggurat.inspect.report.figure import Figure, numbers
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.inspect.report.template import page_templates, table_link
from ziggurat.inspect.report.translations import as_csv
from ziggurat.system.errors import CheckpointError, DataError

_SHOWN = 5  # settings
_SIGNIFICANT = 0.05  # p-value
_TRANSLATES = 1.0  # BLEU; below it systems are not compared


def compared(content: Content) -> str:
    """Return one or two sentences on the runs and the settings they differ in."""
    runs = content.runs
    if len(runs) == 1:
        model = runs[0].experiment.model
        return f"One run: {model.residual if model.family == 'transformer' else model.family}, {_size(runs[0])}."
    sizes = list(dict.fromkeys(_size(run) for run in runs))
    of = f" of {sizes[0]}" if len(sizes) == 1 else ""
    first = f"{len(runs)} runs{of}, {_data(runs)}."
    differing = [setting for setting in content.settings if setting.key != "data.store"]
    if not differing:
        return f"{first} Their configurations are the same."
    listed = "; ".join(_setting_text(setting) for setting in differing[:_SHOWN])
    more = f", and {len(differing) - _SHOWN} more settings" if len(differing) > _SHOWN else ""
    return f"{first} They differ in {listed}{more}."


def answer(content: Content) -> list[str]:
    """Return sentences on the best run, and whether its lead may be chance; none for a single run."""
    if len(content.runs) < 2:
        return []
    sentences = []
    if ahead := _ahead_in_training(content):
        sentences.append(ahead)
    if content.translations is not None and (tested := _tested(content.translations.comparison.scores)):
        sentences.append(tested)
    failed = [
        run.name for run, standing in zip(content.runs, content.standings, strict=True) if standing.level == "bad"
    ]
    if len(failed) == len(content.runs):
        sentences.append("None of them trained.")
    elif failed:
        sentences.append(f"{_listed(failed)} did not train." if len(failed) > 1 else f"{failed[0]} did not train.")
    return sentences


def _ahead_in_training(content: Content) -> str | None:
    """Return a sentence on the best dev score in training: BLEU where all runs have it, otherwise the loss."""
    for key, name, sign, digits in (("bleu", "dev BLEU", 1, 1), ("best_nll", "dev loss", -1, 2)):
        values = [standing.figures[key] for standing in content.standings]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue
        if any(_dev_set(run) != _dev_set(content.runs[0]) for run in content.runs):
            return "Dev scores are not ranked: the dev sets are not the same."
        if key == "best_nll" and not _vocabularies_agree(content.runs):
            return "Dev losses, which are per token, are not ranked: the vocabularies differ or cannot be read."
        if key == "bleu" and max(known) < _TRANSLATES:
            continue
        order = sorted(range(len(known)), key=lambda i: -sign * known[i])
        best, second = order[:2]
        gap = abs(known[best] - known[second])
        # A lead that rounds to 0.0 (0.00) is not one.
        if math.isclose(gap, 0.0, abs_tol=0.5 * 10**-digits):
            return f"No run is ahead: {content.runs[best].name} and {content.runs[second].name} have equal {name}."
        return (
            f"{content.runs[best].name} stands best with a {name} of {known[best]:.{digits}f}, {gap:.{digits}f} "
            f"{'more' if sign > 0 else 'less'} than {content.runs[second].name}."
        )
    return None


def _dev_set(run: ReportRun) -> list[list[str]]:
    """Return what tells one dev set from another: the names of its files, since folders differ between machines."""
    dev = run.experiment.data.dev
    return [[Path(path).name for path in (corpus.source, corpus.target, corpus.path) if path] for corpus in dev]


def _vocabularies_agree(runs: Sequence[ReportRun]) -> bool:
    """Return True where a dev set is cut into the same target tokens, over which losses are means, in all runs.

    Settings would not tell: the same ones give other vocabularies on other training corpora.
    """
    try:
        first, *others = [load_tokenizers(run.folder)[1] for run in runs]
    except (DataError, CheckpointError):
        return False
    return all(one.unicode == first.unicode and same_vocabulary(one, first) for one in others)


def _tested(scores: Sequence[Scores]) -> str | None:
    """Return a sentence on both tests of the best two systems under the first metric."""
    if not scores or len(scores[0].systems) < 2 or max(system.mean for system in scores[0].systems) < _TRANSLATES:
        return None
    first = scores[0]
    pair = _best_pair(first)
    if not pair.difference:
        return f"On the sentences translated for this report {pair.left} and {pair.right} have equal {first.metric}."
    left_is_better = (pair.difference > 0) == first.higher_is_better
    better, worse = (pair.left, pair.right) if left_is_better else (pair.right, pair.left)
    by = f"{abs(pair.difference):.1f} {first.metric}"
    where = "On the sentences translated for this report"
    if first.too_few:
        return f"{where} {better} is ahead of {worse} by {by}; {first.sentences} are too few to tell whether by chance."
    p = max(pair.bootstrap_adjusted, pair.randomisation_adjusted)
    if p < _SIGNIFICANT:
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


def _setting_text(setting: Setting) -> str:
    values = [value if len(value) <= 40 else value[:39] + "…" for value in dict.fromkeys(setting.values)]
    return f"`{setting.key}` ({' / '.join(values)})"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


_DOWNLOADS = 2_500_000  # bytes of all links with numbers


def page(content: Content, *, now: float | None = None) -> str:
    """Return the report as HTML; `now`, in seconds since 1970, is the date shown in it (default: the present)."""
    environment = page_templates(now)
    environment.filters |= {
        "colour": lambda run: f"var({name_of_run(run)})",
        "yaml": lambda run: dump(run.experiment),
    }
    sections: dict[str, list[Figure]] = {}
    for figure in content.figures:
        sections.setdefault(figure.section, []).append(figure)
    return environment.get_template("report.html").render(
        content=content,
        title=" and ".join(run.name for run in content.runs) if len(content.runs) < 4 else f"{len(content.runs)} runs",
        compared=compared(content),
        answer=answer(content),
        sections=sections,
        downloads=_downloads(content),
    )


def _downloads(content: Content) -> dict[str, tuple[str, str] | None]:
    """Return file name and link of each figure's table, and of `translations`; None where there is no room for it.

    The shortest are taken first, so only large tables are left out: heat maps of many deep runs.
    """
    tables = {figure.key: numbers(figure) for figure in content.figures}
    if (translations := _translations(content)) is not None:
        tables["translations"] = translations
    links = {name: table_link(name, table) for name, table in tables.items()}
    fitting: dict[str, tuple[str, str] | None] = {}
    room = _DOWNLOADS
    for name, (file, link) in sorted(links.items(), key=lambda item: len(item[1][1])):
        room -= len(link)
        fitting[name] = (file, link) if room >= 0 else None
    return fitting


def _translations(content: Content) -> str | None:
    """Return all translations as CSV; None where there are none."""
    found = content.translations
    if found is None:
        return None
    outputs = [None if of_run is None else of_run.outputs for of_run in found.by_run]
    return as_csv([run.name for run in content.runs], outputs, found.sentences.sources, found.sentences.references)

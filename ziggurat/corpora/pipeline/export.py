"""Steps that write the final model for other toolkits."""

from __future__ import annotations

import importlib.util
import shlex
from functools import partial
from pathlib import Path

from ziggurat.config.pipeline import ModelName
from ziggurat.config.pipeline_models import ExportTarget, ShortlistConfig
from ziggurat.corpora.pipeline.models import experiment_of, experiment_there, in_fresh_state, model_files, of_model
from ziggurat.corpora.pipeline.road import Road
from ziggurat.corpora.pipeline.settings import settings_of
from ziggurat.corpora.pipeline.shortlists import SHORTLIST, shortlists
from ziggurat.corpora.pipeline.step import Step
from ziggurat.system.errors import ConfigError, ExportError

_NEEDS = {
    "ctranslate2": ("ctranslate2",),
    "argos": ("ctranslate2",),
    "huggingface": ("transformers",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
}


def final_model(road: Road) -> tuple[ModelName, Path, dict[str, list[str]]]:
    """Return the model that the pipeline is for, its folder, and the dependence on it."""
    if road.config.quantisation is not None:
        return "student", road.at("quantise", "run"), {"quantise": ["run/*"]}
    name: ModelName = "teacher" if road.config.student is None else "student"
    return name, road.model(name), of_model(road, name)


def shipped(road: Road) -> list[str]:
    """Return lines on what the pipeline was for: the exports, and the command that translates with one or the model."""
    chosen = road.config.export
    places = {to: road.at(f"export-{to}", to) for to, target in chosen or () if target is not None}
    name, model, _ = final_model(road)
    exports = [f"the {name} for {to}: {place}" for to, place in places.items()]
    translating = shlex.quote(str(places.get("ctranslate2", model)))  # no other export is read here
    return [*exports, f"to translate: ziggurat translate {translating} < text.{road.languages[0]}"]


def _of_dev(road: Road) -> tuple[Path, dict[str, list[str]]]:
    """Return the source side of a development set, and the dependence on it."""
    if road.config.bitext.dev:
        return road.sides("sets", "dev", "0")[0], {"sets": [f"dev/0.{road.languages[0]}"]}
    return road.sides("clean", "held-out", "dev")[0], {"clean": [f"held-out/dev.{road.languages[0]}"]}


def shortlist_step(road: Road, how: ShortlistConfig) -> Step:
    """Return the step that estimates a shortlist from the student's data: `student.shortlist`."""

    def work(folder: Path) -> None:
        from ziggurat.data.corpus import Store
        from ziggurat.data.shortlist import estimate_shortlist, write_shortlist

        store = Store.open(road.at("student-data", "store"))
        options = {"pairs": how.pairs, "best": how.best, "frequent": how.frequent}
        write_shortlist(str(folder / SHORTLIST), estimate_shortlist(store, floor=how.floor, **options))

    return Step(
        "shortlist",
        "estimates which pieces a sentence allows",
        settings_of(how),
        work,
        {"student-data": ["store/*"]},
        outputs=(SHORTLIST,),
    )


def export_steps(road: Road) -> list[Step]:
    """Return a step for each target."""
    chosen = road.config.export
    return [] if chosen is None else [_export_step(road, to, target) for to, target in chosen if target is not None]


def _export_step(road: Road, to: str, target: ExportTarget) -> Step:
    """Return the step that writes the final model for `to`, and compares it with the model."""
    name, model, after = final_model(road)
    dev, of_texts = _of_dev(road)
    after |= of_texts
    test = road.test_set(road.test_names()[0]) if target.tolerance is not None else None
    if test is not None:
        step = test[0].relative_to(road.folder).parts[0]
        after[step] = [*after.get(step, []), *(path.relative_to(road.at(step)).as_posix() for path in test)]
    shortlist = None
    if road.config.shortlist is not None and to == "ctranslate2":
        shortlist, after["shortlist"] = str(road.at("shortlist", SHORTLIST)), [SHORTLIST]

    def files() -> dict[str, list[Path]]:
        # Without one of the pipeline this export contains the model's own.
        return model_files(road, name) | (shortlists(road, name) if to == "ctranslate2" and not shortlist else {})

    def work(folder: Path) -> None:
        from ziggurat.exchange.exporter import Gate, export_model
        from ziggurat.exchange.package import package_choices

        package = package_choices([f"{key}={value}" for key, value in target.metadata.items()], None)
        with in_fresh_state():
            export_model(
                model,
                to,
                folder / to,
                quantization=target.quantization,
                verify=dev,
                lines=target.lines,
                gate=None if test is None or target.tolerance is None else Gate(*test, target.tolerance),
                force=True,  # an export that was interrupted just before the manifest was written
                package=package if target.metadata else None,
                shortlist=shortlist,
                say=road.say,
            )

    return Step(
        f"export-{to}",
        f"writes the {name} for {to}" + (f", {target.quantization}" if target.quantization else ""),
        settings_of(target),
        work,
        after,
        files,
        (f"{to}/**/*",),
        check=partial(_check, road, name, to, target),
    )


def _check(road: Road, name: ModelName, to: str, target: ExportTarget) -> None:
    """Raise ConfigError for a missing package or what the target does not have; ExportError: it cannot be reached."""
    missing = [package for package in _NEEDS.get(to, ()) if importlib.util.find_spec(package) is None]
    if missing:
        extra = "translate" if to in ("ctranslate2", "argos") else "export"
        raise ConfigError(
            f"export.{to}: needs {missing[0]}, which is not installed: pip install 'ziggurat-mt[{extra}]'"
        )
    from ziggurat.exchange.package import package_choices
    from ziggurat.exchange.targets import target_named

    package = package_choices([f"{key}={value}" for key, value in target.metadata.items()], None)
    format_ = target_named(to, package if target.metadata else None)
    if target.quantization not in (None, "float32", *format_.quantizations):
        known = ", ".join(format_.quantizations) or "none"
        raise ConfigError(f"export.{to}.quantization: {target.quantization}; there are: {known}, float32")
    existing = getattr(road.config, name).existing
    experiment = experiment_of(road, name) if existing is None else experiment_there(road, name)[0]
    if reasons := format_.reasons(experiment):
        raise ExportError(f"export.{to}: the {name} cannot be written for it: {'; '.join(reasons)}")

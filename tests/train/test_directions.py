"""Models for several translation directions: the multilingual recipe on a little of Multi30k, including zero-shot
pairs.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from tests.cli.conftest import ziggurat as ziggurat  # a fixture
from tests.conftest import tiny_experiment
from tests.docs.pages import blocks
from tests.train.runs import QUIET, outcome, records
from ziggurat.config import Experiment, parse_experiment
from ziggurat.config.load import change_section
from ziggurat.config.notices import data_notices
from ziggurat.config.recipes import load_named
from ziggurat.data.batching import CorpusMix
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.inspect.diagnose import _pruned_bleu
from ziggurat.model.directory import open_model
from ziggurat.model.run_folder import checkpoint_folders, mend_links
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.train.checkpoint import RunProgress, read_progress
from ziggurat.train.loop import train
from ziggurat.train.records import Record
from ziggurat.train.run import reopen_run
from ziggurat.train.saving import prune
from ziggurat.train.validate import (
    DevDirection,
    DevLoss,
    DirectionScores,
    Validation,
    Validator,
    directions_of,
    loss_over,
)
from ziggurat.translate.translator import load_translator

TRAINED = ["en-de", "de-en", "en-fr", "fr-en", "en-cs", "cs-en"]
UNSEEN = ["de-fr", "fr-de"]
LINES = {"multi30k-en-de": 240, "multi30k-en-fr": 120, "multi30k-en-cs": 30, "multi30k-de-fr": 12}
SMALL = ["model.preset=null", "model.d_model=16", "model.d_ff=32", "model.heads=2", "data.subword.vocabulary_size=900"]
SMALL += [
    "model.encoder.layers=1",
    "model.decoder.layers=1",
    "training.tensorboard=false",
    "training.stop.minutes=null",
]
SMALL += ["training.diagnostics.every_updates=null", "training.validation.max_sentences=4", "decoding.beam_size=1"]
SMALL += [
    "training.validation.every_updates=2",
    "training.checkpoint.every_updates=2",
    "training.checkpoint.keep_last=1",
]
SMALL += ["training.batch.max_tokens=600", "training.validation.metric=loss", "training.log_every_updates=2"]
SMALL += ["training.schedule.peak=0.01", "training.schedule.warmup_updates=2"]


@pytest.fixture(scope="module")
def recipe(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """The recipe, with a small model and a few lines, and its store."""
    folder = tmp_path_factory.mktemp("multilingual")
    here = os.getcwd()
    os.chdir(folder)
    try:
        experiment = load_named(
            "multi30k-multilingual", [*SMALL, "training.stop.updates=6", f"data.store={folder / 's'}"]
        )
        for corpus in (*experiment.data.train, *experiment.data.dev):
            for path in map(Path, (str(corpus.source), str(corpus.target))):
                path.parent.mkdir(parents=True, exist_ok=True)
                with gzip.open(shared_data / "multi30k" / path.name, "rt", encoding="utf-8") as file:
                    lines = [line for line, _ in zip(file, range(LINES[path.parent.name]), strict=False)]
                with gzip.open(path, "wt", encoding="utf-8") as out:
                    out.writelines(lines if path.name.startswith("train") else lines[:12])
        prepare(experiment.data)
    finally:
        os.chdir(here)
    return experiment


@pytest.fixture(scope="module")
def run(recipe: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "multi"
    train(folder, recipe, console=QUIET)
    return folder


def test_the_store_has_tags_directions_and_no_complaint(recipe: Experiment) -> None:
    store = Store.open(recipe.data.store)
    assert list(store.source.tags) == ["<2de>", "<2en>", "<2fr>", "<2cs>"]
    assert [(one.name, one.trained) for one in directions_of(store)] == [
        *((name, True) for name in TRAINED),
        *((name, False) for name in UNSEEN),
    ]
    # Reports and warnings identify corpora by name, and several files have the same name.
    assert [corpus["name"] for corpus in store.manifest["corpora"]["dev"]] == [*TRAINED, *UNSEEN]
    # The files of one direction are those of the other, swapped; that is not mistaken for an error.
    assert store.manifest["notices"] == []
    first = store.train.pairs(np.flatnonzero(store.train.corpora == 3)[:1])[0][0]
    assert store.source.pieces(first[:1].tolist()) == ["<2en>"]


def test_temperature_evens_out_the_directions(recipe: Experiment) -> None:
    table = Store.open(recipe.data.store).train
    sizes = np.bincount(table.corpora)
    assert sizes.tolist() == [240, 240, 120, 120, 30, 30]
    for temperature in (1.0, recipe.data.sampling_temperature):
        chosen = CorpusMix(table, [], temperature, seed=1).chosen(0)
        shares = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
        assert np.bincount(table.corpora[chosen]) / len(chosen) == pytest.approx(shares, abs=2 / len(chosen))


@pytest.mark.slow
def test_each_direction_has_its_scores_and_unseen_ones_decide_nothing(run: Path, recipe: Experiment) -> None:
    store = Store.open(recipe.data.store)
    directions = directions_of(store)
    assert store.dev is not None
    last = records(run, "validation")[-1]
    translator = load_translator(run, which="last", precision="float32")
    total, tokens = 0.0, 0
    for direction in directions:
        sources, references = store.dev.texts(direction.rows)
        tag = f"<2{direction.target_language}>"
        scores = translator.score(sources, references, tag=tag)
        nll, count = -sum(s.log_probability for s in scores), sum(len(s.tokens) + 1 for s in scores)
        assert last[f"nll/{direction.name}"] == pytest.approx(nll / count, rel=1e-4), direction.name
        if direction.trained:
            total, tokens = total + nll, tokens + count
    assert last["nll"] == pytest.approx(total / tokens, rel=1e-4)
    assert {f"{name}/{direction}" for name in ("bleu", "chrf") for direction in (*TRAINED, *UNSEEN)} <= last.keys()
    for name in ("bleu", "chrf"):
        assert last[name] == pytest.approx(sum(last[f"{name}/{direction}"] for direction in TRAINED) / 6)
    assert "de-fr (zero-shot) BLEU" in (run / "log.txt").read_text(encoding="utf-8")


def test_scores_cover_only_the_lines_of_the_direction(recipe: Experiment) -> None:
    validator = Validator(Store.open(recipe.data.store), recipe.training, recipe.decoding)
    assert len(validator.sources) == 8 * 4
    assert validator.tags[:8] == ["<2de>"] * 4 + ["<2en>"] * 4
    outputs = list(validator.references)
    outputs[8:12] = ["ein Hund spielt im Wasser"] * 4
    found = [scores["bleu"] for scores in validator._scores(outputs)]
    assert found[:2] + found[3:] == pytest.approx([100.0] * 7)
    assert found[2] == pytest.approx(BLEU().corpus_score(outputs[8:12], [validator.references[8:12]]).score)


def test_bleu_without_layers_is_the_mean_over_directions(
    recipe: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(recipe.data.store)
    assert store.dev is not None
    trained = [direction for direction in directions_of(store) if direction.trained]
    # A translator that knows the references, and is wrong when it translates from German into English.
    answers: dict[tuple[str | None, str], str] = {}
    for direction in trained:
        for source, reference in zip(*store.dev.texts(direction.rows), strict=True):
            wrong = direction.name == "de-en"
            answers[f"<2{direction.target_language}>", source] = "ein Hund spielt im Wasser" if wrong else reference
    wrong_one = next(direction for direction in trained if direction.name == "de-en")
    references = store.dev.texts(wrong_one.rows)[1]
    its = BLEU().corpus_score(["ein Hund spielt im Wasser"] * len(references), [references]).score

    def translate(sources: list[str], *, tag: str | None = None, longest: list[int] | None = None) -> list[Any]:
        assert longest is None
        return [SimpleNamespace(text=answers[tag, source]) for source in sources]

    translator = SimpleNamespace(translate=translate)
    monkeypatch.setattr("ziggurat.inspect.diagnose.load_translator", lambda *_, **__: translator)
    opened: Any = SimpleNamespace(model=SimpleNamespace(device="cpu"), experiment=recipe)
    record = Record(0, 0.0, {"encoder": 1}, {"loss_without": {"encoder": [[1.0]]}})
    count = sum(len(direction.rows) for direction in trained)
    found = _pruned_bleu(tmp_path, opened, record, store, count, lambda _: None)
    assert found == {"encoder": [pytest.approx((5 * 100.0 + its) / 6)]}


@pytest.mark.slow
def test_each_direction_keeps_its_best_checkpoint(run: Path, recipe: Experiment, tmp_path: Path) -> None:
    kept = {f"step-{r['update']:08d}": r for r in records(run, "validation")}
    progress = read_progress(checkpoint_folders(run)[-1])
    for direction in (*TRAINED, *UNSEEN):
        best = min(kept, key=lambda name: kept[name][f"nll/{direction}"])
        assert (run / f"best-{direction}").resolve().name == best
        assert open_model(run, which=f"best-{direction}").origin.endswith(f"best-{direction}, update {int(best[5:])}")
        assert progress.direction_scores[direction][best] == kept[best][f"nll/{direction}"]
    with pytest.raises(CheckpointError, match=r"no checkpoint `best-de-cs`; kept: best, best-cs-en, best-de-en"):
        open_model(run, which="best-de-cs")
    # A link that a kill left behind, and a run that was stopped in between.
    (run / "best-en-de").unlink()
    mend_links(run)
    assert (run / "best-en-de").is_symlink()
    parts = tmp_path / "parts"
    train(parts, change_section(recipe, {"training": {"stop": {"updates": 4}}}, ""), console=QUIET)
    train(parts, reopen_run(parts, ["training.stop.updates=6"]), resume=True, console=QUIET)
    assert outcome(parts) == outcome(run)
    links = [{p.name: os.readlink(p) for p in folder.glob("best*")} for folder in (run, parts)]
    assert links[0] == links[1]


@pytest.mark.slow
def test_a_zero_shot_pair_is_translated_and_evaluated_by_its_tag(run: Path, recipe: Experiment, ziggurat: Any) -> None:
    folder = Path(recipe.data.store).parent / "data" / "multi30k-de-fr"
    given = ["--source", folder / "val.de.gz", "--reference", folder / "val.fr.gz", "--language", "fr", "--json"]
    found = ziggurat("evaluate", run, *given, "--tag", "<2fr>", "--metrics", "chrf")
    assert found.status == 0, found.err
    assert '"chrF' in found.out or '"chrf' in found.out
    wrong = ziggurat("evaluate", run, *given, "--tag", "<2es>")
    assert (wrong.status, "unknown tag '<2es>'; this model has: <2de>, <2en>, <2fr>, <2cs>" in wrong.err) == (2, True)


def test_zero_shot_directions_count_in_no_sum() -> None:
    rows = np.arange(2)
    directions = [
        DevDirection("a-b", "b", rows),
        DevDirection("b-c", "c", rows, trained=False),
        DevDirection("c-a", "a", rows),
    ]
    losses = [DevLoss(2.0, 1.0), DevLoss(100.0, 1.0), DevLoss(5.0, 2.0, 3.0, 4.0)]
    assert loss_over(directions, losses) == DevLoss(7.0, 3.0, 3.0, 4.0)


def test_scores_of_deleted_checkpoints_are_forgotten() -> None:
    p = RunProgress()
    for update, (one, other) in enumerate([(1.0, 9.0), (2.0, 8.0), (3.0, 7.0)], start=1):
        p.update = update
        each = {"a-b": DirectionScores(one), "b-a": DirectionScores(other if update < 3 else float("nan"))}
        Validation(one, directions=each).count(p, "loss")
    p.keep({"step-00000002", "step-00000003"})
    assert p.direction_scores == {
        "a-b": {"step-00000002": 2.0, "step-00000003": 3.0},
        "b-a": {"step-00000002": 8.0},
    }


def test_links_stay_if_scores_were_forgotten(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, tiny_experiment(tiny_folder, stop={"updates": 3}, checkpoint={"every_updates": 1}), console=QUIET)
    folders = checkpoint_folders(run)
    (run / "best-a-b").symlink_to(os.path.relpath(folders[0], run))
    kept = tiny_experiment(tiny_folder, checkpoint={"keep_last": 1, "keep_best_per_direction": 1}).training.checkpoint
    (run / "best").unlink()
    prune(run, RunProgress(update=3), kept, smaller_is_better=True)
    assert [folder.name for folder in checkpoint_folders(run)] == ["step-00000001", "step-00000003"]


def test_a_dev_set_of_one_direction_has_no_separate_scores(tiny_folder: Path) -> None:
    store = Store.open(tiny_experiment(tiny_folder).data.store)
    (direction,) = directions_of(store)
    assert store.dev is not None
    assert (direction.name, direction.trained, len(direction.rows)) == ("qlo-qhi", True, len(store.dev))


def test_the_page_s_configuration_is_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    (text,) = (block for block in blocks(page) if "source_language: mul" in block)
    data = parse_experiment(text, "fine-tuning.md").data
    assert ["-".join(data.languages_of(corpus)) for corpus in data.dev] == ["en-de", "de-en", "en-fr", "de-fr"]
    assert {corpus.tag for corpus in data.dev} == {corpus.tag for corpus in data.train}


def test_a_corpus_s_language_that_is_not_code_is_doubted() -> None:
    page = (
        "data: {source_language: mul, target_language: mul, store: s, train: [{path: a.tsv, target_language: german}]}"
    )
    (doubt,) = data_notices(parse_experiment(page, "x").data)
    assert (doubt.key, doubt.severity) == ("data.train.0.target_language", "warning")
    assert "`data.train.0.target_language: german` is not an ISO 639 language code; did you mean `de`" in str(doubt)
    with pytest.raises(ConfigError, match=r"`data\.train\.0\.target_language`"):
        parse_experiment(page.replace("german", "d/e"), "x")

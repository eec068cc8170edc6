from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.killing import run_and_kill
from ziggurat.config.data import DataConfig
from ziggurat.config.pipeline_models import TrainedConfig
from ziggurat.data import inputs, subword_training
from ziggurat.data.corpus import Store
from ziggurat.data.inputs import find_corpora
from ziggurat.data.prepare import PrepareReport, prepare, sample_sentences
from ziggurat.data.store_checks import other_files
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import MANIFEST
from ziggurat.system.staging import building

WORDS = ["turm", "ziegel", "fluss", "lampe", "winter", "brief", "hof", "regen", "leiter", "garten"]


def sentence(number: int, offset: int) -> str:
    return (
        " ".join(WORDS[(number * 7 + place * place + offset) % 10] for place in range(3 + number % 5)) + f" {number} ."
    )


class Project:
    """A folder with corpora and their configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.settings: dict[str, Any] = {
            "source_language": "de", "target_language": "en", "store": str(self.store),
            "train": [], "dev": [], "subword": {"vocabulary_size": 330},
        }  # fmt: skip

    def add(self, split: str, source: list[str], target: list[str], **options: Any) -> None:
        stem = f"{split}{len(self.settings[split])}"
        paths = {side: self.folder / f"{stem}.{side}" for side in ("source", "target")}
        for path, lines in zip(paths.values(), (source, target), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        self.settings[split].append({**{side: str(path) for side, path in paths.items()}, **options})

    def add_plain(self, split: str, count: int, start: int = 0, **options: Any) -> None:
        numbers = range(start, start + count)
        self.add(split, [sentence(n, 0) for n in numbers], [sentence(n, 3) for n in numbers], **options)

    def prepare(self, **options: Any) -> PrepareReport:
        return prepare(DataConfig.model_validate(self.settings), **options)

    def leftovers(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name.lstrip(".").startswith("store.")]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_end_to_end_over_several_corpora(project: Project) -> None:
    project.add_plain("train", 50)
    project.add_plain("train", 30, start=100, tag="<bt>", weight=0.5, name="synthetic")
    project.add(
        "train",
        ["  a \t b", "", "x" * 4001, " ".join(map(str, range(200))), "null\0"],
        ["A  B", "y", "y", "y", "y"],
    )
    project.add_plain("dev", 7, start=300)
    report = project.prepare()
    assert report.kept == 81
    assert report.dropped == {"empty": 1, "too_long": 1, "too_many_pieces": 1, "nul": 1}
    assert [(c.name, c.read, c.kept) for c in report.corpora] == [
        ("train0.source", 50, 50), ("synthetic", 30, 30), ("train2.source", 5, 1), ("dev0.source", 7, 7)
    ]  # fmt: skip
    store = Store.open(project.store)
    store.verify()
    assert store.source is store.target
    assert report.source_vocabulary == store.source.size
    assert store.train.corpora.tolist() == [0] * 50 + [1] * 30 + [2]
    sources, targets = store.train.pairs(range(81))
    assert store.train.source_lengths.tolist() == [len(ids) for ids in sources]
    assert report.source_pieces == store.train.source_lengths.sum()
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        tagged = source[0] == store.source.tags["<bt>"]
        assert tagged == (50 <= number < 80)
        if number < 80:
            original = number if number < 50 else number + 50
            assert store.source.decode(source.tolist()) == sentence(original, 0)
            assert store.target.decode(target.tolist()) == sentence(original, 3)
            assert source[int(tagged) :].tolist() == store.source.encode([sentence(original, 0)])[0]
    assert store.source.decode(sources[80].tolist()) == "a b"
    assert store.dev is not None
    assert store.dev.texts(range(7))[1] == [sentence(n, 3) for n in range(300, 307)]
    assert project.leftovers() == []
    json.dumps(report.as_dict())


def test_result_depends_on_neither_threads_nor_blocks_nor_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = []
    for number, (threads, block) in enumerate(((1, 16_384), (3, 16_384), (2, 7))):
        (tmp_path / str(number)).mkdir()
        project = Project(tmp_path / str(number))
        project.add_plain("train", 60)
        project.settings["subword"]["regularisation"] = {}
        monkeypatch.setattr("ziggurat.data.readers.BLOCK_PAIRS", block)
        project.prepare(threads=threads)
        stores.append(Store.open(project.store))
    assert stores[0].fingerprint == stores[1].fingerprint
    assert (stores[0].path / "joint.spm").read_bytes() == (stores[2].path / "joint.spm").read_bytes()
    for first, third in zip(stores[0].train.pairs(range(60)), stores[2].train.pairs(range(60)), strict=True):
        assert [ids.tolist() for ids in first] == [ids.tolist() for ids in third]
    assert stores[0].train.texts([5, 1]) == (
        [sentence(5, 0), sentence(1, 0)],
        [sentence(5, 3), sentence(1, 3)],
    )


class TestExistingStore:
    def test_same_settings_and_inputs_do_nothing(self, project: Project) -> None:
        project.add_plain("train", 20)
        first = project.prepare()
        stamp = (project.store / "manifest.json").stat().st_mtime_ns
        again = project.prepare()
        assert (first.reused, again.reused) == (False, True)
        assert {**again.as_dict(), "seconds": 0, "reused": 0} == {
            **first.as_dict(),
            "seconds": 0,
            "reused": 0,
        }
        assert (project.store / "manifest.json").stat().st_mtime_ns == stamp

    def test_moved_inputs_are_the_same_inputs(self, project: Project) -> None:
        project.add_plain("train", 20)
        project.prepare()
        (project.folder / "moved").mkdir()
        for side in ("source", "target"):
            old = Path(project.settings["train"][0][side])
            project.settings["train"][0][side] = str(old.rename(project.folder / "moved" / old.name))
        config = DataConfig.model_validate(project.settings)
        assert len(other_files(config, Store.open(project.store).manifest)) == 2
        before = Store.open(project.store).fingerprint
        assert project.prepare().reused
        assert other_files(config, Store.open(project.store).manifest) == [], "training would notice for ever"
        assert Store.open(project.store).fingerprint == before

    def test_settings_that_only_training_reads_are_updated(self, project: Project) -> None:
        project.add_plain("train", 20)
        project.prepare()
        before = Store.open(project.store).fingerprint
        project.settings["train"][0].update(weight=3.0, name="news")
        project.settings["sampling_temperature"] = 5.0
        assert project.prepare().reused
        opened = Store.open(project.store)
        assert (opened.train.corpus_weights, opened.train.corpus_names) == ([3.0], ["news"])
        assert opened.fingerprint != before, "another mixture is another training set"

    def test_its_weights_do_not_change_once_another_process_has_rebuilt_it(
        self, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project.add_plain("train", 20)
        project.prepare()
        before = (project.store / MANIFEST).read_bytes()
        project.settings["train"][0].update(weight=3.0)
        another = {**json.loads(before), "fingerprint": "of another store"}
        monkeypatch.setattr("ziggurat.data.prepare.read_manifest", lambda store: another)
        with pytest.raises(DataError, match="has just prepared it again"):
            project.prepare()
        assert (project.store / MANIFEST).read_bytes() == before

    def test_other_settings_need_force(self, project: Project) -> None:
        project.add_plain("train", 20)
        project.prepare()
        before = Store.open(project.store).fingerprint
        project.settings["filters"] = {"max_characters": 30}
        with pytest.raises(
            DataError, match=r"settings or files: data\.filters\.max_characters \(4000 -> 30\).*--force"
        ):
            project.prepare()
        assert Store.open(project.store).fingerprint == before
        assert project.prepare(force=True).kept < 20
        assert project.leftovers() == []

    def test_other_content_needs_force(self, project: Project) -> None:
        project.add_plain("train", 20)
        project.prepare()
        with Path(project.settings["train"][0]["source"]).open("r+") as file:
            file.write("X")
        with pytest.raises(DataError, match=r"data\.train\.0\.files: other content"):
            project.prepare()
        assert not project.prepare(force=True).reused

    def test_a_store_set_aside_by_a_killed_process_comes_back(self, project: Project) -> None:
        """After a kill between the two renames the old store must be neither lost nor replaced without `force`."""
        project.add_plain("train", 20)
        project.prepare()
        before = Store.open(project.store).fingerprint
        aside = project.store.with_name(f".{project.store.name}.building.tmp")
        (aside / "new").mkdir(parents=True)
        project.store.rename(aside / "old")
        project.settings["filters"] = {"max_characters": 30}
        with pytest.raises(DataError, match="was prepared from other settings"):
            project.prepare()
        assert Store.open(project.store).fingerprint == before
        assert project.leftovers() == []

    @pytest.mark.parametrize(
        "names",
        [
            ["thesis.tex"],
            ["thesis.tex", "train-00000.arrow"],
            ["news.spm", "a.vocab"],
            ["source.spm", "vocabulary.json"],
            ["manifest.json"],
        ],
    )
    def test_folders_that_are_no_stores_are_never_replaced(self, project: Project, names: list[str]) -> None:
        """For example years of work, SentencePiece vocabularies, or another program's manifest."""
        project.add_plain("train", 20)
        project.store.mkdir()
        for name in names:
            (project.store / name).write_text('{"name": "mine"}')
        for force in (False, True):
            with pytest.raises(DataError, match=r"exists and holds something other than a store; set data.store"):
                project.prepare(force=force)
        assert sorted(path.name for path in project.store.iterdir()) == sorted(names)

    @pytest.mark.parametrize("lost", ["manifest.json", "train-00000.arrow"])
    def test_a_store_without_one_of_its_files_is_replaced(self, project: Project, lost: str) -> None:
        project.add_plain("train", 20)
        project.prepare()
        (project.store / lost).unlink()
        with pytest.raises(DataError, match="--force"):
            project.prepare()
        project.prepare(force=True)
        Store.open(project.store).verify()


class TestRefusals:
    """Refused before anything is trained or encoded, and nothing is left behind."""

    def refused(self, project: Project, reason: str, kind: type[Exception] = DataError) -> None:
        with pytest.raises(kind, match=reason):
            project.prepare()
        assert not project.store.exists()
        assert project.leftovers() == []

    def test_misaligned_second_corpus(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        project.add_plain("train", 20)
        project.add("train", ["a", "b"], ["c"])
        monkeypatch.setattr(
            "ziggurat.data.prepare.train_tokenizers", lambda *_: pytest.fail("trained before the check")
        )
        self.refused(project, r"train1\.source has 2 lines but .*train1\.target has 1")

    def test_faulty_development_file(self, project: Project) -> None:
        project.add_plain("train", 20)
        project.add("dev", ["a"], ["b"])
        Path(project.settings["dev"][0]["target"]).write_bytes(b"\xff\n")
        self.refused(project, r"dev0\.target, line 1: not valid UTF-8")

    def test_no_pairs(self, project: Project) -> None:
        self.refused(project, r"data\.train: no corpus", ConfigError)
        project.add("train", [], [])
        self.refused(project, r"data\.train\.0: no sentence pairs in .*train0\.source and .*train0\.target")

    @pytest.mark.parametrize("kind", ["bpe", "vocabulary"])
    def test_no_pairs_left(self, project: Project, kind: str) -> None:
        project.add("train", ["", "a"], ["b", " "])
        (project.folder / "v").write_text("a\n")
        files = {"source_vocabulary": str(project.folder / "v")} if kind == "vocabulary" else {}
        project.settings["subword"] = {"kind": kind, **files}
        self.refused(project, r"2 of 2 pairs skipped \(empty 2\), nothing left to train on")

    def test_file_that_changes_between_the_passes(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        project.add_plain("train", 20)
        original = inputs.count_pairs

        def count_then_change(*args: Any) -> None:
            original(*args)
            for side in ("source", "target"):
                with Path(project.settings["train"][0][side]).open("a") as file:
                    file.write("one more\n")

        monkeypatch.setattr("ziggurat.data.prepare.count_pairs", count_then_change)
        project.settings["subword"] = {"kind": "vocabulary", "source_vocabulary": str(project.folder / "v")}
        (project.folder / "v").write_text("a\n")
        self.refused(project, "changed while being read")

    @pytest.mark.parametrize("phase", ["read", "encode train"])
    @pytest.mark.parametrize("change", ["replaced", "edited", "rights"])
    def test_file_of_as_many_lines_that_changes_between_the_passes(
        self, project: Project, change: str, phase: str
    ) -> None:
        """No single pass can notice it: the number of lines is the same, and here so are size and modification time."""
        project.add_plain("train", 20)
        path = Path(project.settings["train"][0]["target"])
        before, content, waiting = path.stat(), path.read_text(), [phase]

        def meanwhile(now: str, done: int, total: int | None) -> None:
            if now not in waiting:
                return
            waiting.clear()
            if change == "replaced":
                path.rename(path.with_suffix(".old"))
            if change in ("replaced", "edited"):
                path.write_text("".join(line[::-1] + "\n" for line in content.splitlines()))
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            else:
                path.chmod(0o600)

        if change == "rights":
            project.prepare(progress=meanwhile)
            assert not waiting
        else:
            with pytest.raises(DataError, match=f"{path.name}: changed while being read; run `ziggurat prepare` again"):
                project.prepare(progress=meanwhile)
            assert not project.store.exists()

    def test_two_processes_prepare_one_store(self, project: Project) -> None:
        project.add_plain("train", 20)
        with (
            building(project.store),
            pytest.raises(DataError, match="another process of ziggurat is building"),
        ):
            project.prepare()
        project.prepare(force=True)


def test_unicode_form_is_applied_and_kept_for_translation(project: Project) -> None:
    decomposed = "cafe\u0301 \ufb01n"
    project.add_plain("train", 20)
    project.add("train", [decomposed], [decomposed])
    project.add("dev", [decomposed], [decomposed])
    project.settings["unicode"] = "nfkc"
    project.prepare()
    store = Store.open(project.store)
    ids = store.train.pairs([20])[0][0].tolist()
    assert store.source.decode(ids) == "caf\u00e9 fin"
    assert store.source.encode([decomposed]) == [ids]
    assert store.dev is not None
    assert store.dev.texts([0]) == (["caf\u00e9 fin"], [decomposed])


def test_vocabulary_kind_reproduces_segmented_text(project: Project) -> None:
    project.add("train", ["der Tu@@ rm"], ["the to@@ wer"])
    project.add("dev", ["der Tu@@ rm"], ["the to@@ wer"])
    for side, tokens in (("source", "der Tu@@ rm"), ("target", "the 9\nto@@ 8\nwer 7")):
        (project.folder / side).write_text(tokens.replace(" ", "\n") if side == "source" else tokens)
    project.settings["subword"] = {
        "kind": "vocabulary",
        "source_vocabulary": str(project.folder / "source"),
        "target_vocabulary": str(project.folder / "target"),
    }
    project.prepare()
    store = Store.open(project.store)
    assert store.train.pairs([0])[1][0].tolist() == [0, 1, 2]
    assert store.dev is not None
    assert store.dev.texts([0]) == (["der Tu@@ rm"], ["the tower"])


@pytest.mark.parametrize(
    ("subword", "message"),
    [
        ({"source_model": "a.spm"}, r"source_model` is read with `kind: existing` only, not with `kind: bpe`"),
        ({"kind": "unigram", "target_vocabulary": "a"}, r"target_vocabulary` .* `data\.subword\.kind=vocabulary`"),
        ({"kind": "existing", "source_model": "a.spm", "source_vocabulary": "a"}, r"source_vocabulary` is read"),
    ],
)
def test_files_of_vocabularies_that_are_not_read_are_refused(
    project: Project, subword: dict[str, str], message: str
) -> None:
    project.settings["subword"] = subword
    with pytest.raises(ConfigError, match=message):
        project.prepare()
    with pytest.raises(ValidationError, match=message.replace(r"data\.", "")):
        TrainedConfig.model_validate({"subword": subword})


def test_existing_models_of_another_store(project: Project, tmp_path: Path) -> None:
    project.add_plain("train", 20)
    project.settings["subword"]["joint"] = False
    project.prepare()
    models = {f"{side}_model": str(tmp_path / "store" / f"{side}.spm") for side in ("source", "target")}
    first = Store.open(project.store)
    project.settings.update(store=str(tmp_path / "second"), subword={"kind": "existing", **models})
    project.prepare()
    second = Store.open(tmp_path / "second")
    assert second.source is not second.target
    for one, two in zip(first.train.pairs(range(20)), second.train.pairs(range(20)), strict=True):
        assert [ids.tolist() for ids in one] == [ids.tolist() for ids in two]


def test_the_sample_is_even_over_corpora_and_skips_filtered_pairs(project: Project) -> None:
    project.add("train", [f"a{n}" for n in range(100)], ["x"] * 100)
    project.add("train", [f"b{n}" for n in range(10)], ["x"] * 10)
    project.add("train", [f"c{n}" if n % 2 else "" for n in range(400)], ["x"] * 400)
    project.settings["subword"] = {"sample_pairs": 110}
    config = DataConfig.model_validate(project.settings)
    corpora = find_corpora(config)
    inputs.count_pairs(corpora, lambda *_: None)

    def sample(side: str) -> list[str]:
        return [*sample_sentences(corpora, config, side, lambda *_: None)]

    drawn = sample("source")
    assert [sum(text[0] == name for text in drawn) for name in "ab"] == [50, 10]
    assert 15 <= sum(text[0] == "c" for text in drawn) <= 35
    assert len(set(drawn)) == len(drawn)
    assert sample("source") == drawn
    assert sorted(sample("joint")) == sorted(drawn + sample("target"))


@pytest.mark.parametrize(("total", "wanted"), [(0, 0), (100, 100), (100, 0), (30_000, 1), (30_000, 20_001)])
def test_picks_have_the_requested_number_however_they_are_requested(total: int, wanted: int) -> None:
    def picked(step: int) -> list[bool]:
        picks = subword_training.SampledPositions(np.random.default_rng(3), total, wanted)
        return [bool(x) for start in range(0, total, step) for x in picks.take(min(step, total - start))]

    first = picked(7)
    assert len(first) == total
    assert sum(first) == wanted
    assert picked(10_000) == first


@pytest.mark.parametrize("wanted", [3, 20_001, 29_990])
def test_picks_from_more_pairs_than_numpy_can_draw_from(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check more than a billion pairs, and a few in small windows."""
    assert subword_training.SampledPositions(np.random.default_rng(3), 1_200_000_000, wanted).take(8192).sum() < 5
    monkeypatch.setattr(subword_training.SampledPositions, "_MOST", 500)
    monkeypatch.setattr(subword_training.SampledPositions, "_WINDOW", 100)
    first, again = (
        subword_training.SampledPositions(np.random.default_rng(3), 30_000, wanted).take(30_000) for _ in range(2)
    )
    assert first.sum() == wanted
    assert (first == again).all()
    deviation = (wanted * (1 - wanted / 30_000)) ** 0.5 / 2
    assert abs(first[:15_000].sum() - wanted / 2) <= 4 * deviation


def test_picks_favour_no_position() -> None:
    counts = np.zeros(20)
    for seed in range(3000):
        picks = subword_training.SampledPositions(np.random.default_rng(seed), 20, 5)
        picks._WINDOW = 8
        counts += picks.take(20)
    assert abs(counts / 3000 - 0.25).max() < 0.04  # five standard deviations


@pytest.mark.parametrize(
    ("sizes", "total", "shares"),
    [([5, 5], 100, [5, 5]), ([100, 1, 100], 21, [10, 1, 10]), ([3], 2, [2]), ([9, 2, 4], 10, [4, 2, 4])],
)
def test_even_shares(sizes: list[int], total: int, shares: list[int]) -> None:
    assert subword_training.even_shares(sizes, total) == shares


def test_progress_is_reported(project: Project) -> None:
    project.add_plain("train", 20)
    project.add_plain("dev", 5)
    seen: dict[str, tuple[int, int | None]] = {}
    project.prepare(progress=lambda phase, done, total: seen.update({phase: (done, total)}))
    assert seen["encode train"] == (20, 20)
    assert seen["encode dev"] == (5, 5)
    assert seen["read"] == (25, None)
    assert seen["sample"] == (20, 20)


@pytest.mark.parametrize("every", [pytest.param(7, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_kill_at_any_moment_never_leaves_half_a_store(project: Project, replacing: bool, every: int) -> None:
    """SIGKILL before file operations (all in the slow suite): the path has a whole store, or one that is refused."""
    project.add_plain("train", 20)
    project.add_plain("dev", 3)
    whole = set()
    if replacing:
        project.prepare()
        whole.add(Store.open(project.store).fingerprint)
        project.settings["subword"] = {"vocabulary_size": 320}
    reference = Project(project.folder)
    reference.settings = {**project.settings, "store": str(project.folder / "reference")}
    reference.prepare()
    whole.add(Store.open(project.folder / "reference").fingerprint)
    (project.folder / "reference").rename(project.folder / "elsewhere")
    operation, kills, absent = 1 - every, 0, 0
    while True:
        operation += every
        if not run_and_kill(lambda: project.prepare(force=True), rf"{project.folder}/\.?store", operation):
            break
        kills += 1
        try:
            opened = Store.open(project.store)
        except DataError:
            absent += 1
        else:
            opened.verify()
            assert opened.fingerprint in whole
        if not replacing and (project.store / "manifest.json").exists():
            for path in [*project.store.iterdir()]:
                path.unlink()
            project.store.rmdir()
    assert kills > 15 / every, "the hook did not see the work"
    assert (absent > 10 / every) if not replacing else (absent == 0)
    project.prepare(force=True)
    assert Store.open(project.store).fingerprint == Store.open(project.folder / "elsewhere").fingerprint
    assert project.leftovers() == []


def test_interrupt_cleans_up(project: Project) -> None:
    project.add_plain("train", 20)

    def interrupt(phase: str, done: int, total: int | None) -> None:
        if phase == "encode train":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project.prepare(progress=interrupt)
    assert not project.store.exists()
    assert project.leftovers() == []


def test_messages_show_corpus_text_escaped(project: Project) -> None:
    (project.folder / "a.tsv").write_bytes(b"a\tb\n\x1b[31mred\n")
    project.settings["train"] = [{"path": str(project.folder / "a.tsv")}]
    with pytest.raises(DataError) as caught:
        project.prepare()
    assert re.search(r"line 2: 1 columns instead of 2.*\\x1b\[31mred", str(caught.value))


def test_tag_counts_in_lengths_but_not_in_the_limit(project: Project) -> None:
    project.add_plain("train", 20, tag="<x>")
    project.prepare()
    lengths = Store.open(project.store).train.source_lengths
    limit = int(np.max(lengths)) - 1
    project.settings["filters"] = {"max_pieces": max(limit, int(Store.open(project.store).train.target_lengths.max()))}
    assert project.prepare(force=True).kept == 20

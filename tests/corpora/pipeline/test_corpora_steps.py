"""Steps on text: fetched, cleaned, held out, monolingual."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.corpora.pipeline.conftest import MakeContext, trained, whole
from ziggurat.corpora.pipeline.corpora import fetched_files
from ziggurat.corpora.pipeline.demo_data import embedded_text, write_demo
from ziggurat.corpora.pipeline.engine import Selection
from ziggurat.corpora.pipeline.step import read_manifest
from ziggurat.corpora.pipeline.steps import pipeline_of
from ziggurat.corpora.pipeline.training import read_of_store
from ziggurat.data.cleaning.held_out import folded
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import content_checksum

NOTHING = {"backward": None, "backtranslation": None, "distillation": None, "filter": None, "alignment": None}
UNTIL_TEXT = Selection(last="monolingual")


def text(**sections: Any) -> dict[str, Any]:
    """Return sections from which these tests train nothing."""
    rest = {
        "teacher": None,
        "quantisation": None,
        "shortlist": None,
        "export": None,
        "evaluation": None,
        "student": trained(),
    }
    return whole(**{**NOTHING, **rest, **sections})


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def pairs(place: Path, name: str) -> list[tuple[str, str]]:
    return list(zip(*(lines(place / f"w/clean/{name}.{code}") for code in ("qlo", "qhi")), strict=True))


def test_sentences_of_test_sets_leave_the_training_text_and_are_counted(
    place: Path, context: MakeContext, said: list[str]
) -> None:
    planted = {code: lines(place / f"data/test.{code}")[0] for code in ("qlo", "qhi")}
    for code, line in planted.items():
        for name in (f"train.{code}", f"text.{code}"):
            with (place / "data" / name).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    pipeline_of(context(text())).run(UNTIL_TEXT)
    found = json.loads((place / "w/clean/report.json").read_bytes())["corpora"]["train"]
    assert found["dropped"]["held_out"] == 1
    assert found["examples"]["held_out"] == [[planted["qlo"], planted["qhi"]]]
    assert (planted["qlo"], planted["qhi"]) not in pairs(place, "train/train")
    counts = json.loads((place / "w/monolingual/report.json").read_bytes())
    assert counts["source"]["held_out"] == counts["target"]["held_out"] == 1
    assert planted["qhi"] not in lines(place / "w/monolingual/target.txt")
    # With `keep` they stay, and a warning reports them.
    pipeline_of(context(text(), "cleaning.held_out=keep")).run(UNTIL_TEXT)
    assert (planted["qlo"], planted["qhi"]) in pairs(place, "train/train")
    assert any(line.startswith("warning: CONTAMINATION: 2 of 16 sentences of test set babel, sou") for line in said)


def test_remaining_contamination_is_reported_with_a_way_out(place: Path, context: MakeContext, said: list[str]) -> None:
    """The same holds for a model's data: the message has the names and the way out that its user knows."""
    # A sentence of the development set with another translation.
    for code, other in (("qlo", "dev"), ("qhi", "train")):
        planted = lines(place / f"data/{other}.{code}")[0]
        with (place / f"data/train.{code}").open("a", encoding="utf-8") as file:
            file.write(f"{planted}\n")
    pipeline_of(context(text(monolingual=None))).run(Selection(last="student-data"))
    of_set = "20 sentences of bitext.dev.0, sources and targets together,"
    first, second = (line for line in said if "CONTAMINATION" in line)
    assert first.startswith(
        f"warning: CONTAMINATION: 1 training pairs have one side among the {of_set} and stay (0 with"
    )
    assert first.endswith(": `cleaning.held_out: sides` drops them too")
    assert second.startswith(
        f"warning: CONTAMINATION: 1 of {of_set} are in training pairs: both sides of 0 pairs, and at least one side"
    )
    assert "seem to: `cleaning.held_out: sides` drops such pairs of the bitext, and what is" in second


@pytest.mark.usefixtures("forked_workers")
def test_several_processes_clean_like_one(
    place: Path, context: MakeContext, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.data.cleaning.pair_score.LEAST_PAIRS", 20)
    monkeypatch.setattr("ziggurat.data.readers.BLOCK_PAIRS", 25)  # the last line falls into another block
    for code in ("qlo", "qhi"):
        path = place / f"data/train.{code}"
        path.write_text("".join(f"{line}\n" for line in [*lines(path), lines(path)[3], ""]), "utf-8")
    train = [
        {"source": "data/train.qlo", "target": "data/train.qhi", "name": name, "filters": filters}
        for name, filters in (("a", {"pair_score": {"min": 0.4}}), ("b", {"max_characters": 60, "duplicates": True}))
    ]
    config = text(bitext={"train": train, "hold_out": {"dev": 7, "test": 9}}, test=None)
    found = []
    for pairs_of_worker in (1000, 20):
        monkeypatch.setattr("ziggurat.corpora.pipeline.cleaning._PAIRS_OF_WORKER", pairs_of_worker)
        pipeline_of(context(config)).run(Selection(last="clean"))
        files = sorted(path for path in (place / "w/clean").rglob("*") if path.is_file())
        found.append({path.relative_to(place): path.read_bytes() for path in files if path.name != "manifest.json"})
        shutil.rmtree(place / "w")
    assert found[0] == found[1]
    dropped = [json.loads(found[1][Path("w/clean/report.json")])["corpora"][name]["dropped"] for name in ("a", "b")]
    assert dropped[0]["pair_score"]
    assert dropped[0]["duplicate"] == dropped[0]["empty"] == 1
    assert dropped[1]["too_long"]


def test_held_out_pairs_share_no_side_with_training_pairs(place: Path, context: MakeContext, said: list[str]) -> None:
    low, high = ((place / f"data/train.{code}").read_text("utf-8") for code in ("qlo", "qhi"))
    (place / "data/train.qlo").write_text(low + low + low.replace(".", " !"), "utf-8")
    (place / "data/train.qhi").write_text(high + high.replace(".", " !") + high, "utf-8")
    bitext = {"train": [{"source": "data/train.qlo", "target": "data/train.qhi"}], "hold_out": {"dev": 7, "test": 9}}
    config = text(bitext=bitext, test=None)
    pipeline_of(context(config)).run(UNTIL_TEXT)
    dev, test, train = (pairs(place, name) for name in ("held-out/dev", "held-out/test", "train/train"))
    assert (len(dev), len(test)) == (7, 9)
    for side in (0, 1):
        held = {pair[side] for pair in dev + test}
        assert not held & {pair[side] for pair in train}
    before = dev, test
    # The choice does not depend on the order of the lines.
    for code in ("qlo", "qhi"):
        (place / f"data/train.{code}").write_text("".join(f"{x}\n" for x in lines(place / f"data/train.{code}")[::-1]))
    pipeline_of(context(config)).run(UNTIL_TEXT)
    assert (pairs(place, "held-out/dev"), pairs(place, "held-out/test")) == before
    assert not any("left to train on" in line for line in said)
    pipeline_of(context(config, "bitext.hold_out.dev=100")).run(UNTIL_TEXT)
    few = len(pairs(place, "train/train"))
    assert few < 109
    assert f"warning: 109 pairs are held out and {few} left to train on (bitext.hold_out)" in said
    with pytest.raises(DataError, match=r"bitext.hold_out: asks for 309 pairs, but cleaning leaves only"):
        pipeline_of(context(config, "bitext.hold_out.dev=300")).run(UNTIL_TEXT)
    with pytest.raises(
        DataError, match=r"bitext.hold_out: asks for 360 pairs, but bitext.train has 360: nothing would"
    ):
        pipeline_of(context(config, "bitext.hold_out.dev=351")).statuses()


def test_held_out_pairs_do_not_return_in_another_case_or_direction(
    place: Path, context: MakeContext, said: list[str]
) -> None:
    # Each pair once unchanged, once in lower case without its end mark, once with its sides swapped.
    files = [place / f"data/train.{code}" for code in ("qlo", "qhi")]
    for path, side, other in zip(files, sides := [lines(path) for path in files], sides[::-1], strict=True):
        path.write_text("".join(f"{x}\n" for x in (*side, *(y.lower().rstrip(".?!") for y in side), *other)), "utf-8")
    bitext = {"train": text()["bitext"]["train"], "hold_out": {"dev": 20, "test": 20}}
    config = text(bitext=bitext, test=None, monolingual={"target": [{"path": "data/mono.qhi"}]})
    pipeline_of(context(config)).run(Selection(last="clean"))
    held, train = pairs(place, "held-out/dev") + pairs(place, "held-out/test"), pairs(place, "train/train")
    assert len({*zip(*(folded([pair[side] for pair in held]) for side in (0, 1)), strict=True)}) == 40, "each once"
    of_held, of_train = ({*folded([text for pair in some for text in pair])} for some in (held, train))
    assert not of_held & of_train
    report = json.loads((place / "w/clean/report.json").read_bytes())
    more = report["corpora"]["train"]["dropped"]["held_out"] - 40
    assert more >= 40
    assert report["notices"][-1].startswith(f"{more} more pairs have a side of the 40 that are held out, case and punc")
    assert f"warning: {report['notices'][-1]}" in said
    # Nor does it come back as monolingual text.
    (place / "data/mono.qhi").write_text("".join(f"{target.lower()}\n" for _, target in held) + "kao\n...\n", "utf-8")
    pipeline_of(context(config)).run(UNTIL_TEXT)
    assert lines(place / "w/monolingual/target.txt") == ["kao", "..."]


def test_dropped_pairs_are_reported_by_the_filters_keys(place: Path, context: MakeContext, said: list[str]) -> None:
    with (place / "data/train.qlo").open("a") as source, (place / "data/train.qhi").open("a") as target:
        source.write("one\n" * 2 + "same\n" + "a\n")
        target.write("two\n" * 2 + "same\n" + "b " * 40 + "\n")
    pipeline_of(context(text())).run(UNTIL_TEXT)
    found = json.loads((place / "w/clean/report.json").read_bytes())["corpora"]["train"]
    dropped = found["dropped"]
    assert (dropped["identical"], dropped["length_ratio"]) == (1, 1)
    assert dropped["duplicate"] >= 1
    (line,) = (line for line in said if line.startswith("train: "))
    kept, reasons = line.split("; dropped: ")
    assert kept == f"train: kept {found['kept']} of {found['read']} pairs"
    assert sorted(reasons.split(", ")) == [f"{reason} {count}" for reason, count in dropped.items() if count]
    with pytest.raises(DataError, match=r"nothing left to train on; see cleaning"):
        pipeline_of(context(text(), "cleaning.max_characters=1")).run(UNTIL_TEXT)
    with pytest.raises(ConfigError, match=r"cleaning.source_script: 'Klingon' is not a Unicode script"):
        pipeline_of(context(text(), "cleaning.source_script=Klingon")).run(UNTIL_TEXT)


def test_a_corpus_of_which_cleaning_leaves_nothing_is_left_out(
    place: Path, context: MakeContext, said: list[str]
) -> None:
    for code in ("qlo", "qhi"):
        (place / f"data/noise.{code}").write_text("kao\nmeru kao\n" * 20)
    noise = {"source": "data/noise.qlo", "target": "data/noise.qhi"}
    config = text(bitext={**text()["bitext"], "train": [noise, *text()["bitext"]["train"]]})
    until, stopped = Selection(last="student"), "student.training.stop.updates=1"

    def corpora() -> list[str]:
        return [
            one["name"]
            for one in json.loads((place / "w/student-data/store/manifest.json").read_bytes())["corpora"]["train"]
        ]

    assert pipeline_of(context(config, stopped)).run(until).done[-2:] == ("student-data", "student")
    assert corpora() == ["train"]
    notice = "bitext.train.0 (noise): none of its 40 pairs is left (identical 40); it is left out"
    assert json.loads((place / "w/clean/report.json").read_bytes())["notices"][-1] == notice
    assert f"warning: {notice}" in said
    assert "warning: noise: cleaning left none of its pairs; it is left out" in said
    assert pipeline_of(context(config, stopped)).run(until).done == ()
    # Stages get all corpora that they name.
    stage = "{mix: {train: 1, noise: 1}, until: {corpus: train}}"
    with pytest.raises(DataError, match=r"^`student.stages.0.mix`: cleaning left no pair of noise .*; take it out of"):
        pipeline_of(context(config, stopped, f"student.stages=[{stage}]", "student.unicode=nfc")).run(until)
    with pytest.raises(ConfigError, match=r"`student.stages.0.mix`: no corpus bitext; the student learns from noise, "):
        pipeline_of(context(config, stopped, f"student.stages=[{stage.replace('noise', 'bitext')}]"))
    # Steps that depend on the corpus are redone once it has pairs.
    done = pipeline_of(context(config, stopped, "cleaning.identical=false")).run(until).done
    assert done == ("clean", "student-data", "student")
    assert corpora() == ["noise", "train"]
    # Cleaned by an earlier version, which continued without any pairs.
    for file in (place / "w/clean/train").iterdir():
        file.write_bytes(b"")
    (step,) = (step for step in pipeline_of(context(config)).steps if step.name == "student-data")
    with pytest.raises(DataError, match="the student has nothing to learn from: cleaning left no pair of noise, train"):
        step.work(place / "w/student-data")


def test_training_does_not_care_where_a_store_was_made(place: Path, context: MakeContext) -> None:
    def made(folder: str) -> str:
        pipeline_of(context(text(monolingual=None, folder=folder))).run(Selection(last="student-data"))
        found = read_manifest(place / folder / "student-data")
        assert found is not None
        return found.fingerprint(["store/*"])

    first = made("w")
    (place / "w").rename(place / "moved")
    (place / "moved/student-data/store/train-00000.arrow").unlink()
    assert made("moved") == first
    # Everything else that training may read counts, even if no pair changes.
    path = place / "moved/student-data/store/manifest.json"
    manifest, found = path.read_text("utf-8"), {read_of_store(path)}
    changes: list[tuple[str, object]] = [
        ("config.filters.max_pieces", 249),
        ("config.target_language", "qlo"),
        ("config.subword.regularisation", {"kind": "dropout"}),
        ("config.train.0.alignment", "links"),
        ("corpora.train.0.name", "other"),
        ("corpora.train.0.weight", 2.0),
        ("corpora.dev.0.tag", "<bt>"),
        ("tables.train.has_text", True),
        ("fingerprint", "other"),
        ("later", "a key of a later version"),
    ]
    for key, value in changes:
        document = json.loads(manifest)
        *parents, last = key.split(".")
        inside = document
        for name in parents:
            inside = inside[int(name) if name.isdigit() else name]
        inside[last] = value
        path.write_text(json.dumps({**document, "checksum": content_checksum(document)}), "utf-8")
        found.add(read_of_store(path))
    assert len(found) == 1 + len(changes)


def test_holding_pairs_out_leaves_something_to_train_on(place: Path, context: MakeContext) -> None:
    texts = [lines(place / f"data/train.{code}") for code in ("qlo", "qhi")]
    for code, side in zip(("qlo", "qhi"), texts, strict=True):
        (place / f"data/train.{code}").write_text("".join(f"{line}\n" for line in [*side, side[0]]), "utf-8")
    pairs = len({*zip(*texts, strict=True)})
    bitext = {**text()["bitext"], "hold_out": {"dev": pairs}}
    with pytest.raises(
        DataError, match=r"bitext.hold_out: all .* pairs that cleaning leaves share a side with the .* that"
    ):
        pipeline_of(context(text(bitext=bitext, cleaning={"duplicates": True}))).run(UNTIL_TEXT)


def test_monolingual_text_is_readable_and_has_no_duplicates(place: Path, context: MakeContext) -> None:
    once = list(dict.fromkeys(lines(place / "data/text.qlo")))
    # The sixth line is not taken from the first file, so the second one may have it.
    (place / "data/more.qlo").write_bytes(b"\xff broken\n\n" + f"{once[0]}\n{once[5]}\nnew line\n".encode())
    both = {"source": [{"path": "data/text.qlo", "lines": 5}, {"path": "data/more.qlo"}]}
    pipeline_of(context(text(monolingual=both))).run(UNTIL_TEXT)
    assert lines(place / "w/monolingual/source.txt") == [*once[:6], "new line"]
    counts = json.loads((place / "w/monolingual/report.json").read_bytes())["source"]
    assert (counts["encoding"], counts["empty"], counts["kept"]) == (1, 1, 7)


def test_files_of_a_corpus_with_a_name_may_be_renamed(place: Path, context: MakeContext) -> None:
    (place / "data/train.scores").write_text("0.5\n" * len(lines(place / "data/train.qlo")))
    for name in ("train", "renamed"):
        for file in place.glob("data/train.*"):
            file.rename(file.with_name(file.name.replace("train", name)))
        corpus = {code: f"data/{name}.{language}" for code, language in (("source", "qlo"), ("target", "qhi"))}
        train = [{**corpus, "name": "mine", "scores": [{"path": f"data/{name}.scores", "min": 0.1}]}]
        done = pipeline_of(context(text(bitext={**text()["bitext"], "train": train}))).run(UNTIL_TEXT).done
        assert done == (("sets", "clean", "monolingual") if name == "train" else ())


def test_a_file_that_goes_from_one_corpus_to_the_next_is_a_change(place: Path, context: MakeContext) -> None:
    for code in ("qlo", "qhi"):
        of_train = lines(place / f"data/train.{code}")
        for number, name in enumerate(f"{kind}-{n}" for kind in "abcdef" for n in (1, 2)):
            text_of = of_train[number * 5 : number * 5 + 5]
            (place / f"data/{name}.{code}").write_text("".join(f"{line}\n" for line in text_of))

    def globs(kinds: str) -> list[dict[str, str]]:
        return [{"name": n, "source": f"data/{n}-*.qlo", "target": f"data/{n}-*.qhi"} for n in kinds]

    config = text(bitext={"train": globs("ab"), "dev": [{"source": "data/dev.qlo", "target": "data/dev.qhi"}]})
    config |= {"test": globs("cd"), "monolingual": {"target": [{"path": f"data/{n}-*.qhi"} for n in "ef"]}}
    assert pipeline_of(context(config)).run(UNTIL_TEXT).done == ("sets", "clean", "monolingual")
    for old, new in ("ab", "cd", "ef"):
        for code in ("qlo", "qhi"):
            (place / f"data/{old}-2.{code}").rename(place / f"data/{new}-0.{code}")
    assert pipeline_of(context(config)).run(UNTIL_TEXT).done == ("sets", "clean", "monolingual")
    assert (len(pairs(place, "train/a")), len(pairs(place, "train/b"))) == (5, 15)


def test_scores_of_a_fetched_corpus_are_read_files(place: Path, context: MakeContext) -> None:
    (place / "data/scores").write_text("0.5\n")
    train = [{"fetch": "opus/Books/v1/qlo-qhi", "scores": [{"path": "data/scores", "min": 0.1}]}]
    steps = pipeline_of(context(text(bitext=text()["bitext"] | {"train": train}))).steps
    (clean,) = (step for step in steps if step.name == "clean")
    assert clean.inputs() == {"bitext.train.0.scores.0.path": [Path("data/scores")]}


def test_other_languages_exchange_the_sides_of_every_set(place: Path, context: MakeContext) -> None:
    sides = [lines(place / f"data/dev.{code}") for code in ("qlo", "qhi")]
    table = "".join(f"{low}\t{high}\n" for low, high in zip(*sides, strict=True))
    for name in ("all.tsv", "dev.tsv"):
        (place / "data" / name).write_text(table, "utf-8")
    bitext = {"train": [{"path": "data/all.tsv"}], "dev": [{"path": "data/dev.tsv"}]}
    config = text(bitext=bitext, test=None, monolingual={"source": [{"path": "data/text.qlo"}]})
    config["cleaning"] = {"held_out": "keep"}
    pipeline_of(context(config, "source_language=qhi", "target_language=qlo")).run(UNTIL_TEXT)
    assert pipeline_of(context(config)).run(UNTIL_TEXT).done == ("sets", "clean", "monolingual")
    assert lines(place / "w/sets/dev/0.qlo") == sides[0]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("es", "cs"), ("spa", "ces")),
        (("pl", "en"), ("pol_Latn", "en")),
        (("de", "ceb"), ("deu", "ceb_Latn")),
        (("es", "en"), None),
        (("sl", "en"), None),
    ],
)
def test_languages_of_a_fetched_corpus_are_known_by_any_of_their_codes(
    wanted: tuple[str, str],
    found: tuple[str, str] | None,
    place: Path,
    context: MakeContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = found or ("est", "slk", "en")
    origin = SimpleNamespace(languages=has, files=[f"text.{code}" for code in has])
    monkeypatch.setattr(
        "ziggurat.corpora.pipeline.corpora.fetched_origins", lambda context, name: [(Path("text.json"), origin)]
    )
    if found is None:
        with pytest.raises(ConfigError, match=r"key.fetch: `a/b` has est and slk and en, but the languages"):
            fetched_files(context(whole()), "a/b", wanted, "key")
    else:
        assert fetched_files(context(whole()), "a/b", wanted, "key") == [Path(f"text.{code}") for code in found]


@pytest.mark.slow
def test_fetched_corpora(place: Path, context: MakeContext) -> None:
    import yaml

    write_demo(Path("demo-pipeline"))
    config = {**yaml.safe_load(embedded_text("demo")), "folder": "w"}
    pipeline_of(context(config)).run(UNTIL_TEXT)
    assert lines(place / "w/sets/test/babel.qlo") == lines(place / "demo-pipeline/mirror/babel.example/test.qlo")
    assert len(pairs(place, "train/babel")) > 9000
    # Another corpus is fetched; existing ones are not affected.
    config["test"].append({"name": "more", "fetch": "babel/dev/qhi-qlo"})
    done = pipeline_of(context(config)).run(UNTIL_TEXT).done
    assert done == ("fetch", "sets", "clean", "monolingual")
    config["bitext"]["train"][0]["fetch"] = "babel/trian/qlo-qhi"
    with pytest.raises(DataError, match=r"babel.example/trian.qlo"):
        pipeline_of(context(config)).run(UNTIL_TEXT)
    config["bitext"]["train"][0]["fetch"] = "bable/train/qlo-qhi"
    with pytest.raises(ConfigError, match=r"no corpus.*`bable/train/qlo-qhi`"):
        pipeline_of(context(config)).run(UNTIL_TEXT)


@pytest.mark.slow
def test_a_fetched_corpus_of_other_languages_is_refused(place: Path, context: MakeContext) -> None:
    import yaml

    write_demo(Path("demo-pipeline"))
    config = {**yaml.safe_load(embedded_text("demo")), "folder": "w", "target_language": "de"}
    with pytest.raises(ConfigError, match=r"bitext.dev.0.fetch: `babel/dev/qlo-qhi` has qlo and qhi, but"):
        pipeline_of(context(config)).run(UNTIL_TEXT)


@pytest.mark.parametrize("repair", [False, True])
def test_cleaning_heeds_scores_and_mends_text(repair: bool, place: Path, context: MakeContext) -> None:
    (place / "data/own.qlo").write_text("fÃ¼r  mich \nnoch ein Satz\nund\tdas hier\n", "utf-8")
    (place / "data/own.qhi").write_text("for me\none more sentence\nand this here\n", "utf-8")
    (place / "data/own.scores").write_text("0.5\n0.2\n0.3\n")
    train = [{"source": "data/own.qlo", "target": "data/own.qhi", "scores": [{"path": "data/own.scores", "min": 0.3}]}]
    config = text(bitext={**text()["bitext"], "train": train}, cleaning={"repair": repair})
    pipeline_of(context(config)).run(Selection(last="clean"))
    mended = "für mich" if repair else "fÃ¼r mich"
    assert pairs(place, "train/own") == [(mended, "for me"), ("und das hier", "and this here")]
    found = json.loads((place / "w/clean/report.json").read_bytes())["corpora"]["own"]
    assert (found["read"], found["kept"], found["repaired"], found["dropped"]) == (3, 2, int(repair), {"score": 1})


def test_lines_held_out_leave_text_of_one_language(place: Path, context: MakeContext) -> None:
    bitext = {"train": [{"source": "data/train.qlo", "target": "data/train.qhi"}], "hold_out": {"dev": 7, "test": 9}}
    both = {side: [{"path": f"data/train.{code}"}] for side, code in (("source", "qlo"), ("target", "qhi"))}
    pipeline_of(context(text(bitext=bitext, test=None, monolingual=both))).run(UNTIL_TEXT)
    counts = json.loads((place / "w/monolingual/report.json").read_bytes())
    for number, (side, code) in enumerate((("source", "qlo"), ("target", "qhi"))):
        held = {pair[number] for name in ("dev", "test") for pair in pairs(place, f"held-out/{name}")}
        given, kept = set(lines(place / f"data/train.{code}")), set(lines(place / f"w/monolingual/{side}.txt"))
        assert kept <= given - held
        assert len(kept) > 80
        assert counts[side]["held_out"] >= len(held)


def test_lines_that_are_dropped_do_not_count_as_taken(place: Path, context: MakeContext) -> None:
    (place / "data/few.qlo").write_text("\n\none\none\ntwo\nthree\n")
    pipeline_of(context(text(monolingual={"source": [{"path": "data/few.qlo", "lines": 2}]}))).run(UNTIL_TEXT)
    assert lines(place / "w/monolingual/source.txt") == ["one", "two"]

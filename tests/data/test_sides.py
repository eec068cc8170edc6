"""Swapped sides, and corpora that must not be taken for swapped."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ziggurat.config.data import DataConfig
from ziggurat.data.babel import generate
from ziggurat.data.inputs import Trigrams, count_pairs, find_corpora, resembles_more, side_notices
from ziggurat.system.errors import Problem


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files of 100 training and 20 dev sentences in each embedded language, named `train.qlo`, ..."""
    found = {}
    for split, first, count in (("train", 0, 100), ("dev", 100, 20)):
        pairs = list(generate(first + count, seed=3))[first:]
        for side, language in enumerate(("qlo", "qhi")):
            found[f"{split}.{language}"] = str(tmp_path / f"{split}.{language}")
            Path(found[f"{split}.{language}"]).write_text("".join(f"{pair[side]}\n" for pair in pairs))
    for name in list(found):  # names that indicate no language
        found[name.replace(".", "-in-") + ".txt"] = str(Path(found[name]).rename(found[name] + ".txt"))
        Path(found[name]).symlink_to(found[name] + ".txt")
    return found


def noticed(files: dict[str, str], *corpora: tuple[str, str, str], **train_tags: Any) -> list[Problem]:
    """Return the notices on corpora `(split, source file, target file)`; `train_1="<tag>"` tags data.train.1."""
    config: dict[str, Any] = {"train": [], "dev": []}
    for split, source, target in corpora:
        entry = {"source": files[source], "target": files[target]}
        entry["tag"] = train_tags.get(f"{split}_{len(config[split])}")
        config[split].append(entry)
    data = DataConfig.model_validate({"source_language": "qlo", "target_language": "qhi", "store": "-", **config})
    found = find_corpora(data)
    count_pairs(found, lambda *_: None)
    return side_notices(found, data)


TRAIN = ("train", "train.qlo", "train.qhi")
PLAIN = ("train", "train-in-qlo.txt", "train-in-qhi.txt")


def test_correct_sides_get_no_notice(files: dict[str, str]) -> None:
    assert noticed(files, TRAIN, ("dev", "dev.qlo", "dev.qhi"), PLAIN) == []


def test_swapped_sides_are_reported_by_the_names_of_their_files(files: dict[str, str]) -> None:
    (notice,) = noticed(files, TRAIN, ("dev", "dev.qhi", "dev.qlo"))
    assert (notice.key, notice.severity) == ("data.dev.0", "warning")


def test_swapped_sides_are_reported_by_their_text(files: dict[str, str]) -> None:
    (notice,) = noticed(files, PLAIN, ("dev", "dev-in-qhi.txt", "dev-in-qlo.txt"))
    assert notice.names == ("data.dev.0", "data.train.0", notice.remedy)
    swapped = ("train", "dev-in-qhi.txt", "dev-in-qlo.txt")
    assert [n.key for n in noticed(files, PLAIN, swapped)] == ["data.train.1"]
    assert [n.key for n in noticed(files, PLAIN, swapped, train_1="<bt>")] == ["data.train.1"]
    assert noticed(files, PLAIN, swapped, train_0="<2qhi>", train_1="<2qlo>") == []  # a model for both directions


def test_a_source_given_as_target_is_reported(files: dict[str, str]) -> None:
    (notice,) = noticed(files, ("train", "train-in-qlo.txt", "train-in-qlo.txt"))
    assert "100 of 100 pairs checked have the same text" in str(notice)


def test_little_text_and_noise_get_no_notice() -> None:
    one, other = Trigrams(["the cat sat on the mat"] * 40), Trigrams(["die Katze lag auf der Matte"] * 40)
    assert resembles_more(one, one, other)
    assert not resembles_more(other, one, other)
    assert not resembles_more(Trigrams(["the cat"]), one, other)
    assert not resembles_more(Trigrams(["qzx wvk"] * 100), one, other)


def test_real_corpora_raise_no_alarm_and_swapped_ones_do(shared_data: Path) -> None:
    ted = "testsets/iwslt16.TED.dev2010.de-en"
    dev = {
        ("de", "en"): ["multi30k/val", "tatoeba-de-en/dev", "testsets/newstest2013", ted],
        ("fr", "en"): ["multi30k/val", "tatoeba-fr-en/dev", "testsets/newstest2013"],
        ("cs", "de"): ["multi30k/val", "testsets/newstest2013"],
        ("en", "ja"): ["tanaka-en-ja/dev", "tanaka-en-ja/test"],
    }
    for (source, target), names in dev.items():
        files = {f"{name}.{code}": f"{shared_data}/{name}.{code}.gz" for name in names for code in (source, target)}
        for one, other in combinations(names, 2):
            for a, b in ((source, target), (target, source)):
                corpora = ("train", f"{one}.{source}", f"{one}.{target}"), ("train", f"{other}.{a}", f"{other}.{b}")
                assert len(noticed(files, *corpora)) == ((a, b) == (target, source)), (one, other, a, b)

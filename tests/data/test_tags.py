"""Corpora whose sources do not tell a model which language to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ziggurat.config.data import DataConfig
from ziggurat.data.prepare import prepare
from ziggurat.data.vocabulary import tag_notices

TAGS = ["<bt>", "<2de>", "<2fr>"]


Corpora = list[tuple[str | None, str | None]]


def data(train: Corpora, dev: Corpora) -> DataConfig:
    """Return a section with corpora `(tag, target language)`."""
    corpora = {
        split: [{"source": "a", "target": "b", "tag": tag, "target_language": code} for tag, code in entries]
        for split, entries in (("train", train), ("dev", dev))
    }
    return DataConfig.model_validate({"source_language": "en", "target_language": "de", "store": "-", **corpora})


@pytest.mark.parametrize(
    ("train", "dev", "known"),
    [
        ([(None, None), (None, "de")], [(None, None)], ["<bt>"]),
        ([(None, None), ("<bt>", None)], [(None, None)], ["<bt>", "<2de>"]),  # without a tag into one language
        ([("<2de>", None), (None, "fr")], [("<2de>", "de"), (None, "fr")], ["<2de>"]),  # having no tag is a signal too
        ([("<2de>", None), ("<2fr>", "fr")], [("<2fr>", "fr")], TAGS),
        ([("<2de>", "mul"), ("<2de>", "de")], [], TAGS),
    ],
)
def test_tokens_that_name_the_language_are_not_mentioned(train: Any, dev: Any, known: list[str]) -> None:
    assert tag_notices(data(train, dev), known) == []


def test_no_tag_next_to_those_of_several_languages() -> None:
    (notice,) = tag_notices(data([("<2de>", None), (None, "fr")], [(None, None)]), TAGS)
    assert (notice.key, notice.severity) == ("data.train.1", "warning")
    assert set(notice.named) == {"data.train.1", "data.dev.0"}
    assert notice.remedy == "`tag` can be <2de>, <2fr>"


def test_one_tag_or_none_for_several_languages() -> None:
    (notice,) = tag_notices(data([("<bt>", None), (None, None)], [("<bt>", "fr")]), ["<bt>"])
    assert str(notice).startswith("data.train.0 is into `de`; data.dev.0 is into `fr`; all have `tag: <bt>`: nothing")
    (notice,) = tag_notices(data([(None, None), (None, "fr"), (None, "fr")], []), [])
    assert notice.named == ("data.train.0", "data.train.1")


def test_prepare_reports_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(f"{name} {number} words\n" for number in range(20)))
    entry = {"source": str(tmp_path / "a"), "target": str(tmp_path / "b")}
    section = data([(None, None), (None, "fr")], []).model_dump(exclude_unset=True)
    section |= {"train": [{**corpus, **entry} for corpus in section["train"]], "subword": {"vocabulary_size": 300}}
    report = prepare(DataConfig.model_validate({**section, "store": str(tmp_path / "store")}))
    assert "none has a `tag`" in report.notices[0]

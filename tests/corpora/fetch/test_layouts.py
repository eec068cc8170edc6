"""Readers of layouts, compared with sacreBLEU's own code and the standard library's XML tree."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sacrebleu.dataset import fake_sgml, wmt_xml

from ziggurat.corpora.fetch.layouts import Counts, read, tmx_units, wmt_segments
from ziggurat.corpora.fetch.registry import Layout, RegisteredCorpus, Remote
from ziggurat.system.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"), max_size=30)

# No module of that package has types.
FakeSGMLDataset: Any = fake_sgml.FakeSGMLDataset
WMTXMLDataset: Any = wmt_xml.WMTXMLDataset


def corpus(layout: Layout, **how: object) -> RegisteredCorpus:
    given = {"name": "x", "title": "", "files": [Remote(url="http://x/y")], "licence": "", "languages": ("de", "en")}
    return RegisteredCorpus(layout=layout, **{**given, **how})  # type: ignore[arg-type]


def sides(layout: Layout, *files: Path, counts: Counts | None = None, **how: object) -> tuple[list[str], ...]:
    """Return the texts of all blocks, side by side."""
    blocks = list(read(corpus(layout, **how), files, counts or Counts()))
    return tuple([text for block in blocks for text in block[n]] for n in range(len(blocks[0])))


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_text_of_two_files_and_of_one(tmp_path: Path) -> None:
    de, en = write(tmp_path / "a.de", "eins\r\nzwei\n"), write(tmp_path / "a.en.gz", "one\ntwo")
    assert sides("text", de, en) == (["eins", "zwei"], ["one", "two"])
    assert sides("text", en, languages=("en",)) == (["one", "two"],)
    write(de, "eins\n")
    with pytest.raises(DataError, match="the sides are not aligned"):
        sides("text", de, en)


def test_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv.gz", "0.9\teins\tone\nnothing\n0.8\tzwei\ttwo\tmore\n")
    counts = Counts()
    assert sides("tsv", path, counts=counts, columns=[1, 2]) == (["eins", "zwei"], ["one", "two"])
    assert (counts.pairs, counts.skipped) == (2, 1)
    path = write(tmp_path / "titles", "Talo ||| House\nA|||B\n")
    assert sides("tsv", path, separator=" ||| ") == (["Talo"], ["House"])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(texts=st.lists(TEXT, min_size=1, max_size=6), ending=st.sampled_from(["\n", "\r\n"]))
def test_sgml_is_read_as_sacrebleu_reads_it(
    texts: list[str], ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sgm")
    lines = ['<srcset setid="x" srclang="any">', '<doc docid="1">', "<p>"]
    lines += [f'<seg id="{n}"> {text} </seg>' for n, text in enumerate(texts)] + ["</p>", "</doc>", "</srcset>"]
    path = write(folder / "a.sgm", ending.join(lines))
    FakeSGMLDataset("x")._convert_format(str(path), str(folder / "theirs"))
    theirs = (folder / "theirs").read_text(encoding="utf-8").split("\n")[:-1]
    assert sides("sgm", path, path) == (theirs, theirs)


def test_sgml_without_segments_or_of_unequal_length(tmp_path: Path) -> None:
    one, none = write(tmp_path / "a", '<seg id="1">x</seg>\n'), write(tmp_path / "b", "text\n")
    with pytest.raises(DataError, match="ends after 0 segments"):
        sides("sgm", one, none)
    with pytest.raises(DataError, match="contains nothing in the layout `sgm`"):
        list(read(corpus("sgm"), [none, none], Counts()))


def test_training_files_of_talks(tmp_path: Path) -> None:
    talk = (
        "<url>http://x</url>\n<keywords>a, b</keywords>\n<speaker>S</speaker>\n<talkid>1</talkid>\n"
        "<title>{0}: T </title>\n<description>{0}  D</description>\n {0} first\n{0} <i>second</i>\n"
    )
    de, en = write(tmp_path / "t.de", talk.format("de")), write(tmp_path / "t.en", talk.format("en"))
    found = sides("ted", de, en)
    assert found[0] == ["de: T", "de D", "de first", "de <i>second</i>"]
    assert found[1] == [text.replace("de", "en") for text in found[0]]


WMT = """<?xml version='1.0' encoding='utf-8'?><dataset id="t">
<doc origlang="en" id="a"><src lang="en"><p><seg id="1">One &amp; two</seg><seg id="2">Three</seg>
<seg id="10">Ten</seg></p></src>
<ref lang="de" translator="A"><p><seg id="1">Eins</seg><seg id="10">Zehn
 A</seg></p></ref><ref lang="de" translator="B"><p><seg id="1">eins</seg><seg id="10"> zehn</seg></p></ref>
<hyp system="S" language="de"><p><seg id="1">h</seg><seg id="2">h</seg><seg id="10">h</seg></p></hyp></doc>
<doc origlang="en" id="b" testsuite="t"><src lang="en"><p><seg id="1">Suite</seg></p></src></doc>
<doc origlang="en" id="c"><src lang="en"><p><seg id="1">Four</seg></p></src>
<ref lang="de" translator="B"><p><seg id="1">vier</seg></p></ref></doc></dataset>"""


@pytest.mark.parametrize("translator", ["A", "B"])
def test_test_sets_in_xml_are_read_as_sacrebleu_reads_them(translator: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", WMT)
    theirs = WMTXMLDataset._unwrap_wmt21_or_later(io.BytesIO(WMT.encode()))
    cleaned = [[FakeSGMLDataset._clean(text) for text in theirs[name]] for name in ("src", f"ref:{translator}")]
    assert list(map(list, sides("wmt-xml", path, references=["X", translator]))) == cleaned
    assert len(cleaned[0]) == 3
    with pytest.raises(DataError, match="none by"):
        list(wmt_segments(path, ["X"]))
    assert [pair[0] for pair in wmt_segments(path, [])] == ["One & two", "Ten", "Four"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(units=st.lists(st.dictionaries(st.sampled_from(["de", "EN-gb", "en", "fr"]), TEXT), min_size=1, max_size=6))
def test_tmx_is_read_as_a_tree_parser_reads_it(
    units: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = "".join(
        "<tu>" + "".join(f'<tuv xml:lang="{c}"><seg>{escape(t)}</seg></tuv>' for c, t in unit.items()) + "</tu>\n"
        for unit in units
    )
    text = f'<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx version="1.4"><body>{body}</body></tmx>'
    path = write(tmp_path_factory.mktemp("tmx") / "a.tmx.gz", text)
    expected: list[tuple[str, str] | None] = []
    for unit in ElementTree.fromstring(text).iter("tu"):
        named = {next(iter(tuv.attrib.values())).lower(): tuv.findtext("seg") or "" for tuv in unit.iter("tuv")}
        english = named.get("en", named.get("en-gb"))
        expected.append((named["de"], english) if "de" in named and english is not None else None)
    assert list(tmx_units(path, ["de", "en"])) == expected


def test_tmx_without_its_codes(tmp_path: Path) -> None:
    text = (
        '<tmx><body><tu><tuv lang="DE"><seg><bpt i="1">&lt;b></bpt>fett<ept i="1">&lt;/b></ept> <hi>und</hi> so</seg>'
        '</tuv><tuv lang="en_US"><seg>bold</seg></tuv></tu><tu><tuv lang="de"><seg>x</seg></tuv></tu></body></tmx>'
    )
    counts = Counts()
    path = write(tmp_path / "a.tmx", text)
    assert sides("tmx", path, counts=counts) == (["fett und so"], ["bold"])
    assert (counts.pairs, counts.skipped) == (1, 1)


@pytest.mark.parametrize("layout", ["tmx", "wmt-xml"])
def test_hostile_xml(layout: Layout, tmp_path: Path) -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><tmx><body>&b;</body></tmx>'
    with pytest.raises(DataError, match="declares the entity a"):
        sides(layout, write(tmp_path / "a.xml", bomb))
    with pytest.raises(DataError, match="line 1: not well-formed XML"):
        sides(layout, write(tmp_path / "b.xml", "<tmx><body>"))
    long = f'<tmx><doc><src><tuv><seg id="1">{"x" * (2 << 20)}</seg></tuv></src></doc></tmx>'
    with pytest.raises(DataError, match="a segment of over 1,048,576 characters"):
        sides(layout, write(tmp_path / "c.xml", long))

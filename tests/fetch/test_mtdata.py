"""mtdata's index, asked in an environment that plays mtdata, and in the real one where ZIGGURAT_MTDATA names it."""

from __future__ import annotations

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ziggurat.errors import ConfigError, DataError
from ziggurat.fetch.downloads import Downloads
from ziggurat.fetch.mtdata import Mtdata
from ziggurat.fetch.transfer import Network

FAKE = {
    "__init__": "__version__ = '0.5.1'",
    "entry": """
class DatasetId:
    def __init__(self, text): self.text, self.langs = text, tuple(text.split('-')[3:])
    def __str__(self): return self.text
    def __eq__(self, other): return self.text == other.text
    def __hash__(self): return hash(self.text)
    @classmethod
    def parse(cls, text):
        if text.count('-') < 3: raise Exception('Dataset ID expected in format: <group>-<name>-<version>-<l1>[-<l2>]')
        return cls(text)
def Langs(text): return tuple(text.split('-'))
class Entry:
    def __init__(self, did, url, ext, in_paths=None, in_ext=None, cols=None, cite=None):
        self.did, self.url, self.ext, self.in_paths = DatasetId(did), url, ext, in_paths
        self.in_ext, self.cols, self.cite = in_ext, cols, cite
""",
    "index": """
from mtdata.entry import Entry
every = [
    Entry('G-zip-1-deu-eng', 'http://h/a.zip', 'zip', ['*.de', '*.en'], 'txt', cite=('paper',)),
    Entry('G-tsv-1-eng-ces', 'http://h/a.tsv.gz', 'tsv.gz', cols=(1, 2)),
    Entry('G-tmx-1-deu-eng', 'http://h/a.zip', 'zip', ['*.tmx'], 'tmx'),
    Entry('G-two-1-deu-eng', ('http://h/a.de', 'http://h/a.en'), 'txt'),
    Entry('G-mono-1-deu', 'http://h/news.2019.de.shuffled.deduped.gz', 'deduped.gz', in_ext='txt'),
    Entry('G-odd-1-deu-eng', 'http://h/a.xlsx', 'xlsx', in_ext='xlsx'),
]
INDEX = {entry.did: entry for entry in every}
def get_entries(langs, names, fuzzy_match): return [entry for entry in every if entry.did.langs == langs]
""",
    "iso/__init__": "",
    "iso/iso639_1": "ISO693_1_to_3 = {'de': 'deu', 'en': 'eng', 'cs': 'ces'}",
}


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python that knows a package that plays mtdata."""
    for name, text in FAKE.items():
        path = tmp_path / "packages" / "mtdata" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = tmp_path / "python"
    start = f"import sys, runpy; sys.path.insert(0, {str(tmp_path / 'packages')!r}); sys.argv = sys.argv[2:]; "
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "{start}runpy.run_path(sys.argv[0], run_name=\'__main__\')" "$@"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_entries_become_corpora(python: str, tmp_path: Path) -> None:
    mtdata = Mtdata(Downloads(tmp_path), python, print)
    found = mtdata.find("G-zip-1-deu-eng")
    assert (found.name, found.languages, found.layout, found.take) == (
        "mtdata/G-zip-1-deu-eng", ("deu", "eng"), "text", ("*.de", "*.en"),
    )  # fmt: skip
    assert "paper" in found.licence
    columns = mtdata.find("G-tsv-1-eng-ces")
    assert (columns.layout, columns.columns, columns.take) == ("tsv", (1, 2), ())
    memory = mtdata.find("G-tmx-1-deu-eng")
    assert (memory.layout, memory.spellings) == ("tmx", (("deu", "deu", "de"), ("eng", "eng", "en")))
    assert [file.url for file in mtdata.find("G-two-1-deu-eng").files] == ["http://h/a.de", "http://h/a.en"]
    assert mtdata.find("G-mono-1-deu").layout == "text"


def test_what_only_mtdata_reads_is_said_with_the_command(python: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mtdata echo G-odd-1-deu-eng > FILE\.tsv"):
        Mtdata(Downloads(tmp_path), python, print).find("G-odd-1-deu-eng")


def test_lists(python: str, tmp_path: Path) -> None:
    mtdata = Mtdata(Downloads(tmp_path), python, print)
    assert [name for name, _ in mtdata.listed(["deu", "eng"], [])] == [
        "G-zip-1-deu-eng", "G-tmx-1-deu-eng", "G-two-1-deu-eng", "G-odd-1-deu-eng",
    ]  # fmt: skip
    assert mtdata.listed(["deu", "eng"], ["TMX"]) == [("G-tmx-1-deu-eng", "http://h/a.zip")]


@pytest.mark.parametrize(("name", "says"), [("G-none-1-deu-eng", "no entry G-none-1"), ("x", "Dataset ID expected")])
def test_names_that_mtdata_does_not_know(python: str, tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Mtdata(Downloads(tmp_path), python, print).find(name)


def test_environments_without_mtdata(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    empty.chmod(0o755)
    with pytest.raises(ConfigError, match="install it there: pip install mtdata"):
        Mtdata(Downloads(tmp_path), str(empty), print).find("G-zip-1-deu-eng")
    with pytest.raises(ConfigError, match="none: no such program"):
        Mtdata(Downloads(tmp_path), "none", print).find("G-zip-1-deu-eng")
    with pytest.raises(DataError, match="no environment with mtdata is there"):
        Mtdata(Downloads(tmp_path, offline=True), None, print).find("G-zip-1-deu-eng")


def test_an_environment_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said: list[str] = []
    with pytest.raises(DataError, match=r"mtdata cannot be installed.*--mtdata ENV/bin/python"):
        Mtdata(Downloads(tmp_path), None, said.append).find("G-zip-1-deu-eng")
    assert said == [f"installing mtdata==0.5.1 into an environment of its own, {tmp_path / 'mtdata-0.5.1'}"]


VENV = """#!/bin/sh
# Plays `python -I -m venv --clear FOLDER`, whose Python writes what pip is told beside the folder.
rm -rf "$5"; mkdir -p "$5/bin"; sleep 0.1
printf '#!/bin/sh\\necho "$@ [$https_proxy$PIP_PROXY]" >> %s.pip\\n' "$5" > "$5/bin/python"; chmod +x "$5/bin/python"
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip is told, line by line, when an environment is made in `tmp_path`."""
    program = tmp_path / "venv"
    program.write_text(VENV)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path / "mtdata-0.5.1.pip"


def test_two_first_uses_at_once_make_one_environment(told: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(Mtdata(Downloads(tmp_path), None, print)._python) for _ in range(2)]
    assert [one.result() for one in both] == [str(tmp_path / "mtdata-0.5.1" / "bin" / "python")] * 2
    assert len(told.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("proxy", "says"),
    [
        (None, "pip --quiet install mtdata==0.5.1 [http://env:1]"),
        ("", "pip --quiet --proxy  install mtdata==0.5.1 []"),
        ("http://h:3128", "pip --quiet --proxy http://h:3128 install mtdata==0.5.1 []"),
    ],
)
def test_pip_has_the_proxy_that_is_given(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str | None, says: str
) -> None:
    monkeypatch.setenv("https_proxy", "http://env:1")
    monkeypatch.delenv("PIP_PROXY", raising=False)
    Mtdata(Downloads(tmp_path, network=Network(proxy=proxy)), None, print)._python()
    assert told.read_text() == f"-I -m {says}\n"


@pytest.mark.slow  # its index takes half a minute to build
@pytest.mark.skipif("ZIGGURAT_MTDATA" not in os.environ, reason="ZIGGURAT_MTDATA names no Python with mtdata")
def test_the_real_index(tmp_path: Path) -> None:
    mtdata = Mtdata(Downloads(tmp_path), os.environ["ZIGGURAT_MTDATA"], print)
    found = mtdata.find("OPUS-tatoeba-v20230412-deu-eng")
    assert found.files[0].url == "https://object.pouta.csc.fi/OPUS-Tatoeba/v2023-04-12/moses/de-en.txt.zip"
    assert found.take == ("*.de", "*.en")
    assert mtdata.find("Statmt-newstest_deen-2014-deu-eng").layout == "sgm"
    assert mtdata.find("Statmt-newstest_ende-2021-eng-deu").layout == "wmt-xml"
    assert mtdata.find("Statmt-news_crawl-2019-deu").languages == ("deu",)
    assert ("Statmt-europarl-10-deu-eng", "http://www.statmt.org/europarl/v10/training/europarl-v10.de-en.tsv.gz") in (
        mtdata.listed(["deu", "eng"], ["statmt", "europarl"])
    )

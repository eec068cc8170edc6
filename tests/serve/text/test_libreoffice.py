"""Files that LibreOffice writes are translated, and LibreOffice reads back what it had written."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.serve.text.fakes import upper
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter

pytestmark = pytest.mark.slow  # starting LibreOffice takes seconds

SPACES = " ".join(
    f'xmlns:{short}="urn:oasis:names:tc:opendocument:xmlns:{space}:1.0"'
    for short, space in {
        "office": "office",
        "text": "text",
        "style": "style",
        "table": "table",
        "draw": "drawing",
        "presentation": "presentation",
        "fo": "xsl-fo-compatible",
        "svg": "svg-compatible",
    }.items()
)
KIND = "application/vnd.oasis.opendocument"
STYLES = """
<office:automatic-styles>
 <style:style style:name="B" style:family="text"><style:text-properties fo:font-weight="bold"/></style:style>
 <style:style style:name="I" style:family="text"><style:text-properties fo:font-style="italic"/></style:style>
</office:automatic-styles>"""
TEXT = f"""<?xml version="1.0" encoding="UTF-8"?>
<office:document {SPACES} office:version="1.2" office:mimetype="{KIND}.text">{STYLES}
<office:master-styles><style:master-page style:name="Standard"><style:header><text:p>Letter of the guild</text:p>
</style:header></style:master-page></office:master-styles>
<office:body><office:text>
<text:h text:outline-level="1">The house by the sea</text:h>
<text:p>A <text:span text:style-name="B">small dog</text:span> runs home.<text:note
 text:id="n" text:note-class="footnote"><text:note-citation>1</text:note-citation>
<text:note-body><text:p>It belongs to nobody.</text:p></text:note-body>
</text:note> Nobody <text:span text:style-name="I">calls</text:span> him.</text:p>
<text:list><text:list-item><text:p>bread &amp; butter</text:p></text:list-item>
<text:list-item><text:p>cold milk</text:p></text:list-item></text:list>
<table:table><table:table-column table:number-columns-repeated="2"/><table:table-row>
<table:table-cell><text:p>Monday</text:p></table:table-cell>
<table:table-cell><text:p>open until noon</text:p></table:table-cell>
</table:table-row><table:table-row><table:table-cell><text:p>Tuesday</text:p></table:table-cell>
<table:table-cell><text:p>12.5</text:p></table:table-cell></table:table-row></table:table>
</office:text></office:body></office:document>"""
SLIDES = f"""<?xml version="1.0" encoding="UTF-8"?>
<office:document {SPACES} office:version="1.2" office:mimetype="{KIND}.presentation">{STYLES}
<office:master-styles><style:master-page style:name="M" style:page-layout-name="L"/></office:master-styles>
<office:body><office:presentation><draw:page draw:name="p1" draw:master-page-name="M">
<draw:frame svg:width="20cm" svg:height="3cm" svg:x="1cm" svg:y="1cm"><draw:text-box>
<text:p>Plans for the <text:span text:style-name="B">coming winter</text:span></text:p></draw:text-box></draw:frame>
<draw:frame svg:width="20cm" svg:height="6cm" svg:x="1cm" svg:y="6cm"><draw:text-box>
<text:p>Wood is dry.</text:p><text:p>Who sings tonight?</text:p></draw:text-box></draw:frame>
<presentation:notes><draw:frame svg:width="9cm" svg:height="9cm" presentation:class="notes"><draw:text-box>
<text:p>Speak slowly.</text:p></draw:text-box></draw:frame></presentation:notes>
</draw:page></office:presentation></office:body></office:document>"""
SAID = {
    "letter": "the house by the sea a small dog runs home nobody calls him bread butter cold milk monday open until "
    "noon tuesday it belongs to nobody letter of the guild",
    "slides": "plans for the coming winter wood is dry who sings tonight",
}
KINDS = ["letter.docx", "letter.odt", "slides.pptx", "slides.odp"]
SETTINGS = Settings(Options(sentencex_splitter("en")))


class Office:
    """LibreOffice with a separate profile, which other runs on this machine do not lock."""

    def __init__(self, folder: Path) -> None:
        self.program = shutil.which("soffice") or pytest.skip(
            "no soffice on PATH: Debian's libreoffice-writer-nogui and -impress-nogui"
        )
        self.folder = folder

    def convert(self, kind: str, *files: Path) -> list[Path]:
        """Return the files written as `kind`, in a separate folder."""
        out = self.folder / f"{kind}-{len(list(self.folder.iterdir()))}"
        profile = f"-env:UserInstallation={(self.folder / 'profile').as_uri()}"
        command = [self.program, profile, "--headless", "--convert-to", kind, "--outdir", out, *files]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
        return [out / f"{file.stem}.{kind}" for file in files]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@pytest.fixture(scope="module")
def written(office: Office, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of each kind, as LibreOffice writes them."""
    folder = tmp_path_factory.mktemp("flat")
    (letter := folder / "letter.fodt").write_text(TEXT, encoding="utf-8")
    (slides := folder / "slides.fodp").write_text(SLIDES, encoding="utf-8")
    sources = {"letter": letter, "slides": slides}
    return {name: office.convert(name.split(".")[1], sources[name.split(".")[0]])[0] for name in KINDS}


@pytest.fixture(scope="module")
def translated(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same files with the case of every letter changed and words in place."""
    folder = tmp_path_factory.mktemp("said")
    found = {}
    for name, path in written.items():
        content = run(document(path.read_bytes(), name, SETTINGS), upper).value
        found[name] = folder / name.replace(".", "-", 1).replace("-", f"-{name.split('.')[1]}.", 1)
        found[name].write_bytes(content)
    return found


def backwards(sentences: list[str]) -> list[SentenceTranslation]:
    """Return the words of each sentence in reverse order, with their case changed."""
    found = []
    for sentence in sentences:
        said, links = "", []
        for word in reversed(list(re.finditer(r"\S+", sentence))):
            said += " " if said else ""
            links.append(Link(*word.span(), len(said), len(said) + len(word[0])))
            said += word[0].swapcase()
        found.append(SentenceTranslation(said, links))
    return found


def words(text: str) -> str:
    return " ".join(re.findall(r"[^\W\d_]+", text))


def flat(path: Path) -> tuple[Counter[str], str]:
    """Return the elements of a flat document without spans, which do not affect the text's form, and its words."""
    root = ElementTree.parse(path).getroot()
    parts = [part for part in root if part.tag.endswith(("}body", "}master-styles"))]  # headers are in the latter
    hidden = ("}span", "}s", "}soft-page-break")
    elements = Counter(e.tag.partition("}")[2] for part in parts for e in part.iter() if not e.tag.endswith(hidden))
    for number in (e for part in parts for e in part.iter() if e.tag.endswith("}page-number")):
        number.text = ""  # filled in by the program, and not text of the document
    return elements, words(" ".join(text for part in parts for text in part.itertext()))


@pytest.mark.parametrize("name", KINDS)
def test_only_the_words_change(
    name: str, office: Office, written: dict[str, Path], translated: dict[str, Path]
) -> None:
    kind = "fodt" if name.startswith("letter") else "fodp"
    before, after = (flat(office.convert(kind, files[name])[0]) for files in (written, translated))
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert after[1].swapcase() == before[1]
    assert set(SAID[name.split(".")[0]].upper().split()) <= set(after[1].upper().split())
    if name.startswith("letter"):
        assert before[0]["note"] == 1
        assert before[0]["table-cell"] == 4


def test_they_are_shown(office: Office, translated: dict[str, Path]) -> None:
    reader = shutil.which("pdftotext") or pytest.skip("no pdftotext on PATH: Debian's poppler-utils")
    for name, pdf in zip(translated, office.convert("pdf", *translated.values()), strict=True):
        shown = subprocess.run([reader, pdf, "-"], check=True, capture_output=True, text=True).stdout
        expected = words(SAID[name.split(".")[0]]).upper().split()
        missing = Counter(expected) - Counter(words(shown).upper().split())
        assert not missing, name
        assert "tHE HOUSE BY THE SEA" in shown or name.startswith("slides")


@pytest.mark.parametrize("name", KINDS)
def test_parts_without_text_keep_their_bytes(name: str, written: dict[str, Path], translated: dict[str, Path]) -> None:
    before, after = (
        {n: archive.read(n) for n in archive.namelist()}
        for archive in map(zipfile.ZipFile, (written[name], translated[name]))
    )
    assert list(before) == list(after)
    changed = {part for part in before if before[part] != after[part]}
    with_text = {
        "docx": "document|footnotes|header",
        "odt": "content|styles",
        "pptx": "slide|notesSlide",
        "odp": "content|styles",
    }
    assert changed
    assert all(re.search(with_text[name.split(".")[1]], part) for part in changed), changed


@pytest.mark.parametrize("name", KINDS)
def test_bold_and_italic_follow_their_words(
    name: str, office: Office, written: dict[str, Path], tmp_path: Path
) -> None:
    """Every sentence is reversed, and bold words are bold in their new place."""
    content = run(document(written[name].read_bytes(), name, SETTINGS), backwards).value
    (path := tmp_path / name).write_bytes(content)
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    kind = "fodt" if name.startswith("letter") else "fodp"
    root = ElementTree.parse(office.convert(kind, path)[0]).getroot()
    bold = {
        next(v for k, v in style.attrib.items() if k.endswith("}name"))
        for style in root.iter()
        if style.tag.endswith("}style")
        and any(v == "bold" for e in style for k, v in e.attrib.items() if k.endswith("}font-weight"))
    }
    spans = [e for e in root.iter() if e.tag.endswith("}span") and any(v in bold for v in e.attrib.values())]
    shown = Counter(words(" ".join("".join(span.itertext()) for span in spans)).split())
    expected = {"letter": "SMALL DOG", "slides": "COMING WINTER"}[name.split(".")[0]]
    assert shown == Counter(expected.split())

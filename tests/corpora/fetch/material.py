"""A registry and its files in the formats that servers offer: zipped Moses files, tgz, tsv, SGML, XML, TMX, packed
text.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.corpora.fetch.server import Server

PAIRS = [("Ein Haus .", "A house ."), ("Zwei Bäume & ein Fluß .", "Two trees & a river ."), ("Drei .", "Three .")]
"""PAIRS are German and English."""


def packed_zip(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def packed_tar(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def sides() -> tuple[bytes, bytes]:
    return tuple("".join(f"{pair[side]}\n" for pair in PAIRS).encode() for side in (0, 1))  # type: ignore[return-value]


def _sgml(side: int) -> bytes:
    return "".join(f'<seg id="{n}"> {pair[side]} </seg>\n' for n, pair in enumerate(PAIRS, 1)).encode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;")


_FILES = {
    "zip": ("m.zip", "text", ["*.{a}", "*.{b}"]),
    "tgz": ("m.tgz", "text", ["t/x.{a}-{b}.{a}.gz", "t/x.{a}-{b}.{b}"]),
    "sgm": ("s.tgz", "sgm", ["dev/s-{a}{b}-src.{a}.sgm", "dev/s-{a}{b}-ref.{b}.sgm"]),
    "tsv": ("t.{a}-{b}.tsv.gz", "tsv", []),
    "tmx": ("t.tmx.gz", "tmx", []),
    "xml": ("x.tgz", "wmt-xml", ["xml/*.{a}-{b}.xml"]),
}


def contents() -> dict[str, bytes]:
    """Return files of each layout, by the last parts of their addresses."""
    de, en = sides()
    units = "".join(
        f'<tu><tuv xml:lang="de"><seg>{_escaped(a)}</seg></tuv><tuv xml:lang="en"><seg>{_escaped(b)}</seg></tuv></tu>'
        for a, b in PAIRS
    )
    sources, targets = (
        "".join(f'<seg id="{n}">{_escaped(pair[side])}</seg>' for n, pair in enumerate(PAIRS, 1)) for side in (0, 1)
    )
    document = f'<d><doc id="1" origlang="de"><src lang="de">{sources}</src><ref lang="en">{targets}</ref></doc></d>'
    moses = {"X.de-en.de": de, "X.de-en.en": en, "X.de-en.xml": b"<x/>", "LICENSE": b"CC0", "README": b"Hello"}
    table = "".join(f"{a}\t{b}\n" for a, b in PAIRS) + "no second column\n"
    return {
        "f/m.zip": packed_zip(moses),
        "f/m.tgz": packed_tar({"./t/x.de-en.de.gz": gzip.compress(de), "./t/x.de-en.en": en, "t/x.fr-en.en": en}),
        "f/s.tgz": packed_tar({"dev/s-deen-src.de.sgm": _sgml(0), "dev/s-deen-ref.en.sgm": _sgml(1)}),
        "f/t.de-en.tsv.gz": gzip.compress(table.encode()),
        "f/t.tmx.gz": gzip.compress(f"<tmx><body>{units}</body></tmx>".encode()),
        "f/x.tgz": packed_tar({"xml/t.de-en.xml": document.encode()}),
        "f/mono.de.gz": gzip.compress(de),
    }


def registry(address: str) -> str:
    """Return a registry of `local/KIND/{a}-{b}`, monolingual text and a recipe's folder; files are at `address`."""
    lines = ["corpora:"]
    for kind, (file, layout, take) in _FILES.items():
        lines += [
            f"  local/{kind}/{{a}}-{{b}}:", f"    title: Local {kind}", "    pairs: de-en",
            f'    files: [{{url: "{address}/f/{file}"}}]', f"    layout: {layout}", f"    take: {take}",
            f"    licence: licence of {kind}", "    terms: http://example.invalid/", "    known_from: this test",
        ]  # fmt: skip
    lines += [
        "  local/mono/{a}:", "    title: Local text", f'    files: [{{url: "{address}/f/mono.{{a}}.gz"}}]',
        "    licence: none", "    known_from: this test", "folders:", "  local-de-en:", "    sets:",
        "      train: {of: [local/zip/de-en, local/tsv/de-en], hold_out: {set: held, every: 2}}",
        "      dev: {of: [local/sgm/de-en]}", '      test: {of: ["local/xml/{a}-{b}"], extra: true}',
        "      bought: {by_hand: sold by Someone}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def serve(server: Server, folder: Path) -> Path:
    """Put the files on the server; write their registry into `folder` and return it."""
    for name, content in contents().items():
        server.add(name, content)
    path = folder / "registry.yaml"
    path.write_text(registry(server.address))
    return path

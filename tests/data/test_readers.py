from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.data import CorpusConfig
from ziggurat.data import lines as lines_module
from ziggurat.data.readers import CorpusReader
from ziggurat.system.errors import ConfigError, DataError

SOURCE = ["der erste Satz", "", "  drei \t Blanks ", "Ende"]
TARGET = ["the first sentence", "x", "three blanks", "end"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def read(**config: object) -> tuple[list[str], list[str]]:
    reader = CorpusReader.of(CorpusConfig.model_validate(config), "data.train.0", ("de", "en"))
    source: list[str] = []
    target: list[str] = []
    for block in reader.blocks():
        assert len(block[0]) == len(block[1])
        source += block[0]
        target += block[1]
    return source, target


def aligned(folder: Path, source: bytes, target: bytes, suffix: str = "") -> tuple[list[str], list[str]]:
    (folder / f"a.de{suffix}").write_bytes(source)
    (folder / f"a.en{suffix}").write_bytes(target)
    return read(source=str(folder / f"a.de{suffix}"), target=str(folder / f"a.en{suffix}"))


def joined(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def parquet(source: list[str | None], target: list[str | None], *, nested: bool = False) -> bytes:
    table = pa.table({"de": pa.array(source, pa.string()), "en": pa.array(target, pa.large_string())})
    if nested:
        table = pa.table(
            {
                "translation": pa.StructArray.from_arrays(
                    [pa.array(source, pa.string()), pa.array(target, pa.string())], names=["de", "en"]
                )
            }
        )
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_format_gives_the_same_pairs(tmp_path: Path, suffix: str) -> None:
    pack = COMPRESS[suffix]
    flat = [line.replace("\t", " ") for line in SOURCE]
    tsv = "".join(f"id\t{t}\t{s}\n" for s, t in zip(flat, TARGET, strict=True)).encode()
    records = [{"de": s, "en": t, "n": 1} for s, t in zip(SOURCE, TARGET, strict=True)]
    files = {
        "a.tsv": tsv,
        "a.jsonl": "".join(json.dumps(record) + "\n" for record in records).encode(),
        "a.parquet": parquet([*SOURCE], [*TARGET]),
    }
    for name, content in files.items():
        (tmp_path / (name + suffix)).write_bytes(pack(content))
    assert aligned(tmp_path, pack(joined(SOURCE)), pack(joined(TARGET)), suffix) == (SOURCE, TARGET)
    assert read(path=str(tmp_path / f"a.tsv{suffix}"), columns=[2, 1]) == (flat, TARGET)
    assert read(path=str(tmp_path / f"a.jsonl{suffix}")) == (SOURCE, TARGET)
    assert read(path=str(tmp_path / f"a.jsonl{suffix}"), columns=["en", "de"]) == (TARGET, SOURCE)
    assert read(path=str(tmp_path / f"a.parquet{suffix}")) == (SOURCE, TARGET)


def test_nested_fields_and_nulls(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": {"de": "ja", "en": null}}\n{"t.de": "x", "t": {"en": "y\\nz"}}\n')
    assert read(path=str(tmp_path / "a.jsonl"), columns=["t.de", "t.en"]) == (["ja", "x"], ["", "y z"])
    (tmp_path / "a.parquet").write_bytes(parquet(["ja", None], ["y\nz", "no"], nested=True))
    columns = ["translation.de", "translation.en"]
    assert read(path=str(tmp_path / "a.parquet"), columns=columns) == (["ja", ""], ["y z", "no"])


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12), max_size=20),
    st.integers(1, 40),
    st.booleans(),
)
def test_lines_survive_any_block_size(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int, final: bool
) -> None:
    """Only LF ends a line, whatever else the lines contain and wherever the blocks end."""
    folder = tmp_path_factory.mktemp("lines")
    content = joined(texts)
    if not final and texts and texts[-1]:
        content = content[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_BLOCK_BYTES", block)
        patch.setattr("ziggurat.system.compressed._BLOCK_BYTES", block)
        source, target = aligned(folder, content, content)
    expected = [text.removesuffix("\r") for text in texts]
    if expected:
        expected[0] = expected[0].removeprefix("\ufeff") if texts[0].startswith("\ufeff") else expected[0]
    assert source == target == expected


def test_carriage_returns_and_marks_are_removed_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_bytes(b"\xef\xbb\xbfeins\r\nzwei\ndrei\r")
    (tmp_path / "a.en").write_bytes(b"one\ntwo\nthree")
    config = CorpusConfig(source=str(tmp_path / "a.de"), target=str(tmp_path / "a.en"))
    reader = CorpusReader.of(config, "data.train.0", ("de", "en"))
    assert list(reader.blocks()) == [(["eins", "zwei", "drei"], ["one", "two", "three"])]
    assert (reader.notes.carriage_returns, reader.notes.byte_order_marks) == (2, 1)
    list(reader.blocks())
    assert reader.notes.carriage_returns == 2, "a second pass must not count twice"


def test_unequal_sides_are_refused_with_both_counts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.de has 3 lines but .*a\.en has 2;"):
        aligned(tmp_path, b"a\nb\nc\n", b"a\nb\n")
    with pytest.raises(DataError, match=r"a\.en has 3 \(the last line of .*a\.en is empty: remove it\)"):
        aligned(tmp_path, b"a\nb\n", b"a\nb\n\n")
    with pytest.raises(DataError, match=r"a\.de has 1 lines but .*a\.en has 2"):
        aligned(tmp_path, b"a\rb\r", b"a\nb\n")
    with pytest.raises(DataError, match=r"a\.de has 0 lines but .*a\.en has 1"):
        aligned(tmp_path, b"", b"a\n")


@pytest.mark.parametrize(
    ("content", "line", "in_line", "in_file"),
    [
        (b"gut\n\xff\xfe\n", 2, 0, 4),
        (b"gut\nvier\xc3\nfunf\n", 2, 4, 8),  # the line feed is not part of a character
        (b"gut\nok\nab\xc0\xaf\n", 3, 2, 9),  # overlong
        (b"a\xed\xa0\x80b\n", 1, 1, 1),  # surrogate
        (b"\xef\xbb\xbfgut\nM\xfcller\n", 2, 1, 8),  # after a byte order mark
        (b"gut\n" * 3 + b"letzte\xfc", 4, 6, 18),
    ],
)
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_invalid_utf8_is_refused_at_its_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    line: int,
    in_line: int,
    in_file: int,
    block: int,
) -> None:
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", block)
    monkeypatch.setattr("ziggurat.system.compressed._BLOCK_BYTES", block)
    wanted = rf"a\.de, line {line}: not valid UTF-8.*byte {in_line} of the line, {in_file} of the file"
    with pytest.raises(DataError, match=wanted):
        aligned(tmp_path, content, b"x\n" * (content.count(b"\n") or 1))


def test_utf16_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.en, line 1: not valid UTF-8.*UTF-16"):
        aligned(tmp_path, b"a\nb\n", "a\nb\n".encode("utf-16"))


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"a\.de, line 2: longer than 1 MiB"):
        aligned(tmp_path, b"a\n" + b"x" * (3 << 20) + b"\n", b"a\nb\n")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
class TestCompressed:
    content = joined([f"Satz {n} von vielen" for n in range(500)])

    def refused(self, folder: Path, data: bytes, suffix: str, reason: str) -> None:
        with pytest.raises(DataError, match=reason) as caught:
            aligned(folder, COMPRESS[suffix](self.content), data, suffix)
        assert f"a.en{suffix}" in str(caught.value)

    def test_members_in_a_row_are_one_stream(self, tmp_path: Path, suffix: str) -> None:
        pack = COMPRESS[suffix]
        both = pack(self.content[:777]) + pack(self.content[777:])
        source, target = aligned(tmp_path, pack(self.content), both, suffix)
        assert source == target
        assert len(source) == 500

    def test_zero_padding_is_allowed_where_the_format_has_it(self, tmp_path: Path, suffix: str) -> None:
        if suffix != ".zst":
            pack = COMPRESS[suffix]
            padded = pack(self.content[:777]) + bytes(8) + pack(self.content[777:]) + bytes(4)
            assert len(aligned(tmp_path, pack(self.content), padded, suffix)[1]) == 500

    @pytest.mark.parametrize("share", [0.01, 0.6, 0.99])
    def test_truncated(self, tmp_path: Path, suffix: str, share: float) -> None:
        data = COMPRESS[suffix](self.content)
        self.refused(tmp_path, data[: max(8, int(len(data) * share))], suffix, "ends early|damaged")

    def test_bad_check_sum(self, tmp_path: Path, suffix: str) -> None:
        data = bytearray(COMPRESS[suffix](self.content))
        data[-7 if suffix == ".gz" else -30 if suffix == ".xz" else -2] ^= 0xFF
        self.refused(tmp_path, bytes(data), suffix, "damaged")

    def test_trailing_garbage(self, tmp_path: Path, suffix: str) -> None:
        self.refused(tmp_path, COMPRESS[suffix](self.content) + b"rubbish behind", suffix, "follow the compressed")

    def test_name_and_content_differ(self, tmp_path: Path, suffix: str) -> None:
        self.refused(tmp_path, self.content, suffix, "not compressed data of that kind")
        other = next(pack for name, pack in COMPRESS.items() if name not in ("", suffix))
        self.refused(tmp_path, other(self.content), suffix, "but the content is")
        with pytest.raises(DataError, match=f"this is {suffix} data, but the name"):
            aligned(tmp_path, COMPRESS[suffix](self.content), self.content)


def test_tsv_quotes_have_no_meaning_and_columns_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('er sagte "ja\tand "no\n"\\\t""\n', "utf-8")
    assert read(path=str(path)) == (['er sagte "ja', '"\\'], ['and "no', '""'])
    for row, count in (("only one", 1), ("a\tb\tc", 3), ("", 1)):
        path.write_text(f"a\tb\nc\td\n{row}\ne\tf\n", "utf-8")
        with pytest.raises(DataError, match=rf"a\.tsv, line 3: {count} columns instead of 2"):
            read(path=str(path))
    path.write_text("a\tb\n", "utf-8")
    with pytest.raises(DataError, match=r"line 1: 2 columns, but column 4"):
        read(path=str(path), columns=[0, 4])


@pytest.mark.parametrize(
    "line",
    [
        "{broken",
        "[1, 2]",
        '{"de": "a"}',
        '{"de": "a", "en": 3}',
        "",
        '{"de": "a", "en": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_bad_json_lines_are_refused_at_their_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"de": "a", "en": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: ") as caught:
        read(path=str(path))
    assert len(str(caught.value)) < 600


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = parquet(["a"], ["b"])
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        read(path=str(path))
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"no column 'fr'; it has: de, en"):
        read(path=str(path), columns=["fr", "en"])
    sink = io.BytesIO()
    pq.write_table(pa.table({"de": [1], "en": ["a"]}), sink)
    path.write_bytes(sink.getvalue())
    with pytest.raises(DataError, match="column 'de' is not text but int64"):
        read(path=str(path))


def test_globs_are_paired_in_sorted_order(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"p{number}.de").write_text(f"d{number}\n")
        (tmp_path / f"p{number}.en").write_text(f"e{number}")
    patterns = {"source": str(tmp_path / "p*.de"), "target": str(tmp_path / "p*.en")}
    assert read(**patterns) == (["d1", "d2"], ["e1", "e2"])
    (tmp_path / "p3.de").write_text("d3\n")
    with pytest.raises(DataError, match=r"data\.train\.0: .*matches 3 files but .*matches 2"):
        read(**patterns)


def test_a_glob_takes_packed_and_unpacked_files(tmp_path: Path) -> None:
    (tmp_path / "web-1.tsv").write_text("eins\tone\n")
    (tmp_path / "web-2.tsv.gz").write_bytes(gzip.compress(b"zwei\ttwo\n"))
    assert read(path=str(tmp_path / "web-*.tsv*")) == (["eins", "zwei"], ["one", "two"])
    (tmp_path / "web-2.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"several formats, .*web-1\.tsv and .*web-2\.jsonl"):
        read(path=str(tmp_path / "web-*"))
    (tmp_path / "web-1.tsv.xz").write_bytes(lzma.compress(b"eins\tone\n"))
    with pytest.raises(DataError, match=r"names .*web-1\.tsv\.xz and .*web-1\.tsv; remove one"):
        read(path=str(tmp_path / "web-*.tsv*"))


def test_missing_files_name_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_text("a\n")
    with pytest.raises(DataError, match=r"data\.train\.0\.target: no such file: .*nothing\.en"):
        read(source=str(tmp_path / "a.de"), target=str(tmp_path / "nothing.en"))
    with pytest.raises(DataError, match=r"data\.train\.0\.path: no file matches"):
        read(path=str(tmp_path / "*.tsv"))
    with pytest.raises(DataError, match=r"data\.train\.0\.source: .* not a regular file"):
        read(source=str(tmp_path), target=str(tmp_path / "a.de"))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"path": "a.bin"}, "data.train.0.path"),
        ({"path": "a.tsv", "columns": ["de", "en"]}, "data.train.0.columns"),
        ({"path": "a.jsonl", "columns": [0, 1]}, "data.train.0.columns"),
        ({"path": "a.tsv", "columns": [1, 1]}, "data.train.0.columns"),
        ({"path": "a.txt", "format": "text"}, "data.train.0.format"),
        ({"source": "a", "target": "b", "format": "tsv"}, "data.train.0.format"),
        ({"source": "a", "target": "b", "columns": [0, 1]}, "data.train.0.columns"),
    ],
)
def test_impossible_formats_name_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a.bin", "a.tsv", "a.jsonl", "a.txt"):
        (tmp_path / name).write_text("x\ty\n")
    with pytest.raises(ConfigError) as caught:
        read(**config)
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    ("wanted", "column", "fields", "hint"),
    [
        (("de", "en"), "translation", ("de", "en"), "columns: [translation.de, translation.en]"),
        (("de", "en"), "translation", ("en", "fr", "de"), "columns: [translation.de, translation.en]"),
        (("de", "en"), "pair", ("en", "de"), "columns: [pair.de, pair.en]"),
        (("de", "en"), "translation", ("deu", "eng"), "columns: [translation.deu, translation.eng]"),
        (("de", "en"), "text", ("src", "tgt"), "columns: [text.src, text.tgt]"),
        (("de", "en"), "meta", ("url",), ""),
    ],
)
def test_nested_text_columns_are_suggested(
    wanted: tuple[str, str], column: str, fields: tuple[str, ...], hint: str, tmp_path: Path
) -> None:
    """Hugging Face data sets have both texts in one column, in Parquet and in JSON lines."""
    record = {"id": "0", column: {name: f"text {name}" for name in fields}}
    pq.write_table(pa.table({name: [value] for name, value in record.items()}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    for path in (tmp_path / "a.parquet", tmp_path / "a.jsonl"):
        with pytest.raises(DataError) as error:
            read(path=str(path))
        assert hint in str(error.value)
        assert ("columns: [" in str(error.value)) == bool(hint)
        if wanted[0] in fields:
            proposed = str(error.value).split("columns: [")[1].split("]")[0].split(", ")
            assert read(path=str(path), columns=proposed) == (["text de"], ["text en"])

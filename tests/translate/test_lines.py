from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.system.errors import DataError
from ziggurat.translate import text_lines as lines_module
from ziggurat.translate.results import join_parts, json_line, one_line
from ziggurat.translate.text_lines import read_lines, split_long, windows


def read(data: bytes) -> list[str]:
    return list(read_lines(io.BytesIO(data), "standard input"))


def test_only_line_feeds_end_lines() -> None:
    text = "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\rh"
    assert read(f"{text}\n\n \nend".encode()) == [text, "", " ", "end"]
    assert read(b"") == []
    assert read(b"\n") == [""]


def test_a_carriage_return_is_removed_only_before_the_line_feed() -> None:
    assert read(b"one\r\n\r\ntwo\r\r\nlast\r") == ["one", "", "two\r", "last"]


def test_byte_order_mark_is_removed_at_the_start_only() -> None:
    mark = b"\xef\xbb\xbf"
    assert read(mark + b"a\n" + mark + b"b\n") == ["a", "\ufeffb"]


@pytest.mark.parametrize(
    ("data", "place", "found"),
    [
        (b"good\nbad \xff\xfe here\n", "line 2", "FF FE 20 68 (byte 4 of the line, 9 of the input"),
        (b"cut \xc3\nnext\n", "line 1", "C3 0A 6E 65"[:5] + " (byte 4 of the line, 4 of the input"),
        (b"\xef\xbb\xbfb\xfcse\n", "line 1", "FC 73 65 0A (byte 4 of the line, 4 of the input"),
        (b"\xed\xa0\x80\n", "line 1", "ED A0 80 0A (byte 0 of the line"),
        (b"\xff\xfeA\x00\n\x00", "line 1", "iconv -f UTF-16"),
    ],
)
def test_bytes_that_are_not_utf8_are_named_with_their_position(data: bytes, place: str, found: str) -> None:
    with pytest.raises(DataError) as caught:
        read(data)
    assert f"standard input, {place}: not valid UTF-8" in str(caught.value)
    assert found in str(caught.value)


def test_lines_before_a_fault_are_returned() -> None:
    lines = read_lines(io.BytesIO(b"one\ntwo\n\xff\nfour\n"), "x")
    assert [next(lines), next(lines)] == ["one", "two"]
    with pytest.raises(DataError, match="line 3"):
        next(lines)


def test_a_line_without_end_is_refused_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 20)

    class Endless(io.RawIOBase):
        taken = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert size > 0
            self.taken += size
            return b"x" * size

    stream = Endless()
    with pytest.raises(DataError, match="line 1: longer than 1 MiB"):
        list(read_lines(stream, "x"))  # type: ignore[arg-type]
    assert stream.taken <= (1 << 20) + 1


@given(st.text())
def test_output_is_one_line_for_every_reader(text: str) -> None:
    clean = one_line(text)
    assert len(clean.splitlines()) <= 1
    assert "\0" not in clean
    assert "".join(clean.split()) == "".join(text.replace("\0", " ").split())  # nothing else gets lost


def test_one_line_leaves_ordinary_text_alone() -> None:
    assert one_line(" a  b\u00a0c\t") == " a  b\u00a0c\t"
    assert one_line("a\r\nb\u2028\u2029c\n") == "a b c"


@given(st.text())
def test_a_json_line_is_one_line_for_every_reader(text: str) -> None:
    assert len(json_line({"text": text}).splitlines()) == 1


def characters(texts: list[str]) -> list[list[int]]:
    """A tokenizer of characters that drops blanks."""
    return [[ord(c) for c in text if not c.isspace()] for text in texts]


def shown(parts: list[list[int]]) -> list[str]:
    return ["".join(map(chr, part)) for part in parts]


def split(text: str, limit: int) -> list[str]:
    return shown(split_long(text, characters([text])[0], characters, limit))


def test_long_lines_are_cut_at_sentence_ends_then_words_then_anywhere() -> None:
    assert split("One two. Three?", 99) == ["Onetwo.Three?"]
    assert split('One. "Two!" Three? 3.5 m.', 8) == ["One.", '"Two!"', "Three?", "3.5m."]
    assert split("One. Two. Three.", 9) == ["One.Two.", "Three."]
    assert split("alpha beta gamma. So.", 10) == ["alphabeta", "gamma.So."]
    assert split("abcdefghijklm n", 5) == ["abc", "def", "ghi", "jklmn"]
    assert split("你好。「再见。」好！！吗", 5) == ["你好。", "「再见。」", "好！！吗"]


@given(st.text(alphabet="ab .!?。」\u00a0\n", max_size=60), st.integers(1, 12))
def test_parts_hold_every_piece_in_order_and_fit(text: str, limit: int) -> None:
    ids = characters([text])[0]
    parts = split_long(text, ids, characters, limit)
    assert [i for part in parts for i in part] == ids
    assert all(len(part) <= limit for part in parts)


def test_characters_are_not_cut_into_bytes() -> None:
    def utf8(texts: list[str]) -> list[list[int]]:
        return [list(text.replace(" ", "").encode()) for text in texts]

    word = "aé€😀" * 9
    for limit in (4, 5, 7, 30):
        parts = split_long(word, utf8([word])[0], utf8, limit)
        assert "".join(bytes(part).decode() for part in parts) == word
        assert max(map(len, parts)) <= limit


def test_parts_are_joined_by_blanks_where_the_script_has_them() -> None:
    assert join_parts(["A b.", "", "C d."]) == "A b. C d."
    assert join_parts(["你好。", "再见。", "OK"]) == "你好。再见。 OK"
    assert join_parts([]) == ""


def test_windows_end_by_lines_and_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_WINDOW_CHARACTERS", 10)
    assert list(windows(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(windows(["x" * 11, "y", "z" * 9, "w"], 5)) == [["x" * 11], ["y", "z" * 9], ["w"]]


def test_a_window_reads_no_further_than_it_must() -> None:
    taken: list[int] = []

    def source() -> Iterator[str]:
        for i in range(100):
            taken.append(i)
            yield str(i)

    window = windows(source(), 3)
    assert next(window) == ["0", "1", "2"]
    assert taken == [0, 1, 2]


def test_an_error_in_the_input_comes_after_the_lines_before_it() -> None:
    def source() -> Iterator[str]:
        yield "a"
        raise DataError("line 2")

    window = windows(source(), 10)
    assert next(window) == ["a"]
    with pytest.raises(DataError, match="line 2"):
        next(window)

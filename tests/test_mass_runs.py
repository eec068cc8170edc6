"""`python -m tools.documents`: no part of a document is silently lost, doubled or skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.text.files import FILES, docx, members, packed
from tools.documents import FAULTS, commonmark, compared, examine, examined, letters, main, opens, skipped, translated
from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.sentences import Result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "picture.png").write_bytes(b"none")
    return tmp_path


def test_a_file_of_each_kind_survives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["faults"], said["refused"]) == ([], [])
    assert sum(counts["documents"] for counts in said["kinds"].values()) == len(FILES)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_loss_is_counted(name: str) -> None:
    content = FILES[name]
    assert not compared(content, content, name, str)["lost"]
    usual = (b"heading", b"plans", b"dark", b"words", b"Hello", b"line", b"button", b"file", b"two")
    word = next(each for each in usual if each in b"".join(inside(content).values()))
    lacking = {part: each.replace(word, b"") for part, each in inside(content).items()}
    other = lacking.get("", b"") or packed(lacking)
    assert compared(content, other, name, str)["lost"]


def inside(content: bytes) -> dict[str, bytes]:
    return members(content) if content.startswith(b"PK") else {"": content}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"a": "<p>foo<em>bar</em></p>", "b": "a\\\\right &copy b"}'),
        ("a.md", "a Silben&shy;trennung [\\_some_name][x]\n\n[x]: /x\n"),
        ("a.txt", "ısı ışık"),
    ],
)
def test_words_with_marks_inside_are_neither_lost_nor_doubled(name: str, text: str) -> None:
    assert not examined(text.encode(), name).total()


def test_doubled_skipped_and_unreadable_text_is_counted() -> None:
    assert compared(b"One word", b"One word word", "a.txt", str) == {"lost": 0, "doubled": 1}
    notices = TextNotices()
    assert skipped(Result(f"{letters('Some')} words and `code`".encode(), notices), "a.md") == 2
    notices.add("not_shown", "line 1")
    assert skipped(Result(b"Some words", notices), "a.md") == 0
    broken = {part: each.replace(b"</w:p>", b"", 1) for part, each in members(docx()).items()}
    assert opens(docx(), "a.docx")
    assert not opens(packed(broken), "a.docx")
    assert not opens(b'{"a": 1,}', "a.json")


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.html", "<p title='Some words'><img alt=one><input type=submit value='Go on'>", 5),
        ("a.html", "<meta name=description content='Some words'><meta name=robots content=noindex>", 2),
        ("a.html", "<p translate=no title='Some words'>", 0),
        ("a.md", "---\ntitle: Some words\nlayout: post\n---\n", 2),
        ("a.md", '+++\ndescription = "Some words"\n+++\n', 2),
        ("a.md", "![Some words](a.png 'and more')\n", 6),  # a description is both text and an attribute
        ("a.md", "[![a](x)][1] <abbr title='Some words'>1</abbr>\n\n[1]: /x 'More'\n", 3),
        ("a.md", "```{figure} a.png\n:alt: Some words\n\nA caption here\n```\n", 4),
        ("a.md", "```{code-block} python\n:caption: Some words\nx = more\n```\n\n```python\nmore words\n```\n", 2),
        ("a.md", '{{< figure caption="Some words" src="a.png" >}}\n', 2),
        ("a.md", '::: {.tip title="Some words"}\nmore\n:::\n', 3),
        ("a.md", "- some\n\n  ````{note}\n  ```python\n  more words\n  ```\n\n  words\n  ````\n", 2),
        ("a.md", "Some[^note] words {style=plain} and <kbd>Fork</kbd>\n\n[^note]: More words\n", 5),
        ("a.mdx", "<Grid\n  title='Some words'\n  label={{ a: 'x' }}\n>\n  more\n</Grid>\n", 3),
    ],
)
def test_words_in_attributes_front_matter_and_directives_count_as_skipped(name: str, text: str, count: int) -> None:
    assert skipped(Result(text.encode()), name) == count
    assert skipped(translated(text.encode(), name, letters), name) == 0


def test_letters_change_every_word_and_refusals_are_listed(tmp_path: Path) -> None:
    assert not set(translated(b"Two words", "a.txt", letters).value.decode()) & set("Twords")
    (tmp_path / "a.docx").write_bytes(b"PK nothing")
    table, faults, refused = examine([tmp_path])
    assert (table["Word"]["refused"], faults, len(refused)) == (1, [], 1)


def test_examples_of_commonmark(tmp_path: Path) -> None:
    examples = [{"markdown": text} for text in ("# Head\n\nSome *words*\n", "[a link](/x)\n", "- one\n- `two`\n")]
    (tmp_path / "spec.json").write_text(json.dumps(examples))
    assert commonmark(tmp_path / "spec.json") == ({"documents": 3, "changed": 0, "structure": 0}, [])
    assert main(["--commonmark", str(tmp_path / "spec.json")]) == 0


@pytest.mark.slow
def test_nothing_in_the_shared_documents_is_lost(shared_data: Path) -> None:
    table, faults, refused = examine([shared_data.parent])
    assert sum(counts["documents"] for counts in table.values()) > 50
    assert faults == []
    assert not any(counts[fault] for counts in table.values() for fault in FAULTS)
    assert all("password" in line for line in refused)

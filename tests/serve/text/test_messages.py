"""Program messages: ICU's MessageFormat, message files recognised by shape, gettext."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, permuting, swapped, upper
from ziggurat.serve.text.documents.icu import MAX_DEPTH, Argument, IcuChoice, IcuText, MessageError, Part, parse
from ziggurat.serve.text.documents.kinds import document, document_kind
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import protected, sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")


def in_json(value: object, translate: Translate, name: str = "a.json") -> Any:
    content = json.dumps(value, ensure_ascii=False).encode()
    return json.loads(run(document(content, name, SETTINGS), translate).value)


def faithful(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator that changes case except in protected text, as a good model does."""
    said = []
    for answer, source in zip(upper(sentences), sentences, strict=True):
        text = answer.text
        for item in protected(source):
            text = text[: item.start] + source[item.start : item.end] + text[item.end :]
        said.append(SentenceTranslation(text, answer.links))
    return said


# ICU


def skeleton(parts: list[Part]) -> list[object]:
    """Return the parts of a message that a program reads."""
    found: list[object] = []
    for part in parts:
        if isinstance(part, Argument):
            found.append(part.raw)
        elif isinstance(part, IcuChoice):
            found.append((part.name, part.end, [(before, skeleton(branch)) for before, branch in part.branches]))
    return found


def texts(parts: list[Part]) -> list[str]:
    found: list[str] = []
    for part in parts:
        if isinstance(part, IcuText):
            found.append(part.text)
        elif isinstance(part, IcuChoice):
            found += [text for _, branch in part.branches for text in texts(branch)]
    return found


def written(parts: list[Part]) -> str:
    said = ""
    for part in parts:
        if isinstance(part, IcuChoice):
            said += "".join(before + written(branch) for before, branch in part.branches) + part.end
        else:
            said += part.raw
    return said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("{n, plural, one {# item here} other {# items}}", "{n, plural, one {# ITEM HERE} other {# ITEMS}}"),
        (
            "You have {n, plural, =0 {no messages} one {one message} other {# messages}}.",
            "yOU HAVE {n, plural, =0 {NO MESSAGES} one {ONE MESSAGE} other {# MESSAGES}}.",
        ),
        ("{g, select, male {He} other {They}} left", "{g, select, male {hE} other {tHEY}} LEFT"),
        (
            "{n,plural,offset:1 =0{nobody}=1{{who}}one{{who} and # friend}other{{who} and # friends}}",
            "{n,plural,offset:1 =0{NOBODY}=1{{who}}one{{who} AND # FRIEND}other{{who} AND # FRIENDS}}",
        ),
        (
            "{g, select, f {{n, plural, one {her file} other {her # files}}} other {files}}",
            "{g, select, f {{n, plural, one {HER FILE} other {HER # FILES}}} other {FILES}}",
        ),
        ("{y, selectordinal, one {#st} other {#th}} time", "{y, selectordinal, one {#st} other {#th}} TIME"),
        ("Price {p, number, ::currency/EUR} now", "pRICE {p, number, ::currency/EUR} NOW"),
        ("Seen {d, date, ::yMMMd} or {t, time, short}", "sEEN {d, date, ::yMMMd} OR {t, time, short}"),
        (
            "{n, plural, one {it's '{'one'}'} other {it''s '#'#}}",
            "{n, plural, one {IT''S '{'one'}'} other {IT''S '#'#}}",
        ),
        ("{n, plural,\n  one {one file}\n  other {# files}\n}", "{n, plural,\n  one {ONE FILE}\n  other {# FILES}\n}"),
        (
            "{n, plural, one {<b>#</b> &amp; file} other {<b>#</b> files}}",
            "{n, plural, one {<b>#</b> &amp; FILE} other {<b>#</b> FILES}}",
        ),
        ("{n, PLURAL, one {a file} other {files}}", "{n, PLURAL, one {A FILE} other {FILES}}"),
        ("{g,Select,other{they}} left", "{g,Select,other{THEY}} LEFT"),
        ("{n, plural, one {first\n\nsecond} other {third}}", "{n, plural, one {FIRST\n\nSECOND} other {THIRD}}"),
    ],
)
def test_branches_are_translated_one_by_one(message: str, said: str) -> None:
    assert in_json({"a": message}, faithful) == {"a": said}


@pytest.mark.parametrize(
    "message",
    [
        "{n, plural, one {# file} other {# files}",
        "{n, plural, one # file other # files}",
        "{n, plural, }",
        "{0, choice, 0#no files|1#one file|1<{0} files}",
        "{n, plural, one {a } file}} other {b}}",
        "{n, plural, other {" * (MAX_DEPTH + 1) + "deep" + "}}" * (MAX_DEPTH + 1),
        ".match {$n :number}\none {{One file}}\n* {{Files}}",
        ".match $n\none {{One file}}\n* {{Files}}",
        ".input {$n :number}\n.match $n\none {{One file}}\n* {{Files}}",
        ".local $x = {$n :number}\n{{Some text}}",
        "You have {{PLURAL:$1|one file|$1 files}}",
        "{{GENDER:$1|He|She|They}} left",
    ],
)
def test_a_message_that_cannot_be_parsed_stays_and_is_counted(message: str) -> None:
    outcome = run(document(json.dumps({"a": message, "b": "file"}).encode(), "a.json", SETTINGS), upper)
    assert json.loads(outcome.value) == {"a": message, "b": "FILE"}
    assert outcome.notices == {"not_parsed": 1}
    alone = run(document(json.dumps({"a": message}).encode(), "a.json", SETTINGS), upper)
    assert alone.notices == {"not_parsed": 1, "nothing_to_translate": 1}


def test_endings_of_ordinals_stay_and_are_counted() -> None:
    message = "{y, selectordinal, one {#st} two {#nd} few {#rd} other {#th}}"
    outcome = run(document(json.dumps({"a": message, "b": "file"}).encode(), "a.json", SETTINGS), upper)
    assert (json.loads(outcome.value), outcome.notices) == ({"a": message, "b": "FILE"}, {"endings_kept": 4})


def test_an_apostrophe_of_a_translation_quotes_nothing() -> None:
    def french(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(s.replace("of ", "d'"), None) for s in sentences]

    assert in_json({"a": "{n, plural, one {file of {name}} other {files of #}}"}, french) == {
        "a": "{n, plural, one {file d''{name}} other {files d''#}}"
    }


def quoting(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator that replaces `of` with an apostrophe before the next word, as in French."""
    return [SentenceTranslation(s.replace("of ", "d'"), None) for s in sentences]


FORMATJS, PLURAL = {"m": {"defaultMessage": "Two", "description": "x"}}, {"m": "{n, plural, other {Two}}"}


@pytest.mark.parametrize(
    ("name", "others", "before", "after"),
    [
        ("a.json", FORMATJS, "photo of {name} now", "photo d''{name} now"),
        ("a.json", FORMATJS, "photo of one", "photo d'one"),
        ("a.json", FORMATJS, "It''s of {name}", "It''s d''{name}"),
        ("a.json", PLURAL, "photo of {name} now", "photo d''{name} now"),
        ("a.json", PLURAL, "&amp; of {name}", "&amp; d''{name}"),
        ("a.json", PLURAL, "photo of {{name}}", "photo d'{{name}}"),
        ("a.json", PLURAL, "file '{name}' of {x}", "file '{name}' d'{x}"),
        ("a.json", {}, "photo of {name} now", "photo d'{name} now"),
        ("a.arb", {}, "photo of {name} now", "photo d\u2019{name} now"),
        ("a.arb", {}, "file '{name}' of {x}", "file '{name}' d'{x}"),
        ("a.arb", {}, "{n, plural, other {photo of {name}}}", "{n, plural, other {photo d\u2019{name}}}"),
        ("a.arb", {"m": "It''s"}, "photo of {name} now", "photo d''{name} now"),
    ],
)
def test_an_apostrophe_quotes_no_argument(name: str, others: dict[str, Any], before: str, after: str) -> None:
    entry = {"defaultMessage": before} if others is FORMATJS else before
    said = in_json({**others, "k": entry}, quoting, name)["k"]
    assert (said["defaultMessage"] if others is FORMATJS else said) == after


def test_a_doubled_apostrophe_is_translated_as_one() -> None:
    asked: list[str] = []

    def noted(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    assert in_json({"k": {"defaultMessage": "It''s {name}"}}, noted) == {"k": {"defaultMessage": "iT''S {name}"}}
    assert asked[0] == "It's {name}"


def test_arguments_with_branches_survive_where_messages_are_not_parsed() -> None:
    text = "You have {n, plural, one {# {file}} other {# files}} and {n, plural, one {a"
    assert [text[i.start : i.end] for i in protected(text)] == ["{n, plural, one {# {file}} other {# files}}"]
    assert run(document(b"{n, select, a {One house} other {Two}}", "a.txt", SETTINGS), upper).value.startswith(
        b"{n, sel"
    )


WORDS = st.lists(st.sampled_from(["file", "It's", "a", "'{'x'}'", "''", "é", "house.", "<b>", "</b>", "&", "|"])).map(
    " ".join
)


def _choice(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    blank = st.sampled_from(["", " ", "\n  "])
    plain = st.tuples(blank, st.sampled_from(["one", "few", "=0", "many", "=12"]), blank, inner).map(
        lambda t: f"{t[0]} {t[1]}{t[2]}{{{t[3]}}}"
    )
    kind = st.sampled_from(["plural, offset:1", "plural,", "selectordinal,", "select,"])
    name = st.sampled_from(["n", "user.name", "0"])
    return st.tuples(name, kind, st.lists(plain, max_size=3), inner, blank).map(
        lambda t: f"{{{t[0]}, {t[1]}{''.join(t[2]) if t[1] != 'select,' else ''} other {{{t[3]}}}{t[4]}}}"
    )


MESSAGES = st.recursive(
    WORDS,
    lambda inner: st.lists(
        st.one_of(WORDS, _choice(inner), st.sampled_from(["{name}", "{p, number, ::.00}", "#", " {d, date} "])),
        max_size=4,
    ).map(" ".join),
    max_leaves=8,
)


@given(MESSAGES, st.integers(0, 9))
def test_any_message_keeps_what_a_program_reads(message: str, seed: int) -> None:
    parts = parse(message)
    assert written(parts) == message
    assert in_json([message], identity) == [message]
    for translate in (faithful, permuting(seed, change=swapped)):
        (said,) = in_json([message], translate)
        assert flat(skeleton(parse(said))) == flat(skeleton(parts))


def flat(found: list[object]) -> Counter[str]:
    """Return the arguments of a message, which a translation may reorder."""
    counts: Counter[str] = Counter()
    for part in found:
        if isinstance(part, str):
            counts[part] += 1
        elif isinstance(part, tuple):
            name, end, branches = part
            counts[f"{name}{end}"] += 1
            for before, branch in branches:
                counts[before] += 1
                counts += flat(branch)
    return counts


@given(st.text(alphabet="{},'# anplurselcto=1", max_size=60))
def test_any_text_is_parsed_whole_or_refused(text: str) -> None:
    try:
        parts = parse(text)
    except MessageError:
        return
    assert written(parts) == text


# Files by their shape


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "messages.json",
            {"a": {"message": "Hi $USER$ and $1", "description": "Note", "placeholders": {"user": {"content": "$1"}}}},
            {"a": {"message": "hI $USER$ AND $1", "description": "Note", "placeholders": {"user": {"content": "$1"}}}},
        ),
        ("en.json", {"a": {"message": "One", "hash": "x"}}, {"a": {"message": "oNE", "hash": "x"}}),
        (
            "a.arb",
            {"@@locale": "en", "hi": "Hi {who}", "@hi": {"description": "Words", "placeholders": {"who": {}}}},
            {"@@locale": "de", "hi": "hI {who}", "@hi": {"description": "Words", "placeholders": {"who": {}}}},
        ),
        (
            "a.json",
            {"hi": "Hi there", "@hi": {"description": "Words", "type": "text"}},
            {"hi": "hI THERE", "@hi": {"description": "Words", "type": "text"}},
        ),
        (
            "a.json",
            {"x": {"defaultMessage": "Some words", "description": "A note"}},
            {"x": {"defaultMessage": "sOME WORDS", "description": "A note"}},
        ),
        (
            "a.json",
            [{"id": "a b", "defaultMessage": "Some words"}],
            [{"id": "a b", "defaultMessage": "sOME WORDS"}],
        ),
        (
            "a.json",
            {"k": {"string": "Words", "developer_comment": "Note"}},
            {"k": {"string": "wORDS", "developer_comment": "Note"}},
        ),
        (
            "a.json",
            {"locale": "en", "translations": {"a": "Hi {$X}"}},
            {"locale": "de", "translations": {"a": "hI {$X}"}},
        ),
        (
            "a.webmanifest",
            {"name": "My words", "start_url": "/some page", "shortcuts": [{"name": "New", "url": "/new"}]},
            {"name": "mY WORDS", "start_url": "/some page", "shortcuts": [{"name": "nEW", "url": "/new"}]},
        ),
        (  # an entry with an additional or missing key
            "a.json",
            {"a": {"message": "Hi", "description": "Note"}, "b": {"message": "Yo", "extra": "Other"}},
            {"a": {"message": "hI", "description": "Note"}, "b": {"message": "yO", "extra": "Other"}},
        ),
        (
            "a.json",
            {"a": {"message": "Hi", "description": "Note"}, "b": {"description": "Note"}},
            {"a": {"message": "hI", "description": "Note"}, "b": {"description": "Note"}},
        ),
        (
            "a.json",
            {"a": {"message": "Open $1 for $$"}, "b": {"message": "Yo", "placeholders": {"x": {"content": "$1"}}}},
            {"a": {"message": "oPEN $1 FOR $$"}, "b": {"message": "yO", "placeholders": {"x": {"content": "$1"}}}},
        ),
        (  # go-i18n
            "a.json",
            {"a": "Hi there", "b": {"description": "Note", "one": "A file", "other": "Files"}},
            {"a": "hI THERE", "b": {"description": "Note", "one": "a FILE", "other": "fILES"}},
        ),
        ("a.json", [{"id": "a b", "translation": "Hi there"}], [{"id": "a b", "translation": "hI THERE"}]),
        (  # MediaWiki
            "a.json",
            {"@metadata": {"authors": ["Ann Other"]}, "a": "Hi $1"},
            {"@metadata": {"authors": ["Ann Other"]}, "a": "hI $1"},
        ),
        (  # half of the file looks like that, without a description
            "a.json",
            {"a": {"message": "Hi"}, "b": {"message": "Yo", "title": "Two"}},
            {"a": {"message": "hI"}, "b": {"message": "yO", "title": "tWO"}},
        ),
        # No known shape, so all values are texts.
        ("a.json", {"message": "Some", "description": "Words"}, {"message": "sOME", "description": "wORDS"}),
        (
            "a.json",
            {"key_one": "{{count}} file", "key_other": "{{count}} files, $t(more.of, {\"n\": 1})", "n": {"k": "In"}},
            {"key_one": "{{count}} FILE", "key_other": "{{count}} FILES, $t(more.of, {\"n\": 1})", "n": {"k": "iN"}},
        ),
    ],
)  # fmt: skip
def test_a_file_of_messages_is_known_by_its_shape(name: str, before: object, after: object) -> None:
    assert in_json(before, faithful, name) == after


def test_text_next_to_known_keys_is_reported() -> None:
    content = {"a": {"message": "Hi", "description": "Note"}, "b": {"message": "Yo", "extra": "Other"}}
    (record,) = run(document(json.dumps(content).encode(), "a.json", SETTINGS), upper).notices.records()
    assert (record["kind"], record["place"], record["count"]) == ("not_read", "key b.extra", 1)


@pytest.mark.parametrize(
    "content",
    [
        {"sourceLanguage": "en", "strings": {"Hi": {"localizations": {}}}, "version": "1.0"},
        {"domain": "x", "locale_data": {"x": {"": {"lang": "en"}, "Hi": ["Salut"]}}},
        {"language": "en", "messages": [{"id": "Hi", "message": "Hi", "translation": ""}]},
        {"a": [{"type": 0, "value": "Hi "}, {"type": 1, "value": "name"}]},
    ],
)
def test_json_that_cannot_be_translated_safely_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"a\.json: is "):
        in_json(content, upper)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Hello :name, at 10:30 you have :count.", "hELLO :name, AT 10:30 YOU HAVE :count."),
        ("One apple|{n} apples", "oNE APPLE|{n} APPLES"),
        ("{0} None here|[1,19] Some|[20,*] Many", "{0} nONE HERE|[1,19] sOME|[20,*] mANY"),
        ("See @:menu.file or @.lower:menu.edit.", "sEE @:menu.file OR @.lower:menu.edit."),
        ("Read <0>the terms</0> now", "rEAD <0>THE TERMS</0> NOW"),
        ("Read the <link>terms of use</link> now.", "rEAD THE <link>TERMS OF USE</link> NOW."),
        ("Tom &amp; Jerry&nbsp;run", "tOM &amp; jERRY&nbsp;RUN"),
        ("[%key:common::state::off%]", "[%key:common::state::off%]"),
        ("It is [%key:common::state::off%] now", "iT IS [%key:common::state::off%] NOW"),
        ("Use [X16X] of [X48X][X77X].", "uSE [X16X] OF [X48X][X77X]."),
        ("[X0X]", "[X0X]"),
        ("Hello {$name}, {@link Foo} and { name }", "hELLO {$name}, {@link Foo} AND { name }"),
        ("Text in {curly braces here} is text.", "tEXT IN {CURLY BRACES HERE} IS TEXT."),
        ("Use '{'braces'}' with care.", "uSE '{'braces'}' WITH CARE."),
        ("Costs $$5 or $HOME", "cOSTS $$5 OR $HOME"),
        ("Hello <0>world</0><br/>new", "hELLO <0>WORLD</0><br/>NEW"),
        ("Click <1>here</1> &amp; go", "cLICK <1>HERE</1> &amp; GO"),
        ("<0>Hi</0> and <b>more</b>", "<0>hI</0> AND <b>MORE</b>"),
        ("A <2>bold <b>thing</b></2>, <0/> it is", "a <2>BOLD <b>THING</b></2>, <0/> IT IS"),
        (
            "{n, plural, one {one <2>file</2>} other {<br/>Many}}",
            "{n, plural, one {ONE <2>FILE</2>} other {<br/>mANY}}",
        ),
    ],
)
def test_references_in_messages_survive(before: str, after: str) -> None:
    asked: list[str] = []

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return [
            SentenceTranslation(
                one.text.replace(swapped("link"), "link").replace(swapped("key"), "key"), one.links
            )
            for one in kept(sentences)
        ]  # fmt: skip

    def kept(sentences: list[str]) -> list[SentenceTranslation]:
        import re

        out = []
        for answer, source in zip(faithful(sentences), sentences, strict=True):
            text = answer.text
            for found in re.finditer(r":name|:count|@:menu.file|@.lower:menu.edit", source):
                text = text[: found.start()] + found[0] + text[found.end() :]
            out.append(SentenceTranslation(text, answer.links))
        return out

    assert in_json([before], translate) == [after]


# gettext


def in_po(text: str, translate: Translate = upper) -> str:
    return run(document(text.encode(), "a.po", SETTINGS), translate).value.decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('domain "first"\nmsgid"A dog"\nmsgstr""\n', 'domain "first"\n#, fuzzy\nmsgid"A dog"\nmsgstr "a DOG"\n'),
        ('msgid "A " "dog"\nmsgstr ""\n', '#, fuzzy\nmsgid "A " "dog"\nmsgstr "a DOG"\n'),
        ('msgid\n"A dog"\nmsgstr\n""\n', '#, fuzzy\nmsgid\n"A dog"\nmsgstr "a DOG"\n'),
        (
            'msgid "a"\nmsgid_plural "b"\nmsgstr [ 0 ] ""\nmsgstr[1]""\n',
            '#, fuzzy\nmsgid "a"\nmsgid_plural "b"\nmsgstr[0] "A"\nmsgstr[1] "B"\n',
        ),
        ('msgid "a\\x41\\101\\f"\nmsgstr ""\n', '#, fuzzy\nmsgid "a\\x41\\101\\f"\nmsgstr "Aaa\\f"\n'),
        ('#~ msgid "a"\n#~ msgstr ""\n', '#~ msgid "a"\n#~ msgstr ""\n'),
        (
            'msgid "{n, plural, one {# dog} other {# dogs}}"\nmsgstr ""\n',
            '#, fuzzy\nmsgid "{n, plural, one {# dog} other {# dogs}}"\n'
            'msgstr "{n, plural, one {# DOG} other {# DOGS}}"\n',
        ),
    ],
)
def test_gettext_is_read_as_gettext_reads_it(before: str, after: str) -> None:
    assert in_po(before) == after


# Files that do not match their names


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1....", "password"),
        ("a.pptx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1....", "password"),
        ("a.odt", b"%PDF-1.7", "PDF"),
        ("a.txt", b"{\\rtf1 words}", "RTF"),
        ("a.md", b"PK\x03\x04....", "zip"),
        ("a.po", b"\x1f\x8b....", "gzip"),
        ("a.json", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.docm", b"", "empty"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_named(name: str, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        run(document(content, name, SETTINGS), upper)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.sdlxliff", "XLIFF"), ("a.mqxliff", "XLIFF"), ("a.mxliff", "XLIFF"), ("a.docm", "Word"), ("a.dotx", "Word"),
        ("a.potx", "PowerPoint"), ("a.pptm", "PowerPoint"), ("a.ott", "OpenDocument text"), ("A.MDX", "Markdown"),
        ("a.otp", "OpenDocument presentation"), ("a.arb", "JSON"), ("a.webmanifest", "JSON"),
    ],
)  # fmt: skip
def test_other_endings_of_known_formats(name: str, kind: str) -> None:
    assert document_kind(name).name == kind


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("File '{name}' was not found", "FILE '{name}' WAS NOT FOUND"),
        ("'{{name}}' and '{0}'", "'{{name}}' AND '{0}'"),
        ('{n, number} hits, see <a href="{url}">here</a> now', '{n, number} HITS, SEE <a href="{url}">HERE</a> NOW'),
        ('{n, plural, one {<img src="{src}"> a file} other {the files}}',
         '{n, plural, one {<img src="{src}"> A FILE} other {THE FILES}}'),
        ("{n, plural, one {#day} other {#ms}}", "{n, plural, one {#DAY} other {#MS}}"),
        ("Dear <<name>>, hello", "DEAR <<name>>, HELLO"),
        ("The user <ann@example.org> wrote", "THE USER <ann@example.org> WROTE"),
        ("<b>one</b> apple | <b>{n}</b> apples", "<b>ONE</b> APPLE | <b>{n}</b> APPLES"),
        ("one &amp; a | two &amp; b", "ONE &amp; A | TWO &amp; B"),
        ("see <link>the terms</link>", "SEE <link>THE TERMS</link>"),
    ],
)  # fmt: skip
def test_placeholders_and_tags_stay_in_place(message: str, said: str) -> None:
    outcome = run(document(json.dumps({"a": message}).encode(), "a.json", SETTINGS), upper)
    assert json.loads(outcome.value)["a"].upper() == said.upper()
    for kept in regex.findall(r"<<\w+>>|<[^<>]+>|\{\{?\w+\}?\}", said):
        assert kept in json.loads(outcome.value)["a"]


def test_plural_forms_are_translated_one_by_one_between_tags() -> None:
    asked: list[str] = []

    def noted(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    run(document(json.dumps({"a": "<b>one</b> apple | <b>some</b> apples"}).encode(), "a.json", SETTINGS), noted)
    assert asked == ["one apple", "some apples"]


@pytest.mark.parametrize("kept", ["{{price|currency}}", "{{ a | b }}", "${user | upper}", "[[a|b]]"])
def test_a_bar_inside_a_template_divides_no_forms(kept: str) -> None:
    asked: list[str] = []

    def noted(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    said = run(document(json.dumps({"a": f"pay {kept} now | or {{x}} later"}).encode(), "a.json", SETTINGS), noted)
    assert asked[:2] == [f"pay {kept} now", "or {x} later"]
    assert kept in said.value.decode()


def letters(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator that loses everything but letters, as a bad model does."""
    return [SentenceTranslation(regex.sub(r"[^\p{Lu}\s]", "", s.upper()), None) for s in sentences]


@pytest.mark.parametrize(
    ("flag", "text", "kept"),
    [
        ("qt", "Hello %1 and %2 of %L10", ["%1", "%2", "%L10"]),
        ("kde", "Copy %1 to %2", ["%1", "%2"]),
        ("boost", "Copy %1% to %2%", ["%1%", "%2%"]),
        ("ruby", "Hello %<name>s and %{other}", ["%<name>s", "%{other}"]),
        ("gcc-internal", "use %<x%> of type %qT here", ["%<", "%>", "%qT"]),
        ("gfc-internal", "Symbol at %L in %C", ["%L", "%C"]),
        ("c", "Read %<PRIu64> bytes", ["%<PRIu64>"]),
        ("javascript", "Value %j and %s", ["%j", "%s"]),
        ("lua", "Value %q here", ["%q"]),
        ("scheme", "Value ~a and ~10,2f here~%", ["~a", "~10,2f", "~%"]),
        ("object-pascal", "Value %0:s and %1:d", ["%0:s", "%1:d"]),
        ("", "@count of %title, !date at :url", ["@count", "%title", "!date", ":url"]),
        ("", "Good %1$s day %2$s, %3$d", ["%1$s", "%2$s", "%3$d"]),
        ("php", "Copy %1$s", ["%1$s"]),
        ("c", "At %d%% of %.1f%% done", ["%d%%", "%.1f%%"]),
        ("", "Copy %1 to %L2", ["%1", "%L2"]),
        ("", "See http://a.b/!foo here", ["http://a.b/!foo"]),
    ],
)
def test_placeholders_flagged_by_gettext_survive(flag: str, text: str, kept: list[str]) -> None:
    flags = f"#, {flag}-format\n" if flag else ""
    said = in_po(f'{flags}msgid "{text}"\nmsgstr ""\n', letters)
    (answer,) = regex.findall('^msgstr "(.*)"', said, regex.M)
    assert sorted(regex.findall("|".join(map(regex.escape, kept)), answer)) == sorted(kept)
    assert regex.sub(r"\P{Ll}", "", regex.sub("|".join(map(regex.escape, kept)), "", answer)) == ""


@pytest.mark.parametrize(
    "text",
    [
        "Mail me@here.org now",
        "Wow!Really",
        "5 % of it",
        "A 50% share",
        "Ratio 1:2",
        "__ and __ here",
        "Room %12",
        "a@b",
    ],
)
def test_ordinary_signs_are_not_placeholders(text: str) -> None:
    assert in_json([text], faithful) == [faithful([text])[0].text]


NUMBERED = st.recursive(
    st.lists(st.sampled_from(["one", "Two.", "three", "&amp;", "<br/>", "<0/>", ":name", "%1", "{x}", "é"])).map(
        " ".join
    ),
    lambda inner: st.lists(
        st.tuples(st.sampled_from(["1", "b", "12", "link"]), inner).map(lambda t: f"<{t[0]}>{t[1]}</{t[0]}>"),
        max_size=3,
    ).map(" ".join),
    max_leaves=6,
)


@given(st.lists(NUMBERED, max_size=3).map(" and ".join), st.booleans())
def test_tags_with_numbers_are_elements_next_to_others(text: str, is_branch: bool) -> None:
    message = f"{{n, plural, other {{{text}}}}}" if is_branch else text
    assert in_json([message], identity) == [message]
    (said,) = in_json([message], permuting(3, change=swapped))
    tags = r"</?\w+/?>|\{x\}" if is_branch else r"</?\w+/?>|:name|%1|\{x\}"
    assert Counter(regex.findall(tags, said)) == Counter(regex.findall(tags, message))
    assert "&lt;" not in said


def test_attributes_that_people_read() -> None:
    assert in_json(["<img alt='A cat'> <a title='A tip' href='x y'>Here</a>"], upper) == [
        "<img alt='a CAT'> <a title='a TIP' href='x y'>hERE</a>"
    ]
    content = json.dumps(["{n, plural, other {<img alt='A cat'> # cats}}"]).encode()
    assert run(document(content, "a.json", SETTINGS), upper).notices == {"not_read": 1}


ONE, MANY, BOTH = "ONE FILE", "%d FILES", "%d FILE"
SLAVIC = "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);"


@pytest.mark.parametrize(
    ("rule", "singular", "forms"),
    [
        ("nplurals=1; plural=0;", "One file", [MANY]),
        ("nplurals=1; plural=0;", "%d file", [MANY]),
        ("nplurals=2; plural=(n != 1);", "One file", [ONE, MANY]),
        ("nplurals=2; plural=n>1;", "One file", [ONE, MANY]),
        (SLAVIC, "One file", [MANY, MANY, MANY]),
        (SLAVIC, "%d file", [BOTH, MANY, MANY]),
        ("nplurals=3; plural=(n==1) ? 0 : (n>=2 && n<=4) ? 1 : 2;", "One file", [ONE, MANY, MANY]),
        ("nplurals=2; plural=n==1 ? 1 : 0;", "One file", [MANY, ONE]),
        ("nplurals=2; plural=n%10!=1 || n%100==11;", "One file", [MANY, MANY]),
        ("nplurals=INTEGER; plural=EXPRESSION;", "One file", [ONE, MANY]),
        ("nplurals=2; plural=n/0;", "One file", [ONE, MANY]),
        ("nplurals=2; plural=__import__(n);", "One file", [ONE, MANY]),
        ("", "One file", [ONE, MANY]),
    ],
)
def test_forms_of_a_plural_follow_the_rule_of_the_header(rule: str, singular: str, forms: list[str]) -> None:
    header = f'msgid ""\nmsgstr ""\n"Plural-Forms: {rule}\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    empty = "".join(f'msgstr[{number}] ""\n' for number in range(len(forms)))
    said = in_po(f'{header}#, c-format\nmsgid "{singular}"\nmsgid_plural "%d files"\n{empty}', faithful)
    found = regex.findall(r'^msgstr\[\d\] "(.*)"', said, regex.M)
    assert [form.replace("oNE", "ONE") for form in found] == forms


@pytest.mark.parametrize("escape", [r"\xc3\xa9", r"\303\251", r"\xC3\xA9"])
def test_bytes_of_a_letter_are_that_letter(escape: str) -> None:
    content = f'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "a {escape} b"\nmsgstr ""\n'
    outcome = run(document(content.encode(), "a.po", SETTINGS), upper)
    assert 'msgstr "A é B"' in outcome.value.decode()


@pytest.mark.parametrize(
    ("header", "is_refused"),
    [
        ("Language: de", False),
        ("Language: de_AT", False),
        ("Language: de@formal", False),
        ("Language: deu", False),
        ("Language: ", False),
        ("Language: it", True),
        ("Language: ita_IT", True),
        ("Language-Team: it", False),
        ("X-Source-Language: en-GB", False),
        ("X-Source-Language: fr", True),
        ("Project-Id-Version: x\\nLanguage: pt_BR", True),
    ],
)
def test_messages_of_other_languages_are_refused(header: str, is_refused: bool) -> None:
    content = f'msgid ""\nmsgstr ""\n"{header}\\n"\n\nmsgid "Two words"\nmsgstr ""\n'.encode()
    if is_refused:
        with pytest.raises(DataError, match="use another model"):
            run(document(content, "a.po", SETTINGS), upper)
        run(document(content, "a.po", Settings(SETTINGS.options)), upper)  # here the language pair is not known
    else:
        assert b"tWO WORDS" in run(document(content, "a.po", SETTINGS), upper).value


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.json", '{"a": "One", "b": {"c": "{n, plural, }"}}', "key b.c"),
        ("a.json", '["{n, plural, }"]', "character 1"),
        ("a.json", '{"a": ["One", "{n, plural, }"]}', "key a"),
        ("a.po", 'msgid "One"\nmsgstr ""\n\n#: a.c\nmsgid "{n, plural, }"\nmsgstr ""\n', "line 6"),
        ("a.xml", '<resources><string name="s">{n, plural, other {x}}</string></resources>', "string s"),
        ("a.arb", '{"key": "{n, choice, 0#no|1#one}"}', "key key"),
    ],
)
def test_notices_of_messages_have_places(name: str, content: str, place: str) -> None:
    notices = run(document(content.encode(), name, SETTINGS), upper).notices
    assert {record["kind"]: record.get("place") for record in notices.records()}["not_parsed"] == place


def test_a_message_that_loses_a_placeholder_is_found_by_its_key() -> None:
    content = json.dumps({"a": "Two words", "b": "Open %s file now"}).encode()
    notices = run(document(content, "a.json", SETTINGS), permuting(1, change=swapped)).notices
    (record,) = notices.records()
    assert (record["kind"], record["count"], record["place"]) == ("protected_again", 1, "key b")


@pytest.mark.parametrize(
    ("locale", "becomes"), [("en", "de"), ("en_GB", "de"), ("de", "de"), ("de_AT", "de_AT"), ("", "")]
)
def test_the_language_of_a_file_of_messages_becomes_the_target(locale: str, becomes: str) -> None:
    assert in_json({"@@locale": locale, "a": "Two"}, upper, "app.arb") == {"@@locale": becomes, "a": "tWO"}


@pytest.mark.parametrize(
    "content", [{"@@locale": "it", "a": "Due"}, {"locale": "fr-CA", "translations": {"a": "Deux"}}]
)
def test_files_of_messages_of_another_language_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="use another model"):
        in_json(content, upper)


@pytest.mark.parametrize("key", ["menu.title", "some_key", "someKey", "NOT_FOUND", "translator-credits", "Your names"])
def test_a_message_that_is_not_text_stays_empty(key: str) -> None:
    content = f'msgid "{key}"\nmsgstr ""\n\nmsgid "Some text"\nmsgstr ""\n'
    outcome = run(document(content.encode(), "a.po", SETTINGS), upper)
    assert outcome.value.decode() == content.replace(
        'msgid "Some text"\nmsgstr ""', '#, fuzzy\nmsgid "Some text"\nmsgstr "sOME TEXT"'
    )
    assert outcome.notices == {"for_programs": 1}
    assert outcome.notices.places == {"for_programs": "line 2"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("Print B<only> the I<file> name.", "pRINT B<ONLY> THE I<FILE> NAME."),
        ("B<a E<lt> b>, see L<other(1)> or F</etc/x>", "B<A E<lt> B>, SEE L<other(1)> OR F</etc/x>"),
        ("Give S<B<--all> or I<some>> now", "gIVE S<B<--ALL> OR I<SOME>> NOW"),
        ("B<i> is bold", "B<I> IS BOLD"),
        ("a > b and B<c", "A > B AND B<C"),
    ],
)
def test_marks_of_po4a_are_tags(source: str, said: str) -> None:
    content = f'#. type: Plain text\n#: a.1:5\n#, no-wrap\nmsgid "{source}"\nmsgstr ""\n'
    after = run(document(content.encode(), "a.po", SETTINGS), upper).value.decode()
    assert f'msgstr "{said}"' in after


def test_the_model_does_not_see_marks_of_po4a() -> None:
    asked = list[str]()
    content = '#. type: TP\nmsgid "Print B<only> it"\nmsgstr ""\n\n#. of a list B<x>\nmsgid "a B<x> c"\nmsgstr ""\n'
    run(document(content.encode(), "a.po", SETTINGS), lambda sentences: asked.extend(sentences) or identity(sentences))
    assert asked == ["Print only it", "a B<x> c"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("<b>Title</b>\n\nSome text.\nMore <i>of it</i>\n", ["Title", "Some text.", "More of it"]),
        ("Press &amp; hold:\n- one\n- two", ["Press & hold:", "- one", "- two"]),
        ("Read <a href='x'>the terms</a>\nbefore you go", ["Read the terms", "before you go"]),
        ("<b>Name:</b> {x}\r\n<b>Age:</b> {y} | none", ["Name: {x}", "Age: {y}", "none"]),
        ("<p>One\ntwo</p>\n<p>Three</p>", ["One\ntwo", "Three"]),
        ("One<br>\nTwo", ["One", "Two"]),
    ],
)
def test_line_ends_of_a_message_with_tags_divide_texts(text: str, asked: list[str]) -> None:
    found = list[str]()

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        found.extend(sentences)
        return faithful(sentences)

    said = in_json({"a": text}, watched)["a"]
    assert found == asked
    assert re.findall(r"\s+", said) == re.findall(r"\s+", text)


@pytest.mark.parametrize(
    ("flags", "source", "answer", "said"),
    [
        ("c-format", "Used by %d users", "%d Nutzer, 50 %", "%d Nutzer, 50 %%"),
        ("fuzzy, python-format", "%(n)d of all", "%(n)d, 5% von allen", "%(n)d, 5%% von allen"),
        ("c-format", "%d%% of all", "%d%% von 9 %", "%d%% von 9 %%"),
        ("c-format", "Plain", "100%", "100%%"),
        ("no-c-format", "Plain", "100%", "100%"),
        ("c-format", "%I64d bytes", "%I64d Byte", "%I64d Byte"),
        ("qt-format", "%1 of all", "%1, 5% von allen", "%1, 5% von allen"),
    ],
)
def test_a_new_percent_sign_is_written_twice_for_printf(flags: str, source: str, answer: str, said: str) -> None:
    content = f'#, {flags}\nmsgid "{source}"\nmsgstr ""\n'

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(answer, None) for _ in sentences]

    assert f'msgstr "{said}"' in run(document(content.encode(), "a.po", SETTINGS), translate).value.decode()

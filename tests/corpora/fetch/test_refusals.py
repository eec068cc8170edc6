"""Recognising web pages by their first bytes, whatever precedes them, and by their type."""

from __future__ import annotations

import pytest

from ziggurat.corpora.fetch.transfer import refuse_page
from ziggurat.system.errors import DataError


@pytest.mark.parametrize(
    "head",
    [
        b"<!DOCTYPE html>",
        b"<html lang='de'>",
        b"\xef\xbb\xbf\r\n<!-- saved --> <!-- twice -->\n<!doctype\nHTML PUBLIC>",
        b'<?xml version="1.0"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Strict//EN">',
        b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">',
        b"<head><title></title>",
        b"<BODY>",
        b"<script>location = '/login'</script>",
        b"<meta http-equiv=refresh content='0; url=/login'>",
    ],
)
def test_pages_by_their_first_bytes(head: bytes) -> None:
    with pytest.raises(DataError, match=r"train\.en: the server sent a web page in place of the file: .*--mirror"):
        refuse_page("http://h/train.en", head, "application/octet-stream")


@pytest.mark.parametrize(
    "head",
    [
        b'<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx><header/>',
        b"<?xml version='1.0'?><!-- WMT --><dataset id='x'><head/>",
        b"<!-- one --><tmx><!-- two --><body>",
        b'<!DOCTYPE mteval SYSTEM "mteval.dtd"><srcset setid="x">',
        b"<header>",
        b"<body.content>",
        b"<url>http://www.ted.com</url>",
        b"Der Anfang: <html>\tthe start",
    ],
)
def test_xml_and_text_are_not_pages(head: bytes) -> None:
    refuse_page("http://h/train.xml", head, "text/xml")


@pytest.mark.parametrize("kind", ["text/html", "application/xhtml+xml"])
def test_pages_by_their_type(kind: str) -> None:
    with pytest.raises(DataError, match=rf"a\?b\.gz: the server sent a web page \(sent as {kind.replace('+', '.')}\)"):
        refuse_page("http://h/a?b.gz", b"Sign in", kind)
    refuse_page("http://h/a.gz", b"\x1f\x8b", kind)
    with pytest.raises(DataError, match=r"begins with b'Sign in', sent as"):
        refuse_page("http://h/a.gz", b"Sign in", kind)


@pytest.mark.parametrize("kind", ["application/json", "application/problem+json"])
@pytest.mark.parametrize("name", ["train.en", "a?file=b.json", "a.tmx"])
def test_messages_for_programs_are_not_corpora(kind: str, name: str) -> None:
    with pytest.raises(DataError, match=r"the server sent a message \(sent as application.*in place of the file"):
        refuse_page(f"http://h/{name}", b'{"error": "quota exceeded"}', kind)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl?x=1", "A.JSON"])
def test_corpora_in_json_are_not_messages(name: str) -> None:
    refuse_page(f"http://h/{name}", b'{"de": "a", "en": "b"}', "application/json")
    refuse_page("http://h/a.gz", b"\x1f\x8b", "application/json")

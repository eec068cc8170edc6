"""Notices: which parts of a text or document needed special handling, in words for people and as data.

Some are counted while texts are processed (ziggurat.serve.text.sentences.Result), others by translators
(ziggurat.translate.results). The command line prints them, and responses of a server include them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ziggurat.translate.results import Notices

KINDS = {
    "unaligned": "translated by segments for lack of an alignment",
    "protected_again": "translated again because a placeholder, tag or other protected text was missing",
    "not_parsed": "messages left as they are, because they could not be parsed",
    "endings_kept": "endings of ordinals left as they are",
    "empty": "sentences left as they are, because their translation was empty",
    "in_segments": "paragraphs divided at their tags",
    "terms_again": "translated again because a term was missing",
    "nothing_to_translate": "document with nothing to translate",
    "no_cues": "file without any recognised cue",
    "times_unread": "cue times not understood",
    "data_cues": "cues for programs left as they are",
    "not_shown": "texts outside cues left as they are",
    "left_out": "parts of the file left as they are",
    "too_long": "translations longer than their units allow",
    "other_languages": "texts in other languages left as they are",
    "direction": "pages whose writing direction is still that of the source",
    "headings_elsewhere": "links to headings in other files, which may have new names now",
    "left_by_key": "texts left as they are because of their keys",
    "signed": "signatures that no longer fit the text",
    "for_programs": "values for programs left as they are",
    "not_read": "texts in unsupported places left as they are",
}
"""KINDS maps a kind that is counted in a text or document to the words that follow the number."""

KINDS_OF_LINES = {
    "blank_lines": "blank",
    "long_lines": "translated in parts",
    "unfinished": "cut at the length limit",
    "unmet": "without phrases they should contain",
    "untagged": "without a tag, so in a language that the model chose",
    "tag_as_text": "with a tag treated as text",
    "in_pieces": "in subword pieces already",
    "unknown": "with text that the vocabulary lacks",
    "too_large": "times out of memory, and translated in smaller batches",
}
"""KINDS_OF_LINES maps a kind that a translator counts, by line or sentence, to the words that follow the number."""

HEADER = "X-Ziggurat-Notices"
"""HEADER is the header for notices in responses of other servers' interfaces, which have no field for them."""


def notice_text(kind: str, count: int, place: str = "") -> str:
    """Return a notice in words, with the place of its first occurrence if known."""
    meaning = KINDS.get(kind) or KINDS_OF_LINES.get(kind, kind)
    return f"{count:,} {meaning}{f' ({place})' if place else ''}"


class TextNotices(Counter[str]):
    """Counts of what needed special handling, by kind (docs/documents.md).

    Attributes:
        places: the place of the first of a kind, if known: a line, a key, a part of an archive, the id of a unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, str] = {}

    def add(self, kind: str, place: str, count: int = 1) -> None:
        """Count an occurrence at a place."""
        self[kind] += count
        self.places.setdefault(kind, place)

    def include(self, others: Mapping[str, int]) -> None:
        """Add other counts, with their places if they have any."""
        self.update(others)
        if isinstance(others, TextNotices):
            self.places = others.places | self.places

    def records(self) -> list[dict[str, Any]]:
        """Return the counts as in JSON, sorted by kind: `kind`, `count`, `text` and, if known, `place`."""
        records = []
        for kind, count in sorted(self.items()):
            place = self.places.get(kind, "")
            record = {"kind": kind, "count": count, "text": notice_text(kind, count, place)}
            records.append({**record, "place": place} if place else record)
        return records


def notice_headers(notices: Mapping[str, int]) -> dict[str, str]:
    """Return a response header with these notices, such as `unaligned=2, unfinished=1`; empty if there are none."""
    return {HEADER: ", ".join(f"{kind}={count}" for kind, count in sorted(notices.items()))} if notices else {}


def silent_notices() -> Notices:
    """Return notices that are counted but never printed: a translator's notices quote users' text."""
    notices = Notices()
    notices.told |= dict.fromkeys(KINDS_OF_LINES.keys() - {"too_large"}, "")
    return notices

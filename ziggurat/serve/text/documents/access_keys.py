"""Access keys in labels of programs: `_Open` in GTK, `&Open` in Qt, `~Open` in LibreOffice, also `E_xit`.

The mark would confuse a model, especially inside a word. So it is removed from the source and put before the first
letter of the translation; Chinese, Japanese and Korean text gets it with the source's letter, as in `打开(_O)...`.
"""

from __future__ import annotations

from typing import NamedTuple

import regex

from ziggurat.serve.text.splitting import protected

_MOST_WORDS = 8
"""_MOST_WORDS is the maximum number of words of a label; in longer text a mark probably belongs to a name (`_id`)."""
# At the start of a word, or between the letters of a word with a capital; `&amp;` is an entity.
_MARK = regex.compile(r"(?:(?<![^\s(])|(?<=\b\p{Lu}\p{Ll}{0,30})(?=.\p{Ll}))[_~&](?=\p{L})(?!\w{1,31};)")
_LETTER = regex.compile(r"(?<!\w)\p{L}")
_TYPED_OTHERWISE = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}]")
_END = regex.compile(r"(?:\.\.\.|[…:：])?+\s*+\Z")


class Label(NamedTuple):
    """A label, without the mark of its access key.

    Attributes:
        text: the label.
        mark: the mark.
        place: the index of the letter that it marks.
    """

    text: str
    mark: str
    place: int

    def translated(self, said: str) -> str:
        """Return a translation of the text, marked."""
        if said == self.text:
            return f"{said[: self.place]}{self.mark}{said[self.place :]}"
        if _TYPED_OTHERWISE.search(said):
            end = _END.search(said).start()
            return f"{said[:end]}({self.mark}{self.text[self.place].upper()}){said[end:]}"
        kept = protected(said)
        for found in _LETTER.finditer(said):
            at = found.start()
            if not any(item.start <= at < item.end for item in kept):
                return f"{said[:at]}{self.mark}{said[at:]}"
        return said


def read_label(text: str) -> Label | None:
    """Return a label with a single access key; None for any other text."""
    marks = list(_MARK.finditer(text))
    if len(marks) != 1 or text.count(marks[0][0]) > 1 or len(text.split()) > _MOST_WORDS:
        return None
    at = marks[0].start()
    if any(item.start <= at < item.end for item in protected(text)):
        return None
    return Label(f"{text[:at]}{text[at + 1 :]}", text[at], at)

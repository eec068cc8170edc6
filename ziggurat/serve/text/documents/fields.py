"""Instructions of Word's fields: index entries, which are translated, and other texts in them, which are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import unescape

import regex

from ziggurat.serve.text.markup import MarkupForm, MarkupSlot, Template
from ziggurat.serve.text.projection import SpannedText
from ziggurat.serve.text.tokens import Spellings, Token

_ENTRY = regex.compile(r'\s*+(?:XE|TC)\s++"(?P<text>[^"\\<>]*+)"')
# Text of an instruction that Word displays, or with which it replaces what it displayed before.
_TEXT = regex.compile(
    r"""\s*+(?:
        (?:XE|TC|IF|FILLIN|ASK|QUOTE|SET|AUTOTEXTLIST)\b[^"]*+(?:"[^"]*?\p{L}{2}|"[^"]*+"[^"]*+)*?"[^"]*?\p{L}{2}
        | (?:MACROBUTTON|GOTOBUTTON)\s++\S++\s++.*?\p{L}{2}
        | (?:DOCVARIABLE|AUTOTEXT|INCLUDETEXT|GLOSSARY)\b
        | DOCPROPERTY\s++"?+(?!(?:Title|Subject|Keywords|Comments)\b)
        | (?:MERGEFIELD|HYPERLINK)\b.*?\\[bfo]\s*+"[^"]*?\p{L}{2}
    )""",
    flags=regex.VERBOSE | regex.IGNORECASE | regex.DOTALL,
)


def entry_template(instruction: str) -> Template:
    """Return the template of an instruction, as the file spells it, with slots if it is an index entry."""
    found = _ENTRY.match(instruction)
    if found is None:
        return [instruction]
    template: Template = [instruction[: found.start("text")]]
    for number, part in enumerate(found["text"].split(":")):  # nested entries
        form = MarkupForm(part, Spellings(), xml=True, escape=_in_quotes)
        form.spellings.add(unescape(part), part)
        template += [":" if number else "", MarkupSlot(SpannedText(unescape(part)), form)]
    return [*template, instruction[found.end("text") :]]


def _in_quotes(text: str) -> str:
    return text.replace("\\", "").replace('"', "'").replace(":", "\\:")


def silent_fields(tokens: Sequence[Token]) -> int:
    """Return how many fields have untranslated text in their instructions, or show text from elsewhere."""
    return sum(_is_silent(parts) for parts in _instructions(tokens))


def _is_silent(parts: Sequence[str]) -> bool:
    is_read = len(parts) == 1 and _ENTRY.match(parts[0]) is not None
    return not is_read and _TEXT.match("".join(parts)) is not None


def _instructions(tokens: Sequence[Token]) -> Iterator[list[str]]:
    """Yield the instruction of each field, in the parts in which the file stores it."""
    open_fields: list[list[str]] = []
    for place, token in enumerate(tokens):
        kind = token.attributes.get("w:fldCharType")
        if token.name == "w:fldSimple" and token.kind in ("open", "empty"):
            yield [token.attributes.get("w:instr", ""), ""]
        elif token.name == "w:fldChar" and kind == "begin":
            open_fields.append([])
        elif token.name == "w:fldChar" and kind == "end" and open_fields:
            yield open_fields.pop()
        elif token.name == "w:instrText" and token.kind == "open" and open_fields:
            open_fields[-1].append(tokens[place + 1].text)

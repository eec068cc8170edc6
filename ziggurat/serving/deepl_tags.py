"""What DeepL's settings of tags mean as rules of markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ziggurat.text.markup import HTML, Rules
from ziggurat.text.tokens import Token

__all__ = ["html_rules", "xml_rules"]


def html_rules(ignored: frozenset[str], splitting: frozenset[str], non_splitting: frozenset[str]) -> Rules:
    """Return the rules of HTML in which some elements are copied, break sentences or do not."""
    return replace(HTML, copied=HTML.copied | ignored, inline=((HTML.inline - splitting) | non_splitting | ignored))


def xml_rules(
    tokens: Sequence[Sequence[Token]],
    ignored: frozenset[str],
    splitting: frozenset[str],
    non_splitting: frozenset[str],
    *,
    outline: bool,
) -> Rules:
    """Return the rules of XML whose texts have these tokens.

    With `outline` an element breaks sentences unless there is text beside it, in the same element, at one of its places
    at least; without, only the elements that are named as `splitting` do.
    """
    names: set[str] = set()
    beside: set[str] = set()
    for text in tokens:
        children: list[set[str]] = [set()]  # of each open element, and of the text itself
        has_text = [False]
        for token in text:
            if token.kind == "text":
                has_text[-1] |= bool(token.text.strip())
            if token.kind in ("open", "empty"):
                names.add(token.name)
                children[-1].add(token.name)
            if token.kind == "open":
                children.append(set())
                has_text.append(False)
            elif token.kind == "close" and len(children) > 1:
                inside, text_inside = children.pop(), has_text.pop()
                beside |= inside if text_inside else set()
        beside |= children[0] if has_text[0] else set()
    inline = frozenset(beside if outline else names)
    return Rules(inline=(inline - splitting) | non_splitting | ignored, copied=ignored, xml=True)

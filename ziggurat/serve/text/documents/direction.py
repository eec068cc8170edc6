"""Writing direction in Office files, OpenDocument and EPUB: how the markup of a translation expresses it.

A translation from a left-to-right language into a right-to-left one, or vice versa, is mirrored: paragraphs, runs,
columns of tables, alignment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import regex

from ziggurat.config.languages import is_right_to_left
from ziggurat.serve.text.elements import turns
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.tokens import Token, xml_ends

Turn = Callable[[Sequence[Token], bool], str]
"""Turn makes the text of a part from its tokens; the flag is True for a right-to-left translation."""


def turned(settings: Settings) -> bool | None:
    """Return whether a translation is right-to-left; None if its direction is the same as its source's."""
    return is_right_to_left(settings.target) if turns((settings.source, settings.target)) else None


def with_attribute(raw: str, name: str, value: str) -> str:
    """Return a tag with an attribute of this value, replacing an existing one or appended to the others.

    `name` includes the prefix for a new attribute; an existing one may have any prefix.
    """
    local = name.rpartition(":")[2]
    found = regex.search(rf"""(?<=\s)(?:[\w.-]++:)?{local}\s*+=\s*+(?:"([^"]*+)"|'([^']*+)')""", raw)
    if found:
        start, end = found.span(1 if found[2] is None else 2)
        return raw[:start] + value + raw[end:]
    closing = len(raw) - (2 if raw.endswith("/>") else 1)
    return f'{raw[:closing].rstrip()} {name}="{value}"{raw[closing:]}'


# Word

_FROM_RIGHT = regex.compile(r"[\p{Bidi_Class=R}\p{Bidi_Class=AL}]")
_LETTER = regex.compile(r"\p{L}")
_OF_WORD = frozenset(("w:bidi", "w:rtl", "w:bidiVisual", "w:rtlGutter"))
# Elements with properties: the properties' element, the flag to set in it, and what must follow the flag (ECMA-376,
# 17.3, 17.4).
_PROPERTIES = {
    "w:p": (
        "w:pPr",
        "bidi",
        "adjustRightInd snapToGrid spacing ind contextualSpacing mirrorIndents suppressOverlap jc textDirection "
        "textAlignment textboxTightWrap outlineLvl divId cnfStyle rPr sectPr pPrChange",
    ),
    "w:r": ("w:rPr", "rtl", "cs em lang eastAsianLayout specVanish oMath rPrChange"),
    "w:tbl": (
        "w:tblPr",
        "bidiVisual",
        "tblStyleRowBandSize tblStyleColBandSize tblW jc tblCellSpacing tblInd tblBorders shd tblLayout tblCellMar "
        "tblLook tblCaption tblDescription tblPrChange",
    ),
}
_TWINS = {"w:b": "w:bCs", "w:i": "w:iCs", "w:sz": "w:szCs"}
"""_TWINS maps properties of letters to those that replace them for right-to-left scripts."""
# Slides and drawings

_OF_PARAGRAPHS = regex.compile(r"a:(?:pPr|defPPr|lvl\dpPr)")
_STYLES = frozenset(("titleStyle", "bodyStyle", "otherStyle", "notesStyle", "defaultTextStyle"))
_SIDES = {"l": "r", "r": "l"}


def office(tokens: Sequence[Token], to_right: bool) -> str:
    """Return the text of a part of Word or PowerPoint, mirrored."""
    ends = xml_ends(tokens)
    raws = [_drawn(token, to_right) for token in tokens]
    added = defaultdict[int, str](str)  # text inserted before tokens
    styles_end = -1  # end of the innermost styles of a master, which inherit nothing
    for place, token in enumerate(tokens):
        if token.name in _STYLES:
            styles_end = max(styles_end, ends.get(place, place))
        if place < styles_end and _OF_PARAGRAPHS.fullmatch(token.name) and to_right and "algn" not in token.attributes:
            raws[place] = with_attribute(raws[place], "algn", "r") if token.kind != "close" else raws[place]
        if token.name in _OF_WORD and not to_right:
            raws[place] = ""
        elif to_right and token.name in _TWINS and token.kind == "empty":
            if _next_tag(tokens, place).name != _TWINS[token.name]:
                raws[place] += regex.sub(r"^<((?:\w++:)?\w++)", r"<\1Cs", raws[place])
        elif to_right and token.kind == "open":
            if token.name == "a:p" and _next_tag(tokens, place).name != "a:pPr":
                added[place + 1] = f'<{_prefix(token)}pPr rtl="1"/>'
            elif token.name in _PROPERTIES and (token.name != "w:r" or _is_from_right(tokens, place, ends)):
                _set(tokens, place, ends, raws, added)
    return "".join(added.get(place, "") + raw for place, raw in enumerate(raws))


def _next_tag(tokens: Sequence[Token], place: int) -> Token:
    """Return the tag after an index, skipping the file's layout in between."""
    return next((token for token in tokens[place + 1 : place + 3] if token.kind != "text"), tokens[place])


def _prefix(token: Token) -> str:
    prefix, colon, _ = token.raw[1:].partition(token.name.rpartition(":")[2])[0].partition(":")
    return prefix + colon


def _drawn(token: Token, to_right: bool) -> str:
    """Return a tag of a drawing or slide, mirrored; other tags unchanged."""
    raw, wanted = token.raw, "1" if to_right else "0"
    if token.kind not in ("open", "empty"):
        return raw
    if _OF_PARAGRAPHS.fullmatch(token.name):
        has, align = token.attributes.get("rtl"), token.attributes.get("algn", "")
        if has in (wanted, {"1": "true", "0": "false"}[wanted]):
            return raw
        raw = with_attribute(raw, "rtl", wanted) if to_right or has else raw
        return with_attribute(raw, "algn", _SIDES[align]) if align in _SIDES else raw
    if token.name == "a:tblPr" and (to_right or "rtl" in token.attributes):
        return with_attribute(raw, "rtl", wanted)
    return with_attribute(raw, "rtlCol", wanted) if token.name == "a:bodyPr" and "rtlCol" in token.attributes else raw


def _is_from_right(tokens: Sequence[Token], place: int, ends: dict[int, int]) -> bool:
    """Return whether a run has right-to-left text, or only punctuation, which takes its surroundings' direction."""
    text, at = "", place + 1
    while at < ends[place]:
        text += tokens[at + 1].text if tokens[at].name == "w:t" and tokens[at].kind == "open" else ""
        at = ends.get(at, at) + 1
    return bool(text) and (_FROM_RIGHT.search(text) is not None or _LETTER.search(text) is None)


def _set(
    tokens: Sequence[Token], place: int, ends: dict[int, int], raws: list[str], added: defaultdict[int, str]
) -> None:
    """Set the direction in the properties of a Word element, at the position that the schema requires."""
    properties, flag, behind = _PROPERTIES[tokens[place].name]
    prefix, at = _prefix(tokens[place]), place + 1
    while at < ends[place] and tokens[at].kind == "text":
        at += 1
    if tokens[at].name != properties:
        name = f"{prefix}{properties.partition(':')[2]}"
        added[place + 1] += f"<{name}><{prefix}{flag}/></{name}>" if properties != "w:tblPr" else ""
    elif tokens[at].kind == "empty":
        raws[at] = f"{tokens[at].raw[:-2]}><{prefix}{flag}/></{tokens[at].raw[1:-2].split()[0]}>"
    else:
        end, names = ends[at], {f"w:{name}" for name in behind.split()}
        child, before = at + 1, end
        while child < end:
            name = tokens[child].name
            if name == f"w:{flag}":
                return
            if before == end and (name in names or (name and ":" not in name)):
                before = child
            child = ends.get(child, child) + 1
        added[before] += f"<{prefix}{flag}/>"


# OpenDocument

_MODES = {"lr-tb": "rl-tb", "lr": "rl", "page": "rl-tb"}
_SIDES_OF_TEXT = {"left": "right", "start": "right", "right": "left", "end": "left"}
_FO = regex.compile(
    r"""\sxmlns:([\w.-]++)\s*=\s*["']urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1\.0["']"""
)


def opendocument(tokens: Sequence[Token], to_right: bool) -> str:
    """Return the text of `content.xml` or `styles.xml`, mirrored.

    Texts are aligned to a side, not to the start of a line, which programs take for the left in either direction. In a
    right-to-left source that they wrote, `end` means the right for the same reason, and `start` is unchanged.
    """
    modes = _MODES if to_right else {after: before for before, after in reversed(_MODES.items()) if before != "page"}
    sides = _SIDES_OF_TEXT if to_right else {key: side for key, side in _SIDES_OF_TEXT.items() if key != "start"}
    space = next((found[1] for token in tokens if (found := _FO.search(token.raw))), "")
    raws, of_all = list[str](), ""
    for token in tokens:
        raw = token.raw
        if token.name == "style:default-style":
            of_all = token.attributes.get("style:family", "") if token.kind == "open" else ""
        is_default = token.name == "style:paragraph-properties" and of_all == "paragraph"
        if token.kind in ("open", "empty"):
            mode, side = (token.attributes.get(name, "") for name in ("style:writing-mode", "fo:text-align"))
            if to_right and not mode and (is_default or token.name == "style:page-layout-properties"):
                mode = "lr-tb"
            if is_default or mode != "page":
                raw = with_attribute(raw, f"{_prefix(token)}writing-mode", modes[mode]) if mode in modes else raw
            is_turned = mode in modes.values()
            side = "" if is_turned else side or ("left" if is_default and to_right and space else "")
            raw = with_attribute(raw, f"{space}:text-align", sides[side]) if side in sides else raw
        raws.append(raw)
    return "".join(raws)

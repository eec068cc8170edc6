"""Elements of markup: the rules of a format, and what tags state: text in attributes, whether to translate, languages.

A translated page states the language and direction of the translation where it stated those of the source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import regex

from ziggurat.config.languages import is_right_to_left
from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.files import differ, language_of
from ziggurat.serve.text.splitting import has_words
from ziggurat.serve.text.tokens import ATTRIBUTE, Token
from ziggurat.system.errors import printable


def names_in(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by spaces."""
    return frozenset(text.split())


@dataclass(frozen=True)
class MarkupRules:
    """Meanings of the elements of a format, by name.

    Attributes:
        inline: elements inside sentences; all others break them.
        void: elements without an end tag.
        copied: elements that are copied unchanged.
        blank: void elements that divide words, and a sentence unless it clearly continues after them.
        spaces: void elements that stand for spaces.
        points: elements inside sentences that are copied unchanged and not read as part of them.
        seen: points, or void elements, that readers see; the texts on its two sides are two words.
        nested: like points, but containing paragraphs that are translated separately, such as footnotes.
        attributes: attributes whose text is translated; none: attributes are kept.
        xml: whether text must be well-formed XML.
        collapses: whether several line ends count as one space, as in pages, and never end a sentence.
        languages: language codes of the source and the translation. Tags that state the former get the latter; elements
            in any other language stay unchanged.
        escape: the format's own escaping of text, applied before that of markup.
    """

    inline: frozenset[str]
    void: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    blank: frozenset[str] = frozenset()
    spaces: frozenset[str] = frozenset()
    points: frozenset[str] = frozenset()
    nested: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    xml: bool = False
    collapses: bool = False
    languages: tuple[str, str] = ("", "")
    escape: Callable[[str], str] = str


HTML = MarkupRules(
    inline=names_in(
        "a abbr acronym b bdi bdo big cite data del dfn em font i img ins label mark nobr output q rb ruby s small "
        "span strike strong sub sup textpath time tspan tt u wbr"
    ),
    void=names_in("area base br col embed hr img input link meta param source track wbr"),
    copied=names_in(
        "code iframe kbd math metadata noembed noframes plaintext pre rp rt rtc samp script style textarea var xmp"
    ),
    nested=names_in("audio canvas map object picture svg template video"),
    blank=names_in("br"),
    seen=names_in("img audio canvas iframe map object picture svg video"),
    collapses=True,
)
"""HTML are the rules for HTML in texts and messages, whose attributes are kept."""

PAGES = replace(
    HTML,
    attributes=names_in(
        "alt title placeholder aria-label aria-description aria-placeholder aria-roledescription aria-valuetext"
    ),
)
"""PAGES are the rules for HTML in documents, where attributes that readers see are also translated."""

_BUTTONS = frozenset(("submit", "button", "reset"))
_DESCRIPTIONS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "og:", "twitter:", "dc.", "dcterms.", "og:image:", "twitter:image:")
    for name in ("description", "title", "alt", "keywords")
)
OF_COMPONENTS = names_in("caption description header heading label subtitle summary tagline text title tooltip")
"""OF_COMPONENTS are the attributes of components of a site, as in MDX, that are text by their names."""
_COMPONENT = regex.compile(r"<[A-Z][A-Za-z]*[a-z]")
_OF_ELEMENTS = {"option": "label", "optgroup": "label", "track": "label", "th": "abbr"}
_OF_META = ("name", "property", "itemprop", "http-equiv")
_LANGUAGES = names_in("content-language language dc.language dcterms.language inlanguage og:locale")
_LINE_BREAK = regex.compile(
    r"<br\b|^\s*+(?:\\[nr])++$|^\[?(?:br|line.?break|lb|newline|LF)\]?$", flags=regex.IGNORECASE
)


def _meaning(token: Token) -> str:
    """Return what the content of a `meta` tag is."""
    return next((token.attributes[name].lower() for name in _OF_META if token.attributes.get(name)), "")


def text_attributes(token: Token) -> frozenset[str]:
    """Return the names of attributes that are text in this element only."""
    said = token.attributes
    if token.name == "input" and said.get("type", "").lower() in _BUTTONS:
        return frozenset(("value",))
    if token.name == "meta":
        return frozenset(("content",)) if _meaning(token) in _DESCRIPTIONS else frozenset()
    if token.name in _OF_ELEMENTS:
        return frozenset((_OF_ELEMENTS[token.name],))
    return OF_COMPONENTS if _COMPONENT.match(token.raw) else frozenset()


def shown_blank(token: Token, inside: str) -> str:
    """Return the text that a point stands for: a line end if an inline code of XLIFF is one, otherwise nothing."""
    said = token.attributes
    if said.get("ctype") == "lb" or said.get("subType") == "xlf:lb" or said.get("hex", "").lstrip("0").upper() == "A":
        return "\n"
    spelled = (*(said.get(name, "") for name in ("equiv-text", "equiv", "disp")), inside)
    return "\n" if any(map(_LINE_BREAK.search, spelled)) else ""


def is_translated(token: Token) -> bool | None:
    """Return whether an element's tag asks for translation; None: it does not say."""
    said = token.attributes
    if said.get("translate", "").lower() == "no" or "notranslate" in said.get("class", "").split():
        return False
    return True if said.get("translate", "no").lower() in ("", "yes") else None


def language_said(token: Token) -> str:
    """Return the language that an element's tag states; empty if none."""
    return (token.attributes.get("xml:lang") or token.attributes.get("lang", "")).strip()


class Wish(NamedTuple):
    """Statements of an element and those around it; for each field the innermost one counts.

    Attributes:
        is_translated: whether it is to be translated.
        is_own: whether it is in the language being translated.
    """

    is_translated: bool = True
    is_own: bool = True

    def within(self, token: Token, source: str) -> Wish:
        """Return the state inside a nested element with this tag; `source` is the language being translated."""
        said = is_translated(token)
        language = "" if token.name == "html" else language_said(token)  # many pages state a wrong language
        return Wish(
            self.is_translated if said is None else said,
            not differ(language, source) if language and source else self.is_own,
        )


class Wishes:
    """Statements of the elements of markup, queried in the order of its tokens.

    Args:
        tokens: tokens of the markup.
        ends: the last tokens of elements, by their first.
        void: names of elements without an end.
        source: the language being translated; empty: unknown, and no element counts as in another language.
        notices: counter of elements in other languages.
    """

    def __init__(
        self, tokens: Sequence[Token], ends: Mapping[int, int], void: Set[str], source: str, notices: TextNotices
    ) -> None:
        self.tokens, self.ends, self.void, self.source, self.notices = tokens, ends, void, source, notices
        self.now = Wish()
        self._outer: list[tuple[int, Wish]] = []  # ends of elements in another state, and the state outside
        opened = [(place, token) for place, token in enumerate(tokens) if token.kind == "open" and token.attributes]
        # Translated elements inside untranslated ones: by their tag, and by their language.
        self._turns = (
            [place for place, token in opened if is_translated(token)],
            [place for place, token in opened if (said := language_said(token)) and not differ(said, source)],
        )

    def of(self, place: int) -> Literal["taken", "copied", "left"]:
        """Return how a token is treated: read, copied with its whole element, or left by itself."""
        while self._outer and self._outer[-1][0] < place:
            self.now = self._outer.pop()[1]
        token, before = self.tokens[place], self.now
        if token.kind == "open" and token.name not in self.void and place in self.ends:
            end = self.ends[place]
            wish = before.within(token, self.source)
            if before.is_own and not wish.is_own:
                self._tell("other_languages", place, end)
            if all(before) and not all(wish):
                own = self._turns[wish.is_translated]
                at = bisect_right(own, place)
                if at == len(own) or own[at] > end:
                    return "copied"
            if wish != before:
                self._outer.append((end, before))
                self.now = wish
        return "taken" if all(self.now) else "left"

    def takes(self, token: Token) -> bool:
        """Return whether the attributes of a tag are translated. Tags in another language are counted."""
        wish = self.now.within(token, self.source)
        if all(self.now) and not wish.is_own:
            self.notices.add("other_languages", f"element {printable(token.raw, 60)}")
        return all(wish)

    def tell_unread(self, place: int) -> None:
        """Count a copied element with text for readers: the initial text of a field, a page in an attribute."""
        token = self.tokens[place]
        if token.name == "textarea":
            self._tell("not_read", place, self.ends[place])
        elif has_words(token.attributes.get("srcdoc", ""), []):
            self.notices.add("not_read", f"element {printable(token.raw, 60)}")

    def _tell(self, kind: str, place: int, end: int) -> None:
        """Count an untranslated element, if it has text."""
        if any(has_words(token.text, []) for token in self.tokens[place : end + 1]):
            self.notices.add(kind, f"element {printable(self.tokens[place].raw, 60)}")


def turns(languages: tuple[str, str]) -> bool:
    """Return whether source and translation are written in different directions."""
    source, target = languages
    return bool(target) and is_right_to_left(source) != is_right_to_left(target)


def in_target(token: Token, languages: tuple[str, str], *, is_block: bool) -> Token:
    """Return a tag with the language and direction of the translation in place of the source's.

    A page gets a direction if it has none. Among other elements only blocks change theirs, since inside sentences a
    direction belongs to the content, such as a number.
    """
    source, target = languages
    values: dict[str, str] = {}
    if all(languages):
        stated = ("lang", "xml:lang", "content" if token.name == "meta" and _meaning(token) in _LANGUAGES else "")
        values |= {
            name: target.replace("-", "_") if "_" in code else target  # og:locale has `en_US`
            for name, code in token.attributes.items()
            if name in stated and language_of(code) == language_of(source)
        }
    if turns(languages) and (token.name == "html" or is_block):
        before, after = ("ltr", "rtl") if is_right_to_left(target) else ("rtl", "ltr")
        said = token.attributes.get("dir", "").lower()
        if said == before or (token.name == "html" and not said):
            values["dir"] = after
    return token._replace(raw=_with_values(token, values)) if values else token


def _with_values(token: Token, values: dict[str, str]) -> str:
    """Return a tag with these attribute values, which are added if it lacks the attributes."""
    left, out, begin = dict(values), list[str](), 0
    for found in ATTRIBUTE.finditer(token.raw, 1 + len(token.name)):
        group = next((number for number in (2, 3, 4) if found[number] is not None), 0)
        if group and (value := left.pop(found[1].lower(), None)) is not None:
            out += [token.raw[begin : found.start(group)], value]
            begin = found.end(group)
    name, rest = token.raw[: 1 + len(token.name)], "".join([*out, token.raw[begin:]])[1 + len(token.name) :]
    return "".join([name, *(f' {added}="{value}"' for added, value in left.items()), rest])

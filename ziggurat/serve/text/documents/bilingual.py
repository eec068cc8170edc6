"""XLIFF 1.2 and 2, and TMX: files of pairs in which missing targets are filled in and existing ones are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import unescape

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.lines import file_work
from ziggurat.serve.text.documents.messages import is_html, message_tokens, with_own_elements
from ziggurat.serve.text.documents.program_values import is_for_programs
from ziggurat.serve.text.elements import HTML, PAGES, MarkupRules
from ziggurat.serve.text.files import Settings, is_same
from ziggurat.serve.text.markup import Form, Template, TemplateGroup, markup_template, slots
from ziggurat.serve.text.projection import Piece
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import Spelling, Token, Xml, read_xml, spelt, without_controls, xml_ends
from ziggurat.system.errors import DataError, printable

# Inline elements hold text; those of native codes hold what is not text.
_XLIFF = MarkupRules(
    inline=frozenset(("g", "pc", "mrk", "pair")),
    points=frozenset(("x", "ph", "it", "cp", "sm", "em")),
    blank=frozenset(("br",)),
    xml=True,
)
_TMX = MarkupRules(inline=frozenset(("hi", "pair")), points=frozenset(("ph", "it", "ut")), xml=True)
# Native codes that belong together: each pair becomes an element, with these codes as its tags.
_BEGINS, _ENDS = frozenset(("bpt", "bx", "sc")), frozenset(("ept", "ex", "ec"))
# "The item is new", "needs to be translated" (XLIFF 1.2) and "in its initial state" (2.1): tools put a copy of the
# source there. All other states, such as `needs-review-translation`, mean that someone has worked on the target.
_UNTRANSLATED_STATES = frozenset(("new", "needs-translation", "initial"))
_REVIEW = ' state="needs-review-translation" state-qualifier="leveraged-mt"'
_STATES = regex.compile(r"""\s+(?:state|state-qualifier|subState)\s*+=\s*+(?:"[^"]*+"|'[^']*+')""")
# How a unit in XLIFF 1.2, or in Phrase's, records that a person has approved its target.
_APPROVED = regex.compile(r"""(\s(?:approved|m:confirmed)\s*+=\s*+["'])(yes|1)(?=["'])""")
_WRITTEN_LINE_END = regex.compile(r"(&#(?:10|[xX]0?[aA]);)")
_LINE_END = regex.compile(rf"{_WRITTEN_LINE_END.pattern[:-1]}|\r?\n)")
_UNITS = frozenset(("trans-unit", "segment", "unit", "group", "file", "tu"))


def _children(tokens: Sequence[Token], ends: dict[int, int], place: int) -> dict[str, int]:
    """Return the indices of an element's direct children by name, the first of each name."""
    found: dict[str, int] = {}
    at, end = place + 1, ends.get(place, place)
    while at < end:
        if tokens[at].kind in ("open", "empty"):
            found.setdefault(tokens[at].name, at)
        at = ends.get(at, at) + 1
    return found


def xliff(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of XLIFF 1.2 or 2 to translate; return the file. Units without a translated target get one.

    A target is untranslated if it is empty, if its state is `new` or `needs-translation` (1.2), or if its segment's
    state is given as `initial` (2). A unit whose source is a key (`menu.title`) instead of text gets none. New targets
    in 1.2 are marked as machine-made and to be reviewed, and their units lose any mark of approval; a segment in 2 with
    a state gets `translated`, which precedes `reviewed`. Of nested elements with `translate` the innermost decides: a
    locked group may contain open units. A segmented source (`seg-source`) gets a target with the same segments, if that
    lacks any. Source that is HTML is read as HTML. Targets longer than their unit allows are reported.

    Raises DataError if it is not XLIFF, or if its languages differ from those of `settings`.
    """
    xml = read_xml(content, name)
    root = next((token for token in xml.tokens if token.kind in ("open", "empty")), None)
    if root is None or root.name != "xliff":
        raise DataError(f"{name}: not XLIFF (its element is {root.name if root else 'missing'!r})")
    second = root.attributes.get("version", "").startswith("2")
    unit, holder = ("segment", "xliff") if second else ("trans-unit", "file")
    source, target = ("srcLang", "trgLang") if second else ("source-language", "target-language")
    for token in xml.tokens:
        if token.kind == "open" and token.name == holder:
            settings.refuse_languages(token.attributes.get(source, ""), token.attributes.get(target, ""), name)
    notices = TextNotices()
    template = _with_targets(xml, unit, _Units(xml.tokens, notices, second=second).filled, settings, notices)
    if settings.target:
        _named(template, xml, holder, target, settings.target)
    return (yield from file_work(template, xml, settings, notices))


class _Units:
    """The units of XLIFF 1.2, or the segments of XLIFF 2 (`second`).

    Args:
        tokens: the file.
        notices: receives units that are left out, or whose target is too long.
        second: whether it is version 2.
    """

    def __init__(self, tokens: Sequence[Token], notices: TextNotices, *, second: bool) -> None:
        self.tokens, self.notices, self.second = tokens, notices, second
        self.ends, self.most, self.kept = xml_ends(tokens), _limits(tokens), _preserved(tokens)

    def filled(self, place: int) -> tuple[int, int, Template] | None:
        """Return the range in which a unit is replaced (or its target inserted), and the replacement."""
        tokens, ends = self.tokens, self.ends
        within = _children(tokens, ends, place)
        source, target = within.get("source"), within.get("target")
        if source is None or source not in ends:
            return None
        cut = within["seg-source"] if within.get("seg-source") in ends else source  # if a tool has split it
        segment = tokens[place]
        state = (segment if self.second or target is None else tokens[target]).attributes.get("state")
        said = dict[str, str]()
        if target is not None and state not in _UNTRANSLATED_STATES and _has_text(tokens, ends, target):
            said = _segments(tokens, ends, target)
            if not said or not _segments(tokens, ends, cut).keys() - said.keys():
                return None
        if _is_key(tokens[source + 1 : ends[source]]):
            self.notices.add("for_programs", self._called(place))
            return None
        _tell_flows(tokens, ends, cut, self._called(place), self.notices)
        template = _target_template(_in_lines(_with_segments(tokens, ends, cut, said), preserved=cut in self.kept))
        if place in self.most:
            template = [TemplateGroup(template, finish=partial(self._measured, place))]
        tag = _target_tag(tokens[source], None if target is None else tokens[target])
        closing = f"</{tag[1:].split()[0]}>"
        done: Template = [f"{tag}{'' if self.second else _REVIEW}>", *template, closing]
        if target is None:
            gap = tokens[source - 1].raw if tokens[source - 1].kind == "text" else ""
            begin = end = ends[cut] + 1
            done = [gap, *done]
        else:
            begin, end = target, ends.get(target, target) + 1
        tag = _unit_tag(segment.raw, has_state=self.second and state is not None)
        if tag != segment.raw:
            return place, end, [tag, *(token.raw for token in tokens[place + 1 : begin]), *done]
        return begin, end, done

    def _measured(self, place: int, text: str) -> str:
        """Return a target's content; it is reported if longer than its unit allows."""
        if len(unescape(_ANY_TAG.sub("", _CDATA.sub("", text)))) > self.most[place]:
            self.notices.add("too_long", self._called(place))
        return text

    def _called(self, place: int) -> str:
        return f"unit {printable(self.tokens[place].attributes.get('id', '?'), 40)}"


def _is_key(inside: Sequence[Token]) -> bool:
    """Return whether the content of a source is a key, as in Symfony, or another value for programs."""
    return is_for_programs("".join(token.raw if token.kind != "text" else token.text for token in inside).strip())


def _tell_flows(tokens: Sequence[Token], ends: dict[int, int], source: int, unit: str, notices: TextNotices) -> None:
    """Count a source with text inside its native codes (`sub`), which stays untranslated."""
    if any(tokens[at].name == "sub" and _has_text(tokens, ends, at) for at in range(source, ends[source])):
        notices.add("not_read", unit)


def _limits(tokens: Sequence[Token]) -> dict[int, int]:
    """Return the maximum length in characters of the target of each unit (1.2) or segment (2) that has a limit."""
    most: dict[int, int] = {}
    of_unit: int | None = None
    for place, token in enumerate(tokens):
        said = token.attributes
        own = said.get("maxwidth") if said.get("size-unit") == "char" else said.get("sizeRestriction")
        limit = int(own.rpartition(",")[2]) if own and regex.fullmatch(r"(?:\d{1,9},)?\d{1,9}", own) else None
        if token.name == "unit":
            of_unit = limit if token.kind == "open" else None
        elif token.name in ("segment", "trans-unit") and (limit := of_unit if limit is None else limit) is not None:
            most[place] = limit
    return most


def _preserved(tokens: Sequence[Token]) -> set[int]:
    """Return the indices of elements whose white space is not layout: `xml:space` holds for all inside an element."""
    found, states = set[int](), [False]
    for place, token in enumerate(tokens):
        if token.kind == "close":
            states.pop()
        elif token.kind == "open":
            said = token.attributes.get("xml:space")
            states.append(states[-1] if said is None else said == "preserve")
            if states[-1]:
                found.add(place)
    return found


def _in_lines(tokens: Sequence[Token], *, preserved: bool) -> list[Token]:
    """Return a source's tokens with its line ends as breaks: those written as `&#10;`, and others if `preserved`."""
    found: list[Token] = []
    for token in tokens:
        if token.kind != "text" or token.raw.startswith(CDATA):
            found.append(token)
            continue
        for number, part in enumerate((_LINE_END if preserved else _WRITTEN_LINE_END).split(token.raw)):
            if number % 2:
                found.append(Token("empty", part, "br"))
            elif part:
                found.append(Token("text", part, text=unescape(part)))
    return found


def _segments(tokens: Sequence[Token], ends: dict[int, int], place: int) -> dict[str, str]:
    """Return the content of each segment (`mrk`) with text in a source or target of 1.2, by its id."""
    found: dict[str, str] = {}
    for at in range(place + 1, ends.get(place, place)):
        if _is_segment(tokens[at]) and at in ends and _has_text(tokens, ends, at):
            found[tokens[at].attributes.get("mid", "")] = "".join(token.raw for token in tokens[at + 1 : ends[at]])
    return found


def _is_segment(token: Token) -> bool:
    return token.name == "mrk" and token.attributes.get("mtype") == "seg"


def _with_segments(tokens: Sequence[Token], ends: dict[int, int], place: int, said: dict[str, str]) -> list[Token]:
    """Return the tokens of a source, with the marks of its segments as dividers; those in `said` have a target.

    Text that Trados marks as deleted is left out.
    """
    taken: list[Token] = []
    closing: set[int] = set()
    at = place + 1
    while at < ends[place]:
        token, end = tokens[at], ends.get(at, at)
        if token.attributes.get("mtype") == "x-sdl-deleted" and token.kind == "open":
            at = end
        elif at in closing or _is_segment(token):
            taken.append(token._replace(name="segment"))
            closing.add(end)
            if token.kind == "open" and (known := said.get(token.attributes.get("mid", ""))) is not None:
                taken.append(Token("other", known))
                at = end - 1
        else:
            taken.append(token)
        at += 1
    return taken


CDATA = "<![CDATA["
"""CDATA starts a stretch of XML in which tags and entities are plain characters."""
_ANY_TAG = regex.compile(r"<[^<>]*+>")
_CDATA = regex.compile(r"<!\[CDATA\[|\]\]>")


def _target_template(tokens: Sequence[Token]) -> Template:
    """Return the template of a target; text that is HTML is read as HTML."""
    parts = _paired(tokens)
    own = [part.kind == "text" and not inside for part, inside in zip(parts, _inside_codes(parts), strict=True)]
    if not are_html([part for part, is_own in zip(parts, own, strict=True) if is_own]):
        return markup_template(parts, _XLIFF)
    if len(tokens) == 1:  # a single text
        return html_in_xml(tokens[0], _html)
    divided, escape = with_html(parts, own)
    template = markup_template(divided, replace(_XLIFF, escape=escape))
    return [TemplateGroup(template, source=["".join(token.raw for token in tokens)])]


def _html(text: str) -> Template:
    tokens = list(message_tokens(text))
    return markup_template(tokens, with_own_elements(tokens, PAGES))


def are_html(texts: Sequence[Token]) -> bool:
    """Return whether texts between XML tags are HTML, by the same test as for messages."""
    return is_html("<>".join(token.text for token in texts))  # no HTML tag spans an XML tag


def html_in_xml(text: Token, read: Callable[[str], Template]) -> Template:
    """Return the template of a text in XML, escaped or CDATA; `read` makes a template from its HTML."""
    is_cdata = text.raw.startswith(CDATA) and text.raw.find("]]>") == len(text.raw) - 3
    spell = _cdata if is_cdata else Spelling(text.raw, xml=True).of
    template = read(text.text)
    for slot in slots(template):
        slot.form = _Escaped(slot.form, spell)
    inside = escaped(template, spell)
    return [TemplateGroup([CDATA, *inside, "]]>"] if is_cdata else inside, source=[text.raw])]


def _inside_codes(tokens: Sequence[Token]) -> list[bool]:
    """Return, for each token, whether it is inside an element of a native code, whose content is not text."""
    inside, depth = [], 0
    for token in tokens:
        inside.append(depth > 0)
        if token.name in _XLIFF.points:
            depth += (token.kind == "open") - (token.kind == "close")
    return inside


def escaped(template: Template, spell: Callable[[str], str]) -> Template:
    """Return a template of HTML, escaped as text in XML."""
    return [spell(part) if isinstance(part, str) else part for part in template]


def _cdata(text: str) -> str:
    return without_controls(text).replace("]]>", "]]]]><![CDATA[>")


class _Escaped:
    """Paragraphs of HTML that is escaped as text in XML."""

    def __init__(self, form: Form, spell: Callable[[str], str]) -> None:
        self.form, self.spell = form, spell

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        return escaped(self.form.write(pieces), self.spell)


def with_html(parts: Sequence[Token], own: Sequence[bool]) -> tuple[list[Token], Callable[[str], str]]:
    """Return XML tokens with the HTML in the texts that are `own` as tokens, and a function that escapes such text.

    HTML tags become `pair`, `br`, `x`, or dividing elements.
    """
    texts = [part for part, is_own in zip(parts, own, strict=True) if is_own]
    spell = Spelling("".join(text.raw for text in texts), xml=True).of
    read = [list(message_tokens(text.text)) if is_own else [] for text, is_own in zip(parts, own, strict=True)]
    inline = with_own_elements([token for tokens in read for token in tokens], HTML).inline
    divided = list[Token]()
    for part, tokens in zip(parts, read, strict=True):
        divided += [] if tokens else [part]
        for token in tokens:
            if token.kind == "text":
                divided.append(token._replace(raw=spell(token.raw)))
            elif token.kind in ("open", "close") and token.name not in HTML.void:
                name = "pair" if token.name in inline else token.name
                divided.append(Token(token.kind, spell(token.raw), name))
            else:
                divided.append(Token("empty", spell(token.raw), "br" if token.name == "br" else "x"))
    return divided, Spelling("".join(text.text for text in texts)).of


def _has_text(tokens: Sequence[Token], ends: dict[int, int], place: int) -> bool:
    return any(token.text.strip() for token in tokens[place : ends.get(place, place)])


def _unit_tag(raw: str, *, has_state: bool) -> str:
    """Return the tag of a unit or segment with a machine-made target: translated, but not approved."""
    tag = _APPROVED.sub(lambda found: found[1] + {"yes": "no", "1": "0"}[found[2]], raw)
    return f'{_STATES.sub("", tag)[:-1]} state="translated">' if has_state else tag


def _target_tag(source: Token, target: Token | None) -> str:
    """Return a target's tag without its state and its `>`: the existing one, or one modelled on the source's."""
    if target is None:
        tag = f"<{source.raw[1:].split('source')[0]}target"
    else:
        tag = _STATES.sub("", target.raw.rstrip("/>")).rstrip()
    space = source.attributes.get("xml:space")
    return tag if space is None or "xml:space" in tag else f'{tag} xml:space="{space}"'


def _paired(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens with every native code as a single token, and pairs of them as the tags of an element."""
    taken: list[Token] = []
    place = 0
    while place < len(tokens):
        token, end = tokens[place], place + 1
        if token.name in _BEGINS | _ENDS and token.kind in ("open", "empty"):
            if token.kind == "open":
                while tokens[end - 1].kind != "close" or tokens[end - 1].name != token.name:
                    end += 1
            raw = "".join(part.raw for part in tokens[place:end])
            taken.append(Token("open" if token.name in _BEGINS else "close", raw, "pair"))
        else:
            taken.append(_protected(token))
        place = end
    return taken


def _protected(token: Token) -> Token:
    """Return a token of XLIFF; a protected `mrk` gets the attribute that HTML uses."""
    if token.name == "mrk" and token.attributes.get("mtype") == "protected":
        return token._replace(attributes={**token.attributes, "translate": "no"})
    return token


def _with_targets(
    xml: Xml,
    unit: str,
    filled: Callable[[int], tuple[int, int, Template] | None],
    settings: Settings,
    notices: TextNotices,
) -> Template:
    """Return the template of a file: its tokens, one string each, with the changes that `filled` makes to its units."""
    out: list[Template] = [[token.raw] for token in xml.tokens]
    wanted = [True]  # for each open element, whether it is to be translated
    for place, token in enumerate(xml.tokens):
        if token.kind == "close":
            wanted.pop()
        if token.kind != "open":
            continue
        said = token.attributes if token.name in _UNITS else {}
        keys = [said[key] for key in ("id", "resname", "name", "tuid") if key in said]
        if is_left := any(map(settings.leaves, keys)):
            notices.add("left_by_key", f"unit {printable(keys[0], 40)}")
        wanted.append(not is_left and {"yes": True, "no": False}.get(said.get("translate", ""), wanted[-1]))
        if token.name == unit and wanted[-1] and (change := filled(place)):
            begin, end, template = change
            for at in range(begin, end):
                out[at] = []
            out[begin] = [*template, *out[begin]]
    return [part for parts in out for part in parts]


def _named(template: Template, xml: Xml, element: str, attribute: str, language: str) -> None:
    """Add the attribute for the target language to elements that lack it."""
    raws = {t.raw for t in xml.tokens if t.name == element and t.kind == "open" and attribute not in t.attributes}
    for place, part in enumerate(template):
        if isinstance(part, str) and part in raws:
            template[place] = f'{part[:-1]} {attribute}="{_value(language)}">'


def _value(text: str) -> str:
    return spelt(text).replace('"', "&quot;")


def tmx(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of TMX to translate; return the file. Units without a variant in the target language get one.

    Raises DataError if the target language is not given, or if it is not TMX.
    """
    if not settings.target:
        raise DataError(f"{name}: the language of the translation is unknown, but TMX states it in every unit")
    xml = read_xml(content, name)
    tokens, ends = xml.tokens, xml_ends(xml.tokens)
    header = next((token for token in tokens if token.name == "header"), None)
    if header is None or not any(token.name == "tmx" for token in tokens):
        raise DataError(f"{name}: not TMX (no header)")
    source = settings.source or header.attributes.get("srclang", "")
    notices = TextNotices()

    def filled(place: int) -> tuple[int, int, Template] | None:
        unit = f"unit {printable(tokens[place].attributes.get('tuid', '?'), 40)}"
        variants: dict[str, int] = {}
        at, end = place + 1, ends[place]
        while at < end:
            if tokens[at].name == "tuv" and tokens[at].kind == "open":
                spoken = tokens[at].attributes.get("xml:lang") or tokens[at].attributes.get("lang", "")
                variants.setdefault(spoken.lower(), at)
            at = ends.get(at, at) + 1
        own = _spoken(variants, source) if source not in ("", "*all*") else next(iter(variants.values()), None)
        if own is None:
            notices.add("other_languages", unit)
            return None
        there = _spoken(variants, settings.target)
        empty = None if there is None else _children(tokens, ends, there).get("seg")
        if there is not None and (empty is None or _has_text(tokens, ends, empty)):
            return None
        segment = _children(tokens, ends, own).get("seg")
        if segment is None or segment not in ends:
            return None
        template = markup_template(_paired(tokens[segment + 1 : ends[segment]]), _TMX)
        _tell_flows(tokens, ends, segment, unit, notices)
        if empty is not None:
            return empty, ends.get(empty, empty) + 1, ["<seg>", *template, "</seg>"]
        gap = tokens[own - 1].raw if tokens[own - 1].kind == "text" else ""
        after = ends[own] + 1
        return after, after, [f'{gap}<tuv xml:lang="{_value(settings.target)}"><seg>', *template, "</seg></tuv>"]

    return (yield from file_work(_with_targets(xml, "tu", filled, settings, notices), xml, settings, notices))


def _spoken(variants: dict[str, int], language: str) -> int | None:
    """Return the variant in a language, or else in one of its regions or in the language without its region."""
    similar = (place for spoken, place in variants.items() if is_same(spoken, language))
    return variants.get(language.lower(), next(similar, None))

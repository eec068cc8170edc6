"""Front matter of Markdown: the values that readers see, in YAML, TOML or JSON at the start of a file.

They are recognised by their keys (`title`, `description`, ...). Other values of several words are counted.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import regex
import yaml

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.program_values import is_for_programs
from ziggurat.serve.text.elements import text_attributes
from ziggurat.serve.text.markup import Template, TemplateGroup
from ziggurat.serve.text.splitting import has_words, protected
from ziggurat.serve.text.tokens import Token
from ziggurat.system.errors import printable

_SHOWN = regex.compile(
    r"\w*(?:title|description|summary|excerpt|caption|tagline|headline|subtitle|abstract)"
    r"|alt|details|heading|label|lead|linktext|paginationlabel|sidebarlabel|teaser|text"
)
"""_SHOWN matches keys, in lower case and without `_` and `-`, whose values readers see."""
_MOST = 100_000
"""_MOST is the maximum number of characters of front matter that are read: the YAML parser takes seconds for more."""
_SEVERAL_WORDS = regex.compile(r"\p{L}[\p{L}\p{M}'’\-]*+[,;:]?\s++[\p{L}(\"'“‘]")
_TOML_VALUE = regex.compile(
    r"""^[ \t]*+(?P<key>[\w\-]++)[ \t]*+=[ \t]*+(?P<value>"(?:[^"\\\r\n]|\\.)*+"|'[^'\r\n]*+')[ \t]*+
        (?:\#[^\r\n]*+)?\r?$""",
    flags=regex.VERBOSE | regex.MULTILINE,
)
_PLACE = "front matter, {}"
_STRING = "tag:yaml.org,2002:str"
_BEGINS_KEY = regex.compile(r"[\w\-\"']++\s*+:")
_PARAGRAPH_ENDS = regex.compile(r"(\n[ \t]*+(?:\n\s*+)++|\n\s*+\Z|\n(?=\s*+(?:[-*+>]|#++|\d++[.)])[ ]))")
_LINE_ENDS = regex.compile(r"(\n\s*+)")

TextReader = Callable[[str], Template]
"""TextReader: a text, possibly of several lines -> its template."""


def front_matter_end(bodies: Sequence[str]) -> int:
    """Return how many lines at the start of a file are front matter; 0 if it has none.

    Text between two rules is not front matter.
    """
    first = bodies[0].rstrip() if bodies else ""
    ends = {"---": ("---", "..."), "+++": ("+++",), "{": ("}",)}.get(first, ())
    end = next((number for number, body in enumerate(bodies[1:], 2) if body.rstrip() in ends), 0)
    inside = "\n".join(bodies[1 : end - 1])
    if not end or first == "+++" or not inside.strip():
        return end
    if first == "{":
        return end if isinstance(_read(json.loads, f"{{{inside}}}"), dict) else 0
    root = _yaml(inside)
    return end if isinstance(root, yaml.MappingNode) or (root is None and _BEGINS_KEY.match(inside.lstrip())) else 0


def front_matter(lines: Sequence[str], read: TextReader, notices: TextNotices) -> Template:
    """Return the template of front matter, given as its lines; values that stay untranslated are counted."""
    fence = 0 if lines[0].startswith("{") else 1
    inside = "".join(lines[fence : len(lines) - fence])
    values = _toml_values(inside, notices) if lines[0].startswith("+") else _yaml_values(inside, notices)
    template: Template = [*lines[:fence]]
    at = 0
    for value in sorted(values, key=lambda value: value.begin):
        if value.raw[:1] in ("&", "!", ""):  # an anchor or a tag, which other values may need
            notices.add("not_read", _PLACE.format(printable(value.text, 60)))
            continue
        template += [inside[at : value.begin], value.template(read)]
        at = value.begin + len(value.raw)
    return [*template, inside[at:], *lines[len(lines) - fence :]]


@dataclass(frozen=True)
class _Value:
    """A value that readers see.

    Attributes:
        begin: where it starts.
        raw: its spelling in the file, with quotes.
        text: its text.
        load: reads a spelling; raises ValueError for one that is invalid in this value's place.
    """

    begin: int
    raw: str
    text: str
    load: Callable[[str], object]

    def template(self, read: TextReader) -> TemplateGroup:
        """Return its template, with `read` for each paragraph."""
        ends = _LINE_ENDS if self.raw.startswith(">") else _PARAGRAPH_ENDS
        template: Template = []
        for part in ends.split(self.text):
            template += read(part) if part.strip() else [part]
        return TemplateGroup(template, finish=self._spelt)

    def _spelt(self, said: str) -> str:
        """Return new text as it was spelled, or in double quotes if it would be read as something else."""
        if said == self.text:
            return self.raw
        spelled = said
        if self.raw[0] in "|>":
            spelled = self._block(said)
        elif self.raw[0] == "'":
            spelled = "'{}'".format(said.replace("'", "''"))
        if self.raw[0] != '"' and str(_read(self.load, spelled)).rstrip() == said.rstrip():
            return spelled
        return json.dumps(said.rstrip(), ensure_ascii=False) + self.raw[len(self.raw.rstrip()) :]

    def _block(self, said: str) -> str:
        """Return text as a block under the header of this one (`|` or `>`), with its indentation."""
        header, _, body = self.raw.partition("\n")
        indent = body[: len(body) - len(body.lstrip())].rpartition("\n")[2]
        lines = said.rstrip().split("\n")
        if header.startswith(">"):
            lines = [line for each in lines for line in ("", each)][1:]
        end = "\r\n" if header.endswith("\r") else "\n"
        tail = self.raw[len(self.raw.rstrip()) :]
        return f"{header}\n" + end.join(f"{indent}{line}" if line.strip() else "" for line in lines) + tail


def _is_text(key: str, value: str, notices: TextNotices) -> bool:
    """Return whether a value is translated; one of several words that is not is counted."""
    if not has_words(value, protected(value)) or is_for_programs(value):
        return False
    is_shown = _SHOWN.fullmatch(regex.sub(r"[_\-]", "", key.lower())) is not None
    if not is_shown and _SEVERAL_WORDS.search(value):
        notices.add("not_read", _PLACE.format(printable(key, 60)))
    return is_shown


def _read(load: Callable[[str], object], text: str) -> object:
    """Return the result of `load` for a text; None if it raises, as parsers also do for text nested too deeply."""
    try:
        return load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


# YAML, and JSON, which is YAML


def _yaml(text: str) -> yaml.Node | None:
    """Return the YAML root; None if it is empty, too long or not YAML, as with template tags in it."""
    if len(text) > _MOST:
        return None
    root = _read(lambda one: yaml.compose(one, yaml.SafeLoader), text)
    return root if isinstance(root, yaml.Node) else None


def _yaml_values(text: str, notices: TextNotices) -> list[_Value]:
    root = _yaml(text)
    if root is None:
        if _BEGINS_KEY.match(text.lstrip()):
            notices.add("not_read", "front matter")
        return []
    return [_yaml_value(text, node, in_flow=in_flow) for node, in_flow in _nodes(root, "", set(), notices, False)]


def _yaml_value(text: str, node: yaml.ScalarNode, *, in_flow: bool) -> _Value:
    around = "[{}]" if in_flow else "- {}"

    def load(spelled: str) -> object:
        return yaml.safe_load(around.format(spelled))[0]

    return _Value(node.start_mark.index, text[node.start_mark.index : node.end_mark.index], node.value, load)


def _nodes(
    node: yaml.Node, key: str, seen: set[int], notices: TextNotices, in_flow: bool
) -> Iterator[tuple[yaml.ScalarNode, bool]]:
    """Yield the texts in and under a node, which has this key, and whether each is between brackets."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    in_flow = in_flow or bool(getattr(node, "flow_style", False))
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(name.value), value) for name, value in node.value if isinstance(name, yaml.ScalarNode)]
        said = {name: value.value for name, value in pairs if isinstance(value, yaml.ScalarNode)}
        is_meta = bool(text_attributes(Token("empty", "", "meta", attributes=said)))  # name: description, content: ...
        for name, value in pairs:
            inner = "description" if is_meta and name == "content" else name
            yield from _nodes(value, inner, seen, notices, in_flow)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _nodes(value, key, seen, notices, in_flow)
    elif isinstance(node, yaml.ScalarNode) and node.tag == _STRING and _is_text(key, node.value, notices):
        yield node, in_flow


# TOML


def _toml_values(text: str, notices: TextNotices) -> list[_Value]:
    """Return the values on single lines; other values that readers see are counted, as is text that is not TOML."""
    root = _read(tomllib.loads, text)
    if root is None:
        notices.add("not_read", "front matter")
        return []
    values, counted = list[_Value](), TextNotices()
    waiting = [("", root)]
    shown = 0
    while waiting:
        key, node = waiting.pop()
        if isinstance(node, dict):
            waiting += node.items()
        elif isinstance(node, list):
            waiting += [(key, each) for each in node]
        elif isinstance(node, str) and _is_text(key, node, notices):
            shown += 1
    for found in _TOML_VALUE.finditer(text):
        value = _toml_value(found["value"])
        if isinstance(value, str) and _is_text(found["key"], value, counted):
            values.append(_Value(found.start("value"), found["value"], value, _toml_value))
    if shown > len(values):
        notices.add("not_read", "front matter", shown - len(values))
    return values


def _toml_value(spelled: str) -> object:
    return tomllib.loads(f"value = {spelled}")["value"]

"""Values for programs, recognised by their form: paths, keys, CSS, checksums, dates."""

from __future__ import annotations

import regex

from ziggurat.serve.text.splitting import has_words, protected

_LENGTH = r"-?+(?:\d++(?:\.\d++)?+|\.\d++)(?:px|em|rem|vh|vw|vmin|vmax|pt|fr|deg|ms)"
_CSS = rf"(?<![\w.\-])(?:[#][0-9A-Fa-f]{{3,8}}+|(?:rgb|hsl)a?\([\d\s.,%/]++\)|{_LENGTH})(?![\w\-])"
_CSS_WORD = "(?:0|solid|dashed|dotted|double|none|auto|inherit|ease(?:-in)?(?:-out)?|linear|bold)"
_PROPERTY = r"\s*+[a-z\-]++\s*+:\s*+[^;:{}]++"
_FOR_PROGRAMS = regex.compile(
    rf"""(?:~|\.\.?)?+(?:/[\w.@%+\-]++){{2,}}+/?+ | (?:~|\.\.?)/\S*+ | [A-Za-z]:\\\S*+  # /usr/bin, ./a, C:\x
      | [\w\-@/][\w\-.@/]*+(?<=[\w\-]\.[a-z0-9]{{2,4}}) | [a-z_$@][\w\-]++(?:\.[\w\-]{{2,}}+)++  # a/b.png, menu.title
      | [a-z]++\d*+(?:[A-Z][a-z0-9]*+)++ | _*+[A-Za-z0-9]++(?:_++[A-Za-z0-9]++)++_*+  # someKey, some_key
      | [a-z0-9_]++(?:-[a-z0-9_]++)*+--[a-z0-9][a-z0-9_\-]*+  # button--large
      | (?P<class>[a-z]{{2,}}+)(?:[ ](?P=class)(?:-[a-z0-9]++)++)++  # btn btn-primary
      | {_CSS}(?:[ ,]++(?:{_CSS}|{_CSS_WORD}))*+  # 10px solid
      | (?=.*?{_CSS})(?:{_PROPERTY};)++(?:{_PROPERTY})?+\s*+  # margin: 1px;
      | [0-9A-Fa-f]{{8}}(?:-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}} | (?=\D*+\d)[0-9A-Fa-f]{{16,}}+  # UUID, checksum
      | (?=\D*+\d)(?=[^a-z]*+[a-z])(?=[^A-Z]*+[A-Z])[\w+/.\-]{{24,}}+={{0,2}}+  # base64, a token
      | (?:[\w+/]{{4}}){{2,}}+(?:[\w+/]{{2}}==|[\w+/]{{3}}=) | data:[\w/+.\-]*+[;,]\S*+
      | \d{{4}}-\d\d-\d\d[T ]\d\d:\d\d[\d:.,]*+(?:Z|[+\-]\d\d:?+\d\d)?+  # a time
      | P(?=T?+\d)(?:\d++[YMWD])*+(?:T(?:\d++[HMS])++)?+  # a span of time
      | (?=.*?(?:yy|MM|dd|HH|hh|YY|DD))(?:(?P<part>[yYMdDHhms])(?P=part){{0,3}}+(?:[\-/.:, ]++|$)){{2,}}+  # YYYY-MM-DD
      | (?:application|audio|font|image|message|model|multipart|text|video)/[\w.+\-]++  # text/html
      | v?+\d++(?:\.\d++)++[\w.+\-]*+  # a version
      | [a-z]{{2,3}}[\-_](?:[A-Z][a-z]{{3}}(?:[\-_][A-Z]{{2}})?+|[A-Z]{{2}})  # en-US, zh-Hans""",
    flags=regex.VERBOSE | regex.ASCII,
)
"""_FOR_PROGRAMS matches values meant for programs. It must not match text for readers, such as a single word."""


def is_for_programs(value: str) -> bool:
    """Return whether a value has the form of those for programs: a path, a key, CSS, a checksum, a date."""
    return _FOR_PROGRAMS.fullmatch(value) is not None and has_words(value, protected(value))

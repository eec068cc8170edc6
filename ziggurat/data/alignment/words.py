"""Words, as alignments count them: the rule by which text is split, with the place of each word.

First of the modules on alignment, in order of use: words, links, model1, hmm, lexicon, direction, aligner, symmetry.
"""

from __future__ import annotations

from typing import Literal

import regex

WordRule = Literal["split", "blanks"]
"""`split`: by white space and punctuation, for text as people write it. `blanks`: text that is already tokenised."""

# Scripts whose words are not separated: each character, with the marks on it, counts as a word.
_UNSPACED = "".join(
    rf"\p{{Script={name}}}" for name in ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
)
_SPLIT = regex.compile(
    # (1) one character of such a script; U+30FC lengthens a vowel and belongs to the character before it
    rf"[{_UNSPACED}][\p{{M}}\u30FC]*"
    # (2) a run of letters, digits, marks and connectors such as the underscore
    rf"|[[\p{{L}}\p{{M}}\p{{N}}\p{{Pc}}]--[{_UNSPACED}]]+"
    # (3) any other character, such as a comma or an apostrophe, with the marks on it
    r"|\S\p{M}*",
    flags=regex.V1,
)
# What Moses, fast_align and eflomal take for blanks: a no-break space is a part of a word there.
_BLANKS = regex.compile(r"[^ \t\r\n]+")


def split_words(text: str, rule: WordRule) -> list[str]:
    """Return the words of `text` in order; word i of an alignment is number i of this list, from 0.

    With `split` a word is a run of letters, digits and combining marks; every other character that is not white space
    is a word of its own, and so is every character of a script that is written without blanks (Chinese, Japanese,
    Thai, ...). With `blanks` a word is what stands between blanks and tabs.
    """
    found: list[str] = (_SPLIT if rule == "split" else _BLANKS).findall(text)
    return found


def word_spans(text: str, rule: WordRule) -> list[tuple[int, int]]:
    """Return first character and end of each word of `split_words`, such that `text[first:end]` is the word."""
    return [match.span() for match in (_SPLIT if rule == "split" else _BLANKS).finditer(text)]

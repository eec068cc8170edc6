"""Tokenisation of a test set for BLEU and TER, which depends on the language and on spaces in the text.

sacreBLEU recommends `zh`, `ja-mecab` and `ko-mecab` for their languages. For other scripts without spaces it has no
special rules; `char`, which splits into characters, needs no download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import regex

from ziggurat.config.languages import language_name, main_language

INSTALLED_BY = {"ja-mecab": "pip install 'ziggurat-mt[ja]'", "ko-mecab": "pip install 'ziggurat-mt[ko]'"}
"""INSTALLED_BY maps a sacreBLEU tokenizer that needs further packages to the command that installs them."""

_OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # sacreBLEU's default
_BY_BLANKS = ("13a", "intl", "none")
_SCRIPTS = {
    "Japanese": regex.compile(r"[\p{Hiragana}\p{Katakana}]"),
    "Chinese": regex.compile(r"\p{Han}"),
    **{name: regex.compile(rf"\p{{{name}}}") for name in ("Thai", "Lao", "Khmer", "Myanmar", "Tibetan")},
}
_LETTER = regex.compile(r"[\p{L}\p{M}]")
_SAMPLE_LINES = 200
# Average number of letters between spaces: words have fewer than this, unsegmented sentences more.
_LONGEST_WORDS = {"Japanese": 4.0, "Chinese": 4.0}
_LONGEST_OTHERS = 8.0
_KANA_SHARE = 0.05  # at least a third of Japanese text is kana, none of Chinese text


@dataclass(frozen=True)
class Splitting:
    """Splitter of a test set into words."""

    bleu: str | None
    """BLEU's tokenizer by sacreBLEU's name; None: its default, 13a."""
    ter_by_character: bool
    """True if TER treats Chinese and Japanese characters one by one (tercom's normalisation and Asian support)."""
    bleu_notice: str | None = None
    """A notice about an unusual splitting by BLEU."""
    ter_notice: str | None = None
    """A notice about an unusual splitting by TER."""


def unspaced_script(lines: Sequence[str]) -> str | None:
    """Return the script of a text without spaces between words, otherwise None, judged by the first 200 lines."""
    text = "\n".join(islice((line for line in lines if line.strip()), _SAMPLE_LINES))
    letters = len(_LETTER.findall(text))
    counts = {name: len(pattern.findall(text)) for name, pattern in _SCRIPTS.items()}
    if 2 * sum(counts.values()) <= letters:
        return None
    script = max(counts, key=lambda name: counts[name])
    if script in ("Japanese", "Chinese"):
        kana, characters = counts["Japanese"], counts["Japanese"] + counts["Chinese"]
        script = "Japanese" if kana > _KANA_SHARE * characters else "Chinese"
    # The same scripts also occur with spaces, in text that was segmented into words.
    return script if letters > _LONGEST_WORDS.get(script, _LONGEST_OTHERS) * len(text.split()) else None


def splitting(
    references: Sequence[Sequence[str]], language: str | None = None, tokenize: str | None = None
) -> Splitting:
    """Return how BLEU and TER split a test set.

    Args:
        references: one list of lines per reference translation; the first decides.
        language: code of the target language, such as `ja`; None: unknown.
        tokenize: BLEU's tokenizer, if given.
    """
    script = unspaced_script(references[0]) if references else None
    by_character = script in ("Japanese", "Chinese")
    chosen = tokenize or _OF_LANGUAGE.get(main_language(language or ""))
    if script is None:
        return Splitting(chosen, by_character)
    notice = None
    if chosen is None:
        chosen = {"Japanese": "ja-mecab", "Chinese": "zh"}.get(script, "char")
        whose = f"though its language is given as {language_name(language)}" if language else "its language not given"
        notice = f"the reference is {script} text without spaces, {whose}: BLEU uses sacreBLEU's tokenizer `{chosen}`"
    elif chosen in _BY_BLANKS:
        notice = (
            f"the reference is {script} text without spaces, and BLEU's tokenizer `{chosen}` treats "
            "a line as one word: BLEU will be near 0 however good the translation is; `char` counts characters"
        )
    if by_character:
        ter = "TER counts Chinese and Japanese characters one by one (norm:yes and asian:yes in its signature)"
    else:
        ter = f"TER takes {script} text between spaces for one word, so it says little: rely on chrF and BLEU"
    return Splitting(chosen, by_character, notice, ter)

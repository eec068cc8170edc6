"""How BLEU and TER split a test set into words: by its language, and by whether it is written with blanks.

sacreBLEU recommends `zh`, `ja-mecab` and `ko-mecab` for their languages. For other scripts without blanks it has no
rules of its own; characters (`char`) need no download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import regex

from ziggurat.evaluation.languages import language_name, main_language

__all__ = ["INSTALLED_BY", "Splitting", "splitting", "unspaced_script"]

INSTALLED_BY = {"ja-mecab": "pip install 'ziggurat-mt[ja]'", "ko-mecab": "pip install 'ziggurat-mt[ko]'"}
"""Tokenizers of sacreBLEU that need further packages, and the command that brings these."""

_OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # as sacreBLEU has it
_BY_BLANKS = ("13a", "intl", "none")
_SCRIPTS = {
    "Japanese": regex.compile(r"[\p{Hiragana}\p{Katakana}]"),
    "Chinese": regex.compile(r"\p{Han}"),
    **{name: regex.compile(rf"\p{{{name}}}") for name in ("Thai", "Lao", "Khmer", "Myanmar", "Tibetan")},
}
_LETTER = regex.compile(r"[\p{L}\p{M}]")
_SAMPLE_LINES = 200
_LONGEST_WORDS = {"Japanese": 4.0, "Chinese": 4.0}  # letters between two blanks, on average: words have fewer ...
_LONGEST_OTHERS = 8.0  # ... in every script, sentences more
_KANA_SHARE = 0.05  # of Japanese text: it has a third or more, Chinese text none


@dataclass(frozen=True)
class Splitting:
    """How the text of a test set is split into words."""

    bleu: str | None
    """BLEU's tokenizer by sacreBLEU's name; None: its default, 13a."""
    ter_by_character: bool
    """Whether TER takes Chinese and Japanese characters one by one (tercom's normalisation and Asian support)."""
    bleu_notice: str | None = None
    """What is out of the ordinary about BLEU, for people."""
    ter_notice: str | None = None
    """The same of TER."""


def unspaced_script(lines: Sequence[str]) -> str | None:
    """Return the script of text that is written without blanks, or None; the first lines decide."""
    text = "\n".join(islice((line for line in lines if line.strip()), _SAMPLE_LINES))
    letters = len(_LETTER.findall(text))
    counts = {name: len(pattern.findall(text)) for name, pattern in _SCRIPTS.items()}
    if 2 * sum(counts.values()) <= letters:
        return None
    script = max(counts, key=lambda name: counts[name])
    if script in ("Japanese", "Chinese"):
        kana, characters = counts["Japanese"], counts["Japanese"] + counts["Chinese"]
        script = "Japanese" if kana > _KANA_SHARE * characters else "Chinese"
    # Text that was split into words has blanks.
    return script if letters > _LONGEST_WORDS.get(script, _LONGEST_OTHERS) * len(text.split()) else None


def splitting(
    references: Sequence[Sequence[str]], language: str | None = None, tokenize: str | None = None
) -> Splitting:
    """Return how BLEU and TER split a test set.

    Args:
        references: one list of lines per reference translation; the first decides.
        language: code of the target language, such as `ja`; None: not known.
        tokenize: BLEU's tokenizer, where somebody chose it.
    """
    script = unspaced_script(references[0]) if references else None
    by_character = script in ("Japanese", "Chinese")
    chosen = tokenize or _OF_LANGUAGE.get(main_language(language or ""))
    if script is None:
        return Splitting(chosen, by_character)
    said = None
    if chosen is None:
        chosen = {"Japanese": "ja-mecab", "Chinese": "zh"}.get(script, "char")
        whose = f"though its language is said to be {language_name(language)}" if language else "its language not named"
        said = f"the reference is {script} text without blanks, {whose}: BLEU uses sacreBLEU's tokenizer `{chosen}`"
    elif chosen in _BY_BLANKS:
        said = (
            f"the reference is {script} text without blanks, of which BLEU's tokenizer `{chosen}` makes one word a "
            "line: BLEU will be near 0 however good the translation is; `char` counts characters"
        )
    if by_character:
        ter = "TER counts Chinese and Japanese characters one by one (norm:yes and asian:yes in its signature)"
    else:
        ter = f"TER takes {script} text between blanks for one word, and says little: go by chrF and BLEU"
    return Splitting(chosen, by_character, said, ter)

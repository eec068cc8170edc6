"""BLEU on tokenised text, as many papers report it. Never comparable with sacreBLEU; the signature says so.

Both are multi-bleu.perl's figure on text tokenised like Moses' tokenizer.perl (sacremoses). Compound-split BLEU also
does what tensor2tensor's utils/get_ende_bleu.sh does for English-German, after Luong et al. 2015: Unicode punctuation
is replaced (replace-unicode-punctuation.perl), and after tokenisation every hyphen between two non-blanks becomes
three tokens, "rich-text" -> "rich ##AT##-##AT## text". The parts of a compound then match one by one, which raises
the figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from ziggurat.errors import ConfigError, printable
from ziggurat.evaluation.scores import Score, check_lines, corpus_score

__all__ = ["check_language", "compound_split_bleu", "split_compounds", "tokenised_bleu"]

_COMPOUND = re.compile(r"(\S)-(\S)")
_UNSPACED = ("ja", "ko", "zh", "cjk")  # sacremoses keeps their letters together without a list of abbreviations


def tokenised_bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    language: str,
    confidence: bool = False,
    lowercase: bool = False,
) -> Score:
    """Return BLEU on both sides tokenised with Moses' rules for `language` (a code such as `de`).

    hypotheses, references and errors: as in ziggurat.evaluation.scores.evaluate; also those of check_language.
    """
    tokenise, version = _moses(language)
    label = f"tok:moses-{language}"
    return _bleu("tokenised BLEU", label, version, tokenise, hypotheses, references, confidence, lowercase)


def compound_split_bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    language: str = "de",
    confidence: bool = False,
    lowercase: bool = False,
) -> Score:
    """Return tokenised BLEU with Unicode punctuation replaced and hyphenated compounds split, on both sides.

    For reproducing published English-German figures. Arguments and errors: as in tokenised_bleu.
    """
    tokenise, version = _moses(language)
    replace_punctuation = _punctuation_replacer()

    def prepare(text: str) -> str:
        return split_compounds(tokenise(replace_punctuation(text)))

    label = f"tok:moses-{language}+unicode-punctuation+compound-split"
    return _bleu("compound-split BLEU", label, version, prepare, hypotheses, references, confidence, lowercase)


def check_language(language: str) -> None:
    """Raise ConfigError when Moses' tokeniser has no rules for `language`, or sacremoses is not installed.

    sacremoses itself takes the English rules then, without a word.
    """
    try:
        from sacremoses.corpus import NonbreakingPrefixes
    except ImportError:
        raise ConfigError(
            "tokenised and compound-split BLEU need sacremoses: pip install 'ziggurat-mt[tokenised]'"
        ) from None
    known = {*NonbreakingPrefixes().available_langs.values(), *_UNSPACED}
    if language not in known:
        listed = ", ".join(sorted(known))
        raise ConfigError(f"Moses' tokeniser has no rules for language {printable(repr(language))}; it knows {listed}")


def split_compounds(tokenised: str) -> str:
    """Return the line with each hyphen between two non-blanks made a token of its own, `##AT##-##AT##`.

    As in the original, matches do not overlap: the second hyphen of "a-b-c" stays, that of "one-to-one" does not.
    """
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", tokenised)


def _bleu(
    name: str,
    label: str,
    version: str,
    prepare: Callable[[str], str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    confidence: bool,
    lowercase: bool,
) -> Score:
    """Return multi-bleu's figure on prepared lines, named and signed as what it is."""
    import sacrebleu

    check_lines(hypotheses, references)
    # No smoothing and no warning about tokenised text: that is multi-bleu.perl.
    metric = sacrebleu.BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)
    score = corpus_score(
        metric,
        [prepare(line) for line in hypotheses],
        [[prepare(line) for line in reference] for reference in references],
        confidence=confidence,
    )
    signature = f"NOT-comparable-with-sacreBLEU|{score.signature.replace('tok:none', label)}|sacremoses:{version}"
    return replace(score, name=name, signature=signature, comparable=False)


def _moses(language: str) -> tuple[Callable[[str], str], str]:
    """Return Moses' tokeniser for one line, and sacremoses' version."""
    check_language(language)
    from importlib.metadata import version

    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(lang=language)

    def tokenise(text: str) -> str:
        return str(tokenizer.tokenize(text, return_str=True))

    return tokenise, version("sacremoses")


def _punctuation_replacer() -> Callable[[str], str]:
    """Return replace-unicode-punctuation.perl for one line."""
    from sacremoses import MosesPunctNormalizer

    normalizer = MosesPunctNormalizer()

    def replace_punctuation(text: str) -> str:
        return str(normalizer.replace_unicode_punct(text))

    return replace_punctuation

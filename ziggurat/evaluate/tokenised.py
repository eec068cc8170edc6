"""BLEU on tokenised text, as many papers report it; not comparable with sacreBLEU, as the signature says.

Both scores are those of multi-bleu.perl on text tokenised like Moses' tokenizer.perl (sacremoses). Compound-split BLEU
also follows tensor2tensor's utils/get_ende_bleu.sh for English-German, after Luong et al. 2015: Unicode punctuation is
replaced (replace-unicode-punctuation.perl), and after tokenisation each hyphen between two non-blanks becomes a token,
"rich-text" -> "rich ##AT##-##AT## text". The parts of a compound then match one by one, which raises the score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from ziggurat.evaluate.scores import Score, check_lines, corpus_score
from ziggurat.system.errors import ConfigError, printable

_COMPOUND = re.compile(r"(\S)-(\S)")
_UNSPACED = ("ja", "ko", "zh", "cjk")  # sacremoses handles them without a list of abbreviations


def tokenised_bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    language: str,
    confidence: bool = False,
    lowercase: bool = False,
) -> Score:
    """Return BLEU on both sides tokenised with Moses' rules for `language` (a code such as `de`).

    The texts and errors are those of ziggurat.evaluate.scores.evaluate; check_language adds errors.
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

    For reproducing published English-German scores. Arguments and errors are those of tokenised_bleu.
    """
    tokenise, version = _moses(language)
    replace_punctuation = _punctuation_replacer()

    def prepare(text: str) -> str:
        return split_compounds(tokenise(replace_punctuation(text)))

    label = f"tok:moses-{language}+unicode-punctuation+compound-split"
    return _bleu("compound-split BLEU", label, version, prepare, hypotheses, references, confidence, lowercase)


def check_language(language: str) -> None:
    """Raise ConfigError when Moses' tokeniser has no rules for `language`, or sacremoses is not installed.

    sacremoses would silently use the English rules.
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
    """Return the line with each hyphen between two non-blanks as a separate token, `##AT##-##AT##`.

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
    """Return multi-bleu's score of prepared lines, with a name and signature that tell it from sacreBLEU's."""
    import sacrebleu

    check_lines(hypotheses, references)
    # As in multi-bleu.perl: no smoothing. `force` suppresses the warning about tokenised text.
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
    """Return Moses' tokeniser as a function of a line, and the version of sacremoses."""
    check_language(language)
    from importlib.metadata import version

    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(lang=language)

    def tokenise(text: str) -> str:
        return str(tokenizer.tokenize(text, return_str=True))

    return tokenise, version("sacremoses")


def _punctuation_replacer() -> Callable[[str], str]:
    """Return replace-unicode-punctuation.perl as a function of a line."""
    from sacremoses import MosesPunctNormalizer

    normalizer = MosesPunctNormalizer()

    def replace_punctuation(text: str) -> str:
        return str(normalizer.replace_unicode_punct(text))

    return replace_punctuation

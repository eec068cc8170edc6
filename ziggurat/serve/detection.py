"""Detection of the language of a text, among those that a server translates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ziggurat.config.languages import main_language
from ziggurat.data.cleaning.languages import MOST_CHARACTERS, identifier

_SURE = 50.0  # per cent


class Detector:
    """A detector of languages, by py3langid.

    Args:
        codes: the languages that it may find, as the models call them. One that py3langid does not know is found only
            where no other is left.
    """

    def __init__(self, codes: Iterable[str]) -> None:
        self._codes = list(codes)
        known = set(identifier(None).labels)
        self._of: dict[str, list[str]] = {}  # code of py3langid -> those of the models
        for code in self._codes:
            if main_language(code) in known:
                self._of.setdefault(main_language(code), []).append(code)

    def rank(self, text: str, among: Sequence[str] | None = None) -> list[tuple[str, float]]:
        """Return the languages that `text` may have, the likeliest first, each with its confidence from 0 to 100.

        Only those of `among`, where it is given. A text without letters, or in none of the languages that py3langid
        knows, gives all languages with confidence 0, in the order of the models. Where py3langid does not know one of
        them, the text may be in none of the others: their confidence is then the share among all languages that it
        knows, since among few, and most of all one, something would always win.
        """
        wanted = [code for code in self._codes if among is None or code in among]
        names = {name: [code for code in codes if code in wanted] for name, codes in self._of.items()}
        names = {name: codes for name, codes in names.items() if codes}
        found: list[tuple[str, float]] = []
        if names and any(map(str.isalpha, text)):
            every = sum(map(len, names.values())) == len(wanted)
            ranked = identifier(tuple(sorted(names)) if every else None).rank(text[:MOST_CHARACTERS])
            found = [(code, round(100 * float(share), 1)) for name, share in ranked for code in names.get(name, ())]
        return found + [(code, 0.0) for code in wanted if code not in {code for code, _ in found}]

    def source(self, text: str, sources: Sequence[str], target: str) -> tuple[str, float]:
        """Return the language that `text` has, which is to be translated into `target`, with its confidence.

        One of `sources`, the languages that lead there. The target itself, whose text is not translated, only where the
        detector is at least half sure of it: never because it knows no other, or of a text that tells nothing.
        """
        ranks = self.rank(text, [*sources, target])
        return next((code, share) for code, share in ranks if code != target or share >= _SURE)

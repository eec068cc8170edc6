"""The pairs of languages that an entry of the registry has, and those that are meant by codes of another kind."""

from __future__ import annotations

from collections.abc import Mapping

from ziggurat.config.languages import main_language
from ziggurat.corpora.fetch.entries import Entry

_INDIVIDUAL = {
    "als": "sq", "arb": "ar", "azj": "az", "ekk": "et", "fuv": "ff", "gaz": "om", "khk": "mn", "kmr": "ku", "lvs": "lv",
    "npi": "ne", "ory": "or", "pbt": "ps", "pes": "fa", "plt": "mg", "quy": "qu", "swh": "sw", "uzn": "uz", "ydd": "yi",
    "zsm": "ms",
}  # fmt: skip
"""Codes of FLORES for one language of a group, and the code of the group that people know it by (ISO 639-3)."""


def any_pair(entry: Entry) -> bool:
    """Return whether nobody knows which pairs an entry has: any that its origin has."""
    return entry.pairs is None and entry.languages is None


def variants(entry: Entry) -> list[dict[str, str]]:
    """Return the part of the name that decides on the languages with each of its values; [{}] where none does."""
    known = entry.pairs if entry.languages is None else entry.languages
    return [{part: value} for part in entry.where for value in known] if isinstance(known, dict) else [{}]


def has_pair(entry: Entry, values: Mapping[str, str], first: str, second: str) -> bool:
    """Return whether an entry with these parts of its name has a pair of languages, in this order."""
    pairs, languages = _known(entry, entry.pairs, values), _known(entry, entry.languages, values)
    if pairs is not None:
        return f"{first}-{second}" in pairs
    return languages is None or (first != second and {first, second} <= set(languages))


def fitting_pairs(entry: Entry, values: Mapping[str, str], pair: str) -> list[str]:
    """Return the pairs of an entry that `pair` asks for, in the order that its names have; empty: it has none.

    They are this pair in either direction; where the entry has it not, those that mean the same languages, such as
    `zho_Hans-eng_Latn` for `zh-en`.
    """
    first, second = pair.split("-")
    if _known(entry, entry.pairs, values) is None:  # one name for both directions
        if has_pair(entry, values, first, second):
            return [_ordered(entry, first, second)]
        codes = _known(entry, entry.languages, values) or []
        of_both = [[code for code in codes if _language(code) == _language(wanted)] for wanted in (first, second)]
        return [_ordered(entry, a, b) for a in of_both[0] for b in of_both[1] if a != b]
    has = _known(entry, entry.pairs, values) or []
    exact = [given for given in (f"{first}-{second}", f"{second}-{first}") if given in has]
    wanted = {_language(first), _language(second)}
    return list(dict.fromkeys(exact)) or [one for one in has if set(map(_language, one.split("-"))) == wanted]


def described(entry: Entry, values: Mapping[str, str]) -> str:
    """Return the pairs or languages of an entry for people; with no `values` those of all its variants."""
    said = []
    for variant in [dict(values)] if values else variants(entry):
        named = "" if values else "".join(f"{value}: " for value in variant.values())
        if (pairs := _known(entry, entry.pairs, variant)) is not None:
            said.append(f"{named}{' '.join(pairs)}")
        elif (languages := _known(entry, entry.languages, variant)) is not None:
            more = f" and {len(languages) - 12} more" if len(languages) > 16 else ""
            said.append(f"{named}any two of {' '.join(languages[:12] if more else languages)}{more}")
    return "; ".join(said) or "any pair that its origin has"


def _known(entry: Entry, given: str | dict[str, str] | None, values: Mapping[str, str]) -> list[str] | None:
    """Return the words of `pairs` or `languages` for these parts of the name; None where they are not known."""
    if isinstance(given, dict):
        given = next((given[value] for part in entry.where if (value := values.get(part)) in given), None)
    return None if given is None else given.split()


def _ordered(entry: Entry, first: str, second: str) -> str:
    return "-".join(sorted((first, second)) if entry.sorted else (first, second))


def _language(code: str) -> str:
    """Return the language of a code without script and region: `zh` for `zho_Hans`."""
    start = code.partition("_")[0].lower()
    return _INDIVIDUAL.get(start) or main_language(start)

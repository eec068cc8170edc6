"""OpusTrainer files (https://github.com/hplt-project/OpusTrainer) as corpora, stages and modifiers of ziggurat.

`trainer` and `seed` are ignored: `ziggurat train` does the training, with the seed `training.seed`. Text is used
unchanged; options that detokenise files first are refused (`Retokenize`, `custom_detok_src`, `custom_detok_trg`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ziggurat.config.modifiers import TYPO_KINDS, ModifiersConfig
from ziggurat.config.recipes import as_comments
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.small_files import read_bounded
from ziggurat.system.yaml_text import MAX_YAML_BYTES, Lines, parse_yaml, to_yaml

_ALIGNMENT_COLUMN = 2
_NAMES = {
    "UpperCase": "upper_case",
    "TitleCase": "title_case",
    "RemoveEndPunct": "no_end_punctuation",
    "Typos": "typos",
    "Noise": "noise",
    "Merge": "merge",
    "Prefix": "prefix",
    "Tags": "terms",
}
_OPTIONS: dict[str, dict[str, str]] = {
    "Typos": {kind: kind for kind in TYPO_KINDS},
    "Noise": {
        "min_word_length": "min_word_length",  # as OpusTrainer documents it
        "min_word_legnth": "min_word_length",  # misspelt in its code, and so in all files that work there
        "max_word_length": "max_word_length",
        "max_words": "max_words",
    },
    "Merge": {"min_lines": "min_pairs", "max_lines": "max_pairs"},
    "Prefix": {name: name for name in ("min_words", "max_words", "template")},
    "Tags": {"template": "template"},
}
_KEYS = ("version", "datasets", "stages", "modifiers", "num_fields", "seed", "trainer")
_STAGE_KEYS = ("mix", "modifiers")
_PASSED_OVER = {"seed": "the seed of training is `training.seed`", "trainer": "`ziggurat train` is the trainer"}
_RETOKENIZE = "Retokenize"
_SIDES = ("src", "trg")
_TAG_SHARES = {"augment": 0.0, "replace": 0.0, "tag": 1.0}
_DETOKENISERS = ("custom_detok_src", "custom_detok_trg")
_VOCABULARIES = ("spm_vocab", "spm_vocab_src", "spm_vocab_trg")


def opustrainer_text(path: str) -> str:
    """Return an OpusTrainer file as YAML for the section `data`; comments name the parts without effect here.

    Such a file has no languages and no store; comments show where they go. Raises ConfigError as read_opustrainer does.
    """
    found = read_opustrainer(path)
    said = found.pop("said")
    lines = [
        f"The corpora, stages and modifiers of {path}.",
        "To be added: data.source_language, data.target_language, data.store, data.dev; model and training.",
        *said,
    ]
    section = {key: value for key, value in found.items() if value}
    return as_comments(lines) + to_yaml({"data": section}, compact=True)


def read_opustrainer(path: str) -> dict[str, Any]:
    """Return `train`, `stages`, `modifiers` and, where pairs have alignments, `alignment` of the data section.

    `said` holds sentences about the parts of the file without effect here.

    Paths in the file are relative to its folder. Raises ConfigError if the file is missing, invalid for OpusTrainer, or
    needs a missing feature; the message gives the line and the known values.
    """
    file = Path(path).expanduser()
    try:
        text = read_bounded(file, MAX_YAML_BYTES, error=ConfigError).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such OpusTrainer file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from None
    return _File(file, *parse_yaml(text, str(file))).read()


class _File:
    """A parsed file, with the line of each key."""

    def __init__(self, path: Path, content: dict[str, Any], lines: Lines) -> None:
        self._path, self._content, self._lines = path, content, lines
        self._said: list[str] = []
        """Sentences about parts without effect."""
        self._retokenized = False
        """True if there is a `Retokenize`, which needs alignments."""

    def read(self) -> dict[str, Any]:
        version = self._content.get("version", 1)
        if str(version) != "1":
            raise self._fault(("version",), f"version {printable(str(version), 20)} is not known; 1 is")
        datasets, names = self._section("datasets", dict), self._section("stages", list)
        self._keys_without_effect(set(map(str, names)))
        stages = [self._stage(str(name), datasets) for name in names]
        modifiers = self._modifiers(self._content, ())
        ours = [modifiers, *(stage.get("modifiers", {}) for stage in stages)]
        fields = self._fields()
        linked = any({"terms", "inline"} & each.keys() for each in ours) or self._retokenized
        aligned = fields == _ALIGNMENT_COLUMN + 1 or linked
        if aligned and fields is not None and fields <= _ALIGNMENT_COLUMN:
            raise self._fault(("num_fields",), f"`num_fields: {fields}` lacks the alignments that a modifier needs")
        corpora = [self._corpus(str(name), file, aligned, fields) for name, file in datasets.items()]
        found = {"train": corpora, "stages": stages, "modifiers": modifiers, "said": self._said}
        return {**found, "alignment": {"words": "blanks"}} if aligned else found

    def _keys_without_effect(self, stages: set[str]) -> None:
        for key in self._content:
            why = _PASSED_OVER.get(key)
            if key not in _KEYS and str(key) not in stages:
                why = f"known are {', '.join(_KEYS)} and what `stages` lists"
            if why is not None:
                self._said.append(f"{self._at((key,))}: `{printable(str(key), 60)}` has no effect: {why}")

    def _section(self, key: str, kind: type) -> Any:
        if not isinstance(found := self._content.get(key), kind) or not found:
            raise self._fault((key,), f"`{key}` is missing or empty")
        return found

    def _fields(self) -> int | None:
        if (fields := self._content.get("num_fields")) is None:
            return None
        number = self._number(fields, ("num_fields",))
        if number < 2 or not number.is_integer():
            raise self._fault(("num_fields",), f"expected 2, or 3 with alignments; not {printable(str(fields), 60)}")
        return int(number)

    def _corpus(self, name: str, file: Any, aligned: bool, fields: int | None) -> dict[str, Any]:
        if not isinstance(file, str):
            raise self._fault(("datasets", name), "expected the path of a TSV file")
        path = str(self._path.parent / file)
        corpus: dict[str, Any] = {"path": path, "format": "tsv", "name": name}
        corpus |= {} if fields is None else {"row_columns": fields}
        return {**corpus, "alignment": path, "alignment_column": _ALIGNMENT_COLUMN} if aligned else corpus

    def _stage(self, name: str, datasets: Mapping[str, Any]) -> dict[str, Any]:
        found = self._content.get(name)
        if found is None:
            raise self._fault(("stages",), f"the stage `{printable(name, 60)}` is not described")
        extended = isinstance(found, dict)
        for key in found if extended else ():
            if key not in _STAGE_KEYS:
                known = ", ".join(_STAGE_KEYS)
                raise self._fault((name, key), f"a stage has no `{printable(str(key), 60)}`; it has: {known}")
        mix, place = (found.get("mix"), (name, "mix")) if extended else (found, (name,))
        if not isinstance(mix, list) or not mix or not all(isinstance(line, str) for line in mix):
            raise self._fault(place, "expected lines such as `clean 0.8`, the last one `until clean 2`")
        shares: dict[str, float] = {}
        for number, line in enumerate(mix[:-1]):
            corpus, share = self._words(line, 2, (*place, number), "a data set and its share, such as `clean 0.8`")
            if corpus not in datasets:
                known = ", ".join(map(str, datasets))
                raise self._fault((*place, number), f"unknown data set `{printable(corpus, 60)}`; known are: {known}")
            if corpus in shares:
                twice = f"the data set `{printable(corpus, 60)}` is named twice: give it one share"
                raise self._fault((*place, number), twice)
            shares[corpus] = self._number(share, (*place, number))
        last = (*place, len(mix) - 1)
        until, corpus, epochs = self._words(mix[-1], 3, last, "`until`, a data set and epochs, such as `until clean 2`")
        if until != "until" or not shares.get(corpus):
            raise self._fault(last, "expected `until`, a data set that the stage reads, and epochs or `inf`")
        stage: dict[str, Any] = {"mix": shares, "until": {"corpus": corpus}}
        if epochs != "inf":
            count = self._number(epochs, last)
            if count < 1 or not count.is_integer():
                raise self._fault(last, f"expected a number of epochs from 1, or `inf`; not {printable(epochs, 60)}")
            stage["until"]["epochs"] = int(count)
        if extended and "modifiers" in found:
            stage["modifiers"] = self._modifiers(found, (name,))
        return stage

    def _words(self, line: str, count: int, place: tuple[str | int, ...], wanted: str) -> list[str]:
        if len(words := line.split()) != count:
            raise self._fault(place, f"expected {wanted}; not {printable(repr(line), 60)}")
        return words

    def _number(self, text: Any, place: tuple[str | int, ...]) -> float:
        try:
            number = float(text)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self._fault(place, f"{printable(repr(text), 60)} is not a number")
        return number

    def _modifiers(self, content: Mapping[str, Any], place: tuple[str | int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for where, entry in _flat(content.get("modifiers") or [], (*place, "modifiers")):
            name, probability = next(iter(entry.items())) if isinstance(entry, dict) and entry else (None, None)
            if name == _RETOKENIZE:
                self._retokenize(entry, where)
                continue
            if name not in _NAMES:
                known = ", ".join([*_NAMES, _RETOKENIZE])
                raise self._fault(where, f"unknown modifier `{printable(str(name), 60)}`; known are: {known}")
            options = {key: value for key, value in entry.items() if key != name}
            made = self._modifier(str(name), self._number(probability, where), options, where)
            if twice := made.keys() & found.keys():
                raise self._fault(where, f"`{name}`: a second `{min(twice)}`; only one of each kind is possible")
            found |= made
            try:
                ModifiersConfig.model_validate(made)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"][1:]))
                said = first["msg"].removeprefix("Value error, ")
                raise self._fault(where, f"`{name}`: {f'{key}: ' if key else ''}{said}") from None
        return found

    def _retokenize(self, entry: Mapping[str, Any], place: tuple[str | int, ...]) -> None:
        """Note a `Retokenize` that only renumbers alignments. Raises ConfigError for one that changes the text."""
        options = {key: value for key, value in entry.items() if key != _RETOKENIZE}
        for side, how in options.items():
            if side not in _SIDES or not isinstance(how, dict) or not how.keys() <= {"detokenize", "tokenize"}:
                said = f"`src` and `trg`, each with `detokenize` and `tokenize`; not {printable(str(side), 40)}"
                raise self._fault(place, f"`{_RETOKENIZE}`: expected {said}")
            for key, kinds in (("detokenize", ("spaces", "moses")), ("tokenize", ("spaces", "moses", "spm"))):
                if (spec := str(how.get(key, "spaces"))).partition(":")[0] not in kinds:
                    known = ", ".join(kinds)
                    raise self._fault(
                        place, f"`{_RETOKENIZE}`: {side}.{key}: {printable(spec, 60)}; known are: {known}"
                    )
            if (spec := str(how.get("detokenize", "spaces"))) != "spaces":
                raise self._tokenised(place, f"`{_RETOKENIZE}`: {side}.detokenize", spec)
        self._retokenized = True
        self._pieces_without_effect(place, f"`{_RETOKENIZE}`")

    def _tokenised(self, place: tuple[str | int, ...], option: str, how: str) -> ConfigError:
        """Return the error for an option which says that the files are tokenised."""
        return self._fault(
            place,
            f"{option}: {printable(how, 60)} changes the text, which is not supported here: detokenise the files, "
            "align their words again (`ziggurat align`), and leave this out",
        )

    def _pieces_without_effect(self, place: tuple[str | int, ...], option: str) -> None:
        self._said.append(
            f"{self._at(place)}: {option} has no effect: it numbers alignments by the trainer's pieces, and the store "
            "traces them to its own vocabulary"
        )

    def _modifier(
        self, name: str, probability: float, options: dict[str, Any], place: tuple[str | int, ...]
    ) -> dict[str, Any]:
        """Return one modifier; `Tags` may become two."""
        known = {
            **_OPTIONS.get(name, {}),
            **(dict.fromkeys([*_TAG_SHARES, *_DETOKENISERS, *_VOCABULARIES], "") if name == "Tags" else {}),
        }
        if unknown := [key for key in options if key not in known]:
            raise self._fault(place, f"`{name}` has no `{printable(str(unknown[0]), 60)}`; it has: {', '.join(known)}")
        ours = {known[key]: value for key, value in options.items() if known[key]}
        if name == "Typos" and options:  # as in OpusTrainer, kinds that are not named are not made
            ours = {**dict.fromkeys(TYPO_KINDS, 0.0), **{kind: self._number(p, place) for kind, p in ours.items()}}
        if name != "Tags":
            return {_NAMES[name]: {"probability": probability, **ours}}
        for key in _DETOKENISERS:
            if options.get(key) not in (None, "spaces"):
                raise self._tokenised((*place, key), f"`Tags`: {key}", str(options[key]))
        for key in _VOCABULARIES:
            if options.get(key) is not None:
                self._pieces_without_effect((*place, key), f"`Tags`: {key}")
        shares = {key: self._number(options.get(key, share), place) for key, share in _TAG_SHARES.items()}
        augment, replace = shares["augment"], shares["replace"]
        hints = 1 - augment  # share of the chosen words; `tag` gets what the other two leave
        if min(augment, replace) < 0 or augment + replace > 1 or augment + replace + shares["tag"] < 1:
            raise self._fault(place, "`Tags`: `augment`, `replace` and `tag` must be shares that add up to 1")
        made: dict[str, Any] = {}
        if augment > 0:
            made["inline"] = {"probability": probability * augment, "tags": 0.0, "placeholders": 0.0, "noise": 1.0}
        if hints > 0:
            made["terms"] = {"probability": probability * hints, "replace": min(1.0, replace / hints), **ours}
        return made

    def _fault(self, place: tuple[str | int, ...], said: str) -> ConfigError:
        return ConfigError(f"{self._at(place)}: {said}")

    def _at(self, place: tuple[str | int, ...]) -> str:
        """Return file and line of a key, or of the key that contains it."""
        while place and place not in self._lines:
            place = place[:-1]
        return f"{self._path}{f', line {self._lines[place]}' if place else ''}"


def _flat(entries: Any, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if not isinstance(entries, list):
        yield place, entries
        return
    for number, entry in enumerate(entries):
        yield from _flat(entry, (*place, number))

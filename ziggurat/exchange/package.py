"""Choices of a user for a package for Argos Translate: its metadata, and a sentence splitter to put into it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.config import DataConfig
from ziggurat.config.languages import language_name, main_language
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.small_files import check_name, check_regular

_ARGOS_VERSION = "1.10"
"""First version of Argos Translate that joins pieces by SentencePiece: earlier ones show bytes as `<0xC3>`."""

_KEYS = ("package_version", "from_code", "from_name", "to_code", "to_name", "license")
_CODE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){0,3}")
_LONGEST = 200

_SPLITTERS = (("minisbd", "*.onnx"), ("stanza", "resources.json"), ("spacy", "config.cfg"))
"""Folders of a package that Argos Translate looks for, in its order, and a file by which each is known."""


@dataclass(frozen=True)
class PackageChoices:
    """Choices of a user for a package.

    Attributes:
        metadata: values of metadata.json that replace ours, by name (`_KEYS`).
        splitter: folder of a sentence splitter to put into the package; None: Argos Translate gets one itself.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    splitter: Path | None = None

    def words(self) -> list[str]:
        """Return the options of the command line that say the same."""
        said = [word for key, value in self.metadata.items() for word in ("--metadata", f"{key}={value}")]
        return said if self.splitter is None else [*said, "--splitter", str(self.splitter)]


def package_choices(metadata: Sequence[str], splitter: Path | None) -> PackageChoices:
    """Return the choices of a command line; `metadata` is KEY=VALUE. Raises ConfigError naming what is wrong."""
    values: dict[str, str] = {}
    for given in metadata:
        key, equals, value = given.partition("=")
        shown = f"`--metadata {printable(given)}`"
        if not equals or key not in _KEYS:
            raise ConfigError(f"{shown}: give KEY=VALUE; the keys are {', '.join(_KEYS)}")
        if not value.strip() or len(value) > _LONGEST or not value.isprintable():
            raise ConfigError(f"{shown}: give one line of text, of at most {_LONGEST} characters")
        if key.endswith("_code"):
            _check_code(value, shown)
        if key == "package_version" and not _VERSION.fullmatch(value):
            raise ConfigError(f"{shown}: give a version such as 1.0")
        values[key] = value.strip()
    if splitter is not None:
        splitter_files(splitter)
    return PackageChoices(values, splitter)


def package_metadata(data: DataConfig, choices: PackageChoices) -> dict[str, str]:
    """Return the content of metadata.json. Raises ConfigError for the code of a language that Argos cannot use."""
    found = {"package_version": "1.0", "argos_version": _ARGOS_VERSION}
    for side, language in (("from", data.source_language), ("to", data.target_language)):
        code = choices.metadata.get(f"{side}_code") or main_language(language)
        _check_code(code, f"the language {printable(language)!r} of the model")
        found |= {f"{side}_code": code, f"{side}_name": language_name(code)}
    return found | dict(choices.metadata)


def _check_code(code: str, where: str) -> None:
    if not _CODE.fullmatch(code):
        raise ConfigError(
            f"{where}: not a code that Argos Translate could use; give one such as de by `--metadata from_code=...` or "
            "`to_code=...`"
        )


def splitter_files(folder: Path) -> dict[str, bytes | Path]:
    """Return the files of a sentence splitter by their place in the package.

    Raises ConfigError: not the folder of a splitter, or a name in it is not UTF-8. DataError: a file cannot be read.
    """
    names = [name for name, known_by in _SPLITTERS if folder.is_dir() and any(folder.glob(known_by))]
    if not names:
        raise ConfigError(
            f"`--splitter {folder}`: give a folder with a model of MiniSBD (*.onnx), the resources of Stanza "
            "(resources.json beside the language's folder) or a pipeline of spaCy (config.cfg)"
        )
    found: dict[str, bytes | Path] = {}
    for place, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            path = Path(place, file)
            check_name(path)
            try:
                check_regular(path)
            except FileNotFoundError:
                raise DataError(f"{path}: is a link to a file that does not exist") from None
            found[f"{names[0]}/{path.relative_to(folder).as_posix()}"] = path
    return found

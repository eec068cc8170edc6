"""What is to be fetched: the corpora of names, and the data that a recipe or configuration names.

A recipe names files such as `data/wmt14-en-de/train.en.zst`; the registry says under `folders` what `train` of the
folder `wmt14-en-de` is made of. What cannot be fetched is told, with where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.corpora.fetch.corpus import Target, Written, write_set
from ziggurat.corpora.fetch.downloads import Downloads
from ziggurat.corpora.fetch.entries import Corpus, Folder, FolderSet, HoldOut
from ziggurat.corpora.fetch.indexes import Names
from ziggurat.data.origins import set_name
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import ConfigError, printable


@dataclass(frozen=True)
class FetchTask:
    """A target and the corpora that it is made of."""

    target: Target
    corpora: tuple[Corpus, ...]
    held_out: tuple[HoldOut, Target] | None = None
    own: bool = False
    """True if the files are there and were not fetched: they are the user's, and stay."""
    by_hand: str | None = None
    """Why it cannot be fetched, and where it comes from."""

    @property
    def missing(self) -> bool:
        """Whether somebody has to bring it."""
        return self.by_hand is not None and not self.own


def task_of_name(corpus: Corpus, folder: Path) -> FetchTask:
    """Return the task of a corpus by its name: `FOLDER/opus/Tatoeba/v2/de-en.de.zst`. Raises ConfigError."""
    steps = corpus.name.split("/")
    if any(step in ("", ".", "..") or step.startswith(".") for step in steps):
        raise ConfigError(f"{printable(corpus.name, 200)}: its name would lead out of the folder")
    stem = folder.joinpath(*steps)
    files = {language: stem.with_name(f"{stem.name}.{language}.zst") for language in corpus.languages}
    return FetchTask(Target(corpus.name, files), (corpus,))


def tasks_of_config(data: DataConfig, names: Names, where: str) -> list[FetchTask]:
    """Return a task for each set of files that a configuration names and the registry describes, with the extra sets.

    `where` is the configuration's name, for messages.

    Raises ConfigError: corpora that are not named as those of a recipe, or whose folder the registry does not have.
    """
    wanted: dict[tuple[Path, str], dict[str, Path]] = {}
    endings: dict[Path, dict[str, str]] = {}
    for split, corpora in (("train", data.train), ("dev", data.dev)):
        for number, corpus in enumerate(corpora):
            key = f"{where}: data.{split}.{number}"
            folder, files = _named(corpus, data, key)
            if (described := names.registry.folders.get(folder.name)) is None:
                known = ", ".join(names.registry.folders)
                raise ConfigError(
                    f"{key}: no registry says what the folder `{printable(folder.name)}` holds ({known} are known); "
                    "fetch its corpora by name, or describe it in a registry of your own (docs/fetch.md)"
                )
            for language, path in files.items():
                if (name := set_name(path)) not in _sets(described):
                    has = ", ".join(_sets(described))
                    raise ConfigError(
                        f"{key}: the registry has no set `{printable(name)}` of {folder.name}; it has {has}"
                    )
                wanted.setdefault((folder, name), {})[language] = path
            # The development corpora come last: test sets are packed as they are.
            endings[folder] = {language: f"{language}{compression_of(path) or ''}" for language, path in files.items()}
    for folder, ending in endings.items():
        for extra in (one for one, its in names.registry.folders[folder.name].sets.items() if its.extra):
            wanted.setdefault((folder, extra), {code: folder / f"{extra}.{end}" for code, end in ending.items()})
    for (folder, name), files in list(wanted.items()):
        for whole, its in names.registry.folders[folder.name].sets.items():
            if its.hold_out is not None and its.hold_out.set == name:  # made together with the set that it is of
                wanted.setdefault((folder, whole), {language: folder / f"{whole}.{language}.zst" for language in files})
    return [
        _task(names.registry.folders[folder.name].sets[name], folder, name, wanted, names)
        for folder, name in wanted
        if name in names.registry.folders[folder.name].sets
    ]


def _sets(folder: Folder) -> list[str]:
    """Return the names of all sets of a folder, those held out of others among them."""
    return [*folder.sets, *(its.hold_out.set for its in folder.sets.values() if its.hold_out is not None)]


def _named(corpus: CorpusConfig, data: DataConfig, key: str) -> tuple[Path, dict[str, Path]]:
    """Return folder and files of a recipe's corpus: `FOLDER/SET.LANGUAGE`, perhaps compressed. Raises ConfigError."""
    if corpus.source is not None and corpus.target is not None:
        source, target = data.languages_of(corpus)
        files = {source: Path(corpus.source).expanduser(), target: Path(corpus.target).expanduser()}
        named = all(path.name.startswith(f"{set_name(path)}.{language}") for language, path in files.items())
        if named and len(files) == 2 and len({path.parent for path in files.values()}) == 1:
            return Path(corpus.source).expanduser().parent, files
    raise ConfigError(
        f"{key}: only files of a side each, called FOLDER/SET.LANGUAGE such as data/wmt14-en-de/train.en.zst, can be "
        "fetched for a configuration; fetch other corpora by their names"
    )


def _task(
    described: FolderSet, folder: Path, name: str, wanted: Mapping[tuple[Path, str], dict[str, Path]], names: Names
) -> FetchTask:
    """Return the task of one set of a folder."""
    files = wanted[folder, name]
    target = Target(f"{folder.name}/{name}", files)
    own = all(path.exists() for path in files.values()) and not target.record.exists()
    if described.by_hand is not None or own:
        return FetchTask(target, (), own=own, by_hand=described.by_hand)
    if len(files) != 2:
        raise ConfigError(f"{folder}: the set {name} is of two languages, and the configuration names one side of it")
    first, second = sorted(files)  # so that recipes of both directions name one corpus
    corpora = tuple(names.find(one.replace("{a}", first).replace("{b}", second)) for one in described.of)
    if (hold_out := described.hold_out) is None:
        return FetchTask(target, corpora)
    plain = {language: folder / f"{hold_out.set}.{language}" for language in files}
    apart = Target(f"{folder.name}/{hold_out.set}", wanted.get((folder, hold_out.set), plain))
    return FetchTask(target, corpora, (hold_out, apart))


def by_hand(tasks: Sequence[FetchTask]) -> list[str]:
    """Return a message for each task that somebody has to bring the files of."""
    return [f"{' and '.join(map(str, task.target.files.values()))}: {task.by_hand}" for task in tasks if task.missing]


def run_task(task: FetchTask, downloads: Downloads, *, force: bool = False) -> list[Written]:
    """Fetch what a task names; nothing for files of the user's own. Raises ConfigError, DataError."""
    if task.own or task.by_hand is not None:
        return []
    return write_set(task.target, task.corpora, downloads, force=force, held_out=task.held_out)

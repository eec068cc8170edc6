"""Steps that collect text: fetching public corpora, copying development and test sets, joining monolingual text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from ziggurat.config.data import CorpusConfig
from ziggurat.config.languages import main_language
from ziggurat.config.pipeline import BitextCorpus, MonolingualText, TestSetConfig
from ziggurat.corpora.pipeline.context import PipelineContext, Progress, slug, write_side, write_sides
from ziggurat.corpora.pipeline.step import Step, StepSettings, settings_of, write_document
from ziggurat.corpora.synthesis.lines import Line, readable_lines, text_files
from ziggurat.data.cleaning.filters import HashSet
from ziggurat.data.cleaning.held_out import SentenceSet, sentence_hashes
from ziggurat.data.inputs import Origin, read_origin
from ziggurat.data.lines import normalise
from ziggurat.data.readers import CorpusReader
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import find_files

_BLOCK = 10_000
_NOT_OF_TEXT = {"name", "weight", "tag", "source", "target", "path"}
"""Keys of a corpus that do not affect its text (files are compared by content). All others do, including new keys."""


_WHY = {
    "bitext.train": "sentences that a model was trained on do not show how good it is",
    "bitext.dev": "sentences that the model is chosen by do not test it",
}


def refuse_repeated_texts(context: PipelineContext) -> None:
    """Raise ConfigError for text that is given twice.

    Between training, development and test sets one shared side is enough. Two sets of one list count as the same only
    if everything is equal, since a test set may have a second reference, and a corpus two tags.
    """
    bitext = context.config.bitext
    lists: dict[str, Sequence[BitextCorpus | TestSetConfig]]
    lists = {"bitext.train": bitext.train, "bitext.dev": bitext.dev, "test": context.config.test}
    texts: dict[str, tuple[str, str]] = {}
    wholes: dict[str, str] = {}
    for kind, sets in lists.items():
        for number, one in enumerate(sets):
            place = f"{kind}.{number}"
            own = list(_texts(one, place))
            if len({text for _, text in own}) < len(own):
                raise ConfigError(f"`{place}`: `source` and `target` are the same text, {one.source}")
            for key, text in own:
                first, where = texts.setdefault(text, (kind, f"{place}.{key}"))
                if first != kind:
                    same = f"`{place}.{key}`: the same text as `{where}`, {getattr(one, key)}"
                    raise ConfigError(f"{same}: {_WHY[first]}; give others, or take some out by `bitext.hold_out`")
            rest = one.model_dump_json(exclude={"name", "weight", "source", "target", "path", "fetch"})
            if (other := wholes.setdefault(f"{kind} {own} {rest}", place)) != place:
                weight = "; `weight` says how often it is drawn from" if kind == "bitext.train" else ""
                raise ConfigError(f"`{place}`: the same text as `{other}`; leave one of them out{weight}")


def _texts(one: BitextCorpus | TestSetConfig, place: str) -> Iterator[tuple[str, str]]:
    """Yield the key of each text that a corpus or a set names, and an identity that is equal for equal text."""
    if one.fetch is not None:
        yield "fetch", f"fetch {one.fetch}"
    for key in ("source", "target", "path"):
        if (given := getattr(one, key, None)) is not None:
            paths = [Path(given).expanduser()]
            with contextlib.suppress(DataError):  # the step that reads it reports what is missing
                paths = find_files(given, f"{place}.{key}")
            columns = f" {getattr(one, 'columns', None)}" if key == "path" else ""  # a table may have several texts
            yield from ((key, f"{path.resolve()}{columns}") for path in paths)


def fetched_names(context: PipelineContext) -> list[str]:
    """Return the names of all public corpora of a pipeline, each once."""
    config = context.config
    bitext = [one.fetch for one in (*config.bitext.train, *config.bitext.dev)]
    others = [one.fetch for one in (*config.monolingual.source, *config.monolingual.target)]
    return list(dict.fromkeys(filter(None, [*bitext, *(one.fetch for one in config.test), *others])))


class FetchStep(Step):
    """The step that fetches public corpora by name; each has its own folder."""

    name = "fetch"

    def __init__(self, context: PipelineContext) -> None:
        self._context, self._how, self._names = context, context.config.fetch, fetched_names(context)
        self.title = f"fetches public corpora: {len(self._names)}"
        self.settings = {"names": self._names}  # how and from where a corpus is fetched does not affect it

    def inputs(self) -> dict[str, list[Path]]:
        """Return the registries."""
        return {(key := f"fetch.registry.{n}"): find_files(one, key) for n, one in enumerate(self._how.registry)}

    def check(self) -> None:
        """Refuse a registry that cannot be read."""
        from ziggurat.corpora.fetch.registry import load_registry

        load_registry(self._how.registry)

    def work(self, folder: Path) -> None:
        """Fetch the missing corpora."""
        from ziggurat.corpora.fetch.downloads import Downloads, default_folder
        from ziggurat.corpora.fetch.indexes import Names
        from ziggurat.corpora.fetch.network import Network
        from ziggurat.corpora.fetch.pairs import run_task, task_of_name
        from ziggurat.corpora.fetch.registry import load_registry

        how = self._how
        cache = Path(how.cache).expanduser() if how.cache else default_folder()
        network = Network(proxy=how.proxy, retries=how.retries)
        downloads = Downloads(cache, how.mirror, how.offline, network, Progress(self._context.say, "").phase)
        known = Names(load_registry(how.registry), downloads)
        failed = []
        for name in self._names:
            try:
                run_task(task_of_name(known.find(name), folder / slug(name)), downloads)
            except DataError as error:
                failed.append(str(error))
        if failed:
            raise DataError("\n".join(failed))


def fetched_origins(context: PipelineContext, name: str) -> list[tuple[Path, Origin]]:
    """Return the records of a fetched public corpus, each with its path."""
    records = sorted(context.at("fetch", slug(name)).rglob("*.fetched.json"))
    return [(record, origin) for record in records if (origin := read_origin(record)) is not None]


def of_fetch(*names: str | None) -> dict[str, list[str]]:
    """Return the dependencies on fetched corpora, for `Step.after`."""
    fetched = [f"{slug(name)}/*" for name in names if name is not None]
    return {"fetch": fetched} if fetched else {}


def fetched_files(context: PipelineContext, name: str, languages: Sequence[str], key: str) -> list[Path]:
    """Return the file of a fetched corpus for each language. Raises ConfigError if it has other languages."""
    for record, origin in fetched_origins(context, name):
        by_language = {code: record.with_name(file) for code in origin.languages for file in origin.files
                       if f".{code}." in f"{file}."}  # fmt: skip
        found = []
        for code in languages:
            # Another code may mean the same language: `deu` and `deu_Latn` for `de`.
            alike = [path for other, path in by_language.items() if _language(other) == _language(code)]
            found.append(by_language.get(code) or (alike[0] if len(alike) == 1 else None))
        if None not in found:
            return [path for path in found if path is not None]
        has = " and ".join(by_language)
        raise ConfigError(f"{key}.fetch: `{name}` has {has}, but the languages of the pipeline are {languages}")
    raise DataError(f"{context.at('fetch', slug(name))}: {name} is incomplete; `--force fetch` fetches it again")


def _language(code: str) -> str:
    """Return the language of a code without script and region: `de` for `deu_Latn`, `ceb` for `ceb-PH`."""
    return main_language(code.replace("_", "-").partition("-")[0]).lower()


def resolved(context: PipelineContext, corpus: BitextCorpus, key: str) -> CorpusConfig:
    """Return a corpus with its files, which are in the folder of `fetch` if it was fetched.

    Raises ConfigError if a fetched corpus has other languages.
    """
    settings = {name: getattr(corpus, name) for name in CorpusConfig.model_fields}
    if corpus.fetch is not None:
        source, target = fetched_files(context, corpus.fetch, context.languages, key)
        settings |= {"source": str(source), "target": str(target)}
    return CorpusConfig(**settings)


def corpus_files(context: PipelineContext, corpora: Sequence[BitextCorpus], key: str) -> dict[str, list[Path]]:
    """Return the external files of corpora, including their scores, by key.

    Raises DataError for missing files.
    """
    found: dict[str, list[Path]] = {}
    for number, corpus in enumerate(corpora):
        place = f"{key}.{number}"
        if corpus.fetch is None:
            sides = ("source", "target") if corpus.path is None else ("path",)
            files = zip(*CorpusReader.of(corpus, place, context.languages).files, strict=True)
            found |= {f"{place}.{side}": list(paths) for side, paths in zip(sides, files, strict=True)}
        scores = [(f"{place}.scores.{n}.path", score.path) for n, score in enumerate(corpus.scores)]
        found |= {name: find_files(path, name) for name, path in scores if path}
    return found


class SetsStep(Step):
    """The step that copies development and test sets unchanged to aligned text files."""

    name, title = "sets", "copies development and test sets"
    outputs = ("dev/*", "test/*")

    def __init__(self, context: PipelineContext) -> None:
        self._context, self._dev, tests = context, context.config.bitext.dev, context.config.test
        self._tests = [
            BitextCorpus(fetch=test.fetch)
            if test.fetch
            else BitextCorpus(source=test.source, target=test.target, format="text")
            for test in tests
        ]
        self.settings = {
            "languages": list(context.languages),
            "dev": [text_settings(corpus) for corpus in self._dev],
            "test": [{"name": test.name, **({"fetch": test.fetch} if test.fetch else {})} for test in tests],
        }
        self.after = of_fetch(*(corpus.fetch for corpus in (*self._dev, *self._tests)))

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of the sets."""
        dev = corpus_files(self._context, self._dev, "bitext.dev")
        return dev | corpus_files(self._context, self._tests, "test")

    def work(self, folder: Path) -> None:
        """Copy all sets."""
        named = [(f"bitext.dev.{n}", f"dev/{n}", corpus) for n, corpus in enumerate(self._dev)]
        tests = zip(self._context.config.test, self._tests, strict=True)
        named += [(f"test.{n}", f"test/{test.name}", corpus) for n, (test, corpus) in enumerate(tests)]
        for key, name, corpus in named:
            reader = CorpusReader.of(resolved(self._context, corpus, key), key, self._context.languages)
            if not write_sides(self._context.sides("sets", name), reader.blocks()):
                raise DataError(f"{key}: no sentence pairs in {reader.described()}")


def text_settings(corpus: BitextCorpus) -> StepSettings:
    """Return the settings, apart from its files, that affect a corpus's text before and after cleaning."""
    return settings_of(corpus, exclude=dict.fromkeys(_NOT_OF_TEXT, True) | {"scores": {"__all__": {"path"}}})


class MonolingualStep(Step):
    """The step that joins monolingual text: readable lines, each once, and none from a test set."""

    name, outputs = "monolingual", ("*.txt", "report.json")

    def __init__(self, context: PipelineContext) -> None:
        self._context, texts = context, context.config.monolingual
        self._sides: dict[str, list[MonolingualText]] = {side: entries for side, entries in texts if entries}
        self.title = f"cleans text of one language ({' and '.join(self._sides)})"
        of_sides = {
            side: [settings_of(entry, exclude={"path"}) for entry in entries] for side, entries in self._sides.items()
        }
        self.settings = {"languages": list(context.languages), **of_sides}
        after = of_fetch(*(entry.fetch for entries in self._sides.values() for entry in entries))
        if context.config.bitext.dev or context.config.test:
            after["sets"] = ["*"]
        if context.config.bitext.hold_out is not None:
            after["clean"] = ["held-out/*"]
        self.after = after

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of text."""
        entries = [(side, n, entry.path) for side, found in self._sides.items() for n, entry in enumerate(found)]
        return {(key := f"monolingual.{side}.{n}.path"): text_files([path], key) for side, n, path in entries if path}

    def work(self, folder: Path) -> None:
        """Write the text of each language."""
        counts = {}
        for side, entries in self._sides.items():
            held_out = [*self._context.at("sets").glob("*/*")] if "sets" in self.after else []
            held_out += [*self._context.at("clean", "held-out").glob("*")] if "clean" in self.after else []
            language = self._context.languages[side == "target"]
            known = [path for path in held_out if path.suffix == f".{language}"]
            lines = _Lines(self._context, side, entries, known)
            kept = write_side(folder / f"{side}.txt", lines.blocks())
            if not kept:
                raise DataError(f"monolingual.{side}: no line is left; dropped: {lines.counts}")
            counts[side] = {**lines.counts, "kept": kept}
        write_document(folder / "report.json", counts)


class _Lines:
    """The lines of one language to keep, which exclude those in the files `known`, and counts of the others."""

    def __init__(
        self, context: PipelineContext, side: str, entries: Sequence[MonolingualText], known: Sequence[Path]
    ) -> None:
        self._context, self._side, self._entries = context, side, entries
        self._language = context.languages[side == "target"]
        self._seen = HashSet()
        self._known = SentenceSet(
            sentence_hashes(normalise(path.read_text("utf-8").split("\n"), "none")) for path in known
        )
        self.counts: dict[str, int] = {}

    def blocks(self) -> Iterator[list[str]]:
        """Yield the lines to keep."""
        progress = Progress(self._context.say)
        read = 0
        for number, entry in enumerate(self._entries):
            key = f"monolingual.{self._side}.{number}"
            if entry.path is not None:
                files = text_files([entry.path], f"{key}.path")
            else:
                files = fetched_files(self._context, str(entry.fetch), [self._language], key)
            lines, left = readable_lines(files), entry.lines
            # No block is larger than the remaining number: a line that is not written must not count as seen.
            while block := list(islice(lines, _BLOCK if left is None else min(_BLOCK, left))):
                read += len(block)
                kept = self._kept(block)
                yield kept
                left = None if left is None else left - len(kept)
                progress.phase(f"text of {self._language}", read, None)

    def _kept(self, block: Sequence[Line]) -> list[str]:
        texts = []
        known = self._known.look(sentence_hashes([line.text for line in block]))
        for line, held_out in zip(block, known, strict=True):
            why = line.reason or ("held_out" if held_out else None)
            if why:
                self.counts[why] = self.counts.get(why, 0) + 1
            else:
                texts.append(line.text)
        if not texts:
            return []
        hashes = np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64, len(texts))
        repeated = self._seen.add(hashes)
        if repeated.any():
            self.counts["duplicate"] = self.counts.get("duplicate", 0) + int(repeated.sum())
        return [text for text, again in zip(texts, repeated, strict=True) if not again]

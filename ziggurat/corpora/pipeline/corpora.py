"""Steps that get text: public corpora fetched, development and test sets copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ziggurat.config.data import CorpusConfig
from ziggurat.config.languages import main_language
from ziggurat.config.pipeline import BitextCorpus, TestSetConfig
from ziggurat.corpora.pipeline.road import Progress, Road, slug, write_sides
from ziggurat.corpora.pipeline.settings import Settings, settings_of
from ziggurat.corpora.pipeline.step import Step
from ziggurat.data.inputs import Origin, read_origin
from ziggurat.data.readers import CorpusReader
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import find_files

_NOT_OF_TEXT = {"name", "weight", "tag", "source", "target", "path"}
"""Keys of a corpus that its text does not depend on: files count by their content. Any other counts, also a new one."""


_WHY = {
    "bitext.train": "sentences that are trained on do not tell how good a model is",
    "bitext.dev": "sentences that the model is chosen by do not test it",
}


def refuse_repeated_texts(road: Road) -> None:
    """Raise ConfigError for text that is given twice.

    One side in common is enough between training, development and test sets; of two sets of one list all has to be the
    same, since a test set may have a second reference, and a corpus two tags.
    """
    bitext = road.config.bitext
    lists: dict[str, Sequence[BitextCorpus | TestSetConfig]]
    lists = {"bitext.train": bitext.train, "bitext.dev": bitext.dev, "test": road.config.test}
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
    """Yield the key of each text that a corpus or a set names, and what is the same for the same text."""
    if one.fetch is not None:
        yield "fetch", f"fetch {one.fetch}"
    for key in ("source", "target", "path"):
        if (given := getattr(one, key, None)) is not None:
            paths = [Path(given).expanduser()]
            with contextlib.suppress(DataError):  # what is missing is told by the step that reads it
                paths = find_files(given, f"{place}.{key}")
            columns = f" {getattr(one, 'columns', None)}" if key == "path" else ""  # a table may have several texts
            yield from ((key, f"{path.resolve()}{columns}") for path in paths)


def fetched_names(road: Road) -> list[str]:
    """Return the names of all public corpora of a pipeline, each once."""
    config = road.config
    bitext = [one.fetch for one in (*config.bitext.train, *config.bitext.dev)]
    others = [one.fetch for one in (*config.monolingual.source, *config.monolingual.target)]
    return list(dict.fromkeys(filter(None, [*bitext, *(one.fetch for one in config.test), *others])))


def fetch_step(road: Road) -> Step:
    """Return the step that fetches public corpora by name; each has a folder of its own."""
    how = road.config.fetch

    def work(folder: Path) -> None:
        from ziggurat.corpora.fetch.corpus import run_task, task_of_name
        from ziggurat.corpora.fetch.downloads import Downloads, default_folder
        from ziggurat.corpora.fetch.indexes import Names
        from ziggurat.corpora.fetch.registry import load_registry
        from ziggurat.corpora.fetch.transfer import Network

        cache = Path(how.cache).expanduser() if how.cache else default_folder()
        network = Network(proxy=how.proxy, retries=how.retries)
        downloads = Downloads(cache, how.mirror, how.offline, network, Progress(road.say, "").phase)
        known = Names(load_registry(how.registry), downloads)
        failed = []
        for name in fetched_names(road):
            try:
                run_task(task_of_name(known.find(name), folder / slug(name)), downloads)
            except DataError as error:
                failed.append(str(error))
        if failed:
            raise DataError("\n".join(failed))

    def check() -> None:
        from ziggurat.corpora.fetch.registry import load_registry

        load_registry(how.registry)

    # How a corpus is fetched, and from where, does not change it.
    return Step(
        "fetch",
        f"fetches public corpora: {len(fetched_names(road))}",
        {"names": fetched_names(road)},
        work,
        files=lambda: {(key := f"fetch.registry.{n}"): find_files(one, key) for n, one in enumerate(how.registry)},
        check=check,
    )


def fetched_origins(road: Road, name: str) -> list[tuple[Path, Origin]]:
    """Return the records of a public corpus that was fetched, each with its path."""
    records = sorted(road.at("fetch", slug(name)).rglob("*.fetched.json"))
    return [(record, origin) for record in records if (origin := read_origin(record)) is not None]


def of_fetch(*names: str | None) -> dict[str, list[str]]:
    """Return the dependence on fetched corpora, for `Step.after`."""
    fetched = [f"{slug(name)}/*" for name in names if name is not None]
    return {"fetch": fetched} if fetched else {}


def fetched_files(road: Road, name: str, languages: Sequence[str], key: str) -> list[Path]:
    """Return the file of a fetched corpus for each language. Raises ConfigError where it has another one."""
    for record, origin in fetched_origins(road, name):
        by_language = {code: record.with_name(file) for code in origin.languages for file in origin.files
                       if f".{code}." in f"{file}."}  # fmt: skip
        found = [by_language.get(code) or _alike(by_language, code) for code in languages]
        if None not in found:
            return [path for path in found if path is not None]
        has = " and ".join(by_language)
        raise ConfigError(f"{key}.fetch: `{name}` has {has}, but the languages of the pipeline are {languages}")
    raise DataError(f"{road.at('fetch', slug(name))}: {name} is not there whole; `--force fetch` fetches it again")


def _alike(files: dict[str, Path], code: str) -> Path | None:
    """Return the file of a language that another code means the same by: `deu` and `deu_Latn` for `de`."""
    found = [path for other, path in files.items() if _language(other) == _language(code)]
    return found[0] if len(found) == 1 else None


def _language(code: str) -> str:
    """Return the language of a code without script and region: `de` for `deu_Latn`, `ceb` for `ceb-PH`."""
    return main_language(code.replace("_", "-").partition("-")[0]).lower()


def resolved(road: Road, corpus: BitextCorpus, key: str) -> CorpusConfig:
    """Return a corpus with its files: one that was fetched lies in the folder of `fetch`.

    Raises ConfigError where that is of other languages.
    """
    settings = {name: getattr(corpus, name) for name in CorpusConfig.model_fields}
    if corpus.fetch is not None:
        source, target = fetched_files(road, corpus.fetch, road.languages, key)
        settings |= {"source": str(source), "target": str(target)}
    return CorpusConfig(**settings)


def corpus_files(road: Road, corpora: Sequence[BitextCorpus], key: str) -> dict[str, list[Path]]:
    """Return the files from outside of corpora, their scores among them, by key.

    Raises DataError for those that are missing.
    """
    found: dict[str, list[Path]] = {}
    for number, corpus in enumerate(corpora):
        place = f"{key}.{number}"
        if corpus.fetch is None:
            sides = ("source", "target") if corpus.path is None else ("path",)
            files = zip(*CorpusReader.of(corpus, place, road.languages).files, strict=True)
            found |= {f"{place}.{side}": list(paths) for side, paths in zip(sides, files, strict=True)}
        scores = [(f"{place}.scores.{n}.path", score.path) for n, score in enumerate(corpus.scores)]
        found |= {name: find_files(path, name) for name, path in scores if path}
    return found


def sets_step(road: Road) -> Step:
    """Return the step that copies development and test sets as they are, as aligned text files."""
    dev, tests = road.config.bitext.dev, road.config.test
    as_corpora = [
        BitextCorpus(fetch=test.fetch)
        if test.fetch
        else BitextCorpus(source=test.source, target=test.target, format="text")
        for test in tests
    ]

    def work(folder: Path) -> None:
        named = [(f"bitext.dev.{n}", f"dev/{n}", corpus) for n, corpus in enumerate(dev)]
        named += [(f"test.{n}", f"test/{tests[n].name}", corpus) for n, corpus in enumerate(as_corpora)]
        for key, name, corpus in named:
            reader = CorpusReader.of(resolved(road, corpus, key), key, road.languages)
            if not write_sides(road.sides("sets", name), reader.blocks()):
                raise DataError(f"{key}: no sentence pairs in {reader.described()}")

    return Step(
        "sets",
        "copies development and test sets",
        {
            "languages": list(road.languages),
            "dev": [text_settings(corpus) for corpus in dev],
            "test": [{"name": test.name, **({"fetch": test.fetch} if test.fetch else {})} for test in tests],
        },
        work,
        of_fetch(*(one.fetch for one in (*dev, *as_corpora))),
        lambda: corpus_files(road, dev, "bitext.dev") | corpus_files(road, as_corpora, "test"),
        ("dev/*", "test/*"),
    )


def text_settings(corpus: BitextCorpus) -> Settings:
    """Return what a corpus's text, or what cleaning leaves of it, depends on besides its files."""
    return settings_of(corpus, exclude=dict.fromkeys(_NOT_OF_TEXT, True) | {"scores": {"__all__": {"path"}}})

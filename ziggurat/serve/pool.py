"""The models of a server: which languages each translates, and which models lead from one language to another."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

from ziggurat.config import Experiment, load_experiment
from ziggurat.config.languages import language_name
from ziggurat.config.load import change_section
from ziggurat.model.run_folder import BASE, MODEL_FILE, config_file
from ziggurat.serve.config import ModelConfigEntry
from ziggurat.serve.engine import Engine, Opened
from ziggurat.serve.notices import silent_notices
from ziggurat.serve.queue import FairQueue
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.system.processes import usable_cpus
from ziggurat.translate.engines import EXPORT_FILE, is_export, read_report, refuse_unsupported
from ziggurat.translate.interface import tells_alignments

_COPIES = 3
"""_COPIES is how many times the size of its weights a model takes with PyTorch.

Twice while it is read and built (1.6 times packed in fp32, 0.9 in bf16), and as much again for a search over many
lines.
"""
_POLL = 0.05  # seconds between checks of whether another model has been closed
_UNLOADING = 10.0  # seconds that a model waits for the memory of other models in use


class ModelSource:
    """A served model: a run, a model directory, or an exported CTranslate2 directory.

    Args:
        entry: its configuration.
    """

    def __init__(self, entry: ModelConfigEntry) -> None:
        self.entry, self.path = entry, Path(entry.path).expanduser()

    def files(self) -> tuple[list[Path], Path]:
        """Return the weight files, including those that low-rank updates build on, and the folder with everything else.

        Raises CheckpointError if there are none.
        """
        if self.is_exported:
            if self.entry.which is not None:
                raise ConfigError(f"{self.path}: an exported model has one set of weights; leave out `which`")
            return [self.path / EXPORT_FILE], self.path
        from ziggurat.model.directory import locate_weights

        weights, folder = locate_weights(self.path, self.entry.which)
        base = folder / BASE / MODEL_FILE
        return [weights, base] if base.exists() else [weights], folder

    def experiment(self) -> Experiment:
        """Return the model's configuration.

        Raises ConfigError for decoding settings that do not fit it, and if the library that runs it is not installed.
        """
        found = load_experiment(config_file(self.path))
        library, extra = ("ctranslate2", "translate") if self.is_exported else ("torch", "train")
        if find_spec(library) is None:  # otherwise every request would fail
            raise ConfigError(f"{self.path}: `{library}` is not installed: pip install 'ziggurat-mt[{extra}]'")
        try:
            if self.is_exported:
                refuse_unsupported(self.entry.decoding, read_report(self.path))
            change_section(found.decoding, self.entry.decoding, "decoding")
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        return found

    @cached_property
    def is_exported(self) -> bool:
        """True if CTranslate2 runs it; looked up once, as requests need it even while a folder is being replaced."""
        return is_export(self.path)

    def shortlist(self) -> Path | None:
        """Return the shortlist file that the search uses; None if it has none."""
        if "shortlist" in self.entry.decoding:
            name = self.entry.decoding["shortlist"]
        else:
            config = config_file(self.path)
            name = _shortlist_of(config, _seen(config))
        return None if name is None else Path(name).expanduser()

    def has_shortlist(self) -> bool:
        """Return whether the search uses a shortlist, judging by the folder as it is now."""
        try:
            return self.shortlist() is not None
        except CheckpointError:  # being replaced
            return False

    def version(self) -> str:
        """Return 16 hexadecimal digits that change whenever one of the model's files does.

        These are its weights (including those that low-rank updates build on), configuration, vocabularies, and the
        shortlist, which may be anywhere.
        """
        weights, folder = self.files()
        try:
            found = [(path.name, *_seen(path)) for path in sorted(folder.iterdir()) if _of_model(path.name)]
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}") from None
        shortlist = self.shortlist()
        seen = [] if shortlist is None else [str(shortlist), *_seen(shortlist)]
        every = repr((str(weights[0].resolve()), *map(_seen, weights), found, seen))
        return hashlib.blake2b(every.encode(), digest_size=8).hexdigest()

    def size(self) -> int:
        """Return the bytes of memory that the open model takes, as an estimate."""
        return sum(_seen(path)[2] for path in self.files()[0]) * (1 if self.is_exported else _COPIES)

    def open(self) -> Opened:
        """Open the model, in the thread that will use it."""
        version = self.version()
        if self.is_exported:
            from ziggurat.translate.ctranslate2 import CTranslate2Translator

            # CTranslate2's threads spin between two steps: one on every core would block those that receive and answer
            # requests (2 cores, a small model: 60 requests a second with two threads, 370 with one).
            threads = self.entry.threads or max(1, usable_cpus() // 2)
            served = CTranslate2Translator(self.path, device=self.entry.device, threads=threads, **self.entry.decoding)
            served.notices = silent_notices()
            return Opened(served, version, True)
        import torch

        from ziggurat.translate.translator import load_translator

        if self.entry.threads is not None:
            torch.set_num_threads(self.entry.threads)  # for this thread only: OpenMP keeps the number per thread
        translator = load_translator(self.path, device=self.entry.device, which=self.entry.which, **self.entry.decoding)
        aligned = tells_alignments(translator)
        translator.notices = silent_notices()
        return Opened(translator, version, aligned)


def _of_model(name: str) -> bool:
    """Return whether a file in a folder belongs to the model, apart from its weights; a run also has logs."""
    return name in ("config.yaml", "config.json") or name.endswith((".spm", ".vocab", "vocabulary.json"))


@lru_cache(maxsize=64)
def _shortlist_of(config: Path, seen: object) -> str | None:
    """Return the shortlist named in a configuration; read again when `seen` differs for the file."""
    return load_experiment(config).decoding.shortlist


def _seen(path: Path) -> tuple[int, int, int]:
    """Return a file's identity, time and size. Raises CheckpointError if it cannot be accessed."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(frozen=True)
class Model:
    """A model with its languages and its engine."""

    name: str
    source: str
    target: str
    origin: ModelSource
    engine: Engine


class ModelPool:
    """All models of a server.

    Args:
        sources: the models; several of one language pair need different names, and the first serves the pair.
        waiting: lines that may wait for each model.
        memory: estimated bytes that open models, or models being opened, may take; others are closed to make room, the
            longest unused first. None: no limit.
        names: names of languages by code, in addition to those of ISO 639-1.
        say: receives messages for the operator.

    Raises ConfigError and CheckpointError for a folder that is not a model, or two models with one name.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        *,
        waiting: int = 2000,
        memory: int | None = None,
        names: Mapping[str, str] | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._memory, self._names, self._say = memory, dict(names or {}), say
        self._held: set[str] = set()
        """Names of the models that are open or being opened."""
        self._opened: set[str] = set()
        """The names in `_held` of models that are open."""
        self._room = threading.Lock()  # for both
        self.models: dict[str, Model] = {}
        self.pairs: dict[tuple[str, str], Model] = {}
        for source in sources:
            source.files()  # an invalid folder is refused now, not at the first request
            data = source.experiment().data
            pair = data.source_language, data.target_language
            name = source.entry.name or "-".join(pair)
            if name in self.models:
                raise ConfigError(f"two models are called {name!r}: {self.models[name].origin.path}, {source.path}")
            queue = FairQueue(waiting, most_of_client=max(1, waiting // 2))
            engine = Engine(
                name,
                opening=partial(self._open, source, name),
                version=source.version,
                queue=queue,
                say=say,
                closed=partial(self._close, name),
            )
            self.models[name] = Model(name, *pair, source, engine)
            self.pairs.setdefault(pair, self.models[name])
        self.languages = self._reachable()
        """The languages that can be translated, each with the sorted list of those it can be translated into."""

    def route(self, source: str, target: str) -> list[Model] | None:
        """Return the models that lead from one language to the other, at most two; None if there are none."""
        if (direct := self.pairs.get((source, target))) is not None:
            return [direct]
        # In the order in which the models were given: the pivot listed first is used.
        for (first, middle), model in self.pairs.items():
            if first == source and (second := self.pairs.get((middle, target))) is not None:
                return [model, second]
        return None

    def _reachable(self) -> dict[str, list[str]]:
        codes = sorted({code for pair in self.pairs for code in pair})
        found = {code: [other for other in codes if code != other and self.route(code, other)] for code in codes}
        return {code: targets for code, targets in found.items() if targets}

    def language_name(self, code: str) -> str:
        """Return the name of a language; its code if no name is known."""
        return self._names.get(code) or language_name(code)

    def close(self, seconds: float) -> bool:
        """Let all models finish their waiting lines; return whether all did so within `seconds`."""
        end = time.monotonic() + seconds
        ended = [model.engine.close(max(0.0, end - time.monotonic())) for model in self.models.values()]
        return all(ended)

    def _open(self, source: ModelSource, name: str) -> Opened:
        if self._memory is not None:
            self._make_room(name, source.size(), self._memory)
        try:
            opened = source.open()
        except BaseException:
            with self._room:
                if name not in self._opened:  # still open if only its new files cannot be opened
                    self._held.discard(name)
            raise
        with self._room:
            self._opened.add(name)
        return opened

    def _close(self, name: str) -> None:
        with self._room:
            self._held.discard(name)
            self._opened.discard(name)

    def _make_room(self, name: str, needed: int, limit: int) -> None:
        """Reserve memory for a model, and close unused ones until it fits.

        A model that is too large by itself is opened nevertheless, as is one for which models in use leave no room.
        """
        end = time.monotonic() + _UNLOADING
        while True:
            with self._room:
                others = self._held - {name}
                fits = needed + sum(self.models[other].origin.size() for other in others) <= limit
                if self._opened < self._held:  # wait for models being opened
                    end = time.monotonic() + _UNLOADING
                if fits or not others or time.monotonic() > end:
                    self._held.add(name)
                    break
            idle = [engine for engine in (self.models[other].engine for other in others) if not engine.busy]
            if idle:
                min(idle, key=lambda engine: engine.state.last_used).unload()
            time.sleep(_POLL)
        if not fits:
            self._say(f"{name}: opened beyond the limit of memory: nothing else could be closed")

"""What commands start from: corpus, store and run, made once and then copied; and stand-ins for slow parts."""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import tiny_experiment
from tests.faults.nursery import Nursery
from tests.faults.trees import snapshot
from tests.faults.verbs import GROUND_TRAINING, TORCH, TRAININGS, Verb
from tests.small import merged
from ziggurat.config import Experiment, dump
from ziggurat.data.babel import generate


def in_one_process() -> None:
    """Run jobs in the verb's process, because the operations of other processes are not seen."""
    from tests.corpora.synthesis import conftest
    from ziggurat.corpora.jobs import launchers

    launchers.worker_pool = conftest.here


def on_a_small_corpus() -> None:
    """Make `demo` write a few hundred pairs instead of 21,000."""
    from functools import partial

    from ziggurat.data import babel

    babel.write_corpus = partial(babel.write_corpus, train=300, dev=10, test=4)  # type: ignore[assignment]


def on_ready_graphs() -> None:
    """Make the ONNX export write graphs that were traced earlier, because tracing takes a dozen seconds."""
    import torch.onnx

    class Ready:
        model = SimpleNamespace(graph=SimpleNamespace(all_nodes=list))

        def save(self, path: Path) -> None:
            path.write_bytes(Path("graphs", path.name).read_bytes())

    torch.onnx.export = lambda *arguments, **options: Ready()  # type: ignore[assignment,return-value]


def with_a_server() -> None:
    """Make `fetch` get its addresses from the files in `origin`, served by a proxy in this process."""
    from tests.corpora.fetch.server import serving

    running = serving()
    server = running.__enter__()
    atexit.register(running.__exit__, None, None, None)  # also keeps a reference: without one it would end
    for path in Path("origin", "f").iterdir():
        server.add(f"corpora.invalid/f/{path.name}", path.read_bytes())
    os.environ["http_proxy"] = server.address


@dataclass
class Ground:
    """Makes what commands start from: corpus, store, a run, text; each once, then copied.

    All paths are relative to the folder in which the command runs.
    """

    folder: Path
    nursery: Nursery
    _made: set[str] = field(default_factory=set)

    def lay(self, verb: Verb, folder: Path) -> None:
        """Recreate `folder` with what exists before `verb`."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for part in verb.ground:
            self._copy(part, folder)
        for arguments in verb.before:
            ended = self.nursery.run(arguments, folder, prepare=verb.prepare, preload=verb.preload)
            assert ended.status == 0, ended.said

    def part(self, name: str) -> Path:
        """Return a part of the ground: `corpus`, `store`, `run`, `text`, `page.html`, `origin`, `<training>.yaml`."""
        if name not in self._made:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make(name)
            self._made.add(name)
        return self.folder / name

    def _copy(self, name: str, folder: Path) -> None:
        path = self.part(name)
        if path.is_dir():
            shutil.copytree(path, folder / name, symlinks=True)
        else:
            shutil.copy2(path, folder / name)

    def _make(self, name: str) -> None:
        if name == "corpus":
            (self.folder / "corpus").mkdir()
            tiny_experiment(self.folder / "corpus")
        elif name == "text":
            lines = [pair[0] + "\n" for pair in generate(12, seed=9)]
            (self.folder / name).write_text("".join(lines), encoding="utf-8")
        elif name == "page.html":
            lines = [f"<p>{source.replace(' ', ' <b>', 1)}</b></p>\n" for source, _ in generate(6, seed=9)]
            (self.folder / name).write_text("".join(lines), encoding="utf-8")
        elif name.endswith(".yaml"):
            model = {"encoder": {"residual": "post"}} if name == "post.yaml" else {}
            self.configuration(name, TRAININGS.get(name.removesuffix(".yaml"), GROUND_TRAINING), model)
        elif name == "store":
            self.part("corpus"), self.part("tiny.yaml")
            self._do("prepare", "tiny.yaml")
        elif name == "run":
            self.part("store"), self.part("tiny.yaml")
            self._do("train", "tiny.yaml", "--run", "run", preload=TORCH)
            # Averaged by hand, without a dev score: the average of training is worse than `best`, so it would not be
            # read.
            self._do("average", "run", "--last", "2", preload=TORCH)
        elif name == "graphs":
            self.part("run")
            self._do("export", "run", "--to", "onnx", "--out", "graphs", "--lines", "4", preload=TORCH)
        elif name == "origin":
            from tests.corpora.fetch.material import contents, registry

            (self.folder / name / "f").mkdir(parents=True)
            for path, content in contents().items():
                (self.folder / name / path).write_bytes(content)
            (self.folder / name / "registry.yaml").write_text(registry("http://corpora.invalid"))
            data = "source_language: de, target_language: en, store: store"
            train, dev = (
                f"{{source: data/local-de-en/{one}.de{end}, target: data/local-de-en/{one}.en{end}}}"
                for one, end in (("train", ".zst"), ("dev", ""))
            )
            (self.folder / name / "my.yaml").write_text(f"data: {{{data}, train: [{train}], dev: [{dev}]}}\n")
        elif name == "fairseq":
            self.part("run")
            from tests.faults.foreign import write_fairseq

            write_fairseq(self.folder / "run", self.folder / name)
        else:
            raise KeyError(name)

    def configuration(self, name: str, training: Mapping[str, Any], model: Mapping[str, Any]) -> Path:
        """Write the tiny experiment with this section `training` and changes to `model`; return the file."""
        self.part("corpus")
        tiny = tiny_experiment(self.folder / "corpus").model_dump()
        tiny["data"]["store"] = "store"
        changed = {"model": merged(tiny["model"], model), "training": merged(tiny["training"], training)}
        text = dump(Experiment.model_validate({**tiny, **changed})).replace(f"{self.folder}/", "")
        (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / name

    def _do(self, *arguments: str, preload: tuple[str, ...] = ()) -> None:
        ended = self.nursery.run(arguments, self.folder, preload=preload)
        assert ended.status == 0, ended.said

    def undisturbed(self, verb: Verb, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
        """Run the command undisturbed; return snapshots before and after, and its file operations."""
        self.lay(verb, folder)
        before = snapshot(folder, verb.timed)
        ended = self.nursery.run(
            verb.arguments, folder, prepare=verb.prepare, preload=verb.preload, watched=True, seconds=300
        )
        assert ended.status == 0, ended.said
        return before, snapshot(folder, verb.timed), ended.operations

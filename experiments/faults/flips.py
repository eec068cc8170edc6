"""Damages every file in stores, checkpoints, model folders and exports, and counts how readers react.

    python experiments/faults/flips.py [--per-file 20] [--seed 1] [--folder FOLDER] [--only store averaged ...]

A reader must refuse the damage, naming the file, or return exactly what it returned before. Readers run in a child
process, so that a crash, a hang or an error without a reason can be counted. The last line is a JSON document; the exit
status is 1 if any damage went unnoticed, or a reader crashed, hung or had an internal error.

From Python: `campaign(subjects(folder), per_file=20, seed=1)` returns a Count per kind of folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

SENTENCES = ["koto lu mire", "sa vena", "to ki ra lumo deni"]
_SECONDS = 120.0


class Subject(NamedTuple):
    """A folder whose files are damaged one by one.

    Attributes:
        kind: its name in the table.
        reader: the name in READERS of the reader for it.
        folder: the folder; every file in it and below is damaged, and restored.
    """

    kind: str
    reader: str
    folder: Path


class Damage(NamedTuple):
    """One change to a folder.

    Attributes:
        what: a description in words.
        file: relative to the folder.
        content: the file's temporary content; None: it is gone.
    """

    what: str
    file: str
    content: bytes | None


@dataclass
class Count:
    """The outcomes of all damage to one kind of folder."""

    tried: int = 0
    refused: int = 0
    """Refusals whose message names the file."""
    harmless: int = 0
    """Cases in which the reader returned what it returns for the intact folder."""
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    """Refusals whose message does not name the file."""
    internal: list[str] = field(default_factory=list)
    """Errors other than those of ziggurat.system.errors."""
    crashed: list[str] = field(default_factory=list)
    """Cases in which the interpreter died, or gave no answer in two minutes."""

    @property
    def failures(self) -> list[str]:
        """Everything that must not happen, in words."""
        named = {"silent": self.silent, "unnamed": self.unnamed, "internal": self.internal, "crashed": self.crashed}
        return [f"{name}: {said}" for name, found in named.items() for said in found]


def damages(folder: Path, per_file: int, generator: random.Random) -> Iterator[Damage]:
    """Yield about `per_file` damages for every file in the folder: bits, pages, ends, other files' content, extra
    files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    for name, content in contents.items():
        size = len(content)
        yield Damage("removed", name, None)
        if not size:
            continue
        yield Damage("emptied", name, b"")
        yield Damage("one byte short", name, content[:-1])
        yield Damage("one byte longer", name, content + b"\0")
        yield Damage("cut in half", name, content[: size // 2])
        for other, theirs in contents.items():
            if other != name and len(theirs) == size and theirs != content:
                yield Damage(f"holds {other}, of the same size", name, theirs)
        pages = range(0, size, 4096)
        for start in generator.sample(pages, min(len(pages), max(1, per_file // 8))):
            end = min(start + 4096, size)
            yield Damage(f"zeros at {start}", name, content[:start] + bytes(end - start) + content[end:])
        edges = [0, size - 1, *range(0, min(size, 512), 67)]  # headers matter most
        for place in [*edges[: per_file // 2], *(generator.randrange(size) for _ in range(per_file // 2))]:
            bit = 1 << generator.randrange(8)
            flipped = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
            yield Damage(f"bit {bit} of byte {place}", name, flipped)
    for name, extra in (
        ("train-00001.arrow", "train-00000.arrow"),
        ("shard-00001.safetensors", "shard-00000.safetensors"),
    ):
        for known in [path for path in contents if Path(path).name == extra]:
            yield Damage("a file too many", str(Path(known).with_name(name)), contents[known])


def campaign(
    subjects: Iterable[Subject], *, per_file: int = 20, seed: int = 1, isolated: bool = True
) -> dict[str, Count]:
    """Return a Count for each kind of subject; afterwards their folders are as they were before.

    Args:
        subjects: folders to damage.
        per_file: about how many bits to flip in each file, in addition to other damage.
        seed: chooses the positions.
        isolated: read in a child process; otherwise a crash ends the caller.
    """
    counts: dict[str, Count] = {}
    for subject in subjects:
        count = counts.setdefault(subject.kind, Count())
        with _Reader(subject, isolated) as reader:
            whole = reader.read()
            assert whole["outcome"] == "read", f"{subject}: {whole}"
            for damage in damages(subject.folder, per_file, random.Random(f"{seed} {subject.kind}")):
                with _damaged(subject.folder, damage):
                    found = reader.read()
                _count(count, damage, found, whole["said"])
    return counts


def _count(count: Count, damage: Damage, found: dict[str, str], whole: str) -> None:
    count.tried += 1
    words = f"{damage.file}: {damage.what}: {found['said'][:300]}"
    if found["outcome"] == "read" and found["said"] == whole:
        count.harmless += 1
    elif found["outcome"] == "read":
        count.silent.append(words)
    elif found["outcome"] == "refused" and Path(damage.file).name in found["said"]:
        count.refused += 1
    else:
        {"refused": count.unnamed, "internal": count.internal}.get(found["outcome"], count.crashed).append(words)


class _damaged:  # noqa: N801 - a context, like contextlib's
    def __init__(self, folder: Path, damage: Damage) -> None:
        self._path, self._content = folder / damage.file, damage.content
        self._before = self._path.read_bytes() if self._path.exists() else None

    def __enter__(self) -> None:
        _put(self._path, self._content)

    def __exit__(self, *_: object) -> None:
        _put(self._path, self._before)


def _put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)  # the same inode, so mapped content changes too, as on a decaying disk


class _Reader:
    """Reads a subject repeatedly, in a child that is restarted when it dies."""

    def __init__(self, subject: Subject, isolated: bool) -> None:
        self._subject, self._isolated = subject, isolated
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def read(self) -> dict[str, str]:
        """Return the result: `outcome` is read, refused, internal or crashed, and `said` is the message."""
        if not self._isolated:
            return _answer(self._subject.reader, self._subject.folder)
        if self._child is None:
            command = [sys.executable, __file__, "--child", self._subject.reader, str(self._subject.folder)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            line = self._child.stdout.readline() if selector.select(_SECONDS) else ""
        if line:
            return dict(json.loads(line))
        status = self._child.poll()
        self._end()
        return {"outcome": "crashed", "said": "no answer" if status is None else f"exit status {status}"}


def _answer(reader: str, folder: Path) -> dict[str, str]:
    from ziggurat.system.errors import ZigguratError

    digest = xxhash.xxh3_128()
    try:
        for part in READERS[reader](folder):
            digest.update(part if isinstance(part, bytes) else repr(part).encode("utf-8", "backslashreplace"))
    except ZigguratError as error:
        return {"outcome": "refused", "said": str(error)}
    except Exception as error:
        return {"outcome": "internal", "said": f"{type(error).__name__}: {error}"}
    return {"outcome": "read", "said": str(digest.hexdigest())}


def _serve(reader: str, folder: Path) -> None:
    """Answer one line for every line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the answers
    for _ in sys.stdin:
        answers.write(json.dumps(_answer(reader, folder)) + "\n")
        answers.flush()


# The readers below return everything in a folder, as bytes or as things whose `repr` shows everything.


def _read_store(folder: Path) -> Iterator[object]:
    from ziggurat.data.corpus import Store

    yield from _store_parts(Store.open(folder))


def _read_store_beside(folder: Path) -> Iterator[object]:
    """Read as in training on a large store: pairs are used before checksums are compared, and nothing is stored."""
    from ziggurat.data.corpus import Store
    from ziggurat.data.store_checks import Verification

    store = Store.open(folder)
    for shard in store.train.shards:
        shard.checked_elsewhere = True
    parts = list(_store_parts(store))
    Verification(store).wait()
    yield from parts


def _store_parts(store: Any) -> Iterator[object]:
    for tokenizer in (store.source, store.target):
        yield from _tokenizer_parts(tokenizer)
    for table in (store.train, store.dev):
        if table is None:
            continue
        yield from (table.corpora.tobytes(), table.corpus_weights, table.corpus_names, len(table))
        for sides in table.pairs(range(len(table))):
            yield from (ids.tobytes() for ids in sides)
        if table.has_text:
            yield table.texts(range(len(table)))
    yield store.fingerprint


def _tokenizer_parts(tokenizer: Any) -> Iterator[object]:
    yield tokenizer.pieces(range(tokenizer.size))
    yield tokenizer.encode(SENTENCES)
    yield (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos, dict(tokenizer.tags))


def _read_checkpoint(folder: Path) -> Iterator[object]:
    from ziggurat.train.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(folder)
    yield asdict(checkpoint.progress)
    yield checkpoint.store
    for tensors in (checkpoint.weights, checkpoint.optimiser):
        for name in sorted(tensors):
            yield from (name, tensors[name].contiguous().numpy().tobytes())


def _read_model(folder: Path) -> Iterator[object]:
    from ziggurat.data.subword import load_tokenizers
    from ziggurat.model.directory import open_model

    opened = open_model(folder)
    yield opened.experiment.model_dump(mode="json")
    for name, parameter in opened.model.named_parameters():
        yield from (name, parameter.detach().numpy().tobytes())
    for tokenizer in load_tokenizers(opened.directory):
        yield from _tokenizer_parts(tokenizer)


def _read_ctranslate2(folder: Path) -> Iterator[object]:
    from ziggurat.translate.ctranslate2 import CTranslate2Translator

    translator = CTranslate2Translator(folder, device="cpu", threads=1)
    yield from _translations(translator)
    yield from _tokenizer_parts(translator.source_tokenizer)


def _read_onnx(folder: Path) -> Iterator[object]:
    from ziggurat.exchange.onnx_runtime import load_onnx

    yield from _translations(load_onnx(folder, threads=1))


def _read_huggingface(folder: Path) -> Iterator[object]:
    from ziggurat.exchange.import_huggingface import read_huggingface

    model = read_huggingface(folder, [], None)
    tensors = model.tensors()
    for name in sorted(tensors):
        yield from (name, tensors[name].contiguous().numpy().tobytes())
    yield (model.control, model.languages, dict(model.source_ids), dict(model.target_ids))
    for tokenizer in (model.source, model.target):
        yield from _tokenizer_parts(tokenizer)


def _translations(translator: Any) -> Iterator[object]:
    yield translator.decoding.model_dump(mode="json")
    for translation in translator.translate(SENTENCES):
        yield [(h.text, round(h.score, 4), h.finished) for h in translation.hypotheses]


READERS: dict[str, Callable[[Path], Iterator[object]]] = {
    "store": _read_store,
    "store-beside": _read_store_beside,
    "checkpoint": _read_checkpoint,
    "model": _read_model,
    "ctranslate2": _read_ctranslate2,
    "huggingface": _read_huggingface,
    "onnx": _read_onnx,
}


def subjects(folder: Path, *, exports: bool = True) -> list[Subject]:
    """Prepare, train, grow, average, export and import tiny models below `folder`; return everything to damage."""
    from ziggurat.data.babel import generate
    from ziggurat.data.prepare import prepare
    from ziggurat.exchange.exporter import export_model
    from ziggurat.exchange.importer import import_checkpoint
    from ziggurat.train.growth import grow_model
    from ziggurat.train.loop import train

    for split, first, count in (("train", 0, 300), ("dev", 300, 10)):
        pairs = list(generate(first + count, seed=5))[first:]
        for side, language in enumerate(("qlo", "qhi")):
            (folder / f"{split}.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), "utf-8")
    experiment = _experiment(folder)
    prepare(experiment.data)
    run = folder / "run"
    train(run, experiment)
    grow_model(run, folder / "grown", layers=4, strategy="g_top")
    found = [
        Subject("store", "store", folder / "store"),
        Subject("store, verified beside training", "store-beside", folder / "store"),
        Subject("checkpoint", "checkpoint", (run / "last").resolve()),
        Subject("averaged", "model", run / "averaged"),
        Subject("kept stage", "model", next((run / "stages").iterdir())),
        Subject("grown", "model", folder / "grown"),
    ]
    if not exports:
        return found
    readers = {"ziggurat": "model", "plain": "model", "ctranslate2": "ctranslate2", "onnx": "onnx"}
    _make_ending(run, folder / "ending")
    for target, reader in {**readers, "huggingface": "huggingface"}.items():
        out = folder / f"export-{target}"
        export_model(folder / "ending", target, out, lines=4)
        found.append(Subject(f"export {target}", reader, out))
    import_checkpoint(folder / "export-huggingface", folder / "imported")
    return [*found, Subject("imported", "model", folder / "imported")]


def _make_ending(run: Path, out: Path) -> None:
    """Write a model directory whose translations end, as an export requires; six updates do not teach that."""
    import torch

    from ziggurat.data.subword import load_tokenizers
    from ziggurat.model.directory import open_model, write_model_directory
    from ziggurat.model.tensors import weights

    opened = open_model(run)
    _, target = load_tokenizers(opened.directory)
    output = opened.model.output
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in opened.model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        output.weight *= 4.0  # type: ignore[operator]
        output.bias[target.eos] += 8.0  # type: ignore[index,operator]
        output.bias[[target.pad, target.bos]] = -1e4  # type: ignore[index]
    write_model_directory(out, weights(opened.model), opened.experiment, run)


def _experiment(folder: Path) -> Any:
    from ziggurat.config import Experiment

    corpora = {
        split: [{"source": str(folder / f"{split}.qlo"), "target": str(folder / f"{split}.qhi")}]
        for split in ("train", "dev")
    }
    return Experiment.model_validate(
        {
            "data": {
                "source_language": "qlo",
                "target_language": "qhi",
                "store": str(folder / "store"),
                "subword": {"vocabulary_size": 400, "regularisation": {}},
                **corpora,
            },
            "model": {
                "d_model": 16,
                "d_ff": 32,
                "heads": 2,
                "encoder": {"layers": 2},
                "decoder": {"layers": 1},
                "embedding": {"output_bias": True, "sharing": "none"},
            },
            "training": {
                "batch": {"max_tokens": 400},
                "schedule": {"peak": 3e-3, "warmup_updates": 4},
                "validation": {"every_updates": 1000},
                "checkpoint": {"every_updates": 2, "average_last": 2},
                "growth": {"stages": [{"layers": 1, "updates": 2}]},
                "stop": {"updates": 6},
                "tensorboard": False,
                "diagnostics": {"every_updates": None},
            },
            "decoding": {"max_length": {"ratio": 0.0, "extra": 12, "limit": 12}, "length_penalty": {"alpha": 0.0}},
        }
    )


def main(arguments: list[str]) -> int:
    """Run the campaign and print its table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--per-file", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flips-"))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in subjects(folder) if options.only is None or s.kind in options.only]
    counts = campaign(chosen, per_file=options.per_file, seed=options.seed)
    if options.folder is None:
        shutil.rmtree(folder)
    print("| damaged | tried | refused | no effect | silent | file not named | internal error | crash or hang |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, c in counts.items():
        bad = [len(found) for found in (c.silent, c.unnamed, c.internal, c.crashed)]
        print(f"| {kind} | {c.tried} | {c.refused} | {c.harmless} | {' | '.join(map(str, bad))} |")
    failures = [f"{kind}: {said}" for kind, count in counts.items() for said in count.failures]
    print("\n".join(failures))
    print(json.dumps({kind: asdict(count) for kind, count in counts.items()}))
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _serve(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:]))

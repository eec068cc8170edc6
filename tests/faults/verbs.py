"""Every verb that writes, as a command on a tiny corpus, store or run: what exists before it, and what is typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.small import merged

UPDATES = 8
"""UPDATES is the number of updates of a disturbed run."""
_GROUND_UPDATES = 60
"""_GROUND_UPDATES is that of the run from which other verbs start: most of its translations end."""

_TRAINING: dict[str, Any] = {
    "threads": 1,
    "batch": {"max_tokens": 120},
    "stop": {"updates": UPDATES},
    "checkpoint": {"every_updates": 2, "keep_last": 2, "average_last": 2, "asynchronous": False},
    "validation": {"every_updates": 4, "decode": False},
    "log_every_updates": 3,
}


def _settings(**changes: Any) -> dict[str, Any]:
    return merged(_TRAINING, changes)


TRAININGS: dict[str, dict[str, Any]] = {
    "train": _settings(diagnostics={"every_updates": 4, "max_share": None}),
    "train-asynchronous": _settings(checkpoint={"asynchronous": True}),
    "train-growth": _settings(growth={"stages": [{"layers": 1, "updates": 3}], "moments": "copy"}),
    "train-roll-back": _settings(
        divergence={"action": "roll_back", "loss_spike": 1.0001, "window": 2},
        patience={"non_finite": 1},
        checkpoint={"keep_last": 9},
    ),
}
"""TRAININGS are sections `training` for runs that are disturbed from their start."""

GROUND_TRAINING = _settings(
    stop={"updates": _GROUND_UPDATES},
    batch={"max_tokens": 400},
    schedule={"peak": 1e-2, "warmup_updates": 10},
    validation={"every_updates": 20},
    checkpoint={"every_updates": 20},
)


@dataclass(frozen=True)
class Verb:
    """A command and its starting point.

    Attributes:
        arguments: what is typed.
        again: what is typed after it was killed or failed; None: the same. It gets the folder.
        ground: parts made by the Ground that exist beforehand.
        before: commands that make the rest of what exists beforehand.
        preload: modules that the command imports late, for the waiting process.
        prepare: called in the child before the command (tests/faults/nursery.py).
        trains: whether it is training, which resumes in its own folder after an error.
        timed: files that record how long something took; they need only exist.
        parts: prefixes of paths that may be incomplete after an error, since the same command resumes from them.
    """

    arguments: tuple[str, ...]
    again: Callable[[Path], tuple[str, ...]] | None = None
    ground: tuple[str, ...] = ("run", "store")
    before: tuple[tuple[str, ...], ...] = ()
    preload: tuple[str, ...] = ()
    prepare: str = ""
    trains: bool = False
    timed: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def goes_on(self, name: str) -> bool:
        """Return whether the repeated command resumes from a file of this name."""
        return name.startswith(self.parts) if self.parts else False

    def retyped(self, folder: Path) -> tuple[str, ...]:
        """Return what is typed in `folder` after the command did not succeed."""
        return self.arguments if self.again is None else self.again(folder)


def _resumed(folder: Path) -> tuple[str, ...]:
    """The command that a user types after training was killed: `--resume` once there is a run."""
    return ("train", "--run", "new", "--resume")


def _train(name: str) -> Verb:
    arguments = ("train", f"{name}.yaml", "--run", "new")
    return Verb(
        arguments,
        lambda folder: _resumed(folder) if (folder / "new" / "checkpoints").is_dir() else arguments,
        ("store", f"{name}.yaml"),
        preload=TORCH,
        trains=True,
    )


TORCH = (
    *("torch._dynamo", "ziggurat.train.loop", "ziggurat.train.run", "ziggurat.train.setup"),
    "tests.conftest",
)
_REPORT = (
    "ziggurat.inspect.report.content",
    "ziggurat.inspect.report.page",
    "ziggurat.inspect.report.runs",
    "ziggurat.inspect.report.drawing",
)
_TRANSLATE = ("ziggurat.translate.translator", "ziggurat.evaluate.scores")
_HERE = (*TORCH, "tests.faults.ground", "tests.corpora.synthesis.conftest")  # for `in_one_process`
_EXPORT = ("ziggurat.exchange.exporter", "ziggurat.exchange.importer")
_SCORED = ("--reference", "text", "-o", "out", "--metrics", "chrf")
_SMALL_DEMO = (
    *("model.d_model=16", "model.d_ff=32", "model.heads=2", "model.encoder.layers=1", "model.decoder.layers=1"),
    *("data.subword.vocabulary_size=400", "training.batch.max_tokens=200", "training.threads=1"),
    *("training.stop.updates=4", "training.checkpoint.every_updates=2", "training.validation.every_updates=4"),
    *("training.validation.max_sentences=2", "training.diagnostics.every_updates=null"),
    *("training.tensorboard=false", "decoding.max_length.extra=5"),
)
_MORE_UPDATES = ("train", "--run", "run", "--resume", f"training.stop.updates={_GROUND_UPDATES + 6}")

_FETCH = ("fetch", "origin/my.yaml", "--registry", "origin/registry.yaml", "--cache", "cache")
_FETCHING = (
    *(
        "ziggurat.corpora.fetch.pairs",
        "ziggurat.corpora.fetch.downloads",
        "ziggurat.corpora.fetch.indexes",
        "pyarrow",
        "sacrebleu.dataset",
    ),
    "tests.corpora.fetch.server",
)

VERBS: dict[str, Verb] = {
    # What was downloaded stays, and so does a complete set.
    "fetch": Verb(
        _FETCH,
        ground=("origin",),
        parts=("cache", "data"),
        prepare="tests.faults.ground:with_a_server",
        preload=_FETCHING,
    ),
    "fetch-force": Verb(
        (*_FETCH, "--force"),
        ground=("origin",),
        before=(_FETCH,),
        parts=("cache", "data"),
        prepare="tests.faults.ground:with_a_server",
        preload=_FETCHING,
    ),
    "prepare": Verb(("prepare", "tiny.yaml"), ground=("corpus", "tiny.yaml")),
    "prepare-force": Verb(
        ("prepare", "tiny.yaml", "data.subword.vocabulary_size=380", "--force"),
        ground=("corpus", "store", "tiny.yaml"),
    ),
    "prepare-labels": Verb(("prepare", "tiny.yaml", "data.train.0.weight=2"), ground=("corpus", "store", "tiny.yaml")),
    "prepare-job": Verb(
        ("bulk", "--job", "job", "prepare", "tiny.yaml"),
        ground=("corpus", "tiny.yaml"),
        parts=("job",),
        prepare="tests.faults.ground:in_one_process",
        preload=(*_HERE, "ziggurat.corpora.jobs.preparation"),
    ),
    **{name: _train(name) for name in TRAININGS},
    "train-resumed": Verb(
        _MORE_UPDATES,
        lambda folder: _MORE_UPDATES,
        preload=TORCH,
        trains=True,
    ),
    "average": Verb(("average", "run", "--last", "1"), preload=TORCH),
    "average-out": Verb(("average", "run", "--last", "2", "--out", "out"), preload=TORCH),
    "average-replacing": Verb(
        ("average", "run", "--last", "2", "--out", "out", "--force"),
        before=(("average", "run", "--last", "1", "--out", "out"),),
        preload=TORCH,
    ),
    "grow": Verb(("grow", "run", "--layers", "3", "--out", "out"), preload=TORCH),
    "grow-force": Verb(
        ("grow", "run", "--layers", "4", "--out", "out", "--force"),
        before=(("grow", "run", "--layers", "3", "--out", "out"),),
        preload=TORCH,
    ),
    "diagnose": Verb(("diagnose", "run"), preload=(*TORCH, "ziggurat.inspect.diagnose")),
    "diagnose-again": Verb(
        ("diagnose", "run"), before=(("diagnose", "run"),), preload=(*TORCH, "ziggurat.inspect.diagnose")
    ),
    "report": Verb(
        ("report", "run", "--translations", "2"), preload=(*TORCH, *_REPORT, *_TRANSLATE), parts=("run/translations",)
    ),
    "report-figures": Verb(
        ("report", "run", "--translations", "0", "--out", "page.html", "--figures", "figures", "--format", "svg"),
        preload=(*TORCH, *_REPORT),
        parts=("page.html", "figures"),
    ),
    "translate": Verb(
        ("translate", "run", "-i", "text", "-o", "out"), ground=("run", "text"), preload=(*TORCH, *_TRANSLATE)
    ),
    "translate-replacing": Verb(
        ("translate", "run", "-i", "text", "-o", "out", "beam_size=2"),
        ground=("run", "text"),
        before=(("translate", "run", "-i", "text", "-o", "out", "beam_size=1"),),
        preload=(*TORCH, *_TRANSLATE),
    ),
    "translate-job": Verb(
        ("bulk", "--job", "job", "--shard-lines", "5", "translate", "run", "-i", "text", "-o", "out"),
        ground=("run", "text"),
        parts=("job",),
        prepare="tests.faults.ground:in_one_process",
        preload=(*_HERE, *_TRANSLATE, "ziggurat.corpora.jobs.tasks"),
    ),
    "score": Verb(
        ("score", "run", "--source", "text", "--target", "text", "-o", "out"),
        ground=("run", "text"),
        preload=(*TORCH, *_TRANSLATE),
    ),
    "translate-document": Verb(
        ("translate", "run", "--document", "page.html", "-o", "out.html"),
        ground=("run", "page.html"),
        preload=(*TORCH, *_TRANSLATE, "ziggurat.serve.text.documents.kinds", "sentencex"),
    ),
    "evaluate": Verb(
        ("evaluate", "run", "--source", "text", *_SCORED),
        ground=("run", "text"),
        preload=(*TORCH, *_TRANSLATE),
    ),
    "compare": Verb(
        ("compare", "a=run", "b=text", "--source", "text", *_SCORED),
        ground=("run", "text"),
        preload=(*TORCH, *_TRANSLATE, "ziggurat.cli.compare"),
    ),
    "perturb": Verb(
        (
            *("perturb", "run", "--source", "text", "--reference", "text", "--metrics", "chrf", "--kinds", "emoji"),
            *("--page", "page.html"),
        ),
        ground=("run", "text"),
        timed=("page.html",),
        preload=(*TORCH, *_TRANSLATE, "ziggurat.inspect.report.page"),
    ),
    "backtranslate": Verb(
        ("bulk", "--shard-lines", "5", "--workers", "1", "backtranslate", "run", "-i", "text", "-o", "out"),
        ground=("run", "text"),
        parts=("out",),
        prepare="tests.faults.ground:in_one_process",
        preload=(*_HERE, *_TRANSLATE, "ziggurat.corpora.synthesis.backtranslation", "ziggurat.corpora.jobs.launchers"),
    ),
    "backtranslate-merge": Verb(
        ("bulk", "--shard-lines", "5", "--merge", "backtranslate", "run", "-i", "text", "-o", "out"),
        ground=("run", "text"),
        before=tuple(
            ("bulk", "--shard-lines", "5", "--shard", part, "backtranslate", "run", "-i", "text", "-o", "out")
            for part in ("1/2", "2/2")
        ),
        parts=("out",),
        prepare="tests.faults.ground:in_one_process",
        preload=(*_HERE, *_TRANSLATE, "ziggurat.corpora.synthesis.backtranslation", "ziggurat.corpora.jobs.launchers"),
    ),
    "filter": Verb(
        (
            *("bulk", "--shard-lines", "5", "--workers", "1"),
            *("filter", "run", "--source", "text", "--target", "text", "-o", "out"),
        ),
        ground=("run", "text"),
        parts=("out",),
        prepare="tests.faults.ground:in_one_process",
        preload=(*_HERE, *_TRANSLATE, "ziggurat.corpora.synthesis.cross_entropy", "ziggurat.corpora.jobs.launchers"),
    ),
    "shortlist": Verb(("shortlist", "store", "-o", "out"), ground=("store",)),
    "align": Verb(
        ("align", "corpus/train.qlo", "corpus/train.qhi", "-o", "out", "--save-model", "model"),
        ground=("corpus",),
        parts=("model",),
        preload=("ziggurat.data.aligner", "ziggurat.data.readers"),
    ),
    "align-job": Verb(
        (
            *("bulk", "--job", "job", "align", "corpus/train.qlo", "corpus/train.qhi", "-o", "out"),
            *("--hmm-iterations", "1"),
        ),
        ground=("corpus",),
        parts=("job",),
        prepare="tests.faults.ground:in_one_process",
        preload=(*_HERE, "ziggurat.data.aligner", "ziggurat.data.readers", "ziggurat.corpora.jobs.tasks"),
    ),
    "inspect-suggest": Verb(
        ("inspect", "post.yaml", "--no-cost", "--updates", "10", "--suggest", "out"),
        ground=("store", "post.yaml"),
        preload=(*TORCH, "ziggurat.inspect.check"),
    ),
    "tune": Verb(
        ("tune", "tiny.yaml", "--depths", "1-1", "--rates", "1e-3", "--updates", "10", "--out", "out"),
        ground=("store", "tiny.yaml"),
        preload=(*TORCH, "ziggurat.inspect.tuning"),
    ),
    "demo": Verb(
        ("demo", "--folder", "demo", *_SMALL_DEMO),
        ground=(),
        prepare="tests.faults.ground:on_a_small_corpus",
        timed=("report.html",),
        trains=True,
        preload=(*TORCH, *_TRANSLATE, *_REPORT),
    ),
}
"""VERBS are the verbs by name; EXPORTS are those that need other toolkits."""

_HUB = ("export", "run", "--to", "huggingface", "--out", "hub", "--lines", "4")
_SERVED = ("export", "run", "--to", "ctranslate2", "--out", "out", "--lines", "4")
EXPORTS: dict[str, Verb] = {
    **{
        f"export-{target}": Verb(
            ("export", "run", "--to", target, "--out", "out", "--lines", "4"),
            ground=("run", "store", *(["graphs"] if target == "onnx" else [])),
            prepare="tests.faults.ground:on_ready_graphs" if target == "onnx" else "",
            preload=(*TORCH, *_EXPORT, *modules),
        )
        for target, modules in {
            "plain": ("onnxruntime",),
            "ctranslate2": ("ctranslate2",),
            "argos": ("ctranslate2",),
            "huggingface": ("transformers",),
            "onnx": ("onnx", "onnxruntime", "onnxscript", "torch.onnx"),
        }.items()
    },
    "export-replacing": Verb(
        (*_SERVED, "--force"),
        before=((*_SERVED, "--quantization", "int8"),),
        preload=(*TORCH, *_EXPORT, "ctranslate2"),
    ),
    "import-huggingface": Verb(
        ("import", "hub", "--out", "out"), before=(_HUB,), preload=(*TORCH, *_EXPORT, "transformers")
    ),
    "import-fairseq": Verb(
        ("import", "fairseq/checkpoint.pt", "--out", "out", "--dictionary", "fairseq/dict.txt"),
        ground=("fairseq",),
        preload=(*TORCH, *_EXPORT),
    ),
}
"""EXPORTS are the verbs that write or read the folders of other toolkits, by name."""

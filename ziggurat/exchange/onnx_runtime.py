"""Translation with ONNX models and ziggurat's own search: onnxruntime computes, `OnnxScorer` keeps the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ziggurat.config import load_experiment
from ziggurat.config.load import change_section
from ziggurat.data.subword import load_tokenizers
from ziggurat.exchange.onnx import ENCODER_FILE, FORMAT, MANIFEST_FILE, STEP_FILE
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import CheckpointError, ConfigError, printable
from ziggurat.system.files import check_folder
from ziggurat.system.small_files import JsonForm, read_json
from ziggurat.translate.translator import Translator

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class ManifestPort(JsonForm):
    """A tensor in the manifest (ziggurat.exchange.onnx.Port)."""

    name: str
    shape: list[Annotated[int, Field(ge=1, le=1 << 24)] | Literal["sentences", "beams", "source", "steps"]]
    initial: str | None = None


class OnnxManifest(JsonForm):
    """Description of the two graphs.

    Attributes:
        format: version of the graphs.
        vocabulary_size: number of target tokens.
        max_positions: longest source and target, in tokens, end-of-sentence included; None: no limit.
        memory: results of the encoder.
        states: tensors passed from step to step; inputs `state.NAME`, outputs `next.NAME`.
    """

    format: int
    vocabulary_size: int = Field(ge=1)
    max_positions: int | None = Field(ge=1)
    memory: list[ManifestPort]
    states: list[ManifestPort]


class OnnxModel(NamedTuple):
    """Two graphs ready to run, (source, source_mask) -> memory and one step, with their manifest."""

    encoder: InferenceSession
    step: InferenceSession
    manifest: OnnxManifest


def open_onnx(directory: str | Path, *, threads: int | None = None) -> OnnxModel:
    """Open a folder written by `ziggurat export --to onnx`, on the CPU.

    Args:
        directory: the folder.
        threads: threads of each operator; None: as many as torch has.

    Raises ConfigError if onnxruntime is missing, CheckpointError if files are missing or damaged, or have a different
    format.
    """
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError("an ONNX model needs onnxruntime: pip install 'ziggurat-mt[export]'") from None
    folder = Path(directory)
    check_folder(folder)
    manifest = _read_manifest(folder / MANIFEST_FILE)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    # Errors only; warnings about graph optimisation would go to standard error.
    options.log_severity_level = 3
    sessions = {}
    for name in (ENCODER_FILE, STEP_FILE):
        if not (folder / name).is_file():  # onnxruntime would wait forever on a pipe
            raise CheckpointError(f"{folder / name}: cannot be opened: no such file, or not a regular one")
        try:
            sessions[name] = onnxruntime.InferenceSession(folder / name, options, ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's error classes have no other public base
            raise CheckpointError(f"{folder / name}: cannot be opened: {error}") from None
    _refuse_other_graphs(folder, manifest, sessions[ENCODER_FILE], sessions[STEP_FILE])
    return OnnxModel(sessions[ENCODER_FILE], sessions[STEP_FILE], manifest)


def _refuse_other_graphs(
    folder: Path, manifest: OnnxManifest, encoder: InferenceSession, step: InferenceSession
) -> None:
    """Raise CheckpointError unless the graphs have the inputs and outputs of the manifest."""
    memory, states = {port.name for port in manifest.memory}, [port.name for port in manifest.states]
    first = {port.initial for port in manifest.states if port.initial is not None}
    for name, needed, there in (
        (ENCODER_FILE, memory | first, {node.name for node in encoder.get_outputs()}),
        (STEP_FILE, memory | {f"state.{s}" for s in states}, {node.name for node in step.get_inputs()}),
        (STEP_FILE, {"logits", *(f"next.{s}" for s in states)}, {node.name for node in step.get_outputs()}),
    ):
        if missing := needed - there:
            lacks = printable(min(str(part) for part in missing))
            raise CheckpointError(
                f"{folder / name}: has no {lacks}, which {MANIFEST_FILE} names; export the model again"
            )


def load_onnx(directory: str | Path, *, threads: int | None = None, **decoding: Any) -> Translator:
    """Open a folder written by `ziggurat export --to onnx`, for translation.

    Args:
        directory: the folder.
        threads: threads of each operator; None: as many as torch has.
        decoding: keys of the `decoding` section that replace the saved ones; the graphs' only precision is float32.

    Raises the errors of open_onnx and of ziggurat.translate.translator.load_translator.
    """
    if (wanted := decoding.get("precision", "float32")) not in ("float32", "auto"):
        raise ConfigError(
            f"`decoding.precision: {printable(str(wanted))}`: an ONNX export computes in float32; leave it out, or "
            "translate with the model that was exported"
        )
    model = open_onnx(directory, threads=threads)
    experiment = load_experiment(Path(directory) / CONFIG_FILE)
    settings = change_section(experiment.decoding, {**decoding, "precision": "float32"}, "decoding")
    if settings.shortlist is not None:
        raise ConfigError("`decoding.shortlist` does not work with ONNX; set it to null")
    source, target = load_tokenizers(directory)
    if target.size != (size := model.manifest.vocabulary_size):
        raise CheckpointError(f"{directory}: the vocabulary has {target.size} pieces, the graphs {size}; export again")
    return Translator(
        (),
        source,
        target,
        settings,
        max_positions=model.manifest.max_positions,
        origin=f"{directory}: ONNX",
        target_language=experiment.data.target_language,
        scorer=lambda: OnnxScorer(model),
    )


def _read_manifest(path: Path) -> OnnxManifest:
    try:
        manifest = read_json(path, OnnxManifest, error=CheckpointError, remedy="export the model again")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: No such file; not a folder of `ziggurat export --to onnx`") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.format}, but this version of Ziggurat reads {FORMAT}; export again"
        )
    return manifest


class OnnxScorer:
    """Scorer (ziggurat.translate.scorers.Scorer) of an exported model.

    Sentences are the rows of every tensor, beams the second axis of states. A sentence that entered later has taken
    fewer steps: its keys and values fill only the first entries of the axis `steps`.

    Args:
        model: a model opened by open_onnx.
    """

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.manifest = model.manifest
        self.vocabulary_size = model.manifest.vocabulary_size
        self.attention: Tensor | None = None
        self.start(1, 0)

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Start without sentences; each will have `beam_size` beams. `slots` is not used."""
        self._beams = beam_size
        self._keep_attention = keep_attention
        self.attention = None
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._memory = [self._zeros(port, 0) for port in self.manifest.memory]
        self._states = [self._zeros(port, 0) for port in self.manifest.states]

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Encode source ids [n, S] (mask: True at real tokens) of new sentences, and append them to the batch.

        Each may then take `max_steps` steps. Raises ConfigError if the graphs have fewer positions.
        """
        limit = self.manifest.max_positions
        if limit is not None and max(source.shape[1], max_steps) > limit:
            raise ConfigError(
                f"the exported model has {limit} positions, but {max(source.shape[1], max_steps)} are needed; lower "
                "`decoding.max_source_pieces` and `decoding.max_length.limit`"
            )
        outputs = _run(self.model.encoder, None, {"source": source, "source_mask": source_mask})
        names = [node.name for node in self.model.encoder.get_outputs()]
        given = dict(zip(names, map(torch.from_numpy, outputs), strict=True))
        states = [
            self._zeros(port, len(source)) if port.initial is None else self._for_every_beam(given[port.initial])
            for port in self.manifest.states
        ]
        self._positions = torch.cat([self._positions, self._positions.new_zeros(len(source))])
        self._mask = _below(self._mask, source_mask)
        memory = [given[port.name] for port in self.manifest.memory]
        self._memory = [_below(old, new) for old, new in zip(self._memory, memory, strict=True)]
        # New sentences have no steps yet: their states are padded with zeros to the longest.
        self._states = [_below(old, new) for old, new in zip(self._states, states, strict=True)]

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [N, K, V] of the token after `tokens` [N, K]; each sentence advances by one position."""
        inputs = {"tokens": tokens, "positions": self._positions, "source_mask": self._mask}
        inputs |= {port.name: part for port, part in zip(self.manifest.memory, self._memory, strict=True)}
        inputs |= {f"state.{port.name}": part for port, part in zip(self.manifest.states, self._states, strict=True)}
        wanted = ["logits", *(f"next.{port.name}" for port in self.manifest.states)]
        wanted += ["attention"] if self._keep_attention else []
        logits, *rest = map(torch.from_numpy, _run(self.model.step, wanted, inputs))
        self.attention = rest.pop() if self._keep_attention else None
        self._states = rest
        self._positions = self._positions + 1
        return logits

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam `parents`[i, k]; [N, K]."""
        if self._beams == 1 or not len(parents):
            return
        rows = (parents + torch.arange(len(parents))[:, None] * self._beams).flatten()
        # Comparing is cheaper than copying all states: often every beam continues itself.
        if not torch.equal(rows, torch.arange(len(rows))):
            self._states = [part.flatten(0, 1).index_select(0, rows).view_as(part) for part in self._states]

    def keep(self, sentences: Tensor) -> None:
        """Make row i of the batch the old row `sentences`[i]; [N']."""
        self._positions = self._positions[sentences]
        self._mask = self._mask[sentences]
        self._memory = [part.index_select(0, sentences) for part in self._memory]
        # When the longest sentence leaves, the axis `steps` shrinks.
        longest = int(self._positions.max()) if len(sentences) else 0
        self._states = [
            _first_steps(part, port, longest).index_select(0, sentences)
            for port, part in zip(self.manifest.states, self._states, strict=True)
        ]

    def _zeros(self, port: ManifestPort, sentences: int) -> Tensor:
        sizes = {"sentences": sentences, "beams": self._beams, "source": 0, "steps": 0}
        return torch.zeros([sizes[size] if isinstance(size, str) else size for size in port.shape])

    def _for_every_beam(self, initial: Tensor) -> Tensor:
        return initial.unsqueeze(1).repeat_interleave(self._beams, dim=1)


def _run(graph: InferenceSession, wanted: Sequence[str] | None, inputs: Mapping[str, Tensor]) -> list[Any]:
    """Return the outputs of a graph. Raises CheckpointError if its manifest does not describe it."""
    given = {name: part.contiguous().numpy() for name, part in inputs.items()}
    try:
        return list(graph.run(wanted, given))
    except Exception as error:  # onnxruntime's error classes have no other public base
        raise CheckpointError(
            f"the exported graph cannot be run as {MANIFEST_FILE} describes it; export again ({error})"
        ) from None


def _first_steps(state: Tensor, port: ManifestPort, steps: int) -> Tensor:
    """Return the first `steps` positions of a state, or all of it if it does not grow with them."""
    return state.narrow(port.shape.index("steps"), 0, steps) if "steps" in port.shape else state


def _below(upper: Tensor, lower: Tensor) -> Tensor:
    """Return `lower` appended to `upper` along axis 0, each padded with zeros at the end of its other axes."""
    if upper.shape[1:] == lower.shape[1:]:
        return torch.cat([upper, lower])
    sizes = [max(pair) for pair in zip(upper.shape[1:], lower.shape[1:], strict=True)]
    return torch.cat([_filled(upper, sizes), _filled(lower, sizes)])


def _filled(x: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - have for size, have in zip(sizes, x.shape[1:], strict=True)]
    return F.pad(x, [amount for size in reversed(missing) for amount in (0, size)])

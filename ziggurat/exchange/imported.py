"""Other toolkits' models, prepared for a model directory.

An OPUS-MT model segments each side with its own SentencePiece model, but takes ids from a list of pieces shared by both
sides. Ziggurat's tokenizers take ids from the SentencePiece model itself, so the models are rewritten with all pieces
of the list; pieces that a model lacks are marked as unused, so that no segmentation contains them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.kinds import Sharing
from ziggurat.data.subword import MAX_MODEL_BYTES, SentencePieceTokenizer, Tokenizer, same_vocabulary
from ziggurat.exchange.agreement import Unmatched, VocabularySide, language_tokens, unmatched
from ziggurat.exchange.anatomy import Affine, Anatomy, AttentionMatrices, CellMatrices, LayerMatrices, compose
from ziggurat.system.compressed import byte_blocks, byte_stream
from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.system.small_files import JsonForm, check_regular, read_bounded

_MAPS = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"))


def layer_names(layer: LayerMatrices) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's parameters under fairseq's names, which the BART family shares; missing biases become zeros."""
    attentions = [("self_attn", layer.self_attn)]
    if layer.cross_attn is not None:
        attentions.append(("encoder_attn", layer.cross_attn))
    for name, attention in attentions:
        for theirs, ours in _MAPS:
            yield from _affine(f"{name}.{theirs}", getattr(attention, ours))
        yield from _affine(f"{name}_layer_norm", attention.norm)
    yield from _affine("fc1", layer.ffn_in)
    yield from _affine("fc2", layer.ffn_out)
    yield from _affine("final_layer_norm", layer.ffn_norm)


def layer_from(tensors: Mapping[str, Tensor], prefix: str, *, decoder: bool) -> LayerMatrices:
    """Return the layer whose parameter names start with `prefix`. Raises ExportError if one is missing."""
    attentions = []
    for name in ("self_attn", "encoder_attn")[: 1 + decoder]:
        query, key, value, out = (take(tensors, f"{prefix}.{name}.{theirs}") for theirs, _ in _MAPS)
        attentions.append(AttentionMatrices(query, key, value, out, (take(tensors, f"{prefix}.{name}_layer_norm"),)))
    return LayerMatrices(
        attentions[0],
        attentions[1] if decoder else None,
        take(tensors, f"{prefix}.fc1"),
        take(tensors, f"{prefix}.fc2"),
        (take(tensors, f"{prefix}.final_layer_norm"),),
    )


def take(tensors: Mapping[str, Tensor], name: str) -> Affine:
    """Return the map `name` in fp32. Raises ExportError if it is missing."""
    try:
        return Affine(tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float())
    except KeyError as error:
        raise ExportError(f"the checkpoint has no parameter {error.args[0]}; is it a plain Transformer?") from None


def _affine(name: str, affine: Affine) -> Iterable[tuple[str, Tensor]]:
    parameters = affine.named(name)
    parameters.setdefault(f"{name}.bias", affine.weight.new_zeros(affine.weight.shape[0]))
    return parameters.items()


ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu"}
"""Other toolkits' names of activations -> `model.activation`."""

MAX_POSITIONS = 16_384
"""MAX_POSITIONS is the maximum number of positions of an imported model, four times those of the longest known. The
whole table is computed, so a larger number in a file would fill the memory."""

NORM_EPSILON = 1e-5
"""NORM_EPSILON is the default of torch.nn.LayerNorm, which fairseq and transformers do not change."""

_UNKNOWN_LOGIT = -1e9
"""_UNKNOWN_LOGIT is the output bias of a token that the other toolkit lacks."""


@dataclass(frozen=True)
class ControlIds:
    """Ids of the other toolkit's control symbols; `first` is the decoder's first input."""

    pad: int
    unk: int
    eos: int
    first: int


@dataclass(frozen=True)
class ForeignModel:
    """A plain Transformer as another toolkit stored it.

    Attributes:
        kind: its toolkit and architecture, for messages.
        anatomy: its matrices, rows in the other toolkit's order.
        scaled: embeddings are multiplied by the square root of the width.
        source_ids, target_ids: the other toolkit's ids by piece.
        control: ids of its control symbols on the target side.
        source, target: ziggurat's tokenizers.
        languages: codes of source and target.
        decoding: the section `decoding` for the search that the other toolkit is configured to do.
        never: its ids that are ruled out before it normalises.
        source_control: ids of the control symbols on the source side; None: the same.
        alignment: the section `training.loss.alignment` for a head that was trained with word alignments; None: there
            is none.
        notes: settings of the other toolkit that have no effect here, for the user.
        unmatched: parts of its dictionary, segmenter and matrices without a counterpart in the others; set by
            `checked`.
    """

    kind: str
    anatomy: Anatomy
    scaled: bool
    source_ids: Mapping[str, int]
    target_ids: Mapping[str, int]
    control: ControlIds
    source: Tokenizer
    target: Tokenizer
    languages: tuple[str, str]
    decoding: Mapping[str, Any] = field(default_factory=lambda: {"length_penalty": {"kind": "power", "alpha": 1.0}})
    never: frozenset[int] = frozenset()
    source_control: ControlIds | None = None
    alignment: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()

    def checked(self, name: str) -> ForeignModel:
        """Return the model with its `unmatched` set, if its parts fit each other; `name` is its file, for errors.

        Raises ExportError for ids beyond the rows of a matrix, a matrix of the wrong shape, heads that do not divide
        it, or too many entries of the dictionary, segmenter or matrices without a counterpart.
        """
        reasons, sides = [], []
        for side, stack, ids in (
            ("source", self.anatomy.encoder, self.source_ids),
            ("target", self.anatomy.decoder, self.target_ids),
        ):
            rows, width = stack.embedding.shape
            tokenizer = self.source if side == "source" else self.target
            control = dataclasses.asdict(self.control if side == "target" else self.source_control or self.control)
            # The encoder never reads the decoder's first input.
            control = {key: control[key] for key in (control if side == "target" else ("pad", "unk", "eos"))}
            sides.append(VocabularySide(side, rows, ids, frozenset(control.values()), tokenizer))
            largest = max(ids.values(), default=-1)
            reasons += [
                f"{side}: the id of `{key}` is {number}, the matrix has rows 0 to {rows - 1:,}"
                for key, number in control.items()
                if not 0 <= number < rows
            ]
            if largest >= rows:
                reasons.append(f"{side}: the dictionary has {largest + 1:,} tokens, the model {rows:,}")
            if width % stack.heads:
                reasons.append(f"{side}: {stack.heads} heads do not divide the width {width}")
            if stack.positions is not None and (stack.positions.ndim != 2 or stack.positions.shape[1] != width):
                reasons.append(f"{side}: positions of shape {list(stack.positions.shape)} for the width {width}")
        output, decoder = self.anatomy.output, self.anatomy.decoder
        if output.weight.shape != decoder.embedding.shape:
            reasons.append(f"the output has shape {list(output.weight.shape)}, not {list(decoder.embedding.shape)}")
        elif output.bias is not None and output.bias.shape != output.weight.shape[:1]:
            reasons.append(f"the output's bias has shape {list(output.bias.shape)}")
        if reasons:
            raise ExportError(f"{name}: {'; '.join(reasons)}")
        found = unmatched(*sides)
        if too_many := [str(one) for one in found if one.too_many]:
            raise ExportError(
                f"{name}: its weights, dictionary and segmenter are not of one model: {'; '.join(too_many)}"
            )
        return dataclasses.replace(self, unmatched=tuple(found))

    def places(self) -> tuple[list[int | None], list[int | None]]:
        """Return the other toolkit's id for each id here, of source and target; None for a token that it lacks."""
        reading = self.source_control or self.control
        return _rows(self.source, self.source_ids, reading), _rows(self.target, self.target_ids, self.control)

    def sharing(self) -> Sharing:
        """Return which matrices of the other model are shared, where ziggurat's vocabularies allow it.

        Begin-of-sentence is a separate token in ziggurat's vocabularies. Its row is read as the decoder's first input,
        so it cannot also be written as another of their tokens, unless the bias rules that token out as it does in
        ziggurat's exports; and a shared matrix has one row per id.
        """
        encoder, decoder, output = self.anatomy.encoder, self.anatomy.decoder, self.anatomy.output
        start = _rows(self.target, self.target_ids, self.control)[self.target.bos]
        written = start not in (None, self.control.first)
        if written and output.bias is not None:
            written = float(output.bias[start]) > _UNKNOWN_LOGIT
        if output.weight is not decoder.embedding or written:
            return "none"
        joint = self.source_ids == self.target_ids and same_vocabulary(self.source, self.target)
        joint = joint and self.source_control in (None, self.control)
        return "all" if joint and encoder.embedding is decoder.embedding else "decoder"

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters under ziggurat's names, with every row where its tokenizers expect it.

        A token that the other model lacks is read as its unknown token and never written. The decoder's first input is
        an ordinary token of the other vocabulary (end-of-sentence or padding), but a separate token in ziggurat's.
        """
        encoder, decoder, output = self.anatomy.encoder, self.anatomy.decoder, self.anatomy.output
        # Rows of the other matrices for each of ziggurat's ids; None if there is no such token.
        reading = self.source_control or self.control
        read = _rows(self.source, self.source_ids, reading)
        target_read = _rows(self.target, self.target_ids, self.control)
        sharing = self.sharing()
        written = [row if row not in self.never else None for row in target_read]
        if sharing != "none":
            written[self.target.bos] = None
        target_read[self.target.bos] = self.control.first
        rows = torch.tensor([row is not None for row in written])
        known = torch.tensor([row or 0 for row in written])
        bias = torch.zeros(len(written)) if output.bias is None else output.bias[known]
        target_table = decoder.embedding[_filled(target_read, self.control.unk)]
        source_table = target_table if sharing == "all" else encoder.embedding[_filled(read, reading.unk)]
        # In a shared matrix, rows that are never written are still read; the bias rules them out.
        separate = torch.where(rows[:, None], output.weight[known], 0.0) if sharing == "none" else target_table
        anatomy = dataclasses.replace(
            self.anatomy,
            encoder=dataclasses.replace(encoder, embedding=source_table),
            decoder=dataclasses.replace(decoder, embedding=target_table),
            # -inf would make sums of biases NaN.
            output=Affine(separate, torch.where(rows, bias.clamp(min=_UNKNOWN_LOGIT), _UNKNOWN_LOGIT)),
        )
        return compose(anatomy)

    def _subword(self, out: str) -> dict[str, str]:
        """Return a section `data.subword` with which `prepare` uses the vocabularies of the model directory `out`."""
        if isinstance(self.source, SentencePieceTokenizer):
            return {"kind": "existing", "source_model": out}
        if self.source is self.target:
            return {"kind": "vocabulary", "source_vocabulary": f"{out}/joint.vocab"}
        return {"kind": "vocabulary", **{f"{side}_vocabulary": f"{out}/{side}.vocab" for side in ("source", "target")}}

    def experiment(self, out: str) -> Experiment:
        """Return the configuration of the model directory `out`."""
        encoder, decoder = self.anatomy.encoder, self.anatomy.decoder
        positions = encoder.positions
        stacks: dict[str, Any] = {
            name: {
                "layers": len(stack.layers),
                "layer_norm_epsilon": stack.epsilon,
                "ffn_depth": 2 + len(stack.layers[0].ffn_between),
            }
            for name, stack in (("encoder", encoder), ("decoder", decoder))
        }
        stacks["encoder"] |= {
            "residual": encoder.residual if encoder.residual != decoder.residual else None,
            "heads": encoder.heads,
            "d_ff": encoder.layers[0].ffn_in.weight.shape[0],
        }
        if isinstance(decoder.layers[0].own, CellMatrices):
            stacks["decoder"] |= {"attention": "ssru"}
        return Experiment.model_validate(
            {
                "data": {
                    "source_language": self.languages[0],
                    "target_language": self.languages[1],
                    "store": out,
                    "subword": self._subword(out),
                },
                "model": {
                    "d_model": decoder.embedding.shape[1],
                    "d_ff": decoder.layers[0].ffn_in.weight.shape[0],
                    "heads": decoder.heads,
                    "residual": decoder.residual,
                    "activation": self.anatomy.activation,
                    "norm": self.anatomy.norm,
                    "embedding": {
                        "sharing": self.sharing(),
                        "positions": "none" if positions is None else "learned",
                        "max_positions": 1 if positions is None else positions.shape[0],
                        "scale": self.scaled,
                        "output_bias": True,
                    },
                    **stacks,
                },
                "training": {"loss": {"alignment": self.alignment}},
                "decoding": self.decoding,
            }
        )


def _rows(tokenizer: Tokenizer, ids: Mapping[str, int], control: ControlIds) -> list[int | None]:
    """Return, for each of ziggurat's ids, the other toolkit's, or None."""
    rows = [ids.get(piece) for piece in tokenizer.pieces(range(tokenizer.size))]
    # Control symbols may be spelt differently there, so they are matched by purpose, not by piece.
    rows[tokenizer.pad], rows[tokenizer.unk], rows[tokenizer.eos] = control.pad, control.unk, control.eos
    # A row that is already end-of-sentence must not be used to write begin-of-sentence as well.
    if rows[tokenizer.bos] == control.eos:
        rows[tokenizer.bos] = None
    return rows


def _filled(rows: Sequence[int | None], unk: int) -> Tensor:
    """Return the rows, with the unknown token's row where one is None."""
    return torch.tensor([unk if row is None else row for row in rows])


def positions_from(first: int, count: int, width: int) -> Tensor:
    """Return sinusoids [count, width] of positions `first`, `first` + 1, ... in fp32 as fairseq and M2M100 do."""
    half = width // 2
    # Divided by half - 1, as in fairseq's code; Vaswani et al. divide by half.
    step = torch.log(torch.tensor(10000.0)) / (half - 1)
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -step)
    angles = torch.arange(first, first + count, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SpecialToken(JsonForm):
    """A token with its options, of which only the spelling matters here."""

    content: str


_Tokens = list[str | SpecialToken] | dict[str, str | SpecialToken] | None


class TokenizerConfig(JsonForm):
    """Vocabularies, languages and tags in tokenizer_config.json of transformers."""

    separate_vocabs: bool = False
    source_lang: str | None = None
    target_lang: str | None = None
    num_madeup_words: int = 8  # the default of M2M100's tokenizer
    additional_special_tokens: _Tokens = None
    extra_special_tokens: _Tokens = None
    """The same tokens, as transformers has written them since version 5."""

    def tags(self, ids: Mapping[str, int], models: Iterable[SentencePieceTokenizer]) -> list[str]:
        """Return the tokens of `ids`, in this order, that precede a text and that no text contains.

        They are language codes (`>>fra<<` in OPUS-MT, `__fr__` in fairseq's style) and special tokens that the
        SentencePiece models lack.
        """
        models = list(models)
        segmented = {piece for model in models for piece in model.pieces(range(model.size))}
        tags = {*language_tokens(ids, models), *(self._special() - segmented)}
        return [token for token in ids if token in tags]

    def unknown(self, ids: Mapping[str, int]) -> list[str]:
        """Return a note for the user on the special tokens that `ids` lacks; none if it has them all."""
        lost = sorted(self._special() - ids.keys())
        return [f"special tokens without an id in vocab.json, such as {printable(lost[0])}"] if lost else []

    def _special(self) -> set[str]:
        given = (self.additional_special_tokens, self.extra_special_tokens)
        found = [token for some in given for token in (some.values() if isinstance(some, dict) else some or ())]
        return {token if isinstance(token, str) else token.content for token in found}


def refuse_languages_apart(folder: Path, ids: Mapping[str, int], rows: int, made_up: int) -> None:
    """Raise ExportError for a model of M2M100 whose language codes are not in vocab.json.

    M2M100's tokenizer numbers them from the size of that list on; a padding of `made_up` rows follows them.

    Args:
        folder: the model, for the message.
        ids: its vocab.json.
        rows: rows of its embedding.
        made_up: `num_madeup_words` of its tokenizer.
    """
    if (apart := rows - len(ids)) > made_up:
        raise ExportError(
            f"{folder}: M2M100 with languages that models here do not support: its embedding has {apart:,} rows more "
            f"than vocab.json has pieces ({len(ids):,}), for codes such as __de__. transformers puts the source's code "
            "before the text and forces the target's code as the first token. Translate with transformers, for "
            "example a corpus to train a model on; or import an OPUS-MT model of the two languages"
        )


def with_vocabularies(
    source: SentencePieceTokenizer,
    target: SentencePieceTokenizer,
    source_ids: Mapping[str, int],
    target_ids: Mapping[str, int],
) -> tuple[SentencePieceTokenizer, SentencePieceTokenizer]:
    """Return tokenizers with an id for each piece of the other toolkit's vocabularies, `ids` by piece.

    Equal vocabularies become one, with equal ids on both sides; if the models are equal too, both sides share one
    tokenizer. Models whose segmentation SentencePiece cannot preserve stay unchanged: they lack the pieces that they
    never produce.
    """
    if source_ids != target_ids:
        alone = (_over_vocabulary([source], source_ids), _over_vocabulary([target], target_ids))
        return (alone[0] or [source])[0], (alone[1] or [target])[0]
    if source.model == target.model:
        joint = (_over_vocabulary([source], source_ids) or [source])[0]
        return joint, joint
    both = _over_vocabulary([source, target], source_ids) or [source, target]
    return both[0], both[1]


def _over_vocabulary(
    tokenizers: Sequence[SentencePieceTokenizer], ids: Mapping[str, int]
) -> list[SentencePieceTokenizer] | None:
    """Return tokenizers that segment as before, with an id for each piece of `ids`, and equal ids for equal pieces.

    `tokenizers` are one, or those of both sides, with equal tags; `ids` are the other toolkit's, whose order is kept.
    Returns None if SentencePiece cannot preserve the segmentation: for models that are not unigram models (a BPE model
    also uses pieces marked as unused as steps towards others), and models whose control symbols contradict each other.
    """
    from sentencepiece import sentencepiece_model_pb2 as written_form

    protos = [written_form.ModelProto.FromString(tokenizer.model) for tokenizer in tokenizers]  # type: ignore[attr-defined]
    if any(proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM for proto in protos):
        return None
    kinds = written_form.ModelProto.SentencePiece.Type  # type: ignore[attr-defined]
    special = (kinds.Value("CONTROL"), kinds.Value("UNKNOWN"))
    entries = [{entry.piece: (entry.score, entry.type) for entry in proto.pieces} for proto in protos]
    controls = {piece: kind for side in entries for piece, (_, kind) in side.items() if kind in special}
    for name in ("<pad>", "<s>", "</s>"):
        if name in ids and not any(name in side for side in entries):
            controls[name] = kinds.Value("CONTROL")
    if any(side[piece][1] != kind for side in entries for piece, kind in controls.items() if piece in side):
        return None
    pieces = _union(sorted(ids, key=ids.__getitem__), *entries, without=tokenizers[0].tags)
    made = []
    for proto, side, tokenizer in zip(protos, entries, tokenizers, strict=True):
        del proto.pieces[:]
        for piece in pieces:
            score, kind = side.get(piece, (0.0, controls.get(piece, kinds.Value("UNUSED"))))
            proto.pieces.add(piece=piece, score=score, type=kind)
        made.append(SentencePieceTokenizer(bytes(proto.SerializeToString()), tokenizer.unicode, list(tokenizer.tags)))
    return made if same_vocabulary(made[0], made[-1]) else None


def _union(*lists: Iterable[str], without: Iterable[str]) -> list[str]:
    """Return every piece once, in the order of the lists; SentencePiece does not allow an empty piece."""
    left_out = {"", *without}
    return [piece for piece in dict.fromkeys(piece for pieces in lists for piece in pieces) if piece not in left_out]


def read_file(path: Path, limit: int = MAX_MODEL_BYTES, *, remedy: str = "") -> bytes:
    """Return the bytes of a foreign model's file, at most `limit`, unpacked if its name ends in `.gz`.

    Raises DataError; `remedy` is the advice if the file is missing.
    """
    try:
        if path.suffix != ".gz":
            return read_bounded(path, limit)
        check_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file{remedy}") from None
    content = bytearray()
    for block in byte_blocks(path):
        content += block
        if len(content) > limit:
            raise DataError(f"{path}: unpacks to more than {limit / (1 << 20):,.1f} MiB, too much for such a file")
    return bytes(content)


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, unpacked if its name ends in `.gz`; none if it is not a regular file.

    Raises DataError if it cannot be read, or if it is a placeholder for a file that was not downloaded.
    """
    if not path.is_file():
        return b""
    with byte_stream(path) as stream:
        return stream.read(count)


def plain_suffix(path: Path) -> str:
    """Return a file name's suffix; for `vocab.spm.gz` the one before `.gz`."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_segmenter(path: Path, *, remedy: str = "") -> SentencePieceTokenizer:
    """Return the tokenizer of a SentencePiece model. Raises DataError naming the file."""
    content = read_file(path, remedy=remedy)
    try:
        return SentencePieceTokenizer(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None

"""Reader of plain Transformers of Marian, as OPUS-MT and others publish them beside what transformers reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from pydantic import Field

from ziggurat.data.subword import MAX_MODEL_BYTES, SentencePieceTokenizer, Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.exchange.imported import ControlIds, ForeignModel
from ziggurat.exchange.marian_anatomy import POSITIONS, marian_anatomy
from ziggurat.exchange.marian_files import find_files, read_ids, read_weights
from ziggurat.exchange.vocabularies import with_vocabularies
from ziggurat.system.errors import DataError
from ziggurat.system.small_files import Form, read_bounded, shaped


class _Search(Form):
    """What decoder.yml says about the search."""

    beam_size: int | None = Field(default=None, ge=1, le=10_000)
    normalize: float | int = Field(default=0, ge=0, le=10)
    word_penalty: float | int = 0


def read_marian(
    path: Path, dictionaries: Sequence[Path], models: Sequence[Path], languages: tuple[str, str] | None
) -> ForeignModel:
    """Read a model of Marian.

    Args:
        path: an .npz file, or a folder with one, such as an unpacked download of OPUS-MT.
        dictionaries: vocabularies of source and target, or one for both: SentencePiece models (.spm), .yml, .json or
            text; none: those that decoder.yml names.
        models: SentencePiece models of the two sides for vocabularies that are none; none: `source.spm` and
            `target.spm` beside the weights if they are there, else text is segmented already.
        languages: codes of source and target; None: `source` and `target`, since Marian's files do not say.

    Raises ExportError with all reasons why the model is not a plain Transformer; DataError: files missing or damaged.
    """
    files = find_files(path)
    arrays, given = read_weights(files.weights)
    anatomy = marian_anatomy(arrays, given, files.weights)
    vocabularies = list(dictionaries) or list(files.vocabularies)
    if not vocabularies:
        raise DataError(f"{files.weights}: name its vocabularies, of source and target, by `--dictionary`")
    beside = [files.weights.with_name(f"{side}.spm") for side in ("source", "target")]
    if not models and all(file.is_file() for file in beside):
        models = beside
    (source, source_ids), (target, target_ids) = _sides(vocabularies, models)
    pads = [stack.embedding.shape[0] - 1 for stack in (anatomy.encoder, anatomy.decoder)]
    controls = [
        ControlIds(pad, *_control(ids, vocabulary), pad)
        for pad, ids, vocabulary in zip(
            pads, (source_ids, target_ids), (vocabularies[0], vocabularies[-1]), strict=True
        )
    ]
    search = {key.replace("-", "_"): value for key, value in files.options.items()}
    found = shaped(search, _Search, f"{files.weights}: its decoder.yml has")
    return ForeignModel(
        kind="marian",
        anatomy=anatomy,
        scaled=anatomy.encoder.scale != 1.0,
        source_ids=source_ids,
        target_ids=target_ids,
        control=controls[1],
        source_control=controls[0],
        source=source,
        target=target,
        languages=languages or ("source", "target"),
        decoding=_decoding(found),
        never=frozenset([pads[1]]),
        notes=(f"word-penalty: {found.word_penalty}",) if found.word_penalty else (),
    ).checked(str(files.weights))


def _sides(
    vocabularies: Sequence[Path], models: Sequence[Path]
) -> tuple[tuple[Tokenizer, dict[str, int]], tuple[Tokenizer, dict[str, int]]]:
    """Return the tokenizer and the other toolkit's ids of each side; one vocabulary gives one tokenizer."""
    files = (vocabularies[0], vocabularies[-1])
    if files[0].suffix == files[1].suffix == ".spm":
        read = [_tokenizer(file, []) for file in files]
        ids = [{piece: number for number, piece in enumerate(_pieces(tokenizer))} for tokenizer in read]
        joint = read[0].model == read[1].model
        return (read[0], ids[0]), (read[0] if joint else read[1], ids[1])
    source_ids, target_ids = (read_ids(file) for file in files)
    if not models:
        listed = [VocabularyTokenizer(_listed(ids)) for ids in (source_ids, target_ids)]
        return (listed[0], source_ids), (listed[0] if source_ids == target_ids else listed[1], target_ids)
    tags = [token for token in source_ids if (token[:2], token[-2:]) == (">>", "<<")]  # OPUS-MT: >>fra<<
    source, target = with_vocabularies(
        _tokenizer(models[0], tags), _tokenizer(models[-1], tags), source_ids, target_ids
    )
    return (source, source_ids), (target, target_ids)


def _tokenizer(path: Path, tags: list[str]) -> SentencePieceTokenizer:
    try:
        return SentencePieceTokenizer(read_bounded(path, MAX_MODEL_BYTES), tags=tags)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except DataError as error:
        raise DataError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _pieces(tokenizer: SentencePieceTokenizer) -> list[str]:
    """Return the pieces of the SentencePiece model itself, whose places are Marian's ids."""
    count = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).get_piece_size()
    return tokenizer.pieces(range(count))


def _listed(ids: Mapping[str, int]) -> bytes:
    """Return a vocabulary as text, a token per line in the order of ids."""
    return "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__)).encode()


def _control(ids: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Return the ids of the unknown token and of end-of-sentence, which Nematus called `UNK` and `eos`."""
    unk, eos = ids.get("<unk>", ids.get("UNK")), ids.get("</s>", ids.get("eos"))
    if unk is None or eos is None:
        raise DataError(f"{path}: has no {'<unk>' if unk is None else '</s>'}; is it the vocabulary of this model?")
    return unk, eos


def _decoding(search: _Search) -> dict[str, Any]:
    """Return the section `decoding`: Marian's lengths are at most three times the source, end-of-sentence counted."""
    decoding: dict[str, Any] = {
        "endings": "beam",
        "length_penalty": {"kind": "power", "alpha": float(search.normalize)},
        "max_length": {"ratio": 3.0, "extra": 2, "limit": POSITIONS - 1},
        "min_length": 0,
    }
    if search.beam_size is not None:
        decoding["beam_size"] = search.beam_size
    return decoding

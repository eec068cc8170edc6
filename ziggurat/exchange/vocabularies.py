"""SentencePiece models over the vocabulary of another toolkit, as OPUS-MT and other Marian models have them.

Such a model segments each side by a SentencePiece model of its own, but the ids are those of a list of pieces apart,
which both sides may share: one matrix of embeddings, one softmax over the pieces of both. Our tokenizers take ids from
the SentencePiece model itself. So the models are written again with all pieces of the list: those that a model does not
have are marked as unused, a mark of SentencePiece for pieces that no segmentation contains and that are decoded like
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ziggurat.data.subword import SentencePieceTokenizer, same_vocabulary
from ziggurat.system.errors import ExportError, printable
from ziggurat.system.small_files import Form


class SpecialToken(Form):
    """A token with its options, of which only the spelling counts here."""

    content: str


_Tokens = list[str | SpecialToken] | dict[str, str | SpecialToken] | None


class TokenizerConfig(Form):
    """Vocabularies, languages and tags in tokenizer_config.json of transformers."""

    separate_vocabs: bool = False
    source_lang: str | None = None
    target_lang: str | None = None
    num_madeup_words: int = 8  # the default of M2M100's tokenizer
    additional_special_tokens: _Tokens = None
    extra_special_tokens: _Tokens = None
    """The same, as transformers writes it from version 5 on."""

    def tags(self, ids: Mapping[str, int], models: Iterable[SentencePieceTokenizer]) -> list[str]:
        """Return the tokens of `ids`, in this order, that stand before a text and that no text contains.

        They are language codes (`>>fra<<` of OPUS-MT, `__fr__` in fairseq's manner), and the special tokens that the
        SentencePiece models do not have.
        """
        segmented = {piece for model in models for piece in model.pieces(range(model.size))}
        special = self._special() - segmented
        return [token for token in ids if (token[:2], token[-2:]) in ((">>", "<<"), ("__", "__")) or token in special]

    def unknown(self, ids: Mapping[str, int]) -> list[str]:
        """Return a note on the special tokens that `ids` lacks, for people; none where it has them all."""
        lost = sorted(self._special() - ids.keys())
        return [f"special tokens without an id in vocab.json, such as {printable(lost[0])}"] if lost else []

    def _special(self) -> set[str]:
        given = (self.additional_special_tokens, self.extra_special_tokens)
        found = [token for some in given for token in (some.values() if isinstance(some, dict) else some or ())]
        return {token if isinstance(token, str) else token.content for token in found}


def refuse_languages_apart(folder: Path, ids: Mapping[str, int], rows: int, made_up: int) -> None:
    """Raise ExportError for a model of M2M100 whose language codes are not in vocab.json.

    M2M100's tokenizer numbers them from the size of that list on, and behind them is a padding of `made_up` rows.

    Args:
        folder: the model, for the message.
        ids: its vocab.json.
        rows: of its embedding.
        made_up: `num_madeup_words` of its tokenizer.
    """
    if (apart := rows - len(ids)) > made_up:
        raise ExportError(
            f"{folder}: M2M100 with languages that a model here cannot be told: its embedding has {apart:,} rows more "
            f"than vocab.json has pieces ({len(ids):,}), for codes such as __de__. transformers puts the one of the "
            "source before the text and forces that of the target to be the first token written. Translate with "
            "transformers, a corpus to train a model on, for example; or import an OPUS-MT model of the two languages"
        )


def with_vocabularies(
    source: SentencePieceTokenizer,
    target: SentencePieceTokenizer,
    source_ids: Mapping[str, int],
    target_ids: Mapping[str, int],
) -> tuple[SentencePieceTokenizer, SentencePieceTokenizer]:
    """Return tokenizers with an id for each piece of the other toolkit's vocabularies, which are its ids by piece.

    Equal vocabularies become one, with equal ids on both sides; with equal models both are one tokenizer. Models of
    which SentencePiece cannot keep the segmentation stay as they are: they lack the pieces that they never give.
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

    Args:
        tokenizers: one, or those of both sides, with equal tags.
        ids: the other toolkit's ids by piece; ours are in this order.

    Returns None where SentencePiece cannot keep the segmentation: models that are not unigram models (a BPE model also
    merges to unused pieces, on its way to others), and models whose control symbols contradict each other.
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
    """Return every piece once, in the order of the lists; SentencePiece knows no empty piece."""
    left_out = {"", *without}
    return [piece for piece in dict.fromkeys(piece for pieces in lists for piece in pieces) if piece not in left_out]

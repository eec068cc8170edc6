"""How transformers is told to search: its generation_config.json (of old models config.json), and what is ours of it.

Lengths of transformers count the decoder's first input; `max_new_tokens` and ours do not, and ours leave out
end-of-sentence as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import Field

from ziggurat.system.small_files import Form

_MAX_LENGTH = 20
"""Default of transformers for `max_length`. Nobody means it, so such a model keeps our default."""


class Generation(Form):
    """Settings of `generate` that decide which translation is found; None: not set."""

    num_beams: int | None = Field(default=None, ge=1, le=10_000)
    num_beam_groups: int | None = None
    do_sample: bool | None = None
    early_stopping: bool | str | None = None
    length_penalty: float | None = None
    max_length: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    min_length: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=10_000)
    encoder_no_repeat_ngram_size: int | None = None
    repetition_penalty: float | None = None
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    renormalize_logits: bool | None = None
    forced_bos_token_id: int | None = None


def decoding_of(given: Generation, positions: int) -> dict[str, Any]:
    """Return the section `decoding` whose search is the one that `given` asks for.

    Args:
        given: settings of `generate`.
        positions: most tokens that the model can read, the decoder's first input counted.
    """
    decoding: dict[str, Any] = {
        # Of all the extensions of a step only the best `num_beams` may end, and with `early_stopping: true` a search
        # ends when as many hypotheses have.
        "endings": "fairseq" if given.early_stopping is True else "beam",
        "length_penalty": {"kind": "power", "alpha": 1.0},
    }
    if given.num_beams is not None:
        decoding["beam_size"] = given.num_beams
    if given.length_penalty is not None and 0 <= given.length_penalty <= 10:
        decoding["length_penalty"]["alpha"] = given.length_penalty
    longest = given.max_new_tokens
    if longest is None and given.max_length not in (None, _MAX_LENGTH):
        longest = given.max_length - 1
    if longest is not None:
        limit = max(1, min(longest, positions) - 1)
        decoding["max_length"] = {"ratio": 0.0, "extra": limit, "limit": limit}
    least = given.min_new_tokens if given.min_new_tokens is not None else max(0, (given.min_length or 0) - 1)
    decoding["min_length"] = min(least, decoding.get("max_length", {}).get("limit", least))
    if given.no_repeat_ngram_size:
        decoding["no_repeat_ngram_size"] = given.no_repeat_ngram_size
    return decoding


def ruled_out(given: Generation, ours: Collection[int | None]) -> frozenset[int]:
    """Return the ids that are never generated, so that the other tokens share their probability.

    `ours`, those that our search never writes, such as padding, are only among them where transformers rules them out
    before it normalises. Else it does so afterwards, and so do we.
    """
    single = frozenset(word[0] for word in given.bad_words_ids or [] if len(word) == 1)
    single |= frozenset(given.suppress_tokens or [])
    return single if given.renormalize_logits else single.difference(ours)


def notes_of(given: Generation) -> tuple[str, ...]:
    """Return what the search is told to do in transformers and does not do here, as `key: value`."""
    plain: Mapping[str, tuple[Any, ...]] = {
        "do_sample": (False,),
        "num_beam_groups": (1,),
        "repetition_penalty": (1.0,),
        "encoder_no_repeat_ngram_size": (0,),
        "forced_bos_token_id": (),
    }
    notes = [f"{key}: {value}" for key, usual in plain.items() if (value := getattr(given, key)) not in (None, *usual)]
    if given.length_penalty is not None and not 0 <= given.length_penalty <= 10:
        notes.append(f"length_penalty: {given.length_penalty}")
    if any(len(word) != 1 for word in given.bad_words_ids or []):
        notes.append("bad_words_ids of several tokens")
    return tuple(notes)

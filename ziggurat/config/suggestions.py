"""Suggestions for keys that do not exist: what was probably meant, a key of the same section where there is one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from ziggurat.config.base import inner_section
from ziggurat.system.yaml_text import dotted

_OTHER_NAMES: Mapping[str, str] = {
    name: ours
    for ours, names in {
        "d_model": "width dim dimension hidden hidden_size hidden_dim embed_dim embedding_dim embedding_size emb_dim "
        "model_dim size",
        "d_ff": "ffn_dim ff_dim ff_size ffn_size feed_forward feedforward_dim intermediate_size filter_size inner_dim",
        "heads": "num_heads attention_heads nhead n_heads",
        "layers": "num_layers depth n_layers",
        "peak": "lr learning_rate max_lr",
        "warmup_updates": "warmup_steps",
        "updates": "steps max_updates max_steps train_steps",
        "epochs": "max_epochs",
        "label_smoothing": "smoothing",
        "vocabulary_size": "vocab_size vocab num_words",
        "beam_size": "beam beams num_beams",
        "dev": "valid validation val development",
    }.items()
    for name in names.split()
}
"""Names of other toolkits, and of everyday speech, for keys of ours; they count where a section has such a key."""


def suggested_key(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the end of a message on an unknown key of `root`: what was probably meant, or what is valid there."""
    wrong, section = str(location[-1]), section_at(location[:-1], root)
    if section is None:
        return ""
    names = list(section.model_fields)
    other = _OTHER_NAMES.get(wrong.replace("-", "_").lower())
    if other in names:
        return f"; did you mean `{dotted((*location[:-1], str(other)))}`?"
    if near := difflib.get_close_matches(wrong, names, n=2, cutoff=0.6):
        return "; did you mean " + " or ".join(f"`{dotted((*location[:-1], n))}`" for n in near) + "?"
    inside = dotted(location[:-1])
    paths = _all_paths(root)
    below = [path for path in paths if path.startswith(f"{inside}.") or not inside]
    # Elsewhere only what is called just so: half a name means something else in most sections.
    found = (
        [path for path in below if path.rsplit(".", 1)[-1] == other]
        or [path for path in below if path.rsplit(".", 1)[-1].startswith(wrong)]
        or [path for path in paths if path.rsplit(".", 1)[-1] == wrong]
    )
    if found:
        return f"; did you mean `{min(found, key=lambda path: (len(path), path))}`?"
    return "; valid here: " + ", ".join(names)


def section_at(location: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section class at a path in `root`; None where the path leads to a value or nowhere."""
    section: type[BaseModel] | None = root
    for key in location:
        if section is None or isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        section = inner_section(field.annotation)[0] if field else None
    return section


def _all_paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        if (inner := inner_section(field.annotation)[0]) is not None:
            paths += _all_paths(inner, f"{prefix}{name}.")
    return paths

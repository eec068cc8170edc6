"""Each kind is described in one place, and these tests name what was forgotten (CONTRIBUTING.md, "Adding a kind").

tests/model/test_stacks.py (residuals), tests/model/test_history_equations.py (histories) and the table of
initialisations below guard the equations; tests/test_composition.py checks that every pair of choices works.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch

from ziggurat.config.kinds import (
    ATTENTIONS,
    HISTORIES,
    INITIALISATIONS,
    MEMORIES,
    RESIDUALS,
    DecoderAttentionKind,
    EncoderAttentionKind,
    HistoryKind,
    InitKind,
    MemoryKind,
    ResidualKind,
)
from ziggurat.config.model import DecoderConfig, EncoderConfig, InitConfig, ModelConfig, StackConfig
from ziggurat.model.init import INIT, Distribution, ModelDepth
from ziggurat.model.kinds import ATTENTION, ENCODER_ATTENTION, HISTORY, RESIDUAL
from ziggurat.model.roles import Role, Slot

ROOT = Path(__file__).resolve().parents[1]


class Axis(NamedTuple):
    """An axis of the model.

    Attributes:
        kinds: its Literal.
        tables: name -> table that needs a row for each kind.
        heading: how its section in docs/depth.md begins.
        section: class whose field `field` explains each kind (`ziggurat explain`).
        field: name of that field.
    """

    kinds: Any
    tables: Mapping[str, Mapping[Any, Any]]
    heading: str
    section: type[Any]
    field: str


AXES = {
    "residual": Axis(
        ResidualKind,
        {"RESIDUALS (ziggurat/config/kinds.py)": RESIDUALS, "RESIDUAL (ziggurat/model/kinds.py)": RESIDUAL},
        "## One sub-layer",
        ModelConfig,
        "residual",
    ),
    "history": Axis(
        HistoryKind,
        {"HISTORIES (ziggurat/config/kinds.py)": HISTORIES, "HISTORY (ziggurat/model/kinds.py)": HISTORY},
        "## One stack",
        StackConfig,
        "history",
    ),
    "memory": Axis(
        MemoryKind, {"MEMORIES (ziggurat/config/kinds.py)": MEMORIES}, "## Between the stacks", ModelConfig, "memory"
    ),
    "decoder attention": Axis(
        DecoderAttentionKind,
        {
            "ATTENTIONS (ziggurat/config/kinds.py)": ATTENTIONS,
            "ATTENTION (ziggurat/model/kinds.py)": ATTENTION,
        },
        "## Attention",
        DecoderConfig,
        "attention",
    ),
    "encoder attention": Axis(
        EncoderAttentionKind,
        {
            "ATTENTIONS (ziggurat/config/kinds.py)": ATTENTIONS,
            "ENCODER_ATTENTION (ziggurat/model/kinds.py)": ENCODER_ATTENTION,
        },
        "## Attention",
        EncoderConfig,
        "attention",
    ),
    "initialisation": Axis(
        InitKind,
        {"INITIALISATIONS (ziggurat/config/kinds.py)": INITIALISATIONS, "INIT (ziggurat/model/init.py)": INIT},
        "## Initialisation",
        InitConfig,
        "kind",
    ),
}
KINDS = [(name, kind) for name, axis in AXES.items() for kind in get_args(axis.kinds)]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_kind_has_a_row_in_every_table(name: str, kind: str) -> None:
    for table, rows in AXES[name].tables.items():
        assert kind in rows, f"{name} `{kind}` has no row in {table}"


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_kind_is_explained(name: str, kind: str) -> None:
    axis = AXES[name]
    page = (ROOT / "docs" / "depth.md").read_text(encoding="utf-8")
    section = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(axis.heading)]
    assert f"`{kind}`" in text, f"{name} `{kind}` has no line in docs/depth.md, section {axis.heading!r}"
    what = next(iter(axis.tables.values()))[kind].what
    if name != "memory":  # that section has no table
        assert f"| `{kind}` | {what} |" in text, (
            f"{name} `{kind}`: docs/depth.md and its row of facts (kinds.py) differ"
        )
    meaning = axis.section.model_fields[axis.field].description
    assert f"`{kind}`: {what}" in meaning, f"{axis.section.__name__}.{axis.field} does not explain `{kind}`"


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_kind_names_its_paper(name: str, kind: str) -> None:
    facts = next(iter(AXES[name].tables.values()))[kind]
    assert facts.paper or kind in ("latest", "top", "full"), f"{name} `{kind}`: its row names no paper (kinds.py)"


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_options_of_kinds_are_keys_of_the_model(name: str, kind: str) -> None:
    facts = next(iter(AXES[name].tables.values()))[kind]
    for option in facts.options:
        section, _, key = option.partition(".")
        fields = type(getattr(ModelConfig(), section)).model_fields
        assert key in fields, f"{name} `{kind}`: there is no key `model.{option}`"


def test_methods_of_two_halves_are_reported_with_what_is_missing() -> None:
    for residual, facts in RESIDUALS.items():
        assert (facts.init is None) == (facts.without_init == ""), residual
        assert facts.init is None or facts.init in INITIALISATIONS, residual


ATTENTION_REFERENCES = {
    "full": "test_parity_with_torch.py",
    "relative": "test_relative.py",
    "average": "test_average_attention.py",
    "simplified_average": "test_average_attention.py",
    "ssru": "test_ssru.py",
    "merged": "test_merged_attention.py",
    "merged_full": "test_merged_attention.py",
    "merged_gated": "test_merged_attention.py",
}
"""ATTENTION_REFERENCES maps a kind to the file in tests/model that compares it with its equation."""


@pytest.mark.parametrize("kind", get_args(DecoderAttentionKind))
def test_every_attention_kind_has_a_reference(kind: str) -> None:
    assert kind in ATTENTION_REFERENCES, f"attention `{kind}` has no reference: name its test in ATTENTION_REFERENCES"
    assert (ROOT / "tests" / "model" / ATTENTION_REFERENCES[kind]).is_file()


N, M, LAYER, OUT, IN = 12, 5, 3, 300, 200
FUSED = math.sqrt(6 / (IN + 3 * OUT))  # Glorot's bound if the value map is a third of one matrix

VALUE_MAP: dict[str, Callable[[], Distribution]] = {
    "xavier": lambda: Distribution("uniform", FUSED),
    "depth_scaled": lambda: Distribution("uniform", FUSED * LAYER**-0.25),
    "admin": lambda: Distribution("uniform", FUSED),
    "deepnorm": lambda: Distribution("normal", (12 * M) ** -0.25 * math.sqrt(2 / (IN + OUT))),
    "magneto": lambda: Distribution("uniform", FUSED * math.log(3 * M) ** 0.5),
    "lipschitz": lambda: Distribution("uniform", math.sqrt(1 / IN)),
    "t_fixup": lambda: Distribution("uniform", (9 * M) ** -0.25 * math.sqrt(6 / (IN + OUT))),
    "fixup": lambda: Distribution("uniform", FUSED * (2 * N + 3 * M) ** (-1 / 6)),
    "uniform": lambda: Distribution("uniform", FUSED),
}
"""VALUE_MAP are the initial values of the value map in decoder layer LAYER, for M decoder and N encoder layers."""


@pytest.mark.parametrize("kind", get_args(InitKind))
def test_every_initialisation_follows_its_equation(kind: InitKind) -> None:
    assert kind in VALUE_MAP, f"initialisation `{kind}` has no equation: write it into VALUE_MAP (tests/test_kinds.py)"
    slot = Slot(torch.empty(OUT, IN), Role.ATTENTION_VALUE, "w", fused_out=3 * OUT, layer=LAYER, decoder=True)
    found, expected = INIT[kind](slot, InitConfig(kind=kind), ModelDepth(N, M)), VALUE_MAP[kind]()
    assert type(found) is type(expected)
    assert found.size == pytest.approx(expected.size, rel=1e-12)

"""Small models with random weights, as folders that can be exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.exchange.examples import SENTENCES, SMALL, random_model
from tests.small import merged
from tests.vocabulary import trained_tokenizer
from ziggurat.config import Experiment
from ziggurat.data.shortlist import ShortlistTable, _fingerprint, write_shortlist
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.model.directory import write_model_directory
from ziggurat.model.tensors import weights

Written = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer() -> SentencePieceTokenizer:
    return trained_tokenizer(SENTENCES, 340, ["<bt>"])


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The model, imported once, because that takes seconds."""
    return pytest.importorskip("transformers")


@pytest.fixture
def written(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> Written:
    """Write a random model with these choices as a model directory; return the directory."""

    def write(
        seed: int = 4, decoding: dict[str, Any] | None = None, guided: dict[str, Any] | None = None, **choices: Any
    ) -> Path:
        limit = {"max_length": {"ratio": 0.0, "extra": 20, "limit": 20}}
        experiment = Experiment.model_validate(
            {
                "data": {
                    "source_language": "de",
                    "target_language": "en",
                    "store": str(tmp_path / "none"),
                    "train": [{"source": "a", "target": "b"}, {"source": "c", "target": "d", "tag": "<bt>"}],
                },
                "model": merged(SMALL, choices),
                "training": {"loss": {"alignment": guided}},
                "decoding": {**limit, **(decoding or {})},
            }
        )
        vocabularies = tmp_path / "vocabularies"
        vocabularies.mkdir(exist_ok=True)
        save_tokenizers(vocabularies, tokenizer, tokenizer)
        model = random_model(experiment.model, tokenizer, seed)
        write_model_directory(tmp_path / "model", weights(model), experiment, vocabularies)
        return tmp_path / "model"

    return write


@pytest.fixture
def listed(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> str:
    """A shortlist that changes the models' translations."""
    vocabulary = np.arange(tokenizer.size, dtype=np.int32)
    candidates = np.stack([(vocabulary * 7 + n * 31) % tokenizer.size for n in range(8)], 1).astype(np.int32)
    candidates[::3, 4:] = tokenizer.size  # rows have different lengths
    always = np.array([tokenizer.eos, tokenizer.unk, 40, 50], np.int32)
    write_shortlist(tmp_path / "list", ShortlistTable(candidates, always, (_fingerprint(tokenizer),) * 2))
    return str(tmp_path / "list")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("".join(f"{line}\n" for line in SENTENCES))
    return path

"""Tiny untrained models in two directions and into a third language, and a server with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from tests.exchange.examples import SMALL, random_model
from tests.small import merged
from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.config import Experiment
from ziggurat.data.subword import load_tokenizers, save_tokenizers
from ziggurat.exchange.exporter import export_model
from ziggurat.model.directory import write_model_directory
from ziggurat.model.tensors import weights
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.server import app_of

PAIRS = (("de", "en"), ("en", "de"), ("en", "qlo"))


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the vocabulary of all models."""
    folder = tmp_path_factory.mktemp("vocabularies")
    tokenizer = trained_tokenizer(SENTENCES, 340, ["<bt>"])
    save_tokenizers(folder, tokenizer, tokenizer)
    return folder


def write_model(folder: Path, vocabularies: Path, source: str, target: str, seed: int) -> None:
    """Write a model directory for two languages."""
    experiment = Experiment.model_validate(
        {
            "data": {"source_language": source, "target_language": target, "store": str(folder / "none")},
            "model": merged(SMALL, {}),
            "decoding": {"max_length": {"ratio": 0.0, "extra": 8, "limit": 8}},
        }
    )
    model = random_model(experiment.model, load_tokenizers(vocabularies)[0], seed)
    write_model_directory(folder, weights(model), experiment, vocabularies)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, vocabularies: Path) -> dict[tuple[str, str], Path]:
    """A model directory for each pair."""
    base = tmp_path_factory.mktemp("served")
    found = {pair: base / "-".join(pair) for pair in PAIRS}
    for seed, (pair, folder) in enumerate(found.items(), start=4):
        write_model(folder, vocabularies, *pair, seed)
    return found


Exported = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def exported(folders: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """CTranslate2 folders of the models, exported on first use, because that takes seconds."""
    base = tmp_path_factory.mktemp("exported")
    (text := base / "text").write_text(f"{SENTENCES[0]}\n", encoding="utf-8")

    @cache
    def folder(source: str, target: str) -> Path:
        path = base / f"{source}-{target}"
        export_model(folders[source, target], "ctranslate2", path, verify=text)
        return path

    return folder


Serve = Callable[..., TestClient]


@pytest.fixture
def serve(folders: dict[tuple[str, str], Path]) -> Iterator[Serve]:
    """Open a server with the models and these settings."""
    opened: list[TestClient] = []

    def start(**settings: Any) -> TestClient:
        models = settings.pop("models", [{"path": str(path), "threads": 1} for path in folders.values()])
        config = ServeConfig.model_validate({"models": models, "names": {"qlo": "Qlo"}, **settings})
        client = TestClient(app_of(config, lambda text: None), raise_server_exceptions=False)
        client.__enter__()
        opened.append(client)
        return client

    yield start
    for client in opened:
        client.__exit__(None, None, None)

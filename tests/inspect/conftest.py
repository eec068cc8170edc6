"""A tiny configuration with its prepared data, for trials."""

from __future__ import annotations

import pytest

from tests.conftest import tiny_experiment
from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    made = tiny_experiment(tmp_path_factory.mktemp("trial"))
    prepare(made.data)
    return made


@pytest.fixture(scope="module")
def store(experiment: Experiment) -> Store:
    return Store.open(experiment.data.store)

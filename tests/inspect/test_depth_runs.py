"""experiments/against-depth: every figure's runs are configurations that load, with the right stages of growth."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.runs import write_run
from ziggurat.config.recipes import SUFFIX, load_named
from ziggurat.inspect.report.against_depth import runs_by_method
from ziggurat.inspect.report.runs import read_runs

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "against-depth" / "run.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="experiments/ is not next to the tests")


@pytest.fixture(scope="module")
def script() -> Any:
    before = list(sys.path)
    specification = importlib.util.spec_from_file_location("experiments_against_depth_run", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # typing.NamedTuple and argparse look up the module by name
    specification.loader.exec_module(module)
    sys.path[:] = before
    return module


SLOW = [(name, small) for name in ("ds-init-3", "dlcl-3", "dlcl-4", "dlcl-table-5") for small in (True, False)]


@pytest.mark.parametrize(
    ("name", "small"),
    [("sdt-6", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sdt-6", False), *SLOW))],
)
def test_runs_of_a_figure_load_and_make_its_lines(script: Any, tmp_path: Path, name: str, small: bool) -> None:
    depths, methods = script.FIGURES[name]
    if small:
        methods = {line: method._replace(config=f"{method.config}{SUFFIX}") for line, method in methods.items()}
    options = argparse.Namespace(seeds=[1], depths=depths, methods=methods, work=tmp_path, set=[])
    runs = script.runs_of(options, [])
    assert len({run.folder for run in runs}) == len(runs) == len(depths) * len(methods)
    for run in runs:
        write_run(run.folder, experiment=load_named(run.config, run.settings))
    found = runs_by_method(read_runs([run.folder for run in runs]))
    assert found is not None
    _, lines = found
    assert len(lines) == len(methods)
    assert {depth for line in lines for depth in line.runs} == {
        depth.decoder if name == "dlcl-table-5" else depth.encoder for depth in depths
    }


def test_an_existing_run_is_resumed(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def verb(work: Path, *arguments: str | Path) -> argparse.Namespace:
        assert work == tmp_path
        asked.append(tuple(map(str, arguments)))
        return argparse.Namespace(returncode=len(asked) - 1)

    monkeypatch.setattr(script, "verb", verb)
    run = script.Run(tmp_path / "a", "recipe", ["training.seed=1"])
    assert script.train(run)
    write_run(run.folder)
    assert not script.train(run)
    assert asked == [
        ("train", "recipe", "training.seed=1", "--run", str(run.folder)),
        ("train", "--resume", "--run", str(run.folder)),
    ]


def test_stages_are_those_of_the_papers(script: Any) -> None:
    ends = {layers: script.growth(script.Depth(layers, 6), 50_000)[0] for layers in (6, 12, 24)}
    assert ends[6] == "training.growth=null"
    assert ends[12] == "training.growth.stages=[{layers: 6, updates: 9600}]"
    recipe = load_named("sdt-en-de-base-24-6-sdt")
    assert recipe.training.growth is not None
    grown = load_named("sdt-en-de-base-24-6-sdt", [ends[24]])
    assert grown.training.growth == recipe.training.growth
    deep = load_named("sdt-en-de-base-48-6-sdt", script.growth(script.Depth(48, 6), 50_000)).training.growth
    assert deep is not None
    assert [stage.layers for stage in deep.stages] == list(range(6, 48, 6))
    assert deep.stages[-1].updates == 38_000

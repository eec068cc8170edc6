"""docs/annotated.md: every block runs, in order, and its search finds what the toolkit's search finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "annotated.md"


def blocks(kind: str) -> list[str]:
    """Return the page's blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def run_page(updates: int) -> dict[str, Any]:
    """Execute the page's code, with training cut to a few updates; return the names that it defines."""
    code = "\n".join(blocks("python"))
    assert "updates=80" in code
    names: dict[str, Any] = {"__name__": "annotated"}
    exec(compile(code.replace("updates=80", f"updates={updates}"), str(PAGE), "exec"), names)
    return names


@pytest.mark.slow
def test_the_page_runs_and_equals_the_toolkit(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(updates=3)  # the page itself compares logits of five kinds with the toolkit's
    printed, shown = capsys.readouterr().out.splitlines(), blocks("text")[0].splitlines()
    for line, expected in zip(printed[: len(shown)], shown, strict=True):
        numbers, wanted = (re.findall(r"\d+\.\d+", text) for text in (line, expected))
        assert [float(n) for n in numbers] == pytest.approx([float(n) for n in wanted], rel=0.05, abs=2e-4), line
    assert_same_search(names)


def assert_same_search(names: dict[str, Any]) -> None:
    """Compare the page's beam search with the toolkit's, on a model whose translations have different lengths."""
    from ziggurat.translate.hypotheses import LengthPenalty
    from ziggurat.translate.scorers import ModelScorer
    from ziggurat.translate.search import search
    from ziggurat.translate.settings import SearchSettings, Sentence

    torch.manual_seed(2)
    model = names["Translator"](12, 2, 16, 24, 2, "pre").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        model.tokens.weight[names["EOS"]] *= 1.5
    toolkit = names["ours"](model, 2, "pre", False, names["shape"])
    sources = [[5, 6, 7, 2], [8, 9, 2], [3, 4, 10, 11, 5, 2]]
    expected = [names["beam_search"](model, torch.tensor([source])) for source in sources]
    assert len({len(tokens) for tokens in expected}) > 1
    settings = SearchSettings(beam_size=4, n_best=1, penalty=LengthPenalty("gnmt", 1.0), bos=1, eos=2)
    found = search(ModelScorer(toolkit), [Sentence(source, 30) for source in sources], settings)
    assert [best[0].tokens for best in found] == expected


@pytest.mark.slow
def test_post_norm_is_stuck_where_admin_continues(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(updates=80)
    post, rescued = (sum(names[name][-10:]) / 10 for name in ("post", "rescued"))
    assert post > rescued + 0.1
    assert capsys.readouterr().out.splitlines()[-1] == blocks("text")[1].strip()

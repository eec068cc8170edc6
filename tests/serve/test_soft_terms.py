"""Soft terms: the cost of a constrained search, which terms are dropped for it, and that the others still apply."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Serve
from tests.vocabulary import SENTENCES
from ziggurat.serve.text import glossary
from ziggurat.serve.text.glossary import MOST_TERMS, Term, constrained, loss
from ziggurat.translate.results import Hypothesis, Translation
from ziggurat.translate.translator import load_translator

COST = {"cheap": 1.0, "fair": 5.0, "dear": 50.0, "lost": float("inf")}


def translation(text: str, log_probability: float) -> Translation:
    tokens = [f"\u2581{word}" for word in text.split()]
    return Translation("x", [Hypothesis(text, log_probability, log_probability, tokens, [], True)])


class Search:
    """A search in which each phrase has its cost in COST, and a `lost` one is missing from the result."""

    def __init__(self, together: float = 0.0) -> None:
        self.calls: list[list[list[str]]] = []
        self.together = together

    async def __call__(self, places: Sequence[int], phrases: Sequence[Sequence[str]]) -> list[Translation]:
        self.calls.append([list(own) for own in phrases])
        return [
            translation(
                " ".join(["free", *(each for each in own if each != "lost")]),
                -1.0 - sum(COST[each] for each in own if each != "lost") - self.together * (len(own) > 1),
            )
            for own in phrases
        ]


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


def outcome(terms: list[list[str]], search: Search, free: str = "free") -> tuple[list[str], dict[int, list[str]]]:
    found, dropped = asyncio.run(
        constrained(
            [translation(free, -1.0) for _ in terms],
            [[Term(f"s{target}", target) for target in own] for own in terms],
            search,
            at_once,
            most=6.0,
        )
    )
    return [each.text for each in found], dropped


def test_cheap_terms_are_applied_in_one_search() -> None:
    search = Search()
    assert outcome([["cheap", "fair"], [], ["fair"]], search) == (["free cheap fair", "free", "free fair"], {})
    assert search.calls == [[["cheap", "fair"], ["fair"]]]


def test_terms_already_present_need_no_search() -> None:
    search = Search()
    assert outcome([["cheap"]], search, "a cheap one") == (["a cheap one"], {})
    assert search.calls == []


def test_only_harmful_terms_are_dropped() -> None:
    search = Search()
    assert outcome([["cheap", "dear", "fair"], ["dear"]], search) == (
        ["free cheap fair", "free"],
        {0: ["dear"], 1: ["dear"]},
    )
    assert [len(call) for call in search.calls] == [2, 3, 1]
    assert outcome([["lost", "cheap"]], Search()) == (["free cheap"], {0: ["lost"]})


def test_terms_that_harm_each_other() -> None:
    assert outcome([["fair", "cheap"]], Search(together=90.0)) == (["free cheap"], {0: ["fair"]})


def test_the_number_of_terms_searched_for_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COST, "x", 0.0)
    terms = [f"x{n}" for n in range(MOST_TERMS + 2)]
    for term in terms:
        monkeypatch.setitem(COST, term, 0.0)
    found, dropped = outcome([terms], Search())
    assert found == [" ".join(["free", *terms[:MOST_TERMS]])]
    assert dropped == {0: terms[MOST_TERMS:]}


def test_the_loss_is_per_token_of_the_terms() -> None:
    two = Translation(
        "x", [Hypothesis("a black dog", -9.0, -9.0, ["\u2581a", "\u2581black", "\u2581d", "og"], [], True)]
    )
    assert loss(translation("a", -1.0), two, ["black dog"]) == pytest.approx(8 / 3)
    assert loss(translation("a", -1.0), two, ["cat"]) == float("inf")
    assert loss(translation("a", -20.0), two, ["black"]) == 0.0  # the unconstrained search missed it


@pytest.mark.slow
def test_over_http(serve: Serve, folders: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()
    translator = load_translator(folders["de", "en"])
    # A model with random weights may continue the word, so that the term does not count as applied.
    for text, target in itertools.product(SENTENCES, ("house", "tree", "dog", "a cat", "the")):
        free = translator.translate([text])[0].text
        wanted = translator.translate([text], constraints=[[target]], endings="candidates")[0].text
        if target not in free and re.search(rf"\b{target}\b", wanted):
            break
    else:
        pytest.fail("no sentence takes a term as a word")
    source = text.split()[0]

    def ask(most: float) -> dict[str, object]:
        monkeypatch.setattr(glossary, "MOST_LOSS", most)
        asked = {"text": [text, "17"], "source": "de", "target": "en", "glossary": {source: target}}
        first, second = client.post("/v1/translate", json=asked).json()["translations"]
        assert second["glossary"][0]["found"] == 0
        return dict(first)

    found = ask(float("1e9"))
    assert found["text"] == wanted
    told = {"source": source, "target": target, "mode": "soft", "found": 1, "applied": 1, "dropped": 0}
    assert found["glossary"] == [told]
    found = ask(0.0)
    assert found["text"] == free
    assert found["glossary"] == [{**told, "applied": 0, "dropped": 1}]

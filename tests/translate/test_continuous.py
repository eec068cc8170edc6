"""Lines that enter and leave while others are translated give the same results as all lines at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vocabulary import SENTENCES
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.call import ContinuousTranslation
from ziggurat.translate.translator import Translator

LINES = [*SENTENCES[:9], "", "  ", " ".join(SENTENCES[:4])]
MOST = 30  # pieces of a sentence: the last line is translated in parts


@pytest.fixture(scope="module")
def translator(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> Translator:
    limit = {"ratio": 0.0, "extra": 12, "limit": 12}
    decoding = DecodingConfig.model_validate({"beam_size": 3, "max_length": limit, "max_source_pieces": MOST})
    return Translator(tiny_model, tokenizer, tokenizer, decoding)


@pytest.fixture(scope="module")
def alone(translator: Translator) -> dict[str, list[str]]:
    """The n-best list of each line, translated alone."""
    return {line: [h.text for h in translator.translate([line], n_best=2)[0].hypotheses] for line in LINES}


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(LINES), st.integers(0, 9), st.none() | st.integers(0, 3)), min_size=1, max_size=14
    ),
    slots=st.integers(1, 5),
)
@settings(max_examples=25)
def test_lines_come_and_go(
    arrivals: list[tuple[str, int, int | None]], slots: int, translator: Translator, alone: dict[str, list[str]]
) -> None:
    """Each line arrives some steps after the previous one; at some arrivals an earlier line is cancelled."""
    live = ContinuousTranslation(translator, slots=slots, n_best=2)
    texts: dict[int, str] = {}
    found: dict[int, list[str]] = {}

    def step() -> None:
        for ticket, translation in live.step().items():
            assert ticket not in found
            found[ticket] = [h.text for h in translation.hypotheses]
        assert len(live._search.live) <= slots

    for line, steps, doomed in arrivals:
        for _ in range(steps):
            step()
        if (under_way := [ticket for ticket in texts if ticket not in found]) and doomed is not None:
            ticket = under_way[doomed % len(under_way)]
            live.cancel([ticket])
            del texts[ticket]
        texts[live.add(line)] = line
    for _ in range(1000):
        if not live.lines:
            break
        step()
    assert {ticket: alone[line] for ticket, line in texts.items()} == found
    assert (live.lines, len(live._search.live), len(live._search.waiting), live.step()) == (0, 0, 0, {})


@pytest.mark.slow
def test_nothing_is_kept_of_finished_lines(translator: Translator) -> None:
    live = ContinuousTranslation(translator, slots=2)
    for _ in range(3):
        for line in LINES:
            live.add(line)
        while live.lines:
            live.step()
    kept = (live._lines, live._owners, live._blank, live._search.sentences, live._search.live)
    assert [len(each) for each in kept] == [0] * 5
    trellis = live._search.trellis
    assert len(trellis) > 30
    assert len(trellis._steps) <= 1


def test_a_line_joins_a_search_that_is_running(translator: Translator) -> None:
    live = ContinuousTranslation(translator, slots=4)
    first = live.add(SENTENCES[0])
    live.step()
    second = live.add(SENTENCES[1])
    live.step()
    assert len(live._search.live) == 2
    live.cancel([first, 99])
    assert (len(live._search.live), live.lines) == (1, 1)
    found: set[int] = set()
    while live.lines:
        found |= live.step().keys()
    assert found == {second}


def test_a_prefix_that_is_too_long_is_refused_in_the_words_of_a_client(translator: Translator) -> None:
    live = ContinuousTranslation(translator, slots=2)
    live.add(LINES[0])
    with pytest.raises(
        DataError, match=r"^the prefix and constraints have \d+ tokens, but at most 30 .*; shorten them$"
    ):
        live.add(LINES[0], "The house " * 30)


def test_settings_are_checked_at_once(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="n_best"):
        ContinuousTranslation(translator, slots=2, n_best=9)
    with pytest.raises(ConfigError, match="unknown tag"):
        ContinuousTranslation(translator, slots=2, tag="<no>")

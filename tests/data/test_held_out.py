"""Sentences of held-out sets in training pairs, compared with Python sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.cleaning.held_out import HeldOut, Overlap, SentenceSet, folded, side_hashes

SENTENCES = st.sampled_from(["Ein Hund.", "ein hund", "EIN HUND!", "Eine Katze", "3 Euro", "4 Euro", "?!", "", "A dog"])
PAIRS = st.lists(st.tuples(SENTENCES, SENTENCES), max_size=12)


LANGUAGES = st.sampled_from([None, ("de", "en"), ("en", "de"), ("deu", "en-GB"), ("fr", "de"), ("cs", "fr")])
MAIN = {"deu": "de", "en-GB": "en"}


@given(PAIRS, st.lists(SENTENCES, max_size=5), PAIRS, st.integers(0, 12), LANGUAGES, LANGUAGES)
def test_overlap_by_its_definition(
    dev: list[tuple[str, str]],
    test: list[str],
    train: list[tuple[str, str]],
    cut: int,
    of_dev: tuple[str, str] | None,
    of_train: tuple[str, str] | None,
) -> None:
    held_out = HeldOut()
    held_out.add_pairs("dev", [([s for s, _ in part], [t for _, t in part]) for part in (dev[:cut], dev[cut:])], of_dev)
    held_out.add_lines("test", [test])
    masks = list[tuple[bool, bool]]()
    for part in (train[:cut], train[cut:]):
        both, either = held_out.look(side_hashes([s for s, _ in part], [t for _, t in part]), of_train)
        masks += zip(both.tolist(), either.tolist(), strict=True)

    def compared(side: int, place: int) -> bool:
        """Return whether a side of training pairs is compared with a side of the set."""
        if of_dev is None or of_train is None:
            return True
        own, its = ([MAIN.get(code, code) for code in codes] for codes in (of_dev, of_train))
        return sorted(own) == sorted(its) or own[place] == its[side]

    sides = [{*folded([pair[n] for pair in dev])} - {""} for n in (0, 1)]
    lines = {*folded(test)} - {""}
    folds = [folded([*pair]) for pair in train]
    at = [(side, place) for side in (0, 1) for place in (0, 1)]
    in_dev = [{(n, m): compared(n, m) and pair[n] in sides[m] for n, m in at} for pair in folds]
    whole = [(hit[0, 0] and hit[1, 1]) or (hit[0, 1] and hit[1, 0]) for hit in in_dev]
    in_test = [[text in lines for text in pair] for pair in folds]
    hits = zip(whole, in_dev, in_test, strict=True)
    assert masks == [(pair or all(ours), any(hit.values()) or any(ours)) for pair, hit, ours in hits]
    found = [{pair[n] for pair in folds for n in (0, 1) if compared(n, m)} & sides[m] for m in (0, 1)]
    assert held_out.overlaps() == {
        "dev": Overlap(
            len(sides[0]) + len(sides[1]),
            len(found[0]) + len(found[1]),
            sum(whole),
            sum(any(hit.values()) for hit in in_dev),
        ),
        "test": Overlap(
            len(lines), len(lines & {text for pair in folds for text in pair}), sum(map(all, in_test)),
            sum(map(any, in_test)),
        ),
    }  # fmt: skip


def test_half_of_a_set_is_found_in_pairs_with_a_third_language() -> None:
    """Text that two languages happen to spell alike does not count."""
    held_out = HeldOut()
    held_out.add_pairs("de-en", [(["Ein Hund"], ["Pardon"])], ("de", "en"))
    hashes = side_hashes(["Un chien", "Pardon"], ["Ein Hund", "Entschuldigung"])
    assert [mask.tolist() for mask in held_out.look(hashes, ("fr", "de"))] == [[False, False], [True, False]]


def test_the_files_of_a_test_set_are_one_set_for_whole_pairs() -> None:
    held_out = HeldOut()
    held_out.add_lines("test.de", [["Ein Hund", "Zwei"]])
    held_out.add_lines("test.en", [["A dog", "Two"]])
    both, either = held_out.look(side_hashes(["ein hund", "Zwei", "x", "y"], ["A DOG.", "x", "two", "y"]))
    assert both.tolist() == [True, False, False, False]
    assert either.tolist() == [True, True, True, False]
    assert held_out.overlaps() == {"test.de": Overlap(2, 2, 1, 2), "test.en": Overlap(2, 2, 1, 2)}


def test_few_pairs_are_looked_up_in_each_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sets there are, most pairs of a corpus have no sentence from any of them."""
    held_out = HeldOut()
    for number in range(50):
        held_out.add_pairs(f"set {number}", [([f"satz {number}"], [f"line {number}"])])
    looked: list[int] = []
    look = SentenceSet.look
    monkeypatch.setattr(SentenceSet, "look", lambda own, hashes: (looked.append(len(hashes)), look(own, hashes))[1])
    train = [("Satz 7.", "x"), ("y", "Line 9!"), *[(f"kein {n}", f"none {n}") for n in range(1000)]]
    both, either = held_out.look(side_hashes(*map(list, zip(*train, strict=True))))
    assert (int(both.sum()), either[:2].tolist(), int(either.sum())) == (0, [True, True], 2)
    assert sum(looked) == 2 * len(train) + 2 * 4 * 50


def test_counts_of_stretches_add_up() -> None:
    held_out = HeldOut()
    assert not held_out
    assert not held_out.look(side_hashes(["a"], ["b"]))[1].any()
    held_out.add_lines("test", [["Ein Hund", "Zwei"]])
    held_out.look(side_hashes(["ein hund"], ["x"]))
    before = held_out.overlaps()["test"]
    held_out.look(side_hashes(["zwei", "zwei"], ["zwei", "y"]))
    after = held_out.overlaps()["test"]
    assert before == Overlap(2, 1, 0, 1)
    assert after.since(before) == Overlap(2, 1, 1, 2)
    assert before.joined(after.since(before)) == after

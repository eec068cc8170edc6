"""Perturbed forms of a test set, each with the translation that a system should give if the perturbation did no harm.

That translation is made from the system's translation of the unperturbed lines: in capitals for a line in capitals,
with the same address at its end, concatenated for lines that are joined. So the cost of a perturbation is the
difference between two scores of one system against one reference, and does not depend on how well it translates the
unperturbed lines.

Training offers the same changes as modifiers (ziggurat.data.modifiers), whose functions are used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import regex

from ziggurat.config.modifiers import TYPO_KINDS
from ziggurat.data.aligner import word_spans
from ziggurat.data.modifiers import MODIFIERS, PLACEHOLDERS, SOURCE, TAGS, TARGET, TYPOS, EditablePair, inserted_noise
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.significance import PerturbedScore, Robustness, judge
from ziggurat.system.errors import ConfigError, printable

Ideal = Callable[[str], str]

_EMOJI = ("🙂", "👍", "❤️", "🎉", "😂", "🙏", "🔥", "👩‍👩‍👧", "🇺🇦", "✅", "😢", "🤔")
_UNTRANSLATABLE = (
    *(text for text in PLACEHOLDERS if text.isascii()),
    *("https://www.example.com/path/to?page=3#top", "first.last@example.com", "ISO-9001", "C:\\Temp\\a.txt"),
    *("--dry-run", "0x7F3A", "INV-2024-00117", "4f9c2b1e"),
)
_WORDS_PER_TYPO = 8
_JOINED = 4
"""_JOINED is the number of lines joined into a long one."""

# After a mark that ends a sentence or clause: a full stop only after a word of three letters, which excludes most
# abbreviations; without a following space only in scripts that have none.
_CLAUSE = regex.compile(r"(?<=[!?;:,…؟،؛।])\s+|(?<=\p{L}{3}\.)\s+|(?<=[。！？；：，、])\s*")
_LETTERS = regex.compile(r"\p{L}")
_FEWEST_LETTERS = 3
"""_FEWEST_LETTERS is the minimum number of letters in a clause; shorter ones are joined to a neighbour."""


@dataclass(frozen=True)
class Case:
    """A unit that is translated and scored as one sentence.

    Attributes:
        lines: indices of the lines of the test set, from 0.
        inputs: texts to translate, in this order; the translations are joined by spaces.
        references: the reference translations of the whole case.
        ideal: the expected translation, given those of `lines` joined by spaces.
    """

    lines: tuple[int, ...]
    inputs: tuple[str, ...]
    references: tuple[str, ...]
    ideal: Ideal


@dataclass(frozen=True)
class Perturbation:
    """A way to perturb a test set.

    Attributes:
        meaning: description of what it does.
        cases: function from unchanged cases, the languages of source and target, and a random generator for each case
            to the perturbed cases.
    """

    meaning: str
    cases: Callable[[Sequence[Case], tuple[str, str], Callable[[Case], Random]], Iterator[Case]]


def perturbed(
    name: str, sources: Sequence[str], references: Sequence[Sequence[str]], languages: tuple[str, str], seed: int
) -> list[Case]:
    """Return the cases of a test set that a perturbation changes, in the order of their lines.

    A pure function of its arguments; whether a line is changed and how does not depend on the other lines, except that
    lines are joined to those that follow.

    Args:
        name: one of PERTURBATIONS.
        sources: source text.
        references: one list of lines per reference translation.
        languages: codes of source and target.
        seed: seed of the random choices.
    """
    plain = [
        Case((number,), (source,), tuple(lines[number] for lines in references), _as_it_is)
        for number, source in enumerate(sources)
        if source.strip()
    ]
    return list(PERTURBATIONS[name].cases(plain, languages, lambda case: Random(f"{seed} {name} {case.lines[0]}")))


def _as_it_is(text: str) -> str:
    return text


Each = Callable[[Case, tuple[str, str], Random], Case]


def _each(change: Each) -> Callable[[Sequence[Case], tuple[str, str], Callable[[Case], Random]], Iterator[Case]]:
    """Return the function that changes each case separately and leaves out unchanged ones."""

    def cases(plain: Sequence[Case], languages: tuple[str, str], random: Callable[[Case], Random]) -> Iterator[Case]:
        for case in plain:
            if (found := change(case, languages, random(case))).inputs != case.inputs:
                yield found

    return cases


def _recased(modifier: str) -> Each:
    """Return the change of letter case that the modifier of this name makes on both sides."""

    def change(case: Case, languages: tuple[str, str], random: Random) -> Case:
        def recased(text: str, side: int) -> str:
            pair = EditablePair(text, text)
            MODIFIERS[modifier](pair, None, random, 0, languages)
            return pair.texts[side]

        (source,) = case.inputs
        references = tuple(recased(reference, TARGET) for reference in case.references)
        return Case(case.lines, (recased(source, SOURCE),), references, lambda text: recased(text, TARGET))

    return change


def _typos(case: Case, languages: tuple[str, str], random: Random) -> Case:
    (source,) = case.inputs
    for _ in range(max(1, len(word_spans(source, "split")) // _WORDS_PER_TYPO)):
        pair = EditablePair(source, "")
        if (edit := TYPOS[random.choice(TYPO_KINDS)](source, random)) is not None:
            pair.edit(SOURCE, [edit])
        source = pair.texts[SOURCE]
    return replace(case, inputs=(source,))


def _surrounded(case: Case, before: str, after: str) -> Case:
    """Return the case with the same text around the line, its references and its translation."""

    def around(text: str) -> str:
        return f"{before}{text}{after}"

    (source,) = case.inputs
    return Case(case.lines, (around(source),), tuple(map(around, case.references)), around)


def _tags(case: Case, languages: tuple[str, str], random: Random) -> Case:
    return _surrounded(case, *random.choice(TAGS))


def _beside(choose: Callable[[Random], str]) -> Each:
    """Return the change that puts the chosen text before or after the line, on both sides."""

    def change(case: Case, languages: tuple[str, str], random: Random) -> Case:
        added = choose(random)
        before, after = (f"{added} ", "") if random.random() < 0.5 else ("", f" {added}")
        return _surrounded(case, before, after)

    return change


def _short(case: Case, languages: tuple[str, str], random: Random) -> Case:
    clauses: list[str] = []
    (source,) = case.inputs
    for part in _CLAUSE.split(source.strip()):
        if clauses and len(_LETTERS.findall(clauses[-1])) < _FEWEST_LETTERS:
            clauses[-1] = f"{clauses[-1]} {part}"
        elif part:
            clauses.append(part)
    if len(clauses) > 1 and len(_LETTERS.findall(clauses[-1])) < _FEWEST_LETTERS:
        clauses[-2:] = [" ".join(clauses[-2:])]
    return replace(case, inputs=tuple(clauses)) if len(clauses) > 1 else case


def _long(plain: Sequence[Case], languages: tuple[str, str], random: Callable[[Case], Random]) -> Iterator[Case]:
    for first in range(0, len(plain) - _JOINED + 1, _JOINED):
        group = plain[first : first + _JOINED]
        references = zip(*(case.references for case in group), strict=True)
        yield Case(
            tuple(case.lines[0] for case in group),
            (" ".join(case.inputs[0] for case in group),),
            tuple(map(" ".join, references)),
            _as_it_is,
        )


PERTURBATIONS: dict[str, Perturbation] = {
    "caps": Perturbation("source and reference in capitals", _each(_recased("upper_case"))),
    "title": Perturbation("every word of both with an initial capital", _each(_recased("title_case"))),
    "typos": Perturbation("a typo for every eight words of the source", _each(_typos)),
    "tags": Perturbation("the line between tags, such as <b> and </b>", _each(_tags)),
    "noise": Perturbation("random characters before or after the line", _each(_beside(inserted_noise))),
    "short": Perturbation("every clause translated by itself", _each(_short)),
    "long": Perturbation("four lines translated as one", _long),
    "emoji": Perturbation("an emoji before or after the line", _each(_beside(lambda random: random.choice(_EMOJI)))),
    "untranslatable": Perturbation(
        "an address, placeholder or number before or after it", _each(_beside(lambda r: r.choice(_UNTRANSLATABLE)))
    ),
}
"""PERTURBATIONS maps names to perturbations, in the order of the tables."""


def perturbation_names(given: Sequence[str], option: str) -> list[str]:
    """Return perturbations in the order of PERTURBATIONS; `all` stands for all of them.

    `option` names their origin in the ConfigError for an unknown one.
    """
    for name in given:
        if name not in PERTURBATIONS and name != "all":
            known = f"choose from {', '.join(PERTURBATIONS)}, or all"
            raise ConfigError(f"`{option}`: {printable(repr(name))} is not a perturbation; {known}")
    return [name for name in PERTURBATIONS if name in given or "all" in given]


def changes_any(names: Sequence[str], sources: Sequence[str], references: Sequence[Sequence[str]], seed: int) -> bool:
    """Return True if a perturbation changes a line; languages affect only how a line changes, never whether."""
    return any(perturbed(name, sources, references, ("", ""), seed) for name in names)


class SystemOutputs(NamedTuple):
    """The output of a system for a perturbed test set.

    Attributes:
        plain: translations of the unperturbed lines.
        perturbed: for each perturbation, one text for each of its cases.
    """

    plain: list[str]
    perturbed: dict[str, list[str]]


class PerturbedSet:
    """A test set with its perturbations.

    Args:
        names: perturbations.
        sources: source text.
        references: one list of lines per reference translation.
        languages: codes of source and target.
        seed: seed of the random choices.

    Attributes:
        texts: all texts that a system must translate: the unchanged lines, then the perturbed ones.
    """

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[str],
        references: Sequence[Sequence[str]],
        languages: tuple[str, str],
        seed: int = 0,
    ) -> None:
        self._sources = sources
        self._cases: dict[str, list[Case]] = {
            name: perturbed(name, sources, references, languages, seed) for name in names
        }
        inputs = [text for group in self._cases.values() for case in group for text in case.inputs]
        self.texts: list[str] = [*sources, *inputs]

    def outputs(self, translations: Sequence[str]) -> SystemOutputs:
        """Return the translations of `texts`, with those of a case joined by spaces."""
        rest = iter(translations)
        plain = [next(rest) for _ in self._sources]
        joined = {
            name: [" ".join(next(rest) for _ in case.inputs) for case in group] for name, group in self._cases.items()
        }
        return SystemOutputs(plain, joined)

    def judged(
        self,
        systems: Sequence[tuple[str, str]],
        found: Sequence[SystemOutputs],
        metrics: Sequence[str],
        scoring: TestSet,
    ) -> Robustness:
        """Return the costs of the perturbations; those that change no line are left out.

        Args:
            systems: name and description of each system.
            found: output of each system.
            metrics: any of sacreBLEU's.
            scoring: the unperturbed test set.
        """
        trials = [
            PerturbedScore(
                name,
                PERTURBATIONS[name].meaning,
                [" ".join(case.inputs) for case in group],
                [list(lines) for lines in zip(*(case.references for case in group), strict=True)],
                [outputs.perturbed[name] for outputs in found],
                [[case.ideal(" ".join(outputs.plain[n] for n in case.lines)) for case in group] for outputs in found],
            )
            for name, group in self._cases.items()
            if group
        ]
        left_out = [name for name, group in self._cases.items() if not group]
        names, origins = zip(*systems, strict=True)
        return judge(names, origins, trials, metrics, scoring, left_out=left_out)

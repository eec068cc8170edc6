"""A test set as it is and disturbed, as one list of texts to translate, and what translations of it tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.perturbations import PERTURBATIONS, Case, disturbed
from ziggurat.evaluate.robustness import Robustness, Trial, judge
from ziggurat.system.errors import ConfigError, printable


def perturbation_names(given: Sequence[str], option: str) -> list[str]:
    """Return perturbations in their own order; `all` stands for all of them.

    `option` is where they were given, for the ConfigError of one that there is not.
    """
    for name in given:
        if name not in PERTURBATIONS and name != "all":
            known = f"choose from {', '.join(PERTURBATIONS)}, or all"
            raise ConfigError(f"`{option}`: {printable(repr(name))} is none; {known}")
    return [name for name in PERTURBATIONS if name in given or "all" in given]


def changes_any(names: Sequence[str], sources: Sequence[str], references: Sequence[Sequence[str]], seed: int) -> bool:
    """Return True if a perturbation changes a line, whatever the languages: they say what to, never whether."""
    return any(disturbed(name, sources, references, ("", ""), seed) for name in names)


class SystemOutputs(NamedTuple):
    """What a system made of a disturbed test set.

    Attributes:
        plain: translations of the undisturbed lines.
        disturbed: of each perturbation, one text for each of its cases.
    """

    plain: list[str]
    disturbed: dict[str, list[str]]


class DisturbedSet:
    """A test set with its perturbations.

    Args:
        names: perturbations.
        sources: source text.
        references: one list of lines per reference translation.
        languages: codes of source and target.
        seed: other numbers give other random choices.

    Attributes:
        texts: all that a system is to translate: the lines as they are, then the disturbed ones.
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
            name: disturbed(name, sources, references, languages, seed) for name in names
        }
        inputs = [text for group in self._cases.values() for case in group for text in case.inputs]
        self.texts: list[str] = [*sources, *inputs]

    def outputs(self, translations: Sequence[str]) -> SystemOutputs:
        """Return the translations of `texts`, those of a case joined by blanks."""
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
        """Return what the perturbations cost; those that change no line are left out.

        Args:
            systems: name of each, and what it is in words.
            found: what each made of the texts.
            metrics: any of sacreBLEU's.
            scoring: the undisturbed test set.
        """
        trials = [
            Trial(
                name,
                PERTURBATIONS[name].meaning,
                [" ".join(case.inputs) for case in group],
                [list(lines) for lines in zip(*(case.references for case in group), strict=True)],
                [outputs.disturbed[name] for outputs in found],
                [[case.ideal(" ".join(outputs.plain[n] for n in case.lines)) for case in group] for outputs in found],
            )
            for name, group in self._cases.items()
            if group
        ]
        left_out = [name for name, group in self._cases.items() if not group]
        names, origins = zip(*systems, strict=True)
        return judge(names, origins, trials, metrics, scoring, left_out=left_out)

"""Every key, value, verb and option of Ziggurat that the pages name exists: in tables, code spans and blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from tests.docs.pages import ROOT, blocks, without_blocks
from ziggurat.cli.app import app
from ziggurat.cli.hints import hints
from ziggurat.config import parse_experiment
from ziggurat.config.reference import entries
from ziggurat.system.errors import ConfigError

FOREIGN = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
PAGES = [*FOREIGN, *(ROOT / name for name in ("README.md", "docs/tutorial.md", "docs/index.md", "docs/papers.md"))]
KEYS = {re.sub(r"\[\]", "", entry.path) for entry in entries()}
BASE = """
data:
  source_language: de
  target_language: en
  store: store
  train: [{source: a.de, target: a.en}]
  dev: [{source: b.de, target: b.en}]
model: {d_model: 512}
"""
COMPANIONS = {
    "decoding.n_best": ["decoding.beam_size=32"],
    "decoding.diverse_groups": ["decoding.beam_size=4"],
    "decoding.top_": ["decoding.search=sample"],
    "decoding.temperature": ["decoding.search=sample"],
    "decoding.epsilon": ["decoding.search=sample"],
    "decoding.mbr": ["decoding.search=sample"],
    "data.subword.kind=existing": ["data.subword.source_model=joint.model"],
    "data.subword.kind=vocabulary": ["data.subword.source_vocabulary=vocabulary.txt"],
    "data.subword.source_model": ["data.subword.kind=existing"],
    "data.subword.source_vocabulary": ["data.subword.kind=vocabulary"],
    "data.subword.target_vocabulary_size": ["data.subword.joint=false", "model.embedding.sharing=decoder"],
    "model.family=rnmt": ["model.embedding.positions=none", "model.embedding.sharing=none"],
    "training.checkpoint.average_last": ["training.checkpoint.keep_last=10"],
    "training.divergence.action": ["training.divergence.loss_spike=3"],
}
"""Keys that need others: start of an override -> the settings to add."""

OURS = re.compile(r"(data|model|training|decoding)\.[\w.]+(=.*)?", re.DOTALL)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {
    verb: {option.lstrip("-") for parameter in command.params for option in parameter.opts}
    for verb, command in COMMANDS.items()
}
SECTIONS = {"Data": "prepare", "Model": "train", "Training": "train", "Search": "translate"}
"""Heading of a table of options -> the verb whose options it lists."""


def spans(text: str) -> list[str]:
    """Return the code spans of a page outside blocks; a pipe inside a table is written `\\|`."""
    return [match.replace("\\|", "|") for match in re.findall(r"`([^`\n]+)`", without_blocks(text))]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every call of `ziggurat` in a page, without redirections and pipes."""
    lines = [line for block in blocks(text) for line in re.sub(r" \\\n\s*", " ", block).splitlines()]
    for line in [*lines, *spans(text)]:
        for piece in re.split(r" \| | && |; ", line):
            words = re.match(r"(?:[\w/. -]*[ /])?ziggurat ([a-z]+\b.*)", piece.removeprefix("$ "))
            if words:
                yield shlex.split(re.sub(r"\s[<>]\s*\S+", "", words[1]), comments=True)


def refused(*overrides: str) -> str | None:
    """Return why a configuration refuses these overrides together, or None if it accepts them."""
    companions = [other for start, more in COMPANIONS.items() if overrides[0].startswith(start) for other in more]
    try:
        parse_experiment(BASE, "base", [*companions, *overrides])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_keys_and_values_are_accepted(path: Path) -> None:
    found = [span for span in spans(path.read_text(encoding="utf-8")) if OURS.fullmatch(span)]
    assert path not in FOREIGN or len(found) > 30
    for span in found:
        if "=" in span:
            assert refused(span) is None, f"{span}: {refused(span)}"
        else:
            assert span in KEYS, span


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_are_understood(path: Path) -> None:
    count = 0
    for verb, *words in commands(path.read_text(encoding="utf-8")):
        if verb == "bulk":  # its options, and then the command that it runs
            inner = next(i for i, word in enumerate(words) if word in COMMANDS)
            options, (verb, *words) = words[:inner], words[inner:]
            COMMANDS["bulk"].make_parser(typer.Context(COMMANDS["bulk"])).parse_args(args=[*options, verb])
        command = COMMANDS[verb]
        context = command.context_class(command, info_name=verb)
        command.make_parser(context).parse_args(args=list(words))
        keys = [word for word in words if re.match(r"[a-z_]+(\.\w+)*=", word)]
        keys = [key if OURS.fullmatch(key) else f"decoding.{key}" for key in keys]
        assert not keys or refused(*keys) is None, f"{verb} {keys}: {refused(*keys)}"
        count += 1
    assert count > 1


def keys(text: str) -> set[str]:
    """Return the configuration keys in a text, written in full as in the reference."""
    found = re.findall(r"[a-z][\w.]*(?=[=`: ]|$)", text.replace("[]", "").replace(".0.", "."))
    return {key for name in found for key in (name, f"decoding.{name}") if "." in key and key in KEYS}


def agree(hint: str, ours: str) -> bool:
    """Return whether a hint shares a key with a page's advice or, if either has no key, a word."""
    if keys(hint) and keys(ours):
        return bool(keys(hint) & keys(ours))
    of_hint, of_page = (set(re.findall(r"--?[a-z]+|[a-z]+", text)) for text in (hint, ours))
    return bool((of_hint & of_page) - {"a", "and", "of", "or", "the", "with", "ziggurat"})


def answers(path: Path) -> dict[tuple[str, str], str]:
    """Return a page's tables as a mapping: (section, the toolkit's option) -> what the rows say to write instead."""
    found: dict[tuple[str, str], str] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        section = line[3:] if line.startswith("## ") else section
        if not line.startswith("| ") or section not in ("", *SECTIONS):
            continue
        theirs, ours = re.split(r"(?<!\\)\|", line)[1:3]
        names = re.findall(r"(?<![\w-])--?([a-z][\w-]*)", theirs)
        if path.stem == "opennmt-py" and section:  # keys of its file are options of its command line
            names += re.findall(r"`([a-z]\w+)(?=[`:])", theirs)
        for name in names:
            where = (section, name.replace("_", "-"))
            found[where] = f"{found.get(where, '')} {ours}"
    return found


@pytest.mark.parametrize(
    ("name", "at_least"), [("fairseq", 80), ("marian", 70), ("opennmt-py", 70), ("sockeye", 60), ("eole", 1)]
)
def test_every_option_of_a_table_is_answered_as_on_its_page(name: str, at_least: int) -> None:
    """The toolkits that are left out take their settings from files alone."""
    found, wrong = answers(ROOT / "docs" / "coming-from" / f"{name}.md"), []
    assert len(found) >= at_least
    for (section, option), ours in found.items():
        verbs = [SECTIONS[section]] if section else sorted(COMMANDS)
        if not any(option in OPTIONS[verb] or agree(hints(verb).get(option, ""), ours) for verb in verbs):
            wrong.append(f"{option}: {[hints(verb).get(option) for verb in verbs]}, the page: {ours}")
    assert not wrong, "\n".join(wrong)

"""Every key, value, verb and option of ours that the pages name exists: tables, code spans and blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from tests.docs.pages import ROOT, blocks, without_blocks
from ziggurat.cli.app import app
from ziggurat.cli.hints import HINTS
from ziggurat.config import parse_experiment
from ziggurat.config.reference import entries
from ziggurat.errors import ConfigError

FOREIGN = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
PAGES = [*FOREIGN, *(ROOT / name for name in ("README.md", "docs/tutorial.md", "docs/install.md"))]
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
"""Keys that mean something only beside others: start of an override -> what else is set."""

OURS = re.compile(r"(data|model|training|decoding)\.[\w.]+(=.*)?", re.DOTALL)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def spans(text: str) -> list[str]:
    """Return the code spans of a page outside of blocks; a pipe inside a table is written `\\|`."""
    return [match.replace("\\|", "|") for match in re.findall(r"`([^`\n]+)`", without_blocks(text))]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every call of `ziggurat` in a page, redirections and pipes left out."""
    lines = [line for block in blocks(text) for line in re.sub(r" \\\n\s*", " ", block).splitlines()]
    for line in [*lines, *spans(text)]:
        for piece in re.split(r" \| | && |; ", line):
            words = re.match(r"(?:[\w/. -]*[ /])?ziggurat ([a-z]+\b.*)", piece.removeprefix("$ "))
            if words:
                yield shlex.split(re.sub(r"\s[<>]\s*\S+", "", words[1]), comments=True)


def refused(*overrides: str) -> str | None:
    """Return why a configuration does not take overrides, all together; None: it does."""
    companions = [other for start, more in COMPANIONS.items() if overrides[0].startswith(start) for other in more]
    try:
        parse_experiment(BASE, "base", [*companions, *overrides])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_keys_and_values_are_taken(path: Path) -> None:
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
        command = COMMANDS[verb]
        context = command.context_class(command, info_name=verb)
        command.make_parser(context).parse_args(args=list(words))
        keys = [word for word in words if re.match(r"[a-z_]+(\.\w+)*=", word)]
        keys = [key if OURS.fullmatch(key) else f"decoding.{key}" for key in keys]
        assert not keys or refused(*keys) is None, f"{verb} {keys}: {refused(*keys)}"
        count += 1
    assert count > 1


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_tables_agree_with_the_hints_of_the_command_line(path: Path) -> None:
    """Where a table's option has one key beside it and the command line answers the option too, they name one key."""
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        verb = {"Data": "prepare", "Model": "train", "Training": "train", "Search": "translate"}.get(section)
        cells = [spans(cell) for cell in line.strip("|").split(" | ")] if line.startswith("| `") else []
        if verb is None or len(cells) != 2 or len(cells[0]) != 1:
            continue
        hint = HINTS[verb].get(cells[0][0].lstrip("-").split("=")[0].split(":")[0].split(" ")[0], "")
        keys = {span.split("=")[0] for span in cells[1] if OURS.fullmatch(span)}
        if keys and re.match(r"[\w.]+=", hint):
            key = hint.split("=")[0]
            assert keys & {key, f"decoding.{key}"}, f"{line}: the hint says {hint}"

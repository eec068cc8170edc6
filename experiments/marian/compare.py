"""Marian's models and their imports, compared: text, scores and alignments of the same search (README.md).

`python experiments/marian/compare.py FOLDER... --text TEXT --given TRANSLATIONS --out RESULT.json`: folders of models
and the files that Marian wrote with them, a text with a sentence per line, translations that both score, the file to
write.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ziggurat.config.load import load_experiment
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.marian_files import find_files
from ziggurat.exchange.marian_program import marian_program
from ziggurat.translate.translator import Translator, load_translator

TOLERANCE = 1e-4
"""TOLERANCE is the most by which scores (beyond the digits that Marian prints) and scores of ties may differ."""

MOST_LISTED = 20
"""MOST_LISTED is the number of lines with a different text that a result lists at most."""

_PRINTED = re.compile(r"(\d+) \|\|\| (.*?) \|\|\| (?:(\d+-\d+(?: \d+-\d+)*) \|\|\| )?F0= (\S+) \|\|\| (\S+)")


class Search(NamedTuple):
    """Options of Marian's search."""

    beam: int
    normalize: float = 0.0
    word_penalty: float = 0.0
    factor: float = 3.0

    @property
    def options(self) -> list[str]:
        """Marian's options for the search: one sentence at a time, because Marian limits lengths by the whole batch."""
        given = ["-b", self.beam, "--normalize", self.normalize, "--word-penalty", self.word_penalty]
        return list(map(str, [*given, "--max-length-factor", self.factor, "--mini-batch", 1, "--maxi-batch", 1]))

    @property
    def decoding(self) -> dict[str, Any]:
        """The keys of `decoding` that differ from those that the import writes."""
        return {
            "beam_size": self.beam,
            "n_best": self.beam,
            "length_penalty": {"alpha": self.normalize, "word_penalty": self.word_penalty},
            "max_length": {"ratio": self.factor, "extra": math.ceil(self.factor)},
        }


SEARCHES = (
    *(Search(beam, normalize) for beam in (1, 4, 12) for normalize in (0.0, 0.6, 1.0)),
    *(Search(4, 0.6, penalty) for penalty in (0.5, -0.5)),
    Search(4, 1.0, 0.0, 0.5),
)
SEARCHES_OF_FEW = (Search(1), Search(4, 0.6), Search(12, 1.0))
CHOICES = {"all": SEARCHES, "few": SEARCHES_OF_FEW, "none": ()}
"""CHOICES are the searches by the name that the command line has for them; `none`: only scores are compared."""


def named(search: Search) -> str:
    """Return the name of a search in results."""
    name = f"beam {search.beam}, normalize {search.normalize:g}"
    name += f", word-penalty {search.word_penalty:g}" if search.word_penalty else ""
    return name + (f", max-length-factor {search.factor:g}" if search.factor != 3 else "")


class Found(NamedTuple):
    """One translation: its text, its score, its links."""

    text: str
    score: float
    printed: float
    """Half a unit of the last printed digit."""
    links: str | None = None


def said_by(marian: Path, verb: str, folder: Path, *options: str, text: str | None = None) -> list[str]:
    """Return the lines that a command of Marian prints about the model of a folder."""
    files = find_files(folder)
    sides = [str(file) for file in (files.vocabularies[0], files.vocabularies[-1])]
    command = [str(marian), verb, "-m", str(files.weights), "-v", *sides, "--quiet", "--cpu-threads", "1", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def rounding(printed: float) -> float:
    """Return half a unit of the last of the six digits with which Marian prints a number."""
    return float(10.0 ** (math.floor(math.log10(abs(printed) or 1.0)) - 5) / 2)


def theirs(marian: Path, folder: Path, text: str, search: Search, *, alignment: bool = False) -> list[list[Found]]:
    """Return Marian's n-best lists of the lines."""
    more = ["--alignment", "hard"] if alignment else []
    found: list[list[Found]] = [[] for _ in text.splitlines()]
    for line in said_by(marian, "decode", folder, "--n-best", *search.options, *more, text=text):
        said = _PRINTED.fullmatch(line)
        assert said is not None, line
        score = float(said[5])
        found[int(said[1])].append(Found(said[2], score, rounding(score), said[3]))
    return found


def ours(translator: Translator, text: str, search: Search, *, alignment: bool = False) -> list[list[Found]]:
    """Return the n-best lists of our own search."""
    found = []
    for translation in translator.translate(text.splitlines(), **search.decoding, alignments=alignment):
        rows = []
        for each in translation.hypotheses:
            links = None
            if each.alignment is not None:
                # Marian may link to the end of the source, which `hard` omits.
                found_at = (row.index(max(row)) for row in each.alignment.soft)
                links = " ".join(sorted(f"{s}-{t}" for t, s in enumerate(found_at)))
            rows.append(Found(each.text, each.score, 0.0, links))
        found.append(rows)
    return found


def compared(marian: Sequence[Sequence[Found]], here: Sequence[Sequence[Found]]) -> dict[str, Any]:
    """Return how many lines have the same text, which others are ties, and by how much scores differ at most."""
    same = ties = 0
    largest = 0.0
    different = []
    for number, (a, b) in enumerate(zip(marian, here, strict=True)):
        gap = abs(a[0].score - b[0].score) - a[0].printed
        if a[0].text == b[0].text:
            same += 1
            largest = max(largest, gap)
        # The list has the other side's best, with the same score as its own best.
        elif any(each.text == b[0].text and each.score >= a[0].score - TOLERANCE - 2 * each.printed for each in a):
            ties += 1
        else:
            different.append({"line": number, "marian": a[0][:2], "ziggurat": b[0][:2]})
    return {"same": same, "ties": ties, "different": different, "score_gap": round(max(0.0, largest), 7)}


def settled(result: dict[str, Any], translator: Translator, text: str, search: Search) -> dict[str, Any]:
    """Return a result that also counts as ties the lines which match Marian's translation when translated alone.

    A different order of summing can swap candidates at the edge of a beam.
    """
    lines = text.splitlines()
    left = []
    for each in result["different"]:
        ((alone, *_),) = ours(translator, lines[each["line"]], search)
        if alone.text != each["marian"][0]:
            left.append(each)
    return result | {"ties": result["ties"] + len(result["different"]) - len(left), "different": left}


def given_scores(marian: Path, folder: Path, translator: Translator, pair: Sequence[Path]) -> dict[str, Any]:
    """Return by how much the scores of given translations differ at most; `pair` are the files with both sides."""
    printed = list(map(float, said_by(marian, "score", folder, "-t", *map(str, pair))))
    here = translator.score(*(path.read_text(encoding="utf-8").splitlines() for path in pair))
    gaps = [abs(a - b.log_probability) - rounding(a) for a, b in zip(printed, here, strict=True)]
    return {"lines": len(gaps), "score_gap": round(max(0.0, *gaps), 7)}


def _links(marian: Sequence[Sequence[Found]], here: Sequence[Sequence[Found]]) -> dict[str, int]:
    """Return how many links of translations with the same text are equal."""
    equal = total = 0
    for a, b in zip(marian, here, strict=True):
        if a[0].text != b[0].text:
            continue
        targets = 1 + max((int(link.split("-")[1]) for link in (b[0].links or "").split()), default=-1)
        mine = set((b[0].links or "").split())
        wanted = {link for link in (a[0].links or "").split() if int(link.split("-")[1]) < targets}
        equal += len(mine & wanted)
        total += len(mine | wanted)
    return {"equal": equal, "links": total}


def filled(
    entry: dict[str, Any],
    marian: Path,
    folders: tuple[Path, Path],
    files: Sequence[Path],
    searches: Sequence[Search],
) -> Iterator[str]:
    """Add the results that an entry lacks, and yield a line about each.

    Args:
        entry: results of one model.
        marian: the command.
        folders: that of Marian's model and that of its import.
        files: the text and, for scores of given translations, the translations.
        searches: those to be compared.
    """
    folder, imported = folders
    translator, text = load_translator(imported), files[0].read_text(encoding="utf-8")
    for search in searches:
        if (name := named(search)) not in entry["searches"]:
            found = compared(theirs(marian, folder, text, search), ours(translator, text, search))
            row = settled(found, translator, text, search)
            entry["searches"][name] = row | {"different": row["different"][:MOST_LISTED]}
            yield f"{name} {row['same']} {row['ties']} {row['score_gap']}"
    taught = load_experiment(imported / "config.yaml").training.loss.alignment is not None
    if searches and taught and "alignment" not in entry:
        pair = (
            theirs(marian, folder, text, Search(1), alignment=True),
            ours(translator, text, Search(1), alignment=True),
        )
        entry["alignment"] = _links(*pair)
        yield f"alignment {entry['alignment']}"
    if len(files) == 2 and "given" not in entry:
        entry["given"] = given_scores(marian, folder, translator, files)
        yield f"given {entry['given']}"


def version(marian: Path) -> str:
    """Return the version of Marian, without its build."""
    said = subprocess.run([marian, "--version"], capture_output=True, text=True, check=False)
    return (said.stdout + said.stderr).split()[0]


def main() -> None:
    """Compare the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--marian", type=Path, default=marian_program())
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--given", type=Path)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--searches", choices=CHOICES, default="all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = [_first(path, options.lines, Path(work)) for path in (options.text, options.given) if path is not None]
        lines = files[0].read_text(encoding="utf-8").count("\n")
        results |= {"marian": version(options.marian), "lines": lines}
        for folder in options.folders:
            entry = results["models"].setdefault(folder.name, {"searches": {}})
            imported = Path(work) / f"imported-{folder.name}"
            import_checkpoint(folder, imported)
            for row in filled(entry, options.marian, (folder, imported), files, CHOICES[options.searches]):
                options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                print(folder.name, row, flush=True)


def _first(path: Path, lines: int, work: Path) -> Path:
    """Return a file in the folder `work` with the first lines of another."""
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
    (work / path.name).write_text("".join(text), encoding="utf-8")
    return work / path.name


if __name__ == "__main__":
    main()

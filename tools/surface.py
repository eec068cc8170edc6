"""The public surface as text, so that a redesign does not change it by accident.

    python -m tools.surface            # compare with tests/golden/surface; name differences, exit status 1
    python -m tools.surface --write    # write it there, for an intended change

Help of every verb, `ziggurat explain` of every section, method and paper, the server's `/spec`, the keys of each
`--json` output, parameter names and shapes per kind, and the names in docs/versioning.md. The model, store and text
behind them are those of the newest golden set.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from typer import rich_utils

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "surface"
SET = max(path for path in (ROOT / "tests" / "golden").glob("v*") if path.is_dir())
"""SET is the newest golden set (tests/golden/README.md)."""

TEXT = ("--source", "corpus/dev.qlo", "--reference", "corpus/dev.qhi")
JSON_VERBS: dict[str, tuple[str, ...]] = {
    "align": ("align", "corpus/train.qlo", "corpus/train.qhi", "-o", "links", "--json"),
    "diagnose": ("diagnose", "run", "--json"),
    "evaluate": ("evaluate", "run", *TEXT, "--json"),
    "compare": ("compare", "corpus/dev.qhi", "corpus/dev.qlo", *TEXT, "--json"),
    "explain": ("explain", "training.schedule", "--json"),
    "explain METHOD": ("explain", "dlcl", "--json"),
    "explain PAPER": ("explain", "sdt", "--json"),
    "export": ("export", "run", "--to", "plain", "-o", "exported", "--json"),
    "export --check": ("export", "--check", "config.yaml", "--json"),
    "fetch --list": ("fetch", "--list", "--json"),
    "inspect": ("inspect", "config.yaml", "--no-check", "--json"),
    "recipes": ("recipes", "--json"),
    "score": ("score", "run", "--source", "corpus/dev.qlo", "--target", "corpus/dev.qhi", "--json"),
    "translate": ("translate", "run", "-i", "corpus/dev.qlo", "--json", "alignments=true"),
}
"""JSON_VERBS maps a name to the command whose `--json` output is read, run in a copy of the golden set."""


def run(*words: str) -> str:
    """Run a verb in this process and return what it writes to stdout. Raises SystemExit when it fails."""
    from ziggurat.cli import main

    out, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(f"ziggurat {' '.join(words)}: exit status {stop.code}\n{written(said)}") from None
    return written(out)


def written(stream: io.TextIOWrapper) -> str:
    """Return what was written to a stream in memory."""
    stream.seek(0)
    return stream.read()


def help_texts() -> str:
    """Help of the command and of every verb, at 100 columns."""
    import typer.main

    from ziggurat.cli.app import app

    verbs = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    pages = [run("--help"), *(run(verb, "--help") for verb in verbs)]
    return "".join(re.sub(r" +$", "", page, flags=re.MULTILINE) for page in pages)


def explanations() -> str:
    """The output of `explain` for every section of an experiment, every method and every paper."""
    from ziggurat.config.choices import choices
    from ziggurat.config.recipes import paper_keys
    from ziggurat.config.reference import entries

    sections = dict.fromkeys(entry.path.rpartition(".")[0] for entry in entries())
    methods = sorted({str(choice.value) for choice in choices() if choice.value})
    return "\n".join(run("explain", name) for name in [*sections, *methods, *sorted(paper_keys())])


def specification() -> str:
    """The server's `/spec`, with the exported model of the golden set."""
    from starlette.testclient import TestClient

    from ziggurat.serve.config import ServeConfig
    from ziggurat.serve.server import app_of

    config = ServeConfig.model_validate({"models": [{"path": "ctranslate2", "threads": 1}]})
    with TestClient(app_of(config, lambda text: None)) as client:
        return json.dumps(client.get("/spec").json(), indent=1, sort_keys=True) + "\n"


def key_paths(document: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every key in a document; items of lists share `[]`."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield f"{path}.{key}"
            yield from key_paths(value, f"{path}.{key}")
    elif isinstance(document, list):
        for item in document:
            yield from key_paths(item, f"{path}[]")


def json_keys() -> str:
    """The keys of each verb's `--json` output."""
    lines = []
    for name, words in sorted(JSON_VERBS.items()):
        text = run(*words)
        try:
            documents = [json.loads(text)]
        except json.JSONDecodeError:  # JSON lines
            documents = [json.loads(line) for line in text.splitlines()]
        found = sorted({path for document in documents for path in key_paths(document)})
        lines += [f"{name}: {path}" for path in found]
    return "".join(f"{line}\n" for line in lines)


def parameters() -> str:
    """Names and shapes of the parameters of a small model for each kind, changing one axis at a time."""
    from tests.composition import AXES, model
    from ziggurat.model.build import build_model

    def lines(title: str, choices: dict[str, Any]) -> list[str]:
        try:
            built = build_model(model(choices), 13, 13)
        except ValueError as refused:
            return [f"{title}: refused: {type(refused).__name__}"]
        return [f"{title}: {name} {list(p.shape)}" for name, p in built.named_parameters()]

    plain = lines("", {})
    found = [*plain]
    for axis, values in AXES.items():
        for value in values:
            title = f"{axis}={value}"
            changed = lines(title, {axis: value})
            found += [line for line in changed if line.removeprefix(title) not in plain]
            found += [f"{title} lacks{line}" for line in plain if f"{title}{line}" not in changed]
    return "".join(f"{line}\n" for line in found)


def python_names() -> str:
    """Signatures of the names that docs/versioning.md promises."""
    page = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")
    lines = []
    for name in re.findall(r"^\| `(ziggurat[\w.]*)` ", page, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute)
        try:
            signature = str(inspect.signature(found))
        except ValueError:
            signature = ""
        # Before a release, modules and parameter types are not promised; functions are printed with addresses.
        signature = re.sub(r"ziggurat[.][a-z_.0-9]+[.]|<function .*? at 0x[0-9a-f]+>", "", signature)
        lines.append(f"{attribute}{signature}")
    return "".join(f"{line}\n" for line in lines)


PARTS: dict[str, Callable[[], str]] = {
    "help.txt": help_texts,
    "explain.txt": explanations,
    "spec.json": specification,
    "json_keys.txt": json_keys,
    "parameters.txt": parameters,
    "python.txt": python_names,
}
"""PARTS maps a file of the golden folder to the function that makes its text."""


@contextlib.contextmanager
def inside_a_copy() -> Iterator[None]:
    """Context in which the current folder is a copy of the golden set and a terminal has 100 columns and no colours."""
    before, environment = Path.cwd(), dict(os.environ)
    os.environ.update(COLUMNS="100", NO_COLOR="1", TERM="dumb")
    width, rich_utils.MAX_WIDTH = rich_utils.MAX_WIDTH, 100  # Typer reads TERMINAL_WIDTH once, when it is imported
    with tempfile.TemporaryDirectory(prefix="ziggurat-surface-") as folder:
        os.chdir(shutil.copytree(SET, Path(folder) / "set", symlinks=True))
        try:
            yield
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            rich_utils.MAX_WIDTH = width


def differences(name: str) -> list[str]:
    """Return the diff lines between a part of the surface and the golden one."""
    golden = (GOLDEN / name).read_text(encoding="utf-8").splitlines()
    with inside_a_copy():
        found = PARTS[name]().splitlines()
    return list(difflib.unified_diff(golden, found, f"golden/{name}", name, lineterm="", n=1))


def main() -> None:
    """Compare the surface with the golden one, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tests/golden/surface instead of comparing with it")
    if parser.parse_args().write:
        GOLDEN.mkdir(exist_ok=True)
        for name, text in PARTS.items():
            with inside_a_copy():
                (GOLDEN / name).write_text(text(), encoding="utf-8")
        return
    unlike = [line for name in PARTS for line in differences(name)]
    print("\n".join(unlike) if unlike else "the surface is the same")
    sys.exit(bool(unlike))


if __name__ == "__main__":
    main()

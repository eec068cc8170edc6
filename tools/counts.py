"""Counts that show how easy it is to find one's way around the package, for comparison before and after a clean-up.

    python -m tools.counts [--json] [--list] [--calls]

Lines are physical lines; a module's users are the modules of the package that import it or a name from it (a package's
`__init__` that re-exports a name is not a user, but modules that import the name from there are). `--calls` trains for
one update and counts the package's functions between `training.loop.train` and the model's forward pass. `--list` names
what was counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import tempfile
import tokenize
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "ziggurat"


def dotted(path: Path) -> str:
    """Return a file's name as a module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def users(trees: dict[str, ast.Module], packages: set[str]) -> dict[str, set[str]]:
    """Return who imports each module; names that a package re-exports count for the module that defines them."""
    passed: dict[str, str] = {}  # package.name -> module that it comes from
    for package in packages:
        for node in ast.walk(trees[package]):
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                passed.update({f"{package}.{alias.name}": str(node.module) for alias in node.names})
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = {f"{node.module}.{alias.name}" for alias in node.names}
                targets = {t if t in trees else passed.get(t, str(node.module)) for t in targets}
            else:
                continue
            for target in targets & trees.keys():
                if target != name and name not in packages:
                    found[target].add(name)
    return found


def comment_lines(source: str) -> int:
    """Return how many lines hold only a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type == tokenize.COMMENT and t.line.strip().startswith("#") for t in tokens)


def code_lines(tree: ast.Module, source: str) -> tuple[int, int]:
    """Return how many physical and logical lines are code: without blank lines, comments, docstrings and imports."""
    prose = {
        line
        for node in ast.walk(tree)
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        or isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    physical = sum(number not in prose and bool(line.strip()) and line.strip()[0] != "#" for number, line in lines)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return physical, sum(t.type == tokenize.NEWLINE and t.start[0] not in prose for t in tokens)


def import_lines(tree: ast.Module) -> int:
    """Return how many lines are imports."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            total += (node.end_lineno or node.lineno) - node.lineno + 1
    return total


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's lines from `def` to its end, without decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def calls_to_the_model() -> list[str]:
    """Return the functions between the training loop and the model's forward pass, as `file: function`."""
    from rich.console import Console

    from ziggurat.config.recipes import load_named
    from ziggurat.data.babel import write_corpus
    from ziggurat.data.prepare import prepare
    from ziggurat.model.seq2seq import Seq2Seq
    from ziggurat.train.loop import train

    found: list[list[str]] = []
    forward = Seq2Seq.forward

    def watched(self: Seq2Seq, *arguments: Any) -> Any:
        stack = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
        found.append([f"{Path(frame.filename).relative_to(PACKAGE)}: {frame.name}" for frame in stack])
        return forward(self, *arguments)

    Seq2Seq.forward = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        files = write_corpus(Path(folder), train=200, dev=20, test=20)
        paths = [
            f"data.{split}.0.{side}={file}"
            for split in ("train", "dev")
            for side, file in zip(("source", "target"), files[split], strict=True)
        ]
        options = ["data.subword.vocabulary_size=400", f"data.store={folder}/store", "training.stop.updates=1"]
        experiment = load_named("demo", [*paths, *options, "training.validation.max_sentences=2"])
        prepare(experiment.data)
        train(Path(folder) / "run", experiment, console=Console(file=io.StringIO()))
    updates = [stack for stack in found if any(name.endswith(": train_update") for name in stack)]
    stack = updates[0] if updates else found[-1]
    begin = max(n for n, name in enumerate(stack) if name.startswith("train/loop.py"))
    return stack[begin + 1 :]


def count() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures, and the names behind some of them."""
    files = sorted(PACKAGE.rglob("*.py"))
    sources = {dotted(path): path.read_text(encoding="utf-8") for path in files}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    packages = {dotted(path) for path in files if path.name == "__init__.py"}
    lengths = {name: len(source.splitlines()) for name, source in sources.items()}
    functions = [
        (name, node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    verbs = [(name, node) for name, node in functions if name.startswith("ziggurat.cli.")]
    inner = [(name, node) for name, node in functions if not name.startswith("ziggurat.cli.")]
    longest, longest_verb = (max(part, key=lambda f: body_length(f[1])) for part in (inner, verbs))
    classes: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    used_by = users(trees, packages)
    single = {n: next(iter(used_by[n])) for n in trees if n not in packages and len(used_by[n]) == 1}
    opened = {name: (ast.get_docstring(tree) or "").split(" ")[0] for name, tree in trees.items()}
    relative = sorted(name for name, word in opened.items() if word in ("What", "Which", "How", "Whether", "Where"))
    basenames = Counter(path.name for path in files if path.name != "__init__.py")
    total = sum(lengths.values())
    comments = sum(comment_lines(source) for source in sources.values())
    imported = sum(import_lines(tree) for tree in trees.values())
    twice = {name: modules for name, modules in classes.items() if len(modules) > 1}
    attributes = sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        for tree in trees.values()
        for node in ast.walk(tree)
    )
    code, logical = map(sum, zip(*(code_lines(tree, sources[name]) for name, tree in trees.items()), strict=True))
    figures = {
        "files": len(files),
        "lines": total,
        "physical lines of code": code,
        "logical lines of code": logical,
        "logical per physical": round(logical / code, 3),
        "median lines per file": statistics.median(lengths.values()),
        "files over 500 lines": sum(length > 500 for length in lengths.values()),
        "files under 60 lines": sum(length < 60 for length in lengths.values()),
        "longest function": f"{body_length(longest[1])} {longest[0]}.{longest[1].name}",
        "longest verb": f"{body_length(longest_verb[1])} {longest_verb[0]}.{longest_verb[1].name}",
        "functions with more than 8 parameters": sum(
            len(f.args.args) + len(f.args.kwonlyargs) + len(f.args.posonlyargs) > 8 for _, f in functions
        ),
        "functions with a return type, %": round(
            100 * sum(f.returns is not None for _, f in functions) / len(functions)
        ),
        "getattr and hasattr": attributes,
        "lines of imports, %": round(100 * imported / total, 1),
        "lines that are only comment, %": round(100 * comments / total, 2),
        "modules with one user": len(single),
        "of these under 60 lines": sum(lengths[name] < 60 for name in single),
        "files that share a basename": sum(n for n in basenames.values() if n > 1),
        "public class names used twice": len(twice),
        "module docstrings that begin with What, Which, How, Whether or Where": len(relative),
        "lines of README.md": len((PACKAGE.parent / "README.md").read_text(encoding="utf-8").splitlines()),
    }
    names = {"modules with one user": single, "class names used twice": twice, "docstrings": relative}
    return figures, names


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--list", action="store_true", help="name what was counted")
    parser.add_argument("--calls", action="store_true", help="train for one update and count the calls to the model")
    options = parser.parse_args()
    figures, names = count()
    if options.calls:
        calls = names["calls"] = calls_to_the_model()
        figures["calls from the training loop to the model"] = len(calls)
    if options.json:
        print(json.dumps({**figures, **({"names": names} if options.list else {})}, indent=1))
        return
    for what, figure in figures.items():
        print(f"{what:70} {figure}")
    if options.list or options.calls:
        print(json.dumps(names, indent=1))


if __name__ == "__main__":
    main()

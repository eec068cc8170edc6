"""The layers of the package: which imports are allowed, and how long a module may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ziggurat"
MODULES = sorted(PACKAGE.rglob("*.py"))

UNDER = {
    "system": "",
    "config": "system",
    "data": "system config",
    "evaluate": "system config data",
    "model": "system config data",
    "translate": "system config data model",
    "train": "system config data evaluate model translate",
    "inspect": "system config data evaluate model translate train",
    "exchange": "system config data evaluate model translate",
    "corpora": "system config data evaluate model translate train inspect exchange",
    "serve": "system config data model translate",
    "cli": "system config data evaluate model translate train inspect exchange corpora serve",
}
"""UNDER maps a room of the package to the rooms that it may import (docs/architecture.md)."""
LOOSE = {"__init__.py", "__main__.py"}
"""LOOSE are the modules that are in no room."""
OVER_BUDGET = {
    "serve/app.py": (520, "an application and all that lies around each of its requests"),
    "data/cleaning/pair_score.py": (520, "a classifier of pairs, from words to features to weights"),
}
"""OVER_BUDGET maps a module of more than 500 lines to its limit and to what it holds together."""
SHORT = {
    "__init__.py": "the face of the package",
    "__main__.py": "python -m ziggurat",
    "corpora/pipeline/demo_data.py": "the two pipelines that come with the package",
    "serve/text/documents/program_values.py": "what readers of JSON, gettext, XLIFF and Markdown leave alike",
}
"""SHORT maps a module under 60 lines to why it stands alone; `__init__.py` files need no reason."""


def test_exceptions_to_the_length_of_modules_are_needed() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert all(lines[name] > 500 for name in OVER_BUDGET)
    assert all(lines[name] < 60 for name in SHORT)


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, lazily or for typing only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what a module uses"
            names.add(str(node.module))
    return names


def room(path: Path) -> str:
    """The room of a module."""
    return path.relative_to(PACKAGE).parts[0]


def test_the_package_has_twelve_rooms() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(UNDER)
    assert {path.name for path in PACKAGE.glob("*.py")} == LOOSE


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent != PACKAGE], ids=str)
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    used = {name.split(".")[1] for name in imports(path) if name.startswith("ziggurat.")} - {room(path)}
    assert used <= set(UNDER[room(path)].split())
    if room(path) == "translate":
        data = {name for name in imports(path) if name.startswith("ziggurat.data.")}
        # Subwords, text processing before and after them, shortlists, and language tags.
        assert data <= {f"ziggurat.data.{name}" for name in ("subword", "lines", "shortlist", "vocabulary")}
    layers = path.parent.parent.name == "model" and path.parent.name in ("attention", "history", "residual", "fast")
    if layers and path.name != "kinds.py":  # the tables that build from a configuration
        assert not any(name.startswith("ziggurat.config") for name in imports(path)), "layers take numbers, not configs"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_within_their_length(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= OVER_BUDGET.get(name, (500, ""))[0]
    assert lines >= 60 or name in SHORT or path.name == "__init__.py"


def graph() -> dict[str, set[str]]:
    """Return a map from a module to the modules of the package that it imports, at once or late, except for types."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        blocks = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        typing = {id(node) for block in blocks for node in block.body}
        lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in typing]
        targets = {(str(node.module), alias.name) for node in lines for alias in node.names}
        found[name] = {f"{m}.{n}" if f"{m}.{n}" in names else m for m, n in targets} & names.keys() - {name}
    return found


def test_there_are_no_import_cycles() -> None:
    left = graph()
    while ends := [name for name, used in left.items() if not used & left.keys()]:
        for name in ends:
            del left[name]
    assert not left, "in circles, or above one"


def test_no_module_imports_anothers_underscore_name() -> None:
    """A name without an underscore is public; there is no `__all__`."""
    taken = {
        f"{path.relative_to(PACKAGE)}: {node.module}.{alias.name}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ziggurat")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    }
    assert not taken
    lists = [path for path in MODULES if "\n__all__ = " in path.read_text(encoding="utf-8")]
    assert not lists


def test_the_reading_order_has_every_module_of_data() -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / "data" / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = {path.stem for path in (PACKAGE / "data").glob("*.py")} - {"__init__"}
    assert names <= set(re.findall(r"\w+", said))


@pytest.mark.slow
def test_config_and_data_need_no_torch() -> None:
    collating = {PACKAGE / "data" / name for name in ("loader.py",)}
    modules = [
        "ziggurat." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in MODULES
        if path.parent in (PACKAGE / "config", PACKAGE / "data")
        and path not in collating
        and path.name != "__init__.py"
    ]
    assert len(modules) > 30
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.slow
def test_translating_imports_no_library_that_it_does_not_use() -> None:
    """Importing any of these takes at least a tenth of a second, torch's compiler and its parts at least a second."""
    unused = ["pyarrow", "matplotlib", "transformers", "ctranslate2", "sacrebleu", "torch._dynamo", "torch._inductor"]
    large = ["torch", "numpy", "sentencepiece", "safetensors", "pyarrow"]
    program = f"""
import sys, ziggurat.cli.app, ziggurat.cli.translation
print(*(name for name in {large} if name in sys.modules))
import ziggurat.translate.translator
print(*(name for name in {unused} if name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n"


@pytest.mark.slow
def test_nothing_loads_pickles() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert all("weights_only=True)" in call for call in re.findall(r"torch\.load\(.*", text)), path
        assert not re.search(r"pickle\.(load|loads|Unpickler)\(", text), path  # its error types may be used
        assert not {"dill", "joblib", "cloudpickle"} & imports(path), path


def test_the_page_has_a_line_for_every_package() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    for package in sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")):
        assert f"\n| `ziggurat/{package}` | " in page, f"{package} is not in the table of docs/architecture.md"


def test_test_modules_have_unique_names() -> None:
    """Test folders are not packages: pytest collects only one of two modules with the same name."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


SAME_NAME = {
    "backtranslation.py": "the verb, and the job",
    "base.py": "what a folder's modules share: histories, residuals, sections",
    "kinds.py": "one table of kinds for each subject (docs/architecture.md)",
    "app.py": "the application of a server, and of the command line",
    "corpora.py": "the verbs on corpora, and the step of a pipeline",
    "ctranslate2.py": "export to it, and translation by it",
    "depth.py": "depth that changes: its settings, and the model with the new depth",
    "documents.py": "those of the verb, and those over HTTP",
    "engine.py": "the engine of a server's model, of a pipeline, and the choice of one by a verb",
    "evaluation.py": "the verb, and the step of a pipeline",
    "files.py": "files on disk, and files over HTTP",
    "lines.py": "lines of corpora, of documents, of synthetic pairs",
    "notices.py": "those on settings, and those on translated texts",
    "modifiers.py": "their configuration, and their edits",
    "pipeline.py": "its configuration, and its verb",
    "preparation.py": "the verb, and the job in shards",
    "training.py": "the verb, and the step of a pipeline",
    "tuning.py": "the sweep, and its verb",
}
"""SAME_NAME maps a basename shared by several modules to what each of them contributes to the subject of its room."""


def test_modules_of_one_name_do_the_same_for_different_subjects() -> None:
    names = [path.name for path in MODULES if path.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} == SAME_NAME.keys()


def test_no_two_public_classes_share_a_name() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    public = [name for name in names if not name.startswith("_")]
    assert not {name for name in public if public.count(name) > 1}


OPTIONS = {
    "Loader": "the order of training data is a function of all of them",
    "Translator": "a model, its tokenizers and how it searches",
    "RelativeAttention": "that of its base class, and one more",
    "compare": "a verb for Python",
    "export_model": "a verb for Python",
    "forward": "autograd passes tensors one by one",
    "sweep": "a verb for Python",
}
"""OPTIONS maps a function or class with more than 8 parameters, except verbs, to the reason."""


def test_functions_are_short() -> None:
    """Functions have at most 60 lines of code and 8 parameters; verbs have as many options as the command line."""
    many = set()
    for path in MODULES:
        if room(path) == "cli":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owners = {id(n): c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for n in c.body}
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            name = owners.get(id(node), node.name) if node.name == "__init__" else node.name
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in given)
            assert lines <= 60, f"{path}: {name} has {lines} lines"
            assert count <= 8 or name in OPTIONS, f"{path}: {name} has {count} parameters"
            many |= {name} if count > 8 else set()
    assert many == OPTIONS.keys()

"""Pages of the API reference: one per package, from docstrings in the source, which is never imported.

    python -m tools.api_pages build/api

The package is not imported, so the site builds without PyTorch. Names without a leading underscore are shown.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

SECTIONS = re.compile(r"(Args|Attributes|Returns|Raises|Yields):")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def version(root: Path) -> str:
    """Return the package's `__version__`."""
    found = re.search(r'__version__ = "([^"]+)"', (root / "ziggurat" / "__init__.py").read_text(encoding="utf-8"))
    assert found
    return found[1]


def first_sentence(docstring: str) -> str:
    """Return the first sentence on one line, or the first paragraph if it is a list of phrases."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph)[0]


def prose(docstring: str) -> str:
    """Return a docstring as Markdown: arguments as lists, pages of docs/ as links, and no HTML."""
    lines: list[str] = []
    inside = False  # a section such as `Args:`
    for line in inspect.cleandoc(docstring).splitlines():
        if SECTIONS.fullmatch(line):
            lines += ["", f"**{line}**", ""]
            inside = True
        elif inside and line.startswith("    "):
            name, colon, meaning = line[4:].partition(": ")
            begins = colon and not line[4:].startswith(" ") and re.fullmatch(r"[\w*, `.\[\]]+", name)
            lines.append(f"- `{name.strip('`')}`: {_plain(meaning)}" if begins else f"  {_plain(line.strip())}")
        else:
            inside = inside and not line
            lines.append(line if line.startswith("    ") else _plain(line))
    return "\n".join(lines).strip()


def _plain(text: str) -> str:
    """Return a line with each `<` outside code escaped, and with links to the pages that it names."""
    parts = re.split(r"(`[^`]*`)", text)
    for number in range(0, len(parts), 2):
        parts[number] = parts[number].replace("<", r"\<").replace("](", "]\\(")
        parts[number] = re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](../\1)", parts[number])
    return "".join(parts)


def signature(node: Definition) -> str:
    """Return the signature of a function or class, one argument per line if it is long."""
    if isinstance(node, ast.ClassDef):
        made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head, arguments, result = f"class {node.name}", made.args if made else None, f"  # {bases}" if bases else ""
    else:
        head, arguments = f"{node.name}", node.args
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if arguments is None:
        return head + result
    own = (arguments.posonlyargs + arguments.args)[:1]
    if own and own[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    line = f"{head}({ast.unparse(arguments)}){result}"
    if len(line) <= 100:
        return line
    pieces = _arguments(arguments)
    return "\n".join([f"{head}(", *(f"    {piece}," for piece in pieces), f"){result}"])


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return each argument as written in the source."""
    text = ast.unparse(arguments)
    pieces, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            pieces.append(text[start:place].strip())
            start = place + 1
    return [*pieces, text[start:].strip()]


def _public(tree: ast.Module) -> list[Definition]:
    """Return the public definitions of a module, in the order of the file."""
    return [node for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]


def _definition(node: Definition, prefix: str = "", level: int = 3) -> list[str]:
    lines = [f"{'#' * level} `{prefix}{node.name}`", "", "```python", signature(node), "```", ""]
    lines += [prose(ast.get_docstring(node) or ""), ""]
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            documented = isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner)
            if documented and not inner.name.startswith("_"):
                lines += _definition(inner, f"{node.name}.", level + 1)
    return lines


def page(package: str, modules: dict[str, ast.Module]) -> str:
    """Return the page of one package: a table of its modules, then what each of them defines."""
    texts = {name: ast.get_docstring(tree) or "" for name, tree in modules.items()}
    lines = ["---", "tocdepth: 2", "---", "", f"# {package}", "", prose(texts.get(package, "")), ""]
    lines += ["| module | what it is |", "|---|---|"]
    for name, text in texts.items():
        if name != package:
            sentence = _plain(first_sentence(text)).replace("|", r"\|")
            lines.append(f"| [`{name.removeprefix('ziggurat.')}`](#{_anchor(name)}) | {sentence} |")
    for name, tree in modules.items():
        definitions = _public(tree)
        if name == package and not definitions:
            continue
        lines += ["", f"## `{name}`", "", *([] if name == package else [prose(texts[name]), ""])]
        for node in definitions:
            lines += _definition(node)
    return "\n".join(lines).rstrip() + "\n"


def _anchor(name: str) -> str:
    """Return the anchor that GitHub gives a heading: without dots."""
    return name.replace(".", "").lower()


def pages(root: Path) -> dict[str, str]:
    """Return the name and text of every page: one per package directly below ziggurat, and one for its own modules."""
    found: dict[str, dict[str, ast.Module]] = {"ziggurat": {}}
    for path in sorted((root / "ziggurat").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        package = ".".join(parts[:2]) if len(parts) > 2 else "ziggurat"
        found.setdefault(package, {})[dotted] = ast.parse(path.read_text(encoding="utf-8"))
    texts = {name: page(name, dict(sorted(modules.items()))) for name, modules in sorted(found.items())}
    lines = ["# API reference", "", "Generated from the docstrings of this version. Names that are stable"]
    lines += ["across versions are listed in [versioning](../versioning.md); others may change at any time.", ""]
    lines += ["| package | what it is |", "|---|---|"]
    for name, modules in sorted(found.items()):
        lines.append(f"| [{name}]({name}.md) | {_plain(first_sentence(ast.get_docstring(modules[name]) or ''))} |")
    lines += ["", "```{toctree}", ":hidden:", "", *texts, "```"]
    return {"index": "\n".join(lines) + "\n", **texts}


def write(root: Path, folder: Path) -> None:
    """Write the pages; unchanged ones are left alone, so that Sphinx need not read them again."""
    texts = pages(root)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        if old.stem not in texts:
            old.unlink()
    for name, text in texts.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[1], Path(sys.argv[1]))

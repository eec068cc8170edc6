"""Pipelines in the package: `demo` with its corpora, and `starter`, a file to start from."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from ziggurat.data.babel import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate, write_corpus
from ziggurat.system.files import write_atomically

DEMO, DEMO_FOLDER, STARTER = "demo", "demo-pipeline", "starter"
EMBEDDED = (DEMO, STARTER)
"""Names of the embedded pipelines."""

_PAIRS, _TEXTS = 10_000, 3_000
_HOST = "babel.example"
_REGISTRY = f"""\
# The embedded language pair as public corpora: an example of a user's registry (docs/data.md)
corpora:
  babel/{{part}}/{{a}}-{{b}}:
    title: Sentences of Low and High Babel, an artificial language pair
    pairs: {SOURCE_LANGUAGE}-{TARGET_LANGUAGE}
    files: [{{url: "https://{_HOST}/{{part}}.{{a}}"}}, {{url: "https://{_HOST}/{{part}}.{{b}}"}}]
    licence: Apache-2.0
    known_from: ziggurat
  babel-text/{{a}}:
    title: Sentences of one of the two
    files: [{{url: "https://{_HOST}/text.{{a}}"}}]
    licence: Apache-2.0
    known_from: ziggurat
"""


def embedded_text(name: str, folder: str = DEMO_FOLDER) -> str:
    """Return the YAML of an embedded pipeline; `folder` is that of the demo."""
    text = (resources.files("ziggurat.corpora.pipeline") / f"{name}.yaml").read_text(encoding="utf-8")
    if folder == DEMO_FOLDER:
        return text
    # Quoted, as in JSON, since a folder's name may have a meaning in YAML: `a, b`, `a #1`.
    return re.sub(rf"{DEMO_FOLDER}([\w./]*)", lambda place: json.dumps(folder + place[1], ensure_ascii=False), text)


def write_demo(folder: Path) -> None:
    """Write the file and the corpora of `demo` into its folder, with the corpora as a mirror of its registry's URLs.

    Existing files stay.
    """
    mirror = folder / "mirror" / _HOST
    registry = folder / "corpora.yaml"
    if registry.exists():
        return
    write_corpus(mirror, train=_PAIRS, dev=300, test=300)
    for side, language in enumerate((SOURCE_LANGUAGE, TARGET_LANGUAGE)):
        texts = (pair[side] for pair in generate(_TEXTS, seed=2 + side))
        write_atomically(mirror / f"text.{language}", "".join(f"{text}\n" for text in texts).encode())
    write_atomically(folder / "pipeline.yaml", embedded_text(DEMO, str(folder)).encode())
    write_atomically(registry, _REGISTRY.encode())  # last: it shows that all of them exist

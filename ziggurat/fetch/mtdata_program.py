"""The program that runs in mtdata's environment: it looks names up in mtdata's index and writes what that says of them.

`python -I mtdata_program.py REQUEST ANSWER`, both JSON files. It imports nothing of ziggurat, and downloads nothing.

Request: {"protocol": 1, "ids": [id, ...]} or {"protocol": 1, "languages": [one or two codes], "words": [text, ...]}.
Answer: {"protocol": 1, "version": of mtdata, "entries": [{"id", "languages", "spellings", "urls", "ext", "in_ext",
"in_paths", "cols", "cite"}, ...]}, or {"protocol": 1, "error": text}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ["main"]

_MOST_LISTED = 2000


def main(request_path: str, answer_path: str) -> None:
    """Read the request and write the answer, which appears in one piece."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        answer = _answer(request)
    except ImportError as error:
        answer = {"error": f"{error}; install it there: pip install mtdata"}
    except Exception as error:  # any error is reported by the process that waits for the answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(f"{answer_path}.part", "w", encoding="utf-8") as file:
        json.dump({"protocol": 1, **answer}, file)
    os.replace(f"{answer_path}.part", answer_path)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return version and entries, by the interface of mtdata 0.5."""
    if request["protocol"] != 1:
        raise ValueError(f"a request of protocol {request['protocol']}, expected 1")
    import mtdata
    from mtdata.entry import DatasetId, Langs
    from mtdata.index import INDEX, get_entries

    if "ids" in request:
        found = []
        for name in request["ids"]:
            wanted = DatasetId.parse(name)
            if wanted not in INDEX:
                raise LookupError(f"no entry {name}; `mtdata/LANG-LANG` with --list names those of two languages")
            found.append(INDEX[wanted])
    else:
        found = get_entries(Langs("-".join(request["languages"])), None, fuzzy_match=True)
        words = [word.lower() for word in request["words"]]
        found = [entry for entry in found if all(word in str(entry.did).lower() for word in words)][:_MOST_LISTED]
    return {"version": mtdata.__version__, "entries": [_described(entry) for entry in found]}


def _described(entry: Any) -> dict[str, Any]:
    """Return an entry as JSON."""
    urls = [entry.url] if isinstance(entry.url, str) else list(entry.url)
    languages = [str(language) for language in entry.did.langs]
    return {
        "id": str(entry.did),
        "languages": languages,
        "spellings": [_spellings(language) for language in languages],
        "urls": urls,
        "ext": entry.ext,
        "in_ext": entry.in_ext,
        "in_paths": list(entry.in_paths or []),
        "cols": list(entry.cols or []),
        "cite": list(entry.cite or []),
    }


def _spellings(language: str) -> list[str]:
    """Return the codes of a language: its own, the three letters, and the two where there are such."""
    from mtdata.iso.iso639_1 import ISO693_1_to_3

    three = language.split("_")[0]
    return [language, three, *(two for two, other in ISO693_1_to_3.items() if other == three)]


if __name__ == "__main__":
    main(*sys.argv[1:])

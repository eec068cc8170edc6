"""COMET (Rei et al. 2020, 2022), run in a separate Python environment.

unbabel-comet pins versions of packages that conflict with ours. The adapter starts the other environment's Python on
comet_program.py, passes it the sentences as JSON and reads the scores back.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.evaluate.scores import MeanMetric, MeanSignature, check_lines
from ziggurat.system.errors import ConfigError, printable

DEFAULT_MODEL = "Unbabel/wmt22-comet-da"
"""Trained on human judgements up to 2021; needs a reference. Apache-2.0."""

_NON_COMMERCIAL = "CC-BY-NC-SA-4.0, not for commercial use"
LICENCES = {
    "Unbabel/wmt20-comet-da": "Apache-2.0",
    DEFAULT_MODEL: "Apache-2.0",
    "Unbabel/wmt22-cometkiwi-da": _NON_COMMERCIAL,
    "Unbabel/wmt23-cometkiwi-da-xl": _NON_COMMERCIAL,
    "Unbabel/wmt23-cometkiwi-da-xxl": _NON_COMMERCIAL,
    "Unbabel/XCOMET-XL": _NON_COMMERCIAL,
    "Unbabel/XCOMET-XXL": _NON_COMMERCIAL,
}
"""Model, by its name at huggingface.co -> licence."""

_PROGRAM = Path(__file__).with_name("comet_program.py")
_PROTOCOL = 1


@dataclass(frozen=True)
class CometEnvironment:
    """The environment that COMET runs in, and its options."""

    python: str
    """Python of an environment with unbabel-comet."""
    model: str = DEFAULT_MODEL
    """Name at huggingface.co, or the path of a checkpoint file."""
    batch_size: int = 16
    """Sentences in a batch."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one."""
    say: Callable[[str], None] = print
    """Takes a message with the model and its licence before anything is downloaded."""


class Comet(MeanMetric):
    """COMET as unbabel-comet reports it: the mean over sentences, about 0 to 1 for most models.

    Of several references only the first is used.
    """

    name = "COMET"
    decimals = 4

    def __init__(
        self, references: Sequence[Sequence[str]], sources: Sequence[str], environment: CometEnvironment
    ) -> None:
        """`sources` are the lines of the source text. Raises ConfigError where the Python does not exist."""
        from shutil import which

        if which(environment.python) is None:
            raise ConfigError(
                f"{printable(environment.python, 4096)}: no such program; COMET needs the Python of a separate "
                "environment: python3 -m venv comet-env && comet-env/bin/pip install unbabel-comet"
            )
        check_lines(sources, references, "the source text")
        self._references, self._sources, self._environment = references, sources, environment
        self._version = "comet-unknown"

    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return the score of each line of each of `outputs`; the model is loaded once for all.

        Raises ConfigError, with the program's message, when the scores are not complete.
        """
        for lines in outputs:
            check_lines(lines, self._references)
        samples = [
            {"src": source, "mt": line, "ref": reference}
            for lines in outputs
            for source, line, reference in zip(self._sources, lines, self._references[0], strict=True)
        ]
        scores, self._version = self._ask(samples)
        size = len(self._sources)
        return [scores[start : start + size] for start in range(0, len(scores), size)]

    def signature(self) -> MeanSignature:
        """Return the signature; its version is known after sentences were scored."""
        return MeanSignature({"nrefs": 1, "model": self._environment.model}, self._version)

    def _ask(self, samples: list[dict[str, str]]) -> tuple[list[float], str]:
        """Return one score for each sample, and COMET's version."""
        environment = self._environment
        licence = LICENCES.get(environment.model, f"see https://huggingface.co/{environment.model}")
        if Path(environment.model).is_file():
            licence = "of the file's origin"
        environment.say(f"COMET: model {environment.model}, licence {licence}; downloaded unless it is there already")
        with tempfile.TemporaryDirectory(prefix="ziggurat-comet-") as folder:
            asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
            request = {
                "protocol": _PROTOCOL,
                "model": environment.model,
                "batch_size": environment.batch_size,
                "device": environment.device,
                "samples": samples,
            }
            asked.write_text(json.dumps(request), encoding="utf-8")
            # -I keeps our PYTHONPATH and the program's folder out of sys.path, where they would hide its packages.
            command = [environment.python, "-I", str(_PROGRAM), str(asked), str(answered)]
            # Our standard output is for results; the program's output goes to standard error.
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False)
            return _answer(answered, len(samples), environment.python, ended.returncode)


def _answer(path: Path, expected: int, python: str, status: int) -> tuple[list[float], str]:
    """Return scores and version from the program's answer. Raises ConfigError where they are not complete."""
    who = f"COMET by {printable(python, 4096)}"
    try:
        answer: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{who}: ended with status {status} and without an answer; see its messages above") from None
    if not isinstance(answer, dict) or answer.get("protocol") != _PROTOCOL:
        raise ConfigError(f"{who}: an answer in another protocol than {_PROTOCOL}")
    if "error" in answer:
        raise ConfigError(f"{who}: {printable(str(answer['error']), 500)}")
    scores = answer.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != expected
        or not all(isinstance(score, float) and -1e6 < score < 1e6 for score in scores)  # False for NaN
    ):
        raise ConfigError(f"{who}: expected {expected} scores, one per sentence, and got something else")
    return scores, f"comet-{answer.get('version', 'unknown')}"

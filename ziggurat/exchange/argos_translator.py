"""Translation with a package of `--to argos` as Argos Translate reads it, for the check of an export."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from ziggurat.system.checksums import check_folder
from ziggurat.system.errors import CheckpointError
from ziggurat.translate.lines import one_line
from ziggurat.translate.results import Hypothesis, Translation
from ziggurat.translate.served_results import ctranslate2_module

_SEARCH = {"beam_size": 4, "length_penalty": 0.2, "min_decoding_length": 1, "max_decoding_length": 256}
"""Argos Translate's settings, and CTranslate2's where it has none."""
_BATCH_TOKENS = 4096


class ArgosTranslator:
    """Translator by a package alone: plain SentencePiece, then CTranslate2, as Argos Translate calls them.

    Three of its habits are left out, which are no matter of the package: it splits lines into sentences, writes a blank
    for every `_`, and a piece of the source for an unknown token.

    Args:
        path: folder with one .argosmodel; nothing of it is unpacked on the disk.

    Raises ConfigError when ctranslate2 is not installed, CheckpointError when there is no package, or a damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        ctranslate2 = ctranslate2_module()
        check_folder(Path(path))
        packages = sorted(Path(path).glob("*.argosmodel"))
        if len(packages) != 1:
            raise CheckpointError(f"{path}: holds {len(packages)} .argosmodel files, not one; export the model again")
        try:
            with zipfile.ZipFile(packages[0]) as archive:
                files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
            inside = {name.removeprefix("model/"): file for name, file in files.items() if name.startswith("model/")}
            self._tokenizer = sentencepiece.SentencePieceProcessor(model_proto=files["sentencepiece.model"])
            self._model = ctranslate2.Translator(str(packages[0]), device="cpu", files=inside)
            self._eos = json.loads(inside["config.json"])["eos_token"]
        except (OSError, KeyError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{packages[0]}: damaged ({error}); export the model again") from None

    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> list[Translation]:
        """Return one Translation per line, by Argos Translate's search, or with the settings of `decoding`.

        Only `beam_size`, `length_penalty.alpha`, `min_length` and `max_length.limit` of `decoding` are used.
        """
        search = dict(_SEARCH)
        if decoding:
            search = {
                "beam_size": decoding["beam_size"],
                "length_penalty": decoding["length_penalty"]["alpha"],
                "min_decoding_length": decoding["min_length"],
                "max_decoding_length": decoding["max_length"]["limit"] + 1,  # and end-of-sentence
            }
        sources = self._tokenizer.encode(list(lines), out_type=str)
        wanted = [source for source in sources if source]
        results = iter(
            self._model.translate_batch(
                wanted,
                max_batch_size=_BATCH_TOKENS,
                batch_type="tokens",
                return_scores=True,
                return_end_token=True,
                **search,
            )
        )
        empty = Hypothesis("", 0.0, 0.0, [], [], True)
        return [
            Translation(line, [self._hypothesis(next(results), search["length_penalty"]) if source else empty])
            for line, source in zip(lines, sources, strict=True)
        ]

    def _hypothesis(self, result: Any, alpha: float) -> Hypothesis:
        pieces, score = result.hypotheses[0], result.scores[0]
        ended = pieces[-1:] == [self._eos]
        length = len(pieces)
        pieces = pieces[: length - ended]
        # Argos Translate removes one blank, which a first piece that is not in the vocabulary has before it.
        text = self._tokenizer.decode_pieces(pieces).replace("\u2581", " ").removeprefix(" ")
        return Hypothesis(one_line(text), score, score * length**alpha, pieces, [], ended, ends=int(ended))

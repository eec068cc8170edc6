"""Translation with an exported directory by stock transformers, for the check of an export."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import DecodingConfig
from ziggurat.config.load import change_section
from ziggurat.exchange.huggingface import transformers
from ziggurat.system.checksums import check_folder
from ziggurat.translate.results import Hypothesis, Translation
from ziggurat.translate.state import length_batches


@contextlib.contextmanager
def _quiet(module: Any) -> Iterator[None]:
    """Keep transformers from showing its progress bars, and from recommending a package that is not needed."""
    logging = module.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # MarianTokenizer would normalise punctuation by sacremoses; our models are trained on text as it is.
            warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


class HuggingFaceTranslator:
    """Translator by `AutoTokenizer` and `AutoModelForSeq2SeqLM.generate`, called as users of transformers call them.

    Args:
        path: directory with model and tokenizer; nothing is downloaded.

    Raises ConfigError when transformers is not installed, CheckpointError when a file has changed since it was written.
    """

    def __init__(self, path: str | Path) -> None:
        module = transformers()
        check_folder(Path(path))
        with _quiet(module):
            self._tokenizer = module.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            self._model = module.AutoModelForSeq2SeqLM.from_pretrained(str(path), local_files_only=True).eval()

    @torch.inference_mode()
    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> list[Translation]:
        """Return one Translation per line, by `generate` with its saved settings, or with those of `decoding`.

        Only `beam_size`, `length_penalty`, `min_length` and `max_length.limit` of `decoding` are used. Scores are those
        of `generate`.
        """
        options: dict[str, Any] = {}
        if decoding:
            section = change_section(DecodingConfig(), decoding, "decoding")
            options = {
                "num_beams": section.beam_size,
                "early_stopping": "never" if section.beam_size > 1 else False,
                "length_penalty": section.length_penalty.alpha,
                "max_new_tokens": section.max_length.limit + 1,
                "min_new_tokens": section.min_length,  # else the saved one would hold
            }
        lengths = [len(ids) for ids in self._tokenizer(list(lines)).input_ids]
        found: dict[int, Translation] = {}
        # Batches of like lengths, longest first; results go back into the order of the lines.
        for batch in length_batches(lengths, 1024):
            inputs = self._tokenizer([lines[i] for i in batch], return_tensors="pt", padding=True)
            given = self._model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
            scores = getattr(given, "sequences_scores", None)
            for row, i in enumerate(batch):
                score = 0.0 if scores is None else float(scores[row])
                # Without the first token, which is the decoder's first input.
                found[i] = Translation(lines[i], [self._hypothesis(given.sequences[row].tolist()[1:], score)])
        return [found[i] for i in range(len(lines))]

    def _hypothesis(self, ids: list[int], score: float) -> Hypothesis:
        eos = self._tokenizer.eos_token_id
        finished = eos in ids
        kept = ids[: ids.index(eos)] if finished else ids
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        pieces = self._tokenizer.convert_ids_to_tokens(kept)
        return Hypothesis(text, score, score, pieces, [], finished, ends=int(finished))

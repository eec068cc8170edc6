"""Translation of text by CTranslate2 with an exported model, without PyTorch.

The search is CTranslate2's. With `length_penalty.alpha: 0` (or `beam_size: 1`) it gives the same results as ziggurat's
search with `endings: beam`. With a penalty it stops once 2 `beam_size` hypotheses have ended, whereas ziggurat's search
continues until none can improve (benchmarks/README.md has figures).

Importing this needs neither PyTorch nor CTranslate2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

from ziggurat.config import DecodingConfig
from ziggurat.config.load import change_section, load_experiment
from ziggurat.data.subword import load_tokenizers
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.files import check_folder
from ziggurat.system.processes import usable_cpus
from ziggurat.translate.engines import (
    EXPORT_FILE,
    NO_LINE_INPUTS,
    is_converted,
    is_export,
    read_converted,
    read_report,
    refuse_unsupported,
    unsupported_settings,
)
from ziggurat.translate.interface import TextTranslator
from ziggurat.translate.options import ARGUMENTS, LineExtras, TranslateOptions
from ziggurat.translate.results import Alignment, Hypothesis, Notices, TargetScore, Translation, one_line, side_by_side
from ziggurat.translate.text_lines import (
    begins_word,
    check_tag,
    count_untagged,
    ends_in_word,
    first_word,
    in_parts,
    without_nul,
)

PIECES = 256
"""PIECES is the number of next pieces searched for those that may follow a prefix."""
_HEADS = 4
"""_HEADS is the number of candidate pieces extended per requested word, since several may start the same word."""


class Call(NamedTuple):
    """Settings of a call: the search, further options, and the pieces with which the first translation starts."""

    decoding: DecodingConfig
    options: TranslateOptions
    forced: list[str]

    @property
    def tag(self) -> list[str]:
        """Tag pieces before every source."""
        return [] if self.options.tag is None else [self.options.tag]

    @property
    def batching(self) -> dict[str, Any]:
        """Arguments of CTranslate2 that batch lines by tokens, without a length limit: long lines are already split.

        Without the last argument, it would silently truncate sources and the translations that it scores.
        """
        return {"max_batch_size": self.decoding.batch_tokens, "batch_type": "tokens", "max_input_length": 0}


class SearchResult(NamedTuple):
    """One result of the search.

    Attributes:
        pieces: pieces without end-of-sentence.
        score: score after the length penalty.
        ended: whether it ended.
    """

    pieces: list[str]
    score: float
    ended: bool


def ctranslate2_module() -> Any:
    """Return the CTranslate2 module. Raises ConfigError if it is not installed."""
    try:
        import ctranslate2
    except ModuleNotFoundError:
        raise ConfigError("`ctranslate2` is not installed: pip install 'ziggurat-mt[translate]'") from None
    return ctranslate2


def opened(ctranslate2: Any, path: str | Path, device: str, workers: int, threads: int | None) -> Any:
    """Return CTranslate2's translator for a directory. Raises CheckpointError if CTranslate2 cannot open it."""
    kind, _, index = device.partition(":")
    try:
        return ctranslate2.Translator(
            str(path), device=kind, device_index=int(index or 0), inter_threads=workers, intra_threads=threads or 0
        )
    except (IndexError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: CTranslate2 cannot open it: {error}") from None


def heads_of(pieces: Sequence[SearchResult], call: Call) -> list[list[str]]:
    """Return the prefix extended by each next piece that may follow it; these start the words to choose from.

    Raises DataError if none can follow a whole word.
    """
    whole = call.options.complete and bool(call.forced) and ends_in_word(call.forced[-1])
    found = [each.pieces for each in pieces if not each.ended and not (whole and not begins_word(each.pieces[-1]))]
    if not found:
        raise DataError("the model finds nothing that could follow the prefix as a whole word; leave the word out")
    return found[: _HEADS * call.decoding.n_best]


def by_next_word(found: Sequence[list[SearchResult]], call: Call, limit: int) -> list[SearchResult]:
    """Return the best results whose words after the prefix differ, cut at `limit` pieces."""
    words: dict[tuple[str, ...], SearchResult] = {}
    for each in (results[0] for results in found):
        ended = each.ended and len(each.pieces) <= limit
        word = first_word(each.pieces[len(call.forced) :])
        words.setdefault(word, each._replace(pieces=each.pieces[:limit], ended=ended))
    return list(words.values())[: call.decoding.n_best]


def found_of(results: Sequence[Any], eos: str) -> list[list[SearchResult]]:
    """Return CTranslate2's results of each source; `eos` is the piece that ends a translation."""
    return [
        [
            SearchResult(pieces[:-1] if ended else pieces, score, ended)
            for pieces, score in zip(result.hypotheses, result.scores, strict=True)
            for ended in [pieces[-1:] == [eos]]
        ]
        for result in results
    ]


def hypothesis_of(
    found: SearchResult, text: str, alpha: float, token_scores: Sequence[float], alignment: Alignment | None
) -> Hypothesis:
    """Return a result as a hypothesis; `alpha` is the exponent of the length penalty."""
    length = max(1, len(found.pieces) + found.ended)
    return Hypothesis(
        text=text,
        score=found.score,
        log_probability=found.score * length**alpha,  # CTranslate2 returns only the score after the penalty
        tokens=found.pieces,
        token_log_probabilities=list(token_scores[: length if found.ended else len(found.pieces)]),
        finished=found.ended,
        alignment=alignment,
        ends=int(found.ended),
    )


def _rescored(hypotheses: Sequence[Hypothesis], alpha: float, *, sort: bool) -> list[Hypothesis]:
    """Return hypotheses with scores computed from those of their tokens; `sort` puts the best first."""
    found = []
    for each in hypotheses:
        total, length = sum(each.token_log_probabilities), max(1, len(each.token_log_probabilities))
        found.append(replace(each, log_probability=total, score=total / length**alpha))
    return sorted(found, key=lambda each: -each.score) if sort else found


def _alignment_of(attention: Sequence[Sequence[float]], source: Sequence[str], tag: int, eos: str) -> Alignment:
    """Return the alignment to the pieces of a source, of which the first `tag` represent no text.

    `attention` has the weights of a row's pieces and possibly more columns; the weight of the end, `eos`, is the
    remainder to 1.
    """
    # In a batch with longer sources, rows have end-of-sentence and padding after the source's pieces.
    rows = [[float(weight) for weight in row[: len(source)]] for row in attention]
    return Alignment.of([*source, eos], [[*row, max(0.0, 1.0 - sum(row))] for row in rows], tag)


def joined(source: str, parts: list[list[Hypothesis]], notices: Notices) -> Translation:
    """Return the translation of a line, given the results for each of its parts; count it if it was cut."""
    if not parts:
        return Translation(source, [Hypothesis("", 0.0, 0.0, [], [], True)], 0)
    translation = side_by_side(source, parts, max(map(len, parts)))
    if not translation.hypotheses[0].finished:
        notices.add("unfinished", "a translation was cut at the length limit (`decoding.max_length`)")
    return translation


_PATIENCE = 2.0  # with its default of 1, BLEU with a length penalty fell by 0.3 on a trained model


class CTranslate2Translator(TextTranslator):
    """Translator of text with a CTranslate2 directory; its results have the same form as those of Translator.

    Args:
        path: the directory.
        device: `auto` or `cpu`, `cuda`, `cuda:1`, ...
        threads: CPU threads; None: CTranslate2's default, or one per core if there are several workers.
        workers: batches translated at the same time, each with an equal share of the threads, at least one.
        segmenters: SentencePiece models of source and target, for a folder that another toolkit's converter wrote
            (ziggurat.translate.engines); None: those in the folder.
        decoding: keys of the `decoding` section that replace the saved ones.

    Raises CheckpointError: no such directory, or a damaged one. ConfigError: ctranslate2 is not installed, or does not
    support one of the settings.
    """

    own_search = False

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        workers: int = 1,
        segmenters: Sequence[Path | None] = (None, None),
        **decoding: Any,
    ) -> None:
        super().__init__()
        ctranslate2 = ctranslate2_module()
        check_folder(Path(path))  # first, because CTranslate2 reads damaged weights without an error
        exported = is_export(path)
        if not exported and not is_converted(path):
            raise CheckpointError(f"{path}: not a CTranslate2 directory of `ziggurat export` (no {EXPORT_FILE})")
        if exported and any(segmenters):
            raise ConfigError(f"{path}: has its vocabularies; leave out `--source-model` and `--target-model`")
        self._made = read_report(Path(path)) if exported else None
        refuse_unsupported(decoding, self._made)
        self._after_source: tuple[str, ...] = ()
        if self._made is not None:
            experiment = load_experiment(Path(path) / "config.yaml")
            self.source_tokenizer, self.target_tokenizer = load_tokenizers(path)
            saved, self.target_language = experiment.decoding, experiment.data.target_language
            self._positions = self._made.positions
        else:
            found = read_converted(Path(path), segmenters)
            self.source_tokenizer, self.target_tokenizer = found.source, found.target
            saved, self.target_language = DecodingConfig(endings="beam"), ""
            self._positions, self._after_source = found.positions, found.after_source
        self.decoding = change_section(saved, decoding, "decoding")
        self.max_positions: int | None = self._positions
        if workers > 1:
            threads = max(1, (threads or usable_cpus()) // workers)
        self.before_step: Callable[[], None] = lambda: None  # its search has no callback between steps
        self._model = opened(ctranslate2, path, device, workers, threads)
        self.device: str = self._model.device
        kind = "exported model" if exported else "another toolkit's model"
        self.origin = f"{path}: {kind}, by CTranslate2 {ctranslate2.__version__} ({self._model.compute_type})"
        tokenizer = self.target_tokenizer
        never = sorted({tokenizer.pad, tokenizer.bos, *tokenizer.tags.values()} - {tokenizer.eos} if exported else ())
        self._never, self._begin = [[piece] for piece in tokenizer.pieces(never)], [tokenizer.pieces([tokenizer.bos])]
        self._eos = tokenizer.pieces([tokenizer.eos])[0]
        self._ids = {piece: number for number, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}
        self._settings(TranslateOptions())  # reject settings before any text is read

    def _translated(
        self,
        tasks: Iterable[tuple[list[str], LineExtras]],
        options: TranslateOptions,
        *,
        constrained: bool,
    ) -> Iterator[list[Translation]]:
        """Yield the translations of windows of lines.

        The option `scores` adds the log-probability of each token, by one more pass over the translations. The next
        words of `next_words` start with the most likely pieces. Raises DataError for a prefix with more tokens than a
        translation may have, or that nothing can follow; ConfigError for constraints and terms.
        """
        if constrained or options.terms is not None:
            raise ConfigError(NO_LINE_INPUTS)
        call = self._settings(options)
        return (self._window(texts, call, extras.prefixes) for texts, extras in tasks)

    def _window(self, texts: Sequence[str], call: Call, prefixes: Sequence[str]) -> list[Translation]:
        if not prefixes and not call.options.begun:
            return self._translate_window(texts, call)
        # One by one, because the lengths of prefixes count against the limit, which applies to a whole call of
        # CTranslate2.
        forced = self.target_tokenizer.encode(without_nul(prefixes or [call.options.prefix] * len(texts)))
        pairs = zip(texts, map(self.target_tokenizer.pieces, forced), strict=True)
        return [self._translate_window([text], call._replace(forced=pieces))[0] for text, pieces in pairs]

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None, first: int = 0
    ) -> list[TargetScore]:
        """Raise ConfigError, because an exported model cannot score."""
        raise ConfigError(f"{self.origin}: scores of given translations need the model itself, not an export of it")

    def _settings(self, options: TranslateOptions) -> Call:
        changes = options.changes(self.decoding)
        asked = {key: value for key, value in changes.items() if value is not None or key == "shortlist"}
        refuse_unsupported(asked, self._made)
        decoding = change_section(self.decoding, asked, "decoding", ARGUMENTS)
        if missing := unsupported_settings(decoding):
            raise ConfigError(f"CTranslate2 has no {', '.join(missing)}")
        check_tag(options.tag, self.source_tokenizer.tags)
        return Call(decoding, options, [])

    def _translate_window(self, texts: Sequence[str], call: Call) -> list[Translation]:
        limit = min(call.decoding.max_source_pieces, max(1, self._positions - 1 - len(call.tag)))
        tokenizer = self.source_tokenizer
        count_untagged(bool(call.tag), texts, tokenizer, self.notices)
        of_texts = [new for _, new in in_parts(texts, tokenizer.encode, limit, self.notices, tokenizer.unk)]
        parts = [part for new in of_texts for part in new]
        first = 1 if call.forced or call.options.next_words else 0  # parts that start with the prefix
        others = call._replace(forced=[], options=replace(call.options, next_words=False, complete=False))
        found = iter([*self._search(parts[:first], call), *self._search(parts[first:], others)])
        self.on_finished(len(parts))
        pairs = zip(texts, of_texts, strict=True)
        return [joined(text, list(islice(found, len(new))), self.notices) for text, new in pairs]

    def _search(self, parts: list[list[int]], call: Call) -> list[list[Hypothesis]]:
        """Return the n best of each part.

        All parts are searched together with the largest of their limits. A part with a result that did not end, or that
        exceeds the part's limit, is searched again with that limit: unlike ziggurat's, CTranslate2's search ranks
        truncated translations together with those that ended.
        """
        rule, forced = call.decoding.max_length, call.forced
        most = min(rule.limit, self._positions - 1)
        sources = [[*call.tag, *self.source_tokenizer.pieces(part), *self._after_source] for part in parts]
        longest = min(max(rule.limit, call.decoding.max_source_pieces), self._positions - 1)
        if len(forced) > longest:
            raise DataError(f"a prefix has {len(forced)} tokens, but at most {longest} are allowed; shorten it")
        limits = [max(len(forced), min(int(rule.ratio * len(part) + rule.extra), most)) for part in parts]
        if not sources:
            return []
        if call.options.next_words or (call.options.complete and forced):
            one = call.decoding.n_best if call.options.next_words else 1
            call = call._replace(decoding=call.decoding.model_copy(update={"n_best": one}))
            (pieces,) = self._run(sources, len(forced) + 1, call, min(PIECES, len(self._ids)), alternatives=True)
            heads = heads_of(pieces, call)
            words = self._run(sources * len(heads), limits[0] + 1, call, 1, heads)
            return self._hypotheses(sources, [by_next_word(words, call, limits[0])], call)
        found = self._run(sources, max(limits) + 1, call, call.decoding.n_best)
        again: dict[int, list[int]] = defaultdict(list)
        for number, (results, limit) in enumerate(zip(found, limits, strict=True)):
            if not all(result.ended and len(result.pieces) <= limit for result in results):
                again[limit].append(number)
        for limit, numbers in again.items():
            retried = self._within(limit, [sources[n] for n in numbers], call)
            for number, results in zip(numbers, retried, strict=True):
                found[number] = results
        return self._hypotheses(sources, found, call)

    def _within(self, limit: int, sources: list[list[str]], call: Call) -> list[list[SearchResult]]:
        """Return the best translations of at most `limit` pieces that ended, or the best one cut there if none did."""
        # More results than could end within the limit, so that no ended translation is lost behind truncated ones.
        decoding, found = call.decoding, list[list[SearchResult]]()
        everything = decoding.beam_size * (limit + 2) if decoding.beam_size > 1 else 1
        for source, results in zip(sources, self._run(sources, limit + 1, call, everything), strict=True):
            ended = [result for result in results if result.ended][: decoding.n_best]
            if not ended:
                cut = self._run([source], limit, call, 1)[0][0]
                ended = [cut._replace(ended=False)]
            found.append(ended)
        return found

    def _run(
        self,
        sources: list[list[str]],
        steps: int,
        call: Call,
        count: int,
        heads: list[list[str]] | None = None,
        *,
        alternatives: bool = False,
    ) -> list[list[SearchResult]]:
        """Return up to `count` results of each source, best first, cut after `steps` pieces with end-of-sentence.

        Each starts with its head, or all start with the prefix. `alternatives` differ in the next piece.
        """
        decoding, beam, penalty = call.decoding, call.decoding.beam_size, call.decoding.length_penalty
        listed = decoding.shortlist is not None and not (heads or call.forced or alternatives)
        results = self._model.translate_batch(
            sources,
            target_prefix=heads or ([call.forced] * len(sources) if call.forced else None),
            **call.batching,
            beam_size=beam,
            # CTranslate2 stops after `patience` times the beam size have ended, enough to find `count`.
            patience=max(_PATIENCE, count / beam),
            num_hypotheses=count,
            length_penalty=penalty.alpha if penalty.kind != "none" else 0,
            max_decoding_length=max(1, steps),
            min_decoding_length=min(decoding.min_length, max(1, steps) - 1),
            use_vmap=listed,
            # CTranslate2 (4.8.5) crashes if told to suppress tokens that the shortlist leaves out.
            suppress_sequences=self._begin if listed else self._never,
            disable_unk=not decoding.writes_unknown,
            return_alternatives=alternatives,
            return_scores=True,
            return_end_token=True,
        )
        return found_of(results, self._eos)

    def _hypotheses(
        self, sources: list[list[str]], found: list[list[SearchResult]], call: Call
    ) -> list[list[Hypothesis]]:
        """Return the results as hypotheses, with token scores if requested."""
        alpha = call.decoding.length_penalty.alpha if call.decoding.length_penalty.kind != "none" else 0.0
        pairs = [(s, result.pieces) for s, results in zip(sources, found, strict=True) for result in results]
        scores: Iterator[list[float]] = repeat([])
        begun = bool(call.forced) or call.options.next_words
        if call.options.scores or begun:
            scored = self._model.score_batch([s for s, _ in pairs], [pieces for _, pieces in pairs], **call.batching)
            scores = iter([list(map(float, result.log_probs)) for result in scored])
        alignments = iter(self._alignments(pairs, call)) if call.decoding.alignments else repeat(None)
        every = [
            [hypothesis_of(each, self._text(each.pieces), alpha, next(scores), next(alignments)) for each in results]
            for results in found
        ]
        if not begun:
            return every
        # CTranslate2 scores only the pieces after the given ones, which include the next word.
        return [_rescored(part, alpha, sort=not call.options.next_words) for part in every]

    def _alignments(self, pairs: list[tuple[list[str], list[str]]], call: Call) -> list[Alignment]:
        """Return the alignment of each pair of source and translation.

        Each is decoded again, as the prefix of a greedy search: CTranslate2 (4.8.5) returns the attention of another
        sentence of the batch for the first piece of a beam search.
        """
        told = self._model.translate_batch(
            [source for source, _ in pairs],
            target_prefix=[pieces for _, pieces in pairs],
            **call.batching,
            beam_size=1,
            max_decoding_length=1 + max(len(pieces) for _, pieces in pairs),
            return_attention=True,
        )
        eos = self.source_tokenizer.pieces([self.source_tokenizer.eos])[0]
        return [
            _alignment_of(result.attention[0][: len(pieces)], source, len(call.tag), eos)
            for (source, pieces), result in zip(pairs, told, strict=True)
        ]

    def _text(self, pieces: Sequence[str]) -> str:
        unknown = self.target_tokenizer.unk
        return one_line(self.target_tokenizer.decode([self._ids.get(piece, unknown) for piece in pieces]))

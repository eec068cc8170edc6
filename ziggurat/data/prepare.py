"""`ziggurat prepare`: from parallel text to a store, in three passes over the files.

It counts and checks (ziggurat.data.inputs), samples the corpora to train tokenizers and the aligner, and encodes
(ziggurat.data.encoding). Every pass streams the files again, so memory does not grow with the corpora. A store made
from the same settings and inputs is reused.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from ziggurat.config.data import DataConfig
from ziggurat.config.notices import unread_files
from ziggurat.data.cleaning.cleaner import (
    Comparisons,
    Scorers,
    cleaners_of,
    held_out_label,
    overlap_notices,
    total_overlap,
)
from ziggurat.data.corpus import STORE_FORMAT, Store, read_manifest
from ziggurat.data.encoding import EncodedBlock, encode_corpora, store_block
from ziggurat.data.inputs import (
    Corpus,
    Progress,
    align_corpora,
    count_pairs,
    find_corpora,
    note_origins,
    nothing_left,
    short_row_notices,
    side_notices,
)
from ziggurat.data.signs import sign_notices
from ziggurat.data.store_checks import InputWatch, changed_since, other_files, provenance
from ziggurat.data.subword import Tokenizer, save_tokenizers
from ziggurat.data.subword_training import (
    even_shares,
    existing_tokenizers,
    sampled_blocks,
    train_pair_scores,
    train_tokenizers,
)
from ziggurat.data.table import TableWriter
from ziggurat.data.vocabulary import rare_notices, size_notices, tag_notices, unknown_notices
from ziggurat.data.word_links import words_of
from ziggurat.system.errors import ConfigError, DataError, Problem, Remedy
from ziggurat.system.files import MANIFEST, content_checksum, fingerprint, holds_only, is_store, write_atomically
from ziggurat.system.processes import usable_cpus
from ziggurat.system.staging import TEMPORARY, Staging, building, sweep, tidy
from ziggurat.system.yaml_text import keys_of, shown


def sample_sentences(
    corpora: Sequence[Corpus],
    config: DataConfig,
    side: str,
    progress: Progress,
    scorers: Scorers | None = None,
) -> Iterator[str]:
    """Yield the normalised sentences that the subword model is trained on, in file order, in constant memory.

    They are a random choice (a function of the counts alone) of at most `subword.sample_pairs` pairs, the same number
    from each corpus that has enough. Pairs that the filters drop are left out, except those dropped by comparison with
    others: duplicates stay. `side` is `source`, `target`, or `joint` for both. Raises DataError: the filters leave none
    of the sampled pairs.
    """
    cleaners = cleaners_of(config, corpora, scorers)
    counts: Counter[str] = Counter()
    shares = even_shares([corpus.read for corpus in corpora], config.subword.sample_pairs)
    kept = 0
    for sources, targets in sampled_blocks(corpora, cleaners, shares, config.unicode, counts, progress):
        kept += len(sources)
        yield from {"source": sources, "target": targets}.get(side) or chain(sources, targets)
    if not kept:
        raise nothing_left(sum(shares), counts, corpora)


class Trained(NamedTuple):
    """Everything learned from the corpora before any pair is encoded."""

    tokenizers: tuple[Tokenizer, Tokenizer]
    notices: list[Problem]
    scorers: Scorers
    """The pair scores that filters use."""


class PreparedParts(Protocol):
    """Parts of a store that were made elsewhere (ziggurat.corpora.jobs.preparation)."""

    def learned(self, directory: Path) -> Trained:
        """Return the same as `learn`."""

    def blocks(self, split: str, comparisons: Comparisons) -> Iterator[EncodedBlock]:
        """Yield the same as ziggurat.data.encoding.encode_corpora."""


def learn(corpora: Sequence[Corpus], config: DataConfig, directory: Path, progress: Progress) -> Trained:
    """Learn from the corpora and return the result; the tokenizers are saved in `directory`.

    The corpora are counted and checked, and get an aligner if `data.alignment.compute` asks for one. Raises ConfigError
    for a filter that is not installed, and the errors of what it calls.
    """
    training = [corpus for corpus in corpora if corpus.split == "train"]
    cleaners_of(config, training)  # before the long passes: a package may be missing, a script unknown
    tags = list(dict.fromkeys(c.config.tag for c in corpora if c.config.tag is not None))
    subword = config.subword
    # Existing ones are loaded before the long passes, since errors in them are cheap to find.
    existing = subword.kind in ("existing", "vocabulary")
    known = existing_tokenizers(subword, config.unicode, tags) if existing else None
    count_pairs(corpora, progress, words_of(config, known))
    scorers = train_pair_scores(training, config, progress)
    tokenizers = known or train_tokenizers(
        subword, config.unicode, tags, lambda side: sample_sentences(training, config, side, progress, scorers)
    )
    save_tokenizers(directory, *tokenizers)
    align_corpora(corpora, config, tokenizers, progress)
    signs = {corpus.key: corpus.signs for corpus in corpora}
    notices = [
        *short_row_notices(corpora),
        *side_notices(corpora, config),
        *sign_notices(signs, config, segmented=subword.kind == "vocabulary", symbols=config.subword.symbols or ()),
        *tag_notices(config, tokenizers[0].tags),
    ]
    return Trained(tokenizers, notices, scorers)


@dataclass(frozen=True)
class CorpusReport:
    """Counts of one corpus of a split: pairs in its files, kept in the store, dropped by reason, and corrections."""

    split: str
    name: str
    read: int
    kept: int
    dropped: dict[str, int]
    carriage_returns: int
    byte_order_marks: int
    short_rows: int = 0
    """Rows of a TSV file that had too few columns (`row_columns`) and were skipped."""
    aligned: int | None = None
    """Pairs in the store that have word alignments; None if no corpus was to have any."""
    licences: dict[str, str] = field(default_factory=dict)
    """Corpus name -> licence, for the public corpora from which `fetch` made the files."""
    changed: list[str] = field(default_factory=list)
    """Files that have changed since they were fetched while the other side is unchanged."""
    repaired: int = 0
    """Pairs whose text was mended, including dropped ones."""


@dataclass(frozen=True)
class PrepareReport:
    """Result of `prepare`."""

    store: str
    reused: bool
    """True if a store with the same settings and inputs already existed, so nothing was done."""
    seconds: float
    source_vocabulary: int
    """Number of ids of the source side, including control symbols and tags."""
    target_vocabulary: int
    joint_vocabulary: bool
    source_pieces: int
    """Number of pieces of all training sources, including the tags of their corpora."""
    target_pieces: int
    corpora: list[CorpusReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """Suspicious findings that may not be faults, such as sides that look swapped, or test sentences in training
    pairs."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        document = asdict(self)
        del document["problems"]
        return {**document, "notices": self.notices}

    @property
    def notices(self) -> list[str]:
        """Its problems as text."""
        return list(map(str, self.problems))

    def pieces(self) -> str:
        """Return the sizes of the vocabularies in words: `8,000 joint pieces`."""
        if self.joint_vocabulary:
            return f"{self.source_vocabulary:,} joint pieces"
        return f"{self.source_vocabulary:,} source and {self.target_vocabulary:,} target pieces"

    @property
    def kept(self) -> int:
        """Training pairs in the store."""
        return sum(corpus.kept for corpus in self.corpora if corpus.split == "train")

    @property
    def dropped(self) -> Counter[str]:
        """Training pairs dropped, by reason."""
        return sum((Counter(c.dropped) for c in self.corpora if c.split == "train"), Counter())


def _report_of(
    store: str, manifest: Mapping[str, Any], notices: Sequence[Problem], *, reused: bool, seconds: float
) -> PrepareReport:
    names = {field.name for field in fields(CorpusReport)} - {"split", "licences", "changed"}
    return PrepareReport(
        store=store,
        reused=reused,
        seconds=seconds,
        source_vocabulary=manifest["vocabulary"]["source"],
        target_vocabulary=manifest["vocabulary"]["target"],
        joint_vocabulary=any(name.startswith("joint.") for name in manifest["files"]),
        source_pieces=manifest["tables"]["train"]["source_pieces"],
        target_pieces=manifest["tables"]["train"]["target_pieces"],
        corpora=[
            CorpusReport(
                split=split,
                **{name: value for name, value in entry.items() if name in names},
                licences={part["name"]: part["licence"] for part in entry.get("origin", [])},
                changed=list(dict.fromkeys(f for part in entry.get("origin", []) for f in part.get("changed", []))),
            )
            for split in ("train", "dev")
            for entry in manifest["corpora"][split]
        ],
        problems=list(notices),
    )


CLEANING = "cleaning.json"
"""Name of a store's file with examples of dropped pairs."""
_MANY_CORPORA = 100  # number of corpora from which there is only one example for each reason


class Inputs:
    """The corpora of a configuration and everything that their store depends on; the files are watched from now on.

    Raises ConfigError for vocabulary files that are named but not read, and as `find_corpora` and `provenance` do.
    """

    def __init__(self, config: DataConfig, progress: Progress) -> None:
        if unread := unread_files(config.subword):
            raise ConfigError(unread[0])
        self.corpora, self.watch = find_corpora(config), InputWatch()
        # Fingerprints are taken before the passes and compared after them: the files are read several times.
        self.settings = provenance(config, self.corpora, progress, self.watch.fingerprint)
        """Settings, and files by their content."""
        note_origins(self.corpora, self.settings)


def prepare(
    config: DataConfig,
    *,
    force: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
    inputs: Inputs | None = None,
    parts: PreparedParts | None = None,
) -> PrepareReport:
    """Clean, segment and store the corpora of `config`.

    The folder `config.store` appears whole or not at all. If it exists already, made from the same settings and the
    same content of the input files, nothing is done, except that changed weights, names and paths of corpora are
    updated.

    Args:
        config: the `data` section.
        force: replace a store with other settings or inputs, or a damaged one.
        progress: called with (phase, done, total or None).
        threads: threads for segmentation, which do not affect the result; default: all available processors.
        inputs: those of `config`, if already known.
        parts: parts of the store made elsewhere; None: everything is done here.

    Raises ConfigError for settings that cannot be met, DataError for unusable inputs, or another store in the way.
    """
    started = time.perf_counter()
    threads, progress = threads or usable_cpus(), progress or (lambda phase, done, total: None)
    inputs = inputs or Inputs(config, progress)
    store = Path(config.store).expanduser().absolute()
    tidy(store)
    manifest = reusable_store(store, inputs.settings, force)
    if manifest is not None:
        manifest = _with_labels(store, manifest, config, inputs.corpora)
        notices = stored_notices(manifest["notices"], inputs.corpora)
        return _report_of(config.store, manifest, notices, reused=True, seconds=time.perf_counter() - started)
    with building(store) as directory:
        manifest, notices = _build(config, inputs, directory, threads, progress, parts)
        inputs.watch.check()
    return _report_of(config.store, manifest, notices, reused=False, seconds=time.perf_counter() - started)


def stored_notices(texts: Sequence[str], corpora: Sequence[Corpus]) -> list[Problem]:
    """Return the notices in a manifest, which are text, as problems."""
    keys = [
        "filters.held_out",
        "filters.identical",
        "filters.markup",
        "filters.repair",
        "subword.vocabulary_size",
        "subword.kind",
        "unicode",
    ]
    named = [f"data.{key}" for key in (*keys, "subword.target_vocabulary_size")]
    named += [Remedy.PREPARE_AFTER, *(corpus.key for corpus in corpora), *map(held_out_label, corpora)]
    found = []
    for text in texts:
        reason, drops, way_out = text.partition(" `data.filters.held_out: ")
        found.append(Problem("", reason, f"{drops}{way_out}".lstrip(), "warning", (*named,)))
    return found


def reusable_store(store: Path, settings: dict[str, Any], force: bool) -> dict[str, Any] | None:
    """Return the manifest of an intact store with the same settings, or None if a store must be built.

    Raises DataError if something else is in the way.
    """
    if not store.exists():
        return None
    other = DataError(
        f"{store}: exists and holds something other than a store; set data.store to another folder", key="data.store"
    )
    if not holds_only(store, _STORE_FILES):  # never replace anything but a store
        raise other
    sweep(store)  # temporary files of a process that was killed while it updated the manifest
    if not any(store.iterdir()):
        return None
    if not is_store(store) and not any(store.glob("*.arrow")):  # neither a store nor a damaged one
        raise other
    try:
        opened = Store.open(store)
        opened.verify()  # every file: running `prepare` again is how users check that a store is intact
        manifest = dict(opened.manifest)
    except DataError as error:
        if force:
            return None
        raise DataError(f"{error} (the store is in the way: `--force` rebuilds it)", named=error.names) from None
    changed = changed_since(manifest, settings)
    if not changed:
        return manifest
    if force:
        return None
    raise DataError(
        f"{store}: was prepared from other settings or files: {shown(changed, 4)}. Set data.store to another folder, "
        "or rebuild it with `--force`",
        key="data.store",
        named=[Remedy.REBUILD, *keys_of(changed)],
    )


_STORE_FILES = re.compile(
    r"(manifest|vocabulary|depth-references|cleaning)\.json|(joint|source|target)\.(spm|vocab)"
    rf"|(train|dev)-(\d+\.arrow|(source-lengths|target-lengths|corpora)\.npy)|{TEMPORARY.pattern}"
)


def _build(
    config: DataConfig,
    inputs: Inputs,
    directory: Path,
    threads: int,
    progress: Progress,
    parts: PreparedParts | None,
) -> tuple[dict[str, Any], list[Problem]]:
    """Fill `directory` with a store, manifest last; return the manifest and its notices."""
    corpora = inputs.corpora
    learned = learn(corpora, config, directory, progress) if parts is None else parts.learned(directory)
    tokenizers, comparisons = learned.tokenizers, Comparisons.of_all(config, corpora)
    training = [corpus for corpus in corpora if corpus.split == "train"]
    tables, rare = {}, list[Problem]()
    for split in ("train", "dev"):
        chosen = [corpus for corpus in corpora if corpus.split == split]
        if not chosen:
            continue
        has_text = split == "dev" or config.subword.regularisation is not None
        writer = TableWriter(directory, split, has_text=has_text, has_links=config.aligned(split))
        if parts is None:
            blocks = encode_corpora(chosen, config, tokenizers, threads, progress, comparisons, learned.scorers)
        else:
            blocks = _shown(parts.blocks(split, comparisons), f"merge {split}", chosen, progress)
        for block in blocks:
            store_block(block, chosen[block.corpus], config, tokenizers, writer)
        tables[split] = writer.close()
        if split == "train":
            rare = rare_notices(config.subword, (tokenizers[0].size, tokenizers[1].size), writer.counts)
            rare += unknown_notices((tokenizers[0].unk, tokenizers[1].unk), writer.counts)
        if not tables[split]["pairs"]:
            counts = sum((corpus.dropped for corpus in chosen), Counter())
            raise nothing_left(sum(corpus.read for corpus in chosen), counts, chosen)
    for number, corpus in enumerate(training):
        corpus.overlap = comparisons.overlaps(number)
    overlap = {name: found._asdict() for name, found in total_overlap(training).items()}
    _write_examples(directory, training)
    made = (tokenizers[0].size - len(tokenizers[0].tags), tokenizers[1].size - len(tokenizers[1].tags))
    notices = [*learned.notices, *overlap_notices(corpora, config), *size_notices(config.subword, made), *rare]
    manifest = {
        "format": STORE_FORMAT,
        "config": config.model_dump(mode="json"),
        "prepared_from": inputs.settings,
        "corpora": {
            split: [c.entry(aligned=config.aligned(split)) for c in corpora if c.split == split]
            for split in ("train", "dev")
        },
        "notices": list(map(str, notices)),
        **({"held_out": overlap} if overlap else {}),
        "vocabulary": {"source": tokenizers[0].size, "target": tokenizers[1].size},
        "tables": tables,
        "files": _files(directory),
    }
    _write_manifest(directory, manifest)
    return manifest, notices


def _shown(
    blocks: Iterator[EncodedBlock], phase: str, corpora: Sequence[Corpus], progress: Progress
) -> Iterator[EncodedBlock]:
    """Yield `blocks` and report the number of their pairs, since a large merge takes a long time."""
    done, total = 0, sum(corpus.read for corpus in corpora)
    for block in blocks:
        yield block
        done += block.read
        progress(phase, done, total)


def _write_examples(directory: Path, corpora: Sequence[Corpus]) -> None:
    if any(corpus.dropped for corpus in corpora):
        most = 5 if len(corpora) < _MANY_CORPORA else 1
        examples = [corpus.examples.listed(most) for corpus in corpora]
        content = json.dumps({"format": 1, "train": examples}, ensure_ascii=False, indent=1).encode() + b"\n"
        write_atomically(directory / CLEANING, content)


def _files(directory: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    return {path.name: {"bytes": path.stat().st_size, "xxh3_128": fingerprint(path)} for path in paths}


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    # Besides the files, weights and tags of the corpora affect training; names, paths and examples do not.
    files = {name: entry for name, entry in manifest["files"].items() if name != CLEANING}
    decisive = [files, [(c["weight"], c["tag"]) for c in manifest["corpora"]["train"]]]
    manifest["fingerprint"] = xxhash.xxh3_128_hexdigest(json.dumps(decisive, sort_keys=True).encode())
    manifest["checksum"] = content_checksum(manifest)
    content = json.dumps(manifest, indent=2, ensure_ascii=False).encode() + b"\n"
    write_atomically(directory / MANIFEST, content)


def _with_labels(
    store: Path, manifest: dict[str, Any], config: DataConfig, corpora: Sequence[Corpus]
) -> dict[str, Any]:
    """Update weights, names and paths of the corpora in the manifest; they change no stored pair.

    Raises DataError if another process is building the store, or has built it since `manifest` was read.
    """
    changed, known = bool(other_files(config, manifest)), manifest["fingerprint"]
    for split in ("train", "dev"):
        chosen = [corpus for corpus in corpora if corpus.split == split]
        for entry, corpus in zip(manifest["corpora"][split], chosen, strict=True):
            labels: dict[str, Any] = {"name": corpus.reader.name, "weight": corpus.config.weight}
            if corpus.origin:  # the manifest still has an origin that is no longer known
                labels["origin"] = corpus.origin
            changed |= any(entry.get(name) != value for name, value in labels.items())
            entry.update(labels)
    if changed:
        manifest["config"] = config.model_dump(mode="json")
        # Under the lock, since otherwise a store that another process builds now could get this one's manifest.
        with contextlib.closing(Staging(store)):
            if read_manifest(store)["fingerprint"] != known:
                raise DataError(f"{store}: another process has just prepared it again; run this again")
            _write_manifest(store, manifest)
    return manifest

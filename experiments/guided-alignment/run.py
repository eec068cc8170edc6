"""Guided alignment: where the decoder looks and how it translates, with and without it.

    python experiments/guided-alignment/run.py WORK babel --out JSON                      # alignment known
    python experiments/guided-alignment/run.py WORK multi30k --out JSON --data DATA       # alignment not known
    python experiments/guided-alignment/run.py WORK tatoeba --out JSON --data DATA        # for experiments/markup
    python experiments/guided-alignment/run.py WORK speed --out JSON                      # after babel: its cost

WORK holds texts, stores and runs. Finished parts are not repeated, so a run that was cut off resumes.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import ziggurat
from ziggurat.config import load_experiment
from ziggurat.data.aligner import Link, error_rate, format_links
from ziggurat.data.babel import AlignedPair, generate_aligned
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import Tokenizer
from ziggurat.data.word_links import PieceUnits, WordCounter
from ziggurat.evaluate.scores import evaluate
from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.directory import open_model
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.train.loop import train

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from measuring import commit, seconds_in_turns  # noqa: E402

SPLITS = {"train": 20_000, "dev": 500, "test": 500}
BABEL_SEED = 1


@dataclass(frozen=True)
class Task:
    """A language pair with its systems and the changes of each to base.yaml."""

    name: str
    languages: tuple[str, str]
    systems: dict[str, dict[str, Any]]
    updates: int
    test: list[AlignedPair]
    """They have no links if the alignment is not known."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder with `multi30k` and `tatoeba-fr-en`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("task", choices=["babel", "multi30k", "tatoeba", "speed"])
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.task == "speed":
        asked.out.write_text(json.dumps(speed(asked.work), indent=1) + "\n")
        return
    task = babel(asked.work) if asked.task == "babel" else TEXTS[asked.task](asked.work, asked.data)
    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"runs": {}}
    for seed, system in itertools.product(asked.seeds, asked.systems or task.systems):
        name = f"{task.name}-{system}-{seed}"
        if name not in found["runs"]:
            found["runs"][name] = one(task, system, seed, asked.work)
            found |= {"machine": machine(), "torch": torch.__version__}
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(found["runs"][name]))


def machine() -> str:
    """Return the hardware on which the runs are computed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} used"


def babel(work: Path) -> Task:
    """Write the embedded language pair with its gold alignments."""
    pairs = iter(generate_aligned(sum(SPLITS.values()), BABEL_SEED))
    parts = {split: list(itertools.islice(pairs, count)) for split, count in SPLITS.items()}
    for split, part in parts.items():
        texts = {
            "qlo": [pair.low for pair in part],
            "qhi": [pair.high for pair in part],
            "align": [format_links(pair.sure) for pair in part],
        }
        for suffix, lines in texts.items():
            (work / f"babel-{split}.{suffix}").write_text("".join(f"{line}\n" for line in lines))
    systems = {"none": {}, "hmm": {"compute": "hmm"}, "gold": {"files": True}}
    return Task("babel", ("qlo", "qhi"), systems, 1500, parts["test"])


def multi30k(work: Path, data: Path) -> Task:
    """Unpack Multi30k, English to German."""
    names = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
    return unpacked(work, data / "multi30k", "multi30k", ("en", "de"), names, 600)


def tatoeba(work: Path, data: Path) -> Task:
    """Unpack Tatoeba, English to French."""
    names = {split: split for split in SPLITS}
    return unpacked(work, data / "tatoeba-fr-en", "tatoeba", ("en", "fr"), names, 2000)


def unpacked(
    work: Path, folder: Path, task: str, languages: tuple[str, str], names: dict[str, str], updates: int
) -> Task:
    """Unpack a corpus whose alignment is not known; `names` are the names of its files by split."""
    for split, name in names.items():
        for language in languages:
            with gzip.open(folder / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                (work / f"{task}-{split}.{language}").write_text(file.read(), encoding="utf-8")
    sides = ((work / f"{task}-test.{language}").read_text().splitlines() for language in languages)
    test = [AlignedPair(source, target, set(), set()) for source, target in zip(*sides, strict=True)]
    return Task(task, languages, {"none": {}, "hmm": {"compute": "hmm"}}, updates, test)


TEXTS = {"multi30k": multi30k, "tatoeba": tatoeba}


def one(task: Task, system: str, seed: int, work: Path) -> dict[str, Any]:
    """Train and measure one system."""
    choices, config = task.systems[system], yaml.safe_load((HERE / "base.yaml").read_text())
    corpora: dict[str, Any] = {}
    for split in ("train", "dev"):
        stem = f"{work}/{task.name}-{split}."
        corpora[split] = [{"source": stem + task.languages[0], "target": stem + task.languages[1]}]
        if choices.get("files"):
            corpora[split][0]["alignment"] = stem + "align"
    config["data"] |= {
        "source_language": task.languages[0],
        "target_language": task.languages[1],
        "store": f"{work}/{task.name}-{system}",
        **corpora,
    }
    if "compute" in choices:
        config["data"]["alignment"] = {"compute": choices["compute"]}
    config["training"] |= {"seed": seed, "stop": {"updates": task.updates}}
    if choices:
        config["training"]["loss"] = {"alignment": {}}
    path = work / f"{task.name}-{system}-{seed}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    experiment, run = load_experiment(path), path.with_suffix("")
    prepare(experiment.data)
    begun = (run / "checkpoints").is_dir()
    train(run, experiment, resume=begun)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    dev = [record for record in records if record["kind"] == "validation"][-1]
    rates = [record["target_tokens_per_second"] for record in records if record["kind"] == "train"]
    translator = ziggurat.load(run)
    outputs = [translation.text for translation in translator.translate([pair.low for pair in task.test])]
    references = [pair.high for pair in task.test]
    bleu, chrf = evaluate(outputs, [references], metrics=("bleu", "chrf"), target_language=task.languages[1])
    found = {
        "commit": commit(),
        "dev_nll": dev["nll"],
        "dev_alignment_loss": dev.get("alignment_loss"),
        "bleu": round(bleu.value, 2),
        "chrf": round(chrf.value, 2),
        "target_tokens_per_second": sorted(rates)[len(rates) // 2],
    }
    return found | (attended_errors(run, task.test) if any(pair.sure for pair in task.test) else {})


def speed(work: Path) -> dict[str, Any]:
    """Return the median seconds of interleaved updates with and without guided alignment, on the same batches."""
    guided = load_experiment(work / "babel-hmm-1.yaml")
    loss = guided.training.loss.model_copy(update={"alignment": None})
    plain = guided.model_copy(update={"training": guided.training.model_copy(update={"loss": loss})})
    seconds = seconds_in_turns({"guided": guided, "none": plain}, Store.open(guided.data.store), 40)
    ratios = [a / b for a, b in zip(seconds["guided"], seconds["none"], strict=True)]
    medians = {name: round(float(np.median(each)), 4) for name, each in seconds.items()}
    return {"commit": commit(), "machine": machine(), "seconds": medians, "ratio": round(float(np.median(ratios)), 3)}


def attended_errors(run: Path, pairs: Sequence[AlignedPair]) -> dict[str, Any]:
    """Return the AER, per cent, of every head's largest attention weights with the references as decoder input.

    A source and a target word are linked if a piece of the target word attends most to a piece of the source word.
    """
    opened = open_model(run)
    model, given = opened.model, [_read(opened.tokenizers, pair) for pair in pairs]
    told = model.decoder.aligned
    heads: list[int | None] = [None, *range(opened.experiment.model.heads)]
    errors = {}
    for layer in range(len(model.decoder.layers)):
        for head in heads:
            model.decoder.aligned = AlignmentHead(layer, head)
            links = [_links(model, *one_pair) for one_pair in given]
            score = error_rate(links, [pair.sure for pair in pairs], [pair.possible for pair in pairs])
            errors[f"{layer + 1}-{'mean' if head is None else head + 1}"] = round(100 * score.error_rate, 2)
    layer = told.layer % len(model.decoder.layers) + 1
    return {"aer": errors[f"{layer}-{'mean' if told.head is None else told.head + 1}"], "aer_of_heads": errors}


Side = tuple[list[int], list[set[int]]]
"""Side is the ids of a text with end-of-sentence, and the word of each piece."""


def _read(tokenizers: tuple[Tokenizer, Tokenizer], pair: AlignedPair) -> tuple[Side, Side, int]:
    sides = [_side(tokenizer, text) for tokenizer, text in zip(tokenizers, (pair.low, pair.high), strict=True)]
    return sides[0], sides[1], tokenizers[1].bos


def _side(tokenizer: Tokenizer, text: str) -> Side:
    spans, _ = WordCounter("split", tokenizer).units(text, text)
    ids = np.array(tokenizer.encode([text])[0], np.int32)
    begin, end = PieceUnits(tokenizer).find([ids], np.zeros(len(spans), np.int64), np.array(spans))
    words = [
        {word for word, (b, e) in enumerate(zip(begin, end, strict=True)) if b <= place < e}
        for place in range(len(ids))
    ]
    return [*ids.tolist(), tokenizer.eos], words


@torch.inference_mode()
def _links(model: Seq2Seq, source: Side, target: Side, bos: int) -> set[Link]:
    kept = KeptWeights(model.decoder.aligned.head)
    ids = torch.tensor([source[0]])
    memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
    model.decode(torch.tensor([[bos, *target[0][:-1]]]), memory, kept)
    assert kept.weights is not None
    best = kept.weights[0, : len(target[1]), : len(source[1])].argmax(1).tolist()
    return {(i, j) for place, at in enumerate(best) for i in source[1][at] for j in target[1][place]}


if __name__ == "__main__":
    main()

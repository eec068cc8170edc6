"""Tags on the right words: projection with several alignments, compared with translating each text node separately.

    python experiments/guided-alignment/run.py WORK babel --systems none hmm --out WORK/babel.json
    python experiments/guided-alignment/run.py WORK tatoeba --data DATA --out WORK/tatoeba.json
    python experiments/markup/run.py WORK babel --out JSON
    python experiments/markup/run.py WORK en-fr --data DATA --out JSON

The first two train the models, without guided alignment (`none`) and with it (`hmm`).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ziggurat
from ziggurat.data.aligner import Aligner, split_words, word_spans
from ziggurat.data.aligner import Link as WordLink
from ziggurat.data.babel import generate_aligned
from ziggurat.evaluate.scores import evaluate
from ziggurat.serve.text.alignment import control_pieces, rendered
from ziggurat.serve.text.markup import html
from ziggurat.serve.text.sentences import Link, Options, SentenceTranslation, run
from ziggurat.serve.text.tokens import html_tokens

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from measuring import commit, processor  # noqa: E402

SEED = 7  # for the choice of spans
BABEL_SEED, BABEL_USED, BABEL_TESTED = 1, 21_000, 1_000  # earlier pairs are the models' training data
NAMES = ("b", "i")  # tags in a sentence
LONGEST = 4  # words in a tag
MODELS = ("none", "hmm")

Translate = Callable[[list[str]], list[SentenceTranslation]]


class Pair(NamedTuple):
    """A sentence pair with its alignment, as indices of (source word, target word); None: not known.

    No tag is put on the source words in `vague`.
    """

    source: str
    target: str
    links: set[WordLink] | None = None
    vague: frozenset[int] = frozenset()


class Case(NamedTuple):
    """A sentence with tags, and for each tag the reference words that it should hold."""

    pair: Pair
    marked: str
    wanted: dict[str, list[str]]


class Model:
    """A trained run, with the translations that it has produced."""

    def __init__(self, folder: Path) -> None:
        self.translator = ziggurat.load(folder, alignments=True)
        self._control = control_pieces(self.translator.source_tokenizer)
        self._known: dict[str, SentenceTranslation] = {}

    def translate(self, sentences: list[str]) -> list[SentenceTranslation]:
        """Return the translations, with the links of the model's own attention."""
        new = list(dict.fromkeys(one for one in sentences if one not in self._known))
        for text, found in zip(new, self.translator.translate(new), strict=True):
            self._known[text] = rendered(found, self._control)
        return [self._known[one] for one in sentences]

    def forced(self, pairs: Sequence[Pair]) -> dict[str, SentenceTranslation]:
        """Return the references as translations, with links from the model's attention when they are its decoder
        input.
        """
        found = self.translator.translate(
            [pair.source for pair in pairs],
            prefixes=[pair.target for pair in pairs],
            beam_size=1,
            max_length={"ratio": 4.0, "extra": 20},
        )
        known = {}
        for pair, translation in zip(pairs, found, strict=True):
            said = rendered(translation, self._control)
            if said.links is None or not said.text.startswith(pair.target):
                raise SystemExit(f"{pair.target!r} was not read as it is: {said.text!r}")
            known[pair.source] = SentenceTranslation(
                pair.target, [link for link in said.links if link.target_end <= len(pair.target)]
            )
        return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the models")
    parser.add_argument("task", choices=["babel", "en-fr"])
    parser.add_argument("--data", type=Path, help="folder with `alignment` and `tatoeba-fr-en`")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    is_babel = asked.task == "babel"
    name, languages = ("babel", ("qlo", "qhi")) if is_babel else ("tatoeba", ("en", "fr"))
    train = [(asked.work / f"{name}-train.{each}").read_text("utf-8").splitlines() for each in languages]
    models = {each: Model(asked.work / f"{name}-{each}-1") for each in MODELS}
    aligner = Aligner.train(zip(*train, strict=True))
    pairs = babel(set(train[0])) if is_babel else hansards(asked.data)
    cases = [case for case in map(tagged, pairs, numbered_seeds()) if case is not None]
    results = {
        "seed": SEED,
        "sentences": len(cases),
        "tags": sum(len(case.wanted) for case in cases),
        "on the reference": on_references(cases, models, aligner),
        "on translations": on_translations(cases, models, aligner, languages[1]),
    }
    if not is_babel:
        sides = (read(asked.data / "tatoeba-fr-en" / f"test.{each}.gz") for each in languages)
        plain = [Pair(source, target) for source, target in zip(*sides, strict=True)]
        drawn = [case for case in map(tagged, plain, numbered_seeds()) if case is not None]
        results["tatoeba"] = {"sentences": len(drawn), **on_translations(drawn, models, aligner, languages[1])}
    results |= {"commit": commit(), "processor": processor(), "torch": torch.__version__}
    asked.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1, ensure_ascii=False))


def numbered_seeds() -> itertools.count[int]:
    """Return a seed for each sentence, so that its tags do not depend on the others."""
    return itertools.count(SEED * 1_000_000)


def read(path: Path) -> list[str]:
    """Return the lines of a packed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


# Sentences whose alignment is known


def babel(seen: set[str]) -> list[Pair]:
    """Return pairs of the embedded language pair on which no model was trained."""
    stream = itertools.islice(generate_aligned(BABEL_USED + BABEL_TESTED, BABEL_SEED), BABEL_USED, None)
    return [
        Pair(pair.low, pair.high, pair.sure, frozenset(source for source, _ in pair.possible))
        for pair in stream
        if pair.low not in seen
    ]


def hansards(data: Path) -> list[Pair]:
    """Return the gold pairs of the Canadian Hansards; sure and possible links count alike."""
    stem, pairs = data / "alignment" / "enfr", []
    texts, links = (stem.with_suffix(suffix).read_text("utf-8").splitlines() for suffix in (".src-tgt", ".gold"))
    for text, line in zip(texts, links, strict=True):
        sides = [side.split() for side in text.split("|||")]
        found = {(int(i) - 1, int(j) - 1) for i, j in (link.replace("p", "-").split("-") for link in line.split())}
        # The corpus's words are separated by blanks; ours are counted separately, since some of the corpus's words are
        # several.
        own = [[place for place, word in enumerate(side) for _ in split_words(word, "split")] for side in sides]
        again = {(i, j) for i, a in enumerate(own[0]) for j, b in enumerate(own[1]) if (a, b) in found}
        pairs.append(Pair(" ".join(sides[0]), " ".join(sides[1]), again))
    return pairs


def tagged(pair: Pair, seed: int) -> Case | None:
    """Return the sentence with up to two tags on stretches of words; None if there is no suitable stretch.

    A stretch has one to four words, contains a letter or digit, and is not the whole sentence. Where the alignment is
    known, its words are linked to an unbroken stretch of the target whose words are linked to no others.
    """
    rng = random.Random(seed)
    source, target = (word_spans(text, "split") for text in (pair.source, pair.target))
    stretches = [(a, b) for a in range(len(source)) for b in range(a + 1, min(a + LONGEST, len(source)) + 1)]
    rng.shuffle(stretches)
    chosen: list[tuple[int, int, list[str]]] = []
    for a, b in stretches:
        begin, end = source[a][0], source[b - 1][1]
        if b - a == len(source) or not any(letter.isalnum() for letter in pair.source[begin:end]):
            continue
        if any(a < other_b and other_a < b for other_a, other_b, _ in chosen) or pair.vague & set(range(a, b)):
            continue
        wanted: list[str] = []
        if pair.links is not None:
            linked = {j for i, j in pair.links if a <= i < b}
            if not linked or {i for i, j in pair.links if min(linked) <= j <= max(linked)} - set(range(a, b)):
                continue
            wanted = words(pair.target[target[min(linked)][0] : target[max(linked)][1]])
        chosen.append((a, b, wanted))
        if len(chosen) == len(NAMES):
            break
    if not chosen:
        return None
    chosen.sort()
    marked, at = "", 0
    for name, (a, b, _) in zip(NAMES, chosen, strict=False):
        begin, end = source[a][0], source[b - 1][1]
        before, within = (escape(part, quote=False) for part in (pair.source[at:begin], pair.source[begin:end]))
        marked += f"{before}<{name}>{within}</{name}>"
        at = end
    marked += escape(pair.source[at:], quote=False)
    return Case(pair, marked, {name: wanted for name, (_, _, wanted) in zip(NAMES, chosen, strict=False)})


def words(text: str) -> list[str]:
    """Return the words of a text, lower-cased, because the translation may begin with a different word."""
    return split_words(text.lower(), "split")


# Ways of translating marked text


def projected(translate: Translate, marked: str) -> str:
    """Return the translation of the whole sentence, with its tags around the linked words."""
    return run(html(marked, Options(split=None)), translate).value


def node_by_node(translate: Translate, marked: str) -> str:
    """Return the text with each text node translated separately, in place, with its white space kept."""
    out = []
    for token in html_tokens(marked):
        bare = token.text.strip()
        if token.kind != "text" or not any(letter.isalpha() for letter in bare):
            out.append(token.raw)
            continue
        (said,) = translate([bare])
        begin = token.text.index(bare)
        whole = f"{token.text[:begin]}{said.text.strip()}{token.text[begin + len(bare) :]}"
        out.append(escape(whole, quote=False))
    return "".join(out)


def linked_by(aligner: Aligner, translate: Translate) -> Translate:
    """Return the same translations with the links of an aligner."""

    def links(sentences: list[str]) -> list[SentenceTranslation]:
        said = [one.text for one in translate(sentences)]
        found = aligner.align(sentences, said)
        return [in_characters(one, text, own) for one, text, own in zip(sentences, said, found, strict=True)]

    return links


def in_characters(source: str, target: str, links: set[WordLink]) -> SentenceTranslation:
    """Return a translation with links between words."""
    a, b = (word_spans(text, "split") for text in (source, target))
    return SentenceTranslation(target, [Link(*a[i], *b[j]) for i, j in sorted(links)])


def known(table: dict[str, SentenceTranslation]) -> Translate:
    """Return a translator that answers from a table."""
    return lambda sentences: [table[one] for one in sentences]


# Measurements


def on_references(cases: Sequence[Case], models: dict[str, Model], aligner: Aligner) -> dict[str, Any]:
    """Return the positions of tags in the references, as if the references were the translations."""
    pairs = [case.pair for case in cases]
    references = known({pair.source: SentenceTranslation(pair.target) for pair in pairs})
    gold = {pair.source: in_characters(pair.source, pair.target, pair.links or set()) for pair in pairs}
    ways = {
        "attention, not guided": known(models["none"].forced(pairs)),
        "attention, guided": known(models["hmm"].forced(pairs)),
        "aligner": linked_by(aligner, references),
        "gold links": known(gold),
    }
    return {name: placed(cases, [projected(way, case.marked) for case in cases]) for name, way in ways.items()}


def on_translations(
    cases: Sequence[Case], models: dict[str, Model], aligner: Aligner, language: str
) -> dict[str, dict[str, Any]]:
    """Return the positions of tags in translations, and the quality of the translations."""
    results: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        model.translate([case.pair.source for case in cases])  # together
        nodes = [t.text.strip() for c in cases for t in html_tokens(c.marked) if t.kind == "text"]
        model.translate([text for text in nodes if any(letter.isalpha() for letter in text)])
        ways: dict[str, Callable[[str], str]] = {
            "attention": lambda marked, model=model: projected(model.translate, marked),  # type: ignore[misc]
            "aligner": lambda marked, model=model: projected(linked_by(aligner, model.translate), marked),  # type: ignore[misc]
            "node by node": lambda marked, model=model: node_by_node(model.translate, marked),  # type: ignore[misc]
        }
        for way, translate in ways.items():
            outputs = [translate(case.marked) for case in cases]
            bleu, chrf = evaluate(
                [contents(output)[0] for output in outputs],
                [[case.pair.target for case in cases]],
                metrics=("bleu", "chrf"),
                target_language=language,
            )
            quality = {"bleu": round(bleu.value, 1), "chrf": round(chrf.value, 1)}
            results[f"{name}, {way}"] = quality | (placed(cases, outputs) if cases[0].pair.links is not None else {})
    return results


def placed(cases: Sequence[Case], outputs: Sequence[str]) -> dict[str, float]:
    """Return how well tags are placed, per cent.

    `exact`: tags that hold exactly the right words in order. `f1`: of the words in tags, counting repetitions.
    `exact_where_right`: the same for tags in sentences translated exactly like the reference, with the share of these.
    """
    tags = exact = in_right = exact_in_right = shared = held = needed = right = 0
    for case, output in zip(cases, outputs, strict=True):
        text, inside = contents(output)
        is_right = words(text) == words(case.pair.target)
        right += is_right
        for name, wanted in case.wanted.items():
            found = words(inside.get(name, ""))
            tags += 1
            exact += found == wanted
            in_right += is_right
            exact_in_right += is_right and found == wanted
            shared += (Counter(found) & Counter(wanted)).total()
            held, needed = held + len(found), needed + len(wanted)
    return {
        "exact": round(100 * exact / tags, 1),
        "f1": round(100 * 2 * shared / (held + needed), 1),
        "exact_where_right": round(100 * exact_in_right / in_right, 1) if in_right else None,
        "right_sentences": round(100 * right / len(cases), 1),
    }


def contents(marked: str) -> tuple[str, dict[str, str]]:
    """Return the text without tags, and what each tag holds."""
    text, begins, inside = "", dict[str, int](), dict[str, str]()
    for token in html_tokens(marked):
        if token.kind == "open":
            begins[token.name] = len(text)
        elif token.kind == "close":
            inside[token.name] = text[begins[token.name] :]
        else:
            text += unescape(token.raw)
    return text, inside


if __name__ == "__main__":
    main()

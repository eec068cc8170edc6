"""Whatever a line contains, it gives exactly one line and does not affect its neighbours' translations."""

from __future__ import annotations

import io
import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translate.doubles import CopyModel
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.text_lines import read_lines
from ziggurat.translate.translator import Translator

HOSTILE = {
    "empty": "",
    "blanks": " \t \u00a0\u3000 ",
    "one character": "x",
    "ten thousand words": " ".join(["river", "dog", "house."][i % 3] for i in range(10_000)),
    "one word of 8,000 characters": "river" * 1600,
    "5,000 full stops": "." * 5000,
    "no script that was seen": "ქართული ᏣᎳᎩ አማርኛ ភាសាខ្មែរ",
    "right to left": "\u202eשלום\u202c مرحبا",
    "emoji sequence": "👩‍👩‍👧‍👦🏳️‍🌈",
    "stacked accents": "a" + "\u0301" * 500,
    "NUL inside": "A dog\0runs",
    "only NUL": "\0\0",
    "stray carriage return": "A dog\rruns",
    "line feed in a string": "A dog\nruns",
    "Unicode line ends": "A\x0bdog\x0cruns\x1cover\x1dthe\x1egreen\x85meadow\u2028where\u2029is",
    "escape sequence": "\x1b[31mA dog\x1b[0m\x07\x08\x7f",
    "byte order mark inside": "\ufeffA dog",
    "noncharacter": "\uffff\U0010ffff\ufdd0",
    "private use": "\ue000\U000f0000",
    "lone surrogate": "A \ud800 dog",
    "control tokens as text": "<s> </s> <pad> <unk> <bt> <0x0A> ▁ @@ ##AT##",
    "format strings": "%s {0} ${HOME} `id` \\n &amp; <b>",
    "numbers": "0 -1 1e999 NaN",
}


def translate_quietly(translator: Translator, lines: list[str], **options: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)
        return [t.text for t in translator.translate_stream(lines, **options)]


@pytest.mark.parametrize("name", HOSTILE)
def test_every_line_gives_one_line_and_disturbs_no_other(copying: Translator, name: str) -> None:
    copying.decoding = DecodingConfig(beam_size=1, max_source_pieces=200)
    lines = ["Where is the old bridge?", HOSTILE[name], "A dog runs!"]
    first, found, last = translate_quietly(copying, lines)
    assert (first, last) == (lines[0], lines[2])
    assert len(found.splitlines()) <= 1
    assert "\0" not in found
    found.encode("utf-8")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_copying_model_gives_the_text_back(copying: Translator, name: str) -> None:
    """This holds apart from documented changes: line ends and NUL become blanks, and blanks are merged."""
    if name == "lone surrogate":
        pytest.skip("no UTF-8 spells it")
    copying.decoding = DecodingConfig(beam_size=1, max_source_pieces=300)
    (found,) = translate_quietly(copying, [HOSTILE[name]])
    wanted = HOSTILE[name]
    if name in ("one word of 8,000 characters", "5,000 full stops", "stacked accents"):
        found, wanted = found.replace(" ", ""), wanted.replace(" ", "")  # the parts of a word are joined with blanks
    assert found.split() == wanted.replace("\0", " ").split()


@pytest.mark.slow
def test_all_of_them_together_by_a_real_model(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    decoding = DecodingConfig(beam_size=2, max_source_pieces=40, batch_tokens=2000)
    short = {name: text[:300] for name, text in HOSTILE.items()}
    translator = Translator(tiny_model, tokenizer, tokenizer, decoding)
    together = translate_quietly(translator, list(short.values()))
    assert len(together) == len(short)
    assert all(len(text.splitlines()) <= 1 for text in together)
    order = list(range(len(short)))
    random.Random(1).shuffle(order)
    shuffled = translate_quietly(translator, [list(short.values())[i] for i in order], window=5)
    assert shuffled == [together[i] for i in order]


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b), max_size=6))
def test_as_many_lines_come_out_as_go_in(raw: list[bytes]) -> None:
    """This includes the reader of byte streams, where LF ends a line."""
    valid = [line.decode("utf-8", "replace").encode() for line in raw]
    text = b"".join(line + b"\n" for line in valid)
    assert len(list(read_lines(io.BytesIO(text), "x"))) == len(valid)


LINE_ENDS = [c for c in map(chr, range(0x10000)) if len(f"a{c}b".splitlines()) > 1]


class FixedTokenizer(CopyModel):
    """A tokenizer that gives the same ids for every source."""

    def __init__(self, vocabulary: int, eos: int, ids: list[int]) -> None:
        super().__init__(vocabulary, eos)
        self.ids = ids

    def encode(self, source: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[*self.ids, self.eos]] * len(source))


@pytest.mark.parametrize("end", [*LINE_ENDS, "\0"], ids=ascii)
def test_line_ends_that_a_model_spells_in_bytes_become_blanks(tokenizer: SentencePieceTokenizer, end: str) -> None:
    (dog,) = tokenizer.encode(["dog"])
    spelt = [tokenizer._processor.piece_to_id(f"<0x{byte:02X}>") for byte in end.encode()]
    model = FixedTokenizer(tokenizer.size, tokenizer.eos, [*spelt, *dog, *spelt, *spelt, *dog, *spelt])
    translator = Translator(model, tokenizer, tokenizer)  # type: ignore[arg-type]
    (found,) = translator.translate(["A dog"])
    assert found.text.split() == ["dog", "dog"]
    assert found.text.splitlines() == [found.text]
    assert "\0" not in found.text


def test_all_line_ends_are_among_the_cases() -> None:
    assert len(LINE_ENDS) == 10

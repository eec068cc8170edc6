"""CTranslate2 folders from other toolkits' converters: translations equal those of CTranslate2 called directly."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ctranslate2
import pytest
import sentencepiece
from ctranslate2.converters import MarianConverter, TransformersConverter

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import ziggurat as ziggurat  # the command line as a fixture
from tests.exchange.conftest import transformers as transformers
from tests.exchange.examples import SENTENCES, SMALL, random_model
from tests.exchange.marian import PRE_NORM, write_npz
from tests.exchange.test_marian import Folder, arrays_of, trained
from tests.exchange.test_marian import folder as folder  # as in an unpacked download of OPUS-MT
from tests.exchange.test_opus import Downloaded
from tests.exchange.test_opus import downloaded as downloaded  # the same for transformers
from tests.vocabulary import trained_tokenizer
from ziggurat.config import ModelConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.exchange.anatomy import dissect
from ziggurat.exchange.ctranslate2 import write_ctranslate2
from ziggurat.model.tensors import weights
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, ZigguratError
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.engines import NO_LIMIT, export_folder, is_converted, read_converted
from ziggurat.translate.results import one_line

pytestmark = pytest.mark.filterwarnings("ignore::ziggurat.translate.results.TranslationWarning")

TAGS = [">>fra<<", ">>ita<<"]
SEARCH: dict[str, Any] = {"beam_size": 2, "min_length": 0, "length_penalty": {"kind": "none", "alpha": 0.0}}
LIMIT = 40
SEED = 6  # with these weights most translations end
ROOM = {"max_length": {"ratio": 0.0, "extra": LIMIT, "limit": LIMIT}}
LINES = [*SENTENCES, "Ωmega stands by the river.", "a"]

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return trained_tokenizer(SENTENCES, 340, TAGS)


@pytest.fixture
def make_folder(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> MakeFolder:
    """Write a folder without our own files; `config` changes its config.json to match other converters."""

    def make(positions: str = "sinusoidal", segmenter: str | None = "sentencepiece.model", **config: Any) -> Path:
        shape = ModelConfig.model_validate({**SMALL, "embedding": {**SMALL["embedding"], "positions": positions}})
        path = tmp_path / "theirs"
        path.mkdir()
        anatomy = dissect(shape, weights(random_model(shape, tokenizer, SEED)), 64)
        write_ctranslate2(path, anatomy, (tokenizer, tokenizer), 64)
        if segmenter is not None:
            (path / segmenter).write_bytes(tokenizer.model)
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**written, **config}))
        return path

    return make


def direct(path: Path, sources: list[list[str]], target: str) -> list[str | None]:
    """Return the texts that CTranslate2 gives for a source's pieces; None if the translation was cut."""
    results = ctranslate2.Translator(str(path), device="cpu", intra_threads=1).translate_batch(
        sources,
        beam_size=SEARCH["beam_size"],
        length_penalty=0,
        patience=2,
        min_decoding_length=0,
        max_decoding_length=LIMIT + 1,
        return_end_token=True,
    )
    joins = sentencepiece.SentencePieceProcessor(model_file=target)
    end = "</s>"
    found = [result.hypotheses[0] for result in results]
    return [one_line(joins.decode(pieces[:-1])) if pieces[-1:] == [end] else None for pieces in found]


def assert_same(path: Path, sources: list[list[str]], target: str, **options: Any) -> None:
    ours = CTranslate2Translator(path, threads=1, **SEARCH, **ROOM)
    mine = [t.text if t.hypotheses[0].finished else None for t in ours.translate_stream(LINES, **options)]
    assert mine == direct(path, sources, target)
    assert sum(text is not None for text in mine) > len(LINES) // 2


def pieces(path: Path, lines: list[str]) -> list[list[str]]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.encode(" ".join(line.split()), out_type=str) for line in lines]


def convert(theirs: Path, path: Path, vocabularies: list[str]) -> None:
    """Convert a Marian model as CTranslate2 does, whose reader requires the options without padding."""
    write_npz(theirs / "other.npz", arrays_of(theirs / "opus.npz"), PRE_NORM, block=1)
    MarianConverter(str(theirs / "other.npz"), [str(theirs / name) for name in vocabularies]).convert(str(path))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", ["json", "txt"])
@pytest.mark.parametrize("found", [False, True])
def test_folders_of_marian(separate: bool, form: str, found: bool, folder: Folder, tmp_path: Path) -> None:
    theirs, path = folder(PRE_NORM, separate=separate), tmp_path / "converted"
    names = ["opus.src.vocab.yml", "opus.trg.vocab.yml"] if separate else ["opus.vocab.yml"]
    convert(theirs, path, names)
    lists = sorted(path.glob("*_vocabulary.json"))
    assert len(lists) == 1 + separate
    for file in lists if form == "txt" else ():
        tokens = json.loads(file.read_text())
        file.with_suffix(".txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
        file.unlink()
    given = (theirs / "source.spm", theirs / "target.spm")
    if found:
        for file in given:
            shutil.copy(file, path / file.name)
    ours = CTranslate2Translator(path, threads=1, segmenters=(None, None) if found else given, **SEARCH, **ROOM)
    mine = [t.text if t.hypotheses[0].finished else None for t in ours.translate_stream(LINES)]
    assert mine == direct(path, pieces(given[0], LINES), str(given[1]))
    assert any(mine)
    assert ours.notices["unknown"] == 1  # the Ω


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_config_json_has_the_first_and_last_tokens_of_a_source(bos: bool, eos: bool, make_folder: MakeFolder) -> None:
    path = make_folder(add_source_bos=bos, add_source_eos=eos)
    assert_same(path, pieces(path / "sentencepiece.model", LINES), str(path / "sentencepiece.model"))
    assert read_converted(path).positions == 64 - bos


@pytest.mark.parametrize("start", ["</s>", "<pad>"])
def test_sources_of_transformers_end_with_end_of_sentence(start: str, make_folder: MakeFolder) -> None:
    path = make_folder(add_source_eos=False, decoder_start_token=start)
    model = path / "sentencepiece.model"
    assert_same(path, [[*source, "</s>"] for source in pieces(model, LINES)], str(model))


@pytest.mark.parametrize("tag", TAGS)
def test_a_language_token_precedes_the_source(tag: str, make_folder: MakeFolder) -> None:
    path = make_folder("none")
    model = path / "sentencepiece.model"
    assert_same(path, [[tag, *source] for source in pieces(model, LINES)], str(model), tag=tag)
    ours = CTranslate2Translator(path, threads=1)
    assert list(ours.source_tokenizer.tags) == TAGS
    with pytest.warns(UserWarning, match=">>fra<<, >>ita<<"):  # without a language token the model chooses
        ours.translate(["a"])
    with pytest.raises(ConfigError, match="unknown tag"):
        ours.translate(["a"], tag=">>deu<<")


@pytest.mark.slow
@pytest.mark.parametrize("tag", [None, *TAGS])
def test_folders_of_transformers_own_converter(
    tag: str | None, downloaded: Downloaded, transformers: ModuleType, tmp_path: Path
) -> None:
    hub, path = downloaded(tags=True), tmp_path / "converted"
    model = transformers.MarianMTModel.from_pretrained(str(hub))
    model.save_pretrained(hub)  # the converter requires safetensors
    TransformersConverter(str(hub)).convert(str(path))
    theirs = transformers.AutoTokenizer.from_pretrained(str(hub))
    lines = [line if tag is None else f"{tag} {line}" for line in SENTENCES]
    sources = [theirs.convert_ids_to_tokens(theirs.encode(line)) for line in lines]
    given = (hub / "source.spm", hub / "target.spm")
    ours = CTranslate2Translator(path, threads=1, segmenters=given, **SEARCH, **ROOM)
    mine = [t.text if t.hypotheses[0].finished else None for t in ours.translate_stream(SENTENCES, tag=tag)]
    assert mine == direct(path, sources, str(given[1]))


def test_long_lines_are_divided_by_the_rows_of_the_table(make_folder: MakeFolder) -> None:
    ours = CTranslate2Translator(make_folder(), threads=1, **SEARCH)
    assert ours.max_positions == 64
    with pytest.warns(UserWarning, match="at most 63 pieces"):
        assert ours.translate(["The little house. " * 40])[0].parts > 1


def test_scores_and_next_words_are_there_and_alignments_are_refused(make_folder: MakeFolder) -> None:
    ours = CTranslate2Translator(make_folder(), threads=1, **SEARCH, **ROOM)
    best = ours.translate(["A dog runs."], scores=True)[0].hypotheses[0]
    assert sum(best.token_log_probabilities) == pytest.approx(best.log_probability, abs=1e-3)
    assert len(ours.translate(["A dog runs."], next_words=True, n_best=2)[0].hypotheses) == 2
    for key, value in (("alignments", True), ("precision", "int8")):
        with pytest.raises(ConfigError, match=f"decoding.{key}"):
            ours.translate(["a"], **{key: value})


def other_segmenter(path: Path) -> None:
    (path / "sentencepiece.model").write_bytes(trained(["Маленький дом стоит у реки", "Собака бежит по лугу"]))


def features(path: Path) -> None:
    (path / "shared_vocabulary.json").rename(path / "source_1_vocabulary.json")
    shutil.copy(path / "source_1_vocabulary.json", path / "target_vocabulary.json")


def cut(path: Path) -> None:
    (path / "model.bin").write_bytes((path / "model.bin").read_bytes()[:60])


def renamed_variable(path: Path) -> None:
    """Damage the name of the first embeddings, so that CTranslate2 raises IndexError."""
    file = path / "model.bin"
    file.write_bytes(file.read_bytes().replace(b"encoder/embeddings", b"encoder/embeddinks", 1))


POINTER = "version https://git-lfs.github.com/spec/v1\n"
LIST = "shared_vocabulary.json"

HARM: dict[str, tuple[Callable[[Path], object], type[ZigguratError], str]] = {
    "no segmenter": (lambda path: (path / "sentencepiece.model").unlink(), ConfigError, "--source-model"),
    "another's segmenter": (other_segmenter, CheckpointError, "belongs to another model"),
    "no model": (lambda path: (path / "sentencepiece.model").write_bytes(b"x"), DataError, "sentencepiece.model"),
    "features": (features, CheckpointError, "features"),
    "no list": (lambda path: (path / LIST).rename(path / "shared_vocabulary.bin"), CheckpointError, "has neither"),
    "no tokens": (lambda path: (path / LIST).write_text('{"a": 1}'), CheckpointError, LIST),
    "no end": (lambda path: (path / LIST).write_text('["<unk>"]'), CheckpointError, "</s>"),
    "cut": (cut, CheckpointError, "model.bin"),
    "variable": (renamed_variable, CheckpointError, "cannot open it"),
    "pointer": (lambda path: (path / "model.bin").write_text(POINTER), CheckpointError, "git lfs pull"),
    "config": (lambda path: (path / "config.json").write_text("{"), CheckpointError, "config.json"),
}


@pytest.mark.parametrize("name", HARM)
def test_missing_files_are_reported_with_the_way_out(name: str, make_folder: MakeFolder) -> None:
    harm, kind, message = HARM[name]
    path = make_folder()
    harm(path)
    assert is_converted(path)
    with pytest.raises(kind) as caught:
        CTranslate2Translator(path, threads=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", [1, 3, 20, 90])
@pytest.mark.parametrize("file", ["shared_vocabulary.json", "source_vocabulary.json"])
def test_pieces_that_the_vocabulary_lacks_are_counted(lost: int, file: str, make_folder: MakeFolder) -> None:
    path = make_folder()
    tokens = json.loads((path / LIST).read_text())
    words = [number for number, token in enumerate(tokens) if "<" not in token]
    for number in words[:lost]:
        tokens[number] = f"<other{number}>"
    (path / LIST).rename(path / "target_vocabulary.json")
    if file == LIST:
        (path / "target_vocabulary.json").unlink()
    (path / file).write_text(json.dumps(tokens))
    if lost > 20:
        with pytest.raises(CheckpointError, match=f"lacks {min(lost, len(words))} of the"):
            read_converted(path)
        return
    with pytest.warns(UserWarning, match=f"lacks {lost} of the") as caught:
        read_converted(path)
    assert str(caught[0].message).count("lacks") == (2 if file == LIST else 1)


@pytest.mark.parametrize(("share", "refused"), [(0.08, False), (0.15, False), (0.3, True), (0.6, True)])
def test_tokens_that_the_segmenter_never_gives_are_counted(
    share: float, refused: bool, make_folder: MakeFolder
) -> None:
    path = make_folder()
    tokens = json.loads((path / LIST).read_text())
    words = sum(len(token.strip("\u2581")) > 1 and "<" not in token for token in tokens)
    tokens += [f"\u2581other{number}" for number in range(int(share * words / (1 - share)) + 1)]
    (path / LIST).write_text(json.dumps(tokens))
    with pytest.raises(CheckpointError, match="never gives") if refused else pytest.warns(match="never gives"):
        read_converted(path)


def test_a_first_token_from_the_caller_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(ConfigError, match="target_prefix"):
        read_converted(make_folder(decoder_start_token=None))


def test_many_languages_of_transformers_are_refused(tmp_path: Path) -> None:
    """M2M100 and NLLB put the target's code first."""
    model = trained_tokenizer(SENTENCES, 300, [])
    tokens = [*model.pieces(range(model.size)), "__de__", "__en__"]
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "shared_vocabulary.json").write_text(json.dumps(tokens))
    (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token": "</s>"}))
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model.model)
    with pytest.raises(ConfigError, match="__de__, __en__"):
        read_converted(tmp_path)


@pytest.mark.parametrize("cuts", [0, 3, 9, 30, 200])
def test_a_header_that_ends_early_is_damaged(cuts: int, make_folder: MakeFolder) -> None:
    path = make_folder()
    content = (path / "model.bin").read_bytes()
    (path / "model.bin").write_bytes(content[:cuts])
    with pytest.raises(CheckpointError, match="damaged"):
        read_converted(path)


def test_an_older_header_is_left_to_ctranslate2(make_folder: MakeFolder) -> None:
    path = make_folder()
    content = bytearray((path / "model.bin").read_bytes())
    content[:4] = struct.pack("<I", 3)
    (path / "model.bin").write_bytes(content)
    assert read_converted(path).positions == NO_LIMIT


def test_the_verb_takes_models_of_both_sides(ziggurat: Ziggurat, make_folder: MakeFolder, tmp_path: Path) -> None:
    path = make_folder(segmenter=None)
    model = tmp_path / "pieces.spm"
    model.write_bytes(trained_tokenizer(SENTENCES, 340, []).model)
    text = tmp_path / "text"
    text.write_text("A dog runs.\n")
    arguments: list[Any] = ["translate", path, "--input", text, "--threads", 1]
    status, _, message = ziggurat(*arguments)
    assert (status, "--source-model" in message) == (2, True)
    status, out, message = ziggurat(*arguments, "--source-model", model)
    assert (status, len(out.splitlines())) == (0, 1)
    assert "another toolkit's model" in message
    assert ziggurat(*arguments, "--source-model", model, "--target-model", model)[1] == out
    status, _, message = ziggurat("bulk", "--job", tmp_path / "job", *arguments, "--source-model", model)
    assert (status, "without `bulk`" in message) == (2, True)
    status, _, message = ziggurat("evaluate", path, "--source", text, "--reference", text)
    assert (status, "--source-model" in message) == (2, True)


def test_other_verbs_refuse_such_a_folder(make_folder: MakeFolder) -> None:
    with pytest.raises(ConfigError, match="only `translate`, `evaluate` and `compare` read"):
        export_folder("auto", [str(make_folder())])

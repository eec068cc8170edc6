"""The exporter: its output is verified, and nothing is left behind if the output does not match the model."""

from __future__ import annotations

import dataclasses
import gzip
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES
from tests.small import small_config
from ziggurat.cli.export import _report_text
from ziggurat.config import load_experiment
from ziggurat.corpora.jobs.tasks import ModelChoice
from ziggurat.exchange.anatomy import Affine, compose, dissect, with_epsilon
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS
from ziggurat.exchange.verification import ExportVerification, Gate, compare, search_settings
from ziggurat.model.build import build_model
from ziggurat.model.directory import open_model
from ziggurat.model.tensors import load_weights, weights
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, ExportError
from ziggurat.system.files import fingerprint
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.results import Translation
from ziggurat.translate.translator import Translator, load_translator


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "choices"),
    [
        ("ziggurat", {"encoder": {"history": "dlcl"}}),
        ("plain", {"residual": "deepnorm"}),
        pytest.param("ctranslate2", {"residual": "admin"}, marks=pytest.mark.slow),
        ("ctranslate2", {"residual": "pre", "activation": "silu"}),
        pytest.param("huggingface", {"residual": "post", "activation": "silu"}, marks=pytest.mark.slow),
        ("ctranslate2", {"residual": "pre", "embedding": {"positions": "learned", "max_positions": 60}}),
        pytest.param("huggingface", {"residual": "post", "layer_norm_epsilon": 1e-7}, marks=pytest.mark.slow),
        ("huggingface", {"residual": "layer_scale", "embedding": {"zero_start": True, "shared_bias": True}}),
    ],
)
def test_the_result_translates_alike(
    to: str, choices: dict[str, Any], written: Written, text: Path, tmp_path: Path, transformers: ModuleType
) -> None:
    out = tmp_path / "out"
    report = export_model(written(**choices), to, out, verify=text)
    found = report["verification"]
    assert found["lines"] == len(SENTENCES)
    assert found["identical"] + found["ties"] == len(SENTENCES)
    assert json.loads((out / "export.json").read_text()) == report
    assert not list(tmp_path.glob("out.*"))
    with pytest.raises(ConfigError, match=rf"already holds an export \({to}, fp32\); `--force` replaces it"):
        export_model(tmp_path / "model", to, out, verify=text)
    again = export_model(tmp_path / "model", to, out, verify=text, force=True)
    assert again == report


@pytest.mark.parametrize("to", ["ctranslate2", "huggingface", "ziggurat"])
def test_search_rules_that_a_target_lacks_are_left_out_and_reported(
    to: str, written: Written, text: Path, tmp_path: Path, transformers: ModuleType
) -> None:
    decoding = {"endings": "fairseq", "prune": 0.5, "eos_margin": 0.0, "length_penalty": {"kind": "gnmt", "alpha": 1.0}}
    decoding |= {"banned": ["the", "dog"], "replace_unknown": True}
    report = export_model(written(residual="post", decoding=decoding), to, tmp_path / "out", verify=text)
    assert report["verification"]["different"] == 0
    told = " ".join(report.get("search_without", []))
    own = to == "ziggurat"
    for name in ("endings: fairseq", "prune: 0.5", "eos_margin: 0.0", "kind: gnmt", "banned", "replace_unknown"):
        assert (name in told) != own
    if to == "ctranslate2":
        with pytest.raises(ConfigError, match=r"CTranslate2 has no .*endings: fairseq"):
            CTranslate2Translator(tmp_path / "out", endings="fairseq")
        with pytest.raises(ConfigError, match=r"CTranslate2 has no `decoding.endings: candidates`"):
            CTranslate2Translator(tmp_path / "out", endings="candidates")


@pytest.mark.parametrize("to", ["plain", "ziggurat"])
def test_models_in_bf16_or_with_a_shortlist_are_compared_without_them(
    to: str, written: Written, listed: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding to bf16 would change the translations of a bad model, such as one without layers."""
    seen: list[str] = []

    def watched(ours: Translator, theirs: Translator, *given: Any) -> ExportVerification:
        seen.append(theirs.decoding.precision)
        return compare(ours, theirs, *given)

    monkeypatch.setattr("ziggurat.exchange.verification.compare", watched)
    model = written(decoding={"precision": "bfloat16", "shortlist": listed})
    report = export_model(model, to, tmp_path / "out", verify=text)
    assert seen == ["float32"]
    assert "search_without" not in report
    kept = load_experiment(tmp_path / "out" / "config.yaml").decoding
    assert (kept.precision, kept.shortlist) == ("bfloat16", listed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "decoding", "written_there", "told"),
    [
        ("huggingface", {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}, []),
        ("huggingface", {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}, []),
        ("huggingface", {"repetition_penalty": 1.5, "beam_size": 1}, {}, ["repetition_penalty: 1.5"]),
        ("argos", {"no_repeat_ngram_size": 1}, {}, ["no_repeat_ngram_size: 1"]),
        ("ctranslate2", {"diverse_groups": 4, "repetition_penalty": 1.5}, {}, ["repetition_", "diverse_groups: 4"]),
        ("ctranslate2", {"search": "sample", "n_best": 6, "top_k": 3, "mbr": 9}, {}, ["sample", "top_k: 3", "mbr: 9"]),
        ("ziggurat", {"search": "sample", "n_best": 6, "temperature": 2.0}, {}, []),
    ],
    ids=str,
)
def test_effective_rules_are_written_or_left_out_and_reported(
    to: str,
    decoding: dict[str, Any],
    written_there: dict[str, Any],
    told: list[str],
    written: Written,
    text: Path,
    tmp_path: Path,
    transformers: ModuleType,
) -> None:
    path = written(seed=21, residual="pre", decoding=decoding)
    report = export_model(path, to, tmp_path / "out", verify=text)
    assert report["verification"]["different"] == 0
    left_out = report.get("search_without", [])
    assert len(left_out) == len(told)
    assert all(part in text for part, text in zip(told, left_out, strict=True))
    if to == "huggingface":
        saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        keys = ("no_repeat_ngram_size", "repetition_penalty")
        assert {key: saved[key] for key in keys if saved.get(key)} == written_there
    if written_there:  # the comparison would be empty if the rule changed nothing
        assert report["verification"]["cut"] == 0
        ours, searched = load_translator(path), report["verification"]["settings"]
        free = ours.translate(SENTENCES, **searched, no_repeat_ngram_size=0, repetition_penalty=1.0)
        assert [t.text for t in ours.translate(SENTENCES, **searched)] != [t.text for t in free]


def test_the_models_own_minimum_length_does_not_fail_the_check(
    written: Written, text: Path, tmp_path: Path, transformers: ModuleType
) -> None:
    path = written(residual="post", decoding={"min_length": 0})
    assert export_model(path, "huggingface", tmp_path / "out", verify=text)["verification"]["different"] == 0


@pytest.mark.slow
def test_the_export_loads_the_usual_way(written: Written, text: Path, tmp_path: Path, transformers: ModuleType) -> None:
    decoding = {"endings": "beam", "length_penalty": {"kind": "power", "alpha": 0.8}}
    path = written(residual="post", decoding=decoding)
    export_model(path, "huggingface", tmp_path / "out", verify=text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "MarianMTModel"
    given = model.generate(**tokenizer(SENTENCES, return_tensors="pt", padding=True))
    theirs = tokenizer.batch_decode(given, skip_special_tokens=True)
    ours = load_translator(path).translate(SENTENCES)
    eos = tokenizer.eos_token_id
    ended = [  # outputs cut at the limit rank differently there
        (mine.text, other)
        for mine, other, ids in zip(ours, theirs, given.tolist(), strict=True)
        if mine.hypotheses[0].finished and eos in ids
    ]
    assert all(mine == other for mine, other in ended)
    assert len(set(ended)) > 1


@pytest.mark.slow
def test_a_result_that_is_another_model_is_refused(
    written: Written, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS["ctranslate2"]

    def spoilt(folder: Path, model: ExportedModel, quantization: str | None) -> None:
        tensors = dict(model.tensors)
        tensors["decoder.layers.1.ffn.out_proj.weight"] = -tensors["decoder.layers.1.ffn.out_proj.weight"]
        target.write(folder, dataclasses.replace(model, tensors=tensors), quantization)

    monkeypatch.setitem(TARGETS, "ctranslate2", dataclasses.replace(target, write=spoilt))
    path = written()
    with pytest.raises(ExportError, match=r"a different text for \d+ of 8 lines"):
        export_model(path, "ctranslate2", tmp_path / "out", verify=text)
    assert not list(tmp_path.glob("out*"))


def test_a_target_out_of_reach_is_refused_with_all_reasons(written: Written, text: Path, tmp_path: Path) -> None:
    path = written(encoder={"history": "dlcl"}, decoder={"attention": "average"})
    with pytest.raises(ExportError, match=r"encoder\.history: dlcl.*decoder\.attention: average"):
        export_model(path, "ctranslate2", tmp_path / "out", verify=text)
    assert not (tmp_path / "out").exists()


def test_int8_is_verified_in_fp32_first_and_passes_the_gate(written: Written, text: Path, tmp_path: Path) -> None:
    path = written()
    reference = tmp_path / "reference"
    reference.write_text("".join(f"{t.text}\n" for t in load_translator(path).translate(SENTENCES)))
    packed = [tmp_path / "text.gz", tmp_path / "reference.gz"]  # compressed texts are accepted, as everywhere
    for plain, path_of_packed in zip((text, reference), packed, strict=True):
        path_of_packed.write_bytes(gzip.compress(plain.read_bytes()))
    gate = Gate(packed[0], packed[1], tolerance=100.0)
    report = export_model(path, "ctranslate2", tmp_path / "out", quantization="int8", verify=packed[0], gate=gate)
    assert report["quantized"]["lines"] == len(SENTENCES)
    assert report["gate"]["before"] == pytest.approx(100.0)  # quantisation did not change the model itself
    fp32 = export_model(path, "ctranslate2", tmp_path / "fp32", verify=text)
    assert fp32["quantization"] is None
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("out", "fp32")]
    assert sizes[0] < 0.7 * sizes[1]
    assert "int8" in CTranslate2Translator(tmp_path / "out").origin


class Other:
    """A model that returns prepared translations."""

    def __init__(self, translations: list[Translation]) -> None:
        self.translations = translations

    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> Iterable[Translation]:
        return self.translations


def test_a_misaligned_test_set_is_reported_before_anything_is_written(
    written: Written, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "short").write_text("one line\n")
    said: list[str] = []
    with pytest.raises(DataError, match="they must pair up"):
        export_model(
            written(),
            "ctranslate2",
            tmp_path / "out",
            verify=text,
            gate=Gate(text, tmp_path / "short"),
            say=said.append,
        )
    assert not said


@pytest.mark.slow
def test_the_gate_refuses(written: Written, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written()
    reference = tmp_path / "reference"
    ours = load_translator(path).translate(SENTENCES)
    reference.write_text("".join(f"{t.text}\n" for t in ours))
    worse = [dataclasses.replace(t, hypotheses=[dataclasses.replace(t.hypotheses[0], text="worse")]) for t in ours]
    opened = iter([CTranslate2Translator, lambda folder: Other(worse)])  # verification, then the gate
    target = dataclasses.replace(TARGETS["ctranslate2"], translator=lambda folder: next(opened)(folder))
    monkeypatch.setitem(TARGETS, "ctranslate2", target)
    with pytest.raises(ExportError, match=r"BLEU falls from 100\.00 to"):
        export_model(path, "ctranslate2", tmp_path / "out", verify=text, gate=Gate(text, reference))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=[] if to == "huggingface" else pytest.mark.slow) for to in TARGETS]
)
def test_exporting_prints_no_messages_of_its_libraries(
    to: str, written: Written, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    as_marian = {"residual": "post", "embedding": {"zero_start": True}} if to == "marian" else {}
    path = written(decoder={"layers": 1}, encoder={"layers": 1}, **as_marian)
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)  # as Python does
        export_model(path, to, tmp_path / "out", verify=text)
    assert [str(warning.message) for warning in found] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_ties_are_distinguished_from_differences(written: Written) -> None:
    path = written()
    opened = load_translator(path)
    model = open_model(path, device="cpu").model  # not packed, so that the weights can be changed
    ours = Translator(model, opened.source_tokenizer, opened.target_tokenizer, opened.decoding)
    options = search_settings(100, 20)
    translations = ours.translate_stream(SENTENCES, **options)
    first = next(t for t in translations if t.hypotheses[0].finished and len(t.hypotheses[0].tokens) > 1)
    lines = [first.source]
    tokens = ours.target_tokenizer
    names = tokens.pieces(range(tokens.size))
    used, twin = names.index(first.hypotheses[0].tokens[0]), 300
    with torch.no_grad():  # a token's twin is exactly as likely everywhere, and has the same embedding
        model.output.weight[twin] = model.output.weight[used]
        model.output.bias[twin] = model.output.bias[used]
    mine = next(iter(ours.translate_stream(lines, **options)))
    pieces = list(mine.hypotheses[0].tokens)
    other = {names[used]: names[twin], names[twin]: names[used]}
    swapped = [other.get(piece, piece) for piece in pieces]
    tie = dataclasses.replace(mine.hypotheses[0], text="tie", tokens=swapped)
    wrong = dataclasses.replace(mine.hypotheses[0], text="wrong", tokens=pieces[:1])
    cut = dataclasses.replace(mine.hypotheses[0], text="cut", finished=False)
    for hypothesis, kind in ((mine.hypotheses[0], "identical"), (tie, "ties"), (wrong, "different"), (cut, "cut")):
        found = compare(ours, Other([dataclasses.replace(mine, hypotheses=[hypothesis])]), lines, options)
        assert getattr(found, kind) == 1, kind


def test_a_toolkit_may_redistribute_the_probability_of_tokens_never_written(written: Written) -> None:
    """The model gives padding much probability, as label smoothing does in a small vocabulary; long texts suffer."""
    opened = load_translator(path := written())
    options = search_settings(100, 20)

    def translator(padding: float) -> Translator:
        model = open_model(path, device="cpu").model
        with torch.no_grad():
            model.output.bias[opened.target_tokenizer.pad] = padding
            model.output.bias[opened.target_tokenizer.eos] += 5.0  # so that most of them end
        return Translator(model, opened.source_tokenizer, opened.target_tokenizer, opened.decoding)

    ours, theirs = translator(20.0), translator(-1e9)
    texts = [list(one.translate_stream(SENTENCES, **options)) for one in (ours, theirs)]
    unlike = [
        n
        for n, (a, b) in enumerate(zip(*texts, strict=True))
        if a.text != b.text and a.hypotheses[0].finished and b.hypotheses[0].finished
    ]
    assert unlike
    lines, others = [SENTENCES[n] for n in unlike], [texts[1][n] for n in unlike]
    assert compare(ours, Other(others), lines, options).ties == len(unlike)


def test_slow_work_is_announced(written: Written, text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    export_model(written(), "plain", tmp_path / "out", verify=text, lines=2, say=said.append)
    assert [line.partition(":")[0] for line in said] == [str(tmp_path / "model"), "comparing it with the model"]


def test_folders_and_options_of_others_are_left_alone(written: Written, text: Path, tmp_path: Path) -> None:
    path = written()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="no earlier export"):
        export_model(path, "ctranslate2", tmp_path / "mine", verify=text)
    with pytest.raises(ConfigError, match=r"--quantization int8.*has: none"):
        export_model(path, "plain", tmp_path / "out", quantization="int8", verify=text)
    with pytest.raises(ConfigError, match="choose one of"):
        export_model(path, "tensorflow", tmp_path / "out")
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(DataError, match="no text"):
        export_model(path, "plain", tmp_path / "out", verify=empty)


def test_without_own_text_embedded_sentences_are_used(written: Written, tmp_path: Path) -> None:
    report = export_model(written(), "ziggurat", tmp_path / "out", lines=5)
    assert report["verification"]["text"] == "embedded sentences (Babel)"
    assert report["verification"]["lines"] + report["verification"]["left_out"] == 5


def test_an_unreadable_store_is_an_error(written: Written, tmp_path: Path) -> None:
    path = written()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"none.*damaged.*--verify FILE"):
        export_model(path, "ziggurat", tmp_path / "out", lines=5)


@settings(max_examples=12)
@given(st.sampled_from(["pre", "post"]), st.sampled_from([1e-8, 1e-5, 1e-2]), st.integers(0, 9))
def test_another_epsilon_changes_nothing(residual: str, epsilon: float, seed: int) -> None:
    old = {"encoder": {"layer_norm_epsilon": 1e-3}, "decoder": {"layer_norm_epsilon": 1e-6}}
    config = small_config(2, 2, residual=residual, embedding={"sharing": "none", "positions": "learned"}, **old)
    model = build_model(config, 9, 9, seed=seed).double().eval()
    anatomy = dissect(config, weights(model), 1024)
    stacks = [with_epsilon(stack, epsilon) for stack in (anatomy.encoder, anatomy.decoder)]
    root = 8**0.5
    stacks = [dataclasses.replace(stack, embedding=stack.embedding * stack.scale / root) for stack in stacks]
    changed = compose(dataclasses.replace(anatomy, encoder=stacks[0], decoder=stacks[1]))
    new = {side: {"layer_norm_epsilon": epsilon} for side in ("encoder", "decoder")}
    other = build_model(
        small_config(2, 2, residual=residual, embedding={"sharing": "none", "positions": "learned"}, **new), 9, 9
    )
    other = other.double().eval()
    load_weights(other, changed, "changed")
    torch.testing.assert_close(_outputs(other), _outputs(model), atol=1e-9, rtol=0.0)


def _outputs(model: Any) -> Tensor:
    source = torch.tensor([[4, 5, 6, 3], [7, 8, 3, 0]])
    memory = model.encode(source, source != 0)
    return model.logits(model.decode(torch.tensor([[2, 4, 5], [2, 6, 7]]), memory))


def test_an_anatomy_is_put_together_again() -> None:
    config = small_config(2, 2, embedding={"sharing": "none", "positions": "learned"})
    tensors = weights(build_model(config, 9, 11))
    again = compose(dissect(config, tensors, 1))
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_a_bias_scales_with_its_map_or_not() -> None:
    affine = Affine(torch.ones(2, 2), torch.ones(2))
    assert torch.equal(affine.times(2.0).bias, torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert torch.equal(affine.times(2.0, bias=False).bias, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_shortlist_goes_into_the_folder_of_ctranslate2(
    written: Written, text: Path, tmp_path: Path, listed: str
) -> None:
    """One sentence at a time, so that both engines allow the same pieces, both find the same."""
    decoding = {"endings": "beam", "beam_size": 2, "length_penalty": {"kind": "none", "alpha": 0.0}}
    path = written(decoding=decoding)
    with pytest.raises(ConfigError, match="`--shortlist` is for `--to ctranslate2`"):
        export_model(path, "onnx", tmp_path / "out", shortlist=listed)
    report = export_model(path, "ctranslate2", tmp_path / "out", verify=text, shortlist=listed)
    assert f"--shortlist {listed}" in (tmp_path / "out" / "checksums.json").read_text()
    assert "search_without" not in report
    assert report["verification"]["different"] == 0  # without the list, so that batches do not matter
    theirs, ours = CTranslate2Translator(tmp_path / "out"), load_translator(path, shortlist=listed)
    found = [t.text for t in theirs.translate_stream(SENTENCES, window=1)]
    assert found == [t.text for t in ours.translate_stream(SENTENCES, window=1)]
    free = [t.text for t in CTranslate2Translator(tmp_path / "out", shortlist=None).translate_stream(SENTENCES)]
    assert free == [t.text for t in load_translator(path).translate_stream(SENTENCES)]
    assert free != found
    known = ModelChoice((str(tmp_path / "out"),)).identified().settings  # in jobs: the list is not in `model.bin`
    assert known["shortlist"] == fingerprint(tmp_path / "out" / "vmap.txt")
    for asked in ({"shortlist": listed}, {"shortlist": "other"}):
        with pytest.raises(ConfigError, match="export the model with it"):
            CTranslate2Translator(tmp_path / "out", **asked)
    (tmp_path / "out" / "vmap.txt").unlink()
    with pytest.raises(CheckpointError, match=r"vmap\.txt"):
        CTranslate2Translator(tmp_path / "out")


@pytest.mark.parametrize(
    ("same", "gate", "hinted"), [(49, {}, True), (50, {}, False), (1, {"before": 30.0, "after": 29.9}, False)]
)
def test_few_unchanged_lines_are_reported_where_bleu_was_not_compared(
    same: int, gate: dict[str, float], hinted: bool, tmp_path: Path
) -> None:
    report: dict[str, Any] = {
        "target": "ctranslate2",
        "model": "m",
        "verification": {"lines": 100, "text": "dev", "identical": 100, "ties": 0, "cut": 0},
        "quantization": "int8",
        "quantized": {"identical": same, "lines": 100},
        **({"gate": {**gate, "tolerance": 0.2}} if gate else {}),
    }
    assert ("--reference" in _report_text(report, tmp_path)) == hinted

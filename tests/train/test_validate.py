"""Validation: what it scores, and what bounds its time."""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, records
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.loop import train
from ziggurat.train.run import reopen_run
from ziggurat.train.setup import rank_anew
from ziggurat.train.validate import DevLoss, Validation, Validator, _DecodingClock
from ziggurat.translate.results import Hypothesis, Translation
from ziggurat.translate.translator import Translator


def untrained(experiment: Experiment) -> tuple[Validator, Seq2Seq]:
    store = Store.open(experiment.data.store)
    validator = Validator(store, experiment.training, experiment.decoding)
    return validator, build_model(experiment.model, store.source.size, store.target.size)


@pytest.mark.parametrize("metric", ["loss", "chrf", "bleu"])
def test_without_a_tokenizer_bleu_is_skipped_unless_it_is_needed(
    metric: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    experiment = tiny_experiment(tiny_folder, validation={"metric": metric})
    store = Store.open(experiment.data.store)
    store.manifest["config"]["target_language"] = "ja"
    if metric == "bleu":
        with pytest.raises(ConfigError, match=r"validation\.metric: bleu.*ziggurat-mt\[ja\].*metric=chrf"):
            Validator(store, experiment.training, experiment.decoding)
        return
    validator = Validator(store, experiment.training, experiment.decoding)
    assert "leaves BLEU out" in validator.notices[0]
    assert [list(scores) for scores in validator._scores(validator.references)] == [["chrf"]]
    assert "BLEU" not in Validation(1.0, None, 50.0, 0).line()


@pytest.mark.slow
@pytest.mark.parametrize(("sentences", "best"), [(4, (60.0, 2)), (6, (10.0, 3))])
def test_scores_of_other_sentences_do_not_compete_for_best(
    sentences: int, best: tuple[float, int], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, run = iter([50.0, 60.0, 10.0]), tmp_path / "run"
    monkeypatch.setattr(
        "ziggurat.train.validate.Validator.measure", lambda *_, **__: Validation(1.0, chrf=next(left), unfinished=0)
    )
    validation = {"every_updates": 1, "metric": "chrf", "max_sentences": 4}
    checkpoint = {"every_updates": 1, "keep_last": 1, "keep_best": 1}
    first = tiny_experiment(tiny_folder, stop={"updates": 2}, validation=validation, checkpoint=checkpoint)
    train(run, first, console=QUIET)
    changes = ["training.stop.updates=3", f"training.validation.max_sentences={sentences}"]
    log = io.StringIO()
    result = train(run, reopen_run(run, changes), resume=True, console=Console(file=log, width=1000))
    assert (result.best, result.best_update) == best
    assert (run / "best").resolve().name == f"step-{best[1]:08d}"
    assert ("max_sentences` changed: earlier scores cannot be compared" in log.getvalue()) == (sentences == 6)


def test_the_dev_set_is_translated_with_its_tags(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tiny_experiment(tiny_folder)
    store = Store.open(experiment.data.store)
    assert store.dev is not None
    validator = Validator(store, experiment.training, experiment.decoding)
    assert validator.longest is not None
    validator.longest = [len(text) for text in validator.sources]
    validator.tags = ["<bt>" if i % 3 else None for i in range(len(validator.sources))]
    asked: dict[str, str | None] = {}

    def echo(_self: object, texts: list[str], *, tag: str | None, longest: list[int]) -> list[Translation]:
        asked.update(dict.fromkeys(texts, tag))
        assert longest == [len(text) for text in texts]
        return [Translation(text, [Hypothesis(text, 0.0, 0.0, [], [], True)]) for text in texts]

    monkeypatch.setattr("ziggurat.translate.translator.Translator.translate", echo)
    validator.references = validator.sources  # back in the right order, the echo is perfect
    model = build_model(experiment.model, store.source.size, store.target.size)
    assert validator.measure(model).bleu == pytest.approx(100.0)
    assert asked == dict(zip(validator.sources, validator.tags, strict=True))


def seen_by_the_translator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Translation]]]:
    """Return a list that receives the beam and the results of each of a validator's translations."""
    seen: list[tuple[int, list[Translation]]] = []
    genuine = Translator.translate

    def watched(self: Translator, *args: object, **others: object) -> list[Translation]:
        done = genuine(self, *args, **others)  # type: ignore[arg-type]
        seen.append((self.decoding.beam_size, done))
        return done

    monkeypatch.setattr(Translator, "translate", watched)
    return seen


def test_references_limit_the_length_of_translations(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model does not end sentences by itself, so each has the maximum length."""
    seen = seen_by_the_translator(monkeypatch)
    lengths = []
    for rule in ({"ratio": 0.5, "extra": 3}, None):
        validator, model = untrained(tiny_experiment(tiny_folder, validation={"max_length": rule}))
        validator.decoding = validator.decoding.model_copy(update={"min_length": 90})
        result = validator.measure(model)
        assert result is not None
        assert result.unfinished == len(validator.sources)
        lengths.append([len(t.hypotheses[0].tokens) for t in seen.pop()[1]])
    encode = validator.store.target.encode
    assert lengths[0] == [int(0.5 * len(ids) + 3) for ids in encode(validator.references)]
    encode = validator.store.source.encode
    alone = validator.decoding.max_length
    assert lengths[1] == [int(alone.ratio * len(ids) + alone.extra) for ids in encode(validator.sources)]


@pytest.mark.parametrize("knows", [False, True])
def test_a_model_that_does_not_know_word_frequencies_is_decoded_greedily(
    knows: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_by_the_translator(monkeypatch)
    validator, model = untrained(tiny_experiment(tiny_folder, validation={"beam_size": 3, "max_sentences": 2}))
    train, eos = validator.store.train, validator.store.target.eos
    ids = [int(i) for target in train.pairs(np.arange(len(train)))[1] for i in (*target, eos)]
    entropy = -sum(math.log(n / len(ids)) * n / len(ids) for n in Counter(ids).values())
    loss = DevLoss(entropy * (0.999 if knows else 1.001), 1)
    monkeypatch.setattr("ziggurat.train.validate.dev_loss", lambda *_: loss)
    validator.measure(model)
    assert [beam for beam, _ in seen] == [3 if knows else 1]


def test_decodings_stay_within_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ziggurat.train.validate.time.perf_counter", lambda: now[0])
    clock, unlimited = _DecodingClock(0.25), _DecodingClock(None)

    def decode(seconds: float) -> None:
        with clock, unlimited:
            now[0] += seconds

    decode(9.0)
    assert clock.affordable(), "short ones always are"
    decode(20.0)  # 29 s of 29
    for passed, affordable in ((160.0, False), (180.0, True)):  # 29 + 20 s are a quarter of 196 s, including the next
        now[0] = passed
        assert clock.affordable() == affordable
        assert unlimited.affordable()


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["loss", "chrf"])
def test_slow_decodings_are_skipped_except_for_the_last(
    metric: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.train.validate._SHORT_SECONDS", 0.0)
    monkeypatch.setattr("ziggurat.train.progress._TOLD_SHARE", 0.0)
    validation = {"every_updates": 2, "metric": metric, "max_share": 1e-6, "max_sentences": 2}
    log = io.StringIO()
    experiment = tiny_experiment(tiny_folder, validation=validation, stop={"updates": 7})
    train(tmp_path / "run", experiment, console=Console(file=log, width=1000))
    decoded = [record["update"] for record in records(tmp_path / "run", "validation") if "chrf" in record]
    assert decoded == ([2, 7] if metric == "loss" else [2, 4, 6, 7])
    said = log.getvalue().count("not translated: over 0% of the time; see `training.validation.max_share`")
    assert said == (2 if metric == "loss" else 0)
    assert log.getvalue().count("% of the time]") == 4


@pytest.mark.parametrize("stop", [{"patience": 1}, {"updates": 4}])
def test_the_last_validation_always_translates(
    stop: dict[str, int], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.train.validate._SHORT_SECONDS", 0.0)
    losses = iter([DevLoss(3.0, 1), DevLoss(2.0, 1), DevLoss(2.5, 1)])
    monkeypatch.setattr("ziggurat.train.validate.dev_loss", lambda *_: next(losses))
    validation = {"every_updates": 2, "max_share": 1e-6, "max_sentences": 2}
    train(tmp_path / "run", tiny_experiment(tiny_folder, validation=validation, stop=stop), console=QUIET)
    decoded = {record["update"]: "chrf" in record for record in records(tmp_path / "run", "validation")}
    assert decoded == ({2: True, 4: False, 6: True} if "patience" in stop else {2: True, 4: True})


def test_groups_of_the_search_do_not_stop_a_greedy_validation(tiny_folder: Path) -> None:
    """`decoding.diverse_groups` belongs to a beam that validation may not have, or not yet."""
    experiment = tiny_experiment(tiny_folder, validation={"beam_size": 4, "max_sentences": 2})
    decoding = experiment.decoding.model_copy(update={"beam_size": 4, "diverse_groups": 2})
    for beam, nll in ((4, 0.1), (4, 99.0), (1, 0.1)):
        validation = experiment.training.validation.model_copy(update={"beam_size": beam})
        changed = experiment.training.model_copy(update={"validation": validation})
        validator, model = untrained(experiment.model_copy(update={"training": changed, "decoding": decoding}))
        validator._loss = lambda *_, nll=nll: [nll, 1]  # type: ignore[method-assign]
        result = validator.measure(model)
        assert result is not None
        assert result.chrf is not None


def test_validation_uses_a_beam_if_translation_samples(tiny_folder: Path) -> None:
    experiment = tiny_experiment(tiny_folder, validation={"beam_size": 3, "metric": "chrf"})
    sampling = {"search": "sample", "temperature": 2.0, "top_k": 5, "top_p": 0.5, "epsilon": 0.1, "mbr": 4, "seed": 7}
    samples = change_section(experiment.decoding, sampling, "decoding")
    changed = experiment.model_copy(update={"decoding": samples})
    assert untrained(changed)[0].decoding == untrained(experiment)[0].decoding
    one, other = RunProgress(), RunProgress()
    assert rank_anew(one, experiment) == rank_anew(other, changed) == []
    assert one.best_by == other.best_by


@pytest.mark.parametrize(
    ("change", "starts_again"),
    [
        ({"beam_size": 7, "n_best": 3, "batch_sentences": 9, "precision": "bfloat16", "alignments": True}, False),
        ({"diverse_groups": 4, "beam_size": 8, "diverse_strength": 0.9}, False),  # the groups do not divide 3
        ({"diverse_groups": 3, "beam_size": 9}, True),
        ({"length_penalty": {"alpha": 1.0}}, True),
    ],
)
def test_decoding_settings_that_validation_ignores_keep_the_best(
    change: dict[str, Any], starts_again: bool, tiny_folder: Path
) -> None:
    experiment = tiny_experiment(tiny_folder, validation={"metric": "chrf", "beam_size": 3})
    other = change_section(experiment, {"decoding": change}, "")
    now = RunProgress()
    rank_anew(now, experiment)
    progress = RunProgress(best=5.0, best_by=now.best_by)
    assert bool(rank_anew(progress, other)) == starts_again
    assert progress.best == (None if starts_again else 5.0)

"""Notices about choices that are allowed, but probably mistakes.

Settings outside the model that mean nothing beside others; those of a model are in ziggurat.config.compatibility.

Language codes, as test sets and configurations use them.

Only languages with a code of two letters (ISO 639-1) are known: no other changes a score.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pydantic import BaseModel

from ziggurat.config.compatibility import unheeded
from ziggurat.config.data import DataConfig, SubwordConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.growth import cut_short
from ziggurat.config.kinds import ATTENTIONS, INITIALISATIONS, RESIDUALS
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import ConfigError, printable

_FILES = {"existing": ("source_model", "target_model"), "vocabulary": ("source_vocabulary", "target_vocabulary")}
"""Kind of `data.subword` -> the keys of the files that it reads."""

_OF_TRAINED_PIECES = (
    *("vocabulary_size", "target_vocabulary_size", "joint"),
    *("byte_fallback", "character_coverage", "symbols", "sample_pairs"),
)

_HEEDED_BY_SCHEDULE = {
    "isqrt": {"peak", "warmup_updates", "initial", "floor"},
    "noam": {"factor", "warmup_updates"},
    "linear": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "cosine": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "constant": {"peak", "warmup_updates", "initial"},
    "gnmt+": {"warmup_updates", "base", "replicas", "decay_start", "decay_end"},
}


def unread_files(subword: SubwordConfig) -> list[str]:
    """Return a sentence for each file of a vocabulary that `subword.kind` does not read."""
    return [
        f"`data.subword.{key}` is read with `kind: {kind}` only, not with `kind: {subword.kind}`: set "
        f"`data.subword.kind={kind}`, or leave it out"
        for kind, keys in _FILES.items()
        for key in keys
        if kind != subword.kind and getattr(subword, key) is not None
    ]


def unheeded_in_data(data: DataConfig) -> list[str]:
    """Return the keys of section `data` that are set but mean nothing beside its other choices."""
    subword, computed = data.subword, data.alignment.compute
    idle = {key for kind, keys in _FILES.items() if kind != subword.kind for key in keys}
    found = list(_set("data.subword", subword, idle | set(_OF_TRAINED_PIECES if subword.kind in _FILES else ())))
    every = [data.filters, *map(data.filters_of, data.train)]
    if all(filters.source_script is None and filters.target_script is None for filters in every):
        found += _set("data.filters", data.filters, {"min_script_share"})
    idle = set() if computed == "hmm" else {"pairs", "symmetrise"}
    found += _set("data.alignment", data.alignment, idle)
    for number, corpus in enumerate(data.dev):
        found += _set(f"data.dev.{number}", corpus, {"weight"})
    return found


def unheeded_in_training(training: TrainingConfig) -> list[str]:
    """Return the keys of section `training` that are set but mean nothing beside its other choices."""
    schedule, optimiser, batch = training.schedule, training.optimiser, training.batch
    divergence, validation = training.divergence, training.validation
    heeded = {"kind", "start", *_HEEDED_BY_SCHEDULE[schedule.kind]}
    if schedule.start == "peak":  # the rest of these two does not depend on the warm-up, that of others does
        heeded -= {"initial"} | ({"warmup_updates"} if schedule.kind in ("linear", "cosine", "constant") else set())
    found = list(_set("training.schedule", schedule, type(schedule).model_fields.keys() - heeded))
    found += _set("training.optimiser", optimiser, set() if optimiser.kind == "muon" else {"momentum"})
    idle = {"rate_factor", "max_roll_backs"} if divergence.action == "stop" else set()
    idle |= {"window"} if divergence.loss_spike is None else set()
    found += _set("training.divergence", divergence, idle)
    found += _set("training.batch", batch, set() if batch.fit else {"fit_limit", "fit_margin"})
    idle = set() if validation.metric == "loss" else {"max_share"}
    idle |= set() if validation.decode else {"beam_size", "max_length", "max_share", "max_sentences"}
    found += _set("training.validation", validation, idle)
    return found


def unheeded_in_decoding(decoding: DecodingConfig) -> list[str]:
    """Return the keys of section `decoding` that are set but mean nothing beside its other choices."""
    penalty = decoding.length_penalty
    found = list(_set("decoding", decoding, set() if decoding.diverse_groups > 1 else {"diverse_strength"}))
    idle = {"alpha"} if penalty.kind == "none" else set()
    found += _set("decoding.length_penalty", penalty, idle | (set() if penalty.coverage else {"length_ratio"}))
    return found


def _set(path: str, section: BaseModel, idle: set[str]) -> Iterator[str]:
    """Yield the keys among `idle` whose value is not the default."""
    for key, field in type(section).model_fields.items():
        if key in idle and getattr(section, key) != field.default:
            yield f"{path}.{key}"


_TABLE = """
aa aar Afar; ab abk Abkhazian; ae ave Avestan; af afr Afrikaans; ak aka Akan; am amh Amharic; an arg
Aragonese; ar ara Arabic; as asm Assamese; av ava Avaric; ay aym Aymara; az aze Azerbaijani; ba bak Bashkir;
be bel Belarusian; bg bul Bulgarian; bi bis Bislama; bm bam Bambara; bn ben Bengali; bo bod/tib Tibetan; br
bre Breton; bs bos Bosnian; ca cat Catalan; ce che Chechen; ch cha Chamorro; co cos Corsican; cr cre Cree; cs
ces/cze Czech; cu chu Church Slavic; cv chv Chuvash; cy cym/wel Welsh; da dan Danish; de deu/ger German; dv
div Divehi; dz dzo Dzongkha; ee ewe Ewe; el ell/gre Modern Greek; en eng English; eo epo Esperanto; es spa
Spanish; et est Estonian; eu eus/baq Basque; fa fas/per Persian; ff ful Fulah; fi fin Finnish; fj fij Fijian;
fo fao Faroese; fr fra/fre French; fy fry Western Frisian; ga gle Irish; gd gla Scottish Gaelic; gl glg
Galician; gn grn Guarani; gu guj Gujarati; gv glv Manx; ha hau Hausa; he heb Hebrew; hi hin Hindi; ho hmo Hiri
Motu; hr hrv Croatian; ht hat Haitian; hu hun Hungarian; hy hye/arm Armenian; hz her Herero; ia ina
Interlingua; id ind Indonesian; ie ile Interlingue; ig ibo Igbo; ii iii Sichuan Yi; ik ipk Inupiaq; io ido
Ido; is isl/ice Icelandic; it ita Italian; iu iku Inuktitut; ja jpn Japanese; jv jav Javanese; ka kat/geo
Georgian; kg kon Kongo; ki kik Kikuyu; kj kua Kuanyama; kk kaz Kazakh; kl kal Kalaallisut; km khm Khmer; kn
kan Kannada; ko kor Korean; kr kau Kanuri; ks kas Kashmiri; ku kur Kurdish; kv kom Komi; kw cor Cornish; ky
kir Kirghiz; la lat Latin; lb ltz Luxembourgish; lg lug Ganda; li lim Limburgan; ln lin Lingala; lo lao Lao;
lt lit Lithuanian; lu lub Luba-Katanga; lv lav Latvian; mg mlg Malagasy; mh mah Marshallese; mi mri/mao Maori;
mk mkd/mac Macedonian; ml mal Malayalam; mn mon Mongolian; mr mar Marathi; ms msa/may Malay; mt mlt Maltese;
my mya/bur Burmese; na nau Nauru; nb nob Norwegian Bokmål; nd nde North Ndebele; ne nep Nepali; ng ndo Ndonga;
nl nld/dut Dutch; nn nno Norwegian Nynorsk; no nor Norwegian; nr nbl South Ndebele; nv nav Navajo; ny nya
Chichewa; oc oci Occitan; oj oji Ojibwa; om orm Oromo; or ori Oriya; os oss Ossetian; pa pan Panjabi; pi pli
Pali; pl pol Polish; ps pus Pushto; pt por Portuguese; qu que Quechua; rm roh Romansh; rn run Rundi; ro
ron/rum Romanian; ru rus Russian; rw kin Kinyarwanda; sa san Sanskrit; sc srd Sardinian; sd snd Sindhi; se sme
Northern Sami; sg sag Sango; sh hbs Serbo-Croatian; si sin Sinhala; sk slk/slo Slovak; sl slv Slovenian; sm
smo Samoan; sn sna Shona; so som Somali; sq sqi/alb Albanian; sr srp Serbian; ss ssw Swati; st sot Southern
Sotho; su sun Sundanese; sv swe Swedish; sw swa Swahili; ta tam Tamil; te tel Telugu; tg tgk Tajik; th tha
Thai; ti tir Tigrinya; tk tuk Turkmen; tl tgl Tagalog; tn tsn Tswana; to ton Tonga; tr tur Turkish; ts tso
Tsonga; tt tat Tatar; tw twi Twi; ty tah Tahitian; ug uig Uighur; uk ukr Ukrainian; ur urd Urdu; uz uzb Uzbek;
ve ven Venda; vi vie Vietnamese; vo vol Volapük; wa wln Walloon; wo wol Wolof; xh xho Xhosa; yi yid Yiddish;
yo yor Yoruba; za zha Zhuang; zh zho/chi Chinese; zu zul Zulu
"""
# Code of two letters, of three (terminological/bibliographic), name: ISO 639.

_NAMES: dict[str, str] = {}  # code of two letters -> name
_SHORT: dict[str, str] = {"cmn": "zh"}  # code of three letters, or a name in lower case -> code of two
for _entry in _TABLE.replace("\n", " ").split(";"):
    _code, _long, _name = _entry.strip().split(" ", 2)
    _NAMES[_code] = _name
    _SHORT |= dict.fromkeys([*_long.split("/"), _name.lower()], _code)

_EMBEDDED = {"qlo": "Low Babel", "qhi": "High Babel"}  # ziggurat/data/babel.py; for people only


def main_language(code: str) -> str:
    """Return the code of two letters for `ja`, `jpn`, `ja-JP`, `zh_Hant` and the like; an unknown code as it is."""
    first = _first(code)
    if first in _NAMES:
        return first
    return _SHORT.get(first, code) if len(first) == 3 else code


def check_language_code(code: str, option: str) -> None:
    """Raise ConfigError unless main_language knows `code`; the message proposes similar ones.

    Codes for private use, qaa to qtz, are accepted: the embedded languages have such codes.
    """
    first = main_language(code)
    if first in _NAMES or (len(first) == 3 and "qaa" <= first.lower() <= "qtz"):
        return
    raise ConfigError(
        f"`{option} {printable(code)}`: not a language that a score depends on{_meant(code)} It takes codes such as "
        "en, ja or zh-CN; for a language without a code of two letters leave it out"
    )


def language_doubt(code: str, key: str) -> str:
    """Return a sentence where `code`, the value of `key`, looks like no code of ISO 639, such as a name; else "".

    A code of three letters is never doubted: there are thousands.
    """
    first = _first(code)
    if main_language(code) in _NAMES or (len(first) == 3 and first.isascii() and first.isalpha()):
        return ""
    doubt = f"`{key}: {printable(code)}` is not an ISO 639 language code{_meant(first)}"
    return f"{doubt} Scores and default columns of corpora depend on it"


def _first(code: str) -> str:
    return code.replace("_", "-").partition("-")[0].lower()


def _meant(code: str) -> str:
    """Return the end of a sentence: the codes that may be meant by `code`, if any are near."""
    wanted = code.lower()
    near = [wanted[:2]] if len(wanted) == 3 and wanted[:2] in _NAMES else []
    near += [_SHORT[name] for name in difflib.get_close_matches(wanted, _SHORT, n=1, cutoff=0.8)]
    known = list(dict.fromkeys(near))[:2]
    return f"; did you mean {' or '.join(f'`{c}` ({_NAMES[c]})' for c in known)}?" if known else "."


def language_name(code: str) -> str:
    """Return the English name of a language that main_language knows, or of the embedded pair; otherwise the code."""
    return _NAMES.get(main_language(code)) or _EMBEDDED.get(code, code)


def _halves(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each method of which the model, or one of its stacks, has half."""
    residuals = {"encoder": model.residuals(decoder=False), "decoder": model.residuals(decoder=True)}
    every = dict.fromkeys((*residuals["encoder"], *residuals["decoder"]))
    for residual, facts in RESIDUALS.items():
        if facts.init is None:
            continue
        kind, elsewhere = facts.init, INITIALISATIONS[facts.init].elsewhere
        chosen = [side for side, its in residuals.items() if residual in its]
        by_kind = [side for side in residuals if model.stack_init(decoder=side == "decoder").kind == kind]
        if without := [side for side in chosen if side not in by_kind]:
            where = "" if without == chosen else f" in the {without[0]}"
            yield f"`residual: {residual}` without `init.kind: {kind}`{where} {facts.without_init}"
        if by_kind and not chosen:
            here = " and ".join(f"`{its}`" for its in every)
            yield f"`init.kind: {kind}` was made for `residual: {residual}`; here it is {here}"
        for other in [side for side in by_kind if side not in chosen] if chosen and elsewhere else ():
            yield (
                f"`init.kind: {kind}` {elsewhere} in the {other} too, whose `residual: {residuals[other][-1]}` was not "
                f"made for that; choose `residual: {residual}` for both, or `model.{other}.init.kind: xavier`"
            )
        for side in [side for side in chosen if side in by_kind] if elsewhere else ():
            if others := list(dict.fromkeys(its for its in residuals[side] if its != residual)):
                these = " and ".join(f"`residual: {its}`" for its in others)
                yield (
                    f"`init.kind: {kind}` is for all layers: it {elsewhere} in those of the {side} with {these} "
                    f"too, which were not made for that (`model.{side}.ranges`)"
                )
    if model.init.kind == "uniform" and model.family != "rnmt":
        yield (
            "`init.kind: uniform` is RNMT+'s: of a Transformer it sets embeddings and output projection alone, and the "
            "maps in its layers start as in `xavier`"
        )
    if model.wiring.gpas and "model.wiring.gpas" not in unheeded(model):
        for side, its in residuals.items():
            if without := [kind for kind in dict.fromkeys(its) if "wiring.gpas" not in RESIDUALS[kind].options]:
                these = " and ".join(f"`residual: {kind}`" for kind in without)
                yield f"`wiring.gpas` gives no gates to the layers of the {side} with {these}, only to the others"
    yield from _three_branches(model)
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        paper = residuals[side] == ("none",) * stack.layers and model.combination.unit == "sublayer"
        if stack.history in ("attention_residuals", "block_attention_residuals") and not paper:
            yield (
                f"`{side}.history: {stack.history}` takes the place of residual connections in its paper: `residual: "
                "none` and `combination.unit: sublayer`; here it mixes streams that hold what is below them already"
            )
    if "sub_ln" in residuals["decoder"] and model.decoder.attention not in ("full", "relative", "merged_full"):
        yield (
            f"`residual: sub_ln` has no second norm inside `decoder.attention: {model.decoder.attention}`, only in "
            "feed-forward networks"
        )
    if "hybrid" in every and "none" in (model.attention.qk_norm, model.attention.value_norm):
        yield (
            "`residual: hybrid` leaves the normalisation of attention to attention itself: set `attention.qk_norm: "
            "rms` and `attention.value_norm: rms`"
        )
    if any(
        "ln_scaling" in its and model.stack_init(decoder=side == "decoder").kind == "depth_scaled"
        for side, its in residuals.items()
    ):
        yield (
            "`residual: ln_scaling` beside `init.kind: depth_scaled`: both damp deep layers, and the authors of "
            "LayerNorm Scaling leave scaled initialisation out because it cancels the gain (Sun et al. 2025)"
        )


def _three_branches(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each method whose constants count three branches where a merged decoder layer has two."""
    if not ATTENTIONS[model.decoder.attention].merged:
        return
    decoder = RESIDUALS[model.decoder_residual]
    for kind, facts in INITIALISATIONS.items():
        in_residual = decoder.init == kind and decoder.depth_constants
        if facts.three_branches and (model.stack_init(decoder=True).kind == kind or in_residual):
            yield (
                f"the constants of {facts.three_branches} count three branches to a decoder layer, as its paper has; "
                f"with `decoder.attention: {model.decoder.attention}` there are two, so the decoder's first updates "
                "are smaller than they need be"
            )


def data_notices(data: DataConfig) -> list[str]:
    """Return a sentence for each side, of all corpora or of one, whose language is told by anything but a code.

    After them come those on what has no effect of an OpusTrainer file.
    """
    sides = {"data.source_language": data.source_language, "data.target_language": data.target_language}
    sides |= {
        f"data.{split}.{number}.{key}": code
        for split, corpora in (("train", data.train), ("dev", data.dev))
        for number, corpus in enumerate(corpora)
        for key in ("source_language", "target_language")
        if (code := getattr(corpus, key)) is not None
    }
    return [*(doubt for key, code in sides.items() if (doubt := language_doubt(code, key)))]


def warm_up_notice(training: TrainingConfig) -> str:
    """Return a sentence where training ends before its learning rate has risen to its peak; "": it does not."""
    schedule, last = training.schedule, training.stop.updates
    steps = schedule.warmup_updates * (schedule.replicas if schedule.kind == "gnmt+" else 1)
    one_replica = schedule.kind == "gnmt+" and schedule.replicas == 1
    if schedule.start == "peak" or one_replica or last is None or steps <= last:
        return ""
    done = last / steps
    if schedule.kind in ("noam", "gnmt+"):
        reached = f"{done:.0%} of the way to its peak"
    else:
        reached = f"{schedule.initial + (schedule.peak - schedule.initial) * done:.3g} of `peak: {schedule.peak:.3g}`"
    times = f" (times `replicas: {schedule.replicas}`)" if schedule.kind == "gnmt+" else ""
    return (
        f"`training.schedule.warmup_updates: {schedule.warmup_updates}`{times} is more than `training.stop.updates: "
        f"{last}`: the learning rate still rises when training ends, at {reached}, so little is learnt; lower "
        "`warmup_updates`, to a tenth to a third of the updates, or train longer"
    )


def notices(experiment: Experiment) -> list[str]:
    """Return a sentence on every choice of `experiment` that is allowed, but probably a mistake."""
    model, training = experiment.model, experiment.training
    unused = [*unheeded_in_data(experiment.data), *unheeded(model), *unheeded_in_training(training)]
    unused += unheeded_in_decoding(experiment.decoding)
    one_direction = len(set(map(experiment.data.languages_of, experiment.data.dev))) == 1
    if one_direction and training.checkpoint.keep_best_per_direction:
        unused.append("training.checkpoint.keep_best_per_direction")
    said = data_notices(experiment.data)
    said += [f"`{key}` is set, but has no effect beside the other choices" for key in unused]
    if training.compile == "layers" and model.combination.unit == "sublayer":
        said.append("`training.compile: layers` compiles nothing: with `combination.unit: sublayer` no layer is called")
    for side, every, layers in (
        ("encoder", training.recompute.encoder, model.encoder.layers),
        ("decoder", training.recompute.decoder, model.decoder.layers),
    ):
        if isinstance(every, int) and every > layers:
            said.append(f"`training.recompute.{side}: {every}` recomputes nothing: the {side} has {layers} layers")
    said += _halves(model)
    if training.schedule.kind == "gnmt+" and training.schedule.replicas == 1:
        said.append(
            "`training.schedule.kind: gnmt+` with `replicas: 1` has no warm-up: its rate rises from `base` to "
            "replicas * `base`, so it begins at its highest; set `replicas` to the number of batches in an update"
        )
    if training.schedule.start == "peak" and training.start_from is None:
        said.append(
            "`training.schedule.start: peak` is for a model that is trained already (`training.start_from`): initial "
            "weights begin at the highest rate, without a warm-up"
        )
    if training.freeze and training.start_from is None:
        said.append(
            "`training.freeze` without `training.start_from`: initial weights, which are random, stay as they are"
        )
    if cold := warm_up_notice(training):
        said.append(cold)
    if training.growth is not None and (cut := cut_short(training.growth, training.stop)):
        said.append(cut)
    return said

"""Hints for users of other toolkits: after "no such option", the name that the option has here.

The options are those of fairseq, OpenNMT-py and eole, Marian, Sockeye and JoeyNMT; where several toolkits share a
name, it means the same in all of them. A hint repeats the value that was typed, so that it can be pasted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ziggurat.errors import printable

__all__ = ["HINTS", "option_hint"]


def _names(*groups: tuple[str, str]) -> Mapping[str, str]:
    """Return name -> replacement from pairs of (names separated by blanks, replacement)."""
    return MappingProxyType({name: instead for names, instead in groups for name in names.split()})


_SEARCH = _names(
    ("beam beam-size beam_size b", "beam_size="),
    ("nbest n-best n_best nbest-size", "n_best="),
    ("lenpen length-penalty length-penalty-alpha normalize alpha beam-alpha", "length_penalty.alpha="),
    ("max-len-a max-length-factor", "max_length.ratio="),
    ("max-len-b", "max_length.extra="),
    ("max-len max-length max-output-length max_length", "max_length.limit="),
    ("min-len min-length min_length", "min_length="),
    ("sampling sample random-sampling", "search=sample"),
    ("temperature random-sampling-temp random_sampling_temp", "temperature="),
    ("sampling-topk random-sampling-topk random_sampling_topk topk", "top_k="),
    ("sampling-topp random-sampling-topp random_sampling_topp topp", "top_p="),
    ("no-repeat-ngram-size block-ngram-repeat block_ngram_repeat", "no_repeat_ngram_size="),
    ("diverse-beam-groups", "diverse_groups="),
    ("diverse-beam-strength", "diverse_strength="),
    ("max-tokens mini-batch-words batch-tokens", "batch_tokens="),
    ("batch-size batch_size batch-sentences mini-batch", "batch_sentences="),
    ("print-alignment report-align report_align alignment", "alignments=true"),
    ("replace-unk replace_unk", "replace_unknown=true"),
    ("fp16 bf16", "precision=bfloat16"),
    ("int8 gemm-type", "precision=int8"),
    ("seed", "seed="),
)
_MODEL = _names(
    ("gpu gpuid gpu-id cuda devices device-ids", "--device cuda"),
    ("cpu use-cpu cpu-threads", "--device cpu"),
    ("path models model m", "the folder of the run or model as the first argument"),
    ("checkpoint", "--which "),
)
_TEXT = _names(
    ("src source s", "--input "),
    ("tgt target", "--prefix "),
    ("results-path out_file", "--output "),
    ("remove-bpe post-process sentencepiece", "nothing: text comes out joined"),
)
_TRAIN = _names(
    ("lr learning-rate learning_rate initial-learning-rate l", "training.schedule.peak="),
    ("lr-scheduler learning-rate-scheduler-type decay-method lr-decay", "training.schedule.kind="),
    (
        "warmup warmup-updates warmup-steps warmup_steps lr-warmup learning-rate-warmup",
        "training.schedule.warmup_updates=",
    ),
    ("max-tokens mini-batch-words tokens-per-batch", "training.batch.max_tokens="),
    ("max-sentences batch-size batch_size mini-batch batch-sentences", "training.batch.max_sentences="),
    (
        "update-freq accum-count accum_count update-interval optimizer-delay batch-multiplier",
        "training.batch.accumulate=",
    ),
    ("max-update max-updates train-steps train_steps after-batches updates", "training.stop.updates="),
    ("max-epoch epochs after-epochs max-num-epochs", "training.stop.epochs="),
    ("patience early-stopping early-stopping-patience max-num-checkpoint-not-improved", "training.stop.patience="),
    ("optimizer optim", "training.optimiser.kind="),
    ("adam-betas optimizer-betas", "training.optimiser.betas="),
    ("adam-eps optimizer-eps", "training.optimiser.epsilon="),
    ("weight-decay", "training.optimiser.weight_decay="),
    ("clip-norm max-grad-norm gradient-clipping-threshold", "training.clip_norm="),
    ("label-smoothing label_smoothing", "training.loss.label_smoothing="),
    ("alignment-lambda lambda-align lambda_align guided-alignment-weight", "training.loss.alignment.weight="),
    ("fp16 bf16 amp precision", "training.precision=bf16"),
    ("seed", "training.seed="),
    (
        "valid-freq validate-interval-updates valid-steps valid_steps checkpoint-interval eval-interval",
        "training.validation.every_updates=",
    ),
    (
        "save-interval-updates save-freq save-checkpoint-steps save_checkpoint_steps",
        "training.checkpoint.every_updates=",
    ),
    (
        "keep-last-epochs keep-interval-updates keep-last-params keep-checkpoint keep_checkpoint",
        "training.checkpoint.keep_last=",
    ),
    ("keep-best-checkpoints", "training.checkpoint.keep_best="),
    ("log-interval disp-freq report-every report_every", "training.log_every_updates="),
    ("tensorboard-logdir tensorboard tensorboard-log-dir", "training.tensorboard=true"),
    ("restore-file finetune-from-model train-from train_from pretrained-model params", "training.start_from="),
    ("encoder-layers enc-layers enc_layers enc-depth num-encoder-layers", "model.encoder.layers="),
    ("decoder-layers dec-layers dec_layers dec-depth num-decoder-layers", "model.decoder.layers="),
    (
        "encoder-embed-dim decoder-embed-dim hidden-size hidden_size word-vec-size dim-emb transformer-model-size",
        "model.d_model=",
    ),
    ("encoder-ffn-embed-dim decoder-ffn-embed-dim transformer-ff transformer_ff transformer-dim-ffn", "model.d_ff="),
    (
        "encoder-attention-heads decoder-attention-heads heads transformer-heads transformer-attention-heads",
        "model.heads=",
    ),
    ("share-all-embeddings share_embeddings tied-embeddings-all", "model.embedding.sharing=all"),
    (
        "share-decoder-input-output-embed share_decoder_embeddings tied-embeddings",
        "model.embedding.sharing=decoder",
    ),
    ("dropout transformer-dropout", "model.dropout.residual="),
    ("attention-dropout transformer-dropout-attention", "model.dropout.attention="),
    ("activation-dropout relu-dropout transformer-dropout-ffn", "model.dropout.activation="),
    ("arch a task type", "the size as model.preset=base, or a recipe (`ziggurat recipes`) as the first argument"),
    ("save-dir save-model save_model model m output o", "--run "),
    ("gpu gpuid gpu-ranks gpu_ranks devices device-ids", "--device cuda"),
    ("cpu use-cpu cpu-threads", "--device cpu"),
    ("config", "the configuration as the first argument"),
)
_PREPARE = _names(
    ("source-lang src-lang s", "data.source_language="),
    ("target-lang tgt-lang t", "data.target_language="),
    ("destdir save-data output o out", "data.store="),
    ("trainpref train-sets source target src tgt", "data.train=[{source: FILE, target: FILE}]"),
    ("validpref valid-sets validation-source validation-target", "data.dev=[{source: FILE, target: FILE}]"),
    ("joined-dictionary share-vocab share_vocab shared-vocab", "data.subword.joint=true"),
    ("bpe-size vocab-size dim-vocabs num-words nwordssrc nwordstgt", "data.subword.vocabulary_size="),
    ("config", "the configuration as the first argument"),
)  # fmt: skip

_AVERAGE = _names(
    ("inputs models m", "the folder of the run as the first argument"),
    ("num-epoch-checkpoints num-update-checkpoints n", "--last "),
)

HINTS: Mapping[str, Mapping[str, str]] = {
    "translate": {**_SEARCH, **_MODEL, **_TEXT},
    "evaluate": {
        **_SEARCH,
        **_MODEL,
        **_names(("src s input i", "--source "), ("tgt ref r", "--reference "), ("sys hyp", "--hypothesis ")),
    },
    "score": {**_MODEL, **_names(("src s", "--source "), ("tgt t", "--target "))},
    "train": _TRAIN,
    "inspect": _TRAIN,
    "prepare": _PREPARE,
    "average": _AVERAGE,
}
"""Verb -> option of another toolkit, without hyphens -> replacement; after `=` or a blank follows a value."""


def option_hint(error: Exception, arguments: Sequence[str]) -> str:
    """Return the replacement for the unknown option that `error` is about; empty where none is known.

    `arguments` are those of the command line, for the value. Typer's errors about options have an `option_name` and
    the context of the verb.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    known = HINTS.get(context.info_name, {})
    option = _as_typed(option, known, arguments)
    instead = known.get(option.lstrip("-"))
    if instead is None:
        return ""
    if not instead.endswith(("=", " ")):
        return f"Here that is: {instead}" if not instead.startswith("the ") else f"Here, give {instead}"
    return f"Here that is: {instead}{_value(option, arguments) or 'VALUE'}"


def _as_typed(option: str, known: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return `option` in full: of OpenNMT's `-config` the parser reports only `-c`."""
    if option.startswith("--"):
        return option
    typed = (argument.partition("=")[0] for argument in arguments if argument.startswith(option))
    return next((name for name in typed if name.lstrip("-") in known), option)


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value of `option`, given as `--beam 8` or `--beam=8`; empty where there is none."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option and equals:
            return printable(value, 80)
        following = arguments[position + 1 : position + 2]
        if argument == option and following and not following[0].startswith("-"):
            return printable(following[0], 80)
    return ""

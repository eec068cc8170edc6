"""Training section: the sections about one update, then `TrainingConfig`, which holds them all.

The sections follow the order of an update: batches, loss, optimiser and learning rate, then memory and processes, which
change how an update is computed but not its result. The sections about the life of a run are in
ziggurat.config.lifecycle, and growth is in ziggurat.config.depth.

Rules between sections, and between them and the model, are in ziggurat.config.experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ziggurat.config.depth import GrowthConfig
from ziggurat.config.lifecycle import (
    CheckpointConfig,
    DiagnosticsConfig,
    DivergenceConfig,
    MlflowConfig,
    PatienceConfig,
    StopConfig,
    ValidationConfig,
    WandbConfig,
)
from ziggurat.config.section import (
    Count,
    Fraction,
    Layers,
    Minutes,
    PathText,
    Real,
    Section,
    Seed,
    Size,
    Threads,
    Width,
)
from ziggurat.system.errors import ConfigError


class GuidedAlignmentConfig(Section):
    """Guided alignment (Chen et al. 2016; Garg et al. 2019): word alignments teach one head where to look.

    Needs a store with word alignments: `data.train[].alignment`, or `data.alignment.compute: hmm`.
    """

    weight: Real = Field(default=0.05, gt=0)
    """Weight of the cross-entropy between the head's attention and the alignment, relative to the cross-entropy of the
    same target token. All source pieces linked to the token have equal shares in the alignment."""
    layer: Layers | None = Field(default=None, ge=1)
    """Decoder layer, from 1; null: the last."""
    head: Width | Literal["mean"] = Field(default=1)
    """Head of its attention to the source, from 1; `mean`: the mean over all heads."""

    @field_validator("head")
    @classmethod
    def _counted_from_one(cls, head: int | str) -> int | str:
        if isinstance(head, int) and head < 1:
            raise ValueError("heads are counted from 1")
        return head


class BatchConfig(Section):
    """Token-bucketed batches."""

    max_tokens: Size = Field(default=4096, ge=1)
    """Maximum number of tokens per batch on the longer side, with padding and end-of-sentence (as in fairseq)."""
    max_sentences: Size | None = Field(default=None, ge=1)
    """Maximum number of sentence pairs per batch."""
    length_multiple: Size = Field(default=1, ge=1)
    """Round padded lengths up to a multiple of this, so that fewer distinct shapes occur."""
    accumulate: Size = Field(default=1, ge=1)
    """Batches per update, summed over all processes (at least one for each). The loss is normalised over all batches,
    so the result of an update does not depend on the number of processes."""
    fit: bool = False
    """Before a new run, find by trial the largest `max_tokens` that fits into memory; the run's config.yaml then has
    this number and `fit: false`."""
    fit_limit: Size = Field(default=65_536, ge=256)
    """Largest `max_tokens` that `fit` tries."""
    fit_margin: float = Field(default=0.1, ge=0, lt=1)
    """Share of the measured budget that `fit` leaves unused, because allocators fragment and sampled segmentations
    vary."""


class LossConfig(Section):
    """Label-smoothed cross-entropy."""

    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Probability mass e taken from the gold token."""
    smoothing: Literal["uniform", "others"] = "uniform"
    """`uniform`: e/V on every class, gold 1-e+e/V (fairseq until 2021, and thus the papers' forks). `others`: e/(V-1)
    on the rest, gold 1-e (zero, tensor2tensor, fairseq since 2021)."""
    subtract_entropy: bool = False
    """Report the loss minus the entropy of the smoothed target, so that a perfect model scores 0 (zero)."""
    normalisation: Literal["tokens", "sentence_mean", "sentence_sum"] = "tokens"
    """`tokens`: sum / target tokens of the update (fairseq). `sentence_mean`: mean over tokens, then over
    sentences (zero). `sentence_sum`: sum over tokens, mean over sentences (lingvo's RNMT+)."""
    chunk_tokens: Size = Field(default=1024, ge=1)
    """Number of rows of logits computed at a time; the whole matrix [tokens, vocabulary] never exists."""
    r_drop: Real = Field(default=0.0, ge=0)
    """alpha of R-Drop (Liang et al. 2021): each batch passes twice with different dropout, and the two distributions of
    each token are pulled together (docs/training.md), at twice the time and memory; 0: off. The paper uses 5."""
    inter_sim: Real = Field(default=0.0, ge=0)
    """Weight, in nats per target token, of a penalty on encoder states that point away from their sentence's mean
    (named by Li et al. 2020, defined here: docs/training.md); 0: none. Try 0.1."""
    alignment: GuidedAlignmentConfig | None = None
    """Guided alignment (docs/students.md); null: none."""


class OptimiserConfig(Section):
    """An optimiser from torch.optim; the schedule sets the learning rate."""

    kind: Literal["adam", "adamw", "radam", "muon"] = "adam"
    """`muon` trains the matrices inside the layers, AdamW everything else (Jordan 2024; torch.optim.Muon). A fused
    matrix, as of queries, keys and values, is orthogonalised as one; Jordan advises to take its parts separately."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.98), strict=False)
    """Decay rates of the moments (adam, adamw, radam, and the AdamW part of muon)."""
    epsilon: Real = Field(default=1e-9, gt=0)
    """Added to the root of the second moment."""
    weight_decay: Real = Field(default=0.0, ge=0)
    """Decoupled for adamw, radam and muon; L2 for adam. Never on biases, norms or embeddings."""
    weight_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share s of the trained weights in their running mean after each update (EMA of weights, Marian's exponential
    smoothing). The mean is used for validation, saving and translation (docs/training.md); 0: off. Marian uses 1e-4."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon only: decay rate of its momentum."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: store both moments in bfloat16, in half the memory (adam, adamw, radam). Updates are computed in fp32;
    the moments are rounded stochastically, so that small changes are not lost."""
    rectified_only: bool = False
    """radam only: while the variance of the adaptive rate is intractable (the first 5 updates at beta2 0.98), apply
    weight decay but take no step, as in Liu et al.'s code (Transformer-Clinic); false: take steps by momentum alone,
    as in torch."""

    @model_validator(mode="after")
    def _moments_can_be_stored_so(self) -> Self:
        if self.moments == "bf16" and self.kind == "muon":
            raise ConfigError.of(
                "moments: bf16",
                "is for adam, adamw and radam: torch's Muon stores its one moment in the dtype of the "
                "parameters; choose another `kind` or `moments: fp32`",
            )
        if self.rectified_only and self.kind != "radam":
            raise ConfigError.of("rectified_only", f"is an option of `kind: radam`, not of `{self.kind}`")
        # RAdam rectifies where rho_t > 5, and rho_t stays below its limit 2 / (1 - beta2) - 1.
        if self.rectified_only and self.betas[1] <= 2 / 3:
            raise ValueError(f"with a second beta of {self.betas[1]} no update is ever rectified: it must exceed 2/3")
        return self


class ScheduleConfig(Section):
    """Learning rate as a function of the update t = 1, 2, ... (docs/training.md)."""

    kind: Literal["isqrt", "noam", "linear", "cosine", "wsd", "constant", "gnmt+"] = "isqrt"
    """`isqrt`: linear warm-up to `peak`, then peak * sqrt(warmup/t). `noam`: factor * d_model^-0.5 *
    min(t^-0.5, t * warmup^-1.5). `linear`, `cosine`: warm-up, then down to `floor` at `decay_updates`. `wsd`: the
    same, but at `peak` until the last `decay_share` of the updates (warm-up, stable, decay: Hu et al. 2024). `gnmt+`:
    warm-up from `base` to replicas * base, then exponential decay to base / 2 (RNMT+, Chen et al. 2018)."""
    peak: Real = Field(default=1e-3, gt=0)
    """Highest rate (all but noam and gnmt+)."""
    factor: Real = Field(default=1.0, gt=0)
    """noam's constant."""
    warmup_updates: Count = Field(default=4000, ge=0)
    """Length of the linear warm-up (gnmt+: times `replicas`)."""
    start: Literal["warm_up", "peak"] = "warm_up"
    """Point at which a new run enters the schedule. `peak`: at the end of the warm-up, as after growth
    (`growth.restart_rate`), for a model that is already trained (`training.start_from`)."""
    initial: Real = Field(default=1e-7, ge=0)
    """Rate at update 0 of the warm-up (all but noam and gnmt+)."""
    floor: Real = Field(default=1e-9, ge=0)
    """Lowest rate after the warm-up (isqrt, linear, cosine, wsd)."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """`wsd`: share of the updates, up to the end of the decay, over which the rate falls."""
    decay_updates: Count | None = Field(default=None, ge=1)
    """Update of the run at which `linear`, `cosine` and `wsd` reach `floor`, regardless of growth and roll-backs;
    default: `training.stop.updates`."""
    base: Real = Field(default=1e-4, gt=0)
    """gnmt+: rate for the batch of one replica."""
    replicas: Size = Field(default=1, ge=1)
    """gnmt+: number of replicas, whose batches make up one update."""
    decay_start: Count = Field(default=400_000, ge=1)
    """gnmt+: number of batches, over all replicas, after which the decay starts: update decay_start / replicas."""
    decay_end: Count = Field(default=1_200_000, ge=1)
    """gnmt+: the same for the end of the decay."""

    @property
    def rate_key(self) -> str:
        """Key of this section that sets the highest rate or scales all rates."""
        return {"noam": "factor", "gnmt+": "base"}.get(self.kind, "peak")

    @property
    def warmup_end(self) -> int:
        """Update at which the warm-up ends."""
        return self.warmup_updates * (self.replicas if self.kind == "gnmt+" else 1)

    @model_validator(mode="after")
    def _phases_in_order(self) -> Self:
        if self.kind in ("isqrt", "noam", "gnmt+") and self.warmup_updates < 1:
            raise ConfigError.of(f"kind: {self.kind}", "needs `warmup_updates` of at least 1")
        if self.kind != "gnmt+":
            return self
        warm = self.warmup_end
        if self.decay_start < self.replicas * warm:
            raise ConfigError.of(
                f"decay_start: {self.decay_start}",
                f"means update {self.decay_start / self.replicas:g}, but the warm-up "
                f"lasts until update {warm}: raise it to at least {self.replicas * warm}, or lower `warmup_updates`",
            )
        if self.decay_end <= self.decay_start:
            raise ConfigError.of(
                "decay_end", f"({self.decay_end}) must be larger than `decay_start` ({self.decay_start})"
            )
        return self


Recompute = Annotated[Layers, Field(ge=1)] | Literal["segments"] | None


class RecomputeConfig(Section):
    """Activation checkpointing: less memory for at most one more forward pass; gradients are the same bit for bit."""

    encoder: Recompute = None
    """Recomputation in the encoder. null keeps all activations. k keeps only the input of every k-th layer and
    recomputes the rest of that layer in the backward pass; 1 does so in all layers. `segments` does so for runs of
    about sqrt(layers) / 4 layers, so that memory grows with the square root of depth (Chen et al. 2016)."""
    decoder: Recompute = None
    """The same for the decoder."""
    compact: bool = False
    """Return freed memory to the system at once (CPU, glibc). Resident memory is then what the tensors need; otherwise
    recomputed layers leave up to three times as much. An update takes up to 50 % longer."""


class DistributedConfig(Section):
    """Training in several processes, started by torchrun (docs/scaling.md); without it nothing here has an effect."""

    kind: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: every process has the whole model (data parallelism). `fsdp`: weights, gradients and moments are split
    into one part per process (FSDP2, torch's fully_shard)."""
    bucket_mib: Size = Field(default=25, ge=1)
    """ddp: gradients are summed over the processes in buckets of this size, during the backward pass."""
    timeout_minutes: Minutes = Field(default=30.0, gt=0)
    """Time after which a process that the others wait for counts as dead: all stop and report it."""


LoraMap = Literal["query", "key", "value", "output", "feed_forward", "gate"]


class LoraConfig(Section):
    """Low-rank adaptation (LoRA, Hu et al. 2021) of the `start_from` model, all of whose weights stay unchanged.

    Chosen linear maps W of the layers become W + alpha / rank * B A, and only A [rank, in] and B [out, rank] are
    trained. B is 0 at first, so training starts from the unchanged model (docs/fine-tuning.md).
    """

    rank: Width = Field(default=8, ge=1)
    """Rank of the updates."""
    alpha: Real = Field(default=16.0, gt=0)
    """Updates are multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the updates."""
    maps: list[LoraMap] = Field(default=["query", "value"], min_length=1, max_length=6)
    """Maps with updates, in all layers: `query`, `key`, `value` and `output` of attention, both maps of every
    `feed_forward` network, and the `gate` of average attention and SSRU. RNMT+ has only `query` and `key`."""

    @model_validator(mode="after")
    def _each_map_once(self) -> Self:
        if len(set(self.maps)) < len(self.maps):
            raise ConfigError.of(f"maps: [{', '.join(self.maps)}]", "names one twice")
        return self


class TrainingConfig(Section):
    """Training of the model."""

    seed: Seed = Field(default=1, ge=0)
    """Random seed for initial weights, data order and dropout."""
    device: str = "auto"
    """`auto` uses a GPU if there is one; otherwise `cpu`, `cuda`, `cuda:1`, `xpu`."""
    threads: Threads | None = Field(default=None, ge=1)
    """CPU threads; default: torch's choice."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """`bf16`: matrix products in bfloat16 by autocast, master weights in fp32. `auto`: the faster of the two on this
    machine (on a CPU measured with one product each), chosen before a new run and written to its config.yaml."""
    quantise: Literal["int8"] | None = None
    """`int8`: products use rows rounded to bytes, as int8 translation computes them (`decoding.precision: int8`,
    `export --quantization int8`), with the gradients of the unrounded numbers; weights stay in fp32. It is for
    fine-tuning a model (`start_from`) that will be used in int8 (docs/students.md). null: none."""
    compile: Literal["none", "layers"] = "none"
    """`layers`: torch.compile each layer; all layers of a stack share one compiled graph, whatever their number."""
    cuda_graphs: Count = Field(default=0, ge=0)
    """Largest number of batch shapes for which the passes through the model are recorded as CUDA graphs, when a shape
    occurs for the second time, and then replayed (docs/training.md). This helps deep models and small batches, whose
    kernels take less time than their launches. `batch.length_multiple` reduces the number of shapes. 0: off."""
    tf32: bool = False
    """Allow TF32 matrix products (NVIDIA Ampere and later)."""
    batch: BatchConfig = BatchConfig()
    """Batches."""
    distributed: DistributedConfig = DistributedConfig()
    """Training in several processes."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Activation checkpointing."""
    loss: LossConfig = LossConfig()
    """Loss."""
    optimiser: OptimiserConfig = OptimiserConfig()
    """Optimiser."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate."""
    clip_norm: Real | None = Field(default=None, gt=0)
    """Clip the global gradient norm to this; null: no clipping."""
    adaptive_clip: bool = False
    """Skip updates whose gradient norm is 4 standard deviations above its running mean, on a logarithmic scale, or
    above 100,000 (RNMT+, Chen et al. 2018)."""
    exact_dropout: bool = False
    """Draw dropout masks with probability exactly p; false: with p rounded to 1/256 (CPU, much faster), and rescale
    by the rounded p."""
    validation: ValidationConfig = ValidationConfig()
    """Validation."""
    stop: StopConfig = StopConfig()
    """End of training."""
    patience: PatienceConfig = PatienceConfig()
    """Limits on failed updates."""
    divergence: DivergenceConfig = DivergenceConfig()
    """Detection of divergence, and the reaction to it."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    growth: GrowthConfig | None = None
    """Shallow-to-deep training; null: full depth from the start."""
    start_from: PathText | None = None
    """Run or model directory whose weights training starts from; architecture and vocabularies must be the same
    (`ziggurat grow` deepens a model). Schedule, moments and data order start afresh."""
    lora: LoraConfig | None = None
    """Train only low-rank updates of the `start_from` model; `training.lora.rank=8` is enough to turn it on. null: all
    weights are trained."""
    freeze: list[str] = Field(default_factory=list, max_length=64)
    """Parts of the model that are not trained: `source_embedding`, `target_embedding`, `encoder`, `decoder`, `output`,
    or layers as in `encoder.1-6` and `decoder.3`, counted from 1. They have no gradients, no moments and no weight
    decay, and their weights stay the same bit for bit (docs/fine-tuning.md)."""
    log_every_updates: Count = Field(default=50, ge=1)
    """Updates between progress records."""
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    """Depth measurements during training."""
    tensorboard: bool = True
    """Write TensorBoard events to the run."""
    wandb: WandbConfig | None = None
    """Reporting to Weights & Biases; null: off. `training.wandb.project=NAME` is enough to turn it on."""
    mlflow: MlflowConfig | None = None
    """Reporting to MLflow; null: off. `training.mlflow.experiment=NAME` is enough to turn it on."""

    # Before validation: pydantic would reject the old key as unknown.
    @model_validator(mode="before")
    @classmethod
    def _patience_has_moved(cls, given: Any) -> Any:
        """Accept the configuration of older runs, where `patience.non_finite` was called `stop.non_finite`."""
        stop = given.get("stop") if isinstance(given, Mapping) else None
        if not isinstance(stop, Mapping) or "non_finite" not in stop:
            return given
        patience = given.get("patience", {})
        if not isinstance(patience, Mapping) or "non_finite" in patience:
            raise ConfigError.of("stop.non_finite", "is now called `patience.non_finite`; remove the old key")
        moved = {**patience, "non_finite": stop["non_finite"]}
        return {**given, "stop": {k: v for k, v in stop.items() if k != "non_finite"}, "patience": moved}

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if self.schedule.kind in ("linear", "cosine", "wsd") and not (self.schedule.decay_updates or self.stop.updates):
            raise ConfigError.of(
                f"schedule.kind: {self.schedule.kind}", "needs `schedule.decay_updates` or `stop.updates`"
            )
        return self

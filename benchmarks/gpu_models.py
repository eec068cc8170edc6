"""Models and data of benchmarks.gpu_speed: ours, a plain loop, batches with realistic lengths, and their operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ziggurat.config.model import ModelConfig
from ziggurat.config.train import LossConfig, OptimiserConfig, RecomputeConfig
from ziggurat.data.batching import make_batches
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.model.attention.multihead import CrossAttention, SelfAttention
from ziggurat.model.build import build_model, compile_layers, parameter_roles, set_recompute
from ziggurat.model.embedding import sinusoids
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.cuda_graphs import GraphedPasses
from ziggurat.train.objective import autocast
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

MODELS: dict[str, dict[str, Any]] = {
    "base 6-6": {"encoder": {"layers": 6}, "decoder": {"layers": 6}},
    "30-6": {"residual": "pre", "encoder": {"layers": 30}, "decoder": {"layers": 6}},
    "60-12": {"residual": "pre", "encoder": {"layers": 60}, "decoder": {"layers": 12}},
    "MAtt 12-12": {"encoder": {"layers": 12}, "decoder": {"layers": 12, "attention": "merged"}},
    "RNMT+ 6": {
        "family": "rnmt",
        "encoder": {"layers": 6},
        "decoder": {"layers": 8},
        "embedding": {"positions": "none", "sharing": "none"},
    },
}
MULTIPLE = 8
"""MULTIPLE is the number to whose multiples lengths are padded; this keeps shapes few and suits tensor cores."""
SPECIAL = SpecialIds(0, 3, 0, 2, 3)
KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""KERNELS are the plain loop's attention kernels; ours avoids cuDNN's (ziggurat.model.directory)."""


def config_of(name: str, width: int, heads: int, **choices: Any) -> ModelConfig:
    """Return the architecture of that name, with `choices` applied on top."""
    sizes = {"d_model": width, "d_ff": 4 * width, "heads": 4 if name.startswith("RNMT") else heads}
    return ModelConfig.model_validate({**sizes, **MODELS[name], **choices})


def random_batch(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 1) -> Batch:
    """Return random sentence pairs with these source and target lengths, not counting end-of-sentence."""
    generator = np.random.default_rng(seed)
    source, target = (
        [generator.integers(4, vocabulary, n, dtype=np.int32) for n in side] for side in zip(*lengths, strict=True)
    )
    return collate(source, target, np.arange(len(lengths)), SPECIAL, MULTIPLE)


def batches_of(tokens: int, vocabulary: int, count: int, longest: int) -> list[Batch]:
    """Return `count` training batches of a corpus with log-normal lengths, roughly like news text.

    The median sentence has 23 source pieces, one in twenty more than 62; a target has 0.7 to 1.4 times as many. None
    is longer than `longest`.
    """
    generator = np.random.default_rng(1)
    pairs = max(20_000, 2 * count * tokens // 28)
    source = np.exp(generator.normal(3.14, 0.6, pairs))
    target = source * np.exp(generator.normal(0.0, 0.18, pairs))
    sides = [np.clip(np.rint(side), 1, longest).astype(np.int32) for side in (source, target)]
    plan = make_batches(np.arange(pairs), *sides, max_tokens=tokens, length_multiple=MULTIPLE, seed=1, epoch=0)
    chosen = [list(zip(sides[0][i].tolist(), sides[1][i].tolist(), strict=True)) for i in plan[:count]]
    return [random_batch(lengths, vocabulary, seed) for seed, lengths in enumerate(chosen)]


def operations(model: Seq2Seq, batch: Batch) -> float:
    """Return the operations that an update on `batch` needs without padding: 6 per weight and token, plus attention.

    Every encoder matrix is applied to the source tokens, and every decoder matrix to the target tokens, except those
    that project the memory. Attention takes 12 d operations per query and key, counted in full although the masked half
    is skipped.
    """
    source, target = (mask.sum(1).double() for mask in (batch.source_mask, batch.target_mask))
    weights = {"source": 0, "target": model.output.weight.numel()}
    for stack, side in ((model.encoder, "source"), (model.decoder, "target")):
        for name, p in stack.named_parameters():
            of_memory = name.endswith((".kv_proj.weight", ".k_proj.weight"))
            weights["source" if of_memory else side] += p.numel() if p.dim() == 2 else 0
    total = 6.0 * (weights["source"] * float(source.sum()) + weights["target"] * float(target.sum()))
    for stack, own in ((model.encoder, source), (model.decoder, target)):
        for module in stack.modules():
            if isinstance(module, SelfAttention):
                total += 12.0 * module.out_proj.weight.shape[0] * float((own * own).sum())
            elif isinstance(module, CrossAttention):
                total += 12.0 * module.q_proj.weight.shape[0] * float((source * target).sum())
    return total


class Ours:
    """Training of one model in bf16, as `ziggurat train` does it.

    Args:
        config: architecture.
        vocabulary: joint, of both sides.
        device: where.
        variant: "eager", "compiled" layers, CUDA "graphs", or "recompute".
    """

    def __init__(self, config: ModelConfig, vocabulary: int, device: torch.device, variant: str = "eager") -> None:
        self.model = build_model(config, vocabulary, vocabulary).to(device)
        if variant == "recompute":
            set_recompute(self.model, RecomputeConfig(encoder=1, decoder=1))
        if variant == "compiled":
            compile_layers(self.model)
        graphs = variant == "graphs"
        self._passes: AbstractContextManager[None] = GraphedPasses(self.model, 64) if graphs else nullcontext()
        self._parallel = Parallel(self.model, LossConfig(), "bf16")
        self._optimiser = Optimiser(self.model, parameter_roles(self.model), OptimiserConfig())
        self._device = device

    def update(self, batch: Batch) -> float:
        """Take one update; return its loss."""
        with self._passes:
            return train_update(self._parallel, [batch], self._optimiser, rate=1e-4, clip_norm=1.0).loss


class Plain(nn.Module):
    """torch.nn.Transformer, one embedding for both sides and the output, in the loop of torch's tutorials.

    Dropout is in the same places as ours, on embeddings and sub-layers' outputs.

    Args:
        config: its widths and depths; kinds are torch's (post-norm, or pre-norm for `residual: pre`).
        vocabulary: joint, of both sides.
        device: where.
        longest: sentence.
    """

    positions: Tensor

    def __init__(self, config: ModelConfig, vocabulary: int, device: torch.device, longest: int) -> None:
        super().__init__()
        d, p = config.d_model, config.dropout.residual
        self.tokens = nn.Embedding(vocabulary, d)
        nn.init.normal_(self.tokens.weight, std=d**-0.5)
        self.register_buffer("positions", sinusoids(longest + 2 * MULTIPLE, d).float(), persistent=False)
        layers = config.encoder.layers, config.decoder.layers
        self.layers = nn.Transformer(
            d, config.heads, *layers, config.d_ff, p, batch_first=True, norm_first=config.residual == "pre"
        )
        for module in self.layers.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0
        self.dropout = nn.Dropout(p)
        self.to(device)
        self._device = device
        self._optimiser = torch.optim.Adam(self.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed `ids` [batch, length]."""
        x = self.tokens(ids) * self.tokens.embedding_dim**0.5 + self.positions[: ids.shape[1]]
        embedded: Tensor = self.dropout(x)
        return embedded

    def update(self, batch: Batch) -> Tensor:
        """Take one update; return its loss, without waiting for it."""
        self.train()
        b = batch.to(self._device, non_blocking=True)
        future = nn.Transformer.generate_square_subsequent_mask(b.target_in.shape[1], device=self._device).isinf()
        with autocast(self._device, "bf16"), sdpa_kernel(KERNELS):
            hidden = self.layers(
                self(b.source),
                self(b.target_in),
                tgt_mask=future,
                src_key_padding_mask=~b.source_mask,
                memory_key_padding_mask=~b.source_mask,
                tgt_is_causal=True,
            )
            logits = F.linear(hidden, self.tokens.weight)
            gold = b.target_out.masked_fill(~b.target_mask, -100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), gold.flatten(), label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return loss.detach()

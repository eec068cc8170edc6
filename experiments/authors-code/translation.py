"""ScaleNorm with FixNorm, R-Drop and the Lipschitz initialisation, compared with their authors' translation code."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checkouts import Checkouts, as_precise_as
from comparing import BATCH, LENGTH, Case, Pair, config_of, differences, drawn, encoded, matching, model_of, rows
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.config.model import InitConfig
from ziggurat.config.train import LossConfig
from ziggurat.model.init import ModelDepth, lipschitz
from ziggurat.model.roles import Role, Slot
from ziggurat.train.loss import Labels, r_drop_loss, sequence_loss

TEARS, DROP, LIPSCHITZ = "transformers_without_tears", "R-Drop", "transformer"
LOSS = "fairseq_src/examples/translation_rdrop/translation_rdrop_src/loss/reg_label_smooth_cross_entropy.py"
D, HEADS, LAYERS, V = 32, 4, 6, 29


def scale_norm(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the encoders: pre-norm and post-norm where our epsilon is negligible, and pre-norm with the usual one."""
    code = checkouts.file(f"{TEARS}/layers.py")
    for name, residual, epsilon in (
        ("scale-norm-pre", "pre", 1e-30),
        ("scale-norm-post", "post", 1e-30),
        ("scale-norm-pre-published", "pre", 1e-5),
    ):
        options: Any = {"d_model": D, "d_ff": 2 * D, "heads": HEADS, "residual": residual, "norm": "scale"}
        ours = model_of(config_of(LAYERS, **options, layer_norm_epsilon=epsilon), dtype).encoder
        their_options = {
            "embed_dim": D,
            "ff_dim": 2 * D,
            "num_heads": HEADS,
            "num_enc_layers": LAYERS,
            "use_bias": True,
        }
        off = {"dropout": 0.0, "att_dropout": 0.0, "ff_dropout": 0.0}
        theirs = code.Encoder(SimpleNamespace(**their_options, **off, scnorm=True, pre_act=residual == "pre"))
        theirs = theirs.to(dtype).eval()
        what = f"`norm: scale`, `{residual}`" + ("" if epsilon < 1e-20 else ", epsilon 1e-5")
        yield Case(
            name,
            what,
            TEARS,
            "layers.py",
            ours,
            theirs,
            list(_encoder_pairs(ours, theirs)),
            lambda x, ours=ours: encoded(ours, x, causal=False),  # type: ignore[misc]
            lambda x, theirs=theirs: theirs(x, None),  # type: ignore[misc]
            D,
        )


def _encoder_pairs(ours: nn.Module, theirs: Any) -> Iterator[Pair]:
    norm = "in_norm" if theirs.pre_act else "out_norm"
    for n, layer in enumerate(ours.layers):  # type: ignore[arg-type]
        att, ffn = theirs.atts[n], theirs.ffs[n]
        for kind, weights in (("weight", att.weights), ("bias", att.biases)):
            yield Pair(getattr(layer.self_attn.qkv_proj, kind), weights, their_part=rows(0, 3 * D))
            yield Pair(getattr(layer.self_attn.out_proj, kind), weights, their_part=rows(3 * D, 4 * D))
        yield from matching(layer.ffn.in_proj, ffn.in_proj)
        yield from matching(layer.ffn.out_proj, ffn.out_proj)
        for number, part in enumerate((layer.self_attn_residual, layer.ffn_residual)):
            yield _length(getattr(part, norm), theirs.scales[2 * n + number])
    if theirs.pre_act:
        yield _length(ours.final_norm, theirs.scales[-1])


def _length(ours: Any, theirs: Any) -> Pair:
    return Pair(ours.length, theirs.scale, our_part=lambda values: values.view(()))


def others(checkouts: Checkouts, seed: int) -> dict[str, Any]:
    """Return the largest differences of methods that are not stacks: FixNorm's rows, R-Drop's loss, Lipschitz
    bounds.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        "r_drop": _r_drop(_criterion(checkouts), generator),
        "fix_norm": _fix_norm(checkouts, generator),
        "lipschitz": _lipschitz(checkouts),
    }


def _criterion(checkouts: Checkouts) -> Any:
    """Return their criterion without the rest of fairseq."""
    names = ("fairseq", "fairseq.metrics", "fairseq.utils", "fairseq.criterions")
    fairseq = {name: ModuleType(name) for name in names}
    fairseq["fairseq"].metrics = fairseq["fairseq"].utils = None  # type: ignore[attr-defined]
    fairseq["fairseq.criterions"].FairseqCriterion = nn.Module  # type: ignore[attr-defined]
    fairseq["fairseq.criterions"].register_criterion = lambda name: lambda found: found  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, fairseq):
        return checkouts.file(f"{DROP}/{LOSS}")


def _r_drop(code: Any, generator: torch.Generator) -> dict[str, float]:
    """Compare their `compute_kl_loss` and label-smoothed loss of two passes, and the gradients, with ours doubled."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        hidden, weight = drawn((2 * BATCH, LENGTH, D), generator, dtype), drawn((V, D), generator, dtype)
        target = torch.randint(4, V, (BATCH, LENGTH), generator=generator)
        mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [2]])
        mine, other = ([x.clone().requires_grad_() for x in (hidden, weight)] for _ in range(2))
        config = LossConfig(label_smoothing=0.1, r_drop=5.0)
        size: dict[str, Any] = {"tokens": 1, "sentences": 1}
        twice = Labels(torch.cat([target, target]), torch.cat([mask, mask]), 2 * int(mask.sum()))
        labels = Labels(target, mask, int(mask.sum()))
        loss = sequence_loss(*mine, twice, config, tokens=2, sentences=2).objective
        loss = 2 * (loss + r_drop_loss(*mine, labels, config, **size))
        net = SimpleNamespace(
            get_normalized_probs=lambda logits, log_probs: logits.log_softmax(-1) if log_probs else logits.softmax(-1)
        )
        padded = torch.where(mask, target, 1)
        logits = F.linear(*other)
        theirs, _ = code.label_smoothed_nll_loss(
            logits.log_softmax(-1).flatten(0, 1), torch.cat([padded, padded]).view(-1, 1), 0.1, ignore_index=1
        )
        criterion = code.RegLabelSmoothedCrossEntropyCriterion
        theirs = theirs + 5.0 * criterion.compute_kl_loss(None, net, logits, padded.unsqueeze(-1).eq(1))
        loss.backward()
        theirs.backward()
        name = str(dtype).removeprefix("torch.float")
        found[f"loss_relative_fp{name}"] = differences([(loss.detach(), theirs.detach())])[1]
        found[f"gradients_relative_fp{name}"] = differences(
            [(_grad(a), _grad(b)) for a, b in zip(mine, other, strict=True)]
        )[1]
    return found


def _grad(values: Tensor) -> Tensor:
    assert values.grad is not None
    return values.grad


def _fix_norm(checkouts: Checkouts, generator: torch.Generator) -> dict[str, float]:
    """Input embeddings and output logits, compared with their `get_input` and `logit_fn`."""
    folder, dtype = str(checkouts.folder / TEARS), torch.float64
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        code = checkouts.file(f"{TEARS}/model.py")
    table, hidden = drawn((V, D), generator, dtype), drawn((BATCH, LENGTH, D), generator, dtype)
    ids = torch.randint(V, (BATCH, LENGTH), generator=generator)
    model = model_of(config_of(1, d_model=D, heads=HEADS, embedding={"unit_length": True, "positions": "none"}), dtype)
    embedding = torch.func.functional_call(model.source_embedding.tokens, {"weight": table}, (ids,))
    embedding = embedding * model.source_embedding.scale
    matrix = torch.func.functional_call(model.output, {"weight": table}, (hidden,))
    unit = F.normalize(table, dim=-1)  # as at the start of their `forward`
    nothing = {"lang_embedding": torch.zeros(1, D, dtype=dtype), "scale": D**0.5, "out_bias": None, "training": False}
    theirs = SimpleNamespace(**nothing, args=SimpleNamespace(word_dropout=0.0))
    theirs.replace_with_unk = lambda toks: None
    shown = torch.ones(V, dtype=torch.bool)
    read = code.Transformer.get_input(theirs, ids, 0, unit, torch.zeros(LENGTH, D, dtype=dtype))
    with as_precise_as(dtype):
        logits = code.Transformer.logit_fn(theirs, hidden, unit, shown)
    return {
        "embeddings_relative": differences([(embedding, read)])[1],
        "logits_relative": differences([(matrix.flatten(0, 1), logits)])[1],
    }


def _lipschitz(checkouts: Checkouts) -> dict[str, float]:
    """The bounds of their initialiser and ours for linear maps, embeddings and a projection."""
    names = {"utils.torch.comp": {"torch_no_grad": torch.no_grad}}
    names["cnfg.hyp"] = {"lipschitz_initialization": True, "lipschitz_scale": 1.0}  # type: ignore[dict-item]
    modules = {name: ModuleType(name) for name in ("utils", "utils.torch", "cnfg", *names)}
    for name, values in names.items():
        vars(modules[name]).update(values)
    with mock.patch.dict(sys.modules, modules):
        code = checkouts.file(f"{LIPSCHITZ}/utils/init/base.py")
    parts: dict[str, tuple[nn.Module, Role]] = {
        "linear": (nn.Linear(D, 3 * D), Role.FFN_IN),
        "embedding": (nn.Embedding(V, D), Role.EMBEDDING),
        "projection": (nn.Linear(D, V), Role.OUTPUT),
    }
    return {name: _bound_difference(code.init_model_params, *part) for name, part in parts.items()}


def _bound_difference(initialise: Callable[[nn.Module], object], module: nn.Module, role: Role) -> float:
    asked: list[float] = []
    with mock.patch.object(Tensor, "uniform_", lambda values, low, high: asked.append(high) or values):
        initialise(nn.Sequential(module))
    weight: Any = module.weight
    ours = lipschitz(Slot(weight, role, "w", layer=1), InitConfig(kind="lipschitz"), ModelDepth(6, 6)).size
    return 0.0 if math.isclose(ours, asked[-1], rel_tol=1e-15) else abs(ours - asked[-1]) / asked[-1]

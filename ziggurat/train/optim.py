"""torch's optimisers, with weight decay by parameter role and a state saved by parameter name.

Adam, AdamW and RAdam can keep moments in bf16, rounded stochastically so that their expectation is exact.

Rounded to nearest, a second moment at beta2 0.999 would never fall: the change of an update is smaller than half the
distance between two bf16 numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor, nn

from ziggurat.config.train import OptimiserConfig
from ziggurat.model.rate_transfer import RateScale
from ziggurat.model.roles import Role
from ziggurat.model.tensors import local, part_begins, placed_as
from ziggurat.system.errors import CheckpointError

_CHUNK = 1 << 18
"""_CHUNK is the number of values whose moments are in fp32 at a time: 1 MiB per moment, which fits into a core's
cache."""
_MEAN, _TRAINED = "mean", "trained"
"""The names of a weight's running mean in an optimiser's state, and of the weight itself in a saved one."""
_LOW = 0xFFFF
"""The low bits of an fp32 number, which bf16 lacks."""


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `x` as bf16, rounded to one of its two neighbours so that the expectation is x.

    `noise` has the shape of `x`, int32, uniform in 0, ..., 65535. Added to the bits of x, it carries into the bits that
    bf16 keeps with a probability equal to the fraction below them, and into the exponent where necessary. Numbers that
    bf16 represents exactly, including 0 and infinity, are unchanged.
    """
    return (x.view(torch.int32) + noise).bitwise_and_(~_LOW).view(torch.float32).to(torch.bfloat16)


class _Rule(NamedTuple):
    """One step of a parameter p with gradient g and moments m, v: p -= size * m / (root * sqrt(v) + epsilon).

    Attributes:
        shrink: factor of p before the step (decoupled weight decay).
        decay: factor of p that is added to g (L2 regularisation).
        size: see above.
        root: see above; None: p -= size * m, the unrectified step of RAdam.
        epsilon: see above.
    """

    shrink: float
    decay: float
    size: float
    root: float | None
    epsilon: float


class NarrowAdam(torch.optim.Optimizer):
    """torch.optim's Adam, AdamW and RAdam (decoupled decay), except for the precision in which moments are kept.

    A step is computed in fp32, or in the parameter's dtype if that is wider; moments are rounded only when they are
    stored. Random bits are a function of (seed, parameter's name, its step, offset in it): the same after resuming, in
    every process that holds the parameter, and in one that holds a part of it, which also draws those of earlier
    offsets. torch's global generators are not used. Apart from the moments, nothing larger than a chunk of a parameter
    is allocated.
    """

    def __init__(
        self, groups: list[dict[str, Any]], names: Mapping[Tensor, str], config: OptimiserConfig, seed: int
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": config.betas, "weight_decay": 0.0, "eps": config.epsilon})
        self.names = names
        self.kind = config.kind
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # torch's names, so that checkpoints are the same for fp32 and bf16.
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        # Reseeded for each parameter and step, so that resuming needs no generator state.
        generator = torch.Generator(parameter.device).manual_seed(self._seed(parameter, step))
        rule = self._rule(step, group["lr"], group["weight_decay"], group["eps"])
        assert parameter.grad is not None
        flat = (
            local(parameter).view(-1),
            local(parameter.grad).reshape(-1),
            local(state["exp_avg"]).view(-1),
            local(state["exp_avg_sq"]).view(-1),
        )
        # Processes the whole parameter in chunks, in memory order: the generator's numbers belong to offsets, so those
        # of chunks before this process's part are drawn and discarded.
        begin = part_begins(parameter)
        end = begin + flat[0].numel()
        for first in range(0, end if end > begin else 0, _CHUNK):
            noise = _noise(min(_CHUNK, parameter.numel() - first), generator)
            here = slice(max(first, begin) - begin, min(first + _CHUNK, end) - begin)
            if here.start < here.stop:
                at = begin + here.start - first
                p, g, m, v = (values[here] for values in flat)
                self._update_chunk(p, g, m, v, rule, noise[at : at + here.stop - here.start])

    def _update_chunk(
        self, p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rule: _Rule, noise: Tensor
    ) -> None:
        """Update the values `p` [n] and store their moments, rounded by `noise` [n]; all tensors are views."""
        beta1, beta2 = self.defaults["betas"]
        dtype = torch.promote_types(p.dtype, torch.float32)
        g, m, v = gradient.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype)
        # Adam's decay goes through the moments; the decay of AdamW and RAdam shrinks the parameter directly.
        if rule.decay:
            g = g.add(p, alpha=rule.decay)
        if rule.shrink != 1:
            p.mul_(rule.shrink)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if rule.root is None:
            p.add_(m, alpha=-rule.size)
        else:
            p.addcdiv_(m, v.sqrt().mul_(rule.root).add_(rule.epsilon), value=-rule.size)
        exp_avg.copy_(rounded(m.float(), noise & _LOW))
        exp_avg_sq.copy_(rounded(v.float(), (noise >> 16) & _LOW))

    def _rule(self, t: int, rate: float, decay: float, epsilon: float) -> _Rule:
        """Return step t = 1, 2, ...: Kingma and Ba 2015, algorithm 1; for radam, Liu et al. 2020a, algorithm 2."""
        beta1, beta2 = self.defaults["betas"]
        shrink, decay = (1.0, decay) if self.kind == "adam" else (1 - rate * decay, 0.0)
        mean, root = rate / (1 - beta1**t), math.sqrt(1 - beta2**t)
        if self.kind != "radam":
            return _Rule(shrink, decay, mean, 1 / root, epsilon)
        longest = 2 / (1 - beta2) - 1
        rho = longest - 2 * t * beta2**t / (1 - beta2**t)
        if rho <= 5:  # as in torch and the authors' code; the paper has 4
            return _Rule(shrink, decay, mean, None, epsilon)
        rectified = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
        return _Rule(shrink, decay, mean * rectified * root, 1.0, epsilon)

    def _seed(self, parameter: Tensor, step: int) -> int:
        key = f"{self.seed}/{self.names[parameter]}/{step}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _noise(count: int, generator: torch.Generator) -> Tensor:
    """Return 32 random bits for each of `count` values, int32: 16 for each moment."""
    draws = torch.empty((count + 1) // 2, dtype=torch.int64, device=generator.device)
    draws.random_(torch.iinfo(torch.int64).min, None, generator=generator)  # all 64 bits of a draw serve two values
    return draws.view(torch.int32)[:count]


# Weight decay acts on matrices inside the layers. Roles without decay: vectors, wiring, and vocabulary matrices.
_UNDECAYED = frozenset(
    {
        Role.BIAS,
        Role.INPUT_BIAS,
        Role.NORM_GAIN,
        Role.NORM_BIAS,
        Role.WIRING,
        Role.STREAM_MAP,
        Role.EMBEDDING,
        Role.POSITION,
        Role.RELATIVE,
        Role.OUTPUT,
    }
)


class Optimiser:
    """One or two torch optimisers that together own every trained parameter of the model exactly once.

    Parameters that require no gradient (a fixed omega, fixed combination weights) belong to neither.

    With `weight_smoothing` s it also keeps a running mean m of each parameter p: after a step in update t, m becomes m
    + max(s, 1 - (t + 1) / (t + 10)) (p - m), as in Marian except for scaling by batch size; m starts as p after the
    first step. A checkpoint has m as the weights, and p with the moments.

    Attributes:
        update: t of the next step.

    `roles` are keyed by the names of the model's parameters, which are also used in the saved state. `scales` are
    factors of rate, epsilon and decay by name, used if a rate is transferred from a smaller model (not for muon).
    `seed` determines the rounding of bf16 moments.
    """

    def __init__(
        self,
        model: nn.Module,
        roles: Mapping[str, Role],
        config: OptimiserConfig,
        *,
        scales: Mapping[str, RateScale] | None = None,
        seed: int = 1,
    ) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in trained}
        # Matrices first; the order of groups only decides in which order fused steps go through memory.
        groups: dict[tuple[bool, RateScale], list[nn.Parameter]] = {(True, RateScale()): [], (False, RateScale()): []}
        for name, parameter in trained:
            decays = roles[name] not in _UNDECAYED
            groups.setdefault((decays, scales[name] if scales else RateScale()), []).append(parameter)
        self.parts = _optimisers(groups, self.names, config, seed)
        self.update = 0
        self._smoothing = config.weight_smoothing
        self._rectified_only = config.rectified_only
        self.unrectified = config.rectified_only  # until the first rectified step

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that is trained."""
        return [parameter for _, _, parameter in self._owned()]

    def _owned(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor]]:
        """Yield (optimiser, group, parameter) for every trained parameter."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    yield part, group, parameter

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of all groups."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * group.get("rate_scale", 1.0)

    def step(self) -> None:
        """Apply the gradients; with `rectified_only`, RAdam's unrectified steps only decay and advance the moments."""
        if self.unrectified:
            self.unrectified = not self._rectified()
            if self.unrectified:
                self._decay()
                self.set_rate(0.0)  # the step then advances moments and counts but moves no parameter
        for part in self.parts:
            part.step()
        if self._smoothing:
            self._smooth(max(self._smoothing, 1 - (self.update + 1) / (self.update + 10)))

    @torch.no_grad()
    def _smooth(self, share: float) -> None:
        """Move the mean of every parameter that has taken a step towards the parameter by `share`."""
        means, trained = list[Tensor](), list[Tensor]()
        for part, _, parameter in self._owned():
            if (state := part.state.get(parameter)) and _MEAN not in state:
                state[_MEAN] = parameter.detach().clone()
            elif state:
                means.append(local(state[_MEAN]))
                trained.append(local(parameter))
        if means:
            torch._foreach_lerp_(means, trained, share)

    def means(self) -> dict[str, Tensor]:
        """Return the running means of weights by the names of their parameters; {} without `weight_smoothing`."""
        owned = ((parameter, part.state.get(parameter, {})) for part, _, parameter in self._owned())
        return {self.names[parameter]: state[_MEAN] for parameter, state in owned if _MEAN in state}

    @contextlib.contextmanager
    def smoothed(self) -> Iterator[None]:
        """Context in which the parameters hold their running means."""
        parameters = {name: local(parameter.detach()) for parameter, name in self.names.items()}
        means = {name: local(mean) for name, mean in self.means().items()}
        trained = {name: parameters[name].clone() for name in means}
        for name, mean in means.items():
            parameters[name].copy_(mean)
        try:
            yield
        finally:
            for name, values in trained.items():
                parameters[name].copy_(values)

    @torch.no_grad()
    def _decay(self) -> None:
        """Shrink parameters that have a gradient, as a step would.

        Liu et al.'s code for translation (Transformer-Clinic) decays in every update; RAdam's own repository later
        left it out of unrectified ones.
        """
        for part in self.parts:
            for group in part.param_groups:
                if shrunk := [p for p in group["params"] if p.grad is not None and group["weight_decay"]]:
                    torch._foreach_mul_(shrunk, 1 - group["lr"] * group["weight_decay"])

    def _rectified(self) -> bool:
        """True when RAdam's variance is tractable at the next step: rho_t > 5 (Liu et al. 2020a, algorithm 2).

        rho_inf = 2 / (1 - beta2) - 1 and rho_t = rho_inf - 2 t beta2^t / (1 - beta2^t).
        """
        (part,) = self.parts
        # The parameter with the fewest steps decides; after growth with copied moments, new layers have fewer.
        t = 1 + min(int(part.state[p]["step"]) if p in part.state else 0 for p in self.parameters)
        beta2: float = part.defaults["betas"][1]
        decayed = beta2**t
        return 2 / (1 - beta2) - 1 - 2 * t * decayed / (1 - decayed) > 5

    def reserve(self) -> list[Tensor]:
        """Return tensors as large as the moments that the first step will create, to test what fits into memory."""
        return [
            torch.ones_like(parameter, dtype=_moment_dtype(part, parameter))  # a page never written takes no memory
            for part, _, parameter in self._owned()
            if parameter not in part.state
            for _ in range(_moments(part))
        ] + [torch.ones_like(parameter) for _, _, parameter in self._owned() if self._smoothing]

    @property
    def moment_bytes(self) -> int:
        """Size of all moments of this process, whether the first step has made them yet or not."""
        return sum(
            local(parameter).numel() * _moment_dtype(part, parameter).itemsize * _moments(part)
            + local(parameter).nbytes * bool(self._smoothing)
            for part, _, parameter in self._owned()
        )

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the moments by `<parameter name>/<moment name>`; numbers become tensors of shape [].

        If there are running means, it has the parameters themselves as `<parameter name>/trained` instead of the means.
        """
        return {
            f"{self.names[parameter]}/{_TRAINED if key == _MEAN else key}": (
                parameter.detach() if key == _MEAN else torch.as_tensor(value)
            )
            for part in self.parts
            for parameter, moments in part.state.items()
            for key, value in moments.items()
        }

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. Raises CheckpointError for misshapen moments, or those of no parameter.

        Missing moments mean that a parameter has not taken its first step: LayerDrop may not have used it yet. For a
        parameter saved here, the model has held its running mean until now.
        """
        self.unrectified = self._rectified_only  # recomputed at the next step from the counts loaded here
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in saved.items():
            name, _, moment = key.rpartition("/")
            by_name.setdefault(name, {})[moment] = value
        if wrong := sorted(by_name.keys() - self.names.values()):
            raise CheckpointError(f"optimiser state does not fit the model: {wrong[0]} (and {len(wrong) - 1} more)")
        for part, group, parameter in self._owned():
            part.state.pop(parameter, None)  # a run that rolls back already has moments
            moments = by_name.get(self.names[parameter], {})
            if any(v.dim() and v.shape != parameter.shape for v in moments.values()):
                raise CheckpointError(f"optimiser state of {self.names[parameter]} has another shape")
            trained = moments.pop(_TRAINED, None)
            if moments:
                # `step` stays on the optimiser's device: the CPU, unless it runs fused on a GPU.
                home = parameter.device if group.get("fused") else torch.device("cpu")
                part.state[parameter] = {
                    k: placed_as(v, parameter) if v.dim() else v.to(home) for k, v in moments.items()
                }
            if trained is not None:
                if self._smoothing:
                    part.state[parameter][_MEAN] = parameter.detach().clone()
                with torch.no_grad():
                    parameter.copy_(placed_as(trained, parameter))


def _moments(part: torch.optim.Optimizer) -> int:
    return 1 if isinstance(part, torch.optim.Muon) else 2


def _moment_dtype(part: torch.optim.Optimizer, parameter: Tensor) -> torch.dtype:
    return torch.bfloat16 if isinstance(part, NarrowAdam) else parameter.dtype


def _optimisers(
    parameters: Mapping[tuple[bool, RateScale], list[nn.Parameter]],
    names: Mapping[Tensor, str],
    config: OptimiserConfig,
    seed: int,
) -> list[torch.optim.Optimizer]:
    """Return one optimiser; for muon two, since it takes only matrices.

    `parameters` are grouped by (whether weights decay, factors).
    """
    groups = [
        {
            "params": members,
            "weight_decay": config.weight_decay * scale.decay if decays else 0.0,
            "eps": config.epsilon * scale.epsilon,
            "rate_scale": scale.rate,
        }
        for (decays, scale), members in parameters.items()
        if members
    ]
    if config.moments == "bf16":
        return [NarrowAdam(groups, names, config, seed)]
    betas, eps = config.betas, config.epsilon
    match config.kind:
        case "adam":
            return [torch.optim.Adam(groups, betas=betas, eps=eps, fused=True)]
        case "adamw":
            return [torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)]
        case "radam":  # torch has no fused version
            return [torch.optim.RAdam(groups, betas=betas, eps=eps, decoupled_weight_decay=True)]
        case "muon":
            # match_rms_adamw gives updates of AdamW's size, so that one learning rate serves both parts.
            decayed, undecayed = parameters[True, RateScale()], parameters[False, RateScale()]
            muon = torch.optim.Muon(
                [p for p in decayed if p.dim() == 2],
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            others = [
                {"params": [p for p in decayed if p.dim() != 2], "weight_decay": config.weight_decay},
                {"params": undecayed, "weight_decay": 0.0},
            ]
            others = [group for group in others if group["params"]]
            return [muon, torch.optim.AdamW(others, betas=betas, eps=eps, fused=True)]
        case _:
            assert_never(config.kind)

"""torch's optimisers, with weight decay by the roles of parameters and a state saved by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor, nn

from ziggurat.config.train import OptimiserConfig
from ziggurat.model.init.transfer import Scale
from ziggurat.model.roles import Role
from ziggurat.model.tensors import local, placed_as
from ziggurat.system.errors import CheckpointError
from ziggurat.train.moments import NarrowAdam

# Weight decay acts on the matrices inside the layers; here are vectors, wiring, and the matrices of the vocabulary.
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

    Parameters that require no gradient (a fixed omega, fixed combination weights) belong to none.

    Args:
        model: the names of its parameters are the names in the saved state.
        roles: role of each parameter by name (ziggurat.model.build.parameter_roles).
        config: kind and constants.
        scales: factors of rate, epsilon and decay by name, where a rate is taken over from a smaller model
            (ziggurat.model.build.parameter_scales); not for muon.
        seed: seed of the rounding of moments in bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        roles: Mapping[str, Role],
        config: OptimiserConfig,
        *,
        scales: Mapping[str, Scale] | None = None,
        seed: int = 1,
    ) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in trained}
        # Matrices first: the order of groups decides in which order fused steps go through memory, nothing else.
        groups: dict[tuple[bool, Scale], list[nn.Parameter]] = {(True, Scale()): [], (False, Scale()): []}
        for name, parameter in trained:
            decays = roles[name] not in _UNDECAYED
            groups.setdefault((decays, scales[name] if scales else Scale()), []).append(parameter)
        self.parts = _optimisers(groups, self.names, config, seed)
        self._rectified_only = config.rectified_only
        self.unrectified = config.rectified_only  # until the first rectified step

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that is trained."""
        return [p for part in self.parts for group in part.param_groups for p in group["params"]]

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
                self.set_rate(0.0)  # the step then advances moments and counts, and moves nothing
        for part in self.parts:
            part.step()

    @torch.no_grad()
    def _decay(self) -> None:
        """Shrink parameters that have a gradient as a step would.

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
        # The parameter with the fewest steps decides: after growth with copied moments, new layers have fewer.
        t = 1 + min(int(part.state[p]["step"]) if p in part.state else 0 for p in self.parameters)
        beta2: float = part.defaults["betas"][1]
        decayed = beta2**t
        return 2 / (1 - beta2) - 1 - 2 * t * decayed / (1 - decayed) > 5

    def reserve(self) -> list[Tensor]:
        """Return tensors as large as the moments that the first step will make, for trials of what fits."""
        return [
            torch.ones_like(parameter, dtype=_moment_dtype(part, parameter))  # a page never written takes no memory
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
            if parameter not in part.state
            for _ in range(_moments(part))
        ]

    @property
    def moment_bytes(self) -> int:
        """Size of all moments of this process, whether the first step has made them yet or not."""
        return sum(
            local(parameter).numel() * _moment_dtype(part, parameter).itemsize * _moments(part)
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        )

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the moments by `<parameter name>/<moment name>`; numbers become tensors of shape []."""
        return {
            f"{self.names[parameter]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
            for part in self.parts
            for parameter, moments in part.state.items()
            for key, value in moments.items()
        }

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. Raises CheckpointError for misshapen moments, or those of no parameter.

        Moments that are missing are those of a parameter before its first step: LayerDrop may not have used it yet.
        """
        self.unrectified = self._rectified_only  # decided again at the next step, from the counts that are loaded here
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in saved.items():
            name, _, moment = key.rpartition("/")
            by_name.setdefault(name, {})[moment] = value
        if wrong := sorted(by_name.keys() - self.names.values()):
            raise CheckpointError(f"optimiser state does not fit the model: {wrong[0]} (and {len(wrong) - 1} more)")
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    part.state.pop(parameter, None)  # a run that rolls back has moments already
                    moments = by_name.get(self.names[parameter], {})
                    if any(v.dim() and v.shape != parameter.shape for v in moments.values()):
                        raise CheckpointError(f"optimiser state of {self.names[parameter]} has another shape")
                    if moments:
                        # `step` stays where the optimiser keeps it: on the CPU, unless it runs fused on a GPU.
                        home = parameter.device
                        part.state[parameter] = {
                            k: placed_as(v, parameter) if v.dim() else v.to(home) if group.get("fused") else v
                            for k, v in moments.items()
                        }


def _moments(part: torch.optim.Optimizer) -> int:
    """Return the number of tensors of a parameter's shape that the optimiser keeps for it."""
    return 1 if isinstance(part, torch.optim.Muon) else 2


def _moment_dtype(part: torch.optim.Optimizer, parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the optimiser keeps them."""
    return torch.bfloat16 if isinstance(part, NarrowAdam) else parameter.dtype


def _optimisers(
    parameters: Mapping[tuple[bool, Scale], list[nn.Parameter]],
    names: Mapping[Tensor, str],
    config: OptimiserConfig,
    seed: int,
) -> list[torch.optim.Optimizer]:
    """Return one optimiser; for muon two, since it takes only matrices.

    `parameters` are by (whether weights decay, factors).
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
        case "radam":  # torch has no fused one
            return [torch.optim.RAdam(groups, betas=betas, eps=eps, decoupled_weight_decay=True)]
        case "muon":
            # match_rms_adamw gives updates of AdamW's size, so that one learning rate serves both parts.
            decayed, undecayed = parameters[True, Scale()], parameters[False, Scale()]
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

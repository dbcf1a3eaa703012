"""Muon (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982): orthogonalised momentum for hidden matrices.

Which weights are hidden matrices is decided by `drivetrain.module.params.muon_groups`, from the layers that hold them; the rest
stays with AdamW. With `adjust_lr="match_rms_adamw"` both take steps of one size, so one learning rate tuned for AdamW serves both.
"""

from collections.abc import Mapping
from typing import Literal

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.run import OptimizerReplacement, set_optimizer
from drivetrain.context.state import State
from drivetrain.core import ConfigError, Event, Logger
from drivetrain.core.arguments import check_choice
from drivetrain.core.errors import unknown_name
from drivetrain.core.types import Settings
from drivetrain.module.params import MuonGroups, muon_groups

_OTHER_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class Muon(OptimizerReplacement):
    """Replaces the optimizer by Muon for hidden matrices and AdamW for everything else.

    `lr=None` takes the rates of the optimizer that is replaced, group by group. `other_kwargs` are AdamW's settings (lr, betas, eps,
    weight_decay); what is not given is taken over from the replaced optimizer where that has it.
    """

    def __init__(
        self,
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        other: str = "adamw",
        other_kwargs: Mapping[str, object] = {},  # only read
    ):
        check_choice("other", other, ("adamw",), owner="Muon")
        for name in other_kwargs:
            if name not in _OTHER_SETTINGS:
                raise ConfigError(unknown_name("setting", name, _OTHER_SETTINGS, where="Muon(other_kwargs=...)"))
        self.lr, self.momentum, self.weight_decay, self.ns_steps = lr, momentum, weight_decay, ns_steps
        self.adjust_lr, self.other, self.other_kwargs = adjust_lr, other, dict(other_kwargs)
        self.split: MuonGroups | None = None
        """Which parameter went where, and why."""

    def explain(self) -> str:
        """Return the split, one line per parameter with the reason."""
        return "Muon has no model yet." if self.split is None else self.split.explain()

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model, replaced = model_of(state, str(self)), self.replaced_groups(state)
        self.split = muon_groups(model)
        if not any(parameter.requires_grad for _, parameter in self.split.muon):
            raise ConfigError(
                f"Muon found no hidden matrix to train in {type(model).__name__}: AdamW would update everything.\n{self.split.explain()}"
            )
        to_muon = {id(parameter) for _, parameter in self.split.muon}
        groups = []
        for group in replaced:
            for is_muon in (True, False):
                own = [(name, p) for name, p in group["params"] if (id(p) in to_muon) is is_muon]
                if own:
                    groups.append({"params": own, "muon": is_muon, **self._settings(group)})
        settings = {"momentum": self.momentum, "ns_steps": self.ns_steps, "adjust_lr": self.adjust_lr}
        set_optimizer(state, "MuonHybrid", groups, **settings)
        sides = {"muon/muon_tensors": self.split.muon, "muon/other_tensors": self.split.other}
        logger.log_hyperparameters({name: len(side) for name, side in sides.items()})

    def _settings(self, group: Mapping[str, object]) -> Settings:
        """Return the settings of a group of the replaced optimizer, in MuonHybrid's words."""
        lr = group["lr"] if self.lr is None else self.lr
        other = {"lr": lr, **{name: group[name] for name in _OTHER_SETTINGS[1:] if name in group}, **self.other_kwargs}
        return {"lr": lr, "weight_decay": self.weight_decay, **{f"adam_{name}": value for name, value in other.items()}}

"""SOAP (Vyas et al., 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner."""

from drivetrain.algorithms.utils.run import OptimizerReplacement, set_optimizer
from drivetrain.context.state import State
from drivetrain.core import Event, Logger


class SOAP(OptimizerReplacement):
    """Replaces the optimizer by SOAP; `lr=None` takes over its rates, and its weight decay where it has one."""

    def __init__(
        self,
        lr: float | None = None,
        betas: tuple[float, float] = (0.95, 0.95),
        precondition_frequency: int = 10,
        max_dim: int = 10000,
    ):
        self.lr, self.betas = lr, betas
        self.precondition_frequency, self.max_dim = precondition_frequency, max_dim

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        groups = [
            {
                "params": group["params"],
                "lr": group["lr"] if self.lr is None else self.lr,
                "weight_decay": group.get("weight_decay", 0.0),
            }
            for group in self.replaced_groups(state)
        ]
        settings = {"precondition_frequency": self.precondition_frequency, "max_dim": self.max_dim}
        set_optimizer(state, "SOAP", groups, betas=tuple(self.betas), **settings)

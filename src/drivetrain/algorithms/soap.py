"""SOAP (Vyas et al., 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner."""

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.run import make_optimizer, named_groups, own_optimizer, reject_begun
from drivetrain.context.state import State
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Logger


class SOAP(Algorithm):
    """Replaces the optimizer by SOAP; `lr=None` takes over its rates, and its weight decay where it has one."""

    allow_multiple = False
    events = frozenset({Event.INIT})
    writes = ("optimizers",)
    after = ("#surgery",)
    tags = frozenset({"optimizer"})
    exclusive = frozenset({"optimizer"})

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
        replaced = own_optimizer(state, str(self))
        reject_begun(replaced, str(self))
        groups = [
            {
                "params": group["params"],
                "lr": group["lr"] if self.lr is None else self.lr,
                "weight_decay": group.get("weight_decay", 0.0),
            }
            for group in named_groups(replaced, model_of(state, str(self)))
        ]
        state.optimizers = (
            make_optimizer(
                state,
                "SOAP",
                groups,
                betas=tuple(self.betas),
                precondition_frequency=self.precondition_frequency,
                max_dim=self.max_dim,
            ),
        )

"""Sharpness-aware minimisation (Foret et al., 2020, arXiv 2010.01412): step with the gradient of the worst point nearby.

Each such step costs a second forward and backward pass, on the same batches and with the same random numbers; the Trainer
repeats them when the optimizer asks.
"""

from drivetrain.algorithms.utils.run import own_optimizer, set_optimizer
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_counts, check_numbers
from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, _ = lazy_exports(__name__, {"drivetrain.optim.optimizers.wrapper": ["SAMOptimizer"]})


class SAM(Algorithm):
    """Wraps the optimizer in SAM; every `interval`-th step is sharpness-aware.

    The perturbation uses the gradient averaged over all processes, so any number of them takes the same steps.
    """

    allow_multiple = False
    events = frozenset({Event.AFTER_LOAD})
    writes = ("optimizers",)

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1):
        check_numbers("SAM", 0, rho=rho, epsilon=epsilon)
        check_counts("SAM", 1, interval=interval)
        self.rho, self.epsilon, self.interval = rho, epsilon, interval

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        inside = own_optimizer(state, str(self))
        if getattr(inside, "needs_closure", False):
            return  # a second train() of the same trainer
        set_optimizer(state, "SAM", inside, rho=self.rho, epsilon=self.epsilon, interval=self.interval)

"""Compile the model with torch.compile, block by block where its blocks repeat.

`module.compile()` works in place: names, state-dict keys and the model object stay. It happens after the weights are loaded and
after all surgery, so that what is compiled is what will run.
"""

from typing import Literal

import torch

from drivetrain.algorithms.surgery import model_of
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_choice
from drivetrain.core.errors import warn
from drivetrain.core.types import Settings
from drivetrain.module.compilation import Scope, compile_module, set_recompile_limit
from drivetrain.module.wrapping import wrapping_of

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_SCOPES: dict[object, Scope] = {"auto": "auto", True: "block", False: "model"}


class TorchCompile(Algorithm):
    """Compiles the model before the first step.

    `regional` is "auto" (blocks where a class repeats, else the whole model), True (blocks) or False (the whole model).
    Algorithms that can count the input shapes they will make (`count_shapes`: progressive resizing, sequence-length warm-up) get
    room for that many compilations.
    """

    allow_multiple = False
    events = frozenset({Event.AFTER_LOAD})
    writes = ("model",)
    after = ("#surgery", "LowPrecisionLayerNorm", "LowPrecisionGroupNorm", "ChannelsLast")

    def __init__(
        self,
        mode: str = "default",
        regional: Literal["auto"] | bool = "auto",
        dynamic: bool | None = False,
        fullgraph: bool = False,
        *,
        backend: str = "inductor",
    ):
        check_choice("mode", mode, _MODES, owner="TorchCompile")
        if regional not in ("auto", True, False):
            raise ConfigError(f"TorchCompile(regional={regional!r}): expected 'auto', True or False.")
        self.mode, self.regional, self.dynamic = mode, regional, dynamic
        self.fullgraph, self.backend = fullgraph, backend

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        if any(wrapping_of(module) in ("module.compile()", "OptimizedModule") for module in model.modules()):
            return  # a second train() of the same trainer
        counts = [getattr(algorithm, "count_shapes", None) for algorithm in state.algorithms]
        sizes = sum(count() for count in counts if callable(count))
        if sizes > 8 and not self.dynamic:
            warn(
                f"TorchCompile: other algorithms will call the model with about {sizes} input sizes, and each is compiled. Use larger "
                "steps between sizes, or dynamic=True."
            )
        settings: Settings = {"dynamic": self.dynamic, "fullgraph": self.fullgraph, "backend": self.backend}
        if self.mode != "default":
            settings["mode"] = self.mode
        compile_module(model, _SCOPES[self.regional], **settings)
        if sizes and torch._dynamo.config.recompile_limit < 2 * sizes:  # each size in training and in evaluation
            set_recompile_limit(2 * sizes)

"""Optimizer and schedule are one thing: units that own parameters, a loss and a learning rate, alone or in sets.

    from drivetrain.optim import NoamLr, OptimSet

    optim = OptimSet(
        encoder=NoamLr("Adam", {"lr": 1e-3}, model, optim_loss="encoder_loss", updated_modules="encoder"),
        decoder=NoamLr("AdamW", {"lr": 2e-3}, model, optim_loss="decoder_loss", updated_modules="decoder"),
    )

Formulas are in `schedules`, `units` has the classes, and `config` reads and writes YAML.
"""

from drivetrain.core.lazy import lazy_exports
from drivetrain.optim import optimizers

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".scheduler": ["OptimScheduler"],
        ".optim_set": ["OptimSet", "BatchPlan", "from_config", "from_yaml"],
        ".plain": ["as_optim_set", "build_optim_sches"],
        ".config": ["resolve_type", "to_config", "to_yaml"],
        "drivetrain.core.yaml": ["load_yaml"],
        ".explain": ["plot", "sparkline"],
        ".units": [
            *("NoamLr", "Noamlr", "ExponentDecayLr", "ConstantLr", "LinearLr", "CosineLr", "CosineRestartsLr"),
            *("PolynomialLr", "StepLr", "MultiStepLr", "WSDLr", "InverseSqrtLr", "OneCycleLr", "LambdaLr"),
            "as_lr_lambda",
        ],
        ".optimizers": optimizers.__all__,
    },
    modules=["schedules"],
)

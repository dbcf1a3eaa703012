# Written by `make stubs` from the lazy exports of this module.
from drivetrain.optim.scheduler import OptimScheduler as OptimScheduler
from drivetrain.optim.optim_set import OptimSet as OptimSet
from drivetrain.optim.optim_set import BatchPlan as BatchPlan
from drivetrain.optim.optim_set import from_config as from_config
from drivetrain.optim.optim_set import from_yaml as from_yaml
from drivetrain.optim.plain import as_optim_set as as_optim_set
from drivetrain.optim.plain import build_optim_sches as build_optim_sches
from drivetrain.optim.config import resolve_type as resolve_type
from drivetrain.optim.config import to_config as to_config
from drivetrain.optim.config import to_yaml as to_yaml
from drivetrain.core.yaml import load_yaml as load_yaml
from drivetrain.optim.explain import plot as plot
from drivetrain.optim.explain import sparkline as sparkline
from drivetrain.optim.units import NoamLr as NoamLr
from drivetrain.optim.units import Noamlr as Noamlr
from drivetrain.optim.units import ExponentDecayLr as ExponentDecayLr
from drivetrain.optim.units import ConstantLr as ConstantLr
from drivetrain.optim.units import LinearLr as LinearLr
from drivetrain.optim.units import CosineLr as CosineLr
from drivetrain.optim.units import CosineRestartsLr as CosineRestartsLr
from drivetrain.optim.units import PolynomialLr as PolynomialLr
from drivetrain.optim.units import StepLr as StepLr
from drivetrain.optim.units import MultiStepLr as MultiStepLr
from drivetrain.optim.units import WSDLr as WSDLr
from drivetrain.optim.units import InverseSqrtLr as InverseSqrtLr
from drivetrain.optim.units import OneCycleLr as OneCycleLr
from drivetrain.optim.units import LambdaLr as LambdaLr
from drivetrain.optim.units import as_lr_lambda as as_lr_lambda
from drivetrain.optim.optimizers import MuonHybrid as MuonHybrid
from drivetrain.optim.optimizers import AdamWScheduleFree as AdamWScheduleFree
from drivetrain.optim.optimizers import SGDScheduleFree as SGDScheduleFree
from drivetrain.optim.optimizers import DecoupledAdamW as DecoupledAdamW
from drivetrain.optim.optimizers import DecoupledSGDW as DecoupledSGDW
from drivetrain.optim.optimizers import Lion as Lion
from drivetrain.optim.optimizers import SOAP as SOAP
from drivetrain.optim.optimizers import Cautious as Cautious
from drivetrain.optim.optimizers import Lookahead as Lookahead
from drivetrain.optim.optimizers import SAM as SAM
from drivetrain.optim.optimizers import SAMOptimizer as SAMOptimizer
from drivetrain.compat.composer_schedulers import ComposerScheduler as ComposerScheduler
from drivetrain.compat.composer_schedulers import ConstantScheduler as ConstantScheduler
from drivetrain.compat.composer_schedulers import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
from drivetrain.compat.composer_schedulers import CosineAnnealingScheduler as CosineAnnealingScheduler
from drivetrain.compat.composer_schedulers import CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler
from drivetrain.compat.composer_schedulers import CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler
from drivetrain.compat.composer_schedulers import ExponentialScheduler as ExponentialScheduler
from drivetrain.compat.composer_schedulers import InverseSqrtScheduler as InverseSqrtScheduler
from drivetrain.compat.composer_schedulers import LinearScheduler as LinearScheduler
from drivetrain.compat.composer_schedulers import LinearWithWarmupScheduler as LinearWithWarmupScheduler
from drivetrain.compat.composer_schedulers import MultiStepScheduler as MultiStepScheduler
from drivetrain.compat.composer_schedulers import MultiStepWithWarmupScheduler as MultiStepWithWarmupScheduler
from drivetrain.compat.composer_schedulers import OneCycleScheduler as OneCycleScheduler
from drivetrain.compat.composer_schedulers import PolynomialScheduler as PolynomialScheduler
from drivetrain.compat.composer_schedulers import PolynomialWithWarmupScheduler as PolynomialWithWarmupScheduler
from drivetrain.compat.composer_schedulers import StepScheduler as StepScheduler
from drivetrain.compat.composer_schedulers import WSDScheduler as WSDScheduler
from drivetrain.compat.composer_schedulers import compile_composer_scheduler as compile_composer_scheduler
from drivetrain.compat import composer_schedulers as composer_schedulers
from drivetrain.optim import units as constant
from drivetrain.optim import units as cosine
from drivetrain.optim import schedules as curves
from drivetrain.optim import units as exp
from drivetrain.optim import units as function
from drivetrain.optim import units as inverse_sqrt
from drivetrain.optim import units as linear
from drivetrain.optim import units as multistep
from drivetrain.optim import units as noam
from drivetrain.optim import units as one_cycle
from drivetrain.optim import units as polynomial
from drivetrain.optim import schedules as schedules
from drivetrain.optim import units as step
from drivetrain.optim import units as wsd

__all__ = [
    "OptimScheduler",
    "OptimSet",
    "BatchPlan",
    "from_config",
    "from_yaml",
    "as_optim_set",
    "build_optim_sches",
    "resolve_type",
    "to_config",
    "to_yaml",
    "load_yaml",
    "plot",
    "sparkline",
    "NoamLr",
    "Noamlr",
    "ExponentDecayLr",
    "ConstantLr",
    "LinearLr",
    "CosineLr",
    "CosineRestartsLr",
    "PolynomialLr",
    "StepLr",
    "MultiStepLr",
    "WSDLr",
    "InverseSqrtLr",
    "OneCycleLr",
    "LambdaLr",
    "as_lr_lambda",
    "MuonHybrid",
    "AdamWScheduleFree",
    "SGDScheduleFree",
    "DecoupledAdamW",
    "DecoupledSGDW",
    "Lion",
    "SOAP",
    "Cautious",
    "Lookahead",
    "SAM",
    "SAMOptimizer",
    "ComposerScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "ExponentialScheduler",
    "InverseSqrtScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "OneCycleScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "WSDScheduler",
    "compile_composer_scheduler",
]

# Written by `make stubs` from the lazy exports of this module.
from drivetrain.optim.optimizers.muon_hybrid import MuonHybrid as MuonHybrid
from drivetrain.optim.optimizers.schedule_free import AdamWScheduleFree as AdamWScheduleFree
from drivetrain.optim.optimizers.schedule_free import SGDScheduleFree as SGDScheduleFree
from drivetrain.optim.optimizers.decoupled import DecoupledAdamW as DecoupledAdamW
from drivetrain.optim.optimizers.decoupled import DecoupledSGDW as DecoupledSGDW
from drivetrain.optim.optimizers.decoupled import Lion as Lion
from drivetrain.optim.optimizers.shampoo import SOAP as SOAP
from drivetrain.optim.optimizers.wrapper import Cautious as Cautious
from drivetrain.optim.optimizers.wrapper import Lookahead as Lookahead
from drivetrain.optim.optimizers.wrapper import SAMOptimizer as SAM
from drivetrain.optim.optimizers.wrapper import SAMOptimizer as SAMOptimizer

__all__ = [
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
]

# Written by `make stubs` from the lazy exports of this module.
from drivetrain.train.trainer import *

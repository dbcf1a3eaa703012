# Written by `make stubs` from the lazy exports of this module.
from drivetrain.compat.pytorch_accelerated_utils import *

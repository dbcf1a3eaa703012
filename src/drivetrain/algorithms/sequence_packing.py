"""Sequence packing (Krell et al., 2021, arXiv 2107.02027): several documents in one row, without padding and without mixing them.

The arithmetic is `drivetrain.data.packing`'s. Here the training data is packed before a saved place is looked up in it, each batch
gets the mask that keeps documents apart, and the loss is weighted by the targets that count.
"""

from typing import Any

from drivetrain.algorithms.utils.checks import check_choice, check_whole
from drivetrain.algorithms.utils.passes import accepted_names
from drivetrain.algorithms.warnings import NotIntendedUseWarning
from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Logger
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.packing import STRATEGIES, PackedDataset, PackingStrategy, document_mask, num_targets

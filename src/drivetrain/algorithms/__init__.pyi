# Written by `make stubs` from the lazy exports of this module.
from drivetrain.core.one_of import OneOf as OneOf
from drivetrain.algorithms.alternating_flip import AlternatingFlip as AlternatingFlip
from drivetrain.algorithms.augmix import AugMix as AugMix
from drivetrain.algorithms.augmix import AugmentAndMixTransform as AugmentAndMixTransform
from drivetrain.algorithms.batch_size_warmup import BatchSizeWarmup as BatchSizeWarmup
from drivetrain.algorithms.colout import ColOut as ColOut
from drivetrain.algorithms.colout import ColOutTransform as ColOutTransform
from drivetrain.algorithms.cutmix import CutMix as CutMix
from drivetrain.algorithms.cutout import CutOut as CutOut
from drivetrain.algorithms.device_resident import DeviceResidentData as DeviceResidentData
from drivetrain.algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
from drivetrain.algorithms.mixup import MixUp as MixUp
from drivetrain.algorithms.progressive_resizing import ProgressiveResizing as ProgressiveResizing
from drivetrain.algorithms.randaugment import RandAugment as RandAugment
from drivetrain.algorithms.randaugment import RandAugmentTransform as RandAugmentTransform
from drivetrain.algorithms.random_translation import RandomTranslation as RandomTranslation
from drivetrain.algorithms.resolution import Resolution as Resolution
from drivetrain.algorithms.selective_backprop import SelectiveBackprop as SelectiveBackprop
from drivetrain.algorithms.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
from drivetrain.algorithms.sequence_packing import SequencePacking as SequencePacking
from drivetrain.algorithms.test_time_flip import TestTimeFlip as TestTimeFlip
from drivetrain.algorithms.alibi import Alibi as Alibi
from drivetrain.algorithms.blurpool import BlurPool as BlurPool
from drivetrain.algorithms.blurpool import BlurConv2d as BlurConv2d
from drivetrain.algorithms.blurpool import BlurMaxPool2d as BlurMaxPool2d
from drivetrain.algorithms.blurpool import BlurPool2d as BlurPool2d
from drivetrain.algorithms.channels_last import ChannelsLast as ChannelsLast
from drivetrain.algorithms.factorize import Factorize as Factorize
from drivetrain.algorithms.factorize import FactorizedConv2d as FactorizedConv2d
from drivetrain.algorithms.factorize import FactorizedLinear as FactorizedLinear
from drivetrain.algorithms.factorize import LowRankSolution as LowRankSolution
from drivetrain.algorithms.fp8_linear import FP8Linear as FP8Linear
from drivetrain.algorithms.gated_linear_units import GatedLinearUnits as GatedLinearUnits
from drivetrain.algorithms.gated_linear_units import BERTGatedFFOutput as BERTGatedFFOutput
from drivetrain.algorithms.gated_linear_units import GatedFeedForward as GatedFeedForward
from drivetrain.algorithms.ghost_batchnorm import GhostBatchNorm as GhostBatchNorm
from drivetrain.algorithms.ghost_batchnorm import GhostBatchNorm1d as GhostBatchNorm1d
from drivetrain.algorithms.ghost_batchnorm import GhostBatchNorm2d as GhostBatchNorm2d
from drivetrain.algorithms.ghost_batchnorm import GhostBatchNorm3d as GhostBatchNorm3d
from drivetrain.algorithms.gyro_dropout import GyroDropout as GyroDropout
from drivetrain.algorithms.gyro_dropout import GyroDropoutLayer as GyroDropoutLayer
from drivetrain.algorithms.low_precision_groupnorm import LowPrecisionGroupNorm as LowPrecisionGroupNorm
from drivetrain.algorithms.low_precision_groupnorm import LPGroupNorm as LPGroupNorm
from drivetrain.algorithms.low_precision_layernorm import LowPrecisionLayerNorm as LowPrecisionLayerNorm
from drivetrain.algorithms.low_precision_layernorm import LowPrecisionLayerNorm as FusedLayerNorm
from drivetrain.algorithms.low_precision_layernorm import LPLayerNorm as LPLayerNorm
from drivetrain.algorithms.no_op_model import NoOpModel as NoOpModel
from drivetrain.algorithms.no_op_model import NoOpModelClass as NoOpModelClass
from drivetrain.algorithms.squeeze_excite import SqueezeExcite as SqueezeExcite
from drivetrain.algorithms.squeeze_excite import SqueezeExcite2d as SqueezeExcite2d
from drivetrain.algorithms.squeeze_excite import SqueezeExciteConv2d as SqueezeExciteConv2d
from drivetrain.algorithms.stochastic_depth import StochasticDepth as StochasticDepth
from drivetrain.algorithms.stochastic_depth import BlockStochasticModule as BlockStochasticModule
from drivetrain.algorithms.weight_standardization import WeightStandardization as WeightStandardization
from drivetrain.algorithms.weight_standardization import WeightStandardizer as WeightStandardizer
from drivetrain.algorithms.whitening import Whitening as Whitening
from drivetrain.algorithms.cautious import Cautious as Cautious
from drivetrain.algorithms.ema import EMA as EMA
from drivetrain.algorithms.fast_defaults import FastDefaults as FastDefaults
from drivetrain.algorithms.gradient_clipping import GradientClipping as GradientClipping
from drivetrain.algorithms.gradient_clipping import AGC as AGC
from drivetrain.algorithms.kernel_norm import KernelNorm as KernelNorm
from drivetrain.algorithms.layer_freezing import LayerFreezing as LayerFreezing
from drivetrain.algorithms.lookahead import Lookahead as Lookahead
from drivetrain.algorithms.muon import Muon as Muon
from drivetrain.algorithms.sam import SAM as SAM
from drivetrain.algorithms.sam import SAMOptimizer as SAMOptimizer
from drivetrain.algorithms.scale_schedule import ScaleSchedule as ScaleSchedule
from drivetrain.algorithms.schedule_free import ScheduleFree as ScheduleFree
from drivetrain.algorithms.soap import SOAP as SOAP
from drivetrain.algorithms.swa import SWA as SWA
from drivetrain.algorithms.torch_compile import TorchCompile as TorchCompile
from drivetrain.core.errors import NoEffectWarning as NoEffectWarning
from drivetrain.core.errors import NotIntendedUseWarning as NotIntendedUseWarning
from drivetrain.core import errors as warnings

__all__ = [
    "OneOf",
    "AlternatingFlip",
    "AugMix",
    "AugmentAndMixTransform",
    "BatchSizeWarmup",
    "ColOut",
    "ColOutTransform",
    "CutMix",
    "CutOut",
    "DeviceResidentData",
    "LabelSmoothing",
    "MixUp",
    "ProgressiveResizing",
    "RandAugment",
    "RandAugmentTransform",
    "RandomTranslation",
    "Resolution",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SequencePacking",
    "TestTimeFlip",
    "Alibi",
    "BlurPool",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "ChannelsLast",
    "Factorize",
    "FactorizedConv2d",
    "FactorizedLinear",
    "LowRankSolution",
    "FP8Linear",
    "GatedLinearUnits",
    "BERTGatedFFOutput",
    "GatedFeedForward",
    "GhostBatchNorm",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "GyroDropout",
    "GyroDropoutLayer",
    "LowPrecisionGroupNorm",
    "LPGroupNorm",
    "LowPrecisionLayerNorm",
    "FusedLayerNorm",
    "LPLayerNorm",
    "NoOpModel",
    "NoOpModelClass",
    "SqueezeExcite",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StochasticDepth",
    "BlockStochasticModule",
    "WeightStandardization",
    "WeightStandardizer",
    "Whitening",
    "Cautious",
    "EMA",
    "FastDefaults",
    "GradientClipping",
    "AGC",
    "KernelNorm",
    "LayerFreezing",
    "Lookahead",
    "Muon",
    "SAM",
    "SAMOptimizer",
    "ScaleSchedule",
    "ScheduleFree",
    "SOAP",
    "SWA",
    "TorchCompile",
    "NoEffectWarning",
    "NotIntendedUseWarning",
]

"""Models of timm, with few classes and small images."""

from functools import partial

import torch
from torch import nn

from benchmarks.zoo.task import Entry, Sample, Task, make_samples, mixes_samples, without_dropout

NAMES = {  # name in timm: size of the images
    "resnet10t": 32, "resnetv2_18d": 32, "regnetx_002": 32, "efficientnet_b0": 32, "mobilenetv3_small_050": 32, "densenet121": 32,
    "convnext_atto": 32, "vit_tiny_patch16_224": 32, "deit3_small_patch16_224": 32, "mixer_s32_224": 64, "resmlp_12_224": 32,
    "swin_tiny_patch4_window7_224": 56, "xcit_nano_12_p16_224": 32, "poolformer_s12": 32, "ghostnet_050": 32, "repvgg_a0": 32,
    "edgenext_xx_small": 64, "dla34": 64, "cspresnet50": 32, "hardcorenas_a": 32,
}  # fmt: skip
SIZED = ("vit", "deit", "mixer", "resmlp", "swin", "xcit")
SMALLER = {  # settings that make a big family small
    "vit_tiny_patch16_224": {"depth": 2}, "deit3_small_patch16_224": {"depth": 2}, "densenet121": {"block_config": (2, 2)},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16},
}  # fmt: skip


def _build(name: str, size: int) -> Task:
    import timm

    torch.manual_seed(0)
    sized = {"img_size": size} if name.startswith(SIZED) else {}
    model = without_dropout(timm.create_model(name, num_classes=4, **sized, **SMALLER.get(name, {})))

    def sample(generator: torch.Generator) -> Sample:
        return torch.randn(3, size, size, generator=generator), torch.randint(0, 4, (), generator=generator)

    return Task(
        model=model, data=make_samples(sample), loss_func=nn.CrossEntropyLoss(), mixes_samples=mixes_samples(model)
    )


ENTRIES = [
    Entry(name=f"timm/{name}", family="vision", build=partial(_build, name, size), needs="timm")
    for name, size in NAMES.items()
]

"""On a CUDA device: the same results as on the host, and no step waits for the device."""

import pytest
import torch
from torch import nn

from drivetrain import functional as cf
from drivetrain.algorithms.cutmix import CutMix
from drivetrain.algorithms.mixup import MixUp
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from tests.algorithms.tasks import (
    Documents,
    TinyTransformer,
    conv_trainer,
    image_data,
    make_state,
    train,
    weights,
)
from tests.algorithms.test_batch_methods import CASES, everything

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def generator():
    return torch.Generator().manual_seed(3)


IMAGES, LABELS = torch.rand(8, 3, 16, 20, generator=generator()), torch.arange(8) % 4
LEVELS = (IMAGES * 255).to(torch.uint8)
CALLS = {
    "mixup": lambda x, y: cf.mixup_batch(x, y, generator=generator())[:2],
    "cutmix": lambda x, y: cf.cutmix_batch(x, y, generator=generator())[:2],
    "cutout": lambda x, y: [cf.cutout_batch(x, generator=generator())],
    "colout": lambda x, y: cf.colout_batch((x, y), generator=generator()),
    "smooth_labels": lambda x, y: [cf.smooth_labels(x.mean((2, 3)), y % 3)],
    "resize": lambda x, y: cf.resize_batch(x, y, 0.5),
    "crop": lambda x, y: cf.resize_batch(x, y, 0.5, "crop", generator=generator()),
    "select": lambda x, y: cf.select_using_loss(
        x, y % 3, lambda x: x.float().mean((2, 3)), nn.CrossEntropyLoss(), generator=generator()
    ),
    "flip": lambda x, y: [cf.alternating_flip(x, torch.arange(8), 1)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_functions_agree_with_the_host_and_do_not_wait(name, dtype):
    x, y = IMAGES.to(dtype), LABELS
    expected = CALLS[name](x, y)
    on_device = x.cuda(), y.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = CALLS[name](*on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, expected):
        assert ours.is_cuda and ours.dtype == theirs.dtype
        torch.testing.assert_close(
            ours.cpu(),
            theirs,
            rtol=1e-2 if dtype is torch.bfloat16 else 1e-5,
            atol=1e-2 if dtype is torch.bfloat16 else 1e-6,
        )


@pytest.mark.parametrize("function", [cf.randaugment_image, cf.augmix_image])
def test_image_augmentation_agrees_with_the_host_and_does_not_wait(function):
    for seed in range(10):
        expected = function(LEVELS, generator=torch.Generator().manual_seed(seed))
        device_images = LEVELS.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = function(device_images, generator=torch.Generator().manual_seed(seed))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (found.cpu().int() - expected.int()).abs().float().mean() < 0.5


@pytest.mark.parametrize(
    "make",
    [lambda: MixUp(0.4), lambda: MixUp(0.4, interpolate_loss=True), CutMix, lambda: CutMix(interpolate_loss=True)],
)
def test_mixing_around_the_loss_does_not_wait(make):
    loss = nn.CrossEntropyLoss()
    state = make_state([IMAGES.cuda(), LABELS.cuda()], model=nn.Identity(), loss_fn=loss, device="cuda")
    engine = Engine(state, plugins=[make()])

    def step():
        engine.fire(Event.BEFORE_FORWARD)
        state.outputs = state.batch[0].mean((2, 3)).repeat(1, 2)
        engine.fire(Event.BEFORE_LOSS)
        state.loss = loss(state.outputs, state.batch[1])
        engine.fire(Event.AFTER_LOSS)

    step()  # the first one tries the loss out
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_every_batch_method_trains_on_the_device(name):
    case = CASES[name]
    trainer = case.trainer(case.make(), device="cuda")
    train(trainer, case.data(), **{"num_epochs": 2, **dict(case.settings)})
    assert all(torch.isfinite(value).all() for value in weights(trainer.model))


def test_a_recipe_trains_in_bf16_on_resident_data():
    trainer = conv_trainer(*everything(), device="cuda", precision="bf16")
    train(trainer, image_data(64), num_epochs=3)
    assert all(torch.isfinite(value).all() for value in weights(trainer.model))


def test_packed_documents_attend_to_themselves_on_the_device():
    from drivetrain.algorithms.sequence_packing import additive_mask
    from drivetrain.data.packing import PackedDataset

    model, packed = TinyTransformer().double().cuda().eval(), PackedDataset(Documents(8), 24)
    batch = {key: value.unsqueeze(0).cuda() for key, value in packed[0].items()}
    mask = additive_mask(batch["document_ids"], True, torch.float64)
    together = model(batch["input_ids"], None, mask, batch["position_ids"])["logits"][0]
    places = batch["document_ids"][0] == 0
    ids = batch["input_ids"][:, places]
    alone = model(ids, None, None, torch.arange(ids.shape[1], device="cuda").unsqueeze(0))["logits"][0]
    torch.testing.assert_close(together[places], alone)

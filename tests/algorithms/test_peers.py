"""Side by side with the installed Composer: the same arithmetic where it is right, a stated difference where it is known to be wrong.

Composer draws from numpy's global generator and we from torch's, so `replay` gives Composer our draws: then a random function must
agree to the last bit, or they draw different things. Without Composer the whole file is skipped, with the reason.
"""

import copy
import math

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import functional as ours
from drivetrain.algorithms.utils.parts import draw_integer, draw_uniform, draw_weights

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def _composer():
    """Return Composer's functions; a release that does not start with this torch skips the file like a missing one."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import composer
            import composer.functional
            from composer.algorithms.utils import augmentation_primitives
        except Exception as error:
            pytest.skip(f"Composer cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)
    return composer, composer.functional, augmentation_primitives


composer, theirs, primitives = _composer()


@pytest.fixture
def replay(monkeypatch):
    """Let numpy's global functions return what our functions would draw from a generator with this seed."""

    def start(seed: int) -> torch.Generator:
        source = torch.Generator().manual_seed(seed)

        def integers(low, high=None, **rest):
            return draw_integer(*((0, low) if high is None else (low, high)), source)

        def choice(options, size=None, replace=True, p=None):
            if size is None:
                return options[draw_integer(0, len(options), source)]
            assert not replace, "the peer's only other call"
            return torch.multinomial(torch.as_tensor(p), size, replacement=False, generator=source).numpy()

        drawn = {
            "uniform": lambda low=0.0, high=1.0: draw_uniform(low, high, source),
            "random": lambda: draw_uniform(0.0, 1.0, source),
            "randint": integers,
            "choice": choice,
            "beta": lambda a, b: draw_weights(2, a, source)[0],
            "dirichlet": lambda alphas: numpy.array(draw_weights(len(alphas), alphas[0], source)),
        }
        for name, function in drawn.items():
            monkeypatch.setattr(numpy.random, name, function)
        return torch.Generator().manual_seed(seed)

    return start


def images(batch=6, channels=3, height=12, width=16, seed=0):
    return torch.rand(batch, channels, height, width, generator=torch.Generator().manual_seed(seed))


def labels(batch=6, classes=5):
    return torch.arange(batch) % classes


def agree(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-7)


def operate_on_two(model, operation):
    """Apply one operation of either library to copies of a model, with equal random numbers; return both models."""
    results = []
    for library in (ours, theirs):
        own = copy.deepcopy(model)
        torch.manual_seed(3)
        operation(library, own)
        results.append(own)
    return results


def same_passes(mine, other, x, passes=2):
    """Compare outputs, gradients of the input, and running statistics of two models in training and evaluation."""
    for model in (mine, other):
        model.train()
    for _ in range(passes):
        outcomes = []
        for model in (mine, other):
            torch.manual_seed(11)
            leaf = x.clone().requires_grad_()
            output = model(leaf)
            output.square().mean().backward()
            outcomes.append((output.detach(), leaf.grad))
        agree(*outcomes)
    agree(*[[b for name, b in model.named_buffers() if "running" in name] for model in (mine, other)])
    with torch.no_grad():
        agree(mine.eval()(x), other.eval()(x))


def small_convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


# Batches


@pytest.mark.parametrize("mixing", [0.0, 0.25, 0.7])
def test_mixup_agrees_for_given_weights(mixing):
    x, y, order = images(), labels(), torch.tensor([3, 1, 0, 5, 2, 4])
    agree(ours.mixup_batch(x, y, mixing=mixing, indices=order), theirs.mixup_batch(x, y, mixing=mixing, indices=order))


@pytest.mark.parametrize("seed", range(3))
def test_mixup_draws_the_same_weights_and_order(replay, seed):
    x, y = images(), labels()
    order = torch.randperm(6)
    mine = ours.mixup_batch(x, y, alpha=0.4, indices=order, generator=replay(seed))
    agree(mine, theirs.mixup_batch(x, y, alpha=0.4, indices=order))


@pytest.mark.parametrize("box", [(2, 3, 7, 11), (0, 0, 12, 16), (4, 4, 4, 4)])
def test_cutmix_agrees_for_given_boxes(box):
    x, y, order = images(), labels(), torch.tensor([3, 1, 0, 5, 2, 4])
    mine = ours.cutmix_batch(x, y, bbox=box, indices=order)
    other = theirs.cutmix_batch(x, y, bbox=(box[0], box[1], box[2], box[3]), indices=order)
    agree(mine[:2], other[:2])
    assert mine[2] == pytest.approx(other[2])


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_cutmix_draws_the_same_boxes_on_square_images(replay, seed, uniform):
    x, y, order = images(height=16), labels(), torch.tensor([3, 1, 0, 5, 2, 4])
    mine = ours.cutmix_batch(x, y, indices=order, uniform_sampling=uniform, generator=replay(seed))
    other = theirs.cutmix_batch(x, y, indices=order, uniform_sampling=uniform)
    agree(mine[:2], other[:2])
    assert mine[2] == pytest.approx(other[2])
    assert mine[3] == tuple(int(edge) for edge in other[3])


def test_cutmix_by_length_cuts_the_length_that_was_asked_for_and_composer_more(replay):
    x, y, order = images(height=16), labels(), torch.arange(6).flip(0)
    boxes = []
    for seed in range(30):
        generator = replay(seed)
        mine = ours.cutmix_batch(x, y, length=0.5, indices=order, generator=generator)[3]
        boxes.append((mine, theirs.cutmix_batch(x, y, length=0.5, indices=order)[3]))
    assert max(box[2] - box[0] for box, _ in boxes) == 8
    assert max(box[2] - box[0] for _, box in boxes) > 8  # its sides are sqrt(1 - 0.25) of the image's


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("holes", "length"), [(1, 0.5), (3, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_cutout_draws_the_same_holes(replay, seed, holes, length, uniform):
    x = images()
    mine = ours.cutout_batch(x, holes, length, uniform, generator=replay(seed))
    agree(mine, theirs.cutout_batch(x, holes, length, uniform))


@pytest.mark.parametrize("p", [(0.15, 0.15), (0.5, 0.0), (0.0, 0.9)])
def test_colout_keeps_the_same_rows_and_columns(p):
    x, masks = images(), torch.randint(0, 4, (6, 12, 16))
    for sample in (x, (x, masks)):
        torch.manual_seed(5)
        mine = ours.colout_batch(sample, *p)
        torch.manual_seed(5)
        agree(mine, theirs.colout_batch(sample, *p))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dense", [False, True])
def test_label_smoothing_agrees(smoothing, dense):
    logits, target = torch.randn(6, 5), labels()
    target = F.one_hot(target, 5).float() if dense else target
    agree(ours.smooth_labels(logits, target, smoothing), theirs.smooth_labels(logits, target, smoothing))


@pytest.mark.parametrize("scale", [0.4, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("resize_targets", [False, True])
def test_resizing_agrees(scale, resize_targets):
    x, y = images(), torch.randint(0, 4, (6, 12, 16))
    agree(
        ours.resize_batch(x, y, scale, "resize", resize_targets),
        theirs.resize_batch(x, y, scale, "resize", resize_targets),
    )


def test_cropping_cuts_windows_of_the_same_size_that_composer_can_draw_too():
    x, y = images(), torch.randint(0, 4, (6, 12, 16))
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(60):
        small, cut = ours.resize_batch(x, y, 0.5, "crop", True, generator=generator)
        other, _ = theirs.resize_batch(x, y, 0.5, "crop", True)
        assert small.shape == other.shape
        place = [(r, c) for r in range(7) for c in range(9) if torch.equal(small, x[..., r : r + 6, c : c + 8])]
        assert torch.equal(cut, y[..., place[0][0] : place[0][0] + 6, place[0][1] : place[0][1] + 8])
        seen.add(place[0])
    assert max(row for row, _ in seen) == 6  # the last window, which Composer never draws


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("scale", [1, 0.5])
def test_selective_backprop_selects_the_same_samples(replay, keep, scale):
    x, y, model = images(12), labels(12), small_convnet().eval()
    mine = ours.select_using_loss(x, y, model, F.cross_entropy, keep, scale, generator=replay(7))
    agree(mine, theirs.select_using_loss(x, y, model, F.cross_entropy, keep, scale))


def test_selective_backprop_is_active_at_the_same_moments():
    for elapsed in (0.0, 0.49, 0.5, 0.7, 0.9, 0.95):
        for batch in range(4):
            for interrupt in (0, 2, 3):
                arguments = (elapsed, batch, 0.5, 0.9, interrupt)
                assert ours.should_selective_backprop(*arguments) == theirs.should_selective_backprop(*arguments)


@pytest.mark.parametrize("length", [4, 7, 20])
@pytest.mark.parametrize("how", [{"truncate": True}, {"truncate": False}, {"preserve_end_of_sequence": True}])
def test_shortened_sequences_agree(length, how):
    mask = (torch.arange(10) < torch.tensor([[10], [5], [3]])).long()
    batch = {
        "input_ids": torch.arange(30).view(3, 10),
        "attention_mask": mask,
        "labels": torch.arange(30).view(3, 10) * 2,
    }
    mine = ours.set_batch_sequence_length(dict(batch), length, **how)
    agree(dict(mine), dict(theirs.set_batch_sequence_length(dict(batch), length, **how)))


# Augmentations


def picture(seed=0):
    from PIL import Image

    rng = numpy.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (20, 26, 3), dtype=numpy.uint8))


ALL_PRIMITIVES = [
    "autocontrast", "equalize", "posterize", "rotate", "solarize", "shear_x", "shear_y", "translate_x", "translate_y", "color",
    "contrast", "brightness", "sharpness", "color_original", "contrast_original", "brightness_original", "sharpness_original",
]  # fmt: skip


@pytest.mark.parametrize("name", ALL_PRIMITIVES)
@pytest.mark.parametrize("seed", range(3))
def test_every_augmentation_gives_the_same_pixels(replay, name, seed):
    from drivetrain.algorithms.utils import primitives as own

    generator = replay(seed)
    mine = getattr(own, name)(picture(), 7, generator)
    assert numpy.array_equal(numpy.asarray(mine), numpy.asarray(getattr(primitives, name)(picture(), 7)))


@pytest.mark.parametrize("which", ["all", "safe", "original"])
@pytest.mark.parametrize("seed", range(3))
def test_randaugment_gives_the_same_pixels(replay, which, seed):
    generator = replay(seed)
    mine = ours.randaugment_image(picture(), 9, 3, which, generator=generator)
    other = theirs.randaugment_image(picture(), 9, 3, primitives.augmentation_sets[which])
    assert numpy.array_equal(numpy.asarray(mine), numpy.asarray(other))


@pytest.mark.parametrize("seed", range(5))
def test_augmix_gives_the_same_pixels_up_to_one_level(replay, seed):
    generator = replay(seed)
    mine = ours.augmix_image(picture(), 5, -1, 3, 1.0, generator=generator)
    other = theirs.augmix_image(picture(), 5, -1, 3, 1.0)
    apart = numpy.abs(numpy.asarray(mine).astype(int) - numpy.asarray(other).astype(int))
    assert apart.max() <= 1  # sums are rounded in another order before they are cut to whole numbers
    assert (apart > 0).mean() < 0.05


# Surgery


@pytest.mark.parametrize("blur_first", [True, False])
@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True)])
def test_blurpool_agrees(blur_first, parts):
    mine, other = operate_on_two(small_convnet(), lambda lib, m: lib.apply_blurpool(m, *parts, blur_first))
    same_passes(mine, other, images())


@pytest.mark.parametrize("stride", [1, 2])
def test_blurring_agrees(stride):
    x = images(channels=4)
    from composer.algorithms.blurpool import blurpool_layers as layers

    agree(ours.blur_2d(x, stride=stride), layers.blur_2d(x, stride=stride))
    agree(ours.blurmax_pool2d(x, 3, 2, padding=1), layers.blurmax_pool2d(x, 3, 2, padding=1))


@pytest.mark.parametrize("latent", [4, 0.25])
def test_squeeze_excite_agrees(latent):
    mine, other = operate_on_two(small_convnet(), lambda lib, m: lib.apply_squeeze_excite(m, latent, 16))
    same_passes(mine, other, images())


@pytest.mark.parametrize("latent", [4, 0.25])
def test_factorized_layers_agree(latent):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 24)
    )
    mine, other = operate_on_two(
        model,
        lambda lib, m: lib.apply_factorization(
            m, min_channels=8, latent_channels=latent, min_features=8, latent_features=latent
        ),
    )
    assert [tuple(p.shape) for p in mine.parameters()] == [tuple(p.shape) for p in other.parameters()]
    for target, source in zip(mine.parameters(), other.parameters()):
        target.data.copy_(source.data)
    same_passes(mine, other, images(channels=16))


def test_a_factorized_matrix_is_at_least_as_close_as_composers():
    from composer.algorithms.factorize.factorize_core import factorize_matrix

    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((64, 12), (12, 10), (10,)))
    y = x @ w + b
    errors = []
    for function in (ours.factorize_matrix, factorize_matrix):
        found = function(x, y, w, bias=b, rank=4, n_iters=30)
        assert (found.Wa.shape, found.Wb.shape, found.bias.shape, found.rank) == ((12, 4), (4, 10), (10,), 4)
        errors.append(float((x @ found.Wa @ found.Wb + found.bias - y).square().mean()))
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] <= errors[1] * (1 + 1e-9)  # the bias is fitted with the factors, not once at the end


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ghost_batchnorm_agrees(size):
    mine, other = operate_on_two(small_convnet(), lambda lib, m: lib.apply_ghost_batchnorm(m, size))
    same_passes(mine, other, images(8))


def test_ghost_batchnorm_evaluates_one_image_and_composer_does_not():
    mine, other = operate_on_two(small_convnet(), lambda lib, m: lib.apply_ghost_batchnorm(m, 4))
    assert mine.eval()(images(1)).shape == (1, 5)
    with pytest.raises(ValueError, match="batch size"):
        other.eval()(images(1))


@pytest.mark.parametrize("ignored", [0, 1])
def test_weight_standardization_agrees(ignored):
    mine, other = operate_on_two(small_convnet(), lambda lib, m: lib.apply_weight_standardization(m, ignored))
    same_passes(mine, other, images())


@pytest.mark.parametrize("distribution", ["linear", "uniform"])
@pytest.mark.parametrize("method", ["block", "sample"])
def test_stochastic_depth_evaluates_alike(method, distribution):
    from torchvision.models import ResNet
    from torchvision.models.resnet import Bottleneck

    torch.manual_seed(0)
    model = ResNet(Bottleneck, [1, 2, 1, 1], num_classes=5)
    mine, other = operate_on_two(
        model, lambda lib, m: lib.apply_stochastic_depth(m, "ResNetBottleneck", method, 0.4, distribution)
    )
    with torch.no_grad():
        agree(mine.eval()(images(2, height=32, width=32)), other.eval()(images(2, height=32, width=32)))
    if method == "sample":  # the draws of a training pass come from torch's generator on both sides
        same_passes(mine, other, images(4, height=32, width=32), passes=1)


def test_gyro_dropout_agrees_given_the_same_masks(replay, monkeypatch):
    layers = [lib.apply_gyro_dropout for lib in (ours, theirs)]
    models = [nn.Sequential(nn.Dropout(0.5)) for _ in layers]
    for apply, model in zip(layers, models):
        apply(model, 10, 10, 0.5, 4, 2)
    x = torch.randn(8, 6)
    models[0](x)
    monkeypatch.setattr(numpy.random, "choice", lambda sigma, tau: models[0][0].picks.numpy())
    models[1][0].training_step = 1
    models[1][0].iter_num = 1
    models[1][0].preselect_masks = models[0][0].masks.float()
    kept = (models[0][0].masks[models[0][0].picks].float()).repeat_interleave(4, 0)
    agree(models[1](x), x * kept / 0.5)
    models[0][0]._count = 1
    agree(models[0](x), x * kept / 0.5)


@pytest.mark.parametrize("norm", ["layernorm", "groupnorm"])
def test_low_precision_norms_agree_without_autocast_and_ours_also_acts_on_the_cpu(norm):
    layer = nn.LayerNorm(12) if norm == "layernorm" else nn.GroupNorm(3, 12)
    nn.init.normal_(layer.weight)
    model = nn.Sequential(nn.Linear(12, 12), layer)
    precision = composer.core.Precision.AMP_BF16
    mine, other = copy.deepcopy(model), copy.deepcopy(model)
    getattr(ours, f"apply_low_precision_{norm}")(mine, "amp_bf16")
    getattr(theirs, f"apply_low_precision_{norm}")(other, precision)
    x = torch.randn(6, 12)
    agree(mine(x), other(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert mine(x).dtype is torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear_units_agree_on_bert(bias):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=5
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    mine, other = operate_on_two(
        model,
        lambda lib, m: lib.apply_gated_linear_units(
            m, torch.optim.SGD(m.parameters(), lr=0.1), F.gelu, gated_layer_bias=bias, non_gated_layer_bias=bias
        ),
    )
    with torch.no_grad():
        for target, source in zip(mine.parameters(), other.parameters(), strict=True):
            assert target.shape == source.shape
            target.copy_(source)
        tokens = torch.randint(20, (3, 7))
        agree(mine.eval()(tokens).logits, other.eval()(tokens).logits)


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 25])
def test_alibi_slopes_agree(heads):
    from composer.algorithms.alibi.attention_surgery_functions.utils import _get_alibi_head_slopes

    from drivetrain.algorithms.alibi.algorithm import alibi_slopes

    assert alibi_slopes(heads) == pytest.approx(_get_alibi_head_slopes(heads))


def test_channels_last_agrees():
    mine, other = operate_on_two(small_convnet(), lambda lib, m: lib.apply_channels_last(m))
    same_passes(mine, other, images())
    for given, expected in zip(mine.parameters(), other.parameters()):
        assert given.stride() == expected.stride()


# Gradients, averages, freezing


@pytest.mark.parametrize(
    ("kind", "threshold"), [("norm", 0.5), ("value", 0.02), ("adaptive", 0.05), ("adaptive", 10.0)]
)
def test_clipped_gradients_agree(kind, threshold):
    results = []
    for library in (ours, theirs):
        model = small_convnet()
        F.cross_entropy(model(images()), labels()).backward()
        library.apply_gradient_clipping(model, kind, threshold, fsdp_enabled=False)
        results.append([parameter.grad for parameter in model.parameters()])
    agree(*results)


@pytest.mark.parametrize("smoothing", [0.0, 0.9, 0.99])
def test_moving_averages_agree_and_ours_keeps_counters_whole(smoothing):
    averages = []
    for library in (ours, theirs):
        model, average = small_convnet(), small_convnet()
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        for _ in range(3):
            model(images())
            library.compute_ema(model, average, smoothing)
        averages.append(average)
    mine, other = averages
    agree(list(mine.parameters()), list(other.parameters()))
    for name, buffer in mine.named_buffers():
        if buffer.is_floating_point():
            agree(buffer, other.get_buffer(name))
        else:
            assert int(buffer) == 3  # an exact copy, where Composer averages the count


@pytest.mark.parametrize("elapsed", [0.2, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("level", [0.5, 1.0])
def test_frozen_layers_agree(elapsed, level):
    results = []
    for library in (ours, theirs):
        model = small_convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        depth = library.freeze_layers(model, optimizer, elapsed, 0.4, level)
        left = [len(group["params"]) for group in optimizer.param_groups]
        results.append((depth, left, [parameter.requires_grad for parameter in model.parameters()]))
    assert results[0] == results[1]


# Optimizers and schedules


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("DecoupledSGDW", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
        ("DecoupledSGDW", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}),
        ("DecoupledAdamW", {"lr": 1e-2, "weight_decay": 1e-4}),
        ("DecoupledAdamW", {"lr": 1e-2, "weight_decay": 1e-4, "amsgrad": True}),
    ],
)
def test_decoupled_optimizers_step_alike(name, arguments):
    import drivetrain.optim

    results = []
    for library in (drivetrain.optim, composer.optim):
        torch.manual_seed(
            0
        )  # without batch norm, whose neighbours have gradients of pure rounding that Adam would enlarge
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 16, 16), nn.Tanh(), nn.Linear(16, 5))
        optimizer = getattr(library, name)(model.parameters(), **arguments)
        for step in range(5):
            for group in optimizer.param_groups:
                group["lr"] = arguments["lr"] * (1 - step / 10)
            optimizer.zero_grad()
            F.cross_entropy(model(images(seed=step)), labels()).backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


SCHEDULES = {
    "StepScheduler": [{"step_size": "2ep", "gamma": 0.5}, {"step_size": "7ba"}],
    "MultiStepScheduler": [{"milestones": ["2ep", "25ba", "0.9dur"]}],
    "ConstantScheduler": [{"alpha": 0.3, "t_max": "0.5dur"}, {}],
    "LinearScheduler": [{}, {"alpha_i": 0.2, "alpha_f": 2.0, "t_max": "3ep"}],
    "ExponentialScheduler": [{"gamma": 0.9}, {"gamma": 0.9, "decay_period": "10ba"}],
    "CosineAnnealingScheduler": [{}, {"t_max": "20ba", "alpha_f": 0.1}],
    "CosineAnnealingWarmRestartsScheduler": [{"t_0": "10ba", "t_mult": 2.0}, {"t_0": "1ep", "alpha_f": 0.1}],
    "PolynomialScheduler": [{"power": 2.0}, {"power": 0.5, "alpha_f": 0.1}],
    "MultiStepWithWarmupScheduler": [{"t_warmup": "8ba", "milestones": ["2ep", "4ep"]}],
    "ConstantWithWarmupScheduler": [{"t_warmup": "8ba", "alpha": 0.5}],
    "LinearWithWarmupScheduler": [{"t_warmup": "8ba", "alpha_i": 0.5, "alpha_f": 0.1}],
    "CosineAnnealingWithWarmupScheduler": [{"t_warmup": "8ba", "alpha_f": 0.1}, {"t_warmup": "1ep"}],
    "PolynomialWithWarmupScheduler": [{"t_warmup": "8ba", "power": 3.0}],
}


@pytest.mark.parametrize(("name", "arguments"), [(name, each) for name, sets in SCHEDULES.items() for each in sets])
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_schedules_agree_at_every_batch(name, arguments, ratio):
    import drivetrain.optim
    from drivetrain.context.state import State

    per_epoch, epochs = 10, 5
    end = f"{int(epochs * ratio)}ep"
    device = composer.devices.DeviceCPU()
    other = composer.core.State(
        model=nn.Linear(1, 1), rank_zero_seed=0, run_name="peer", device=device, max_duration=end, dataloader=[0] * per_epoch,
        dataloader_label="train",
    )  # fmt: skip
    mine = State(max_duration=end)
    mine.set_dataloader([0] * per_epoch, "train", per_epoch)
    own, peer = (getattr(library, name)(**arguments) for library in (drivetrain.optim, composer.optim))
    for batch in range(int(epochs * ratio) * per_epoch):
        assert own(mine, ratio) == pytest.approx(peer(other, ratio), rel=1e-9, abs=1e-12), f"batch {batch}"
        mine.clock.load_state_dict(mine.timestamp.to_next_batch(samples=4).state_dict())
        other.timestamp = other.timestamp.to_next_batch(samples=4)
        if (batch + 1) % per_epoch == 0:
            mine.clock.load_state_dict(mine.timestamp.to_next_epoch().state_dict())
            other.timestamp = other.timestamp.to_next_epoch()


# Whole runs


class PeerModel(composer.models.ComposerModel):
    """A plain model with its loss, in the form Composer asks for."""

    def __init__(self):
        super().__init__()
        self.module = small_convnet()

    def forward(self, batch):
        return self.module(batch[0])

    def loss(self, outputs, batch, *args, **kwargs):
        return F.cross_entropy(outputs, batch[1])


def loader_of(rows):
    return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=False)


def run_of_composer(algorithms, rows):
    model = PeerModel()
    trainer = composer.Trainer(
        model=model,
        train_dataloader=loader_of(rows),
        max_duration="12ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        algorithms=algorithms,
        device="cpu",
        progress_bar=False,
        console_log_interval="100ep",
    )
    trainer.fit()
    trainer.close()
    return model.module


def run_of_ours(algorithms, rows):
    from drivetrain import Trainer

    model = small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, F.cross_entropy, optimizer, callbacks=(), algorithms=algorithms, device="cpu")
    trainer.train(loader_of(rows), max_duration="12ba")
    return model


RUNS = {
    "nothing": lambda lib: [],
    "label smoothing": lambda lib: [lib.LabelSmoothing(0.1)],
    "ghost batchnorm": lambda lib: [lib.GhostBatchNorm(4)],
    "blurpool": lambda lib: [lib.BlurPool()],
    "weight standardization": lambda lib: [lib.WeightStandardization()],
    "gradient clipping": lambda lib: [lib.GradientClipping("norm", 0.1)],
    "progressive resizing": lambda lib: [lib.ProgressiveResizing(delay_fraction=0.2)],
    "sharpness-aware": lambda lib: [lib.SAM(rho=0.05)],
}


# The end is given in batches: of a run in epochs Composer knows only whole ones, and resizes later than asked for.
@pytest.mark.parametrize("name", RUNS)
def test_whole_runs_end_with_the_same_weights(name):
    import composer.algorithms

    import drivetrain.algorithms

    rows = torch.utils.data.TensorDataset(images(48), labels(48))
    finals = []
    for run, library in ((run_of_ours, drivetrain.algorithms), (run_of_composer, composer.algorithms)):
        torch.manual_seed(0)
        finals.append(list(run(RUNS[name](library), rows).parameters()))
    assert math.isfinite(sum(float(parameter.abs().sum()) for parameter in finals[0]))
    torch.testing.assert_close(*finals, rtol=1e-4, atol=1e-5)

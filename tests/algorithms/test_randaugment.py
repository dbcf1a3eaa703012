"""RandAugment and AugMix: on single images, and as a part of the training data alone."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from drivetrain.algorithms.augmix import AugmentAndMixTransform, AugMix, augmix_image
from drivetrain.algorithms.randaugment import RandAugment, RandAugmentTransform, randaugment, randaugment_image
from drivetrain.algorithms.utils import augmentation_sets
from drivetrain.algorithms.utils.datasets import Steps, with_transform
from drivetrain.algorithms.utils.primitives import as_pil, as_tensor
from drivetrain.core.event import Event
from drivetrain.data.loader import SmartDataLoader
from tests.algorithms.tasks import conv_trainer, image_data, make_state, run, same, train, weights

FUNCTIONS = [randaugment_image, augmix_image]


def picture(size=16):
    return (torch.rand(3, size, size, generator=torch.Generator().manual_seed(2)) * 255).to(torch.uint8)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_generator_gives_the_same_image(function):
    image, before = picture(), torch.get_rng_state()
    first, second = (function(image, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    other = function(image, generator=torch.Generator().manual_seed(6))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_pil_images_stay_pil_images_and_agree_with_tensors(function):
    image_module = pytest.importorskip("PIL.Image")
    values = picture()
    image = as_pil(values, "RGB")
    close = 0
    for seed in range(12):
        changed = function(image, generator=torch.Generator().manual_seed(seed))
        assert isinstance(changed, image_module.Image) and changed.size == image.size and changed.mode == "RGB"
        as_values = function(values, generator=torch.Generator().manual_seed(seed))
        close += (as_tensor(changed).int() - as_values.int()).abs().float().mean() < 2
    assert close >= 11


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_image_of_a_batch_is_drawn_on_its_own(function):
    batch = picture().expand(4, -1, -1, -1)
    changed = function(batch, generator=torch.Generator().manual_seed(0))
    assert changed.shape == batch.shape and len({one.numpy().tobytes() for one in changed}) > 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_normalised_images_are_refused(function):
    with pytest.raises(ValueError, match="Augment before normalizing"):
        function(torch.randn(3, 8, 8) * 3)


def test_depth_zero_changes_nothing():
    image = picture()
    assert torch.equal(randaugment_image(image, depth=0), image)


def test_augmix_mixes_chains_with_the_image(monkeypatch):
    from drivetrain.algorithms import augmix

    monkeypatch.setattr(augmix, "find_set", lambda name, who: (lambda image, level: 255 - image,))
    monkeypatch.setattr(augmix, "draw_weights", lambda count, alpha, generator: [0.25, 0.75])
    monkeypatch.setattr(augmix, "draw_beta", lambda alpha, generator: 0.4)
    image = picture()
    mixed = augmix_image(image, width=2, depth=1)
    expected = (0.6 * image.double() + 0.4 * (255 - image).double()).floor()
    assert (mixed.double() - expected).abs().max() <= 1  # float sums may fall just below a whole number
    twice = augmix_image(image.float() / 255, width=2, depth=1)
    assert twice.dtype == torch.float32


def test_without_an_image_it_is_a_transform():
    transform = randaugment(severity=4)
    assert isinstance(transform, RandAugmentTransform) and transform.severity == 4
    assert randaugment(picture()).shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: RandAugment(severity=11), ValueError),
        (lambda: RandAugment(severity=-1), ValueError),
        (lambda: RandAugment(depth=-1), ValueError),
        (lambda: RandAugment(augmentation_set="al"), KeyError),
        (lambda: RandAugmentTransform(severity=11), ValueError),
        (lambda: AugMix(width=0), ValueError),
        (lambda: AugMix(alpha=0), ValueError),
        (lambda: AugMix(severity=10.5), ValueError),
        (lambda: AugmentAndMixTransform(augmentation_set="none"), KeyError),
    ],
)
def test_bad_settings_are_refused(make, kind):
    with pytest.raises(kind):
        make()


class Step:
    def __init__(self, name):
        self.name = name

    def __call__(self, image):
        return image


class ToTensor(Step):
    """Has the name of torchvision's class, which is what counts."""


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class Pictures(Dataset):
    def __init__(self, transform=None, rows=24):
        self.transform, self.data = transform, (image_data(rows).tensors[0] * 255).to(torch.uint8)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = self.data[index]
        image = image if self.transform is None else self.transform(image)
        return image.float() / 255, index % 3


def test_the_transform_stands_before_the_first_step_that_makes_tensors():
    steps = [Step("crop"), ToTensor("to tensor"), Step("erase")]
    data, added = Pictures(Compose(steps)), Step("added")
    changed = with_transform(data, added)
    assert [step.name for step in changed.transform.transforms] == ["crop", "added", "to tensor", "erase"]
    assert data.transform.transforms is steps and len(steps) == 3 and changed.data is data.data


def test_transforms_that_are_no_list():
    added = Step("added")
    assert with_transform(Pictures(), added).transform is added
    single = with_transform(Pictures(ToTensor("to tensor")), added).transform
    assert isinstance(single, Steps) and [step.name for step in single.transforms] == ["added", "to tensor"]
    last = with_transform(Pictures(Step("crop")), added).transform
    assert [step.name for step in last.transforms] == ["crop", "added"]


def test_torchvisions_second_place_for_a_transform_is_changed_too():
    data = Pictures(Compose([ToTensor("to tensor")]))
    data.transforms = copy.copy(Compose([]))
    data.transforms.transform = data.transform
    changed = with_transform(data, Step("added"))
    assert changed.transforms.transform is changed.transform and data.transforms.transform is data.transform


def test_datasets_without_a_transform_are_wrapped():
    added = lambda image: image + 1
    pairs = with_transform([(torch.zeros(1, 2, 2), 5)], added)
    assert pairs[0][0].eq(1).all() and pairs[0][1] == 5 and len(pairs) == 1
    named = with_transform([{"label": 1, "image": torch.zeros(1, 2, 2)}], added)
    assert named[0]["image"].eq(1).all() and named[0]["label"] == 1
    assert with_transform([torch.zeros(1, 2, 2)], added)[0].eq(1).all()
    part = with_transform(Subset(Pictures(), [3]), Step("added"))
    assert part.dataset.transform.name == "added"
    with pytest.raises(TypeError, match="stream"):
        with_transform(Stream(), added)


@pytest.mark.parametrize("make", [RandAugment, AugMix])
def test_evaluation_on_the_same_dataset_sees_plain_images(make):
    data = Pictures()
    trainer = conv_trainer(make())
    shared = data[0][0].clone()
    train(trainer, data, eval_dataset=data, num_epochs=1, eval_dataloader_kwargs={"num_workers": 0})
    loader, evaluation = trainer._train_dataloader, trainer._eval_dataloader
    assert evaluation.dataset is data and data.transform is None and torch.equal(data[0][0], shared)
    assert loader.dataset is not data and loader.dataset.transform is trainer._algorithms[0]._transform


@pytest.mark.parametrize("loader_class", [SmartDataLoader, DataLoader])
def test_a_ready_loader_is_changed_once_over_several_runs(loader_class):
    data = Pictures()
    loader = loader_class(data, batch_size=6, shuffle=True)
    trainer = conv_trainer(RandAugment(), RandAugment(severity=1))
    for _ in range(2):
        trainer.train(loader, num_epochs=1)
    assert [step.severity for step in loader.dataset.transform.transforms] == [9, 1]
    assert loader.dataset.data is data.data and data.transform is None


def test_tensor_data_can_be_augmented_too():
    trainer = conv_trainer(RandAugment())
    train(trainer, image_data())
    assert not torch.equal(trainer.state.train_dataloader.dataset[0][0], image_data()[0][0])
    with pytest.raises(TypeError, match="1 or 3 channels"):
        train(conv_trainer(RandAugment()), TensorDataset(torch.rand(24, 2, 8, 8), torch.zeros(24).long()))


def test_the_order_of_samples_stays_and_the_seed_decides():
    runs = []
    for _ in range(2):
        trainer = conv_trainer(RandAugment(augmentation_set="safe"))
        train(trainer, Pictures())
        runs.append(weights(trainer.model))
    assert same(*runs)


def test_a_loader_of_unknown_kind_is_refused():
    state = make_state(train_dataloader=iter(()))
    with pytest.raises(ValueError, match="cannot be reached"):
        run(RandAugment(), state, Event.FIT_START)


def darken(image, level):
    return image // 2 + int(level)


@pytest.mark.parametrize("function", [randaugment_image, augmix_image])
def test_a_set_may_be_functions_or_a_set_itself(function):
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    named, given = (
        function(image, augmentation_set=chosen, generator=torch.Generator().manual_seed(3))
        for chosen in ("safe", augmentation_sets["safe"])
    )
    assert torch.equal(named, given)
    own = function(image, 3, 1, augmentation_set=[darken])
    assert torch.equal(own, darken(image, 3)) or function is augmix_image
    assert not torch.equal(own, image)
    for wrong in ([], [1], None):
        with pytest.raises(TypeError, match="augmentation_set"):
            function(image, augmentation_set=wrong)


@pytest.mark.parametrize("cls", [RandAugment, RandAugmentTransform, AugMix, AugmentAndMixTransform])
def test_classes_take_functions_too_and_show_their_names(cls):
    for chosen in ([darken], augmentation_sets["safe"], "safe"):
        made = cls(augmentation_set=chosen)
        assert made.augmentation_set is chosen
    if hasattr(made, "extra_repr"):
        assert "augmentation_set=[darken]" in repr(cls(augmentation_set=[darken]))


def test_sets_of_functions_reach_the_training_data_and_travel_to_workers():
    transform = RandAugmentTransform(4, 1, [darken, *augmentation_sets["safe"]])
    again = pickle.loads(pickle.dumps(transform))
    assert again.augmentation_set == transform.augmentation_set

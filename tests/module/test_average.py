import copy
import io

import pytest
import torch
from torch import nn

from drivetrain.core.errors import StateError
from drivetrain.module.average import AveragedWeights
from tests.module.models import Shell


def small_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def disturb(model, step):
    """Change all weights and buffers, as a training step does."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor))
            else:
                tensor.add_(1)


def snapshot(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def shadow_of(average):
    return {name: value.clone() for name, value in average.named_tensors()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_lerp_is_the_exponential_average_of_torchs_own_averaged_model():
    model = small_model()
    reference = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    average = AveragedWeights(model)
    reference.update_parameters(model)  # torch's first update is a copy; ours was made with the shadow
    for step in range(4):
        disturb(model, step)
        reference.update_parameters(model)
        average.update_lerp(model, 0.1)
    expected = {name: value for name, value in reference.module.state_dict().items() if "num_batches" not in name}
    for name, value in expected.items():
        torch.testing.assert_close(dict(average.named_tensors())[name], value)


def test_lerp_matches_a_float64_loop_and_copies_counters():
    model = small_model()
    average = AveragedWeights(model)
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for step in range(5):
        disturb(model, step)
        average.update_lerp(model, 0.25)
        for name, value in model.state_dict().items():
            expected[name] = value.double() if "num" in name else expected[name] * 0.75 + value.double() * 0.25
    for name, value in average.named_tensors():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert dict(average.named_tensors())["1.num_batches_tracked"].item() == 5 and average.num_updates == 5


def test_mean_gives_every_update_the_same_weight_and_ignores_the_start():
    model = small_model()
    average = AveragedWeights(model)
    seen = []
    for step in range(4):
        disturb(model, step)
        seen.append(snapshot(model))
        average.update_mean(model)
    for name, value in average.named_tensors():
        expected = seen[-1][name] if "num" in name else torch.stack([s[name] for s in seen]).mean(0)
        torch.testing.assert_close(value, expected)


def test_swap_exchanges_in_place_and_back_without_changing_identity_or_address():
    model = small_model()
    average = AveragedWeights(model)
    disturb(model, 0)
    training, shadow = snapshot(model), shadow_of(average)
    tensors = [*model.parameters(), *model.buffers()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    average.swap(model)
    assert average.is_swapped and equal(snapshot(model), shadow)
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()]))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    average.swap(model)
    assert not average.is_swapped and equal(snapshot(model), training) and equal(shadow_of(average), shadow)


def test_swap_in_small_chunks_is_the_same(monkeypatch):
    monkeypatch.setattr("drivetrain.module.average._SWAP_BYTES", 40)
    test_swap_exchanges_in_place_and_back_without_changing_identity_or_address()


def test_nothing_is_updated_saved_or_copied_while_swapped():
    model = small_model()
    average = AveragedWeights(model)
    average.swap(model)
    for action in (
        lambda: average.update_lerp(model, 0.1),
        average.state_dict,
        lambda: average.copy_to(model),
    ):
        with pytest.raises(StateError, match="swap"):
            action()


def test_half_precision_weights_are_averaged_in_float32():
    model = small_model(dtype=torch.bfloat16)
    average = AveragedWeights(model)
    before = shadow_of(average)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for _ in range(10):
        average.update_lerp(model, 1e-3)  # far below the resolution of bfloat16
    shadow = shadow_of(average)
    moved = shadow["0.weight"] - before["0.weight"]
    assert shadow["0.weight"].dtype == torch.float32
    torch.testing.assert_close(moved, torch.full_like(moved, 1 - 0.999**10), rtol=0.02, atol=1e-4)
    training = snapshot(model)
    average.swap(model)
    assert model[0].weight.dtype == torch.bfloat16 and torch.equal(model[0].weight, shadow["0.weight"].bfloat16())
    average.swap(model)
    assert equal(snapshot(model), training) and equal(shadow_of(average), shadow)  # not rounded by the way


def test_frozen_parameters_take_no_memory_until_they_are_trained():
    model = small_model()
    model[0].requires_grad_(False)
    average = AveragedWeights(model)
    assert "0.weight" not in dict(average.named_tensors())
    average.update_lerp(model, 0.5)
    model[0].requires_grad_(True)
    average.update_lerp(model, 0.5)
    start = dict(average.named_tensors())["0.weight"].clone()
    disturb(model, 1)
    average.update_lerp(model, 0.5)
    torch.testing.assert_close(dict(average.named_tensors())["0.weight"], (start + model[0].weight.detach()) / 2)
    fresh_model = small_model()
    fresh_model[0].requires_grad_(False)
    fresh = AveragedWeights(fresh_model)
    fresh.load_state_dict(average.state_dict())
    assert equal(shadow_of(fresh), shadow_of(average))


def test_tied_parameters_are_averaged_once_and_stay_tied():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embedding"].weight
    average = AveragedWeights(model)
    assert list(dict(average.named_tensors())) == ["embedding.weight"]
    with torch.no_grad():
        model["head"].weight.add_(1)
    average.update_lerp(model, 0.5)
    average.swap(model)
    assert model["head"].weight is model["embedding"].weight


def test_buffers_that_are_not_saved_are_not_averaged():
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    average = AveragedWeights(model)
    model.cache = torch.zeros(7)  # caches may grow
    average.update_lerp(model, 0.5)
    assert list(dict(average.named_tensors())) == ["weight", "bias"]


def test_the_average_is_the_same_seen_through_a_wrapper():
    model, twin = small_model(), small_model()
    plain, wrapped = AveragedWeights(model), AveragedWeights(Shell(twin))
    disturb(model, 0)
    disturb(twin, 0)
    plain.update_lerp(model, 0.5)
    wrapped.update_lerp(Shell(twin), 0.5)
    wrapped.update_lerp(twin, 0.5)
    plain.update_lerp(model, 0.5)
    assert equal(shadow_of(plain), shadow_of(wrapped))


def test_a_replaced_parameter_is_noticed():
    model = small_model()
    average = AveragedWeights(model)
    average.update_lerp(model, 0.5)
    model[0].weight = nn.Parameter(torch.ones(4, 3))
    average.update_lerp(model, 1.0)
    assert torch.equal(dict(average.named_tensors())["0.weight"], torch.ones(4, 3))


@pytest.mark.parametrize("width", [4, 6])
def test_replaced_and_added_layers_are_noticed(width):
    model = small_model()
    average = AveragedWeights(model)
    average.update_lerp(model, 0.5)
    model[2] = nn.Linear(4, width)
    model.append(nn.Linear(width, 1))
    average.update_lerp(model, 1.0)
    assert equal(shadow_of(average), snapshot(model))
    del model[3]
    disturb(model, 0)
    average.swap(model)
    average.swap(model)
    assert "3.weight" not in shadow_of(average)


def test_masks_are_copied_and_complex_weights_averaged():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    model.register_buffer("pattern", torch.eye(2).to_sparse())
    model.register_buffer("packed", torch.ones(2).to(torch.float8_e4m3fn))
    model.turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    average = AveragedWeights(model)
    with torch.no_grad():
        model.turn.add_(1 + 2j)
    average.update_lerp(model, 0.5)
    average.update_mean(model)
    assert torch.equal(shadow_of(average)["mask"], model.mask)
    torch.testing.assert_close(shadow_of(average)["turn"], torch.full((2,), 0.75 + 1.5j))
    average.swap(model)
    average.swap(model)
    assert torch.equal(model.mask, torch.full((2, 2), -torch.inf).triu(1))


def test_state_survives_a_file_and_continues_exactly():
    model = small_model()
    average = AveragedWeights(model)
    disturb(model, 0)
    average.update_mean(model)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    restored = AveragedWeights(small_model(seed=9))
    restored.load_state_dict(torch.load(file, weights_only=True))
    disturb(model, 1)
    for one in (average, restored):
        one.update_mean(model)
    assert equal(shadow_of(average), shadow_of(restored)) and restored.num_updates == 2


def test_a_state_that_does_not_fit_is_refused_with_names():
    average = AveragedWeights(nn.Linear(2, 2))
    before = shadow_of(average)
    with pytest.raises(StateError) as caught:
        average.load_state_dict({"num_updates": 1, "shadow": {"weigth": torch.ones(1), "bias": torch.ones(3)}})
    text = str(caught.value)
    assert "weight: missing" in text and "nearest: weight" in text and "given shape (3,), expected (2,)" in text
    assert equal(shadow_of(average), before)


def test_copies_are_independent_and_copy_to_fills_another_model():
    model = small_model()
    average = AveragedWeights(model)
    average.update_lerp(model, 0.5)
    twin = copy.deepcopy(average)
    disturb(model, 0)
    twin.update_lerp(model, 0.5)
    assert not equal(shadow_of(average), shadow_of(twin))
    target = small_model(seed=5)
    twin.copy_to(target)
    assert equal(snapshot(target), shadow_of(twin))


def test_the_shadow_moves():
    average = AveragedWeights(nn.Linear(2, 2)).to("meta")
    assert all(tensor.is_meta for _, tensor in average.named_tensors())

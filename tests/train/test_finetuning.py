"""Freezing groups of layers."""

import pytest
import torch
from torch import nn

from drivetrain.train.finetuning import BN_MODULES, ModelFreezer, _module_is_batch_norm, restore_frozen_modes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.input = nn.Linear(4, 4)
        self.block_1 = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.block_2 = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
        self.output_1 = nn.Linear(4, 2)
        self.output_2 = nn.Linear(4, 2)


def frozen_names(model):
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def group_flags(freezer):
    return [group.is_frozen for group in freezer.get_layer_groups()]


def test_everything_is_unfrozen_first():
    model = Net().requires_grad_(False)
    freezer = ModelFreezer(model)
    assert not frozen_names(model)
    assert len(freezer.get_trainable_parameters()) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("given", "expected"),
    [((0, 4), (0, 4)), ((4, 0), (0, 4)), ((-2, -1), (3, 4)), ((-1, -2), (3, 4)), ((0, -1), (0, 4)), ((2, 2), (2, 2))],
)
def test_indexes_may_be_negative_or_reversed(given, expected):
    assert ModelFreezer(Net())._convert_idxs(*given) == expected


def test_an_index_out_of_range_names_the_groups():
    with pytest.raises(ValueError, match=r"layer group 5 is out of range.*input, block_1, block_2, output_1, output_2"):
        ModelFreezer(Net()).freeze(0, 5)
    with pytest.raises(ValueError, match="layer group -2 is out of range"):
        ModelFreezer(nn.Sequential(nn.Linear(2, 2))).freeze()  # all but the last of one group


def test_a_group_knows_its_index_from_both_ends():
    assert [group.layer_group_idx for group in ModelFreezer(Net()).get_layer_groups()] == [
        (0, -5), (1, -4), (2, -3), (3, -2), (4, -1),
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "last"), [(0, 2), (0, 4), (1, 3)])
def test_freezing_covers_both_ends_and_nothing_else(first, last):
    model = Net()
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(first, last)
    assert group_flags(freezer) == [first <= index <= last for index in range(5)]
    for group in freezer.get_layer_groups():
        assert all(parameter.requires_grad is not group.is_frozen for parameter in group.module.parameters())


def test_by_default_all_but_the_last_group_is_frozen_and_batch_norms_are_left():
    model = Net()
    ModelFreezer(model).freeze()
    assert frozen_names(model) == {
        "input.weight", "input.bias", "block_1.0.weight", "block_1.0.bias", "block_2.0.weight", "block_2.0.bias",
        "block_2.2.0.weight", "block_2.2.0.bias", "output_1.weight", "output_1.bias",
    }  # fmt: skip


def test_parameters_of_the_model_itself_are_never_frozen():
    model = Net()
    ModelFreezer(model, freeze_batch_norms=True).freeze(0, -1)
    assert model.scale.requires_grad


def test_parameters_beside_children_are_frozen_too():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    ModelFreezer(model).freeze()
    assert not model[0].in_proj_weight.requires_grad
    assert not model[0].out_proj.weight.requires_grad
    assert model[1].weight.requires_grad


def test_layers_are_leaves_and_modules_that_own_parameters():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.ReLU())
    kinds = [type(layer.module).__name__ for layer in ModelFreezer(model).get_layers()]
    assert kinds[:2] == ["MultiheadAttention", "NonDynamicallyQuantizableLinear"]
    assert kinds[-1] == "ReLU"
    assert "TransformerEncoderLayer" not in kinds


def test_unfreezing_returns_what_became_trainable_in_the_models_order():
    model = Net()
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(0, -2)
    groups = freezer.get_layer_groups()
    returned = freezer.unfreeze()
    assert set(returned) == {0, 1, 2, 3}
    for index, content in returned.items():
        expected = list(groups[index].module.parameters())
        assert [id(parameter) for parameter in content["params"]] == [id(parameter) for parameter in expected]
    assert freezer.unfreeze() == {}


def test_unfrozen_parameters_fit_an_optimizer():
    model = Net()
    freezer = ModelFreezer(model)
    freezer.freeze()
    optimizer = torch.optim.SGD(freezer.get_trainable_parameters(), lr=0.1)
    for group in freezer.unfreeze(-2, -3).values():
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 3


def test_freezing_in_eval_mode_freezes_and_lasts_into_the_next_epoch():
    model = Net().train()
    freezer = ModelFreezer(model)
    freezer.freeze(0, 2, set_modules_as_eval=True)
    assert "block_2.2.0.weight" in frozen_names(model)
    model.train()
    restore_frozen_modes(model)
    assert not model.block_2[2][1].training  # dropout
    assert not model.block_2.training  # a container whose forward may look at its own flag
    assert model.block_2[1].training  # a batch norm that is not frozen goes on
    assert model.output_1.training


def test_freezing_without_eval_mode_leaves_the_modes():
    model = Net().train()
    ModelFreezer(model).freeze()
    restore_frozen_modes(model)
    assert all(module.training for module in model.modules())


def test_frozen_batch_norms_are_put_in_eval_mode_when_asked_for():
    model = Net().train()
    ModelFreezer(model, freeze_batch_norms=True).freeze(set_modules_as_eval=True)
    assert not model.block_1[1].training
    assert not model.block_1[1].weight.requires_grad


def test_unfreezing_puts_modules_back_into_training_mode_for_good():
    model = Net().train()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    freezer.unfreeze()
    restore_frozen_modes(model)
    assert all(module.training for module in model.modules())


def test_unfreezing_may_leave_the_modes():
    model = Net().train()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    freezer.unfreeze(set_modules_as_training=False)
    assert not frozen_names(model)
    assert not model.input.training


def test_eval_mode_can_be_asked_for_after_freezing():
    model = Net().train()
    freezer = ModelFreezer(model)
    freezer.freeze()
    freezer.freeze(set_modules_as_eval=True)
    assert not model.input.training


def test_a_half_frozen_layer_is_named():
    model = Net()
    freezer = ModelFreezer(model)
    model.block_1[0].bias.requires_grad = False
    with pytest.raises(ValueError, match=r"layer 'block_1.0' \(Linear\) is partly frozen"):
        freezer.get_layers()


def test_a_layer_without_parameters_is_frozen_when_it_is_in_eval_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)).train()
    freezer = ModelFreezer(model)
    assert [layer.is_frozen for layer in freezer.get_layers()] == [False, False, False]
    freezer.freeze(set_modules_as_eval=True)
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, True, False]


def test_a_wrapped_model_is_looked_through():
    model = nn.DataParallel(Net())
    freezer = ModelFreezer(model)
    assert freezer.num_groups == 5


def test_batch_norms_are_recognised():
    assert _module_is_batch_norm(nn.BatchNorm2d(2))
    assert not _module_is_batch_norm(nn.LayerNorm(2))
    assert nn.SyncBatchNorm in BN_MODULES


def test_integer_parameters_are_left_alone():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.body.packed = nn.Parameter(torch.arange(3), requires_grad=False)

    freezer = ModelFreezer(Quantized())
    assert [layer.is_frozen for layer in freezer.get_layers()] == [False, False]
    freezer.freeze()
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, False]
    assert len(freezer.unfreeze()[0]["params"]) == 2

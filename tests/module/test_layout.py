import torch
from torch import nn

from drivetrain.module.layout import channels_last_input, is_worth_channels_last, to_channels_last
from tests.module import models


def test_kernels_are_laid_out_in_place_and_the_output_is_the_same():
    torch.manual_seed(0)
    model = models.ResNet(depths=(1, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected, parameters, keys = model(x), list(model.parameters()), list(model.state_dict())
    count = to_channels_last(model)
    assert count == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(a is b for a, b in zip(parameters, model.parameters())) and list(model.state_dict()) == keys
    torch.testing.assert_close(model(channels_last_input(x)), expected, rtol=1e-4, atol=1e-5)


def test_volumes_get_their_own_format_and_other_layers_are_left_alone():
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv1d(2, 4, 3), nn.Bilinear(2, 3, 4))
    assert to_channels_last(model) == 1
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert model[1].weight.is_contiguous() and model[2].weight.is_contiguous()


def test_inputs_follow_where_they_have_channels():
    assert channels_last_input(torch.zeros(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    assert channels_last_input(torch.zeros(2, 3, 4, 4, 4)).is_contiguous(memory_format=torch.channels_last_3d)
    for other in (torch.zeros(2, 3), torch.zeros(2, 3, 4, 4, dtype=torch.long)):
        assert channels_last_input(other) is other


def test_it_is_worth_it_for_convolutional_networks_only():
    assert is_worth_channels_last(models.ResNet()) and is_worth_channels_last(models.UNet())
    assert not is_worth_channels_last(models.ViT()) and not is_worth_channels_last(models.GPT2())
    assert not is_worth_channels_last(nn.ReLU())

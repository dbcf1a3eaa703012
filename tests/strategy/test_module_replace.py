"""Replacements are kept only where they compute the same."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.strategy.methods import module_replace
from drivetrain.strategy.methods.module_replace import ReplacePair, fuse_attention, register_replace_pair, replace_pairs
from tests.module.models import RMSNorm


class WrongRMSNorm(RMSNorm):
    """Named like a norm, and something else."""

    def forward(self, x):
        return super().forward(x) + 0.01


class LargeEpsilonRMSNorm(RMSNorm):
    """Its epsilon shows only on small inputs."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2) * self.weight


class Attending(nn.Module):
    def __init__(self, uses_weights):
        super().__init__()
        self.attention, self.uses_weights = nn.MultiheadAttention(8, 2, batch_first=True), uses_weights

    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return out + weights.mean() if self.uses_weights else out


def test_a_hand_written_rms_norm_becomes_the_fused_one_with_its_own_parameter():
    model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8), WrongRMSNorm(8), LargeEpsilonRMSNorm(8))
    x, before = torch.randn(3, 8), copy.deepcopy(model)
    weight, keys = model[1].weight, list(model.state_dict())
    replaced, remarks = replace_pairs(model)
    assert replaced == ["1"] and type(model[1]) is nn.RMSNorm and model[1].weight is weight
    assert [remark.partition(":")[0] for remark in remarks] == ["2", "3"] and all(
        "differs" in remark for remark in remarks
    )
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), before(x))


def test_attention_is_fused_only_where_nobody_uses_its_weights():
    x = torch.randn(2, 5, 8)
    plain = Attending(uses_weights=False).eval()
    expected, keys = plain(x), list(plain.state_dict())
    names, remarks = fuse_attention(plain, lambda model: model(x))
    assert names == ["attention"] and not remarks and list(plain.state_dict()) == keys
    torch.testing.assert_close(plain(x), expected)
    assert plain.attention(x, x, x)[1] is None and plain.attention(x, x, x, need_weights=True)[1] is not None
    assert isinstance(copy.deepcopy(plain).attention, nn.MultiheadAttention)

    user = Attending(uses_weights=True).eval()
    names, remarks = fuse_attention(user, lambda model: model(x))
    assert not names and "weights" in remarks[0] and type(user.attention) is nn.MultiheadAttention
    assert "no sample" in fuse_attention(Attending(False), None)[1][0]
    assert fuse_attention(nn.TransformerEncoderLayer(8, 2), None) == ([], [])


def test_attention_whose_fused_form_gives_nan_is_not_replaced():
    x, model = torch.randn(2, 5, 8), Attending(uses_weights=False).eval()

    def run(model):
        is_fused = type(model.attention) is not nn.MultiheadAttention
        return model(x) * (float("nan") if is_fused else 1.0)

    names, remarks = fuse_attention(model, run)
    assert not names and "outputs differ" in remarks[0] and type(model.attention) is nn.MultiheadAttention


def test_pairs_of_ones_own_register_and_wrong_names_are_refused():
    @register_replace_pair("sigmoid", kwargs={"inplace": True})
    class Pair(ReplacePair):
        def matches(self, module):
            return type(module) is nn.SiLU

        def replace(self, module, **kwargs):
            return nn.SiLU(**kwargs)

    try:
        model = nn.Sequential(nn.SiLU())
        assert replace_pairs(model, {"sigmoid": {}})[0] == ["0"] and model[0].inplace
        with pytest.raises(ConfigError, match="already"):
            register_replace_pair("sigmoid", pair_cls=Pair)
    finally:
        del module_replace._pairs["sigmoid"]
    with pytest.raises(ConfigError, match="rms_norm"):
        replace_pairs(nn.Sequential(), {"rms_nrm": {}})

"""Cutting a model into stages: the parts together compute what the whole does, under the same names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.pipeline import split_model
from drivetrain.module.pipeline_parts import FlatCall, RemoteModule

WIDTH, LENGTH, VOCAB = 8, 6, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, mask=None):
        x = x if mask is None else x * mask
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Written as people write: positions from sizes, an assertion, a mask from a buffer, a branch on an argument."""

    def __init__(self, depth=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mask", torch.linspace(0.5, 1, LENGTH), persistent=False)

    def forward(self, ids, targets=None):
        rows, length = ids.size()
        assert length <= LENGTH, f"at most {LENGTH}"
        x = self.tokens(ids) + self.places(torch.arange(0, length, device=ids.device))
        mask = self.mask[:length, None]
        first = x
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x + first) * self.scale
        _, _, width = x.shape
        logits = self.head(x.view(rows * length, width)).view(rows, length, -1)
        if targets is None:
            return logits
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def sample(rows=3):
    ids = torch.randint(0, VOCAB, (rows, LENGTH))
    return {"ids": ids, "targets": ids.flip(1)}


def run_parts(split, inputs):
    values = ()
    for part in split.parts:
        values = part(*values, **inputs)
    return values


def test_parts_compute_what_the_whole_does_with_the_same_gradients():
    torch.manual_seed(0)
    model, inputs = Decoder(), sample()
    split = split_model(model, 3, given=inputs)
    for rows in (3, 5):  # sizes stay symbolic
        inputs = sample(rows)
        expected = model(**inputs)
        grads = torch.autograd.grad(expected["loss"], list(model.parameters()))
        found = run_parts(split, inputs)
        torch.testing.assert_close(found, expected)
        again = torch.autograd.grad(found["loss"], list(model.parameters()))
        torch.testing.assert_close(again, grads)


def test_names_and_objects_are_the_users_own_and_each_is_in_one_part():
    model = Decoder()
    split = split_model(model, 2, given=sample())
    names = [name for part in split.parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    keys = [key for part in split.parts for key in part.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    first, last = split.parts
    assert first.blocks[0] is model.blocks[0] and isinstance(first.blocks[3], RemoteModule)
    assert last.scale is model.scale and not list(last.tokens.parameters())


def test_what_inputs_alone_make_is_made_again_and_only_the_rest_is_sent():
    split = split_model(Decoder(), 4, given=sample())
    assert [len(part.received) for part in split.parts] == [0, 2, 2, 2]  # the stream, and what is added at the end
    assert all("ids" in part.inputs for part in split.parts)
    assert split.inputs == {"ids", "targets"} and split.unused == frozenset()


class Constants(nn.Module):
    """Uses tensors that are registered nowhere: made in the forward, and plain attributes."""

    def __init__(self, follows_mode=False):
        super().__init__()
        self.blocks, self.follows_mode = nn.ModuleList([Block() for _ in range(4)]), follows_mode
        self.scale = torch.linspace(1, 2, WIDTH)

    def forward(self, x):
        shift = torch.ones(WIDTH) if self.training or not self.follows_mode else torch.zeros(WIDTH)
        for block in self.blocks:
            x = block(x * self.scale) + shift
        return x


def test_tensors_that_are_registered_nowhere_are_in_every_stage_that_uses_them():
    model, x = Constants(), torch.randn(2, LENGTH, WIDTH)
    split = split_model(model, 2, given={"x": x})
    torch.testing.assert_close(run_parts(split, {"x": x}), model(x))
    with pytest.raises(ConfigError, match="training and evaluation"):
        split_model(Constants(follows_mode=True), 2, given={"x": x})


def test_arguments_the_sample_leaves_out_keep_their_defaults():
    model, inputs = Decoder(), sample()
    split = split_model(model, 2, given={"ids": inputs["ids"]})
    assert split.inputs == {"ids"}
    torch.testing.assert_close(run_parts(split, {"ids": inputs["ids"]}), model(inputs["ids"]))


def test_stages_are_balanced_by_operations_or_else_by_parameters():
    blocks = [nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in (8, 8, 8, 24)]
    model = nn.Sequential(nn.Embedding(100_000, 8), *blocks)
    for given in (None, {"input": torch.zeros(2, dtype=torch.long)}):
        split = split_model(model, 2, given=given)
        assert split.starts == ("4.0",) and split.shares[1] == pytest.approx(0.5, abs=0.02)


def test_a_model_is_cut_at_the_modules_that_are_named():
    split = split_model(Decoder(), 3, split=["blocks.1", "norm"], given=sample())
    assert split.starts == ("blocks.1", "norm")
    assert [len(list(part.parameters())) for part in split.parts] == [8, 18, 5]


class Choosy(Decoder):
    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = -x
        return self.head(x)


class Moody(Decoder):
    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x) * 2 if self.training else block(x)
        return self.head(x)


IDS = {"ids": torch.zeros(2, LENGTH, dtype=torch.long)}


@pytest.mark.parametrize(
    ("model", "stages", "settings", "message"),
    [
        (Choosy(), 2, {"given": IDS}, "cannot be traced .*tensor contents"),
        (Moody(), 2, {"given": IDS}, "differently in training and evaluation.*its own module"),
        (Decoder(), 2, {}, "cannot be traced"),
        (nn.Linear(2, 2), 2, {}, "0 modules with parameters, too few"),
        (Decoder(), 2, {"split": ["block.1"], "given": IDS}, "blocks.1"),
        (Decoder(), 3, {"split": ["blocks.1"], "given": IDS}, "3 stages need 2"),
        (Decoder(), 3, {"split": ["blocks.2", "blocks.1"], "given": IDS}, "another order"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_with_what_to_do(model, stages, settings, message):
    before = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        split_model(model, stages, **settings)
    assert torch.equal(torch.random.get_rng_state(), before) and model.training
    assert torch.arange(3).tolist() == [0, 1, 2] and torch.arange.__name__ == "arange"


def test_tied_parameters_on_one_side_of_a_cut_stay_tied():
    model = Decoder()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    split = split_model(model, 2, given=IDS)
    assert split.parts[0].blocks[1].up.weight is split.parts[0].blocks[0].up.weight


def test_outputs_travel_flat_and_come_back_in_their_form():
    call = FlatCall({"x": torch.ones(4, 2), "flag": True}, is_last=True, probing=False, collects=True)
    assert next(iter(call.batched.values())).shape == (4, 2)
    assert call.unflatten_inputs(call.batched)["flag"] is True
    for loss in (1.0, 3.0):
        flat = call.flatten_output({"logits": torch.ones(2, 3), "loss": torch.tensor(loss), "cache": None})
    assert len(flat) == 2 and call.unflatten_output(flat)["cache"] is None
    joined = call.joined_output([0.25, 0.75])
    assert joined["logits"].shape == (4, 3) and joined["loss"].item() == 2.5


def test_what_a_stage_makes_for_itself_has_the_type_that_sharding_casts_to():
    class Rotary(nn.Module):
        def forward(self, x):
            return torch.ones(x.shape[-1], dtype=x.dtype)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rotary = nn.Embedding(8, 4), Rotary()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, tokens):
            x = self.embed(tokens)
            scale = self.rotary(x)
            for layer in self.layers:
                x = layer(x, scale)
            return x

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale):
            seen.append(scale.dtype)
            return self.linear(x) * scale.to(x.dtype)

    seen: list[torch.dtype] = []
    tokens = torch.arange(6).view(2, 3)
    split = split_model(Model(), 2, split=["layers.1"], given={"tokens": tokens})
    for dtype in (None, torch.bfloat16):
        seen.clear()
        split.parts[1].compute_dtype = dtype
        split.parts[1](torch.ones(2, 3, 4), tokens=tokens)
        assert seen == [dtype or torch.float32]


class Centered(nn.Module):
    """A model that keeps a running mean outside of its blocks."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        if self.how == "method" and self.training:
            self.mean.lerp_(x.mean(0).detach(), 0.1)
        elif self.how == "sum":
            self.mean += 1
        elif self.how == "item":
            self.mean[0] = x.mean()
        elif self.how == "assignment":
            self.mean = x.mean(0).detach()
        for block in self.blocks:
            x = block(x)
        return x - self.mean


@pytest.mark.parametrize("how", ["method", "sum", "item", "assignment"])
def test_a_buffer_that_changes_between_blocks_is_refused(how):
    with pytest.raises(ConfigError, match="changes the buffer 'mean'"):
        split_model(Centered(how), 2, given={"x": torch.randn(2, 4)})
    assert len(split_model(Centered("never"), 2, given={"x": torch.randn(2, 4)}).parts) == 2


class WithUnused(nn.Module):
    """A model whose forward does not use everything that it saves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.pooler, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("prior", torch.ones(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_what_no_stage_uses_is_held_by_the_last_one():
    model = WithUnused()
    first, last = split_model(model, 2, given={"x": torch.randn(2, 4)}).parts
    assert {*first.state_dict(), *last.state_dict()} == {*model.state_dict()}
    assert {"pooler.weight", "pooler.bias", "scale", "prior"} <= {*last.state_dict()} and last.pooler is model.pooler

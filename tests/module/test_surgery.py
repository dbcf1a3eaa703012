import pytest
import torch
from torch import nn

from drivetrain.module.surgery import count_module_instances, replace_module_classes, update_params_in_optimizer
from tests.module.models import Shell


class Twice(nn.Module):
    """Wraps a layer and adds a scale of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.inner(x) * self.scale


def new_linear(module, index):
    return nn.Linear(module.in_features, module.out_features)


def params_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same(first, second):
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))


def test_children_are_visited_depth_first_in_definition_order_with_an_index_per_policy():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(4, 4), nn.ReLU())
    seen = []
    policies = {nn.Linear: lambda m, i: seen.append((m.in_features, i)), nn.ReLU: lambda m, i: seen.append(("relu", i))}
    assert replace_module_classes(model, policies) == {}
    assert seen == [(2, 0), (3, 1), ("relu", 0), (4, 2), ("relu", 1)]


def test_the_first_matching_policy_decides_and_a_subclass_matches():
    class MyLinear(nn.Linear):
        pass

    model = nn.Sequential(MyLinear(2, 2), nn.Linear(2, 2))
    policies = {MyLinear: lambda m, i: None, nn.Linear: lambda m, i: nn.Identity()}
    replace_module_classes(model, policies)
    assert isinstance(model[0], MyLinear) and isinstance(model[1], nn.Identity)


def test_pairs_are_returned_and_the_root_is_not_replaced():
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    pairs = replace_module_classes(model, {nn.Sequential: lambda m, i: nn.Identity()})
    assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.Identity)
    assert [type(old).__name__ for old in pairs] == ["Sequential"] and list(pairs.values()) == [model[0]]


def test_indices_can_be_continued_over_calls():
    indices = {nn.Linear: 5}
    seen = []
    for _ in range(2):
        replace_module_classes(
            nn.Sequential(nn.Linear(1, 1)), {nn.Linear: lambda m, i: seen.append(i)}, indices=indices
        )
    assert seen == [5, 6] and indices == {nn.Linear: 7}


def test_a_shared_module_is_replaced_once_everywhere():
    shared, calls = nn.ReLU(), []
    model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": shared})

    def replace(module, index):
        calls.append(index)
        return nn.GELU()

    pairs = replace_module_classes(model, {nn.ReLU: replace})
    assert calls == [0] and len(pairs) == 1
    assert model["a"][0] is model["a"][1] is model["b"] and isinstance(model["b"], nn.GELU)


def test_the_replacement_takes_device_dtype_mode_and_requires_grad():
    model = nn.Sequential(nn.Linear(2, 2).to("meta", torch.bfloat16).eval(), nn.Linear(2, 2), nn.ReLU())
    model[0].weight.requires_grad_(False)
    model[1].requires_grad_(False)
    replace_module_classes(model, {nn.Linear: new_linear, nn.ReLU: lambda m, i: nn.PReLU()})
    first, second, third = model
    assert first.weight.device.type == "meta" and first.weight.dtype == torch.bfloat16 and not first.training
    assert not first.weight.requires_grad and first.bias.requires_grad
    assert not any(p.requires_grad for p in second.parameters()) and second.training
    assert third.weight.device.type == "meta"  # a layer without tensors goes where the model is


def test_parts_kept_from_the_old_module_keep_their_mode():
    norm = nn.BatchNorm1d(2).eval()
    model = nn.Sequential(nn.Sequential(norm, nn.ReLU()))
    replace_module_classes(model, {nn.Sequential: lambda m, i: nn.ModuleList([m, nn.Dropout().eval()])})
    assert model[0].training and model[0][1].training and not norm.training


def test_new_parts_of_a_frozen_layer_are_frozen():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False))
    replace_module_classes(model, {nn.Linear: lambda m, i: Twice(m)})
    assert not any(p.requires_grad for p in model.parameters())


def test_replacements_are_entered_only_when_asked():
    def policies():
        wrapped = set()

        def wrap(module, index):
            if module in wrapped:
                return None
            inner = nn.Linear(2, 2)
            wrapped.add(inner)
            return nn.Sequential(inner, nn.ReLU())

        return {nn.Linear: wrap, nn.ReLU: lambda m, i: nn.GELU()}

    plain, recursive = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    replace_module_classes(plain, policies())
    replace_module_classes(recursive, policies(), recurse_on_replacements=True)
    assert isinstance(plain[0][1], nn.ReLU) and isinstance(recursive[0][1], nn.GELU)


def test_a_layer_wrapped_in_its_own_replacement_ends_the_recursion():
    model = nn.Sequential(nn.Linear(2, 2))
    linear = model[0]
    pairs = replace_module_classes(model, {nn.Linear: lambda m, i: Twice(m)}, recurse_on_replacements=True)
    assert len(pairs) == 1 and model[0].inner is linear


def test_an_endless_recursion_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="does not end"):
        replace_module_classes(model, {nn.Linear: new_linear}, recurse_on_replacements=True)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("wrap", [Shell, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_models_are_refused(wrap):
    model = wrap(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"already wrapped.*Change layers first"):
        replace_module_classes(model, {nn.Linear: new_linear})


def test_a_model_with_a_wrapped_or_compiled_part_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager")
    with pytest.raises(TypeError, match=r"'1'.*module\.compile"):
        replace_module_classes(model, {nn.Linear: new_linear})


def test_count_is_of_distinct_descendants_without_the_root():
    shared = nn.Linear(1, 1)
    model = nn.Sequential(shared, shared, nn.Linear(1, 1), nn.ReLU(), nn.Sequential())
    assert count_module_instances(model, nn.Linear) == 2
    assert count_module_instances(model, (nn.Linear, nn.ReLU)) == 3
    assert count_module_instances(model, nn.Sequential) == 1


def test_optimizer_trains_the_new_parameters_and_keeps_the_state_of_others():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Conv1d(2, 1, 1))
    optimizer = torch.optim.Adam(
        [{"params": model[:3].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.2}]
    )
    model[:3](torch.randn(2, 2)).sum().backward()
    optimizer.step()
    model[3](torch.randn(1, 2, 4)).sum().backward()
    optimizer.step()
    conv_state = optimizer.state[model[3].weight]
    old = list(model[0].parameters()) + list(model[2].parameters())
    replace_module_classes(model, {nn.Linear: new_linear}, optimizers=optimizer)
    assert same(params_of(optimizer), list(model.parameters()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert not any(parameter in optimizer.state for parameter in old)
    assert optimizer.state[model[3].weight] is conv_state


def test_each_of_several_optimizers_gets_what_replaces_its_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    replace_module_classes(model, {nn.Linear: new_linear}, optimizers=[first, second])
    assert same(params_of(first), list(model[0].parameters()))
    assert same(params_of(second), list(model[1].parameters()))


def test_a_layer_that_only_gains_parameters_adds_them_to_its_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": [*layer.parameters()], "lr": 0.1 * (i + 1)} for i, layer in enumerate(model)]
    optimizer = torch.optim.SGD(groups)
    linear = model[1]
    replace_module_classes(model, {nn.Linear: lambda m, i: Twice(m) if i == 1 else None}, optimizers=optimizer)
    assert same(optimizer.param_groups[1]["params"], [linear.weight, linear.bias, model[1].scale])


def test_a_parameter_tied_to_a_layer_that_stays_is_kept():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 3, bias=False)}, optimizers=optimizer)
    assert same(params_of(optimizer), [model["embedding"].weight, model["head"].weight])


def test_a_layer_without_parameters_may_be_replaced_by_one_that_has_some():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_module_classes(model, {nn.ReLU: lambda m, i: nn.PReLU()}, optimizers=optimizer)
    assert same(params_of(optimizer), list(model.parameters()))


def test_recursive_replacement_reaches_the_optimizer_too():
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policies = {nn.Linear: lambda m, i: nn.Conv1d(2, 2, 1), nn.Conv1d: lambda m, i: Twice(nn.Bilinear(2, 2, 2))}
    replace_module_classes(model, policies, optimizers=optimizer, recurse_on_replacements=True)
    assert isinstance(model[0], Twice) and len(params_of(optimizer)) == 3
    assert {id(p) for p in params_of(optimizer)} == {id(p) for p in model.parameters()}


def test_names_of_a_named_optimizer_follow():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    replace_module_classes(model, {nn.Linear: lambda m, i: Twice(new_linear(m, i)) if i == 0 else None}, optimizer)
    (group,) = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert group["param_names"] == [names[id(parameter)] for parameter in group["params"]]
    assert set(group["param_names"]) == {"0.inner.weight", "0.inner.bias", "0.scale", "1.weight", "1.bias"}


def test_a_frozen_layer_outside_every_optimizer_is_replaced_without_fuss():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    replace_module_classes(model, {nn.Linear: new_linear}, optimizers=optimizer)
    assert same(params_of(optimizer), list(model[1].parameters()))


def test_a_failure_in_the_optimizers_leaves_model_and_optimizers_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers = list(model)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    before = params_of(optimizer)
    with pytest.raises(RuntimeError, match="2 different parameter groups"):
        replace_module_classes(model, {nn.Linear: new_linear}, optimizers=optimizer)
    assert list(model) == layers and same(params_of(optimizer), before)


def test_parameters_in_several_groups_may_be_removed_but_not_exchanged():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [p]} for p in layer.parameters()], lr=0.1)
    with pytest.raises(RuntimeError, match="different parameter groups"):
        update_params_in_optimizer(layer.parameters(), nn.Linear(2, 2).parameters(), optimizer)
    update_params_in_optimizer(layer.parameters(), [], optimizer)
    assert params_of(optimizer) == []


def test_parameters_in_no_optimizer_are_an_error():
    stranger = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="not in any of the 1 optimizers"):
        update_params_in_optimizer(stranger.parameters(), nn.Linear(2, 2).parameters(), optimizer)


def test_update_keeps_the_place_of_the_old_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    new = nn.Linear(2, 2)
    update_params_in_optimizer(model[1].parameters(), new.parameters(), optimizer)
    model[1] = new
    assert same(params_of(optimizer), list(model.parameters()))
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_something_that_is_no_optimizer_is_refused_before_anything_is_replaced():
    model = nn.Sequential(nn.Linear(2, 2))
    linear = model[0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=0.1), lambda _: 1)
    with pytest.raises(TypeError, match="LambdaLR"):
        replace_module_classes(model, {nn.Linear: new_linear}, [scheduler])
    assert model[0] is linear

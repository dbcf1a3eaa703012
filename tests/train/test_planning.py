"""Plans for data whose batches cannot be cut into samples: images of any size, graphs, bucketed texts, datasets of whole batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain.core.errors import DrivetrainWarning, UnsupportedMethodError
from drivetrain.strategy.task import CallModel, TrainingTask, Uncollated, read_samples
from drivetrain.train.trainer import Trainer


class Pooled(nn.Module):
    """Sequences of any length, each over its mean."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).mean(1))


class Images(nn.Module):
    """A list of images of any size; the losses come from `forward`."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, images, targets):
        features = torch.stack([self.body(image[None]).mean((2, 3))[0] for image in images])
        boxes = self.head(features)
        losses = [F.l1_loss(box.expand_as(target["boxes"]), target["boxes"]) for box, target in zip(boxes, targets)]
        return {"loss": torch.stack(losses).mean()}


class Graphs(nn.Module):
    """The nodes of several graphs in one tensor."""

    def __init__(self):
        super().__init__()
        self.own, self.sent, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, nodes, edges, graph, label):
        received = torch.zeros_like(nodes).index_add(0, edges[1], self.sent(nodes)[edges[0]])
        hidden = torch.tanh(self.own(nodes) + received)
        sums = torch.zeros(len(label), 8, dtype=nodes.dtype).index_add(0, graph, hidden)
        return {"loss": F.cross_entropy(self.head(sums), label)}


def generator(index):
    return torch.Generator().manual_seed(index)


def text(index):
    g = generator(index)
    return torch.randn(2 + index % 3, 8, generator=g, dtype=torch.float64), torch.randint(0, 4, (), generator=g)


def image(index):
    g, size = generator(index), 6 + index % 3
    boxes = torch.rand(1 + index % 3, 4, generator=g, dtype=torch.float64)
    return torch.randn(3, size, size + 1, generator=g, dtype=torch.float64), {"boxes": boxes}


def graph(index):
    g, nodes = generator(index), 3 + index % 4
    edges = torch.randint(0, nodes, (2, 5), generator=g)
    return torch.randn(nodes, 8, generator=g, dtype=torch.float64), edges, torch.randint(0, 4, (), generator=g)


def join_images(rows):
    images, targets = zip(*rows)
    return {"images": list(images), "targets": list(targets)}


def join_graphs(rows):
    sizes = [len(nodes) for nodes, _, _ in rows]
    starts = [sum(sizes[:index]) for index in range(len(rows))]
    return {
        "nodes": torch.cat([nodes for nodes, _, _ in rows]),
        "edges": torch.cat([edges + start for (_, edges, _), start in zip(rows, starts)], 1),
        "graph": torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes)),
        "label": torch.stack([label for _, _, label in rows]),
    }


def whole_batches():
    rows = [text(3 * index) for index in range(12)]
    parts = [rows[start : start + 4] for start in range(0, 12, 4)]
    return [tuple(torch.stack(column) for column in zip(*part)) for part in parts]


BUCKETS = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
CASES = {
    "images": (Images, None, lambda: DataLoader([image(i) for i in range(12)], 4, collate_fn=join_images)),
    "graphs": (Graphs, None, lambda: DataLoader([graph(i) for i in range(12)], 4, collate_fn=join_graphs)),
    "buckets": (
        Pooled, F.cross_entropy, lambda: DataLoader([text(i) for i in range(12)], batch_sampler=BUCKETS),
    ),
    "one by one": (Pooled, F.cross_entropy, lambda: DataLoader([text(i) for i in range(6)], 1)),
    "whole batches": (Pooled, F.cross_entropy, lambda: DataLoader(whole_batches(), batch_size=None)),
    "rows that are left out": (
        Pooled, F.cross_entropy,
        lambda: DataLoader([None, None, *(text(3 * i) for i in range(10))], 4, collate_fn=join_without_none),
    ),
}  # fmt: skip


def join_without_none(rows):
    return torch.utils.data.default_collate([row for row in rows if row is not None])


def trained(case, strategy):
    make, loss_func, data = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    trainer = Trainer(
        model, loss_func, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), callbacks=(), strategy=strategy,
        strategy_time_limit=0 if strategy == "auto" else None,
    )  # fmt: skip
    trainer.train(data(), num_epochs=1)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, trainer.plan


@pytest.mark.parametrize("case", CASES)
def test_batches_that_cannot_be_cut_are_planned_for_and_checked(case):
    expected, _ = trained(case, None)
    for strategy in ("auto", ["fused_optimizer"]):
        found, plan = trained(case, strategy)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
        if strategy != "auto":
            assert any("parameters compared" in reason for reason in plan.reasons), plan.reasons


@pytest.mark.parametrize("case", ["images", "graphs"])
def test_micro_batches_of_batches_that_cannot_be_cut_are_rejected_before_the_first_step(case):
    with pytest.raises(UnsupportedMethodError, match="samples that the collate_fn joins have"):
        trained(case, [("micro_batch", 2)])
    _, plan = trained(case, "auto")
    assert "micro_batch" not in plan


def test_samples_are_joined_again_only_where_a_batch_cannot_be_cut():
    rows = [graph(index) for index in range(6)]
    samples = read_samples(rows, join_graphs)
    assert isinstance(samples, Uncollated)
    task = TrainingTask(call=CallModel("unpack_dict"), samples=samples)
    assert task.sample_count == 6
    for found, numbers in ((task.rows([4, 1]), [4, 1]), (task.batch(8), [0, 1, 2, 3, 4, 5, 0, 1])):
        expected = join_graphs([rows[number] for number in numbers])
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    padded = read_samples([text(i) for i in range(6)], join_padded)
    assert isinstance(padded, tuple) and padded[0].shape == (6, 4, 8)


def join_padded(rows):
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.stack([y for _, y in rows])


def join_with_noise(rows):
    return {**join_images(rows), "noise": torch.randn(1)}


def test_samples_that_are_joined_at_random_are_joined_once():
    assert isinstance(read_samples([image(i) for i in range(4)], join_with_noise), dict)


class Whole(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(4, 8)


class ReadsSeveral(torch.utils.data.Dataset):
    """Whose rows come as one object, as those of a TensorDict do."""

    def __len__(self):
        return 6

    def __getitems__(self, numbers):
        return {"x": torch.zeros(len(numbers), 8)}


def join_pairs(rows):
    assert len(rows) > 1
    return torch.stack(rows)


def test_samples_are_read_from_whatever_a_loader_reads():
    assert read_samples(Whole(), count=None).shape == (4, 8)
    assert read_samples(ReadsSeveral(), lambda batch: batch)["x"].shape == (6, 8)
    assert read_samples(list(torch.zeros(6, 8)), join_pairs).shape == (6, 8)


class Unreadable(torch.utils.data.Dataset):
    """Whose first rows cannot be read; a sampler leaves them out."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index < 4:
            raise FileNotFoundError(f"sample {index} is missing")
        return text(3 * index)


def test_samples_that_cannot_be_read_do_not_end_a_training_that_does_not_need_them():
    for strategy in ("auto", ["fused_optimizer"]):
        model = Pooled().double()
        trainer = Trainer(
            model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), callbacks=(), strategy=strategy,
            strategy_time_limit=5 if strategy == "auto" else None,
        )  # fmt: skip
        trainer.train(DataLoader(Unreadable(), batch_sampler=[[4, 5, 6, 7], [8, 9, 10, 11]]), num_epochs=1)
        assert any("sample 0 is missing" in reason for reason in trainer.plan.reasons), trainer.plan.reasons


class CompiledInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.compile(nn.Linear(8, 8), backend="eager"), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).mean(1))


def test_a_model_that_compiles_a_part_of_itself_trains_without_a_plan(monkeypatch):
    monkeypatch.setitem(CASES, "compiled", (CompiledInside, *CASES["buckets"][1:]))
    expected, _ = trained("compiled", None)
    with pytest.warns(DrivetrainWarning, match="its part 'body' is already wrapped"):
        found, plan = trained("compiled", "auto")
    assert plan.opt_names() == [] and all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(TypeError, match="its part 'body' is already wrapped"):
        trained("compiled", ["fused_optimizer"])

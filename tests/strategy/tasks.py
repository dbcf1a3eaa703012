"""A small transformer, its data, and the plain loop that every plan must follow."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

VOCAB, WIDTH, LENGTH = 32, 16, 8
ADAM = {"lr": 0.05, "eps": 1e-4}
"""With the usual eps, Adam makes a whole step of a gradient that is mere rounding, and machines round differently."""


class Attention(nn.Module):
    """Heads are counted locally (`-1`), so that the projections can be split over ranks."""

    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # its bias has no gradient, and Adam would amplify rounding
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Embedding, two blocks, and a head that is tied to the embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TENSOR_PLAN = {
    **dict.fromkeys(("blocks.*.attention.q", "blocks.*.attention.k", "blocks.*.attention.v", "blocks.*.up"), "colwise"),
    **dict.fromkeys(("blocks.*.attention.out", "blocks.*.down"), "rowwise"),
}


def make_model(seed=0, **kwargs):
    torch.manual_seed(seed)
    return TinyGPT(**kwargs)


class Tokens(torch.utils.data.Dataset):
    """Samples are dicts, as a language model's are."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCAB, (size, LENGTH + 1), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        row = self.tokens[index]
        return {"tokens": row[:-1], "labels": row[1:]}


def make_data(size=32):
    return Tokens(size)


def loss_func(batch, logits):
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def plain_losses(size=32, global_batch=8, steps=4, tied=True):
    """Return the losses of a hand-written loop on one process, and the parameters it ends with."""
    model, data = make_model(tied=tied), make_data(size)
    optim = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for first in range(0, min(size, steps * global_batch), global_batch):
        rows = data.tokens[first : first + global_batch]
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        loss = loss_func(batch, model(**batch))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def pairs_data(size=64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))

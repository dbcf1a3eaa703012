"""Tiny models that the tests of this folder share."""

import torch
from torch import nn


class EncoderDecoder(nn.Module):
    """Two parts on one graph, each with its own loss."""

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder = nn.Linear(3, 4, dtype=dtype)
        self.decoder = nn.Linear(4, 2, dtype=dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        return hidden, self.decoder(hidden)


def losses_of(model, x):
    hidden, out = model(x)
    losses = {"encoder_loss": hidden.pow(2).mean(), "decoder_loss": (out - 1).pow(2).mean()}
    return {**losses, "loss": sum(losses.values())}


def batches(count, seed=1, rows=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def own_gradients(model, x, part, loss):
    """The gradients of one loss for one part of the model, by torch.autograd.grad."""
    return torch.autograd.grad(losses_of(model, x)[loss], list(getattr(model, part).parameters()))


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]

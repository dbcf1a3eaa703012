"""MuonHybrid's step against torch.optim.Muon and torch.optim.AdamW together, on the same tensors.

The tensors are those of a small transformer: several blocks whose matrices have the same shapes, an embedding, and vectors. torch's
Muon orthogonalises one matrix after another; MuonHybrid stacks those of one shape, which pays where starting a product costs more
than computing it. Prints the ratio of the two times; below 1, MuonHybrid is faster.

    python benchmarks/muon_step.py [--width 32] [--blocks 6] [--turns 60]
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import alternate, environment, low, write_result
from drivetrain.optim import MuonHybrid

NamedTensors = list[tuple[str, nn.Parameter]]


def tensors(width: int, blocks: int, device: torch.device) -> tuple[NamedTensors, NamedTensors]:
    """Return the matrices and the other parameters of a transformer, with gradients."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> nn.Parameter:
        made = nn.Parameter(torch.randn(*shape, generator=generator).to(device))
        made.grad = torch.randn(*shape, generator=generator).to(device)
        return made

    matrices, others = [], [("embed.weight", parameter(1000, width))]
    for block in range(blocks):
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        matrices += [(f"{block}.{name}.weight", parameter(*shape)) for name, shape in shapes.items()]
        others += [(f"{block}.{name}.bias", parameter(shape[0])) for name, shape in shapes.items()]
    return matrices, others


def hybrid_loop(width: int, blocks: int, device: torch.device) -> Callable[[int], None]:
    """Return the loop of one optimizer for both."""
    matrices, others = tensors(width, blocks, device)
    return _loop([MuonHybrid(matrices + others)], matrices[0][1])


def torch_loop(width: int, blocks: int, device: torch.device) -> Callable[[int], None]:
    """Return the loop of torch's two optimizers."""
    matrices, others = tensors(width, blocks, device)
    muon = torch.optim.Muon([p for _, p in matrices], lr=0.02, weight_decay=0.0)
    adam = torch.optim.AdamW([p for _, p in others], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    return _loop([muon, adam], matrices[0][1])


def _loop(optimizers: list[torch.optim.Optimizer], probe: Tensor) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.step()
        if probe.is_cuda:
            torch.cuda.synchronize()  # the work, not its launching, is measured

    return run


def main(
    width: int = 32, blocks: int = 6, turns: int = 60, steps: int = 2, device: str = "auto", write: bool = True
) -> dict[str, float]:
    """Measure, print and return the seconds of both and their ratio."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    loops = {"hybrid": hybrid_loop, "torch": torch_loop}
    seconds = alternate({name: make(width, blocks, place) for name, make in loops.items()}, turns, steps)
    result = {name: low(values) for name, values in seconds.items()}
    result["ratio"] = result["hybrid"] / result["torch"]
    print(
        f"MuonHybrid {result['hybrid'] * 1e3:.2f} ms a step, torch's Muon and AdamW {result['torch'] * 1e3:.2f} ms: "
        f"ratio {result['ratio']:.2f} on {place.type} (width {width}, {blocks} blocks)"
    )
    if write:
        settings = {"width": width, "blocks": blocks, "device": place.type}
        write_result("muon_step", {**result, **settings, "environment": environment(turns)})
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = main(options.width, options.blocks, options.turns, device=options.device)
    if options.json:
        print(json.dumps(numbers))

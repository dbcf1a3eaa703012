"""Make the pictures of the documentation from real runs.

    python -m tools.pictures [loop story report sweep search schedules pipeline memory]

Each function trains, plans or records something small and draws what happened, once for light and once for dark pages. The
report and the sweep need Chromium (`chromium` on the path), the rest matplotlib. The files are in `docs/assets`.
"""

import argparse
import contextlib
import html
import math
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[1] / "docs" / "assets"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a page."""

    name: str
    ground: str
    text: str
    soft: str
    edge: str
    box: str
    accent: str


THEMES = (
    Theme(
        name="light", ground="#ffffff", text="#1b1f24", soft="#5c6672", edge="#c9d1d9", box="#f3f6f9", accent="#c65d1e"
    ),
    Theme(
        name="dark", ground="#1e2129", text="#e6e9ed", soft="#9aa4b0", edge="#3d4551", box="#272c36", accent="#f0975b"
    ),
)


@contextlib.contextmanager
def plotting(theme: Theme) -> Iterator[Any]:
    """Give matplotlib the colours of a theme, and a backend without windows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"figure.facecolor": theme.ground, "axes.facecolor": theme.ground, "savefig.facecolor": theme.ground}
    colours |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text)
    colours |= {"axes.edgecolor": theme.edge, "grid.color": theme.edge, "legend.facecolor": theme.box}
    with plt.rc_context({**colours, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        yield plt
        plt.close("all")


def save(figure: Any, name: str, theme: Theme) -> None:
    """Write a figure as a PNG that is sharp on dense screens."""
    figure.savefig(ASSETS / f"{name}-{theme.name}.png", dpi=150, bbox_inches="tight")


# ---------------------------------------------------------------------- the loop


Row = tuple[int, str, bool, str]
"""Depth, name, whether it opens a box, and a remark."""


def loop() -> None:
    """Draw the loop with the events that a real run fired."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from drivetrain import Algorithm, Event, Trainer

    fired: list[Event] = []

    class Watch(Algorithm):
        events = frozenset(Event)

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            fired.append(event)

    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=[Watch()])
    trainer.train(data, num_epochs=1, eval_dataset=data, gradient_accumulation_steps=2, per_device_batch_size=4)
    rows = [
        row for row in _loop_rows(str(Event.__doc__)) if row[2] or row[1].lower() in {event.value for event in fired}
    ]
    rows = _without_empty_boxes(rows)
    for theme in THEMES:
        (ASSETS / f"loop-{theme.name}.svg").write_text(_loop_picture(rows, theme))


def _loop_rows(text: str) -> list[Row]:
    """Return depth, name, whether it opens a box, and the remark of each line of the loop's docstring."""
    rows = []
    for line in text.splitlines()[2:]:
        if line.strip():
            depth, words = (len(line) - len(line.lstrip())) // 2, line.split(None, 1)
            if words[0].isupper():
                rows.append((depth, words[0], False, words[1].strip() if len(words) > 1 else ""))
            else:
                rows.append((depth, line.strip(), True, ""))
    return rows


def _without_empty_boxes(rows: list[Row]) -> list[Row]:
    """Leave out boxes that have no event of their own, and move what is inside them to the left."""
    for place, (depth, _, is_box, _) in enumerate(rows):
        end = next((n for n in range(place + 1, len(rows)) if rows[n][0] <= depth), len(rows))
        inside = rows[place + 1 : end]
        if is_box and not any(row[0] == depth + 1 and not row[2] for row in inside):
            moved = [(row[0] - 1, *row[1:]) for row in inside]
            return _without_empty_boxes([*rows[:place], *moved, *rows[end:]])
    return rows


def _loop_picture(rows: list[Row], theme: Theme) -> str:
    step, width, left = 21, 840, 24
    parts, open_boxes = [], []

    def close(until: int, y: float) -> float:
        while open_boxes and open_boxes[-1][0] >= until:
            depth, top = open_boxes.pop()
            x = left + 22 * depth - 10
            parts.insert(
                0,
                f'<rect x="{x}" y="{top}" width="{width - 2 * x}" height="{y - top + 2}" rx="6" fill="{theme.box}" '
                f'fill-opacity="0.6" stroke="{theme.edge}"/>',
            )
            y += 5
        return y

    y = 10.0
    for depth, name, is_box, remark in rows:
        y = close(depth, y)
        x = left + 22 * depth
        if is_box:
            open_boxes.append((depth, y))
            parts.append(
                f'<text x="{x}" y="{y + 15}" fill="{theme.soft}" font-style="italic">{html.escape(name)}</text>'
            )
        else:
            parts.append(f'<text x="{x}" y="{y + 15}" fill="{theme.text}" font-weight="600">{name}</text>')
            parts.append(f'<text x="330" y="{y + 15}" fill="{theme.accent}">{html.escape(remark)}</text>')
        y += step
    y = close(0, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 10}" font-family="ui-monospace, monospace" '
        f'font-size="12.5"><rect width="100%" height="100%" fill="{theme.ground}"/>{"".join(parts)}</svg>\n'
    )


# ---------------------------------------------------------------------- the story of a run


def story() -> None:
    """Draw the way of a run through the folders of the package, and the folder that a real run leaves behind."""
    folder = _demo(epochs=2)
    files = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    steps = (
        ("experiment/", "parameters, seed,", "run folder"),
        ("context/", "model, optimizer,", "loaders, counters"),
        ("strategy/", "a plan: how it runs", "on this hardware"),
        ("train/", "the loop: events,", "hooks, plugins"),
        ("record/", "and checkpoint/:", "metrics, exact state"),
    )
    for theme in THEMES:
        (ASSETS / f"story-{theme.name}.svg").write_text(_story_picture(steps, files, folder.name, theme))


def _story_picture(steps: Any, files: list[str], run: str, theme: Theme) -> str:
    parts, width, box = [], 940, 164
    for number, (name, *lines) in enumerate(steps):
        x = 14 + number * (box + 24)
        parts.append(
            f'<rect x="{x}" y="14" width="{box}" height="86" rx="8" fill="{theme.box}" stroke="{theme.edge}"/>'
        )
        parts.append(f'<text x="{x + 12}" y="40" font-weight="600" fill="{theme.text}" class="m">{name}</text>')
        for place, line in enumerate(lines):
            parts.append(f'<text x="{x + 12}" y="{63 + 18 * place}" fill="{theme.soft}">{line}</text>')
        if number:
            parts.append(
                f'<path d="M{x - 22} 57h16m-5 -5l5 5l-5 5" fill="none" stroke="{theme.accent}" stroke-width="2"/>'
            )
    parts.append(f'<text x="14" y="136" fill="{theme.soft}">The folder of a finished run:</text>')
    parts.append(f'<text x="14" y="160" class="m" font-weight="600" fill="{theme.text}">output/digits/{run}/</text>')
    for number, name in enumerate(files):
        x, y = 36 + 300 * (number % 3), 184 + 20 * (number // 3)
        parts.append(f'<text x="{x}" y="{y}" class="m" fill="{theme.text}">{html.escape(name)}</text>')
    height = 200 + 20 * math.ceil(len(files) / 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">'
        f"<style>.m{{font-family:ui-monospace,monospace}}</style>"
        f'<rect width="100%" height="100%" fill="{theme.ground}"/>{"".join(parts)}</svg>\n'
    )


# ---------------------------------------------------------------------- the report


def _demo(epochs: int) -> Path:
    from drivetrain.experiment import find_runs
    from drivetrain.experiment.demo import run_demo

    folder = tempfile.mkdtemp()
    run_demo(epochs=epochs, output_dir=folder, seed=1)
    (record,) = find_runs(folder)
    return Path(record.folder)


def report() -> None:
    """Take a picture of the report of the demo."""
    from drivetrain.experiment.reports import write_report

    folder = _demo(epochs=8)
    with contextlib.chdir(folder.parents[1]):  # the page names the folder as it was given
        _photograph("report", write_report([folder.relative_to(Path.cwd())]).resolve(), 1100, 860)


def sweep() -> None:
    """Search learning rate, batch size and weight decay of the demo, and take a picture of the report of all trials."""
    from drivetrain.experiment import Choice, LogUniform, find_runs
    from drivetrain.experiment import sweep as search
    from drivetrain.experiment.demo import digits, one_thread, quiet_console
    from drivetrain.experiment.reports import write_report

    folder = tempfile.mkdtemp()
    space = {"lr": LogUniform(1e-4, 1e-1), "batch_size": Choice(32, 64, 128), "weight_decay": LogUniform(1e-3, 1.0)}
    with quiet_console(), one_thread():
        params = {"epochs": 3, "output_dir": folder}
        search(
            digits, space, sampler="random", n_trials=16, seed=1, objective="accuracy", direction="max", params=params
        )
    with contextlib.chdir(folder):
        page = write_report([record.folder for record in find_runs(".")], "report.html")
        _photograph("sweep", page.resolve(), 1200, 2080, scale=1.25)


def _photograph(name: str, page: Path, width: int, height: int, scale: float = 1.5) -> None:
    from tools.browser import Browser

    with Browser() as browser:
        for theme in THEMES:
            is_dark = theme.name == "dark"
            with browser.open(page.as_uri(), width=width, height=height, dark=is_dark, scale=scale) as tab:
                tab.wait_for(
                    "document.documentElement.dataset.ready === 'yes' && document.querySelectorAll('canvas').length"
                )
                tab.evaluate("new Promise(done => setTimeout(done, 500))")
                tab.screenshot(ASSETS / f"{name}-{theme.name}.png")


# ---------------------------------------------------------------------- a search


def search() -> None:
    """Search a plan for a small transformer on an H100 with little memory, and draw the candidates."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from drivetrain.auto import auto_accelerate

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
            self.embedding = nn.Embedding(8192, 512)
            self.blocks = nn.ModuleList(type(layer)(512, 8, 2048, 0.0, batch_first=True) for _ in range(8))
            self.head = nn.Linear(512, 8192)

        def forward(self, batch: Any) -> Any:
            x = self.embedding(batch[0])
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    tokens = torch.randint(0, 8192, (256, 128))
    _, _, plan = auto_accelerate(
        Model(),
        torch.optim.AdamW,
        dataset=TensorDataset(tokens, tokens),
        loss_func=lambda batch, logits: nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten()),
        dataloader_args={"batch_size": 256, "num_workers": 0},
        plan_only=True,
        device="h100",
        memory_budget="6GiB",
        time_limit=100,
    )
    print(plan.explain())
    for theme in THEMES:
        with plotting(theme):
            plan.picture(ASSETS / f"search-{theme.name}.png")


# ---------------------------------------------------------------------- schedules


def schedules() -> None:
    """Draw the learning rates that units really set, update by update."""
    import torch
    from torch import nn

    from drivetrain.optim import CosineLr, CosineRestartsLr, InverseSqrtLr, LinearLr, OneCycleLr, WSDLr

    steps = 300
    length, warm = {"total_steps": steps}, {"warmup_steps": 40}
    made = {
        "CosineLr": (CosineLr, length | warm),
        "LinearLr": (LinearLr, length | warm),
        "WSDLr": (WSDLr, length | warm),
        "OneCycleLr": (OneCycleLr, length),
        "InverseSqrtLr": (InverseSqrtLr, warm),
        "CosineRestartsLr": (CosineRestartsLr, {"first_cycle": 100}),
    }
    curves = {}
    for name, (kind, settings) in made.items():
        model = nn.Linear(1, 1)
        unit = kind("SGD", {"lr": 1.0}, model, **settings)
        rates = []
        for _ in range(steps):
            unit.step(model(torch.ones(1, 1)).sum() * 0)
            rates.append(unit.get_lr())
        curves[name] = rates
    for theme in THEMES:
        with plotting(theme) as plt:
            figure, axes = plt.subplots(2, 3, figsize=(9, 4.2), sharex=True, sharey=True, layout="constrained")
            for panel, (name, rates) in zip(axes.flat, curves.items()):
                panel.plot(rates, color=theme.accent, linewidth=1.6)
                panel.set_title(name, fontsize=10)
                panel.grid(alpha=0.5)
            figure.supxlabel("update", fontsize=10)
            figure.supylabel("learning rate / base rate", fontsize=10)
            save(figure, "schedules", theme)


# ---------------------------------------------------------------------- a pipeline


def _pipeline_rank(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from drivetrain import init_distributed

    torch.set_num_threads(1)
    init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width, chunks = 768, 6
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    spans: list[tuple[str, int, float, float]] = []

    def timed(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            value = method(chunk, *args, **kwargs)
            spans.append((kind, chunk, start, time.perf_counter()))
            return value

        return run

    stage.forward_one_chunk = timed("F", stage.forward_one_chunk)
    stage.backward_one_chunk = timed("B", stage.backward_one_chunk)
    schedule = Schedule1F1B(stage, chunks, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(chunks * 256, width)
    for _ in range(3):
        spans.clear()
        dist.barrier()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
    Path(folder, f"{rank}.txt").write_text("\n".join(f"{k} {c} {a} {b}" for k, c, a, b in spans), encoding="utf-8")


def pipeline() -> None:
    """Run two stages on two processes and draw when each worked on which micro-batch."""
    from drivetrain.runtime.launch import launch

    folder = tempfile.mkdtemp()
    launch(_pipeline_rank, 2, args=(folder,))
    rows = []
    for rank in range(2):
        lines = [line.split() for line in Path(folder, f"{rank}.txt").read_text(encoding="utf-8").splitlines()]
        rows.append([(kind, int(chunk), float(start), float(end)) for kind, chunk, start, end in lines])
    first = min(span[2] for row in rows for span in row)
    for theme in THEMES:
        with plotting(theme) as plt:
            figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
            for rank, row in enumerate(rows):
                for kind, chunk, start, end in row:
                    colour = "#3b82a8" if kind == "F" else "#c65d1e"
                    left, width = 1e3 * (start - first), 1e3 * (end - start)
                    axes.barh(rank, width, left=left, color=colour, edgecolor=theme.ground, height=0.72)
                    axes.text(left + width / 2, rank, chunk, color="white", ha="center", va="center", fontsize=9)
            axes.set(yticks=range(len(rows)), yticklabels=[f"stage {rank}" for rank in range(len(rows))], xlabel="ms")
            axes.invert_yaxis()
            axes.set_title("1F1B: forward (blue) and backward (orange) of six micro-batches", fontsize=10)
            save(figure, "pipeline", theme)


# ---------------------------------------------------------------------- memory


def memory() -> None:
    """Follow the bytes of all tensors through one update, plain and with recomputation."""
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from drivetrain.module import checkpoint_blocks

    class Follow(TorchDispatchMode):
        """Adds up storages that are alive after each operation."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
            self.sizes: dict[int, int] = {}
            self.curve: list[float] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves((args, result)):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf.untyped_storage())
            self.curve.append(sum(self.sizes.values()) / 2**20)
            return result

        def _add(self, storage: Any) -> None:
            if storage not in self.seen:
                self.seen.add(storage)
                key = id(storage)
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key, None)

    def run(recompute: bool) -> list[float]:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer
        model = nn.Sequential(*(block(256, 4, 1024, 0.0, batch_first=True) for _ in range(6)))
        if recompute:
            checkpoint_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.randn(16, 128, 256)
        for number in range(2):
            with Follow() as follow:
                loss = model(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if number:
                return follow.curve
        return []

    plain, recomputed = run(False), run(True)
    for theme in THEMES:
        with plotting(theme) as plt:
            figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
            for curve, label, colour in ((plain, "plain", "#3b82a8"), (recomputed, "checkpoint", theme.accent)):
                positions = [place / len(curve) for place in range(len(curve))]
                axes.plot(positions, curve, label=f"{label}: peak {max(curve):.0f} MiB", color=colour, linewidth=1.4)
            axes.set(
                xlabel="operations of one update: forward, backward, optimizer", ylabel="MiB of live tensors", ylim=0
            )
            axes.grid(alpha=0.5)
            axes.legend(frameon=False)
            save(figure, "memory", theme)


PICTURES: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (loop, story, report, sweep, search, schedules, pipeline, memory)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which ones; all by default")
    for name in parser.parse_args().names or PICTURES:
        PICTURES[name]()
        print(f"{name}: done")

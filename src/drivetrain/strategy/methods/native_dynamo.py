"""Compile the model with torch.compile: the whole of it, or block by block under sharding."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from drivetrain.core.errors import MethodConfigError, unknown_name
from drivetrain.core.types import Settings
from drivetrain.module.compilation import (
    GraphBreaks,
    JointStep,
    compile_loss,
    compile_module,
    compile_step,
    forget_shapes,
)
from drivetrain.strategy.effects import Kernels
from drivetrain.strategy.method import Method, NoConfig, Option, Site, Stage
from drivetrain.strategy.methods.fsdp import SHARDING
from drivetrain.strategy.registry import method_names

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope

_FUSED = Kernels(traffic=0.3, launches=0.25)
"""What fusion leaves of eager traffic and launches; priors until a trial has corrected them. With the rates measured there (644 TFLOP/s in
bfloat16, 3.8 TB/s) they give 119 and 170 ms for a step of GPT-2 124M, 64 x 1,024 tokens, on an H200; measured were 121 compiled and 172
in eager mode (torch 2.11, three steps each)."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    scope: Literal["auto", "block", "model"] = "auto"
    """`model`, `block`, or `auto`: the whole model on one device or in DDP, blocks under sharding and tensor parallelism."""
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    include_loss: bool = True
    """Whether the loss is compiled with the whole model: as one graph in a Trainer where nothing acts between them, else next to it."""
    activation_memory_budget: float = 1.0
    """Share of the activations that the compiler may keep; with less it recomputes. It applies to the whole process."""
    allow_tf32: bool = False


class NativeDynamo(Method):
    """torch.compile in place. Names and state-dict keys do not change."""

    name, group, stage = "native_dynamo", "dynamo", Stage.COMPILE_MODEL
    aliases = ("compile",)
    Config = CompileConfig
    short = "backend"
    renamed = {"dynamo_backend": "backend"}
    ignored_keys = ("mixed_precision",)
    why = "kernels are fused by the compiler"
    unproved_on = frozenset({"cpu"})
    compiles = leaves_no_trace = True
    not_simulated = "kernels are not compiled on fake tensors; the compiler may keep less"

    def options(self, scope: "SearchScope") -> list[Option]:
        kept = scope.kept(self.name)
        if kept and kept[0].scope != "auto":
            scopes = [kept[0].scope]
        elif kept:
            scopes = ["model", "block"]
        elif scope.is_cpu and scope.is_here and not scope.must(self.name) and not _has_compiler():
            scope.note("compile: there is no C++ compiler on this machine")
            scopes = []
        else:
            scopes = ["model", "block"] if scope.has_blocks else ["model"]
        return [((self.name, scope.config(self, scope=one)),) for one in scopes]

    def settled(self, config: CompileConfig, candidate: "Candidate") -> CompileConfig:
        if config.scope != "auto":
            return config
        return replace(config, scope="block" if candidate.divides_model else "model")

    def fits(self, config: CompileConfig, candidate: "Candidate") -> str | None:
        is_whole = config.scope == "model"
        return "a sharded or split model is compiled block by block" if is_whole and candidate.divides_model else None

    def affect(self, effects: "Effects", config: CompileConfig) -> None:
        effects.block_kernels = _FUSED
        if config.scope == "model":
            effects.compiled, effects.other_kernels = "model", _FUSED
            effects.cast_width, effects.is_tracked = 0.0, False  # both are in the figures of the compiled graph
        else:
            effects.compiled = "block"

    def label(self, config: CompileConfig) -> str:
        return "compile" if config.scope == "model" else "compile blocks"

    def read(self, values: Settings) -> Settings:
        budget = values.get("activation_memory_budget", 1.0)
        if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 <= budget <= 1:
            raise self.bad("activation_memory_budget", budget, "a share between 0 and 1")
        return values

    def check(self, config: CompileConfig, site: Site) -> None:
        from torch._dynamo import list_backends

        if config.backend not in (known := list_backends(exclude_tags=())):
            raise MethodConfigError(unknown_name("backend", config.backend, known, where=self.name))

    def stage_of(self, config: CompileConfig, site: Site) -> Stage:
        is_split = not site.names.isdisjoint({*SHARDING, "tensor_parallel", "pipeline_parallel"})
        by_block = config.scope == "block" or (config.scope == "auto" and is_split)
        return Stage.COMPILE_BLOCKS if by_block else Stage.COMPILE_MODEL

    def apply(self, ctx: "Application", config: CompileConfig) -> None:
        settings: Settings = {"backend": config.backend, "fullgraph": config.fullgraph}
        settings |= {"dynamic": False} if ctx.plan.site.axis("tensor") > 1 else {}  # see TensorParallel.clash
        settings |= {key: value for key in ("mode", "dynamic") if (value := getattr(config, key)) is not None}
        if "cuda_graphs" in ctx.plan.site.names:
            settings["mode"] = "reduce-overhead"
        if config.allow_tf32:
            torch.set_float32_matmul_precision("high")
        if config.activation_memory_budget < 1:
            from torch._functorch import config as functorch_config

            functorch_config.activation_memory_budget = config.activation_memory_budget
            ctx.note("compile: the activation memory budget applies to the whole process")
        forget_shapes()
        whole = self.stage_of(config, ctx.plan.site) is Stage.COMPILE_MODEL
        compile_module(ctx.model, "model" if whole else "block", **settings)
        breaks = GraphBreaks()

        def change_loss(loss_func: Any) -> Any:
            compiled = loss_func
            # A chunked loss compiles its own inner part: what it does around it is no arithmetic.
            is_compiled = whole and config.include_loss and ctx.plan.config("chunked_cross_entropy") is None
            if is_compiled:
                compiled = compile_loss(loss_func, **settings)
            # A module stays one: it may have parameters that are saved or moved.
            planned = compiled if isinstance(compiled, nn.Module) else _reporting(compiled, breaks, ctx)
            if is_compiled and ctx.loss_graph != "apart" and ctx.plan.site.world == 1:  # DDP's hooks are not compiled
                ctx.joint = JointStep(_reporting(compile_step(**settings), breaks, ctx), loss_func, planned)
            return planned

        ctx.loss_changes.append(change_loss)


def _reporting(function: Callable[..., Any], breaks: GraphBreaks, ctx: "Application") -> Callable[..., Any]:
    """Return a function that also notes the graph breaks after its first call: by then all is compiled."""
    reported: list[str] = []

    def call(*args: object) -> Any:
        result = function(*args)
        if not reported:
            reported.append(breaks.report())
            ctx.note(f"compile: {reported[0]}")
        return result

    call.loss_func = function  # type: ignore[attr-defined]
    return call


def _has_compiler() -> bool:
    """Return whether kernels for the CPU can be compiled here."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)


class CudaGraphs(Method):
    """`torch.compile(mode="reduce-overhead")`; needs batches of one shape."""

    name, group, stage = "cuda_graphs", "dynamo", Stage.MESH
    why = "kernels are replayed without launch cost; batches must have one shape"
    short_label = "graphs"
    compiles = records_kernels = True
    warm_up_steps = 1
    not_simulated = "there is nothing to record on fake tensors"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, not scope.is_cpu and NativeDynamo.name in method_names())

    def fits(self, config: NoConfig, candidate: "Candidate") -> str | None:
        compiler = candidate.configs.get(NativeDynamo.name)
        if compiler is None or compiler.scope != "model" or candidate.world > 1:
            return "it records a whole compiled model on one rank"
        names = {"cpu_offload", "checkpoint"} & candidate.configs.keys()
        return f"{min(names)} does not run in recorded kernels" if names else None

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.is_recorded = True

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        return None if device.type == "cuda" else "it needs a CUDA device"

    def expand(self, config: NoConfig) -> Settings:
        """Return the method itself and the compiler whose kernels it records."""
        return {self.name: None, NativeDynamo.name: None}

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        ctx.note("cuda_graphs: use drop_last=True; a smaller last batch would be recorded again")

"""Compute the cross entropy of a large vocabulary chunk by chunk, so that the logits never exist at once.

While the model trains it returns hidden states; the loss function is called with an object that represents the logits
(`drivetrain.module.deferred_logits`). A model that computes its own loss, as those of transformers do, gets that object from its last
layer. In evaluation nothing is different.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.core.errors import ConflictError, UnsupportedMethodError
from drivetrain.module.chunked_loss import loss_and_logit_gradients
from drivetrain.module.deferred_logits import DeferredLoss, DeferredSource, defer_head, find_final_linear
from drivetrain.strategy.method import Method, Option, Site, Stage, is_whole

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Effects, SearchScope

_CHUNKS = 8
"""Into how many parts the logits are cut, at least."""
_SPLIT = "The head's weight is split over ranks, but the loss needs the whole weight. Remove chunked_cross_entropy."


@dataclass(frozen=True, kw_only=True)
class ChunkedConfig:
    chunk: int | str = "auto"
    """Rows (tokens) of one chunk; `auto`: as many as have half a GiB of float32 logits."""


class ChunkedCrossEntropy(Method):
    """Loss and gradients of the last layer, computed together over chunks of rows."""

    name, group, stage = "chunked_cross_entropy", "loss", Stage.MODULE
    Config = ChunkedConfig
    short = "chunk"
    conflicts = dict.fromkeys(("fsdp", "zero2", "tensor_parallel", "pipeline_parallel"), _SPLIT)
    why = "the logits of a large vocabulary are never held at once"
    short_label = "chunked loss"
    is_minor = leaves_no_trace = True

    def options(self, scope: "SearchScope") -> list[Option]:
        has_head = scope.profile.cross_entropy_head is not None
        return self.flag_options(scope, has_head and scope.task.loss_func is not None)

    def affect(self, effects: "Effects", config: ChunkedConfig) -> None:
        effects.logits_share = 1 / _CHUNKS
        effects.head_again = 1.0  # the logits are computed again for backward

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        chunk = values.get("chunk", "auto")
        if chunk != "auto" and not is_whole(chunk):
            raise self.bad("chunk", chunk, "'auto' or a number of rows")
        return values

    def requires(self, profile: Any, device: torch.device, world: int) -> str | None:
        if profile is not None and profile.cross_entropy_head is None:
            return "the loss is not a cross entropy over the output of a final linear layer"
        return None

    def check(self, config: ChunkedConfig, site: Site) -> None:
        if site.model is not None and not any(isinstance(module, nn.Linear) for module in site.model.modules()):
            raise UnsupportedMethodError(
                f"chunked_cross_entropy: {type(site.model).__name__} has no linear layer, so it does not end in one. Remove the method."
            )

    def apply(self, ctx: "Application", config: ChunkedConfig) -> None:
        if ctx.ddp_settings.get("find_unused_parameters"):
            raise ConflictError(
                "chunked_cross_entropy and find_unused_parameters=True cannot be used together: the loss uses the head, where DDP does not "
                "look for it. Remove one of them."
            )
        if ctx.sample is None:
            raise UnsupportedMethodError(
                "chunked_cross_entropy needs a few samples to check that the model ends in a linear layer. Pass dataset or sample_batch, "
                "or remove the method."
            )
        arguments = ctx.sample_arguments()
        if arguments is None:
            raise UnsupportedMethodError(
                "chunked_cross_entropy: the model could not run on the samples. Remove the method."
            )
        name, leaf, has_own_loss = find_final_linear(ctx.model, *arguments)
        if ctx.loss_func is None and not has_own_loss:
            raise UnsupportedMethodError(
                "chunked_cross_entropy changes the loss function, but there is none. Pass loss_func, or remove the method."
            )
        head = ctx.model.get_submodule(name)
        assert isinstance(head, nn.Linear)
        fp8 = ctx.plan.config("fp8")
        if fp8 is not None and any(word in name for word in fp8.include):
            raise ConflictError(
                f"fp8 and chunked_cross_entropy both replace the head {name!r}. Remove it from fp8's include, or remove "
                f"chunked_cross_entropy."
            )
        step = loss_and_logit_gradients
        if (compiler := ctx.plan.config("native_dynamo")) is not None:
            step = torch.compile(step, backend=compiler.backend)
        chunk = None if config.chunk == "auto" else int(config.chunk)
        if has_own_loss:
            defer_head(head, DeferredSource(head, chunk, step))
            ctx.note(f"chunked_cross_entropy: the loss inside the model computes the layer {name!r} in chunks")
            return
        defer_head(head)

        def deferred(loss_func: Any) -> Any:
            if isinstance(loss_func, nn.Module):
                loss_func.to(ctx.device)  # whoever moves modules does not see it in here
            loss = DeferredLoss(loss_func, head, position=ctx.output_position, leaf=leaf, chunk=chunk, step=step)
            return partial(loss)  # a function, of which no checkpoint expects state

        ctx.loss_changes.append(deferred)
        ctx.note(
            f"chunked_cross_entropy: the layer {name!r} is part of the loss; in training the model returns its input"
        )

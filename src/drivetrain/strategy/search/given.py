"""A plan that somebody wrote, as the candidate that stands for it."""

import warnings
from dataclasses import replace

from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.mesh import AXES
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.search.candidates import Candidate, in_order
from drivetrain.strategy.search.problem import PlanningProblem
from drivetrain.strategy.value import Strategy


def candidate_of(plan: Strategy, problem: PlanningProblem) -> Candidate:
    """Return the candidate whose cost is the plan's; it keeps the plan as it was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is dropped is reported when the plan is applied
        resolved = resolve_plan(plan, model=problem.model, device=problem.device, world=problem.world)
    axes = {axis: dict(resolved.axes).get(axis, 1) for axis in AXES}
    if axes["zero"] == 1 and any(method.shards_axis is not None for _, method, _ in resolved.steps):
        axes["zero"], axes["data"] = axes["data"], 1
    ranks = axes["data"] * axes["zero"]
    batch = plan_batch(
        problem.global_batch, ranks, *resolved.batch_split, allow_rounding=problem.constraints.allow_batch_rounding
    )
    candidate = Candidate(
        **axes,
        micro=batch.micro,
        accumulation=batch.accumulation,
        methods=in_order({method.name: settings for _, method, settings in resolved.steps}),
        given=Strategy(
            [(name, settings) for name, settings, _ in plan],
            mesh=resolved.axes[::-1],
            batch=batch,
            dropped=resolved.dropped,
        ),
    )
    settled = tuple((method.name, method.settled(config, candidate)) for method, config in candidate.steps)
    return replace(candidate, methods=settled)

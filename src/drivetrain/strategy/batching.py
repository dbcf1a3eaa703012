"""The arithmetic of batches: global = micro x accumulation x data ranks, with the global batch kept constant."""

from dataclasses import dataclass

from drivetrain.core.arguments import check_counts
from drivetrain.core.errors import BatchSizeError


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How one global batch is split over ranks and time."""

    global_size: int
    micro: int
    """Samples of one forward pass on one rank."""
    accumulation: int
    """Forward passes before an update."""
    data_ranks: int

    def __post_init__(self) -> None:
        check_counts("BatchSplit", 1, **vars(self))
        if self.global_size != self.micro * self.accumulation * self.data_ranks:
            raise BatchSizeError(f"the parts of a batch do not multiply to the whole: {self}.")

    def __str__(self) -> str:
        return f"{self.global_size} = {self.micro} x {self.accumulation} x {self.data_ranks} (micro x accumulation x ranks)"


def plan_batch(
    global_size: int,
    data_ranks: int,
    micro: int | None = None,
    accumulation: int | None = None,
    *,
    allow_rounding: bool = False,
) -> BatchSplit:
    """Split a global batch. A size that does not divide is an error that names the two nearest sizes, or is rounded if that is
    allowed.

    >>> plan_batch(24, 2, micro=4)
    BatchSplit(global_size=24, micro=4, accumulation=3, data_ranks=2)
    """
    unit = data_ranks * (micro or 1) * (accumulation or 1)
    if global_size % unit:
        below, above = global_size // unit * unit, (global_size // unit + 1) * unit
        if not allow_rounding:
            parts = [f"{data_ranks} data ranks"]
            parts += [f"micro-batches of {micro}"] if micro else []
            parts += [f"{accumulation} accumulation steps"] if accumulation else []
            nearest = f"{below} and {above}" if below else f"{above}"
            raise BatchSizeError(
                f"the global batch size {global_size} does not divide over {', '.join(parts)}. The nearest sizes that do: "
                f"{nearest}. Choose one of them, or pass allow_batch_rounding=True."
            )
        global_size = below if below and global_size - below <= above - global_size else above
    per_rank = global_size // data_ranks
    if micro and accumulation:
        if micro * accumulation != per_rank:
            wanted = micro * accumulation * data_ranks
            raise BatchSizeError(
                f"micro_batch requests {micro} x {accumulation} samples on each of {data_ranks} data ranks, which is {wanted}; the "
                f"global batch size is {global_size}. Give size or accumulation alone, or the batch size {wanted}."
            )
    elif micro:
        accumulation = per_rank // micro
    else:
        accumulation = accumulation or 1
        micro = per_rank // accumulation
    return BatchSplit(global_size=global_size, micro=micro, accumulation=accumulation, data_ranks=data_ranks)


def replan_batch(batch: BatchSplit, data_ranks: int) -> BatchSplit:
    """Return the same global batch on another number of ranks, with micro-batches no larger than before."""
    plain = plan_batch(batch.global_size, data_ranks)
    micro = max(size for size in range(1, min(batch.micro, plain.micro) + 1) if plain.micro % size == 0)
    return plan_batch(batch.global_size, data_ranks, micro)

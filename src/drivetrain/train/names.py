"""Names under which the Trainer shows parts of its run."""

from operator import attrgetter
from typing import Any


def part_of_run(path: str) -> Any:
    """Return a property of the Trainer that reads and writes a field of its run."""
    holder, _, name = f"run.{path}".rpartition(".")
    find = attrgetter(holder)

    def assign(trainer: Any, value: Any) -> None:
        setattr(find(trainer), name, value)

    return property(attrgetter(f"run.{path}"), assign)


class RunNames:
    """What pytorch-accelerated's subclasses read or assign, and the public names of a run."""

    settings = part_of_run("settings")
    run_config = part_of_run("config")
    evaluating = part_of_run("is_evaluating")
    _train_dataloader = part_of_run("data.train")
    _eval_dataloader = part_of_run("data.evaluation")
    _train_dl_kwargs = part_of_run("data.train_kwargs")
    _eval_dl_kwargs = part_of_run("data.eval_kwargs")
    _loss_tracker = part_of_run("measures.tracker")

    # To go, as files read the run itself.
    _after_forward = part_of_run("loss.after_forward")
    _before_loss = part_of_run("loss.before_loss")
    _listens_before_loss = part_of_run("loss.listens_before_loss")
    _first_batch = part_of_run("loss.is_first")
    _in_region = part_of_run("loss.in_region")
    _saw_forward = part_of_run("loss.saw_forward")
    _saw_loss = part_of_run("loss.saw_loss")
    _form = part_of_run("loss.form")
    _form_type = part_of_run("loss.form_type")
    _own_loss = part_of_run("loss.own_loss")
    _watch = part_of_run("loss.watch")
    _find_form = part_of_run("loss.find_form")
    _batches_per_epoch = part_of_run("data.batches_per_epoch")
    _sample_source = part_of_run("data.source")
    _may_pad = part_of_run("data.may_pad")
    _wants_index = part_of_run("data.reads_index")
    _count_tokens = part_of_run("data.count_tokens")
    _eval_every = part_of_run("evaluation.is_due")
    _eval_interval = part_of_run("evaluation.interval")
    _eval_after_epoch = part_of_run("evaluation.after_epoch")
    _unfinished = part_of_run("evaluation.unfinished")
    _evaluation_was_cut = part_of_run("evaluation.was_cut")
    _eval_set = part_of_run("evaluation.set_name")
    _evaluation_state = part_of_run("evaluation.state")
    _plateau_watch = part_of_run("evaluation.plateau")
    _restored_rng = part_of_run("restored.rng")
    _saved_evaluations = part_of_run("restored.evaluations")
    _saved_step_losses = part_of_run("restored.step_losses")
    _logged = part_of_run("measures.logged")
    _train_items = part_of_run("measures.train_items")
    _eval_items = part_of_run("measures.eval_items")
    _has_train_metrics = part_of_run("measures.has_train_metrics")
    _step_losses = part_of_run("measures.step_losses")
    _generate = part_of_run("generate")
    _fire = part_of_run("fire")
    _units = part_of_run("units")
    _good = part_of_run("good")
    _microbatch_size = part_of_run("microbatch_size")
    _ddp = part_of_run("is_ddp")
    _schedules_each_step = part_of_run("schedules_each_step")
    _limits = part_of_run("agreement.limits")
    _keeper = part_of_run("checkpoints")
    _signals = part_of_run("agreement.signals")
    _vote = part_of_run("agreement.vote")
    _stop = part_of_run("agreement.stop")
    _has_agreed = part_of_run("agreement.is_reached")
    _is_running = part_of_run("is_running")
    _inside_step = part_of_run("inside_step")
    _epoch_is_recorded = part_of_run("epoch_is_recorded")
    _boundary_work = part_of_run("has_boundary_work")

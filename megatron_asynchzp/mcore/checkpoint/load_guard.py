# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Guards Megatron's loading: which checkpoint, whether it fits, one line for each failure."""

import os
import pickle
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_asynchzp.checkpoint_files.choice import (
    TRACKER,
    Choice,
    choose_checkpoint,
    list_unfinished,
    repair_tracker,
)
from megatron_asynchzp.checkpoint_files.errors import one_line
from megatron_asynchzp.checkpoint_files.index import index_read_once, read_common_state
from megatron_asynchzp.checkpoint_files.peers import Peers, on_first
from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.checkpoint.frozen import (
    is_partly_frozen,
    is_trained_only,
    keep_frozen,
    keep_new,
)
from megatron_asynchzp.mcore.checkpoint.local import LOCAL, find_local
from megatron_asynchzp.mcore.checkpoint.mismatch import (
    NO_OPTIMIZER,
    compare,
    read_facts,
    wanted_tensors,
)
from megatron_asynchzp.mcore.checkpoint.operation import Load, current_load, in_progress
from megatron_asynchzp.mcore.checkpoint.progress import bytes_read, log_progress
from megatron_asynchzp.mcore.checkpoint.save_guard import claim_save_directory, non_persistent_dir
from megatron_asynchzp.mcore.checkpoint.world import log, peers_of_job

# What the reading of files can end in. A RuntimeError may also be a peer's death, or ours.
_UNREADABLE = (CheckpointingException, CheckpointException, OSError, EOFError, KeyError)
_UNREADABLE += (AssertionError, pickle.UnpicklingError)
_TORCH_READER = "PytorchStreamReader"

# What Megatron asserts where a run is to go on with another schedule, for example for longer.
_SCHEDULE_DIFFERS = re.compile(
    r"OptimizerParamScheduler: class input value (?P<now>\S+) and checkpoint\s?value "
    r"(?P<saved>\S+) for (?P<name>.+) do not match"
)


def guard_load_checkpoint(
    load: Callable[[], Any],
    args: Namespace,
    load_arg: str,
    scheduler: Any = None,
    context: Mapping[str, Any] | None = None,
) -> Any:
    """Call Megatron's load_checkpoint for the newest intact checkpoint, not the tracker's.

    Collective. scheduler is Megatron's of learning rates, context has its manager of local
    checkpoints. Raises ConfigurationError if there is none, or it does not fit.
    """
    claim_save_directory(args)
    peers = peers_of_job()
    load_dir = given_dir = getattr(args, load_arg)
    with log_progress(f"reading {load_dir}", bytes_read, peers.rank == 0), index_read_once():
        persistent = _choose(load_dir, args, peers)
        choice = _newer(persistent, _choose_non_persistent(load_dir, args, peers))
        if choice is not None:
            load_dir = str(choice.folder.parent)
        local = _find_local(args, choice, given_dir, context, peers)
        base_dir = getattr(args, "pretrained_checkpoint", None)
        is_base = choice is None and local == -1 and base_dir is not None
        if is_base:
            load_dir = base_dir
            choice = _choose(load_dir, args, peers)
        elif choice is not None or local != -1:
            raise_first(_faults_of_optimizer(args, choice if local == -1 else None, peers))
        if choice is not None and _lacks_base(choice, peers):
            _load_base(load, args, choice, peers)
        try:
            if not is_base:
                setattr(args, load_arg, load_dir)
            if local != -1:
                args.pretrained_checkpoint = None  # else Megatron begins from it
            loaded = _load(load, args, load_dir, Load(choice, local))
        finally:
            setattr(args, load_arg, given_dir)
            if base_dir is not None:
                args.pretrained_checkpoint = base_dir
    if choice is None and local == -1 and load_dir is not None:
        line = (
            f"--load {load_dir}: there is no checkpoint, training starts from random weights; "
            "--exit-on-missing-checkpoint ends such a run"
        )
        log([line], peers)
    if scheduler is not None and args.use_checkpoint_opt_param_scheduler:
        # Megatron's applies its schedule before it has read the weight decay of the checkpoint.
        scheduler.step(increment=0)
    return loaded


def _choose_non_persistent(load_dir: str | None, args: Namespace, peers: Peers) -> Choice | None:
    kind = getattr(args, "non_persistent_ckpt_type", None)
    if kind != "global" or load_dir is None or args.ckpt_step or args.finetune:
        return None
    try:
        choice = _choose(non_persistent_dir(args, load_dir), args, peers)
    except ConfigurationError as error:
        log([f"no non-persistent checkpoint is loaded: {error}"], peers)
        return None
    runs = [os.path.abspath(folder) for folder in (load_dir, args.save) if folder]
    if choice is None or (save := on_first(peers, partial(_save_of, choice))) in (None, *runs):
        return choice
    log([f"{choice.folder} is not loaded: it is of the run with --save {save}"], peers)
    return None


def _save_of(choice: Choice) -> str | None:
    save = getattr(_saved_args(choice), "save", None)
    return save and os.path.abspath(save)


def _newer(persistent: Choice | None, non_persistent: Choice | None) -> Choice | None:
    if persistent is None or non_persistent is None:
        return persistent or non_persistent
    return non_persistent if non_persistent.saved_at > persistent.saved_at else persistent


def _find_local(
    args: Namespace,
    choice: Choice | None,
    load_dir: str | None,
    context: Mapping[str, Any] | None,
    peers: Peers,
) -> int:
    manager = (context or {}).get("local_checkpoint_manager")
    if manager is None or args.non_persistent_ckpt_type != LOCAL:
        return -1
    shared = -1 if choice is None else choice.iteration
    is_wanted = load_dir is not None and not args.ckpt_step and not args.finetune
    local = find_local(args, manager, shared, is_wanted, peers)
    log(local.lines, peers)
    return local.iteration


def _saved_args(choice: Choice) -> Any:
    try:
        return read_common_state(choice.folder).get("args")
    except FileNotFoundError:
        return None


def _lacks_base(choice: Choice, peers: Peers) -> bool:
    return on_first(peers, lambda: is_trained_only(_saved_args(choice)))


def _faults_of_optimizer(args: Namespace, choice: Choice | None, peers: Peers) -> Iterator[str]:
    """Say why Megatron would skip the optimizer's state, alike on all ranks. Collective.

    choice is the checkpoint, None for a local one.
    """
    if args.finetune or args.no_load_optim or (choice is not None and choice.is_release):
        return
    if args.no_save_optim:
        yield (
            "--no-save-optim: Megatron then reads no optimizer from --load either; leave it out, "
            "or add --no-load-optim, which starts with new moments"
        )
    if choice is not None and on_first(
        peers, lambda: getattr(_saved_args(choice), "no_save_optim", False)
    ):
        yield f"{choice.folder} {NO_OPTIMIZER}"


def _load_base(load: Callable[[], Any], args: Namespace, choice: Choice, peers: Peers) -> None:
    base_dir = getattr(args, "pretrained_checkpoint", None)
    asked = {name: getattr(args, name) for name in ("load", "finetune", "ckpt_step")}
    args.load, args.finetune, args.ckpt_step = base_dir, True, None
    try:
        base = _choose(base_dir, args, peers)
        if base is None or _lacks_base(base, peers):
            raise ConfigurationError(
                f"{choice.folder} has only what was trained (--asynchzp-save-trained-only), and "
                f"{base_dir or 'no other one'} has not the rest: add --pretrained-checkpoint DIR"
            )
        log([f"the frozen part of the model is that of {base.folder}"], peers)
        _load(load, args, base_dir, Load(base, local_iteration=-1))
    finally:
        vars(args).update(asked)


def guard_load_args(load: Callable[[], Any], args: Namespace, load_dir: str | None) -> Any:
    """Call Megatron's load_args_from_checkpoint, which each rank does by itself."""
    # Only the files of the arguments are checked; all ranks check the rest before they load it.
    with index_read_once():
        choice = None
        if load_dir:
            level = VerifyLevel.ARGUMENTS
            choice = choose_checkpoint(load_dir, args.ckpt_step or None, level=level)
        return _load(load, args, load_dir, Load(choice))


def _choose(load_dir: str | None, args: Namespace, peers: Peers) -> Choice | None:
    if load_dir is None:
        return None
    level = VerifyLevel(getattr(args, "asynchzp_verify", VerifyLevel.FULL))
    choice = choose_checkpoint(load_dir, args.ckpt_step or None, peers, level)
    if choice is None:
        left = on_first(peers, partial(list_unfinished, load_dir))
        log(
            (f"{load_dir}: {folder} is left of a save that was interrupted" for folder in left),
            peers,
        )
    else:
        log(choice.lines, peers)
        if not args.ckpt_step:
            log([on_first(peers, partial(repair_tracker, load_dir, choice))], peers)
    return choice


def _load(load: Callable[[], Any], args: Namespace, load_dir: str | None, operation: Load) -> Any:
    choice = operation.choice
    is_release = choice is not None and choice.is_release
    if is_release and not Path(load_dir or "", TRACKER).is_file():
        raise ConfigurationError(f"{load_dir}: write the word release into {TRACKER}")
    step = args.ckpt_step
    if choice is not None:
        # Without a tracker file, which a read-only directory may lack, Megatron looks at this.
        args.ckpt_step = choice.iteration or None
    place = choice.folder if choice is not None else load_dir
    try:
        with in_progress(operation):
            return load()
    except SystemExit as end:
        is_missing = choice is None and args.exit_on_missing_checkpoint
        if end.code and not is_missing:  # from megatron-core 0.20 on 1 for a missing one
            raise
        missing = f"there is no checkpoint in {place}, and --exit-on-missing-checkpoint was given"
        reason = missing if is_missing else f"{place} is refused (see above)"
        raise ConfigurationError(reason) from None
    except (*_UNREADABLE, RuntimeError) as error:
        if not isinstance(error, _UNREADABLE) and _TORCH_READER not in str(error):
            raise
        reason = f"could not be loaded: {one_line(error)}"
        if difference := _SCHEDULE_DIFFERS.search(str(error)):
            reason = (
                f"has another learning-rate schedule: {difference['name']} is "
                f"{difference['saved']} there and {difference['now']} in this run; add "
                "--override-opt-param-scheduler to go by this run's flags, or "
                "--use-checkpoint-opt-param-scheduler to go by the checkpoint's"
            )
        raise ConfigurationError(f"{place} {reason}") from error
    finally:
        args.ckpt_step = step


def chosen_metadata(tracker: str) -> tuple[int, bool] | None:
    """Return what Megatron shall read from this tracker file; None without a choice."""
    load = current_load()
    choice = load and load.choice
    if choice is None or Path(tracker).parent != choice.folder.parent:
        return None
    return choice.iteration, choice.is_release


def guard_load_global(
    load: Callable[[], Any],
    args: Namespace,
    load_dir: str,
    is_common: bool,
    state: Any,
    *place: Any,
) -> Any:
    """Call Megatron's _load_global_dist_base_checkpoint for a checkpoint that fits.

    Collective, unless it loads the common state alone. state is filled; place is the iteration and
    whether it is a release.
    """
    if not is_common and state is not None:
        from megatron.training.checkpointing import get_checkpoint_name

        ask_for_what_is_there(
            args, get_checkpoint_name(load_dir, *place, return_base_dir=True), state
        )
    return load()


def ask_for_what_is_there(args: Namespace, iteration_dir: str, state: Any) -> None:
    """Compare the checkpoint with `state`, and remove tensors that a frozen model loads elsewhere.

    Collective. Raises ConfigurationError on all ranks with the first difference and both values.
    """
    peers = peers_of_job()
    facts = read_facts(iteration_dir, peers)
    if is_trained_only(facts.saved):
        keep_frozen(state)
    elif args.finetune:
        new = set().union(*peers.gather(keep_new(state, facts.names)))
        if new:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            log([f"{iteration_dir} lacks {min(new)}{more}, which start anew"], peers)
    difference = compare(args, facts.saved, facts.shapes, list(wanted_tensors(state)), peers)
    if difference is not None:
        advice = "; adapters start on a base with --finetune" if is_partly_frozen(state) else ""
        raise ConfigurationError(f"{iteration_dir} {difference}{'' if args.finetune else advice}")

"""Training run: data, model, offload manager, checkpoints and metrics around the step loop.

Owns the order of setup and teardown. Invariant: every check that can refuse the run comes before the first write, and
whatever ends the run (the last step, a stop request, an error) closes everything in reverse order.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from memo.allocator import active_allocator, use_planned_allocator
from memo.errors import CheckpointError, DeviceOutOfMemory, ExitCode, TrainingDiverged, UsageError
from memo.gpt.arithmetic.flops import parameter_count
from memo.gpt.checkpoint.background import BackgroundCheckpointDir
from memo.gpt.checkpoint.directory import Checkpoint, step_path
from memo.gpt.config import GPTConfig
from memo.gpt.data.batches import Batches, Split
from memo.gpt.data.document_batches import DocumentBatches
from memo.gpt.data.regrouped_batches import RegroupedBatches
from memo.gpt.data.token_file import TokenFile, open_tokens
from memo.gpt.model.attention_kernel import AttentionKind, Kernel, choose
from memo.gpt.model.model import GPT
from memo.gpt.optim import HostOptimizer, require_optimizer_room
from memo.gpt.rope_scaling import RopeScaling, RopeScalingKind
from memo.gpt.run_config import Documents, RunConfig
from memo.gpt.train.adapter import ADAPTATION, EndedStep
from memo.gpt.train.checkpoint_cadence import CheckpointCadence
from memo.gpt.train.embedding_choice import choose_exchange, require_possible
from memo.gpt.train.former_batch import batch_lines, batch_settings, drawn_rows, former_settings, with_former_batch
from memo.gpt.train.former_settings import GUARD, differences, flag_of_setting, positions, require_settings
from memo.gpt.train.gradient_compression import require_replicas, resumed_state, state_settings
from memo.gpt.train.interrupt import StopRequest
from memo.gpt.train.metrics import MetricsFile
from memo.gpt.train.offload_arguments import open_manager
from memo.gpt.train.step import BatchSource, StepResult, Trainer, weight_dtype
from memo.gpt.train.step_metrics import StepMeter
from memo.gpt.train.tensorboard import TensorBoard
from memo.gpt.train_config import GPU_PRECISION, Precision, TrainConfig
from memo.machine import return_freed_memory
from memo.manager import Machine
from memo.parallel import Layout
from memo.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from memo.gpt.checkpoint.distributed import DistributedCheckpointDir
    from memo.gpt.train.adapter import Adapter, LayoutDecision
    from memo.manager import Manager
    from memo.mip.activation import ActivationPlan
    from memo.parallel import World


def train(
    config: RunConfig, *, phase: Callable[[str | None], None] = lambda _: None, adapter: Adapter | None = None
) -> ExitCode:
    """Trains until the last step or a stop request.

    Args:
        config: the run.
        phase: called with what begins, in a few words; with None once the run's own lines say so.
        adapter: decides on the layout after each step.

    Returns:
        OK after the last step, or the last one in this layout, INTERRUPTED after a stop request.

    Raises:
        MemoError: the run cannot start or go on; the newest checkpoint, if any, is complete.
    """
    if adapter is not None:
        config = adapter.resumed(config, former_settings(config))
    config = with_former_batch(config)
    ranks = _check_layout(config)
    device = _prepare(config)
    try:
        with ExitStack() as stack:
            world = _join(config, device, stack) if ranks > 1 else None
            return _Run(config, device, stack, world, phase, adapter).go()
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(f"{error}; {_TO_FIT}") from None
    except RuntimeError as error:
        if "CUDA out of memory" in str(error):  # the planned allocator's, which cannot throw torch's own class
            raise DeviceOutOfMemory(f"{error}; {_TO_FIT}") from None
        if "can't allocate memory" not in str(error):  # torch's CPU allocator has no error class of its own
            raise
        raise DeviceOutOfMemory(f"the machine's memory is full; {_TO_FIT}") from None


TELL_AGAIN = 1.1
"""More rows on one rank's experts than plans have room for are told again once they are so many times the most told."""
_TO_FIT = "use --offload disk or auto, a shorter --seq, a smaller --batch, or a smaller model"


class _Run:
    """Parts of one run, opened in an order in which a refusal leaves nothing behind."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        stack: ExitStack,
        world: World | None,
        phase: Callable[[str | None], None],
        adapter: Adapter | None,
    ) -> None:
        self.config = config
        self.adapter = adapter
        self.phase = phase
        self.world = world
        self._leads = leads = world is None or world.rank == 0
        self._told_rows = 0.0
        lost = "all steps"
        if config.checkpoint_dir is not None:
            lost = f"steps since the last checkpoint in {config.checkpoint_dir}"
        self.stop = StopRequest(lost=f"{lost} are lost", forwarded=world is not None)
        self.checkpoints = _open_checkpoints(config, stack, world)
        start, notes = _starting_point(config, self.checkpoints)
        self.done = start.step if start is not None else 0
        self.cadence = CheckpointCadence(
            steps=config.checkpoint_every, minutes=config.checkpoint_minutes, done=self.done
        )
        phase("reading the data")
        tokens = _open_tokens(config, world)
        shape = _shape(config, tokens, start)
        training = _training(config, device)
        self.shape, self.device = shape, device
        if config.optimizer_offload:
            element = weight_dtype(training.precision).itemsize
            require_optimizer_room(4 * element * parameter_count(shape), Machine(device).free_host_bytes())
        self.metrics = None
        if config.metrics is not None and leads:
            self.metrics = stack.enter_context(
                MetricsFile(config.metrics, after_step=None if config.resume is None else self.done)
            )
        self.tensorboard = None
        if config.tensorboard is not None and leads:
            self.tensorboard = stack.enter_context(TensorBoard(config.tensorboard, done=self.done))
        drawn = drawn_rows(config, start)
        self.settings = _settings(config, shape, training) | batch_settings(config, drawn)
        notes += differences(start, self.settings) + batch_lines(config, start)
        batches = _batches(config, tokens, "train", drawn=drawn)
        self.eval_batches = _batches(config, tokens, "eval") if config.eval_every else None
        phase("building the model")
        sparse, chosen = choose_exchange(config, shape, element=weight_dtype(training.precision).itemsize)
        notes += [] if chosen is None else [chosen]
        self.trainer, self.manager = _open_trainer(
            config, shape, training, batches, world, device, stack, sparse=sparse
        )
        if self.manager is not None:
            self.manager.step = self.done + 1
            notes += _plan_differences(config, shape, self.manager.plan)
        of_state = state_settings(config, self.trainer.compressed)
        self.settings |= of_state
        if start is not None:
            phase(f"loading {start.path}")
            has_state, lines = resumed_state(config, of_state, start)
            notes += lines
            _load(start, self.trainer, world, with_compression=has_state)
            if positions(start.settings) == positions(self.settings):  # else losses of before say nothing of those now
                self.trainer.loss_guard.restore(start.settings.get(GUARD, {}))
        self.meter = StepMeter(
            shape,
            seq=config.seq,
            device=device,
            precision=training.precision,
            peak=config.peak_flops,
            manager=self.manager,
            alpha=config.offload.alpha,
            devices=config.layout.ranks,
        )
        phase(f"running step {self.done + 1} of {config.training.schedule.steps}")
        for line in (*map(_inert, notes), *self._banner(shape, device, tokens, batches.description)):
            self._say(line)

    def go(self) -> ExitCode:
        """Runs the step loop."""
        stopped, unread, decision = False, None, None
        with self.stop.listening():
            while self.done < self.config.training.schedule.steps and not stopped:
                result = self._step()
                stopped = result is None  # this rank or another was asked to stop
                if result is None:
                    break
                self.done = result.step
                decision = self._consider(result)
                try:
                    self._observe(result, decision)
                except BrokenPipeError as error:  # the reader has ended, by the same Ctrl-C perhaps
                    if self.world is not None:
                        raise
                    unread = error
                    break
                if decision is not None and decision.changes:
                    break
                self._save_if_due()
            if self.done:
                self._save(wait=True)
            stopped = stopped or (decision is not None and decision.changes and bool(self.stop))
        if unread is not None:
            raise unread
        if self.manager is not None and not (decision is not None and decision.changes):
            self._say(str(self.manager.report()))
        if self.trainer.compressed is not None:
            self._say(f"gradients: {self.trainer.compressed.total}")
        if stopped:
            kept = "nothing was saved; give --checkpoint-dir to save steps and resume"
            if self.checkpoints is not None:
                path = step_path(self.checkpoints.path, self.done)
                kept = f"saved in {path}; continue with --resume" if self.done else "nothing is to be saved"
            self._say(f"stopped after step {self.done}; {kept}")
            return ExitCode.INTERRUPTED
        return ExitCode.OK

    def _step(self) -> StepResult | None:
        try:
            with _planned_step("train"):
                return self.trainer.step(self.done + 1, stop=self.stop.__bool__)
        except TrainingDiverged as error:
            if self.checkpoints is None or not self.done:
                raise
            self._save(wait=True)
            raise TrainingDiverged(f"{error}; step {self.done} is saved in {self.checkpoints.path}") from None

    def _consider(self, result: StepResult) -> LayoutDecision | None:
        if self.adapter is None or result.step == self.config.training.schedule.steps:
            return None
        return self.adapter.consider(
            EndedStep(
                step=result.step,
                duration_s=result.duration_s,
                config=self.config,
                shape=self.shape,
                precision=self.trainer.config.precision,
                device=self.device,
                manager=self.manager,
            )
        )

    def _observe(self, result: StepResult, decision: LayoutDecision | None) -> None:
        eval_loss = None
        if self.eval_batches is not None and self._due(self.config.eval_every):
            with _planned_step("eval"):
                eval_loss = self.trainer.evaluate(self.eval_batches)
        metrics, usage = self.meter.measure(result, eval_loss, skipped_steps=self.trainer.loss_guard.skipped)
        if decision is not None:
            metrics = dataclasses.replace(metrics, adaptation=decision.figures)
        if self.manager is not None:
            if decision is not None:
                self.manager.note(ADAPTATION, decision.line)
            self.manager.step_done()
        if self.metrics is not None:
            self.metrics.write(metrics)
        if self.tensorboard is not None:
            self.tensorboard.write(metrics)
        self.phase(None)
        self._say(metrics.to_line(usage))
        if result.alarm is not None:
            done = "skipped" if result.skipped else "applied"
            self._say(f"warning  step {result.step}: {result.alarm}; its update was {done}")
        if decision is not None:
            self._say(f"adapt    step {result.step}: {decision.line}")
        rows = result.expert_rows
        if rows is not None and self.manager is not None and not rows.is_planned and rows.times > self._told_rows:
            self._told_rows = TELL_AGAIN * rows.times
            self._say(f"note  step {result.step}: {rows}")

    def _say(self, text: str) -> None:
        """Prints a line, on the first rank."""
        if self._leads:
            print(text, flush=True)

    def _due(self, every: int) -> bool:
        return every > 0 and (self.done % every == 0 or self.done == self.config.training.schedule.steps)

    def _save_if_due(self) -> None:
        """Saves a due checkpoint; while the one before it is still being written, a later step tries again."""
        if self.checkpoints is None or not (self.config.checkpoint_every or self.config.checkpoint_minutes):
            return
        if self.checkpoints.ready(self.cadence.due(self.done)):
            self._save(wait=False)
        self._report_failure(self.checkpoints)

    def _save(self, *, wait: bool) -> None:
        """Saves a checkpoint, and with `wait` returns when it is on disk; else it is written in the background."""
        if self.checkpoints is None:
            return
        self.cadence.begun(self.done)
        settings = {**self.settings, GUARD: self.trainer.loss_guard.state()}
        settings |= {} if self.adapter is None else {ADAPTATION: self.adapter.state()}
        self.checkpoints.save(self.done, self.trainer.state(), settings, wait=wait)
        if wait:
            self._report_failure(self.checkpoints)

    def _report_failure(self, checkpoints: BackgroundCheckpointDir | DistributedCheckpointDir) -> None:
        failure = checkpoints.failure()
        if failure is not None:
            self._say(f"warning  {failure}; training goes on, older checkpoints are untouched")

    def _banner(self, shape: GPTConfig, device: torch.device, tokens: TokenFile, rows: str) -> list[str]:
        config = self.config
        threads = torch.get_num_threads()
        cpu = f"{threads} CPU thread{'' if threads == 1 else 's'}"
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        return [
            f"model    {config.model} ({shape.variant}): {parameter_count(shape):,} parameters, {shape.layers} layers "
            f"of {shape.hidden}, {self.trainer.config.precision} on {_ranks(config.layout)}{where}",
            f"data     {len(tokens):,} tokens; a step takes {config.training.accumulate} x {config.batch} x "
            f"{format_tokens(config.seq)}",
            f"rows     {rows}",
            f"attention {self._attention(shape, device)}",
            *_optimizer_lines(self.trainer),
            *([] if self.trainer.compressed is None else [f"gradients {self.trainer.compressed}"]),
            f"run      steps {self.done + 1} to {config.training.schedule.steps}, {config.offload.words}",
        ]

    def _attention(self, shape: GPTConfig, device: torch.device) -> str:
        """Description of the attention kernel of this run."""
        layout = self.config.layout
        if layout.rings(shape):
            return f"{Kernel.FLASH.value}, around a ring of {layout.cp}"
        dtype = torch.float32 if self.trainer.config.precision is Precision.FP32 else torch.bfloat16
        kind = AttentionKind(
            device=device, dtype=dtype, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            packed=shape.end_of_document is not None,
        )  # fmt: skip
        documents = "" if shape.end_of_document is None else ", within documents"
        window = shape.local_window
        if window is None or not shape.is_local_within(self.config.seq):
            return f"{choose(kind)}{documents}"
        local = choose(dataclasses.replace(kind, local=True))
        are_all = all(map(shape.window_of, range(shape.layers)))
        others = "" if are_all else f"; in other layers {choose(kind)}"
        return f"{local}, within {format_tokens(window)} tokens{others}{documents}"


def _prepare(config: RunConfig) -> torch.device:
    """Chooses the device, and sets the process's allocator, determinism and memory return."""
    if config.planned_allocator:
        use_planned_allocator()
    has_gpu = torch.cuda.is_available()
    if config.on == "cuda" and not has_gpu:
        raise UsageError("--on cuda: torch sees no CUDA GPU on this machine; use --on cpu")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads memory it has not written
    if has_gpu and config.on != "cpu":
        if config.layout.ranks > 1:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    return_freed_memory()
    return torch.device("cpu")


def _planned_step(kind: str) -> AbstractContextManager[None]:
    """Context of a step for the planned allocator, which plans steps of a kind together; empty without it."""
    allocator = active_allocator()
    return nullcontext() if allocator is None else allocator.step(kind, device=torch.cuda.current_device())


def _check_layout(config: RunConfig) -> int:
    """Number of ranks, checked before any process group exists.

    Raises:
        UsageError: the layout does not fit the ranks or the model.
    """
    layout = config.layout
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    layout.check_ranks(ranks)
    if ranks > 1:
        layout.check(
            _shape(config),
            seq=config.seq,
            batch=config.batch,
            microbatches=config.training.accumulate,
            within_documents=config.mask_documents,
        )
    require_possible(config, _shape(config))
    require_replicas(config)
    if layout.pp > 1:
        from memo.parallel import check_torch

        check_torch(layout.schedule)
    return ranks


def _join(config: RunConfig, device: torch.device, stack: ExitStack) -> World:
    """Joins the process group. From now on an error on any rank ends all of them, and the first cause is reported."""
    from memo.parallel import World, ended_by_signal, first_cause, join

    stack.enter_context(first_cause(int(os.environ["RANK"])))
    stack.enter_context(ended_by_signal())
    stack.enter_context(join(device))
    _require_same_run(config)
    return World.of(config.layout, device.type)


def _require_same_run(config: RunConfig) -> None:
    """Raises UsageError on every rank where one has other flags, or read another checkpoint. A collective call."""
    from memo.parallel import gather_values

    own: dict[str, Any] = {}
    for part in (config.training, config.training.schedule, config.layout, config.shape):
        own |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    own |= {name: getattr(config, name) for name in ("batch", "seed", "seq", "precision")}
    said = gather_values(own)
    for name, value in said[0].items():
        other = next((rank for rank, theirs in enumerate(said) if theirs[name] != value), None)
        if other is not None:
            raise UsageError(
                f"{flag_of_setting(name)}: {value} on rank 0, but {said[other][name]} on rank {other}; start all nodes with "
                f"the same flags and one directory of checkpoints"
            )


def _open_tokens(config: RunConfig, world: World | None) -> TokenFile:
    def opened() -> TokenFile:
        whole = config.documents is Documents.WHOLE
        return open_tokens(config.data, tokenizer=config.tokenizer, field=config.field, packages=whole)

    if world is None:
        return opened()
    from memo.gpt.train.parallel_run import local_rank_first

    return local_rank_first(opened)


def _batches(
    config: RunConfig, tokens: TokenFile, split: Split, *, drawn: int | None = None
) -> Batches | DocumentBatches | RegroupedBatches:
    """Batches of a split; `drawn` is the rows of a microbatch in which they are drawn, where it is not the run's own."""
    rows = drawn or config.batch
    whole: Batches | DocumentBatches
    if config.documents is Documents.PACKED:
        whole = Batches(tokens, batch=rows, seq=config.seq, seed=config.seed, split=split)
    else:
        whole = DocumentBatches(
            tokens,
            batch=rows,
            seq=config.seq,
            seed=config.seed,
            accumulate=config.batch * config.training.accumulate // rows if split == "train" else 1,
            split=split,
        )
    return whole if rows == config.batch else RegroupedBatches(whole, batch=config.batch)


def _open_trainer(
    config: RunConfig,
    shape: GPTConfig,
    training: TrainConfig,
    batches: BatchSource,
    world: World | None,
    device: torch.device,
    stack: ExitStack,
    *,
    sparse: bool,
) -> tuple[Trainer, Manager | None]:
    if world is not None:
        from memo.gpt.train.parallel_run import open_trainer

        return open_trainer(config, shape, training, batches, world, device, stack, sparse_embedding=sparse)
    torch.manual_seed(config.seed)
    model = GPT(shape, device=device, dtype=weight_dtype(training.precision))
    optimizer = None
    if config.optimizer_offload:  # before the manager, whose host tier has what is left of the memory
        optimizer = HostOptimizer(
            model,
            Machine(device).backend(timing=False),
            lr=training.schedule.peak,
            betas=training.betas,
            weight_decay=training.weight_decay,
        )
        stack.enter_context(closing(optimizer))
    manager = open_manager(config.offload, model, device, layers=list(model.layers))
    if manager is not None:
        stack.enter_context(closing(manager))
    return Trainer(model, batches, training, device=device, around_forward=manager, optimizer=optimizer), manager


def _load(start: Checkpoint, trainer: Trainer, world: World | None, *, with_compression: bool) -> None:
    if world is None:
        start.load(trainer.state())
        trainer.restored()
        return
    from memo.gpt.checkpoint.distributed import load_distributed

    for state in trainer.states(with_compression=with_compression):  # type: ignore[attr-defined]
        load_distributed(start, state)


def _optimizer_lines(trainer: Trainer) -> list[str]:
    if not isinstance(trainer.optimizer, HostOptimizer):
        return []
    return [f"optimizer AdamW on the host, in {format_bytes(trainer.optimizer.nbytes)} of its memory"]


def _ranks(layout: Layout) -> str:
    if layout.ranks == 1:
        return ""
    tp = f"{layout.tp} overlapped" if layout.tp_overlap else layout.tp
    return f"{layout.ranks} ranks (dp {layout.dp}, tp {tp}, pp {layout.pp}, cp {layout.cp}) of "


def _open_checkpoints(
    config: RunConfig, stack: ExitStack, world: World | None
) -> BackgroundCheckpointDir | DistributedCheckpointDir | None:
    if config.checkpoint_dir is None:
        return None
    if world is not None:
        from memo.gpt.checkpoint.distributed import DistributedCheckpointDir

        return stack.enter_context(DistributedCheckpointDir(config.checkpoint_dir, keep=config.checkpoint_keep))
    return stack.enter_context(BackgroundCheckpointDir(config.checkpoint_dir, keep=config.checkpoint_keep))


def _starting_point(
    config: RunConfig, checkpoints: BackgroundCheckpointDir | DistributedCheckpointDir | None
) -> tuple[Checkpoint | None, list[str]]:
    """Checkpoint to resume from, and lines of text about the choice."""
    if config.resume is None:
        if checkpoints is not None and not checkpoints.is_empty():
            raise UsageError(f"{checkpoints.path} has checkpoints already; add --resume or choose another directory")
        return None, []
    if config.resume != "latest":
        start = Checkpoint.at(config.resume)
        newest = checkpoints.latest()[0] if checkpoints is not None else None
        if newest is not None and newest.step > start.step:
            raise UsageError(f"{newest.path} is newer than {start.path}; choose another --checkpoint-dir")
        require_settings(start)
        return start, [f"resume   {start.path}"]
    assert checkpoints is not None  # checked by RunConfig
    newest, skipped = checkpoints.latest()
    notes = [f"warning  {reason}" for reason in skipped]
    if newest is None and skipped:
        raise CheckpointError(f"no checkpoint in {checkpoints.path} is complete: {skipped[0]}")
    if newest is None:
        return None, [f"resume   no checkpoint in {checkpoints.path} yet; starting at step 1"]
    require_settings(newest)
    return newest, [*notes, f"resume   {newest.path}"]


def _shape(config: RunConfig, tokens: TokenFile | None = None, start: Checkpoint | None = None) -> GPTConfig:
    """Shape of the model; rotary positions that no option gives are the checkpoint's.

    Raises:
        UsageError: the options do not fit together.
    """
    former = {} if start is None else start.settings.get("model") or {}
    scaling = former.get("rope_scaling")
    if config.rope_scaling is not None:
        scaled = RopeScaling.parse(config.rope_scaling, seq=config.seq)
    else:
        scaled = None if scaling is None else RopeScaling(**{**scaling, "kind": RopeScalingKind(scaling["kind"])})
    shape = dataclasses.replace(
        config.shape,
        vocab_size=config.shape.vocab_size if tokens is None else tokens.vocab_size,
        max_seq=config.seq,
        end_of_document=tokens.end_of_document if config.mask_documents and tokens is not None else None,
    )
    if shape.positions == "rotary":
        theta = config.rope_theta or former.get("rope_theta") or shape.rope_theta
        return dataclasses.replace(shape, rope_theta=theta, rope_scaling=scaled)
    for flag, value in (("--rope-theta", config.rope_theta), ("--rope-scaling", config.rope_scaling)):
        if value is not None:
            raise UsageError(
                f"{flag} is for rotary positions, and those of {config.model} are learned; add --variant llama"
            )
    return shape


def _training(config: RunConfig, device: torch.device) -> TrainConfig:
    default = GPU_PRECISION if device.type == "cuda" else Precision.FP32
    return dataclasses.replace(config.training, precision=config.precision or default)


def _settings(config: RunConfig, shape: GPTConfig, training: TrainConfig) -> dict[str, Any]:
    """Settings stored in a checkpoint: the model, and everything else that decides the next loss."""
    numbers = dataclasses.asdict(training)
    numbers[GUARD] = numbers.pop("loss_guard")
    settings = {
        # A run may resume with another number of tiles.
        "model": {key: value for key, value in dataclasses.asdict(shape).items() if key != "mlp_tiles"},
        "training": numbers,
        "data": None if config.data is None else [str(path) for path in config.data],
        "documents": config.documents,
        "seq": config.seq,
        "batch": config.batch,
        "seed": config.seed,
        "pipeline_dtype": config.pipeline_dtype,
        "compress_gradients": config.compress_gradients and str(config.compress_gradients),
    }
    as_read: dict[str, Any] = json.loads(json.dumps(settings))  # as a checkpoint returns them: tuples as lists
    return as_read


def _plan_differences(config: RunConfig, shape: GPTConfig, plan: ActivationPlan | None) -> list[str]:
    """Warning where the given plan was made for another step: its fractions apply, its prediction does not."""
    if config.offload.plan is None or plan is None:
        return []
    made, layout = plan.problem.profile.signature, config.layout
    here = {"tokens": config.seq, "batch": config.batch // layout.dp}
    here |= {name: getattr(layout, name) for name in ("tp", "cp", "pp", "ep")}
    other = [
        f"{name} {getattr(made, name)} and not {value}" for name, value in here.items() if getattr(made, name) != value
    ]
    if layout.cp > 1 and made.cp > 1 and made.ring != layout.rings(shape):
        other.append(f"--cp-attention {'ring' if made.ring else 'ulysses'}")
    return [f"warning  {config.offload.plan} was made for {', '.join(other)}"] if other else []


_LONGEST_NOTE = 2000  # characters


def _inert(line: str) -> str:
    """A line in which words of a checkpoint or a plan cannot act on a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line[:_LONGEST_NOTE])

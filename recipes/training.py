"""Runs a recipe: checks, data, the target's states, `Trainer`, the result with its measured acceptance."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from datasets import Dataset
from huggingface_hub import HfApi
from tqdm.auto import tqdm
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainerCallback, set_seed
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from arguments import Arguments, calling_at_signals, differences, parse
from card import Measured, summary, write_card
from conversations import (
    ChatFormat,
    StepSampler,
    check_row_count,
    collate,
    domain_of,
    encoded,
    first_of_domains,
    messages_of,
    naming_row,
    prompt_of,
    read_rows,
)
from drafter import Drafter
from generate_answers import Numbered, answer_rows, completions
from hf_specgen import AutoCandidates, FixedDepth, NgramCandidates
from hf_specgen.cli.generate import write_rows
from hf_specgen.heads.source import source_errors
from hf_specgen.targets.model_parts import output_matrix
from target import (
    StoredStates,
    check_target,
    description_of_target,
    is_stored,
    load_target,
    load_tokenizer,
    stored_states,
    target_without_layers,
)

RUN = "run.json"  # file in the output folder: the arguments that decide the result
RESULTS = ("README.md", "config.json", "adapter_config.json", "model.safetensors")
FEW_STEPS = 100
"""Steps below which a warning is printed: published heads took thousands."""
LENGTHENED = ("max_steps", "num_train_epochs")  # arguments that may change when a run is resumed
UNDRAFTED = NgramCandidates(policy=FixedDepth(0))
"""Plain decoding, with the same passes in all processes, which a sharded target needs."""


def run(
    recipe: type[Drafter], arguments_class: type[Any], documentation: str | None, arguments: list[str] | None = None
) -> tuple[float, int] | None:
    """Everything that a recipe's script does: parse, check, load, train, save, measure.

    A dry run returns the seconds of a step and the number of steps.
    """
    args = parse(arguments_class, documentation, arguments)
    check_arguments(args)
    with source_errors(args.target):
        chat = ChatFormat(load_tokenizer(args), args.chat_template_kwargs)
    source, prompts = read_data(args)
    needs_answers = bool(prompts) and not args.dry_run and (args.eval_strategy != "no" or args.simulate)
    folders = [Path(args.features or "") / name for name in ("train", "evaluation")[: 1 + needs_answers]]
    # Refuses states of a target that has been overwritten before its architecture or weights are used.
    described = description_of_target(args) if args.features else {}
    is_complete = args.features is not None and all(is_stored(folder, described) for folder in folders)
    target = target_without_layers(args) if is_complete else load_target(args)
    if not is_complete:
        check_target(target, args.packing)
    recipe.check(args, target)
    data = encoded(source, chat, args.max_length, args.packing)
    check_row_count(data, args.rows_per_step)
    set_seed(args.seed)
    drafter = recipe(args, target, data)
    sizes = check_space(args, drafter, 0 if is_complete or not args.features else sum(data["length"]))
    rows, held_out = data, None

    def answers() -> Any:
        return encoded(target_answers(args, drafter.target, chat, prompts), chat, args.max_length)

    if args.features and (is_complete or not args.dry_run):
        tokens, call = [data["input_ids"][:], data["labels"][:]], [prompts, args.generation, args.evaluation_tokens]
        rows = stored_states(args, drafter, "train", tokens, lambda: data)
        held_out = stored_states(args, drafter, "evaluation", call, answers) if needs_answers else None
        drafter.use_target(target_without_layers(args))
    elif needs_answers:
        held_out = answers()
    del target
    trainer = DrafterTrainer(args, drafter, chat.tokenizer.pad_token_id or 0, rows, held_out)
    if args.simulate:
        return trainer.log_metrics("eval", trainer.evaluate())
    if args.dry_run:
        return trainer.dry_run(sizes)
    if PartialState().is_main_process:
        write_rows(Path(args.output_dir) / RUN, [recorded_values(args)])
    trainer.train_until_stopped(last_checkpoint(args) if args.resume else None)
    finish(recipe, trainer, data, chat, prompts)
    return None


def read_data(args: Arguments) -> tuple[Any, Numbered]:
    """The rows to train on and the held-out prompts; other columns are refused now, and not after the training."""
    source = read_rows(args.data, args.data_split, args.data_config, args.streaming)
    messages_of(next(iter(source)))
    asked = read_rows(args.evaluation) if args.evaluation else []
    prompts = list(enumerate(first_of_domains(asked, {"default": args.evaluation_per_domain})))
    for number, row in prompts:
        with naming_row(number):
            prompt_of(row)
    return source, prompts


def check_arguments(args: Arguments) -> None:
    """Refuse what would fail, or overwrite something, after hours of training."""
    folder = Path(args.output_dir)
    checkpoint, record = last_checkpoint(args), folder / RUN
    if args.resume and checkpoint and record.exists():
        now = {name: value for name, value in recorded_values(args).items() if name not in LENGTHENED}
        if changed := differences(json.loads(record.read_text(encoding="utf-8")), now):
            raise ValueError(
                f"{folder} has a run with {changed}; resume it with the same settings, or give another --output"
            )
    elif not (args.overwrite or args.dry_run or args.simulate):
        has_result = any((folder / name).exists() for name in RESULTS)
        if args.resume and has_result and not checkpoint:
            raise ValueError(
                f"{folder} holds a finished result without a checkpoint to resume from; replace it with --overwrite "
                "true, or give another --output"
            )
        if not args.resume and (checkpoint or has_result):
            raise ValueError(
                f"{folder} holds an earlier run: continue it with --resume true, replace it with --overwrite true, or "
                "give another --output"
            )
    elif args.overwrite and PartialState().is_main_process:
        for old in folder.glob("checkpoint-*"):
            shutil.rmtree(old)
    if PartialState().is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # raises where nothing can be written
    for callback in get_reporting_integration_callbacks(args.report_to):
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"report_to={' '.join(cast(list[str], args.report_to))}: {error}") from None
    if args.push_to_hub:
        HfApi(token=args.hub_token).create_repo(str(args.hub_model_id), exist_ok=True, private=args.hub_private_repo)
        args.push_to_hub = False  # `Trainer` would upload its checkpoints; the result is uploaded in the end
        args.hub_always_push = True
    if args.streaming and (args.features or args.packing or args.max_steps < 1):
        raise ValueError("streaming needs max_steps, and cannot be combined with features or packing")
    args.accelerator_config.dispatch_batches = False  # type: ignore[union-attr]  # streamed batches differ in width


def recorded_values(args: Arguments) -> dict[str, Any]:
    """What must not change when a run is resumed: the arguments that decide the result, and the target's weights."""
    return args.own_values() | {"target_weights": description_of_target(args)["target_weights"]}


def with_resume(args: Arguments) -> str:
    """What has to be added to a command that is to go on."""
    return "" if args.resume else ", with --resume true"


def check_space(args: Arguments, drafter: Drafter, tokens: int) -> str:
    """What the run will write, as a text; raises where a disk has no space for it; `tokens`: of hidden states."""
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    matrix, kept = output_matrix(drafter.target).weight, args.save_total_limit or 1
    sizes = {args.output_dir: 12 * trained * (1 + kept)}  # weights and two moments in float32; one is written more
    if tokens:
        sizes[str(args.features)] = tokens * (len(drafter.layers) + 1) * matrix.shape[1] * matrix.element_size()
    texts = []
    for name, size in sizes.items():
        path = Path(name).absolute()
        free = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free
        written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        texts.append(f"{name}: up to {size / 2**30:.2f} GiB, free {free / 2**30:.2f} GiB")
        if size - written > free:
            raise ValueError(
                f"{texts[-1]}; give a folder on another disk, or train on fewer rows or without --features"
            )
    return "\n".join(texts)


def last_checkpoint(args: Arguments) -> str | None:
    """The last complete checkpoint in the output folder; `Trainer` writes its state last."""
    # A process that was killed may have left the file, whose text ends with a brace, without its text.
    files = Path(args.output_dir).glob("checkpoint-*/trainer_state.json")
    found = (file for file in files if file.read_text(encoding="utf-8").rstrip().endswith("}"))
    return str(max((path.parent for path in found), key=lambda path: int(path.name.split("-")[1]), default="")) or None


class StopAtSignals(TrainerCallback):
    """Ends a run in all processes, with a checkpoint, once a stop is requested in one of them."""

    wanted = False

    def request(self) -> None:
        self.wanted = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_stopped = reduce(torch.tensor(float(self.wanted), device=args.device)) > 0
        if is_stopped and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


class DrafterTrainer(Trainer):
    """`Trainer` for a drafter: its order of rows, checkpoints of what is trained only."""

    def __init__(self, args: Arguments, drafter: Drafter, pad_token_id: int, rows: Any, held_out: Any):
        super().__init__(
            model=drafter,
            args=args,
            data_collator=lambda members: collate(members, pad_token_id),
            train_dataset=rows,
            eval_dataset=held_out,
            compute_metrics=acceptance_metrics,
        )
        self.drafter, self.recipe_args, self.begins = drafter, args, list[float]()
        sized = rows.rows if isinstance(rows, StoredStates) else rows
        self.lengths: list[int] = sized["length"][:] if hasattr(rows, "__len__") else []

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return StepSampler(self.lengths, self.recipe_args.rows_per_step, self.args.seed) if self.lengths else None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.drafter.step = self.state.global_step
        self.begins.append(time.perf_counter())
        return super().training_step(*args, **kwargs)

    def train_until_stopped(self, checkpoint: str | None) -> None:
        """Train; SIGINT or SIGTERM ends the run after the step in work, with a checkpoint."""
        if self.steps < FEW_STEPS:
            PartialState().print(
                f"only {self.steps} steps: {len(self.lengths)} rows, {self.recipe_args.rows_per_step} in a step; a "
                "drafter needs hundreds at least: give more rows, more --num-train-epochs or a smaller --batch-size"
            )
        stop = StopAtSignals()
        self.add_callback(stop)
        with calling_at_signals(stop.request):
            self.train(resume_from_checkpoint=checkpoint)
        if self.state.global_step < self.state.max_steps:
            raise KeyboardInterrupt(
                f"stopped after step {self.state.global_step} of {self.state.max_steps}, which is saved in "
                f"{self.args.output_dir}: the same command goes on{with_resume(self.recipe_args)}"
            )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self.drafter.trained(state_dict or self.drafter.state_dict()))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Frozen parameters are not in checkpoints."""

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The complete trained weights on the CPU, also where they are sharded; in the main process."""
        state = self.drafter.trained(self.accelerator.get_state_dict(self.model_wrapped) or {})
        return {name: tensor.cpu() for name, tensor in state.items()}

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        args, per_epoch = self.recipe_args, len(self.lengths) // self.recipe_args.rows_per_step
        return args.max_steps if args.max_steps > 0 else math.ceil(per_epoch * args.num_train_epochs)

    def dry_run(self, sizes: str) -> tuple[float, int]:
        """Train a step to warm up and three more; print what the run takes, and return seconds a step and steps."""
        args, steps, rows = self.recipe_args, self.steps, self.recipe_args.rows_per_step
        args.max_steps, args.save_strategy, args.eval_strategy, args.report_to = 4, "no", "no", []
        self.train()
        seconds = (time.perf_counter() - self.begins[args.gradient_accumulation_steps]) / 3
        tokens = rows * sum(self.lengths) / max(1, len(self.lengths))
        parameters = sum(parameter.numel() for parameter in self.drafter.parameters() if parameter.requires_grad)
        is_gpu = args.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated() if is_gpu else psutil.Process().memory_info().rss
        PartialState().print(
            f"trained parameters: {parameters:,}\nmemory: {memory / 2**30:.2f} GiB per process\n{sizes}\n"
            f"steps: {steps:,} of {rows} rows\ntime: {seconds:.3f} s per step, {tokens / seconds:,.0f} tokens per "
            f"second, {steps * seconds / 3600:.2f} hours in all"
        )
        return seconds, steps


def acceptance_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Acceptance by depth and tokens per step of greedy chains, of `[rows, depths, 4]` counts."""
    drafts, hits, chains, overlaps = torch.as_tensor(cast(Any, prediction.predictions)).sum(dim=0).unbind(-1)
    drafts = drafts.clamp(min=1)
    metrics = {"tokens_per_step": 1 + float((chains / drafts).sum())}
    for depth in range(len(drafts)):
        metrics[f"agreement_{depth + 1}"] = float(hits[depth] / drafts[depth])
        metrics[f"acceptance_{depth + 1}"] = float(overlaps[depth] / drafts[depth])
    return metrics


def finish(recipe: type[Drafter], trainer: DrafterTrainer, rows: Any, chat: ChatFormat, prompts: Any) -> None:
    """Save the result, then measure it as it is loaded, write the card, upload."""
    args, drafter, state = trainer.recipe_args, trainer.drafter, PartialState()
    weights, folder = trainer.trained_weights(), Path(args.output_dir)
    if any(hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") for parameter in drafter.parameters()):
        drafter = recipe(args, drafter.target, rows)  # the trained one is sharded
    trained: dict[str, Any] = {"history": trainer.state.log_history, "rows": len(trainer.lengths)}
    if state.is_main_process:
        drafter.load_state_dict(weights, strict=False)
        drafter.eval().save(folder)
        write_card(drafter, chat, {}, **trained)
    state.wait_for_everyone()
    results: dict[str, Measured] = {}
    if prompts:
        target = load_target(args) if args.features else drafter.target
        drafter.use_target(target)
        try:
            results = measure(args, target, chat, prompts, drafter.settings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{folder} has the trained drafter, but its measurement was stopped: the same command "
                f"measures it{with_resume(args)}"
            ) from None
        if state.is_main_process:
            write_card(drafter, chat, results, **trained)
    state.print(summary(args, results))
    if args.hub_always_push and state.is_main_process:
        HfApi(token=args.hub_token).upload_folder(
            repo_id=str(args.hub_model_id),
            folder_path=folder,
            ignore_patterns=["checkpoint*", "*/checkpoint*", "runs/*", "wandb/*", "training_args.bin", RUN],
        )
    state.wait_for_everyone()


def target_answers(args: Arguments, target: PreTrainedModel, chat: ChatFormat, prompts: Numbered) -> Dataset:
    """The target's own answers to the held-out prompts."""
    with torch.random.fork_rng():
        call = {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}
        found = answer_rows(target, chat, prompts, UNDRAFTED, 0, args.generation, **call)
        answers = {number: row for number, row, _ in found}
    return Dataset.from_list([answers[number] for number, _ in prompts])


def measure(args: Arguments, target: Any, chat: ChatFormat, prompts: Numbered, settings: Any) -> dict[str, Measured]:
    """Generate answers with the drafter as it was saved, and count; the random state is left unchanged."""
    if not PartialState().is_main_process and not args.shard_target:  # a sharded target needs all in each pass
        return {}
    load, policy = AutoCandidates.from_pretrained, FixedDepth()
    drafters = [load(args.output_dir, policy=policy, **settings(with_tree)) for with_tree in (False, True)]
    call = {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}
    bar: Any = {"total": len(prompts), "unit": "prompt", "disable": not PartialState().is_main_process}
    with torch.random.fork_rng():
        plain, chains, trees = (
            dict(
                tqdm(
                    completions(target, chat, prompts, drafter, 0, args.generation, **call), f"measuring {name}", **bar
                )
            )
            for name, drafter in zip(("plain generate", "chains", "trees"), (UNDRAFTED, *drafters), strict=True)
        )
    results: dict[str, Measured] = {}
    for number, row in prompts:
        result, tokens = results.setdefault(domain_of(row), Measured()), plain[number].tokens
        result.chain += chains[number].statistics
        result.tree += trees[number].statistics
        result.identical += chains[number].tokens == tokens == trees[number].tokens
        result.prompts += 1
    return results

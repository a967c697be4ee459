"""`hf-specgen demo`: five everyday tasks for a published model, answered by plain `generate` and every strategy.

The comparison is level: all variants run eagerly, with the weights as they are.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from hf_specgen.candidates.combined import AUTO
from hf_specgen.cli.chat import ACCEPTED, AnswerWriter
from hf_specgen.cli.checkpoints import BAD
from hf_specgen.cli.doctor import judge, line, ranking, recommend, verification_cost
from hf_specgen.cli.settings import DemoSettings, terminal
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.cost import measure_cost_curve
from hf_specgen.evaluation.measure import Comparison, Variant, measure_call
from hf_specgen.evaluation.published import published
from hf_specgen.evaluation.workloads import DEFAULT, PEER, PLAIN, Strategy, encode
from hf_specgen.heads.head_formats import load_head

MIN_ANSWER_TOKENS = 24
"""Minimum length of an answer, even if it takes more than the time."""
Task = tuple[str, str, dict[str, Any]]
"""Name, prompt, arguments of `generate`."""


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it; returns False if a token differs in float32."""
    console = console or terminal()
    source = (
        None if settings.bundled else published(lambda said: console.print(f"[dim]{escape(said)}[/]", highlight=False))
    )
    begin = perf_counter()  # a download takes no time of the demo
    model, tokenizer = workloads.load(source or "", settings.dtype, settings.device)
    if source is None:
        tasks = [(name, texts[0], workloads.DOMAINS[name]) for name, texts in workloads.domain_prompts(1).items()]
        files = [str(draft) for draft in (workloads.BUNDLED_EAGLE, workloads.BUNDLED_DRAFT)]
        _, *drafts = workloads.strategies(files, dtype=str(model.dtype).removeprefix("torch."))
    else:
        tasks = [(name, texts[0], workloads.GREEDY) for name, texts in workloads.everyday_prompts().items()]
        drafts = published_drafts(model)
    demo = Demo(model, tokenizer, drafts, console)
    demo.measure(tasks, settings.max_new_tokens, begin + settings.seconds)
    return demo.conclude()


def published_drafts(model: Any) -> list[Strategy]:
    """N-grams together with the head for the published model, where the bundled files are installed."""
    folder = str(workloads.PUBLISHED_EAGLE)
    if not workloads.PUBLISHED_EAGLE.exists():
        return []
    try:
        load_head(folder).bind(model)
    except ValueError:  # another model lies where the published one would be
        return []
    _, head = workloads.strategies([folder])
    return [workloads.with_ngrams(head, f"{workloads.NGRAM} + {head.name}")]


class Demo:
    """The answers of all variants to tasks, shown while they are generated, and the table of what was measured.

    Args:
        drafts: further strategies, besides n-grams and Token Recycling.
    """

    def __init__(self, model: Any, tokenizer: Any, drafts: list[Strategy], console: Console):
        self.model = model
        self.tokenizer = tokenizer
        self.console = console
        self.answer = Text()
        dtype = str(model.dtype).removeprefix("torch.")
        self.title = f"{model.name_or_path.rpartition('/')[2]}, {dtype}"
        (n_grams,) = workloads.strategies()
        self.measured = Comparison(
            [
                Variant(PLAIN, lambda: {"streamer": self._writer()}),
                Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10, "streamer": self._writer()}),
                *(self._variant(one) for one in (n_grams, Strategy(DEFAULT, '"auto"', AUTO), *drafts)),
            ]
        )

    def _variant(self, strategy: Strategy) -> Variant:
        arguments = strategy.variant(compile=False).arguments
        return Variant(strategy.name, lambda: {**arguments(), "monitor": self._writer()})

    def _writer(self) -> AnswerWriter:
        """What shows the answer of the call that begins; accepted draft tokens are coloured."""
        self.answer = Text()
        return AnswerWriter(
            self.tokenizer, lambda text, accepted: self.answer.append(text, style=ACCEPTED if accepted else None)
        )

    def measure(self, tasks: list[Task], max_new_tokens: int, deadline: float) -> None:
        """Answer the tasks with all variants, as many as fit into the time, and at least one.

        Answers are cut so that all tasks fit, if no variant is slower than plain `generate`.
        """
        variants = self.measured.variants
        with self.console.status(f"{escape(self.title)}: checking the model, measuring its latency"):
            (inputs,) = encode(self.tokenizer, ["Write a function that adds two numbers."], 1)
            plain, *_ = [measure_call(self.model, inputs, one, {"max_new_tokens": 8, **workloads.GREEDY}, 0)
                         for one in variants]  # fmt: skip
        fitting = (deadline - perf_counter()) * plain.tokens / plain.seconds / (len(variants) * len(tasks))
        length = int(min(max_new_tokens, max(MIN_ANSWER_TOKENS, fitting)))
        slowest = 0.0
        for name, prompt, generation in tasks:
            begin = perf_counter()
            if slowest and begin + slowest > deadline:
                self.console.print("[yellow]The other tasks were left out: the time is up.[/]")
                break
            (inputs,) = encode(self.tokenizer, [prompt], 1)
            self._show_task(name, inputs, {"max_new_tokens": length, **generation})
            slowest = max(slowest, perf_counter() - begin)

    def _show_task(self, name: str, inputs: dict[str, torch.Tensor], generation: dict[str, Any]) -> None:
        """Show the answers of all variants while they are generated, then the last one and all speeds."""
        heading = Text.assemble((name, "bold"), (f" ({inputs['input_ids'].shape[1]} tokens)", "dim"))
        variant = PLAIN
        with Live(
            get_renderable=lambda: Group(heading, self.answer, Text(f"{variant} …", "dim")),
            console=self.console,
            refresh_per_second=8,
            transient=True,
        ):
            for variant in self.measured.measure(self.model, inputs, generation):  # noqa: B007  (shown above)
                self.answer = Text()
        last = {name: samples[-1] for name, samples in self.measured.samples.items()}
        speeds = ", ".join(f"{name} {one.tokens / one.seconds:.1f}" for name, one in last.items())
        self.console.print(heading, self.answer, Text(f"tokens per second: {speeds}\n", "dim"), sep="\n")

    def conclude(self) -> bool:
        """Print the table and what follows from it; returns False if a token differs in float32."""
        measured = self.measured
        ours = [name for name in measured.samples if name not in (PLAIN, PEER)]
        count = len(measured.plain)
        self.console.print(ranking(measured, self.title))
        best, reason = recommend(measured, ours)
        prompts = f"{count} task{'' if count == 1 else 's'}, each answered once"
        self.console.print(f"[bold green]{escape(best)}[/]: {reason} ({prompts})", highlight=False)
        curve = measure_cost_curve(self.model, (1, 2, 4, 8, 16), context=128, repeats=2)
        findings = [*judge(measured, ours, exact=self.model.dtype == torch.float32), verification_cost(curve)]
        for finding in findings:
            self.console.print(line(finding), highlight=False)
        self.console.print(
            f"[dim][{ACCEPTED}]Accepted draft tokens[/] are coloured. Intervals: 95%, over the tasks. All variants run "
            "eagerly, none with prepacked weights.[/]"
        )
        return all(finding.result != BAD for finding in findings)

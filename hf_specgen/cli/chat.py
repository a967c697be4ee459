"""`hf-specgen chat`: a streaming chat that shows which tokens were drafted, and compares strategies."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specgen.call import Call
from hf_specgen.candidates import Candidates
from hf_specgen.candidates.combined import AUTO
from hf_specgen.cli.settings import ChatSettings
from hf_specgen.compat import CACHE
from hf_specgen.counters import StepRecord
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.workloads import DEFAULT, PLAIN
from hf_specgen.monitoring import Monitor, MonitorSession

ACCEPTED = "green"
"""Style of accepted draft tokens."""
HELP = """\
/plain            answer with plain generate from now on
/strategy [NAME]  answer with this strategy; without a name, list them
/again            answer the last question again, to compare strategies
/new              forget the conversation
/quit             leave (or Ctrl-D)"""
Write = Callable[[str, bool], None]
"""Receives a piece of text, and whether it is an accepted draft token."""


class AnswerWriter(BaseStreamer, Monitor, MonitorSession):
    """Writes an answer token by token: as the streamer of a plain call, or as the monitor of one that speculates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Write):
        self._tokenizer, self._write = tokenizer, write
        self._generated: list[int] = []
        self._done, self._written, self._has_prompt = 0, "", False  # tokens and text that were written

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then every token of a plain call."""
        if self._has_prompt:
            self._generated += value.flatten().tolist()
            self._write_tokens(0, 1)
        self._has_prompt = True

    def start(self, call: Call) -> MonitorSession:
        self._generated = call.state.generated[0]
        return self

    def observe(self, step: StepRecord) -> None:
        (row,) = step.rows
        assert row is not None
        self._write_tokens(row.accepted, row.emitted)

    def end(self) -> None:
        """Write what is left."""
        self._write_tokens(0, 0)
        self._decode(False, final=True)

    def _write_tokens(self, accepted: int, emitted: int) -> None:
        """Write the new tokens; the last `emitted` are those of a step that accepted so many draft tokens."""
        first = len(self._generated) - emitted
        while self._done < len(self._generated):
            self._done += 1
            self._decode(first < self._done <= first + accepted)

    def _decode(self, accepted: bool, *, final: bool = False) -> None:
        """Write what the last token adds to the text, once its characters are complete."""
        text = str(self._tokenizer.decode(self._generated[: self._done], skip_special_tokens=True))
        if final or not text.endswith("\ufffd"):
            self._write(text[len(self._written) :], accepted)
            self._written = text


class Chat:
    """A conversation on a terminal: reads lines, answers them, and carries out commands that begin with a slash.

    Attributes:
        messages: the conversation so far, with the system prompt.
        cached: `[1, tokens]` the text of the last turn and its key/value cache; None to compute the conversation anew.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        choices: dict[str, Candidates | None],
        console: Console,
        system: str = "",
        **generation: Any,
    ):
        self._model, self._tokenizer, self._generation = model, tokenizer, generation
        self._begin = [{"role": "system", "content": system}] if system else []
        self.choices, self.console = choices, console
        self.strategy = next(reversed(choices))
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = list(self._begin)
        self.cached: tuple[torch.Tensor, Any] | None = None

    def run(self, read: Callable[[], str]) -> None:
        """Chat until `read` raises EOFError or KeyboardInterrupt, or until /quit."""
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            elif line:
                line = line.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which no tokenizer takes
                self._answer([*self.messages, {"role": "user", "content": line}])

    def generate(self, messages: list[dict[str, str]], write: Write) -> str:
        """Answer the last of these messages; returns a line about strategy, speed, and accepted draft tokens."""
        candidates, writer = self.choices[self.strategy], AnswerWriter(self._tokenizer, write)
        has_template = bool(self._tokenizer.chat_template)
        prompt = messages if has_template else "\n".join(message["content"] for message in messages)
        (inputs,) = workloads.encode(self._tokenizer, [prompt], 1)
        ids, cache = inputs["input_ids"].to(self._model.device), None
        if self.cached is not None and torch.equal(ids[:, : self.cached[0].shape[1]], self.cached[0]):
            cache = self.cached[1]  # unless the template or the tokenizer writes earlier turns in another way now
        arguments = {**self._generation, CACHE: cache, "return_dict_in_generate": True}
        arguments["streamer" if candidates is None else "monitor"] = writer
        torch.manual_seed(0)
        begin, generate = perf_counter(), cast(Any, self._model).generate
        output = generate(ids, attention_mask=torch.ones_like(ids), candidate_generator=candidates, **arguments)
        seconds = perf_counter() - begin
        tokens = output.sequences[0, ids.shape[1] :]
        self.cached = output.sequences, output[CACHE]
        answer = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        parts = [self.strategy, f"{len(tokens)} tokens", f"{len(tokens) / seconds:.1f} tokens/s"]
        if candidates is not None:
            counts = output.speculation
            parts += [f"{counts.tokens_per_step:.2f} per step", f"{counts.acceptance_rate:.0%} accepted"]
        return " · ".join(parts)

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Answer the last of these messages and print the answer; the conversation stays as it was if that fails."""
        try:
            status = self.generate(messages, self._print)
        except (KeyboardInterrupt, ValueError) as error:
            self.cached = None
            reason = f"{self.strategy} cannot be used: {error}" if str(error) else "interrupted"
            self.console.print(f"\n[red]{reason}[/]; the conversation is as before\n", highlight=False)
        else:
            self.console.print(f"\n[dim]{status}[/]\n", highlight=False)

    def _print(self, text: str, accepted: bool) -> None:
        style = ACCEPTED if accepted else None
        self.console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def _command(self, name: str = "", argument: str = "") -> None:
        message = HELP
        if name in ("plain", "strategy"):
            wanted = PLAIN if name == "plain" else argument
            self.strategy = wanted if wanted in self.choices else self.strategy
            unknown = f"there is no strategy {wanted!r}; " if wanted not in ("", self.strategy) else ""
            message = f"{unknown}strategies: {', '.join(self.choices)}; now: {self.strategy}"
        elif name == "again" and self.messages[-1:] != self._begin:
            self.cached = None
            return self._answer(self.messages[:-1])
        elif name == "again":
            message = "there is no answer to repeat"
        elif name == "new":
            self.clear()
            message = "a new conversation"
        self.console.print(f"[dim]{message}[/]\n", highlight=False)


def show(settings: ChatSettings) -> None:
    """Load the models and chat on the terminal."""
    model, tokenizer = workloads.load(settings.target, settings.dtype, settings.device)
    choices: dict[str, Candidates | None] = {PLAIN: None, DEFAULT: AUTO}
    trust = settings.trust_remote_code
    named = workloads.strategies(settings.draft, tokenizer=tokenizer, trust_remote_code=trust)
    choices |= {strategy.name: strategy.candidates for strategy in named[1:]}  # without n-grams alone
    generation = workloads.generation_settings(settings.max_new_tokens, settings.temperature)
    console = Console()
    console.print(
        f"[bold]{settings.model}[/]. [{ACCEPTED}]Accepted draft tokens[/] are coloured; /help lists commands.\n"
    )
    with workloads.maybe_prepacked(model, settings.pack_weights):
        chat = Chat(model, tokenizer, choices, console, settings.system, **generation)
        chat.run(lambda: console.input("[bold cyan]>[/] "))

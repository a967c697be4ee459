"""`hf-specgen chat`: a streaming chat that shows which tokens were drafted, and compares strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specgen.call import Call
from hf_specgen.call_statistics import StepRecord
from hf_specgen.candidates import Candidates
from hf_specgen.candidates.combined import AUTO
from hf_specgen.cli.settings import ChatSettings
from hf_specgen.compat import CACHE
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.measure import Variant, measure_call
from hf_specgen.evaluation.workloads import DEFAULT, PLAIN
from hf_specgen.monitor import Monitor, MonitorSession

ACCEPTED = "green"
"""Style of accepted draft tokens."""
HELP = """\
/plain            answer with plain generate from now on
/strategy [NAME]  answer with this strategy; without a name, list them
/again            answer the last question again, to compare strategies
/new              forget the conversation
/quit             leave (or Ctrl-D)"""


class AnswerWriter(BaseStreamer, Monitor, MonitorSession):
    """Writes an answer token by token: as the streamer of a plain call, or as the monitor of one that speculates.

    `write` receives a piece of text, and whether it is an accepted draft token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, bool], object]):
        super().__init__()
        self._tokenizer = tokenizer
        self._write = write
        self._generated = list[int]()
        self._has_prompt = False
        self._done = 0
        self._written = ""  # tokens and text that were written

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
        """Write what is left, also of characters that are not complete."""
        self._write_tokens(0, 0)
        self._write(self._text(self._done)[len(self._written) :], False)

    def _text(self, tokens: int) -> str:
        return str(self._tokenizer.decode(self._generated[:tokens], skip_special_tokens=True))

    def _write_tokens(self, accepted: int, emitted: int) -> None:
        """Write the new tokens; the last `emitted` are those of a step that accepted `accepted` draft tokens."""
        first = len(self._generated) - emitted
        while self._done < len(self._generated):
            self._done += 1
            text = self._text(self._done)
            if not text.endswith("\ufffd"):
                self._write(text[len(self._written) :], first < self._done <= first + accepted)
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
        self._model = model
        self._tokenizer = tokenizer
        self._generation = generation
        self._begin = [{"role": "system", "content": system}] if system else []
        self.choices = choices
        self.console = console
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

    def generate(self, messages: list[dict[str, str]], write: Callable[[str, bool], None]) -> str:
        """Answer the last of these messages; returns a line about strategy, speed, and accepted draft tokens."""
        candidates = self.choices[self.strategy]
        writer = AnswerWriter(self._tokenizer, write)
        has_template = bool(self._tokenizer.chat_template)
        prompt = messages if has_template else "\n".join(message["content"] for message in messages)
        (inputs,) = workloads.encode(self._tokenizer, [prompt], 1)
        ids = inputs["input_ids"]
        arguments = {"return_dict_in_generate": True, **self._generation}
        if self.cached is not None and torch.equal(ids[:, : self.cached[0].shape[1]], self.cached[0]):
            # Unless the template or the tokenizer writes earlier turns in another way now.
            arguments[CACHE] = self.cached[1]
        receiver = {"streamer" if candidates is None else "monitor": writer}
        variant = Variant(self.strategy, lambda: {"candidate_generator": candidates, **receiver})
        call = measure_call(self._model, inputs, variant, arguments, 0)
        self.cached = call.ids, call.cache
        answer = str(self._tokenizer.decode(call.ids[0, ids.shape[1] :], skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        parts = [self.strategy, f"{call.tokens} tokens", f"{call.tokens / call.seconds:.1f} tokens/s"]
        if (counts := call.speculation) is not None:
            parts += [f"{counts.tokens_per_step:.2f} per step", f"{counts.acceptance_rate:.0%} accepted"]
        return " · ".join(parts)

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Answer the last of these messages and print the answer; the conversation stays as it was if that fails."""
        try:
            status = self.generate(messages, self._print)
        except (KeyboardInterrupt, Exception) as error:  # as of a model without positions for so long a text
            self.cached = None
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = f"{self.strategy} cannot be used: {kind}{error}"
            if isinstance(error, KeyboardInterrupt):
                reason = "interrupted"
            message = f"\n[red]{escape(reason)}[/]; the conversation is as before, /new forgets it\n"
            self.console.print(message, highlight=False)
        else:
            self.console.print(f"\n[dim]{escape(status)}[/]\n", highlight=False)

    def _print(self, text: str, accepted: bool) -> None:
        style = ACCEPTED if accepted else None
        self.console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def _command(self, name: str = "", argument: str = "") -> None:
        message = HELP if name in ("", "help") else f"there is no command /{name}\n{HELP}"
        if name in ("plain", "strategy"):
            wanted = PLAIN if name == "plain" else argument or self.strategy
            unknown = "" if wanted in self.choices else f"there is no strategy {wanted!r}; "
            self.strategy = self.strategy if unknown else wanted
            message = f"{unknown}strategies: {', '.join(self.choices)}; now: {self.strategy}"
        elif name == "again" and self.messages[-1:] != self._begin:
            self.cached = None
            return self._answer(self.messages[:-1])
        elif name == "again":
            message = "there is no answer to repeat"
        elif name == "new":
            self.clear()
            message = "a new conversation"
        self.console.print(f"[dim]{escape(message)}[/]\n", highlight=False)


def show(settings: ChatSettings) -> None:
    """Load the models and chat on the terminal."""
    model, tokenizer = workloads.load(settings.target, settings.dtype, settings.device)
    trust = settings.trust_remote_code
    named = workloads.strategies(settings.draft, tokenizer=tokenizer, trust_remote_code=trust)[1:]  # n-grams are first
    choices = {PLAIN: None, DEFAULT: AUTO, **{strategy.name: strategy.candidates for strategy in named}}
    generation = workloads.generation_settings(settings.max_new_tokens, settings.temperature)
    console = Console()
    console.print(
        f"[bold]{escape(settings.model)}[/]. [{ACCEPTED}]Accepted draft tokens[/] are coloured; /help lists commands.\n"
    )
    chat = Chat(model, tokenizer, choices, console, settings.system, **generation)
    chat.run(lambda: console.input("[bold cyan]>[/] "))

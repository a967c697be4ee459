"""`hf-specgen chat`: a streaming chat that shows which tokens were drafted, and compares strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specgen.call import Call
from hf_specgen.candidates import Candidates
from hf_specgen.candidates.combined import default_candidates
from hf_specgen.cli.settings import ChatSettings
from hf_specgen.counters import Statistics, StepRecord
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.workloads import DEFAULT, PLAIN, chat_text, load_model, maybe_prepacked, strategies
from hf_specgen.monitoring.monitor import Monitor, MonitorSession

ACCEPTED = "green"
"""Style of accepted draft tokens."""
HELP = """\
/plain            answer with plain generate from now on
/strategy [NAME]  answer with this strategy; without a name, list them
/again            answer the last question again, to compare strategies
/new              forget the conversation
/quit             leave (or Ctrl-D)"""


@dataclass
class Answer:
    """An answer, and how it was generated; `speculation` is None for plain generation."""

    text: str
    strategy: str
    tokens: int
    seconds: float
    speculation: Statistics | None

    def status(self) -> str:
        """One line: strategy, speed, and how many draft tokens were accepted."""
        parts = [self.strategy, f"{self.tokens} tokens", f"{self.tokens / self.seconds:.1f} tokens/s"]
        if self.speculation is not None:
            parts.append(f"{self.speculation.tokens_per_step:.2f} per step")
            parts.append(f"{self.speculation.acceptance_rate:.0%} accepted")
        return " · ".join(parts)


@dataclass
class Conversation:
    """Messages, and the key/value cache of the tokens that were read and generated for them.

    `read`, `[1, tokens]`, is the text that the cache holds; None if the cache is not used again.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation: dict[str, Any]
    seed: int = 0
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    read: torch.Tensor | None = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.forget_cache()

    def forget_cache(self) -> None:
        """Read the conversation anew for the next answer."""
        self.read = self.cache = None

    def take_back_answer(self) -> bool:
        """Remove the last answer, so that it can be given again; returns False if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.forget_cache()
        self.messages.pop()
        return True

    def answer(self, name: str, candidates: Candidates | None, write: Callable[[str, bool], None]) -> Answer:
        """Answer the last message; `write` receives pieces of text, and whether each is an accepted draft token."""
        ids = self._prompt()
        read = self.read
        if read is None or ids.shape[1] <= read.shape[1] or not torch.equal(ids[:, : read.shape[1]], read):
            self.forget_cache()  # the template or the tokenizer writes earlier turns in another way now
        streamer = ColouredStreamer(self.tokenizer, write)
        arguments = {**self.generation, "past_key_values": self.cache, "return_dict_in_generate": True}
        if candidates is not None:
            arguments.update(candidate_generator=candidates, monitor=streamer.monitor)
        torch.manual_seed(self.seed)
        begin = perf_counter()
        output = cast(Any, self.model).generate(
            ids, attention_mask=torch.ones_like(ids), streamer=streamer, **arguments
        )
        seconds = perf_counter() - begin
        self.read, self.cache = output.sequences, output.past_key_values
        generated = output.sequences[0, ids.shape[1] :]
        text = str(self.tokenizer.decode(generated, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": text})
        return Answer(text, name, len(generated), seconds, getattr(output, "speculation", None))

    def _prompt(self) -> torch.Tensor:
        """`[1, tokens]` the conversation so far, in the model's chat format if it has one."""
        has_template = bool(self.tokenizer.chat_template)
        plain = "\n".join(message["content"] for message in self.messages)
        text = chat_text(self.tokenizer, self.messages) if has_template else plain
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=not has_template)["input_ids"]
        return cast(torch.Tensor, ids).to(self.model.device)


class Chat:
    """Reads lines, answers them, and carries out commands that begin with a slash."""

    def __init__(self, conversation: Conversation, choices: dict[str, Candidates | None], console: Console):
        self.conversation, self.choices, self.console = conversation, choices, console
        self.strategy = next(reversed(choices))

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
                self.conversation.messages.append({"role": "user", "content": line})
                if not self._answer():
                    self.conversation.messages.pop()

    def _answer(self) -> bool:
        """Answer the last message and print the answer; returns False, and adds no message, if that fails."""

        def write(text: str, accepted: bool) -> None:
            self.console.print(
                text, style=ACCEPTED if accepted else None, end="", markup=False, highlight=False, soft_wrap=True
            )

        try:
            answer = self.conversation.answer(self.strategy, self.choices[self.strategy], write)
        except KeyboardInterrupt:
            self.conversation.forget_cache()
            self.console.print("\n[dim]interrupted; the conversation is as before[/]\n")
            return False
        except ValueError as error:
            self.console.print(f"[red]error:[/] {self.strategy} cannot be used: {error}\n", highlight=False)
            return False
        self.console.print(f"\n[dim]{answer.status()}[/]\n", highlight=False)
        return True

    def _again(self) -> None:
        """Answer the last question again; the answer before is kept if that fails."""
        messages = list(self.conversation.messages)
        if not self.conversation.take_back_answer():
            self.console.print("[dim]there is no answer to repeat[/]\n")
        elif not self._answer():
            self.conversation.messages = messages

    def _command(self, name: str = "", argument: str = "") -> None:
        if name == "plain":
            name, argument = "strategy", PLAIN
        if name == "strategy" and argument in self.choices:
            self.strategy = argument
            self.console.print(f"[dim]strategy: {argument}[/]\n")
        elif name == "strategy":
            unknown = f"there is no strategy {argument!r}; " if argument else ""
            self.console.print(f"[dim]{unknown}strategies: {', '.join(self.choices)}; now: {self.strategy}[/]\n")
        elif name == "again":
            self._again()
        elif name == "new":
            self.conversation.clear()
            self.console.print("[dim]a new conversation[/]\n")
        else:
            self.console.print(f"[dim]{HELP}[/]\n", highlight=False)


class ColouredStreamer(BaseStreamer):
    """Writes the text of one row piece by piece, each with whether its last token is an accepted draft token.

    With `generate(monitor=streamer.monitor)` tokens are held until their step is reported with the number of accepted
    draft tokens; without it, every token is written at once as the target's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, bool], None]):
        self._tokenizer, self._write = tokenizer, write
        self._has_prompt = False
        self._held: list[int] = []  # tokens whose step was not reported yet
        self._line: list[int] = []  # tokens of the current line
        self._written = ""  # what has been written of it
        self._holds_tokens = False
        self.monitor = _StepMonitor(self)

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then every token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._held += value.flatten().tolist()
        if not self._holds_tokens:
            self.step(0, 0)

    def end(self) -> None:
        """Write what is left."""
        self.step(0, 0)
        self._decode(False, final=True)

    def wait_for_steps(self) -> None:
        """From now on, hold tokens until `step`."""
        self._holds_tokens = True

    def step(self, accepted: int, emitted: int) -> None:
        """Write the held tokens; the last `emitted` are those of a step that accepted so many draft tokens."""
        before = len(self._held) - emitted
        for place, token in enumerate(self._held):
            self._line.append(token)
            self._decode(before <= place < before + accepted)
        self._held = []

    def _decode(self, accepted: bool, *, final: bool = False) -> None:
        """Write what the last token adds to the text, once its characters are complete."""
        text = str(self._tokenizer.decode(self._line, skip_special_tokens=True))
        if text.endswith("\ufffd") and not final:  # the first bytes of a character
            return
        if text[len(self._written) :]:
            self._write(text[len(self._written) :], accepted)
        self._written = text
        if text.endswith("\n"):
            self._line, self._written = [], ""


class _StepMonitor(Monitor, MonitorSession):
    """Tells a streamer which tokens a step has accepted."""

    def __init__(self, streamer: ColouredStreamer):
        self._streamer = streamer

    def start(self, call: Call) -> MonitorSession:
        self._streamer.wait_for_steps()
        return self

    def observe(self, step: StepRecord) -> None:
        row = step.rows[0]
        if row is not None:
            self._streamer.step(row.accepted, row.emitted)


def show(settings: ChatSettings) -> None:
    """Load the models and chat on the terminal."""
    named = strategies(settings.draft, settings.heads, settings.adapter)[1:]
    model, tokenizer = load_model(settings.model, settings.dtype, settings.device)
    choices: dict[str, Candidates | None] = {PLAIN: None, DEFAULT: default_candidates()}
    choices.update({strategy.name: strategy.candidates for strategy in named})
    generation = workloads.generation_settings(settings.max_new_tokens, settings.temperature)
    console = Console()
    console.print(
        f"[bold]{settings.model}[/]. [{ACCEPTED}]Accepted draft tokens[/] are coloured; /help lists commands.\n"
    )
    conversation = Conversation(model, tokenizer, generation, settings.seed, settings.system)
    with maybe_prepacked(model, settings.pack_weights):
        Chat(conversation, choices, console).run(lambda: console.input("[bold cyan]>[/] "))

"""What the report says about its tables."""

from __future__ import annotations

ABOUT_SPEED = (
    "Tokens per second, sums of tokens over sums of time, with the 95% bootstrap interval; green is faster, red "
    "slower; an interval that includes 1 shows no difference. Ours in bold. Edit and json are decoded greedily, the "
    "others sampled at 0.8 with a seed for each prompt: greedy output of a small model repeats itself and flatters "
    "whatever copies."
)
SECTIONS: dict[str, tuple[str, str]] = {
    "acceptance": (
        "How much was accepted",
        "<b>Tokens/step</b> counts every verification step and the target's own token (Spec-Bench's mean accepted "
        "length); <b>mean acceptance length</b> is 1 + accepted / drafts, over steps that guessed something (vLLM's). "
        "By position: of the drafts that reach it, the share accepted up to there.",
    ),
    "cost": (
        "What a forward pass costs here",
        "T(q): the target reads q tokens at once, 256 being cached. Guessing pays as far as this stays flat.",
    ),
    "limits": (
        "What was possible",
        "<b>alpha</b>: probability that a guess is accepted, given those before it were. <b>Expected</b>: tokens per "
        "step from alpha and the mean draft length, 1 + &alpha;(1&minus;&alpha;<sup>k</sup>)/(1&minus;&alpha;). "
        "<b>Best k</b>: from alpha, T(q) and the draft's own time. <b>Limit</b>: the speedup if a step cost its "
        "draft and its forward pass only; next to it the share that was reached.",
    ),
    "latency": (
        "Latency and memory",
        "Whole requests of all domains; peak memory of the process, weights of every variant included.",
    ),
    "tuning": (
        "Length of the draft",
        "The sweep that chose the settings: every setting of every strategy, ours and Transformers', on prompts that "
        "are not measured above.",
    ),
    "batch": ("Batches", "Mixed prompts, sampled at 0.8; Transformers' own take one row only."),
    "temperature": ("Temperature", "Mixed prompts, one row; 0.0 is greedy decoding."),
    "context": ("Length of context", "Mixed prompts behind other text, one row, sampled at 0.8."),
    "traces": (
        "Replay of a 7B model's texts",
        "A scripted target that writes recorded answers: tokens per forward pass of n-gram strategies, counted.",
    ),
    "synthetic": (
        "The loop by itself",
        "A scripted target that costs nothing, and guesses that are right with probability alpha.",
    ),
    "differences": (
        "Where a text differed",
        "First token that is not plain decoding's. In float32 there must be none; in lower precision both logits "
        "should nearly tie.",
    ),
}

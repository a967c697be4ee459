"""N-gram drafts for a text, without a model."""

from hf_specgen import NgramCandidates
from hf_specgen.tree import Parents
from tests.helpers.calls import AMPLE, make_call, make_state


def ngram_draft(candidates: NgramCandidates, text: list[int], budget: int = AMPLE) -> tuple[list[int], Parents]:
    """Tokens and parents of the draft that continues one row.

    The last token counts as generated, as in the decoding loop.
    """
    state = make_state([text[:-1]])
    state.append(0, text[-1:])
    tree = candidates.start(make_call(state, candidates=candidates)).draft([budget])
    return tree.tokens[0].tolist(), tree.parents[0]

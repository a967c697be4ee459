"""`Settings.parse`: what a user gave becomes typed settings, once, and nothing changes them afterwards."""

import pickle
from dataclasses import FrozenInstanceError

import pytest

from hf_specgen import NgramCandidates
from hf_specgen.candidates.combined import AUTO, PRESETS
from hf_specgen.depth import AdaptiveDepth, FixedDepth
from hf_specgen.settings import KEYWORDS, Settings
from hf_specgen.verification import ExactVerifier, RejectionVerifier
from tests.helpers import tiny_model


def test_parse_without_keywords_takes_the_policy_of_the_strategy() -> None:
    """Would catch: a strategy whose policy has no effect, or a default that differs from the documented one."""
    candidates = NgramCandidates(k=4, policy=FixedDepth(2))
    settings = Settings.parse(candidates)
    assert settings.candidates is candidates and settings.policy is candidates.policy
    assert isinstance(settings.verifier, ExactVerifier) and settings.monitor is None
    assert (settings.compile, settings.memory, settings.prediction, settings.grammar_drafts) == (
        "auto",
        True,
        None,
        True,
    )
    with pytest.raises(FrozenInstanceError):
        settings.memory = False  # type: ignore[misc]


def test_updated_checks_keywords_and_leaves_the_others() -> None:
    """Would catch: keywords of one call of a model with an attached strategy that are not checked, or that stay."""
    settings = Settings.parse("auto", verification="rejection", policy=FixedDepth(3))
    changed = settings.updated(memory=False, policy=None)
    assert not changed.memory and changed.policy is changed.candidates.policy, "None: the policy of the strategy"
    assert isinstance(changed.verifier, RejectionVerifier), "kept"
    assert settings.memory and settings.policy == FixedDepth(3)
    with pytest.raises(TypeError, match="memory must be True or False, got 1"):
        settings.updated(memory=1)
    assert set(KEYWORDS) - {"verification"} <= set(Settings.__dataclass_fields__)


@pytest.mark.parametrize("copied", [False, True])
def test_for_model_of_a_preset_takes_its_policy_unless_the_user_gave_one(copied: bool) -> None:
    """Would catch: a preset that drafts by the policy of a placeholder, also after an attached model was pickled."""
    model = tiny_model("llama")
    settings, with_policy = Settings.parse("memory"), Settings.parse("auto", policy=FixedDepth(3))
    if copied:
        settings, with_policy = pickle.loads(pickle.dumps((settings, with_policy)))
    chosen = settings.for_model(model)
    assert chosen.candidates is PRESETS["memory"] and chosen.policy is PRESETS["memory"].policy
    assert isinstance(chosen.policy, AdaptiveDepth)
    assert with_policy.for_model(model).candidates is AUTO and with_policy.for_model(model).policy == FixedDepth(3)

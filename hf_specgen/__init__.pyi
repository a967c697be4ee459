"""The names of the package for type checkers; see `__init__.py`."""

from hf_specgen.attachment import attach as attach
from hf_specgen.attachment import attached as attached
from hf_specgen.attachment import detach as detach
from hf_specgen.attachment import statistics as statistics
from hf_specgen.batching.many_prompts import Completion as Completion
from hf_specgen.batching.many_prompts import generate_many as generate_many
from hf_specgen.call import Call as Call
from hf_specgen.call_statistics import CallTotals as CallTotals
from hf_specgen.call_statistics import Statistics as Statistics
from hf_specgen.call_statistics import StepRecord as StepRecord
from hf_specgen.candidates import AutoCandidates as AutoCandidates
from hf_specgen.candidates import Candidates as Candidates
from hf_specgen.candidates import CombinedCandidates as CombinedCandidates
from hf_specgen.candidates import DFlashCandidates as DFlashCandidates
from hf_specgen.candidates import DraftModelCandidates as DraftModelCandidates
from hf_specgen.candidates import DraftSession as DraftSession
from hf_specgen.candidates import EagleCandidates as EagleCandidates
from hf_specgen.candidates import GemmaAssistantCandidates as GemmaAssistantCandidates
from hf_specgen.candidates import LayerSkipCandidates as LayerSkipCandidates
from hf_specgen.candidates import MedusaCandidates as MedusaCandidates
from hf_specgen.candidates import MTPCandidates as MTPCandidates
from hf_specgen.candidates import NgramCandidates as NgramCandidates
from hf_specgen.candidates import NgramHistory as NgramHistory
from hf_specgen.candidates import PEagleCandidates as PEagleCandidates
from hf_specgen.candidates import RecyclingCandidates as RecyclingCandidates
from hf_specgen.candidates.draft_batch import DraftBatch as DraftBatch
from hf_specgen.depth import AdaptiveDepth as AdaptiveDepth
from hf_specgen.depth import FixedDepth as FixedDepth
from hf_specgen.depth import MovingWindow as MovingWindow
from hf_specgen.depth import Policy as Policy
from hf_specgen.depth import PolicySession as PolicySession
from hf_specgen.depth import Schedule as Schedule
from hf_specgen.generate import speculate as speculate
from hf_specgen.monitor import Monitor as Monitor
from hf_specgen.monitor import MonitorSession as MonitorSession
from hf_specgen.monitor import SpeculationMonitor as SpeculationMonitor
from hf_specgen.outputs import SpeculativeOutput as SpeculativeOutput
from hf_specgen.patch import install as install
from hf_specgen.patch import uninstall as uninstall
from hf_specgen.prepacked_weights import prepacked as prepacked
from hf_specgen.tree import DraftTree as DraftTree
from hf_specgen.verification import VerificationResult as VerificationResult
from hf_specgen.verification import VerificationSession as VerificationSession
from hf_specgen.verification import Verifier as Verifier

__version__: str

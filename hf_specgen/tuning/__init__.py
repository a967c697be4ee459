"""What Medusa heads are worth on a dataset and a machine."""

from hf_specgen.tuning.command import TuneSettings, run
from hf_specgen.tuning.counting import Counts, measure_acceptance, measure_cost, save_tuning

__all__ = ["Counts", "TuneSettings", "measure_acceptance", "measure_cost", "run", "save_tuning"]

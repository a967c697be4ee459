"""`hf-specgen doctor`: will speculation work here, will it pay, and if not, why?"""

from hf_specgen.cli.doctor.examine import DoctorSettings, examine
from hf_specgen.cli.doctor.findings import Finding, Report, Verdict

__all__ = ["DoctorSettings", "Finding", "Report", "Verdict", "examine"]

"""`hf-specgen doctor`: will speculation work here, will it pay, and if not, why?"""

from hf_specgen.cli.doctor.examine import DoctorSettings, examine
from hf_specgen.cli.doctor.findings import CheckResult, Finding, Report

__all__ = ["CheckResult", "DoctorSettings", "Finding", "Report", "examine"]

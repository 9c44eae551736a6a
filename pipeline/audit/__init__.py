"""Does it really do what it promises? Black-box audits of the training step, with canaries."""

from pipeline.audit.checks import CheckResult, check_observation, check_step
from pipeline.audit.f_dp_bound import TradeOff, f_dp_lower_bound
from pipeline.audit.lower_bound import LowerBound, one_run_lower_bound
from pipeline.audit.membership import MembershipScores, membership_inference
from pipeline.audit.model_audit import membership_of_model
from pipeline.audit.phase_check import check_phase
from pipeline.audit.rank_check import check_ranks
from pipeline.audit.run import audit_mechanism, table_lines
from pipeline.audit.step import AuditSettings, Observation, observe

__all__ = [
    "AuditSettings",
    "CheckResult",
    "LowerBound",
    "MembershipScores",
    "Observation",
    "TradeOff",
    "audit_mechanism",
    "check_observation",
    "check_phase",
    "check_ranks",
    "check_step",
    "f_dp_lower_bound",
    "membership_inference",
    "membership_of_model",
    "observe",
    "one_run_lower_bound",
    "table_lines",
]

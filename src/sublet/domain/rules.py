"""The cluster-wide numbers of the policy. Nobody can shield himself: a job's wishes are capped by these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    grace_ms: int = 30_000  # notice given when the job asks for none
    max_grace_ms: int = 300_000
    reclaim_delay_ms: int = 0  # how long an entitled job waits for natural churn
    cooldown_ms: int = 0  # first pause before a reclaimed job borrows again; doubles
    max_cooldown_ms: int = 1_800_000
    # After the grace; then the node is quarantined. Longer than an engine's own wait from SIGTERM to SIGKILL, 30 s.
    kill_timeout_ms: int = 60_000
    restart_cost_ms: int = 60_000  # what a restart is taken to cost on each GPU, beside lost work
    eviction_cost_gpu_ms: int = 1_800_000  # what an eviction costs beside: of like losses the fewest victims
    reclaim: bool = True  # False: what is lent comes back only when its borrower ends
    suspect_ms: int = 3_600_000  # how long a node that several jobs blame is avoided where it can be; 0 = never
    reserve_percent: int = 50  # of what owners lately took back is not lent again; 0 = all is lent

"""Short names for what tests tell an `AgentState` and expect of it."""

from agent_clients import plan_of

from weightsync.agent.agent_state import AgentState, AnswerCall, Grant, Instruction, OfferVersion, Pull
from weightsync.messages import Done, HeldVersion
from weightsync.plan import TransferPlan
from weightsync.version import Version

PLAN = plan_of([0, 1])
ALONE = plan_of([0, 0])
V0, V1, V2, V3 = (Version(0, step) for step in range(4))
DONE = AnswerCall("seal", Done())


def agent(
    *plans: TransferPlan, num_slots: int = 2, max_updating: int | None = None, has_reader: bool = True
) -> AgentState:
    state = AgentState(num_slots=num_slots, max_updating=max_updating)
    if has_reader:  # otherwise nothing is fetched from other agents; this one has all that it wants
        state.watch("idle", "idle", Version(99, 0))
    for plan in plans or (PLAN,):
        state.open_plan(plan)
    return state


def take(
    state: AgentState,
    rank: int,
    version: Version,
    *,
    plan: TransferPlan = PLAN,
    session: str = "",
    deadline: float = 9.0,
    patient_until: float = 0.0,
) -> list[Instruction]:
    call = f"take {rank} {version}"
    return state.take_slot(
        call,
        session or f"rank{rank}",
        rank=rank,
        version=version,
        plan=plan.digest(),
        deadline=deadline,
        patient_until=patient_until,
    )


def seal(state: AgentState, rank: int, version: Version, *, session: str = "", **checksums: int) -> list[Instruction]:
    given = {int(name[1:]): checksum for name, checksum in checksums.items()} or {rank: 10 + rank}
    return state.seal_buckets("seal", session or f"rank{rank}", rank=rank, version=version, checksums=given)


def write(state: AgentState, version: Version) -> list[Instruction]:
    """Both ranks write and seal a version; returns what follows from the last seal."""
    for rank in (0, 1):
        take(state, rank, version)
    seal(state, 0, version)
    return seal(state, 1, version)


def grant(rank: int, version: Version, slot: int, plan: TransferPlan = PLAN) -> Grant:
    return Grant(f"take {rank} {version}", version, slot, plan)


def offer(call: str, version: Version, slot: int) -> OfferVersion:
    return OfferVersion(call, version, slot, PLAN, (10, 11))


def held(version: Version, *buckets: int, plan: TransferPlan = PLAN) -> HeldVersion:
    return HeldVersion(version, plan.digest(), {bucket: 10 + bucket for bucket in buckets})


def pull(version: Version, bucket: int, slot: int, base: Version | None = None, peer: str = "peer") -> Pull:
    return Pull(peer, version, bucket, slot, 10 + bucket, base, PLAN)

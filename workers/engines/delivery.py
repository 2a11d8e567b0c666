"""Proof of delivery: a generator draws no token with a version before that version is shown to be in its model.

The checksums of buckets (`weightsync.receiver`) prove that bytes arrived in memory. This proves that they arrived in
the model: an engine may ignore an update, load another one, or put a tensor where another belongs.

    trainer     checksums of its shards, log-probabilities of a probe -> record of v in the job store -> publish v
    generator   load v -> read the record; sum what the engine holds; score the probe -> compare -> draw tokens of v

Two comparisons, since neither suffices:

    bytes       every tensor that the engine can read back (`ChecksummedEngine`), in its own element type: bit by bit
    numbers     the probe's log-probabilities (`ScoringEngine`): what layouts hide, and what is computed with them

Legend of shapes: A tokens of the probe after the first, C copies of the weights that an engine has.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import WeightsNeverDelivered, WeightsNotDelivered
from weightsync.plan import Need
from weightsync.sender import Shard, WeightSender
from weightsync.version import Version
from workers.data.model_files import few_of, max_positions, vocabulary_size
from workers.engines.base import (
    ChecksummedEngine,
    GenerateEngine,
    HeldChecksum,
    ScoringEngine,
    TrainEngine,
)
from workers.rank.context import WorkerContext
from workers.rank.peers import ReplicaPlace, gather
from workers.rows.packed_rows import Sequences
from workers.settings.rollout import SamplingConfig
from workers.settings.run import RunConfig

logger = logging.getLogger(__name__)

_MASK = 2**64 - 1
# Tokens of the probe, at most.
_PROBE_TOKENS = 64
# The part of the trainer's time that the probe may take: where a step is short, only some versions are scored.
_SCORING_SHARE = 0.01
# Records that are kept. A generator loads the newest version that it has, so it is never that far behind.
_KEPT_RECORDS = 64

# A failure is forgotten after this many delivered versions. Not at once: an engine that takes only its first weights
# would be started again for every version.
_FORGIVEN_AFTER = 8

# The largest root mean square difference (nats) of the probe's log-probabilities between two engines with the same
# weights: at first this many times what rounding explains; once it is known how far these two engines differ, this many
# times that. A smaller difference may still be too large to make sense, but proves nothing: `GapWatch` warns of it.
_ERRORS_AT_FIRST, _TIMES_AS_BEFORE = 10.0, 6.0
# How far two engines differ is known after the first number of versions, from the second number of newest ones. Not
# sooner: in bfloat16 they may agree to the last bit for one version, and not for the next.
_KNOWN_AFTER, _REMEMBERED = 8, 16
# The difference is never assumed to be below this part of what rounding explains.
_LEAST_NOISE = 0.01
# If the trainer moved by this many times the noise, a generator that made less than this part of the move did not do so
# by chance.
_CLEAR_MOVE, _LEAST_PART = 12.0, 0.5
# An adapter's change counts as visible if the trainer's log-probabilities of this share of the tokens move. Where only
# a few roundings turn out differently, the tokens before them stay.
_MOVED = 0.9

_FLOAT32_ERROR, _BFLOAT16_ERROR = 2e-3, 0.05


def rounding_error(config: RunConfig, engine: str | None = None) -> float | None:
    """Return the largest mean difference (nats) of a token's log-probability that rounding explains between trainer and
    generating engine (None: the rollout's) with the same weights, for the least precise dtype that computes or sends
    the policy, at an entropy of at least one nat; None: an engine is simulated. Measured: 1.3e-5 and 0.037
    (docs/algorithms.md)."""
    engine = engine or config.rollout.engine
    if "sim" in (engine, config.rollout.engine, config.actor.engine):
        return None
    types: set[str | None] = {config.model.dtype, config.actor.autocast, config.weightsync.dtype}
    if engine == "vllm":
        types = {config.vllm.dtype or config.model.dtype, config.actor.autocast, config.weightsync.dtype}
    rough = bool(types - {"float32", None}) or engine == "openai" or "rollout" in config.outside_roles
    return _BFLOAT16_ERROR if rough else _FLOAT32_ERROR


class DeliveryRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer published, for comparison."""

    tokens: list[int]  # of the probe; empty: this version is not scored
    log_probs: list[float]  # of the probe's tokens after the first
    names: str  # key of the list of names
    # Element type of a generator -> checksum of every tensor, in the order of names; empty: this version is not proven
    checksums: dict[str, list[int]]

    @property
    def scores(self) -> Tensor:
        return torch.tensor(self.log_probs, dtype=torch.float32)


def probe_tokens(config: RunConfig) -> Tensor:
    """Return the probe, int64 [A + 1]: random tokens, the same for a whole run; short enough for every engine."""
    path = Path(config.model.path)
    limits = [_PROBE_TOKENS, (max_positions(path) or math.inf) - 1]
    for sampling in config.generating().values():
        limits.append(config.data.max_prompt_tokens + sampling.max_response_tokens - 1)
        if sampling.engine == "vllm" and config.vllm.max_model_len is not None:
            limits.append(config.vllm.max_model_len - 1)
    chance = torch.Generator().manual_seed(config.seed)
    return torch.randint(vocabulary_size(path) or 2, (max(2, int(min(limits))),), generator=chance)


class DeliveryProver:
    """In every rank of the trainer: records what a version is, before it is published.

    The first version is scored, and later ones as long as that takes at most `scoring_share` of the time.
    """

    def __init__(
        self,
        context: WorkerContext,
        engine: TrainEngine,
        sender: WeightSender,
        place: ReplicaPlace,
        *,
        scoring_share: float = _SCORING_SHARE,
    ) -> None:
        config = context.config
        generating = [each for role, each in config.generating().items() if config.roles[role]]
        is_proven = rounding_error(config) is not None and generating
        self._interval = config.weightsync.proof_interval if is_proven else 0
        self._context, self._engine, self._sender = context, engine, sender
        self._is_probed = place.index == 0  # one replica computes the probe; the other ranks only join the collectives
        self._dtypes = {
            (config.vllm.dtype if each.engine == "vllm" else None) or config.model.dtype for each in generating
        }
        self._store = context.sealed_store() if context.rank == 0 and self._interval else None
        self._is_first = True
        self._scoring_share = scoring_share
        self._began, self._scoring_s = time.monotonic(), 0.0
        self._names: set[str] = set()
        self._recorded: deque[Version] = deque()

    def record_version(self, version: Version, shards: Iterable[Shard]) -> float:
        """Record a version whose weights the trainer has now; collective. Returns the seconds that it took."""
        if not self._interval:
            return 0.0
        began = time.monotonic()
        due = self._is_first or version.step % self._interval == 0
        names: list[str] = []
        checksums: dict[str, list[int]] = {}
        log_probs: list[float] = []
        tokens = torch.empty(0, dtype=torch.int64)
        if due:
            with self._context.timeline.span("prove weights", step=version.step):
                names, checksums, is_scored = self._sum_shards(list(shards))
                if is_scored:
                    tokens = probe_tokens(self._context.config)
                    log_probs = self._score(tokens)
        self._is_first = False
        if self._store is not None:
            key = f"delivery/names/{xxhash.xxh3_64_hexdigest(repr(names).encode())}"
            if key not in self._names:
                self._store.put(key, msgspec.msgpack.encode(names))
                self._names.add(key)
            record = DeliveryRecord(tokens.tolist(), log_probs, key, checksums)
            self._store.put(_key(version), msgspec.msgpack.encode(record))
            self._recorded.append(version)
            if len(self._recorded) > _KEPT_RECORDS:
                self._store.delete_key(_key(self._recorded.popleft()))
        return time.monotonic() - began

    def _sum_shards(self, shards: Sequence[Shard]) -> tuple[list[str], dict[str, list[int]], bool]:
        """Return the names of all tensors, their checksums in each element type that generators hold, and whether to
        score the probe, the same on all ranks."""
        own = {dtype: self._sender.sum_pieces(shards, getattr(torch, dtype)) for dtype in sorted(self._dtypes)}
        sums: dict[str, dict[str, int]] = {dtype: {} for dtype in own}
        affords = self._scoring_s < self._scoring_share * (time.monotonic() - self._began)
        parts = gather([own, self._is_first or affords])
        for part, _ in parts:
            for dtype, shares in part.items():
                for name, share in shares.items():
                    sums[dtype][name] = (sums[dtype].get(name, 0) + share) & _MASK
        names = sorted(next(iter(sums.values())))
        # Clocks differ: the first rank's decides, since scoring is collective.
        return names, {dtype: [found[name] for name in names] for dtype, found in sums.items()}, parts[0][1]

    def _score(self, tokens_T: Tensor) -> list[float]:
        """Return the probe's log-probabilities on rank 0; [] or as many on the others."""
        drawn_T = torch.ones(len(tokens_T), dtype=torch.uint8)
        drawn_T[0] = 0
        probe = Sequences(tokens_T, torch.tensor([len(tokens_T)], dtype=torch.int32), drawn_T)
        began = time.monotonic()
        found: list[float] = self._engine.log_probs(probe if self._is_probed else None).float().tolist()
        if not self._is_first:  # which may compile the model
            self._scoring_s += time.monotonic() - began
        return found


def _key(version: Version) -> str:
    return f"delivery/{version.lineage}.{version.step}"


class ProbeJudge:
    """Judges one copy of the weights by the probe's log-probabilities, version after version. Pure.

    Three things show that a version did not arrive. The engines are much further apart than they ever were. The
    generator moved less than half as far as the trainer, in the trainer's direction: this is seen however stale its
    tokens are, since both moves are between the same two versions. Or it computes exactly as before, bit by bit, though
    most tensors have changed: this is seen however small the move is, in whole weights. A small adapter is lost in the
    rounding of what it is added to, whatever has changed in it; there the trainer's move has to show, too, since the
    version that the generator last moved with.

    Args:
        error: difference that rounding explains (nats), see `rounding_error`.
        adapter: versions are adapters.
    """

    def __init__(self, error: float, *, adapter: bool = False) -> None:
        self._error = error
        self._adapter = adapter
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)  # of versions that were delivered
        self._last: tuple[Version, Tensor, Tensor] | None = None  # the last of them, expected and found

    def find_complaint(self, version: Version, expected_A: Tensor, found_A: Tensor, *, changed: bool) -> str:
        """Return what is wrong; "": nothing, and the version is remembered.

        Args:
            expected_A: from the trainer, float32 [A]. If it is not finite nothing is judged: the run ends of that.
            found_A: from the generator, float32 [A].
            changed: whether most tensors differ from those of the version before, in the generator's element type.
        """
        if not bool(expected_A.isfinite().all()):
            return ""
        gap, error = _rms(found_A - expected_A), self._error
        is_known = len(self._gaps) >= _KNOWN_AFTER
        noise = max([error * (_LEAST_NOISE if is_known else 1.0), *self._gaps])
        limit = _ERRORS_AT_FIRST * error
        if is_known:
            limit = min(limit, max(error, _TIMES_AS_BEFORE * noise))
        if not gap <= limit:  # or not a number
            return (
                f"its log-probabilities of the probe are {gap:.2g} nats from the trainer's, where at most {limit:.2g} "
                f"is expected"
            )
        if found := self._compare_moves(expected_A, found_A, noise, changed=changed):
            return found
        if self._last is not None and torch.equal(found_A, self._last[2]):
            return ""  # later versions are compared with the one that it last moved with, so that what is lost adds up
        if changed or self._last is None:  # the same weights again say nothing new of rounding
            self._gaps.append(gap)
        self._last = version, expected_A, found_A
        return ""

    def _compare_moves(self, expected_A: Tensor, found_A: Tensor, noise: float, *, changed: bool) -> str:
        if self._last is None or self._last[1].shape != expected_A.shape:
            return ""
        before, expected_before_A, found_before_A = self._last
        move_A, own_A = (expected_A - expected_before_A).double(), (found_A - found_before_A).double()
        least = _LEAST_NOISE * self._error if self._adapter else 0.0
        shows = _rms(move_A) > least and (not self._adapter or int(move_A.count_nonzero()) >= _MOVED * len(move_A))
        if changed and shows and not bool(own_A.any()):
            return f"it gives the probe exactly the log-probabilities that it gave with the weights of {before}"
        length = float(move_A.norm())
        # Without the update, `own_A` is rounding alone; with it, the move and the rounding of both versions.
        if length < _CLEAR_MOVE * math.sqrt(2) * noise:
            return ""
        part = float(own_A @ move_A) / length**2
        if part >= _LEAST_PART:
            return ""
        return (
            f"since the weights of {before}, its log-probabilities of the probe moved {max(0.0, part):.0%} of what the "
            f"trainer's did"
        )


def _rms(values_A: Tensor) -> float:
    return float(values_A.double().square().mean().sqrt())


def compare_checksums(
    held: Mapping[str, HeldChecksum], published: Mapping[str, Mapping[str, int]], needs: Mapping[str, Need]
) -> tuple[list[str], int]:
    """Return the tensors of an engine that differ from what was published, and how many were compared.

    Args:
        held: by the engine's names.
        published: element type -> checksums by the trainer's names.
        needs: of the engine, with the names by which others know its tensors.
    """
    wrong, number = [], 0
    for name, one in held.items():
        known = published.get(one.dtype, {})
        aliases = needs[name].aliases if name in needs else ()
        expected = next((known[each] for each in (name, *aliases) if each in known), None)
        if expected is None:
            continue
        number += 1
        if one.checksum & _MASK != expected:
            wrong.append(name)
    return wrong, number


class DeliveryCheck:
    """In a process with a generating engine: compares what it loaded with the trainer's record, before it draws.

    Used by the engine's thread. A mismatch ends the process, whose instance starts again; if one of its next versions
    does not match either, the run ends.
    """

    def __init__(self, context: WorkerContext, engine: GenerateEngine, sampling: SamplingConfig) -> None:
        config = context.config
        error = rounding_error(config, sampling.engine)
        self._interval = config.weightsync.proof_interval if error is not None else 0
        self._context, self._engine = context, engine
        # The trainer's log-probabilities are of the run's temperature.
        self._scorer: ScoringEngine | None = None
        if isinstance(engine, ScoringEngine) and sampling.temperature == config.rollout.temperature:
            self._scorer = engine
        # Logits are divided by the temperature, and so is their rounding.
        self._error = (error or 0.0) / (min(1.0, sampling.temperature) or 1.0)
        self._judges: list[ProbeJudge] = []
        self._store = context.sealed_store() if self._interval else None
        self._names: dict[str, list[str]] = {}
        self._last: tuple[Version, dict[str, dict[str, int]]] | None = None  # what was published before
        self._num_delivered = 0

    @property
    def _failed_key(self) -> str:
        return f"delivery/failed/{self._context.name}"

    def check_loaded(self, version: Version) -> None:
        """Compare the version that was just loaded; do nothing if it is not due.

        Raises:
            WeightsNotDelivered: the engine does not have it. WeightsNeverDelivered: nor had it before its restart.
        """
        if self._store is None:
            return
        if not self._store.check([_key(version)]):
            # An evaluator may load a version that is long past.
            logger.warning("weights of %s are not proven: the trainer has dropped its record of them", version)
            return
        record = msgpack_decoder(DeliveryRecord).decode(self._store.get(_key(version)))
        if not record.checksums:
            return
        with self._context.timeline.span("check delivery", version=version.step):
            self._compare(version, record)
        self._num_delivered += 1
        if self._num_delivered == _FORGIVEN_AFTER:
            self._store.delete_key(self._failed_key)

    def _compare(self, version: Version, record: DeliveryRecord) -> None:
        names = self._names_of(record.names)
        published = {dtype: dict(zip(names, sums, strict=True)) for dtype, sums in record.checksums.items()}
        held: Mapping[str, HeldChecksum] = {}
        if isinstance(self._engine, ChecksummedEngine):
            held = self._engine.weight_checksums()
        needs = self._engine.weight_needs()
        wrong, number = compare_checksums(held, published, needs)
        found_CA = None
        if self._scorer is not None and record.tokens:
            found_CA = self._scorer.prompt_log_probs(torch.tensor(record.tokens))
        complaints = [self._describe_tensors(wrong, held, needs, number)] if wrong else []
        if found_CA is not None:
            changed = have_changed(published, self._last and self._last[1])
            complaints += self._judge_probe(version, record.scores, found_CA, changed)
        if complaints:
            self._fail(version, "; ".join(complaints))
        self._last = version, published
        if not self._num_delivered:
            self._report(version, number, len(needs), record.scores, found_CA)

    def _names_of(self, key: str) -> list[str]:
        if key not in self._names:
            assert self._store is not None, "a record was read from it"
            self._names[key] = msgpack_decoder(list[str]).decode(self._store.get(key))
        return self._names[key]

    def _judge_probe(self, version: Version, expected_A: Tensor, found_CA: Tensor, changed: bool) -> list[str]:
        while len(self._judges) < len(found_CA):
            self._judges.append(ProbeJudge(self._error, adapter=self._context.config.sends_adapter))
        complaints = []
        for number, found_A in enumerate(found_CA):
            found = self._judges[number].find_complaint(version, expected_A, found_A, changed=changed)
            if found:
                complaints.append(found if len(found_CA) == 1 else f"copy {number + 1} of {len(found_CA)}: {found}")
        return complaints

    def _describe_tensors(
        self, wrong: Sequence[str], held: Mapping[str, HeldChecksum], needs: Mapping[str, Need], number: int
    ) -> str:
        text = f"{len(wrong)} of {number} tensors are not what the trainer published ({few_of(wrong)})"
        if self._last is not None:
            version, before = self._last
            differing, _ = compare_checksums({name: held[name] for name in wrong}, before, needs)
            if not differing:
                text += f"; {'it has' if len(wrong) == number else 'these are'} those of {version}"
        return text

    def _fail(self, version: Version, why: str) -> None:
        """Raise WeightsNotDelivered or, once more after a restart, WeightsNeverDelivered. No token was drawn yet."""
        assert self._store is not None, "a record was read from it"
        error: type[WeightsNotDelivered] = WeightsNotDelivered
        what_next = "no response drawn with them is trained; the instance starts again and loads the newest weights"
        if self._store.check([self._failed_key]):
            error = WeightsNeverDelivered
            what_next = (
                "as before it was started again; see what its engine does with new weights (docs/weightsync.md), or "
                "set weightsync.proof_interval to 0"
            )
        self._store.put(self._failed_key, str(version))
        raise error(f"weights of {version} were not delivered to {self._context.name}: {why}; {what_next}")

    def _report(
        self, version: Version, number: int, num_tensors: int, expected_A: Tensor, found_CA: Tensor | None
    ) -> None:
        """Log once what is proven for this engine; warn if nothing is."""
        numbers = "log-probabilities are not compared"
        if found_CA is not None:
            numbers = f"log-probabilities within {max(_rms(each - expected_A) for each in found_CA):.2g} nats"
        text = f"delivery of weights ({version}): {number} of {num_tensors} tensors by checksum, {numbers}"
        if number or found_CA is not None:
            logger.info("%s", text)
        else:
            self._context.warn_user(
                f"the engine of {self._context.name} has neither `weight_checksums` nor `prompt_log_probs`, so nothing "
                f"proves that it computes with the weights that it is sent (docs/weightsync.md)"
            )


def have_changed(published: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]] | None) -> bool:
    """Whether at least half of the tensors differ between two versions (element type -> checksums by name), in every
    element type; None: there is no version before."""
    return before is not None and all(
        2 * sum(checksum != before.get(dtype, {}).get(name) for name, checksum in sums.items()) >= len(sums)
        for dtype, sums in published.items()
    )

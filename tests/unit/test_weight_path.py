"""Which receiver an engine gets."""

from types import SimpleNamespace
from typing import Any

import pytest

from workers.engines import weight_path


class Engine:
    """Of several ranks, as vLLM's."""

    num_ranks = 2
    adopts_weights = False

    def weight_needs(self) -> dict[str, Any]:
        return {}

    def follow_weights(self, following: Any) -> None:
        """Not called here."""

    def hold(self, version: Any) -> bool:
        return True

    def load_held(self) -> None:
        """Not called here."""

    def receive_while_paused(self, version: Any, *, timeout_s: float) -> None:
        """Not called here."""

    def load_weights(self, weights: Any, *, adopt: bool) -> None:
        """Not called here."""


@pytest.mark.parametrize(
    ("path", "several", "expected"),
    [
        ("staged", True, ("ranks", "")),
        ("broadcast", True, ("ranks", "weights-0")),
        ("staged", False, ("process", "weights-0")),
    ],
)
def test_ranks_receive_by_themselves_on_both_paths(
    monkeypatch: pytest.MonkeyPatch, path: str, several: bool, expected: tuple[str, str]
) -> None:
    made: list[tuple[str, str]] = []

    def receiver(kind: str) -> Any:
        def open_one(*_: Any, lead: str, **named: Any) -> Any:
            made.append((kind, lead))
            return SimpleNamespace(adopts=False)

        return open_one

    monkeypatch.setattr(weight_path, "RanksReceiver", receiver("ranks"))
    monkeypatch.setattr(weight_path, "WeightReceiver", receiver("process"))
    monkeypatch.setattr(weight_path, "DeliveryCheck", lambda *_: SimpleNamespace(check_loaded=None))
    agent = SimpleNamespace(name="weights-0", parts={"node"})
    weightsync = SimpleNamespace(path=path, max_updating=None, timeout_s=1.0, dtype=None)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(
            weightsync=weightsync, rollout=SimpleNamespace(engine="vllm"), model=SimpleNamespace(dtype="float32")
        ),
        job=SimpleNamespace(of_role=lambda _: [agent]),
        job_credentials=lambda: None,
        name="rollout-0", node="node", run_dir=None, timeline=None, reading_device=None, shares_devices=False,
    )  # fmt: skip
    engine: Any = Engine() if several else SimpleNamespace(weight_needs=dict, adopts_weights=False, load_weights=print)
    weight_path.follow_policy(context, engine, arrived=lambda: None, loaded=lambda _: None)
    assert made == [expected]


@pytest.mark.parametrize(
    ("path", "named", "kind", "joins"),
    [
        ("broadcast", {}, "WeightReceiver", True),
        ("broadcast", {"whole": False}, "SharedReceiver", True),
        ("staged", {"whole": False}, "SharedReceiver", False),
        ("broadcast", {"whole": False, "wanted": bool, "least": list}, "SharedReceiver", True),
        ("broadcast", {"wanted": bool}, "WeightReceiver", False),
    ],
)
def test_ranks_that_share_a_model_join_broadcasts_together(
    monkeypatch: pytest.MonkeyPatch, path: str, named: dict[str, Any], kind: str, joins: bool
) -> None:
    made: list[tuple[str, Any, Any]] = []
    for name in ("WeightReceiver", "SharedReceiver"):

        def open_one(*_: Any, kind: str = name, member: Any, together: Any = (), **__: Any) -> None:
            made.append((kind, member, together))

        monkeypatch.setattr(weight_path, name, open_one)
    monkeypatch.setattr(weight_path, "BroadcastMember", lambda store, name, device: name)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(
            weightsync=SimpleNamespace(path=path, max_updating=None, timeout_s=1.0, dtype=None),
            model=SimpleNamespace(dtype="float32"),
        ),
        job=SimpleNamespace(of_role=lambda _: [SimpleNamespace(name="weights-0", parts={"node"})]),
        gang=SimpleNamespace(name="ref-1", num_ranks=2), name="ref-1/0", node="node", timeline=None, device=None,
        reading_device=None, job_credentials=lambda: None, new_store=lambda _: None,
    )  # fmt: skip
    weight_path.open_receiver(context, {}, adopts=False, purpose="reference", **named)
    ((found, member, together),) = made
    assert (found, member) == (kind, "ref-1/0-reference" if joins else None)
    assert list(together) == (["ref-1/0-reference", "ref-1/1-reference"] if kind == "SharedReceiver" else [])

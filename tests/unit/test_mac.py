"""Proofs of the job's secret: each is good for one purpose and one row of fields."""

from asyncflow.mac import Mac

SECRET = b"secret"


def test_proofs_differ_in_secret_purpose_fields_and_their_borders() -> None:
    proofs = [
        Mac(SECRET, "store").of(b"ab", b"c"),
        Mac(b"other", "store").of(b"ab", b"c"),
        Mac(SECRET, "launchers").of(b"ab", b"c"),
        Mac(SECRET, "store").of(b"ab", b"d"),
        Mac(SECRET, "store").of(b"a", b"bc"),
        Mac(SECRET, "store").of(b"abc"),
        Mac(SECRET, "store").of(b"ab", b"c", b""),
    ]
    assert len(set(proofs)) == len(proofs)
    assert not any(SECRET in proof for proof in proofs)


def test_proof_holds_for_its_own_fields_only() -> None:
    mac = Mac(SECRET, "store")
    assert mac.proves(mac.of(b"a", b"b"), b"a", b"b")
    for proof in (mac.of(b"a"), mac.of(b"a", b"b")[:-1], b""):
        assert not mac.proves(proof, b"a", b"b")

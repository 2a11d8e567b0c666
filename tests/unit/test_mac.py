"""Proofs of the job's secret: each is good for one purpose and one row of fields."""

from asyncflow.mac import Mac

SECRET = b"secret"


def test_proofs_differ_in_secret_purpose_fields_and_their_borders() -> None:
    proofs = [
        Mac(SECRET, "store").compute_proof(b"ab", b"c"),
        Mac(b"other", "store").compute_proof(b"ab", b"c"),
        Mac(SECRET, "launchers").compute_proof(b"ab", b"c"),
        Mac(SECRET, "store").compute_proof(b"ab", b"d"),
        Mac(SECRET, "store").compute_proof(b"a", b"bc"),
        Mac(SECRET, "store").compute_proof(b"abc"),
        Mac(SECRET, "store").compute_proof(b"ab", b"c", b""),
    ]
    assert len(set(proofs)) == len(proofs)
    assert not any(SECRET in proof for proof in proofs)


def test_proof_holds_for_its_own_fields_only() -> None:
    mac = Mac(SECRET, "store")
    assert mac.verify_proof(mac.compute_proof(b"a", b"b"), b"a", b"b")
    for proof in (mac.compute_proof(b"a"), mac.compute_proof(b"a", b"b")[:-1], b""):
        assert not mac.verify_proof(proof, b"a", b"b")

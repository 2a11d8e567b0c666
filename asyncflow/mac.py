"""Proofs of the job's secret: HMAC-SHA256, the only implementation for channels, the job store and launchers."""

import hashlib
import hmac

MAC_BYTES = hashlib.sha256().digest_size


class Mac:
    """Proofs for one purpose; proofs for another purpose fail here."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._key = hmac.digest(secret, purpose.encode(), "sha256")

    def compute_proof(self, *fields: bytes) -> bytes:
        # Lengths are included, so that bytes cannot move from one field to the next.
        message = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
        return hmac.digest(self._key, message, "sha256")

    def verify_proof(self, proof: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(proof, self.compute_proof(*fields))

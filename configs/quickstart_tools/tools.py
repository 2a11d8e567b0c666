"""The tool of the quickstart with tools (`rollout.tools`)."""


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return a * b

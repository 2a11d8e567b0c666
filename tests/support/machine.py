"""What this machine lacks, found by trying it: a program may be there and the libraries that it loads may not."""

import subprocess

NO_PROGRAM = (126, 127)
"""Exit codes of a program that could not be loaded, as the dynamic loader, shells and `env` have them."""


def obstacle(*command: str, remedy: str) -> str:
    """Run a harmless command once, such as `redis-server --version`.

    Returns:
        Why the program cannot run here, with the line that installs what is missing; "" if it runs.
    """
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return f"{command[0]} is not here ({error.strerror}): {remedy}"
    if tried.returncode in NO_PROGRAM:
        said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        return f"{command[0]} cannot run here ({said[-1]}): {remedy}"
    return ""

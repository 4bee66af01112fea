"""The one exception that means: the caller can mend this.

Everything a user can get wrong (a missing file, a misspelt key, a checkpoint of another model) is raised as
`InputError` with a message that names the thing, its value and what is allowed. The command line prints that message
alone and exits with code 2; any other exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the message names the file, line, key or value, what is allowed, and what to do."""

"""What `turbogr prepare` can be told: one keyword-only dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turbogr_plugin.errors import InputError

Format = Literal["kuairand", "recbole", "text", "parquet", "ml-100k"]

KUAIRAND_FEEDBACK = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view")
MIN_INTERACTIONS = 3
"""A user needs one interaction to train on, one for validation and one for the test."""


@dataclass(kw_only=True)
class PrepareConfig:
    """How interaction logs become a store. Rules apply in this order: feedback, dedup, k-core, three per user."""

    format: Format
    """Kind of the inputs. `ml-100k` is the copy of MovieLens-100K inside the installed recbole distribution."""

    inputs: list[str] = field(default_factory=list)
    """A folder, or files in their chronological order. Empty for ml-100k."""

    feedback: list[str] = field(default_factory=lambda: list(KUAIRAND_FEEDBACK))
    """kuairand: a row is kept when any of these columns is positive. Empty: this rule is off."""

    drop_hated: bool = True
    """kuairand: rows whose is_hate is positive are dropped, whatever the other columns say."""

    include_random: bool = False
    """kuairand, given a folder: read the random-exposure log too. Published figures are on the standard logs."""

    user_core: int = 5
    """Users with fewer rows are dropped, together with item_core until nothing changes. 1 turns it off."""

    item_core: int = 5
    """Items with fewer rows are dropped, together with user_core until nothing changes. 1 turns it off."""

    dedup: bool = False
    """Keep only the first of the rows that agree in user, item and time. They are counted in any case."""

    allow_negative_times: bool = False
    """Accept times before the epoch; else the first one is an error."""

    user_column: str | None = None
    """recbole, parquet, text with a header: name of the user column."""

    item_column: str | None = None
    """recbole, parquet, text with a header: name of the item column."""

    time_column: str | None = None
    """recbole, parquet, text with a header: name of the time column."""

    time_unit: Literal["auto", "s", "ms"] = "auto"
    """Unit of the times, recorded in the store. auto: ms for kuairand, s for the others."""

    memory_gb: float = 0.5
    """Memory limit of the sorting engine; what does not fit is spilled to disk beside the output. On top come about
    0.3 GB for a block of rows in work, and 30 bytes per item."""

    threads: int = 2
    """Threads of the sorting engine."""

    def __post_init__(self) -> None:
        if self.user_core < 1 or self.item_core < 1:
            raise InputError(
                f"user_core and item_core must be at least 1 (1 turns the rule off), got {self.user_core} and "
                f"{self.item_core}."
            )
        if self.memory_gb < 0.25:
            raise InputError(f"memory_gb must be at least 0.25, got {self.memory_gb}.")
        if self.threads < 1:
            raise InputError(f"threads must be at least 1, got {self.threads}.")
        if self.format == "ml-100k" and self.inputs:
            raise InputError(
                f"format ml-100k takes no inputs, got {self.inputs}: it reads the file of the installed recbole. "
                f"For another .inter file use format recbole."
            )
        if self.format != "ml-100k" and not self.inputs:
            raise InputError(f"format {self.format} needs inputs: a folder or a list of files.")
        if self.format != "kuairand" and (list(self.feedback) != list(KUAIRAND_FEEDBACK) or self.include_random):
            raise InputError(f"feedback and include_random belong to format kuairand, the format is {self.format}.")
        if self.format in ("kuairand", "ml-100k") and (self.user_column or self.item_column or self.time_column):
            raise InputError(
                f"user_column, item_column and time_column are for recbole, parquet and text; the columns of "
                f"{self.format} are fixed."
            )

"""Graph passes: one a file; pipeline.py holds their order, meta.py the keys of metadata."""

from __future__ import annotations

if __name__ != "autoshard.passes":
    raise ImportError(f"import this package as 'autoshard.passes', not {__name__!r}")

from autoshard.passes.base import (  # noqa: E402
    SILENT,
    Context,
    Pass,
    Report,
    Watch,
    local_value,
    module_path,
    user_line,
)
from autoshard.passes.bucket_gradients import BucketGradients  # noqa: E402
from autoshard.passes.bucket_parameters import BucketParameters  # noqa: E402
from autoshard.passes.bucketing import (  # noqa: E402
    ALL_REDUCE,
    COLLECTIVES,
    GATHERS,
    WAIT,
    aten,
    c10d,
    start_of,
    waits_of,
)
from autoshard.passes.canonicalize import Canonicalize  # noqa: E402
from autoshard.passes.data_parallel import DataParallel, PendingInput  # noqa: E402
from autoshard.passes.global_token_mean import GlobalTokenMean  # noqa: E402
from autoshard.passes.localize import Localize  # noqa: E402
from autoshard.passes.pipeline import (  # noqa: E402
    OPTIONAL,
    ORDER,
    PIPELINE,
    finish,
    prepare,
    rank_program,
    run_stage,
    specialize,
)

__all__ = [
    "ALL_REDUCE",
    "BucketGradients",
    "BucketParameters",
    "COLLECTIVES",
    "Canonicalize",
    "Context",
    "DataParallel",
    "GATHERS",
    "GlobalTokenMean",
    "Localize",
    "OPTIONAL",
    "ORDER",
    "PIPELINE",
    "Pass",
    "PendingInput",
    "Report",
    "SILENT",
    "WAIT",
    "Watch",
    "aten",
    "c10d",
    "finish",
    "local_value",
    "module_path",
    "prepare",
    "rank_program",
    "run_stage",
    "specialize",
    "start_of",
    "user_line",
    "waits_of",
]

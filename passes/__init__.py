"""Graph passes: one a file; pipeline.py holds their order."""

from __future__ import annotations

if __name__ != "autoshard.passes":
    raise ImportError(f"import this package as 'autoshard.passes', not {__name__!r}")

from autoshard.passes.base import (  # noqa: E402
    SILENT,
    Context,
    Report,
    Watch,
    module_path,
    user_line,
)
from autoshard.passes.bucket_gradients import (  # noqa: E402
    BucketGradients,
)
from autoshard.passes.bucket_parameters import (  # noqa: E402
    BucketParameters,
)
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
from autoshard.passes.data_parallel import (  # noqa: E402
    DataParallel,
    Waiting,
)
from autoshard.passes.localize import (  # noqa: E402
    Localize,
    local_value,
)
from autoshard.passes.normalize import (  # noqa: E402
    Normalize,
)
from autoshard.passes.pipeline import (  # noqa: E402
    BEFORE_COMPILATION,
    OPTIONAL,
    ORDER,
    finish,
    prepare,
    run_passes,
)
from autoshard.passes.weigh_tokens import (  # noqa: E402
    WeighTokens,
)

__all__ = [
    "ALL_REDUCE",
    "BEFORE_COMPILATION",
    "BucketGradients",
    "BucketParameters",
    "COLLECTIVES",
    "Context",
    "DataParallel",
    "GATHERS",
    "Localize",
    "Normalize",
    "OPTIONAL",
    "ORDER",
    "Report",
    "SILENT",
    "WAIT",
    "Waiting",
    "Watch",
    "WeighTokens",
    "aten",
    "c10d",
    "finish",
    "local_value",
    "module_path",
    "prepare",
    "run_passes",
    "start_of",
    "user_line",
    "waits_of",
]

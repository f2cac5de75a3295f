"""Pipeline parallelism at run time: schedules, transfers, and a stage at work."""

from autoshard.runtime.pipeline.channel import GroupChannel, ValueMeta
from autoshard.runtime.pipeline.execution import Loan, PipelineResult, RankPipeline
from autoshard.runtime.pipeline.schedules import (
    SCHEDULES,
    Action,
    Duration,
    ScheduleShape,
    Timeline,
    duration,
    is_possible,
    kept_at_once,
    most_kept,
    picture,
    timeline,
)
from autoshard.runtime.pipeline.stage import StageProgram
from autoshard.runtime.pipeline.step import Withheld, awaiting_gradients, beside_loss, step_loss

"""Schedules: learning rates and other options of parameter groups as the training goes on."""

from phaseloop.engine.schedules.batch_scale import ScaleWithBatch as ScaleWithBatch
from phaseloop.engine.schedules.curves import Build as Build
from phaseloop.engine.schedules.curves import composite as composite
from phaseloop.engine.schedules.curves import constant as constant
from phaseloop.engine.schedules.curves import cosine as cosine
from phaseloop.engine.schedules.curves import cosine_restarts as cosine_restarts
from phaseloop.engine.schedules.curves import exponential as exponential
from phaseloop.engine.schedules.curves import inverse_sqrt as inverse_sqrt
from phaseloop.engine.schedules.curves import linear as linear
from phaseloop.engine.schedules.curves import multi_step as multi_step
from phaseloop.engine.schedules.curves import polynomial as polynomial
from phaseloop.engine.schedules.curves import step as step
from phaseloop.engine.schedules.joined import Joined as Joined
from phaseloop.engine.schedules.rates import Rates as Rates
from phaseloop.engine.schedules.schedule import Schedule as Schedule
from phaseloop.engine.schedules.schedule import Warmup as Warmup
from phaseloop.engine.schedules.stretch import Stretch as Stretch
from phaseloop.engine.schedules.torch_schedule import TorchSchedule as TorchSchedule

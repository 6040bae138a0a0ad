"""What happened in runs, and what a program would do: `record` and `trace_plan`."""

from structgen.trace.plan import Plan, trace_plan
from structgen.trace.record import Trace, record

__all__ = ("Plan", "Trace", "record", "trace_plan")

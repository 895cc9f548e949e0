"""Rules and schedules are looked at each second, and their rate can be shortened by a factor."""

from ministack.services import eventbridge, scheduler

NEEDS = {
    "ministack.services.eventbridge": ("_SCHEDULER_TICK_INTERVAL", "_parse_rate_seconds"),
    "ministack.services.scheduler": ("_SCHEDULE_TICK_INTERVAL",),
}

_stock_parse = eventbridge._parse_rate_seconds


def apply(factor: float) -> None:
    """`rate(1 minute)` fires each 60 * factor seconds, at best each second."""
    tick_s = min(1.0, 10 * factor)
    eventbridge._SCHEDULER_TICK_INTERVAL = scheduler._SCHEDULE_TICK_INTERVAL = tick_s

    def parse(expression: str) -> float | None:
        seconds = _stock_parse(expression)
        return None if seconds is None else seconds * factor

    eventbridge._parse_rate_seconds = parse

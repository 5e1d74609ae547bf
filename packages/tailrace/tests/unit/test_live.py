"""The line that shows a run where there is no terminal."""

from tailrace_cli.demo.record import RunRecord, Step
from tailrace_cli.live import line, sparkline


def test_a_step_without_new_groups_shows_the_last_reward_known() -> None:
    record = RunRecord(stage="rl")
    record.rl_steps += [Step(1.0, 1, {"reward.mean": 0.25}, {}), Step(2.0, 2, {}, {})]
    assert "reward 0.250" in line(record)
    record.rl_steps.pop(0)
    assert "reward" not in line(record)


def test_bars_rise_with_values_and_never_leave_the_scale() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0], top=1.0) == "▁▅██"
    assert sparkline([0.0, 0.0]) == "▁▁"

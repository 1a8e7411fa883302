from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron01.cost.run_time import Task, Timeline


def test_tasks_share_a_resource_and_wait_for_each_other() -> None:
    line = Timeline()
    first = line.add("processor", 2.0)
    sent = line.add("link", 5.0, first)
    second = line.add("processor", 2.0, first)
    also_sent = line.add("link", 1.0, second)
    last = line.add("processor", 1.0, sent, also_sent)
    assert line.ends() == [2.0, 7.0, 4.0, 8.0, 9.0]
    assert last == 4 and line.seconds_on("processor") == 5.0 and line.seconds_on("inside") == 0.0


def test_what_is_first_goes_before_what_was_added_earlier() -> None:
    tasks = [
        Task("processor", 1.0),
        Task("processor", 1.0, (0,)),
        Task("processor", 1.0, (1,)),
        Task("processor", 1.0, (0,), priority=True),
    ]
    assert Timeline(tasks).ends() == [1.0, 3.0, 4.0, 2.0]


@given(st.data())
def test_no_task_begins_early_and_no_resource_is_idle_without_cause(data: st.DataObject) -> None:
    tasks = []
    for number in range(data.draw(st.integers(1, 12))):
        after = data.draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        seconds = float(data.draw(st.integers(0, 4)))
        tasks.append(Task(data.draw(st.sampled_from(("processor", "link"))), seconds, tuple(after)))
    ends = Timeline(tasks).ends()
    starts = [end - task.seconds for end, task in zip(ends, tasks, strict=True)]
    for task, begin in zip(tasks, starts, strict=True):
        ready = max((ends[earlier] for earlier in task.after), default=0.0)
        assert begin >= ready
        same = [(starts[i], ends[i]) for i, other in enumerate(tasks) if other.resource == task.resource]
        # from when it is ready to its begin, the resource is busy
        assert sum(min(end, begin) - max(start, ready) for start, end in same if end > ready and start < begin) >= (
            begin - ready
        )
    assert max(ends) <= sum(task.seconds for task in tasks)

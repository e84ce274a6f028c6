"""The scheduler on counts alone: budgets, order, preemption and progress."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid.serving.scheduler import Scheduler


@dataclass(eq=False)
class Job:
    """The counts of a request."""

    num_tokens: int
    num_held: int = 0
    num_passes: int = 0


def jobs_of(scheduler, *lengths):
    jobs = [Job(num_tokens=length) for length in lengths]
    for job in jobs:
        scheduler.add(job)
    return jobs


def run(schedule):
    """Do what the schedule says, as an engine does: free the preempted; hold the rows; sample where
    complete."""
    for job in schedule.preempted:
        job.num_held = 0
    for job, num_new in schedule.rows:
        job.num_held += num_new
        job.num_tokens += job.num_held == job.num_tokens


def test_decodes_come_first_and_prompts_are_cut_to_the_budget():
    scheduler = Scheduler(max_tokens=10, page_size=4)
    first, second, third = jobs_of(scheduler, 4, 20, 3)
    schedule = scheduler.schedule(free_slots=8, free_pages=100)
    assert schedule.rows == [(first, 4), (second, 6)]
    assert schedule.admitted == [first, second]
    run(schedule)
    schedule = scheduler.schedule(free_slots=6, free_pages=100)
    assert schedule.rows == [(first, 1), (second, 9)]
    run(schedule)
    schedule = scheduler.schedule(free_slots=6, free_pages=100)
    assert schedule.rows == [(first, 1), (second, 5), (third, 3)]


def test_admits_no_more_than_the_free_slots():
    scheduler = Scheduler(max_tokens=100, page_size=4)
    first, second, _ = jobs_of(scheduler, 4, 4, 4)
    assert scheduler.schedule(free_slots=2, free_pages=100).admitted == [first, second]
    assert scheduler.schedule(free_slots=0, free_pages=100).admitted == []


def test_admits_only_with_pages_for_the_whole_prompt_and_the_growth_of_the_others():
    scheduler = Scheduler(max_tokens=100, page_size=4)
    first, second = jobs_of(scheduler, 8, 8)
    assert scheduler.schedule(free_slots=9, free_pages=4).admitted == [first]
    run(scheduler.schedule(free_slots=8, free_pages=2))
    assert list(scheduler.waiting) == [second]
    first_only = scheduler.schedule(free_slots=8, free_pages=3)  # it decodes into a new page
    assert first_only.rows == [(first, 1)]
    assert scheduler.schedule(free_slots=8, free_pages=4).admitted == [second]


def test_the_latest_admitted_is_preempted_and_waits_at_the_head():
    scheduler = Scheduler(max_tokens=100, page_size=4)
    first, _, third = jobs_of(scheduler, 4, 4, 4)
    run(scheduler.schedule(free_slots=9, free_pages=100))
    (late,) = jobs_of(scheduler, 1)
    schedule = scheduler.schedule(free_slots=6, free_pages=0)
    assert schedule.preempted == [third]  # gives one page, which the first takes
    assert schedule.rows == [(first, 1)]  # the second has nobody after it and waits with its page
    assert list(scheduler.waiting) == [third, late]


def test_a_prompt_is_cut_to_the_pages_that_are_left():
    scheduler = Scheduler(max_tokens=6, page_size=4)
    (job,) = jobs_of(scheduler, 15)
    run(scheduler.schedule(free_slots=1, free_pages=4))
    schedule = scheduler.schedule(free_slots=0, free_pages=0)
    assert schedule.rows == [(job, 2)]
    run(schedule)
    assert scheduler.schedule(free_slots=0, free_pages=0).rows == []
    assert scheduler.schedule(free_slots=0, free_pages=1).rows == [(job, 4)]


def test_discard_finds_a_job_in_either_queue():
    scheduler = Scheduler(max_tokens=4, page_size=4)
    first, second = jobs_of(scheduler, 4, 4)
    scheduler.schedule(free_slots=9, free_pages=9)
    for job in (first, second, second):
        scheduler.discard(job)
    assert not scheduler.running
    assert not scheduler.waiting


def test_restart_keeps_the_order_of_arrival():
    scheduler = Scheduler(max_tokens=8, page_size=4)
    jobs = jobs_of(scheduler, 4, 4, 4)
    run(scheduler.schedule(free_slots=9, free_pages=9))
    scheduler.restart()
    assert list(scheduler.waiting) == jobs
    assert scheduler.running == []


def test_small_jobs_pass_one_that_waits_for_pages_a_bounded_number_of_times():
    scheduler = Scheduler(max_tokens=100, page_size=4, max_passes=2)
    running, big, *small = jobs_of(scheduler, 4, 80, 4, 4, 4)
    run(scheduler.schedule(free_slots=1, free_pages=20))
    schedule = scheduler.schedule(free_slots=8, free_pages=19)
    assert schedule.admitted == small[:2]
    assert list(scheduler.waiting) == [big, small[2]]
    run(schedule)
    assert scheduler.schedule(free_slots=6, free_pages=19).admitted == []
    for job in (running, *small[:2]):
        scheduler.discard(job)
    assert scheduler.schedule(free_slots=9, free_pages=22).admitted == [big, small[2]]


def test_to_choose_changes_nothing():
    """What is chosen again is the same, and to begin it is to schedule it."""
    made = []
    for _ in range(2):
        scheduler = Scheduler(max_tokens=100, page_size=4, max_passes=2)
        jobs = jobs_of(scheduler, 4, 80, 4, 4)
        run(scheduler.schedule(free_slots=1, free_pages=20))
        made.append((scheduler, jobs))
    (chosen, its_jobs), (scheduled, other_jobs) = made
    for free_pages in (19, 0, 30):  # one is passed; one is preempted; both are admitted
        sizes = {"free_slots": 8, "free_pages": free_pages}
        before = places(chosen, its_jobs)
        first, again = chosen.choose(**sizes), chosen.choose(**sizes)
        assert first == again
        assert places(chosen, its_jobs) == before
        chosen.begin(first)
        scheduled.schedule(**sizes)
        assert places(chosen, its_jobs) == places(scheduled, other_jobs) != before
        for scheduler in (chosen, scheduled):
            for job in scheduler.waiting:
                job.num_held = 0
            for job in scheduler.running:
                job.num_held = job.num_tokens
                job.num_tokens += 1


def places(scheduler, jobs):
    """Where each job is, and its counts."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    return [
        (queue.index(job), queue is running, job.num_tokens, job.num_held, job.num_passes)
        for job in jobs
        for queue in (running, waiting)
        if job in queue
    ]


def test_nobody_is_passed_where_slots_are_short():
    scheduler = Scheduler(max_tokens=100, page_size=4)
    jobs_of(scheduler, 80, 4)
    assert scheduler.schedule(free_slots=0, free_pages=3).admitted == []


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    page_size=st.integers(1, 5),
    num_slots=st.integers(1, 5),
    spare_pages=st.integers(0, 6),
    max_passes=st.integers(0, 3),
)
def test_every_job_ends_within_the_limits(
    lengths, max_tokens, page_size, num_slots, spare_pages, max_passes
):
    """Pools from just large enough for the longest job upwards; steps and passes are bounded."""

    def pages(num_tokens):
        return -(-num_tokens // page_size)

    num_pages = max(pages(prompt + new - 1) for prompt, new in lengths) + spare_pages
    scheduler = Scheduler(max_tokens=max_tokens, page_size=page_size, max_passes=max_passes)
    jobs = jobs_of(scheduler, *[prompt for prompt, _ in lengths])
    arrival = {job: at for at, job in enumerate(jobs)}
    passed_by = {job: set() for job in jobs}
    ends = {job: prompt + new for job, (prompt, new) in zip(jobs, lengths, strict=True)}
    for _ in range(sum(prompt + new for prompt, new in lengths) * (len(jobs) + 1)):
        used = sum(pages(job.num_held) for job in scheduler.running)
        num_running = len(scheduler.running)
        first = (scheduler.running or scheduler.waiting)[0]
        schedule = scheduler.schedule(
            free_slots=num_slots - num_running, free_pages=num_pages - used
        )
        rows = [job for job, _ in schedule.rows]
        assert len(set(rows)) == len(rows)
        assert first in rows, "the first job always gets on"
        assert sum(num_new for _, num_new in schedule.rows) <= max_tokens
        assert len(scheduler.running) <= num_slots
        assert all(job.num_held + new == job.num_tokens for job, new in schedule.rows[:-1])
        for job in scheduler.waiting:
            passed_by[job].update(new for new in schedule.admitted if arrival[new] > arrival[job])
        assert all(len(others) <= max_passes for others in passed_by.values())
        run(schedule)
        assert sum(pages(job.num_held) for job in scheduler.running) <= num_pages
        left = [job for job in jobs if ends[job]]
        assert sorted(scheduler.running + list(scheduler.waiting), key=arrival.get) == left
        if max_passes == 0:
            assert scheduler.running + list(scheduler.waiting) == left, "first come, first served"
        for job in rows:
            if job.num_tokens == ends[job]:
                scheduler.discard(job)
                ends[job] = 0
        if not any(ends.values()):
            return
    raise AssertionError("not every job ended")


def test_three_small_requests_do_not_wait_behind_one_for_pages():
    """Slots are free, and the big job waits until the first one ends."""
    scheduler = Scheduler(max_tokens=64, page_size=4)
    long, big, *small = jobs_of(scheduler, 100, 60, 4, 4, 4)
    ends = {long: 140, big: 70, **{job: 10 for job in small}}
    ended_at = {}
    for step in range(400):
        used = sum(-(-job.num_held // 4) for job in scheduler.running)
        run(scheduler.schedule(free_slots=8 - len(scheduler.running), free_pages=36 - used))
        for job in list(scheduler.running):
            if job.num_tokens == ends[job]:
                scheduler.discard(job)
                ended_at[job] = step
    assert all(ended_at[job] < 10 for job in small)
    assert ended_at[long] < ended_at[big] < 200
